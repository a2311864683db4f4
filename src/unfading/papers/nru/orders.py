"""Chandar et al. 2019 (NRU): claims about several rows of a table or figure, and the ranking of Table 1.

A function is named as its item. Steps are those until a tenth of a guess's cross entropy.
"""

from unfading.papers.nru.runs import CELLS
from unfading.papers.nru.tables import TOP
from unfading.papers.row import Order, Ranking

TASKS = ("copying 100", "copying 200", "variable copying 100", "variable copying 200", "denoising 100", "psMNIST", "characters")


def table1() -> list[Order | Ranking]:
    """The ranking."""
    claim = (
        "NRU is best in 4 of 7 tasks, more often than any other cell, and the only one among the best two in all 7 (Table 1)"
    )
    return [Ranking(claim, "NRU", {task: {cell: f"{task} {cell}" for cell in CELLS} for task in TASKS}, TOP)]


def _ahead(claim: str, task: str, cell: str, without: tuple[str, ...] = (), **own: float) -> Order:
    """The cell needs fewer steps on the task than all others but those in `without`."""
    then = tuple(f"{task} {each}" for each in CELLS if each not in (cell, *without))
    return Order(f"{task}: {claim}", (f"{task} {cell}",), then, by="steps", **own)


def fig1() -> list[Order | Ranking]:
    """Copying."""
    claims: list[Order | Ranking] = []
    for task in ("copying 100", "copying 200"):
        nru, janet, eurnn = (f"{task} {cell}" for cell in ("NRU", "JANET", "EURNN"))
        claims += [
            Order(
                f"{task}: EURNN, which suits this task, needs fewer steps than NRU (Copying Memory Task)",
                (eurnn,),
                (nru,),
                by="steps",
            ),
            _ahead("NRU converges in fewer steps than all others but EURNN (Copying Memory Task)", task, "NRU", ("EURNN",)),
            _ahead("JANET follows (Copying Memory Task)", task, "JANET", ("EURNN", "NRU")),
            Order(
                f"{task}: JANET needs two to three times the steps of NRU (Copying Memory Task)",
                (nru,),
                (janet,),
                by="steps",
                factor=2,
            ),
        ]
    return claims


def fig2() -> list[Order | Ranking]:
    """Variable copying."""
    claims: list[Order | Ranking] = []
    for task in ("variable copying 100", "variable copying 200"):
        claims.append(_ahead("NRU converges in the fewest steps (Copying Memory Task)", task, "NRU"))
        claims.append(_ahead("JANET follows (Copying Memory Task)", task, "JANET", ("NRU",)))
    return claims


def fig3() -> list[Order | Ranking]:
    """Steps to converge."""
    return [
        Order(
            f"{task}: NRU converges in fewer steps than JANET and LSTM-chrono (Fig. 3)",
            (f"{task} NRU",),
            (f"{task} JANET", f"{task} LSTM-chrono"),
            by="steps",
        )
        for task in TASKS[:4]
    ]


def table2() -> list[Order | Ranking]:
    """Characters."""
    names = ("LSTM", "LSTM-chrono", "JANET", "GORU", "EURNN")
    others = tuple(f"characters {cell}" for cell in names)
    nru, gru, multiplicative = "characters NRU", "characters GRU", "characters NRU, multiplicative"
    return [
        Order("GRU has the fewest bits (Character Level Language Modelling)", (gru,), (nru, *others)),
        Order("NRU follows, with fewer bits than all others (Character Level Language Modelling)", (nru,), others),
        Order(
            "a multiplicative memory has fewer bits than an additive one (Character Level Language Modelling)",
            (multiplicative,),
            (nru,),
        ),
    ]


def table3() -> list[Order | Ranking]:
    """psMNIST."""
    rest = tuple(f"psMNIST {cell}" for cell in CELLS if cell not in ("NRU", "EURNN"))
    return [
        Order("NRU scores higher than all others (Permuted Sequential MNIST)", ("psMNIST NRU",), ("psMNIST EURNN", *rest)),
        Order("EURNN follows (Permuted Sequential MNIST)", ("psMNIST EURNN",), rest),
        Order("LSTM scores higher than LSTM-chrono (Permuted Sequential MNIST)", ("psMNIST LSTM",), ("psMNIST LSTM-chrono",)),
    ]


def fig8() -> list[Order | Ranking]:
    """Heads, memory and hidden size."""
    heads = tuple(f"psMNIST NRU heads {count}" for count in (4, 9, 16))
    return [
        Order("more heads than one score higher (Hyper-parameter Sensitivity Analysis)", heads, ("psMNIST NRU heads 1",)),
        Order(
            "small hidden sizes score lower (Hyper-parameter Sensitivity Analysis)",
            ("psMNIST NRU hidden 200",),
            ("psMNIST NRU hidden 50",),
        ),
    ]


def memory_64_144() -> list[Order | Ranking]:
    """Memory sizes."""
    claim = "a memory of 144 converges almost twice as early as one of 64 (Model Analysis; judged at 1.5 times)"
    return [
        Order(f"copying {T}: {claim}", (f"copying {T}, memory 144",), (f"copying {T}, memory 64",), by="steps", factor=1.5)
        for T in (100, 200)
    ]


def linear_relu_heads() -> list[Order | Ranking]:
    """Linear and ReLU heads."""
    linear, relu = ({task: f"{task}, {kind} heads" for task in TASKS} for kind in ("linear", "ReLU"))
    claims: list[Order | Ranking] = [
        Order(f"{task}: linear heads need fewer steps than ReLU (Experiments)", (linear[task],), (relu[task],), by="steps")
        for task in ("copying 100", "denoising 100")
    ]
    return [
        *claims,
        Order("psMNIST: linear heads score higher than ReLU (Experiments)", (linear["psMNIST"],), (relu["psMNIST"],)),
        Order(
            "characters: ReLU heads have fewer bits than linear ones (Character Level Language Modelling)",
            (relu["characters"],),
            (linear["characters"],),
        ),
    ]


def tmax_50_150() -> list[Order | Ranking]:
    """T_max of the chrono start."""
    return [
        Order(
            f"{cell} has fewer bits with T_max = 50 than with 150 (Character Level Language Modelling)",
            (f"characters {cell}, T_max 50",),
            (f"characters {cell}, T_max 150",),
        )
        for cell in ("LSTM-chrono", "JANET")
    ]
