"""The cases of the benchmark on a GPU: input size 1, one layer, loss on the last step; all that `benchmarks/bars.py` compares.

The cases that most bars need come first, so that an interrupted run has them.
"""

from collections.abc import Iterable

from unfading.bench.cases import Case, Dtype, Variant, select, variants

# T, B, H
LONG, SMALL, LARGE, WIDE = (784, 128, 128), (1000, 128, 64), (1000, 128, 256), (784, 1024, 128)
CELLS = ("STAR", "IncrementalRNN K=1", "GRU reset after", "LSTM")
ONE_MATRIX = ("STAR", "IncrementalRNN K=1")
UNITS = (200, 512, 1024)  # at T and B of LONG
FLEETS = (8, 16)
CATALOGUE = (200, 128, 128)  # the size at which every cell runs once

# As on permuted MNIST in the paper of NRU.
NRU = Variant("NRU psMNIST", "NRU", lambda T, H: {"memory_size": 256, "heads": 4})


def headline(cells: Iterable[str] = ()) -> list[Case]:
    """The cases of single cells that the bars compare, or all cases of the named cells."""
    cells = tuple(cells)
    if cells:
        return everything(cells)
    known = variants()

    def last(names: Iterable[str], size: tuple[int, int, int], dtype: Dtype) -> list[Case]:
        return [_last(known[name], size, dtype) for name in names]

    planned = last(CELLS, LONG, "tf32")
    planned += [case for H in UNITS for case in last(("STAR", "GRU reset after", "LSTM"), (*LONG[:2], H), "tf32")]
    planned += last(CELLS, SMALL, "tf32")
    planned += [Case("fleet", known["STAR"], *LONG, dtype="tf32", models=models, input_size=1) for models in FLEETS]
    planned += [*last(ONE_MATRIX, LONG, "bf16"), *last(ONE_MATRIX, LARGE, "bf16")]
    planned += last(("STAR", "LSTM"), WIDE, "tf32")
    planned += [_last(NRU, (785, 100, 212), "tf32")]
    planned += last(("STAR", "LSTM"), LONG, "float32")
    planned += last(("STAR",), LONG, "fp16")
    return planned + last(("LSTM",), LONG, "bf16")


def everything(cells: Iterable[str] = ()) -> list[Case]:
    """The same, and one case for every variant of every cell."""
    cells = tuple(cells)
    planned = headline() + [_last(variant, CATALOGUE, "tf32") for variant in variants().values()]
    return select(planned, cells) if cells else planned


def _last(variant: Variant, size: tuple[int, int, int], dtype: Dtype) -> Case:
    return Case("last", variant, *size, dtype=dtype, input_size=1)
