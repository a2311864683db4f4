"""Chandar et al. 2019 (NRU): figures 1 to 5 and 8, as curves over training steps.

Cells that solve a task in the paper: on copying EURNN first, then NRU, then JANET after two to three times as many updates,
while RNN-orth and RNN-id "get stuck at baseline performance"; on variable copying NRU first, while EURNN "performs poorly"; on
denoising all but EURNN. Poor performance is the claim that the task is not solved, not that nothing is learnt.
"""

from typing import Any

from unfading.papers.nru.runs import CELLS, TOP3, pixels
from unfading.papers.nru.tables import TIE, recalled, stuck, table3
from unfading.papers.row import Curves, Row
from unfading.report.figures.curve_figures import over_steps, to_solve

CAPTION = (
    "Validation cross entropy on fresh sequences over training steps. A thin line is one seed, a thick line the median over "
    "seeds, the dashed line a guess without memory. Cells of about 23,500 parameters, batch 10, Adam 1e-3."
)


def _rows(task: str, T: int, solved: tuple[str, ...], unsolved: tuple[str, ...], guessing: tuple[str, ...] = ()) -> list[Row]:
    claims = dict.fromkeys(solved, True) | dict.fromkeys(unsolved, False)
    return [
        stuck(cell, task, T) if cell in guessing else recalled(cell, task, T, solved=claims.get(cell)) for cell in CELLS
    ]  # fmt: skip


def fig1() -> Curves:
    """Copying, T = 100 and 200, ten cells."""
    solved, guessing = ("EURNN", "NRU", "JANET"), ("RNN-orth", "RNN-id")
    rows = [row for T in (100, 200) for row in _rows("copying", T, solved, (), guessing)]
    return Curves("NRU Fig. 1: copying (T = 100, 200)", CAPTION, rows, over_steps)


def fig2() -> Curves:
    """Variable copying, T = 100 and 200, ten cells."""
    rows = [row for T in (100, 200) for row in _rows("variable_copying", T, ("NRU", "JANET"), ("EURNN",))]
    return Curves("NRU Fig. 2: copying over a variable lag (T = 100, 200)", CAPTION, rows, over_steps)


def fig3() -> Curves:
    """Steps to converge of NRU, JANET and LSTM-chrono on four copying tasks."""
    rows = [
        recalled(cell, task, T, solved=True)
        for task in ("copying", "variable_copying")
        for T in (100, 200)
        for cell in TOP3
    ]  # fmt: skip
    caption = "Training steps until the validation cross entropy is a tenth of a guess's: a dot a seed, a bar at the median."
    return Curves("NRU Fig. 3: steps to converge", caption, rows, to_solve)


def fig4() -> Curves:
    """Denoising, T = 100, ten cells."""
    solved = tuple(cell for cell in CELLS if cell != "EURNN")
    return Curves("NRU Fig. 4: denoising (T = 100)", CAPTION, _rows("denoising", 100, solved, ("EURNN",)), over_steps)


def fig5() -> Curves:
    """psMNIST: validation accuracy over training, ten cells."""
    caption = (
        "Validation accuracy over training steps; cells of about 165,000 parameters (EURNN 17,418), batch 100, 100 epochs."
    )
    return Curves("NRU Fig. 5: psMNIST", caption, table3(), over_steps)


def fig8() -> Curves:
    """psMNIST, 40 epochs: heads, memory and hidden size, one varied at a time."""
    base: dict[str, int] = {"heads": 4, "memory_size": 256, "hidden": 200}
    varied = {"heads": (1, 4, 9, 16), "memory_size": (100, 256, 400), "hidden": (50, 100, 200, 300)}
    rows = []
    for name, values in varied.items():
        for value in values:
            setting = {**base, name: value}
            own: dict[str, Any] = {"hidden": setting.pop("hidden"), "options": setting}
            note = "the paper: more heads help up to 4 or 9, a larger memory is slower at first, small hidden sizes do harm"
            rows.append(Row(pixels("NRU", epochs=40, **own), None, TIE, note, name=f"psMNIST NRU {name} {value}", seeds=1))
    caption = "Validation accuracy over training steps of NRU with m = 256, k = 4, h = 200, and one of the three varied."
    return Curves("NRU Fig. 8: heads, memory, hidden size on psMNIST", caption, rows, over_steps)
