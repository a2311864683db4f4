"""The cases of the benchmark: cells with their options, and the sizes at which they run.

Every cell of the catalogue runs at its default options. Some comparisons need further variants: torch.nn's GRU applies the
reset gate after the product, and incremental networks are compared with the products of one dense matrix, without P.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from unfading import catalogue
from unfading.cells.base import Cell
from unfading.errors import unknown

INPUT, GPU_INPUT = 8, 1  # features of the input on a CPU, and of most cases on a GPU

# On a CPU: a layer, a batch of rows of unequal length, a layer that gets one step at a time. On a GPU: a layer with the loss on
# its last step, and many models at once.
Kind = Literal["layer", "lengths", "stream", "last", "fleet"]
# "float32" has full precision; in "tf32" products have 10 bits; "bf16" and "fp16" run under autocast.
Dtype = Literal["float32", "tf32", "bf16", "fp16"]


def _no_options(T: int, H: int) -> dict[str, Any]:
    return {}


class Variant(NamedTuple):
    """A cell with options, which are a function of T and H."""

    name: str
    cell: str
    options: Callable[[int, int], dict[str, Any]] = _no_options

    def scale(self, T: int) -> float:
        """Factor on the initial weights."""
        return SCALES[self.cell](T) if self.cell in SCALES else 1.0


class Case(NamedTuple):
    """One row of the table: what is measured at which size."""

    kind: Kind
    variant: Variant
    T: int
    B: int
    H: int
    dtype: Dtype = "float32"
    models: int = 1
    input_size: int = INPUT
    num_layers: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        variant = self.variant.name
        return self.kind, variant, self.T, self.B, self.H, self.dtype, self.models, self.input_size, self.num_layers

    @property
    def title(self) -> str:
        return title(*self.key)


def title(kind: str, name: str, T: int, B: int, H: int, dtype: str, models: int, input_size: int, num_layers: int) -> str:
    """A case in one line, without what is the same for all of its kind."""
    text = f"{name} T={T} B={B} H={H}"
    text += f" {num_layers} layers" if num_layers > 1 else ""
    if kind in ("last", "fleet"):
        text += f" {dtype}" if input_size == GPU_INPUT else f" {dtype} input size {input_size}"
    text += f" {models} models" if models > 1 else ""
    return text + (f" {kind}" if kind in ("lengths", "stream") else "")


# A state that grows by a factor of exp(eta K T) overflows before T = 784, so eta is smaller here. The cost of a step does not
# depend on it.
OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "GRU reset after": lambda T, H: {"reset_after": True},
    "IncrementalRNN": lambda T, H: {"eta": 0.2 / T},
    "IncrementalRNN K=1": lambda T, H: {"inner_steps": 1, "rank": H, "projection_rank": 0, "eta": 1 / T},
    "IncrementalRNN K=3": lambda T, H: {"inner_steps": 3, "rank": H, "projection_rank": 0, "eta": 0.3 / T},
    "RecurrentHighway L=4": lambda T, H: {"depth": 4},
}

# For the same reason: the memory of NRU feeds back into itself, and JANET with beta = 1 starts chaotic.
SCALES: dict[str, Callable[[int], float]] = {"NRU": lambda T: 10 / max(T, 10), "JANET": lambda T: 0.5}

HEADLINE = ("LSTM", "GRU reset after", "Elman", "STAR", "JANET", "IncrementalRNN K=1", "NRU")
AGAINST_TORCH = ("LSTM", "GRU reset after", "Elman")
BATCHES, WIDE = (1, 32, 128), (256, 512)  # of the comparison with torch.nn on any number of threads
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


def select(cases: Iterable[Case], cells: Iterable[str]) -> list[Case]:
    """The cases of the named cells. Raises for a cell that does not exist."""
    names, known = set(cells), cell_classes()
    for name in sorted(names):
        if name not in known:
            raise ValueError(unknown("cell", name, known))
    return [case for case in cases if case.variant.cell in names]


def headline(cells: Iterable[str] = ()) -> list[Case]:
    """Cases for under a minute: some cells, or all variants of the named cells, at two batch sizes."""
    known, cells = variants(), tuple(cells)
    names = tuple(known) if cells else HEADLINE
    planned = [Case("layer", known[name], 200, B, 128) for name in names for B in (1, 32)]
    planned += [Case("lengths", known[name], 200, 32, 128) for name in (names if cells else ("LSTM", "STAR"))]
    planned += _streams(T=200)
    return select(planned, cells) if cells else planned


def everything(cells: Iterable[str] = ()) -> list[Case]:
    """All cases that `benchmarks/bars.py` compares."""
    known, cells = variants(), tuple(cells)
    planned = []
    for T in (200, 784):
        planned += [Case("layer", variant, T, 1, H) for variant in known.values() for H in (64, 128)]
        planned += [Case("layer", known[name], T, B, 64) for name in AGAINST_TORCH for B in (32, 128)]
        planned += [Case("layer", known[name], T, B, 128) for name in AGAINST_PRODUCTS for B in (32, 128)]
        planned += [Case("layer", known[name], T, 32, H) for name in HEAVY for H in (64, 128)]
        planned += [Case("lengths", known[name], T, B, 128) for name in AGAINST_PRODUCTS for B in (32, 128)]
    planned += [Case("layer", known[name], 200, B, H) for name in AGAINST_TORCH for B in BATCHES for H in WIDE]
    planned += _streams(T=200)
    return select(planned, cells) if cells else planned


def _streams(T: int) -> list[Case]:
    known = variants()
    return [Case("stream", known[name], T, 1, 128) for name in STREAMED]
