"""The verb `unfading diagnose`: look into the gradients of a cell, of a trained run or of a user's own model."""

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tyro.conf import arg

from unfading.diagnostics.diagnosis import diagnose as look
from unfading.errors import check_count
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training import checkpoint
from unfading.training.names import layer_class, made, own, parse, task_class
from unfading.training.run_dir import read_run


class Subject(NamedTuple):
    """What is looked into."""

    model: nn.Module
    x: Tensor | Batch
    loss: Callable[[Any, Batch], Tensor] | None


def diagnose(
    cell: str = "",
    model: str = "",
    run: Path | None = None,
    task: str = "",
    data: Path | None = None,
    target: Path | None = None,
    layers: int = 1,
    hidden: int = 64,
    input_size: int = 8,
    steps: int = 100,
    batch: int = 8,
    seed: int = 0,
    exact_up_to: int = 512,
    threads: int = 1,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    png: bool = False,
    json: bool = False,
) -> None:
    """Say where a model's gradients vanish, explode or survive; exit code 1 where a fault was found.

    Args:
        cell: name and options: LSTM,max_lag=200; your own is my.py:MyCell. Built anew from --layers, --hidden and --seed.
        model: or a function of yours that builds one: my.py:build, called without arguments.
        run: or the folder of a trained run: its best weights, on its task.
        task: with --cell, the task whose batch is read and whose loss is measured: adding,T=200.
        data: a NumPy file with what the model is called with: [T, B, I], or integers for tokens [T, B].
        target: a NumPy file with the answers to --data: integers for classes, else numbers; the loss is then measured too.
        layers: of the stack.
        hidden: units per layer.
        input_size: features of the random input, where neither --task nor --data is given.
        steps: of the random input.
        batch: rows of the random input, or of the task's batch.
        seed: of weights, input and probes.
        exact_up_to: larger states are measured by random probes.
        threads: of torch.
        output: write the page with the figures here.
        png: write each figure beside the page too.
        json: print every number as JSON instead of the verdict.
    """
    for name, value in {"layers": layers, "hidden": hidden, "input-size": input_size, "steps": steps, "batch": batch}.items():
        check_count(f"--{name}", value)
    check_count("--threads", threads)
    torch.set_num_threads(threads)
    given = [flag for flag, value in {"--cell": cell, "--model": model, "--run": run}.items() if value]
    if len(given) != 1:
        told = " and ".join(given) or "none of them"
        raise ValueError(f"diagnose looks into one of --cell, --model and --run; got {told}. E.g. --cell LSTM --layers 12.")
    if png and output is None:
        raise ValueError("--png writes the figures beside the page; say where that goes with -o report.html.")
    torch.manual_seed(seed)
    if run is not None:
        subject = _run(run, batch)
    elif task:
        subject = _task(cell, task, layers, hidden, batch, seed)
    else:
        x = torch.randn(steps, batch, input_size) if data is None else _read("--data", data)
        if model:
            built: nn.Module = _built(model)
            if data is None:
                raise ValueError(f"--model {model} needs something to read; give it with --data x.npy.")
        else:
            built = _stack(cell, x.shape[-1], layers, hidden)
        x = _like(x, built)
        subject = Subject(built, x if target is None else Batch(x, _like(_read("--target", target), built)), None)
    found = look(subject.model, subject.x, loss=subject.loss, exact_up_to=exact_up_to, seed=seed)
    written = [] if output is None else found.write(output, png=png)
    if json:
        print(dumps(found.rows()))
    else:
        print(found)
        if written:
            print(f"\nwrote {', '.join(map(str, written))}")
    raise SystemExit(0 if found.clean else 1)


def _stack(cell: str, input_size: int, layers: int, hidden: int) -> Any:
    name, options = parse(cell)
    sizes = {"input_size": input_size, "hidden_size": hidden, "num_layers": layers}
    return made("cell", name, layer_class(name), {**sizes, **options})


def _task(cell: str, task: str, layers: int, hidden: int, batch: int, seed: int) -> Subject:
    if not cell:
        raise ValueError("--task goes with --cell, which is then built to its sizes.")
    name, options = parse(task)
    asked: Task = made("task", name, task_class(name), options)
    rnn = _stack(cell, asked.input_size, layers, hidden)
    model = Model(asked.encoder(), rnn, asked.head(rnn.output_size))
    return Subject(model, asked.batch(0, batch, split="train", seed=seed, device="cpu"), asked.loss)


def _run(folder: Path, batch: int) -> Subject:
    trained = read_run(folder / "run.json")
    weights = next(
        (folder / f"{name}.safetensors" for name in ("best", "last") if (folder / f"{name}.safetensors").is_file()), None
    )
    if weights is None:
        raise ValueError(f"{folder} has no weights: neither best.safetensors nor last.safetensors is there. Train it first.")
    model, asked = trained.make_model(), trained.make_task()
    tensors, _ = checkpoint.load(weights)
    own_names = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    model.load_state_dict(own_names, strict=False)
    return Subject(model, asked.batch(0, batch, split="valid", seed=trained.seed, device="cpu"), asked.loss)


def _built(name: str) -> nn.Module:
    found = own(name)
    found = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(found, nn.Module):
        raise TypeError(f"--model {name} must give a torch.nn.Module; got {type(found).__name__}.")
    return found


def _read(flag: str, path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except FileNotFoundError:
        raise ValueError(f"{flag} {path} is not there.") from None
    except (ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{flag} {path} is no NumPy file of numbers ({error}). Write it with numpy.save.") from None


def _like(value: Tensor, model: nn.Module) -> Tensor:
    """Numbers in the precision of the model's parameters, whole ones as int64."""
    if not value.is_floating_point():
        return value.long()
    return value.to(next((p.dtype for p in model.parameters()), torch.float32))
