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

# On a CPU a layer, a batch of rows of unequal length, a layer pushed step by step; on a GPU a layer whose loss is on its last
# step, and many models at once.
Kind = Literal["layer", "lengths", "stream", "last", "fleet"]
# "float32" is right to the last bits; in "tf32" products have 10 bits; "bf16" and "fp16" are autocast's.
Dtype = Literal["float32", "tf32", "bf16", "fp16"]


def _none(T: int, H: int) -> dict[str, Any]:
    return {}


class Variant(NamedTuple):
    """A cell at certain options, as functions of T and H."""

    name: str
    cell: str
    options: Callable[[int, int], dict[str, Any]] = _none

    def scale(self, T: int) -> float:
        """What the weights are multiplied by at the start."""
        return SCALES[self.cell](T) if self.cell in SCALES else 1.0


class Case(NamedTuple):
    """One line of the table."""

    kind: Kind
    variant: Variant
    T: int
    B: int
    H: int
    dtype: Dtype = "float32"
    models: int = 1
    input_size: int = INPUT

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kind, self.variant.name, self.T, self.B, self.H, self.dtype, self.models

    @property
    def title(self) -> str:
        return title(*self.key)


def title(kind: str, name: str, T: int, B: int, H: int, dtype: str, models: int) -> str:
    """A case in one line; what goes without saying is left out."""
    said = f"{name} T={T} B={B} H={H}"
    said += f" {dtype}" if kind in ("last", "fleet") else ""
    said += f" {models} models" if models > 1 else ""
    return said + (f" {kind}" if kind in ("lengths", "stream") else "")


# A state that grows exp(eta K T) fold overflows before T = 784, so eta is shrunk; the cost
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
    return plain | {name: Variant(name, name.split()[0], options) for name, options in OPTIONS.items()}


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
