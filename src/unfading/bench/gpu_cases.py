"""What is measured on a GPU: input size 1, one layer, loss on the last step; the lines that `benchmarks/bars.py` asks for.

The lines that most bars read stand first, so that a run that is cut short has them.
"""

from collections.abc import Iterable

from unfading.bench.cases import Case, Dtype, Variant, chosen, variants

# T, B, H
LONG, SMALL, LARGE, WIDE = (784, 128, 128), (1000, 128, 64), (1000, 128, 256), (784, 1024, 128)
CELLS = ("STAR", "IncrementalRNN K=1", "GRU reset after", "LSTM")
ONE_MATRIX = ("STAR", "IncrementalRNN K=1")
FLEETS = (8, 16)
CATALOGUE = (200, 128, 128)  # where every cell runs once

# As on permuted MNIST in NRU's paper.
NRU = Variant("NRU psMNIST", "NRU", lambda T, H: {"memory_size": 256, "heads": 4})


def headline(cells: Iterable[str] = ()) -> list[Case]:
    """All that the bars ask of single cells, or every line of the cells that are named."""
    cells = tuple(cells)
    if cells:
        return everything(cells)
    known = variants()

    def lines(names: Iterable[str], size: tuple[int, int, int], dtype: Dtype) -> list[Case]:
        return [_last(known[name], size, dtype) for name in names]

    found = [*lines(CELLS, LONG, "tf32"), *lines(CELLS, SMALL, "tf32")]
    found += [Case("fleet", known["STAR"], *LONG, dtype="tf32", models=models, input_size=1) for models in FLEETS]
    found += [*lines(ONE_MATRIX, LONG, "bf16"), *lines(ONE_MATRIX, LARGE, "bf16")]
    found += lines(("STAR", "LSTM"), WIDE, "tf32")
    found += [_last(NRU, (785, 100, 212), "tf32")]
    found += lines(("STAR", "LSTM"), LONG, "float32")
    found += lines(("STAR",), LONG, "fp16")
    return found + lines(("LSTM",), LONG, "bf16")


def everything(cells: Iterable[str] = ()) -> list[Case]:
    """The same, and a line for every variant of every cell."""
    cells = tuple(cells)
    found = headline() + [_last(variant, CATALOGUE, "tf32") for variant in variants().values()]
    return chosen(found, cells) if cells else found


def _last(variant: Variant, size: tuple[int, int, int], dtype: Dtype) -> Case:
    return Case("last", variant, *size, dtype=dtype, input_size=1)
