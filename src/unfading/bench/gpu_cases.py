"""The cases of the benchmark on a GPU: loss on the last step; all that `benchmarks/bars.py` compares.

The cases that most bars need come first, so that an interrupted run has them. The input has one feature, as in the tasks on
pixels; one row has 128 features in fp16, at which cuDNN is best.
"""

from collections.abc import Iterable

from unfading.bench.cases import GPU_INPUT, Case, Dtype, Variant, select, variants

# T, B, H
LONG, SMALL, LARGE, WIDE = (784, 128, 128), (1000, 128, 64), (1000, 128, 256), (784, 1024, 128)
CELLS = ("STAR", "IncrementalRNN K=1", "GRU reset after", "LSTM")
ONE_MATRIX = ("STAR", "IncrementalRNN K=1")
UNITS, MORE_UNITS = (200, 512, 1024), (96, 256)  # at T and B of LONG
DEEP = 12  # layers
ALONE = tuple((784, 1, H) for H in (512, 1024))  # one row
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
    planned += [Case("fleet", known["STAR"], *LONG, dtype="tf32", models=models, input_size=GPU_INPUT) for models in FLEETS]
    planned += [*last(ONE_MATRIX, LONG, "bf16"), *last(ONE_MATRIX, LARGE, "bf16")]
    planned += last(("STAR", "LSTM"), WIDE, "tf32")
    planned += [_last(NRU, (785, 100, 212), "tf32")]
    planned += [_last(known[name], LONG, "tf32", num_layers=DEEP) for name in ("STAR", "LSTM")]
    planned += last(("STAR", "LSTM"), ALONE[-1], "tf32")
    planned += last(("STAR", "LSTM"), LONG, "float32")
    planned += last(("STAR",), LONG, "fp16")
    planned += last(("LSTM",), LONG, "bf16")
    return [*planned, _last(known["LSTM"], LONG, "fp16", input_size=128)]


def more_sizes() -> list[Case]:
    """The sizes that the headline leaves out, and the cells with one matrix at all of them."""
    known = variants()

    def at(names: Iterable[str], units: Iterable[int], dtype: Dtype = "tf32") -> list[Case]:
        return [_last(known[name], (*LONG[:2], H), dtype) for name in names for H in units]

    planned = at(("STAR", "GRU reset after", "LSTM"), MORE_UNITS) + at(("GRU",), (128, *UNITS))
    planned += at(("FastRNN", "IncrementalRNN K=1"), sorted(UNITS + MORE_UNITS))
    planned += at(("STAR", "FastRNN"), (256, 512, 1024), "bf16")
    return planned + [_last(known[name], ALONE[0], "tf32") for name in ("STAR", "LSTM")]


def everything(cells: Iterable[str] = ()) -> list[Case]:
    """The same, further sizes, and one case for every variant of every cell."""
    cells = tuple(cells)
    planned = headline() + more_sizes() + [_last(variant, CATALOGUE, "tf32") for variant in variants().values()]
    return select(planned, cells) if cells else planned


def _last(
    variant: Variant, size: tuple[int, int, int], dtype: Dtype, *, input_size: int = GPU_INPUT, num_layers: int = 1
) -> Case:
    return Case("last", variant, *size, dtype=dtype, input_size=input_size, num_layers=num_layers)
