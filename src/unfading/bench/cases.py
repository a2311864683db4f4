"""What is measured: cells with their options, and the sizes at which they run.

Every cell of the catalogue runs at its default options. Some have further variants, which comparisons need: torch.nn's GRU
resets after the product; incremental networks are held against matrix products with one dense matrix, P left out.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from unfading import catalogue
from unfading.cells.base import Cell
from unfading.errors import unknown

INPUT = 8  # features of the input

Kind = Literal["layer", "lengths", "stream"]


class Variant(NamedTuple):
    """A cell at certain options."""

    name: str
    cell: str

    def options(self, T: int, H: int) -> dict[str, Any]:
        return OPTIONS[self.name](T, H) if self.name in OPTIONS else {}

    def scale(self, T: int) -> float:
        """What the weights are multiplied by at the start."""
        return SCALES[self.cell](T) if self.cell in SCALES else 1.0


class Case(NamedTuple):
    """One line of the table: a layer, a batch of rows of unequal length, or a layer pushed step by step."""

    kind: Kind
    variant: Variant
    T: int
    B: int
    H: int


# Options as functions of T and H. A state that grows exp(eta K T) fold overflows before T = 784, so eta is shrunk; the cost
# of a step does not depend on it.
OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "GRU reset after": lambda T, H: {"reset_after": True},
    "IncrementalRNN": lambda T, H: {"eta": 0.2 / T},
    "IncrementalRNN K=1": lambda T, H: {"inner_steps": 1, "rank": H, "projection_rank": 0, "eta": 1 / T},
    "IncrementalRNN K=3": lambda T, H: {"inner_steps": 3, "rank": H, "projection_rank": 0, "eta": 0.3 / T},
    "RecurrentHighway L=4": lambda T, H: {"depth": 4},
}

# For the same reason: NRU's memory feeds itself, and JANET with beta = 1 is chaotic at its start.
SCALES: dict[str, Callable[[int], float]] = {"NRU": lambda T: 10 / max(T, 10), "JANET": lambda T: 0.5}

HEADLINE = ("LSTM", "GRU reset after", "Elman", "STAR", "JANET", "IncrementalRNN K=1", "NRU")
AGAINST_TORCH = ("LSTM", "GRU reset after", "Elman")
AGAINST_PRODUCTS = ("Elman", "LSTM", "GRU", "GRU reset after", "STAR", "JANET", "IncrementalRNN K=1")
HEAVY = ("NRU", "RecurrentHighway L=4", "IncrementalRNN K=3")
STREAMED = ("STAR", "IncrementalRNN K=1")


def cell_classes() -> dict[str, type[Cell]]:
    """Every cell by the name of its layer."""
    return {cell.__name__.removesuffix("Cell"): cell for cell in catalogue.cells()}


def variants() -> dict[str, Variant]:
    """Every cell at its default options, then the further variants, by name."""
    plain = {name: Variant(name, name) for name in cell_classes()}
    return plain | {name: Variant(name, name.split()[0]) for name in OPTIONS if name not in plain}


def chosen(cases: Iterable[Case], cells: Iterable[str]) -> list[Case]:
    """Those cases that are of the named cells. Raises for a cell that does not exist."""
    wanted, known = set(cells), cell_classes()
    for name in sorted(wanted):
        if name not in known:
            raise ValueError(unknown("cell", name, known))
    return [case for case in cases if case.variant.cell in wanted]


def headline(cells: Iterable[str] = ()) -> list[Case]:
    """A look in under a minute: some cells, or all variants of the cells that are named, at two batch sizes."""
    known, cells = variants(), tuple(cells)
    names = tuple(known) if cells else HEADLINE
    found = [Case("layer", known[name], 200, B, 128) for name in names for B in (1, 32)]
    found += [Case("lengths", known[name], 200, 32, 128) for name in (names if cells else ("LSTM", "STAR"))]
    found += _streams(T=200)
    return chosen(found, cells) if cells else found


def everything(cells: Iterable[str] = ()) -> list[Case]:
    """All that the bars of `benchmarks/bars.py` ask for."""
    known, cells = variants(), tuple(cells)
    found = []
    for T in (200, 784):
        found += [Case("layer", variant, T, 1, H) for variant in known.values() for H in (64, 128)]
        found += [Case("layer", known[name], T, B, 64) for name in AGAINST_TORCH for B in (32, 128)]
        found += [Case("layer", known[name], T, B, 128) for name in AGAINST_PRODUCTS for B in (32, 128)]
        found += [Case("layer", known[name], T, 32, H) for name in HEAVY for H in (64, 128)]
        found += [Case("lengths", known[name], T, B, 128) for name in AGAINST_PRODUCTS for B in (32, 128)]
    found += _streams(T=200)
    return chosen(found, cells) if cells else found


def _streams(T: int) -> list[Case]:
    known = variants()
    return [Case("stream", known[name], T, 1, 128) for name in STREAMED]
