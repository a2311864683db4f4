"""`unfading export`: a trained model for another runtime."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from unfading.errors import check_count


def export(
    model: Annotated[str, arg(metavar="MODEL")],
    /,
    output: Annotated[Path, arg(aliases=["-o"])],
    to: Literal["c"] = "c",
    precision: Literal["float32", "int8", "integer"] = "float32",
    normalised_samples: bool = False,
    batches: int = 8,
) -> None:
    """Write a trained model as C99 for a small device: no runtime, no malloc, one sample at a time.

    Args:
        model: File of weights, or an https address of one (`unfading.load`).
        output: Folder to create.
        to: Target of the export.
        precision: Arithmetic: float32; int8, matrices in int8; or integer, int8 matrices with int16 values, calibrated on the
            task's training data.
        normalised_samples: Samples are normalised already: leave the task's normalisation out of the exported model.
        batches: Batches of 128 rows for the calibration of --precision integer.
    """
    check_count("--batches", batches)
    from unfading.export import trained
    from unfading.export.new_folder import check_absent

    check_absent(output)
    subject = trained.read(model, normalised_samples=normalised_samples)
    source = subject.write(output, precision, batches)
    sizes = f"{source.constants} bytes of constants, {source.state} of state, {source.scratch} of buffers on the stack"
    print(f"wrote {output}: {sizes}")
