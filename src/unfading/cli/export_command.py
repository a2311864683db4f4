"""`unfading export`: a trained model for another runtime."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from unfading.errors import check_count

Precision = Literal["float32", "int8", "integer"]


def export(
    model: Annotated[str, arg(metavar="MODEL")],
    /,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    to: Literal["c", "onnx", "executorch"] = "c",
    precision: Precision = "float32",
    normalised_samples: bool = False,
    batches: int = 8,
    steps: int | None = None,
    report: Path | None = None,
    test_rows: int = 1024,
) -> None:
    """Write a trained model for another runtime.

    --to c: C99 for a small device; no runtime, no malloc, one sample at a time. --to onnx: an ONNX file in float32, for
    sequences of any length in batches of any size. --to executorch: a file for ExecuTorch in float32, one step, or with --steps
    a whole sequence. --report: a page about the model as C, with memory, speed, scores, and where errors arise.

    Args:
        model: File of weights, or an https address of one (`unfading.load`).
        output: Folder to create; with --to onnx and --to executorch, the file.
        to: Target of the export.
        precision: Arithmetic: float32; int8, matrices in int8; or integer, int8 matrices with int16 values, calibrated on the
            task's training data.
        normalised_samples: Samples are normalised already: leave the task's normalisation out of the exported model.
        batches: Batches of 128 rows for the calibration of --precision integer and of --report.
        steps: With --to executorch, steps of the sequence that the program takes; without it, the program is a single step.
        report: HTML page to write.
        test_rows: With --report, test rows for the scores.
    """
    check_count("--batches", batches)
    check_count("--test-rows", test_rows)
    if output is None and report is None:
        raise ValueError("export needs -o, the folder or file to write, or --report, a page about the model.")
    if steps is not None and (to != "executorch" or output is None):
        raise ValueError("--steps is for --to executorch -o FILE. Leave it out.")
    if report is not None:
        from unfading.report import html

        html.check(report)
    if output is not None:
        _write(model, output, to, precision, normalised_samples=normalised_samples, batches=batches, steps=steps)
    if report is not None:
        from unfading.export.write_report import report as write_report

        write_report(model, report, batches=batches, rows=test_rows, normalised_samples=normalised_samples)
        print(f"wrote {report}")


def _write(
    model: str, output: Path, to: str, precision: Precision, *, normalised_samples: bool, batches: int, steps: int | None
) -> None:
    if to != "c":
        if precision != "float32":
            raise ValueError(f"--to {to} writes float32, and --precision {precision} is for --to c. Leave it out.")
        if to == "onnx":
            _onnx(model, output, normalised_samples=normalised_samples)
        else:
            _executorch(model, output, normalised_samples=normalised_samples, steps=steps)
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

    check_new_file(output, "ONNX")
    subject = trained.read(model, normalised_samples=normalised_samples)
    graph = onnx(subject.model, output, scale=subject.scale).graph
    names = [", ".join(each.name for each in values) for values in (graph.input, graph.output)]
    print(f"wrote {output}: {output.stat().st_size} bytes, inputs {names[0]}, outputs {names[1]}")


def _executorch(model: str, output: Path, *, normalised_samples: bool, steps: int | None) -> None:
    from unfading.export import trained
    from unfading.export.write_executorch import executorch
    from unfading.export.write_onnx import check_new_file

    check_new_file(output, "ExecuTorch")
    subject = trained.read(model, normalised_samples=normalised_samples)
    program = executorch(subject.model, output, steps=steps, scale=subject.scale)
    kind = "a single step" if steps is None else f"sequences of {steps} steps"
    print(f"wrote {output}: {program.size} bytes, for {kind}")
