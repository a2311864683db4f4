"""`unfading.export.executorch`: a model as a program for ExecuTorch, PyTorch's runtime for phones and small devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unfading.errors import check_count, check_flag
from unfading.export.model_stages import Exported, exported
from unfading.export.stage import run_step
from unfading.export.write_c import check_finite
from unfading.export.write_onnx import check_new_file
from unfading.files.atomic import write_atomically
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.tasks.base import EveryStep
from unfading.tasks.scaling import Scale


class ExecutorchProgram(NamedTuple):
    """What a file of ExecuTorch takes beside samples, and its size."""

    size: int  # bytes of the file
    state: tuple[Tensor, ...]  # of a program of a single step: the state before the first step, its inputs behind the sample


def executorch(
    model: Model | Recurrent,
    path: Path | str,
    *,
    steps: int | None = None,
    batch: int = 1,
    scale: Scale | None = None,
    overwrite: bool = False,
) -> ExecutorchProgram:
    """Write a model as a file for ExecuTorch, in float32. Needs the package `executorch`.

    Without `steps` the program is a single step: its method `forward` takes a sample x [B, I], or tokens int64 [B], and the
    state, and returns the output [B, n] and the state after it. With `steps` it is a whole sequence: it takes x [T, B, I], or
    tokens int64 [T, B], and returns the output, [B, n] for a model that predicts once per sequence and [T, B, n] else.

    Args:
        model: the model, or a recurrent layer; written as it runs in evaluation.
        path: the file to write, usually with the ending .pte.
        steps: T, the number of steps of a sequence; None for a program of a single step.
        batch: B, the number of rows.
        scale: mean and spread of the normalisation (x - mean) / spread of samples, which becomes a part of the program.
        overwrite: replace a file that exists.
    """
    path = Path(path)
    check_flag("overwrite", overwrite)
    if steps is not None:
        check_count("steps", steps)
    check_count("batch", batch)
    check_new_file(path, "ExecuTorch", overwrite=overwrite)
    try:
        from executorch.exir import to_edge
    except ImportError:
        raise ValueError(
            "export to ExecuTorch needs the package executorch, which is not installed. Get it with: "
            "pip install 'unfading[executorch]'"
        ) from None
    step = single_step(model, scale)
    given = step.example(batch)
    if steps is None:
        program = torch.export.export(step, given)
    else:
        once = isinstance(model, Model) and not isinstance(model.head, EveryStep)
        program = torch.export.export(WholeSequence(step, last=once), (step.samples(steps, batch),))
    buffer = to_edge(program).to_executorch().buffer
    path.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(path, "ExecuTorch", overwrite=overwrite)
    write_atomically(path, buffer)
    return ExecutorchProgram(len(buffer), given[1:] if steps is None else ())


def single_step(model: Model | Recurrent, scale: Scale | None = None) -> "SingleStep":
    """The module of one step, for torch.export."""
    stages = exported(model, scale)
    check_finite(stages)
    return SingleStep(stages).eval()


class SingleStep(nn.Module):
    """One step of all stages: (x, state ...) -> (output, state ...).

    The state has the parts of each layer; for a model that depends on the index of the step, the index, int64 [1]; for a head
    over all outputs, their sum [B, n], for `PooledOverTime` their maximum [B, n], and their number [1].
    """

    def __init__(self, model: Exported):
        super().__init__()
        self.model = model
        self.timed = any(stage.tables for stage in model.stages)
        for stage in model.stages:
            for i, weight in enumerate(stage.weights):
                self._keep(f"{stage.name}_w{i}", weight)
            for i, table in stage.tables.items():
                self._keep(f"{stage.name}_table{i}", table)
        if model.tokens is not None:
            self._keep("tokens", model.tokens)

    def _keep(self, name: str, numbers: object) -> None:
        self.register_buffer(name, torch.as_tensor(numbers).float())

    def state(self, batch: int) -> tuple[Tensor, ...]:
        """The state before the first step."""
        parts = [part for stage in self.model.stages for part in stage.states]
        state = [torch.from_numpy(part).float().repeat(batch, 1) for part in parts]
        if self.timed:
            state.append(torch.zeros(1, dtype=torch.int64))
        if self.model.pooling:
            total = torch.zeros(batch, self.model.pooled_size)
            largest = [torch.full_like(total, -torch.inf)] if self.model.pooling == "pooled" else []
            state += [total, *largest, torch.zeros(1)]
        return tuple(state)

    def samples(self, *sizes: int) -> Tensor:
        """Samples of these sizes, as an example."""
        if self.model.tokens is not None:
            return torch.zeros(sizes, dtype=torch.int64)
        return torch.zeros(*sizes, self.model.input_size)

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """Arguments of the step."""
        return (self.samples(batch), *self.state(batch))

    def forward(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        parts = list(state)
        after: list[Tensor] = []
        count = sum(len(stage.states) for stage in self.model.stages)
        index = parts[count] if self.timed else None
        if self.model.tokens is not None:
            x = nn.functional.embedding(x, self.get_buffer("tokens"))
        pools: list[Tensor] = []
        for stage in self.model.stages:
            if self.model.pooling and stage is self.model.stages[-1]:
                x, pools = self._pool(x, parts)
            own, parts = parts[: len(stage.states)], parts[len(stage.states) :]
            weights = [self.get_buffer(f"{stage.name}_w{i}") for i in range(len(stage.weights))]
            inputs = {0: x}
            for i, table in stage.tables.items():
                assert index is not None
                inputs[i] = self.get_buffer(f"{stage.name}_table{i}")[index.clamp(max=len(table) - 1)]
            stored = run_step(stage, weights, inputs, own)
            after += [stored[i] for i in range(len(own))]
            x = stored[stage.output].clone()
        if index is not None:
            after.append(index + 1)
        return (x, *after, *pools)

    def _pool(self, x: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What the head reads of all outputs so far, and the last parts of the state after this one."""
        steps = parts[-1] + 1.0
        if self.model.pooling == "mean":
            total = parts[-2] + x
            return total / steps, [total, steps]
        total, largest = parts[-3] + x, torch.maximum(parts[-2], x)
        return torch.cat([x, total / steps, largest], dim=-1), [total, largest, steps]


class WholeSequence(nn.Module):
    """All steps of a sequence x [T, B, I], or of tokens [T, B], one after the other in the graph.

    ExecuTorch 1.5 has `scan`, a loop, but computed other numbers with it.

    Args:
        step: the single step.
        last: whether the output is that after the last step, and not those after all steps.
    """

    def __init__(self, step: SingleStep, *, last: bool):
        super().__init__()
        self.step, self.last = step, last

    def forward(self, x: Tensor) -> Tensor:
        state: Sequence[Tensor] = self.step.state(x.shape[1])
        outputs = []
        for sample in x.unbind(0):
            output, *state = self.step(sample, *state)
            outputs.append(output)
        return outputs[-1] if self.last else torch.stack(outputs)
