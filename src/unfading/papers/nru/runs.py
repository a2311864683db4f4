"""Runs of NRU's tables and figures: ten cells of about equal size, as the authors' settings files have them.

Adam 1e-3, clipped at norm 1 except EURNN and GORU; copying and denoising: batch 10, 200,000 steps, about 23.5k parameters;
psMNIST: batch 100, 100 epochs, about 165k; characters: batch 128, 20 epochs, about 2.15M. On copying with a fixed lag NRU is
trained with AMSGrad and clipped at norm 0.5. NRU is the authors' released form (heads without x_t, mean over heads), which has
the printed number of parameters; LSTM has peepholes, RNN-orth and RNN-id have layer norm, JANET has beta = 0. Chrono lags:
T + 20, T + 11, 785, 50. The sizes of EURNN and GORU are not stated for all tasks: ours are powers of two near the printed
counts.
"""

from typing import Any

from unfading.training.run import Run

Options = dict[str, Any]

RELEASED: Options = {"heads_see_input": False, "mean_over_heads": True, "heads": 4}
SCALES = [0.0, 0.5, 0.9, 0.99, 0.999]
CELLS = ("RNN-orth", "RNN-id", "LSTM", "LSTM-chrono", "GRU", "JANET", "SRU", "EURNN", "GORU", "NRU")
TOP3 = ("NRU", "JANET", "LSTM-chrono")
# Units of each cell on recall tasks, psMNIST and characters.
UNITS = {
    "RNN-orth": (143, 400, 1000), "RNN-id": (143, 400, 1000), "LSTM": (70, 200, 630), "LSTM-chrono": (70, 200, 630),
    "GRU": (82, 232, 750), "JANET": (101, 283, 930), "SRU": (60, 150, 600), "EURNN": (1024, 1024, 2048),
    "GORU": (128, 256, 512), "NRU": (80, 212, 1000),
}  # fmt: skip
# Parameters of the whole model on recall tasks and psMNIST, where the settings files state them.
COUNTS = {
    "RNN-orth": (23_604, 165_610), "RNN-id": (23_604, 165_610), "LSTM": (23_529, 164_210), "LSTM-chrono": (23_529, 164_210),
    "GRU": (23_625, 165_194), "JANET": (23_542, 164_150), "SRU": (23_010, 164_770), "NRU": (23_569, 165_554),
}  # fmt: skip
RECALL, PIXELS, CHARACTERS = range(3)
# The authors' character vectors start normal with deviation 1 (nn.Embedding); those of the task are ten times smaller.
AUTHORS_VECTORS: Options = {"embedding_std": 1.0}
PAPER_STEPS = 200_000  # of recall tasks


def run(cell: str, kind: int, task: str, task_options: Options, *, lag: int, **own: Any) -> Run:
    """A cell of the paper on a task.

    `kind` is RECALL, PIXELS or CHARACTERS; `own` holds fields of the run, and `options` of the cell.
    """
    more: Options = own.pop("options", {})
    name, options = _cell(cell, kind, lag)
    fields: Options = {"rate": 1e-3, "clip_norm": None if cell in ("EURNN", "GORU") else 1.0, **own}
    hidden = fields.pop("hidden", UNITS[cell][kind])
    return Run(task=task, task_options=task_options, cell=name, cell_options={**options, **more}, hidden=hidden, **fields)


def recall(cell: str, task: str, T: int, *, steps: int = PAPER_STEPS, **own: Any) -> Run:
    """Copying, variable copying, denoising or random labels."""
    lag = T + 11 if task == "denoising" else T + 20
    if cell == "NRU" and task == "copying":
        own = {"optimiser": "amsgrad", "clip_norm": 0.5, **own}
    options = {"T": T, **own.pop("task_options", {})}
    return run(cell, RECALL, task, options, lag=lag, batch=10, steps=steps, **own)


def pixels(cell: str, *, epochs: int = 100, **own: Any) -> Run:
    """psMNIST: 785 steps, the authors' permutation and validation rows."""
    task_options = {"permutation": "nru", "validation": "nru", "extra_step": True}
    return run(cell, PIXELS, "permuted_mnist", task_options, lag=785, batch=100, epochs=epochs, **own)


def characters(cell: str, *, lag: int = 50, **own: Any) -> Run:
    """Penn Treebank by characters, cut every 150 steps."""
    clip = {} if cell == "NRU" or cell in ("EURNN", "GORU") else {"clip_norm": 5.0}
    task_options = own.pop("task_options", {})
    return run(cell, CHARACTERS, "ptb_characters", task_options, lag=lag, batch=128, epochs=20, **{**clip, **own})


def _cell(cell: str, kind: int, lag: int) -> tuple[str, Options]:
    if cell == "NRU":
        memory = (64, 256, 576)[kind]
        return "NRU", {**RELEASED, "memory_size": memory, **({"relu_heads": True} if kind == CHARACTERS else {})}
    if cell == "SRU":
        statistics, summary = ((55, 16), (155, 50), (300, 100))[kind]
        return "StatisticalRNN", {"statistics": statistics, "summary_size": summary, "scales": SCALES}
    known: dict[str, tuple[str, Options]] = {
        "RNN-orth": ("OrthogonalRNN", {"normalise": True}),
        "RNN-id": ("IdentityRNN", {"normalise": True}),
        "LSTM": ("PeepholeLSTM", {}),
        "LSTM-chrono": ("PeepholeLSTM", {"max_lag": lag}),
        "JANET": ("JANET", {"beta": 0.0, "max_lag": lag}),
    }
    return known.get(cell, (cell, {}))
