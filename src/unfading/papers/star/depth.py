"""Turkoglu et al. 2019 (STAR): how deep a network of each cell can be, in short runs and on a substitute.

The claim of the paper is that STAR can be trained in stacks in which other cells fail. Whether a network trains shows within a
few epochs, so `does_it_train` asks it of more depths than Table 3 has, with three seeds. The TUM crops are not public:
`crops_substitute` asks for the ordering of the cells over depth on another dataset of crops. The gestures need a registration:
`moving_mnist` asks for the ordering of the convolutional cells over depth on digits that move.

The deepest networks come first: they take longest, and a GPU would train them alone at the end.
"""

from collections.abc import Mapping

from unfading.papers.row import Curves, Row
from unfading.papers.star.runs import CELLS, CONVOLUTIONAL, PIXELS, frame_stack, stack
from unfading.papers.star.tables import FAILED, JESTER, MNIST, PER_SEASON, PMNIST, TASKS
from unfading.report.figures.curve_figures import over_layers

DEPTHS = (20, 16, 14, 12, 8, 4, 2, 1)
EPOCHS = 5
# On UCR Crop: about 6,900 steps of 46 dates.
CROP_DEPTHS, CROP_EPOCHS, CROP_BATCH, CROP_DATES = (16, 12, 8, 4, 2, 1), 60, 50, 46
# On moving digits: one pass over the training images, 1,500 steps of 16 frames of 32 x 32.
MOVING_DEPTHS, MOVING_BATCH, MOVING_CHANNELS, MOVING_RATES = (12, 8, 4, 2, 1), 32, 16, (1e-3, 3e-3)
MOVING, MOVING_OPTIONS = "moving_mnist_direction", {"T": 16}


def does_it_train() -> Curves:
    """Pixel and permuted MNIST, 1 to 20 layers, five epochs, three seeds: does a network train at all?"""
    rows = []
    for place, scores in (("MNIST", MNIST), ("pMNIST", PMNIST)):
        for depth in DEPTHS:
            for i, cell in enumerate(CELLS):
                run = stack(cell, depth, TASKS[place], PIXELS, epochs=EPOCHS)
                rows.append(Row(run, None, 0.0, _paper(place, scores, depth, i), name=f"{place} {cell}, {depth} layers"))
    return Curves(
        "STAR: does a network of this depth train?",
        f"Test accuracy after {EPOCHS} epochs, a dot a seed, a line through the means over all seeds, dashed a guess. A "
        "network trains if it is a tenth better than a guess. RHN: one network of this recurrence depth.",
        rows,
        over_layers,
    )


def crops_substitute() -> Curves:
    """UCR Crop in place of the TUM crops, one answer for the season, over depth: the ordering of the cells alone."""
    rows = []
    for depth in CROP_DEPTHS:
        for i, cell in enumerate(CELLS):
            options = {"batch": CROP_BATCH, "epochs": CROP_EPOCHS}
            run = stack(cell, depth, "ucr", {"name": "Crop"}, lag=CROP_DATES, **options)
            note = f"a substitute, to be compared with other rows and not with the {PER_SEASON[depth][i]} % of TUM"
            rows.append(Row(run, None, 0.0, note, name=f"UCR Crop {cell}, {depth} layers"))
    return Curves(
        "STAR: accuracy over depth on UCR Crop, a substitute for Table 4 per season",
        f"Test accuracy on 24 crops from {CROP_DATES} satellite images, a dot a seed, a line through the means over all seeds, "
        "dashed a guess. The paper's crops are not public. Only the ordering of cells and depths can be compared.",
        rows,
        over_layers,
    )


def moving_mnist() -> Curves:
    """The direction of moving digits in place of gestures, convolutional cells over depth: the ordering of the cells alone."""
    rows = []
    for depth in MOVING_DEPTHS:
        for i, cell in enumerate(CONVOLUTIONAL):
            options = {"hidden": MOVING_CHANNELS, "batch": MOVING_BATCH, "epochs": 1, "valid_every": 250}
            note = f"a substitute, to be compared with other rows and not with the {JESTER[depth][i]} % of gestures"
            name = f"moving MNIST {cell}, {depth} layers"
            rows.append(
                Row(frame_stack(cell, depth, MOVING, MOVING_OPTIONS, **options), None, 0.0, note, name=name, rates=MOVING_RATES)
            )
    return Curves(
        "STAR: accuracy over depth on moving digits, a substitute for Table 5",
        "Test accuracy for the direction, one of eight, in which two digits move through 16 frames of 32 x 32, after one pass "
        f"over the training digits: convolutional cells of {MOVING_CHANNELS} channels, Adam, a rate chosen by validation. A "
        "dot a seed, a line through the means over all seeds, dashed a guess. Only the ordering of cells and depths can be "
        "compared with the paper.",
        rows,
        over_layers,
    )


def _paper(place: str, scores: Mapping[int, tuple[float, ...]], depth: int, cell: int) -> str:
    """What the paper says of this network after 100 epochs."""
    if depth not in scores:
        return f"{EPOCHS} epochs; the paper's tables do not have this depth"
    score = scores[depth][cell]
    return f"{EPOCHS} epochs; in the paper it {'does not train' if score < FAILED[place] else f'comes to {score} % in 100'}"
