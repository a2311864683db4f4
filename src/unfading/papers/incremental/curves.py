"""Kag, Zhang & Saligrama 2020: figures 3, 4 and 5, the adding and the copying problem, as curves over training steps.

To learn at all, the paper's form needs steps eta K T near 10 at the start (larger ones overflow), a learning rate for eta that
is a tenth of the others', and a return to the best weights at half the rate when a loss is not finite (`retries`). "Solved"
means a mean squared error of at most 0.01, or a cross entropy of at most a tenth of a guess's, on fresh data. Runs of the
copying problem stop early, at half of that.
"""

import math
from dataclasses import replace
from typing import Any

from unfading.papers.incremental.runs import STABLE_RATES, baseline, incremental, stable
from unfading.papers.row import Curves, Row
from unfading.report.figures.curve_figures import over_steps
from unfading.training.run import Run

SEEDS = 5
RATES = (1e-3, 3e-3, 1e-2)
ADDING_STEPS, COPYING_STEPS = 2_000, 20_000
# The share of seeds that must solve the adding problem of this length, for the paper's cell and for our stable form.
NEEDED = {100: (1.0, 1.0), 200: (1.0, 1.0), 400: (0.8, 1.0), 750: (0.6, 1.0)}
CAPTION = (
    "Validation error on fresh sequences while {cells} are trained ({units} units, Adam, batch 128, clipped at norm 1). A thin "
    "line is one seed, a thick line the median over seeds, the dashed line a guess without memory."
)


def start(T: int, K: int) -> float:
    """Initial eta: the published one up to K T = 1,000, beyond that 4 / (K T)."""
    return 0.01 if K * T <= 1_000 else round(4 / (K * T), 5)


def _paper(task: str, T: int, K: int, steps: int, **own: Any) -> Run:
    length = T + 20 if task == "copying" else T
    fields: dict[str, Any] = {"steps": steps, "rate": 6e-3 if K * T <= 1_000 else 4e-3, "schedule": "constant"}
    return incremental(task, {"T": T}, T=length, K=K, rank=16, **{**fields, "eta": start(T, K), **own})


def _ours(task: str, T: int, K: int, steps: int) -> Run:
    length = T + 20 if task == "copying" else T
    eta = min(0.01, round(2 / (K * T), 5))
    fields: dict[str, Any] = {"steps": steps, "rate": 4e-3 if K > 1 else 8e-3, "schedule": "constant"}
    return stable(task, {"T": T}, T=length, K=K, rank=8, eta=eta, **fields)


def _others(task: str, T: int, steps: int) -> dict[str, Run]:
    cells: dict[str, tuple[str, dict[str, Any]]] = {
        "RNN": ("Elman", {}), "LSTM": ("LSTM", {"max_lag": T}), "Antisymmetric": ("AntisymmetricRNN", {}),
        "FastRNN": ("FastRNN", {"activation": "relu"}),
    }  # fmt: skip
    return {
        name: baseline(cell, task, {"T": T}, options, steps=steps, schedule="constant")
        for name, (cell, options) in cells.items()
    }


def _adding(T: int, K: int = 5) -> list[Row]:
    paper, ours = NEEDED[T]
    own: dict[str, Any] = {"unit": "error", "seeds": SEEDS}
    note = f"solved (error at most 0.01) by {paper:.0%} of the seeds within {ADDING_STEPS:,} steps"
    rows = [Row(_paper("adding", T, K, ADDING_STEPS), 0.0, 0.01, note, name=f"adding {T} iRNN K={K}", share=paper, **own)]
    for k in (1, 3):
        run = _ours("adding", T, k, ADDING_STEPS)
        rows.append(
            Row(
                run, 0.0, 0.01, "ours: the stable form", name=f"adding {T} ours K={k}", share=ours, rates=STABLE_RATES,
                changed_after_test="validation chooses between two rates; before, the rate was 4e-3", **own,
            )
        )  # fmt: skip
    for name, run in _others("adding", T, ADDING_STEPS).items():
        claims = {"FastRNN": 0.6} if T <= 200 else {}
        published = 0.0 if name in claims else None
        rows.append(
            Row(run, published, 0.01, "", name=f"adding {T} {name}", share=claims.get(name), rates=RATES, **own)
        )  # fmt: skip
    return rows


def _copying(T: int, K: int = 5) -> list[Row]:
    guess = 10 * math.log(8) / (T + 20)

    def row(name: str, run: Run, published: float | None, note: str, **own: Any) -> Row:
        run = replace(run, stop_at=round(0.05 * guess, 6), schedule="cosine")
        own = {"seeds": SEEDS, "changed_after_test": "the learning rate decays to 0; before, it was constant", **own}
        return Row(run, published, 0.1 * guess, note, name=f"copying {T} {name}", unit="error", **own)

    note = f"cross entropy under a tenth of a guess ({guess:.4f}) in 3 of 5 seeds within {COPYING_STEPS:,} steps"
    rows = [row(f"iRNN K={K}", _paper("copying", T, K, COPYING_STEPS), 0.0, note, share=0.6)]
    rows += [row(f"ours K={k}", _ours("copying", T, k, COPYING_STEPS), 0.0, "ours: the stable form", share=0.6) for k in (1, 3)]
    rows += [row(name, run, None, "", rates=RATES) for name, run in _others("copying", T, COPYING_STEPS).items()]
    return rows


def ablation(steps: int = 1_000) -> dict[str, Run]:
    """The family h = alpha h + beta phi((U - gamma I) h + W x) of section 4.2, and the incremental RNN at three K."""
    adding = {"T": 200}
    fixed: dict[str, Any] = {"steps": steps, "schedule": "constant"}
    runs = {f"iRNN K={K}": _paper("adding", 200, K, steps) for K in (1, 5, 10)}
    runs |= {f"ours K={K}": _ours("adding", 200, K, steps) for K in (1, 5)}
    runs |= {
        f"FastRNN eta={eta:g}": baseline(
            "FastRNN", "adding", adding, {"alpha": eta, "beta": 1 - eta, "activation": "relu"}, **{**fixed, "rate": 3e-3}
        )
        for eta in (0.01, 0.001)
    }
    runs |= {
        f"Antisymmetric epsilon={epsilon:g}": baseline(
            "AntisymmetricRNN", "adding", adding, {"epsilon": epsilon, "gamma": 0.01}, **{**fixed, "rate": 3e-3}
        )
        for epsilon in (0.1, 0.001)
    }
    runs["linear"] = baseline("LinearRNN", "adding", adding, {}, **fixed)
    runs["RNN"] = baseline("Elman", "adding", adding, {}, **fixed)
    return runs


def fig3() -> Curves:
    """Adding, T = 200: how fast K = 1, 5, 10 and the ablation family learn."""
    rows = []
    for name, run in ablation().items():
        claims = {"iRNN K=10": "the paper: K = 10 converges within 300 steps, the others in about twice as many"}
        share = 1.0 if name.startswith("iRNN") else None
        published = 0.0 if share else None
        own: dict[str, Any] = {"name": f"adding 200 {name}", "unit": "error", "seeds": SEEDS, "share": share}
        rows.append(Row(run, published, 0.01, claims.get(name, ""), **own))
    return Curves(
        "Fig. 3a: adding, T = 200, over K and the ablation family",
        CAPTION.format(cells="the incremental RNN with K = 1, 5 and 10 inner steps and its relatives", units=128),
        rows,
        over_steps,
    )


def fig4() -> Curves:
    """Copying, T = 200 and 500, and adding, T = 200 and 750: cross entropy and squared error over training steps."""
    return Curves(
        "Fig. 4: copying (T = 200, 500) and adding (T = 200, 750)",
        CAPTION.format(cells="the incremental RNN (K = 5), our stable form (K = 1, 3) and baselines", units=128),
        [*_copying(200), *_copying(500), *_adding(200), *_adding(750)],
        over_steps,
    )


def fig5() -> Curves:
    """Adding, T = 100 and 400: squared error over training steps."""
    return Curves(
        "Fig. 5: adding (T = 100, 400)",
        CAPTION.format(cells="the incremental RNN (K = 5), our stable form (K = 1, 3) and baselines", units=128),
        [*_adding(100), *_adding(400)],
        over_steps,
    )
