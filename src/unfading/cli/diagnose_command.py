"""`unfading diagnose`: where the gradients of a cell, a trained run or your own model vanish, explode or survive."""

from json import dumps
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from unfading.errors import check_count


def diagnose(
    cell: Annotated[str, arg(help_behavior_hint="")] = "",
    model: Annotated[str, arg(help_behavior_hint="")] = "",
    run: Path | None = None,
    allow_code: bool = False,
    task: Annotated[str, arg(help_behavior_hint="")] = "",
    data: Path | None = None,
    target: Path | None = None,
    layers: int = 1,
    hidden: int = 64,
    input_size: int = 8,
    frame_size: int = 16,
    steps: int = 100,
    batch: int = 8,
    seed: int = 0,
    exact_up_to: int = 512,
    threads: int = 1,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    png: bool = False,
    json: bool = False,
) -> None:
    """Say where a model's gradients vanish, explode or survive. The exit code is 1 if there is a fault.

    The model is given by one of --cell, --model and --run.

    Args:
        cell: Cell and its options: LSTM,max_lag=200. Your own class: my.py:MyCell. Built with --layers, --hidden and --seed.
        model: Function of yours that builds a model and takes no arguments: my.py:build.
        run: Folder of a trained run. Its best weights are examined, on its task.
        allow_code: Let --run execute the code of a user's own cell or task that its folder holds.
        task: With --cell, task that gives the input batch and the loss: adding,T=200.
        data: NumPy file with the model's input: numbers [T, B, I], frames [T, B, I, height, width], or integer tokens [T, B].
        target: NumPy file with the targets of --data: integers for classes, else numbers. The loss is then measured too.
        layers: Number of layers.
        hidden: Hidden units per layer.
        input_size: Features of the random input that is used without --task and --data, or its channels for frames.
        frame_size: Height and width of its frames, for a convolutional cell.
        steps: Time steps of the random input.
        batch: Batch rows of the random input or of the task's batch.
        seed: Seed of weights, input and random probes.
        exact_up_to: Largest state size that is measured exactly. Larger states are measured by random probes.
        threads: Number of torch threads.
        output: HTML page with the figures.
        png: Also write each figure beside the page as PNG.
        json: Print all numbers as JSON instead of the verdict.
    """
    import torch

    from unfading import allocation
    from unfading.diagnostics import subject
    from unfading.diagnostics.diagnosis import diagnose as diagnose_model

    counts = {"layers": layers, "hidden": hidden, "steps": steps, "batch": batch, "threads": threads}
    for name, value in {**counts, "input-size": input_size, "frame-size": frame_size}.items():
        check_count(f"--{name}", value)
    torch.set_num_threads(threads)
    given = [flag for flag, value in {"--cell": cell, "--model": model, "--run": run}.items() if value]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise ValueError(f"diagnose takes exactly one of --cell, --model and --run; got {got}. E.g. --cell LSTM --layers 12.")
    if png and output is None:
        raise ValueError("--png writes the figures beside the page; name the page with -o report.html.")
    torch.manual_seed(seed)
    if run is not None:
        examined = subject.trained_run(run, batch, allow_code=allow_code)
    elif task:
        examined = subject.cell_on_task(cell, task, layers=layers, hidden=hidden, batch=batch, seed=seed)
    else:
        frame = (frame_size, frame_size) if cell and subject.reads_frames(cell) else ()
        with allocation.refuse_large("the random input", "--steps, --batch, --input-size or --frame-size"):
            x = torch.randn(steps, batch, input_size, *frame) if data is None else subject.read_array("--data", data)
        if model:
            built = subject.user_model(model)
            if data is None:
                raise ValueError(f"--model {model} needs an input; give it with --data x.npy.")
        else:
            built = subject.stack(cell, x.shape[-1 - len(frame)], layers, hidden)
        examined = subject.on_data(built, x, target)
    diagnosis = diagnose_model(examined.model, examined.x, loss=examined.loss, exact_up_to=exact_up_to, seed=seed)
    files = [] if output is None else diagnosis.write(output, png=png)
    if json:
        print(dumps(diagnosis.rows()))
    else:
        print(diagnosis)
        if files:
            print(f"\nwrote {', '.join(map(str, files))}")
    raise SystemExit(0 if diagnosis.clean else 1)
