"""Turkoglu et al. 2019 (STAR): claims about several rows of a table. A function is named as its item."""

from unfading.papers.row import Order, Ranking
from unfading.papers.star.depth import DEPTHS, MOVING_DEPTHS
from unfading.papers.star.runs import CELLS
from unfading.papers.star.tables import FAILED, TASKS

MOVING_STARS = tuple(f"moving MNIST convSTAR, {depth} layers" for depth in MOVING_DEPTHS)
MOVING_FAILED = 21.25  # a tenth above chance, which is 12.5 %
OTHERS = tuple(cell for cell in CELLS if cell != "STAR")


def table1() -> list[Order | Ranking]:
    """STAR beside numbers from the literature."""
    deep, lstm = "pMNIST STAR, 16 layers of 64", "pMNIST LSTM, 4 layers of 128"
    return [
        Order("pMNIST: STAR with 16 layers scores higher than LSTM with 4, with fewer parameters (Table 1)", (deep,), (lstm,))
    ]


def table3() -> list[Order | Ranking]:
    """Pixel and permuted MNIST over depth."""
    claims: list[Order | Ranking] = []
    for place in ("MNIST", "pMNIST"):
        for depth in (12, 16):
            others = tuple(f"{place} {cell}, {depth} layers" for cell in OTHERS)
            claims.append(
                Order(
                    f"{place}: with {depth} layers STAR scores higher than all others (Table 3)", (_star(place, depth),), others
                )
            )
        claims.append(
            Order(
                f'{place}: STAR "can be trained up to a depth of 20 layers" (section 5.1)',
                (_star(place, 20),),
                (),
                bound=FAILED[place],
            )
        )
        for cell in OTHERS[1:3]:
            first, then = f"{place} {cell}, 2 layers", f"{place} {cell}, 1 layers"
            claims.append(Order(f"{place}: {cell} with 2 layers scores higher than with 1 (section 5.1)", (first,), (then,)))
        deeper = tuple(_star(place, depth) for depth in (2, 4, 8, 12, 16))
        claims.append(
            Order(f"{place}: STAR with 2 to 16 layers scores higher than with 1 (section 5.1)", deeper, (_star(place, 1),))
        )
    return [
        *claims,
        Order(
            "MNIST: STAR is the only unit of which a 12-layer model can be trained (section 5.1)",
            (_star("MNIST", 12),),
            tuple(f"MNIST {cell}, 12 layers" for cell in OTHERS),
            bound=FAILED["MNIST"],
        ),
        Order(
            "pMNIST: STAR with 12 layers scores higher than LSTM with 4 (Table 3)",
            (_star("pMNIST", 12),),
            ("pMNIST LSTM, 4 layers",),
        ),
    ]


def does_it_train() -> list[Order | Ranking]:
    """Five epochs of networks of 1 to 20 layers."""
    claims: list[Order | Ranking] = []
    for place in TASKS:
        every = tuple(_star(place, depth) for depth in DEPTHS)
        claims.append(Order(f"{place}: STAR trains with 1 to 20 layers (section 5.1)", every, (), bound=FAILED[place]))
        others = tuple(f"{place} {cell}, 16 layers" for cell in OTHERS)
        claims.append(
            Order(f"{place}: with 16 layers only STAR trains (Table 3)", (_star(place, 16),), others, bound=FAILED[place])
        )
    return claims


def crops_substitute() -> list[Order | Ranking]:
    """UCR Crop in place of the TUM crops."""
    return [
        Order(
            f"STAR scores higher than all others with {depth} layers (section 5.2, per season)",
            (_star("UCR Crop", depth),),
            tuple(f"UCR Crop {cell}, {depth} layers" for cell in OTHERS),
        )
        for depth in (4, 8, 12)
    ]


def moving_mnist() -> list[Order | Ranking]:
    """Moving digits in place of gestures."""
    deepest = "moving MNIST convSTAR, 12 layers"
    claim = "moving MNIST: convSTAR"
    return [
        Order(
            f"{claim} scores higher than convLSTM with 12 layers (Table 5)", (deepest,), ("moving MNIST convLSTM, 12 layers",)
        ),
        Order(
            f"{claim} scores higher with 12 layers than with 1 (section 5.3)", (deepest,), ("moving MNIST convSTAR, 1 layers",)
        ),
        Order(f"{claim} trains with 1 to 12 layers (Table 5)", MOVING_STARS, (), bound=MOVING_FAILED),
    ]


def _star(place: str, depth: int) -> str:
    return f"{place} STAR, {depth} layers"


def table4() -> list[Order | Ranking]:
    """Crops."""
    return [
        Order(
            f"{place}: STAR scores higher than all others with 4 layers (section 5.2)",
            (_star(place, 4),),
            tuple(f"{place} {cell}, 4 layers" for cell in OTHERS),
        )
        for place in ("per date", "per season")
    ]


def table5() -> list[Order | Ranking]:
    """Gestures."""
    others = tuple(f"{cell}, {depth} layers" for cell in ("convLSTM", "convLSTM w/f") for depth in (1, 2, 4, 8, 12, 16))
    return [Order("the best network is convSTAR with 12 layers (section 5.3)", ("convSTAR, 12 layers",), others)]
