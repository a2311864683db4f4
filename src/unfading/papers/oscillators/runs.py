"""Runs of coRNN's, UnICORNN's and LEM's tables: the settings of the authors' code.

Adam, a linear readout of the last state, cross entropy; the epoch with the best validation score is tested. The rate falls to a
tenth once. coRNN is not clipped, nor is UnICORNN; LEM is clipped on pixel and permuted MNIST. Bytes of images are scaled to
[0, 1], and the noise after a CIFAR image is one draw for all images (`fixed_noise`). The permutations are the authors'; which
3,000 of the MNIST images (coRNN: 3,000 of CIFAR, UnICORNN and LEM: 2,000) are for validation is ours, as is the draw of the
noise.

The cells start as in the authors' code. Three things differ. Their classifiers of UnICORNN and LEM start from a normal
distribution with variance 2 / H, ours is that of torch.nn.Linear. Their LEM has two biases in each sum with a state, ours has
one. They keep an incomplete last batch of an epoch, we drop it.
"""

from typing import Any

from unfading.training.run import Run

Options = dict[str, Any]

MNIST_VALIDATION, MNIST_TRAINING = 3_000, 57_000
CIFAR_VALIDATION = {"CoRNN": 3_000, "UnICORNN": 2_000, "LEM": 2_000}
PERMUTATION = {"CoRNN": "cornn", "UnICORNN": "lem", "LEM": "lem"}


def pixels(cell: str, cell_options: Options, *, batch: int, decay: int, **own: Any) -> Run:
    """Pixel MNIST; the rate falls to a tenth after `decay` epochs."""
    return _images(cell, cell_options, "pixel_mnist", {"validation": MNIST_VALIDATION}, MNIST_TRAINING, batch, decay, own)


def permuted(cell: str, cell_options: Options, *, batch: int, decay: int, **own: Any) -> Run:
    """Permuted MNIST, in the authors' order of the pixels."""
    options = {"permutation": PERMUTATION[cell], "validation": MNIST_VALIDATION}
    return _images(cell, cell_options, "permuted_mnist", options, MNIST_TRAINING, batch, decay, own)


def noisy(cell: str, cell_options: Options, *, batch: int, decay: int, **own: Any) -> Run:
    """Noisy CIFAR, with the same noise after every image."""
    held_out = CIFAR_VALIDATION[cell]
    options = {"scale": "unit", "fixed_noise": True, "validation": held_out}
    return _images(cell, cell_options, "noisy_cifar", options, 50_000 - held_out, batch, decay, own)


def _images(
    cell: str, cell_options: Options, task: str, task_options: Options, rows: int, batch: int, decay: int, own: Options
) -> Run:
    """A run on images; `rows` is the number of training rows, which gives the steps of an epoch."""
    schedule = {"every": decay * (rows // batch), "gamma": 0.1, "times": 1}
    fields: Options = {"clip_norm": None, "epochs": 120, "schedule": "step", "schedule_options": schedule, **own}
    return Run(task=task, task_options=task_options, cell=cell, cell_options=cell_options, batch=batch, **fields)
