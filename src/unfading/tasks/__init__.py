"""Tasks own data, loss and metrics, and say what reads the recurrent output; they never know a model."""

from unfading.tasks.images import Digits, NoisyCIFAR, NoisyMNIST, PermutedMNIST, PixelMNIST
from unfading.tasks.synthetic import Adding, Copying, Denoising, RandomLabels, VariableCopying

# One line per task; a test names the missing one.
__all__ = [
    "Adding",
    "Copying",
    "Denoising",
    "Digits",
    "NoisyCIFAR",
    "NoisyMNIST",
    "PermutedMNIST",
    "PixelMNIST",
    "RandomLabels",
    "VariableCopying",
]
