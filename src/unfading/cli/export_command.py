"""`unfading export`: a trained model for another runtime."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from unfading.errors import check_count


def export(
    model: Annotated[str, arg(metavar="MODEL")],
    /,
    output: Annotated[Path, arg(aliases=["-o"])],
    to: Literal["c", "onnx"] = "c",
    precision: Literal["float32", "int8", "integer"] = "float32",
    normalised_samples: bool = False,
    batches: int = 8,
) -> None:
    """Write a trained model for another runtime.

    --to c: C99 for a small device; no runtime, no malloc, one sample at a time. --to onnx: an ONNX file in float32, for
    sequences of any length in batches of any size.

    Args:
        model: File of weights, or an https address of one (`unfading.load`).
        output: Folder to create; with --to onnx, the file.
        to: Target of the export.
        precision: Arithmetic: float32; int8, matrices in int8; or integer, int8 matrices with int16 values, calibrated on the
            task's training data.
        normalised_samples: Samples are normalised already: leave the task's normalisation out of the exported model.
        batches: Batches of 128 rows for the calibration of --precision integer.
    """
    check_count("--batches", batches)
    if to == "onnx":
        if precision != "float32":
            raise ValueError(f"--to onnx writes float32, and --precision {precision} is for --to c. Leave it out.")
        _onnx(model, output, normalised_samples=normalised_samples)
        return
    from unfading.export import trained
    from unfading.export.new_folder import check_absent

    check_absent(output)
    subject = trained.read(model, normalised_samples=normalised_samples)
    source = subject.write(output, precision, batches)
    sizes = f"{source.constants} bytes of constants, {source.state} of state, {source.scratch} of buffers on the stack"
    print(f"wrote {output}: {sizes}")


def _onnx(model: str, output: Path, *, normalised_samples: bool) -> None:
    from unfading.export import trained
    from unfading.export.write_onnx import check_new_file, onnx

    check_new_file(output)
    subject = trained.read(model, normalised_samples=normalised_samples)
    graph = onnx(subject.model, output, scale=subject.scale).graph
    names = [", ".join(each.name for each in values) for values in (graph.input, graph.output)]
    print(f"wrote {output}: {output.stat().st_size} bytes, inputs {names[0]}, outputs {names[1]}")
