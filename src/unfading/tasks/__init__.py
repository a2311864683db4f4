"""Tasks: each owns its data, loss, metrics and output head, and is independent of the model."""

from unfading.tasks.crops import TUMCrops
from unfading.tasks.gestures import Jester
from unfading.tasks.images import Digits, NoisyCIFAR, NoisyMNIST, PermutedMNIST, PixelMNIST
from unfading.tasks.moving_digits import MovingMNIST, MovingMNISTDirection
from unfading.tasks.reviews import Yelp5
from unfading.tasks.sensors import DSA19, HAR2, HAR6
from unfading.tasks.speech import Google12, Google30
from unfading.tasks.synthetic import Adding, Copying, Denoising, RandomLabels, VariableCopying
from unfading.tasks.text import PTBCharacters, PTBWords
from unfading.tasks.ucr import UCR

# One line per task; a test names the missing one.
__all__ = [
    "Adding",
    "Copying",
    "DSA19",
    "Denoising",
    "Digits",
    "Google12",
    "Google30",
    "HAR2",
    "HAR6",
    "Jester",
    "MovingMNIST",
    "MovingMNISTDirection",
    "NoisyCIFAR",
    "NoisyMNIST",
    "PTBCharacters",
    "PTBWords",
    "PermutedMNIST",
    "PixelMNIST",
    "RandomLabels",
    "TUMCrops",
    "UCR",
    "VariableCopying",
    "Yelp5",
]
