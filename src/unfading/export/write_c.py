"""`unfading.export.c`: a model as a folder of C99 source."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from unfading.errors import unknown
from unfading.export.c_folder import MAKEFILE, main_source, readme
from unfading.export.c_model import CSource, float_source, integer_source
from unfading.export.model_stages import Exported, exported
from unfading.export.new_folder import check_absent, write_folder
from unfading.export.quantised_model import Quantised, quantised
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.tasks.scaling import Scale

Precision = Literal["float32", "int8", "integer"]


def c(
    model: Model | Recurrent | Quantised,
    folder: Path | str,
    *,
    precision: Precision = "float32",
    batches: Iterable[Any] | None = None,
    scale: Scale | None = None,
) -> CSource:
    """Write a model as freestanding C99 into a new folder: model.h, model.c, main.c, Makefile and README.md.

    The code takes one sample at a time (`model_push`), with the state in a struct that the caller owns. It needs no malloc,
    and nothing of libc but memcpy. Returns the source and its sizes.

    Args:
        model: the model, or a recurrent layer; a `Quantised` one is written in its integers.
        folder: the folder to create.
        precision: "float32"; "int8", matrices in int8 with float32 arithmetic; or "integer", int8 matrices, int16 state and
            values, and tables for functions, calibrated on `batches`.
        batches: calibration data for precision="integer": inputs [T, B, I], or batches that begin with them.
        scale: mean and spread of the normalisation (x - mean) / spread of samples, which becomes a part of the model.
    """
    folder = Path(folder)
    check_absent(folder)
    if isinstance(model, Quantised):
        if batches is not None or scale is not None:
            raise ValueError("a Quantised model has its calibration and its scale already; leave out batches= and scale=.")
        return _write(folder, model.model, integer_source(model), "all-integer arithmetic", _told(model))
    if precision not in get_args(Precision):
        raise ValueError(unknown("precision", precision, get_args(Precision)))
    if (batches is None) == (precision == "integer"):
        needs = "needs batches=, calibration data" if batches is None else "takes no batches=; leave them out"
        raise ValueError(f"precision={precision!r} {needs}.")
    if batches is not None:
        return c(quantised(model, batches, scale=scale), folder)
    stages = exported(model, scale)
    check_finite(stages)
    int8 = precision == "int8"
    kind = "int8 matrices and float32 arithmetic" if int8 else "float32"
    return _write(folder, stages, float_source(stages, int8=int8), kind, [])


def check_finite(model: Exported) -> None:
    """Raise ValueError if a weight is NaN or infinite."""
    for stage in model.stages:
        for numbers in (*stage.weights, *stage.states, *stage.tables.values()):
            if not np.isfinite(numbers).all():
                raise ValueError(f"{stage.name} of the model has weights that are NaN or infinite; train it again.")


def _told(twin: Quantised) -> list[str]:
    """What the README says about the calibration."""
    cut, entries = sum(twin.saturations.values()), sum(twin.entries.values())
    units = (
        ""
        if twin.model.tokens is not None
        else (f"A number x of a sample is given as the int16 nearest to {2.0**twin.sample_bits:g} x. ")
    )
    return [
        f"{units}An output y stands for y / {2.0**twin.output_bits:g}. On the calibration data {cut} of {entries} entries were",
        "cut to the largest number that they can hold.",
    ]


def _write(folder: Path, model: Exported, source: CSource, kind: str, notes: list[str]) -> CSource:
    integer = "MODEL_OUTPUT_UNITS" in source.header
    files = {
        "model.h": source.header,
        "model.c": source.source,
        "main.c": main_source(model, integer=integer),
        "Makefile": MAKEFILE,
        "README.md": readme(model, source, kind, notes),
    }
    write_folder(folder, files)
    return source
