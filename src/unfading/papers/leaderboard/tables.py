"""The leaderboard: one item per task, one row per cell and number of parameters. No row has a published number.

All cells of a task have the same terms: about SIZES parameters in the recurrent stack, Adam, batch 128, clipped at norm 1,
cosine decay to 0, at most three returns to the best weights when a loss is not finite, three learning rates of which validation
chooses one, then five seeds; the weights with the best validation score are tested. Options of a cell are at their defaults,
except those that depend on the length T of a sequence: chrono biases, the window of LMU, and the step sizes of the incremental
cells, 2 / T. NRU is its authors' released form with a memory of 36, which leaves units to the smaller size. Cells without a
recurrent matrix mix their units between layers alone and have three layers, the others one. Training is short, 10 epochs on
images: the authors' own settings, which are longer, are rows of the papers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from unfading.papers.incremental.runs import baseline
from unfading.papers.nru.runs import RELEASED
from unfading.papers.row import Row
from unfading.training.run import Run

SIZES = {"10k": 10_000, "70k": 70_000}
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = 5
Options = dict[str, Any]

# The options of each cell that depend on the length T of a sequence.
CELLS: dict[str, Callable[[int], Options]] = {
    "Elman": lambda T: {},
    "LSTM": lambda T: {"max_lag": T},
    "GRU": lambda T: {},
    "JANET": lambda T: {"max_lag": T},
    "STAR": lambda T: {"max_lag": T},
    "SLSTM": lambda T: {},
    "FastGRNN": lambda T: {},
    "MinGRU": lambda T: {},
    "IndRNN": lambda T: {"max_lag": T},
    "NRU": lambda T: {**RELEASED, "memory_size": 36},
    "LMU": lambda T: {"theta": float(T)},
    "AntisymmetricRNN": lambda T: {},
    "LipschitzRNN": lambda T: {},
    "ExpRNN": lambda T: {},
    "CoRNN": lambda T: {},
    "UnICORNN": lambda T: {},
    "LEM": lambda T: {},
    "IncrementalRNN": lambda T: {"inner_steps": 1, "steps": T, "eta": 2 / T},
    "StableIncrementalRNN": lambda T: {"steps": T, "eta": 2 / T},
}
WITHOUT_MATRIX = ("MinGRU", "IndRNN", "UnICORNN")
# Units per layer by the features of a step, for each of SIZES: those that come nearest to the number of parameters.
UNITS = {
    "Elman": {1: (99, 264), 96: (63, 220), 9: (95, 260), 2: (99, 263), 10: (95, 259)},
    "LSTM": {1: (49, 131), 96: (21, 92), 9: (45, 127), 2: (49, 131), 10: (45, 127)},
    "GRU": {1: (57, 152), 96: (27, 112), 9: (53, 148), 2: (56, 151), 10: (52, 147)},
    "JANET": {1: (70, 186), 96: (37, 145), 9: (66, 182), 2: (69, 186), 10: (65, 182)},
    "STAR": {1: (98, 263), 96: (42, 185), 9: (90, 255), 2: (97, 262), 10: (90, 254)},
    "SLSTM": {1: (49, 131), 96: (21, 92), 9: (45, 127), 2: (49, 131), 10: (45, 127)},
    "FastGRNN": {1: (98, 263), 96: (62, 220), 9: (95, 259), 2: (98, 263), 10: (94, 259)},
    "MinGRU": {1: (49, 131), 96: (31, 110), 9: (47, 129), 2: (49, 131), 10: (47, 129)},
    "IndRNN": {1: (69, 185), 96: (50, 163), 9: (67, 183), 2: (69, 185), 10: (67, 183)},
    "NRU": {1: (54, 218), 96: (35, 183), 9: (52, 215), 2: (53, 217), 10: (51, 214)},
    "LMU": {1: (84, 248), 96: (54, 207), 9: (81, 244), 2: (83, 247), 10: (80, 243)},
    "AntisymmetricRNN": {1: (140, 373), 96: (75, 290), 9: (132, 365), 2: (139, 372), 10: (131, 364)},
    "LipschitzRNN": {1: (70, 187), 96: (51, 164), 9: (68, 185), 2: (70, 186), 10: (68, 184)},
    "ExpRNN": {1: (140, 373), 96: (75, 290), 9: (132, 365), 2: (139, 372), 10: (131, 364)},
    "CoRNN": {1: (70, 187), 96: (51, 164), 9: (68, 185), 2: (70, 186), 10: (68, 184)},
    "UnICORNN": {1: (68, 185), 96: (49, 163), 9: (66, 183), 2: (68, 184), 10: (66, 182)},
    "LEM": {1: (49, 131), 96: (21, 92), 9: (45, 127), 2: (49, 131), 10: (45, 127)},
    "IncrementalRNN": {1: (185, 520), 96: (77, 365), 9: (177, 506), 2: (184, 519), 10: (176, 505)},
    "StableIncrementalRNN": {1: (209, 597), 96: (80, 400), 9: (201, 577), 2: (208, 593), 10: (196, 577)},
}


class LeaderboardTask(NamedTuple):
    """A task of the leaderboard."""

    label: str
    name: str
    options: Options
    T: int  # steps of a sequence
    inputs: int  # features of a step
    length: Options  # of training
    unit: str = "%"


def permuted_mnist() -> list[Row]:
    """Permuted MNIST at equal numbers of parameters."""
    return _rows(LeaderboardTask("permuted MNIST", "permuted_mnist", {}, 784, 1, {"epochs": 10}))


def pixel_mnist() -> list[Row]:
    """Pixel MNIST at equal numbers of parameters."""
    return _rows(LeaderboardTask("pixel MNIST", "pixel_mnist", {}, 784, 1, {"epochs": 10}))


def noisy_cifar() -> list[Row]:
    """Noisy CIFAR, fresh noise for every image, at equal numbers of parameters."""
    return _rows(LeaderboardTask("noisy CIFAR", "noisy_cifar", {}, 1000, 96, {"epochs": 10}))


def har2() -> list[Row]:
    """HAR-2 at equal numbers of parameters."""
    return _rows(LeaderboardTask("HAR-2", "har2", {"validation": "fifth"}, 128, 9, {"epochs": 30}))


def adding() -> list[Row]:
    """Adding, T = 1,000, at equal numbers of parameters."""
    return _rows(LeaderboardTask("adding 1,000", "adding", {"T": 1_000}, 1_000, 2, {"steps": 5_000}, "error"))


def copying() -> list[Row]:
    """Copying, T = 200, at equal numbers of parameters."""
    return _rows(LeaderboardTask("copying 200", "copying", {"T": 200}, 220, 10, {"steps": 10_000}, "error"))


def _rows(task: LeaderboardTask) -> list[Row]:
    rows = []
    for size in SIZES:
        for cell in CELLS:
            run = _run(task, cell, size)
            note = f"{run.layers} x {run.hidden} units" if run.layers > 1 else f"{run.hidden} units"
            own: Options = {"unit": task.unit, "rates": RATES, "seeds": SEEDS}
            rows.append(Row(run, None, 0.0, note, name=f"{task.label} {cell}, {size}", **own))
    return rows


def _run(task: LeaderboardTask, cell: str, size: str) -> Run:
    options, layers = CELLS[cell](task.T), 3 if cell in WITHOUT_MATRIX else 1
    rates = {"rates": {"eta": 0.1}} if "eta" in options else {}
    hidden = UNITS[cell][task.inputs][list(SIZES).index(size)]
    return baseline(cell, task.name, task.options, options, hidden=hidden, layers=layers, **rates, **task.length)
