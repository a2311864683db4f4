"""The law of the compiler: a compiled step has the results and gradients of autograd through a plain loop of that step.

All results are compared: the trajectory, the final state, and the gradients of every input, initial state and weight, under
random cotangents on both. Batch rows have different lengths, 0 among them, and run in either direction of time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from unfading.fuse.c import backward, compiler, kernel
from unfading.fuse.c.backward import Backward
from unfading.fuse.c.kernel import Kernel
from unfading.fuse.ir.program import Program
from unfading.fuse.trace.recorder import Signature

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
Results = dict[str, Tensor]

# float64: sums of a few hundred terms of size 1, in another order, through a few steps.
EXACT = 1e-10


class Setting(NamedTuple):
    """How a step is run."""

    T: int
    B: int
    lengths: tuple[int, ...] | None = None
    reverse: bool = False
    ignored: tuple[str, ...] = ()  # results without a cotangent: nothing is computed from them
    unwanted: tuple[str, ...] = ()  # gradients that are not asked for
    transposed: bool = False  # tensors whose memory order differs from the order of their axes


class Numbers(NamedTuple):
    inputs: list[Tensor]
    states: list[Tensor]
    weights: list[Tensor]
    trajectory: list[Tensor | None]  # cotangents of it
    final: list[Tensor | None]  # and of the final state


def some_settings(signature: Signature, seed: int) -> list[Setting]:
    """One row, a few rows, and more than a tile; with lengths and without, both ways; at times long enough to be cut."""
    random = Random(seed)
    states = range(len(signature.states))
    gradients = [name for name in _gradient_names(signature) if "state" not in name]
    out = []
    for T, B in [(random.randint(1, 6), 1), (random.choice([2, 5, 12]), 5), (random.randint(1, 3), 26)]:
        lengths = tuple(random.randint(0, T) for _ in range(B)) if random.random() < 0.6 else None
        ignored = random.choice([(), (), tuple(f"trajectory {i}" for i in states), tuple(f"final state {i}" for i in states)])
        unwanted = tuple(random.sample(gradients, random.randint(1, len(gradients)))) if random.random() < 0.3 else ()
        out.append(Setting(T, B, lengths, random.random() < 0.5, ignored, unwanted, transposed=B == 5))
    return out


def some_numbers(signature: Signature, setting: Setting, seed: int = 0) -> Numbers:
    """Random numbers between -1 and 1 for all arguments and cotangents."""
    generator = torch.Generator().manual_seed(seed)
    T, B = setting.T, setting.B

    def random(*shape: int) -> Tensor:
        return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(signature.dtype)

    shapes = {"sequence": (T, B), "shared": (T, 1), "constant": (1, B)}
    inputs = [random(*shapes[kind], n) for kind, n in zip(signature.kinds, signature.inputs, strict=True)]
    states = [random(B, n) for n in signature.states]
    weights = [random(*shape) for shape in signature.weights]
    trajectory = [None if f"trajectory {i}" in setting.ignored else random(T, B, n) for i, n in enumerate(signature.states)]
    final = [None if f"final state {i}" in setting.ignored else random(B, n) for i, n in enumerate(signature.states)]
    return Numbers(inputs, states, weights, trajectory, final)


def by_autograd(step: Step, signature: Signature, numbers: Numbers, setting: Setting) -> Results:
    """A loop in Python. Every row reads the input of its own time, and its state stays as it is once the row has ended."""
    T, B = setting.T, setting.B
    rows = torch.arange(B)
    lengths = torch.full((B,), T) if setting.lengths is None else torch.tensor(setting.lengths)
    inputs, states, weights = ([x.clone().requires_grad_() for x in group] for group in numbers[:3])
    state, after = states, []
    for s in range(T):
        runs = s < lengths
        time = torch.where(runs, lengths - 1 - s if setting.reverse else s, 0)
        at = {"sequence": (time, rows), "shared": (torch.full((B,), s), 0), "constant": (0, rows)}
        new = step([x[at[kind]] for x, kind in zip(inputs, signature.kinds, strict=True)], state, weights)
        state = [torch.where(runs[:, None], n, old) for n, old in zip(new, state, strict=True)]
        after.append(state)
    time = torch.arange(T)[:, None]
    steps_done = (lengths - 1 - time).clamp(min=0) if setting.reverse else time
    trajectory = [torch.stack(part)[steps_done, rows] for part in zip(*after, strict=True)]
    outputs = [*(torch.where((time < lengths)[:, :, None], part, 0.0) for part in trajectory), *state]
    cotangents = [*numbers.trajectory, *numbers.final]
    total = sum((out * d).sum() for out, d in zip(outputs, cotangents, strict=True) if d is not None)
    leaves = [*inputs, *states, *weights]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    else:
        gradients = tuple(map(torch.zeros_like, leaves))
    return named_results([*outputs, *outputs], gradients, signature)


def by_kernel(loops: Kernel, signature: Signature, numbers: Numbers, setting: Setting) -> Results:
    """The compiled loops. NaN past the end of each row and in fresh memory shows a read of either."""
    lengths = None if setting.lengths is None else torch.tensor(setting.lengths)
    inputs, states, weights, d_trajectory, d_final = numbers
    if lengths is not None:
        past = (torch.arange(setting.T)[:, None] >= lengths)[:, :, None]
        inputs = [
            x.masked_fill(past, torch.nan) if k == "sequence" else x for x, k in zip(inputs, signature.kinds, strict=True)
        ]
        d_trajectory = [d if d is None else d.masked_fill(past, torch.nan) for d in d_trajectory]
    if setting.transposed:
        groups = (inputs, states, weights, d_trajectory, d_final)
        inputs, states, weights, d_trajectory, d_final = ([_transposed(x) for x in group] for group in groups)
    options = Kernel.options(lengths, setting.reverse)
    wanted = [name not in setting.unwanted for name in _gradient_names(signature)]
    with _poisoned_memory(), patch.object(backward, "CHUNK_BYTES", 1):
        in_evaluation, end, _ = loops.forward(inputs, states, weights, options, keep=False)
        trajectory, final, saved = loops.forward(inputs, states, weights, options, keep=True)
        back = Backward(loops, inputs, states, weights, trajectory, saved, options, wanted)
        d_inputs, d_states, d_weights = back.gradients(d_trajectory, d_final)
    return named_results([*trajectory, *final, *in_evaluation, *end], [*d_inputs, *d_states, *d_weights], signature)


def wrong(got: Results, want: Results, tolerance: float = EXACT) -> dict[str, float]:
    """The results that differ, with their relative errors.

    The scale of an error is the result's own largest entry, or a thousandth of the largest of all: a gradient that cancels
    to nothing is as exact as what it is the sum of.
    """
    assert all(value.isfinite().all() for value in want.values()), "the reference is not finite"
    floor = max(value.abs().max().item() for value in want.values()) / 1000
    errors = {}
    for name, value in got.items():
        assert value.shape == want[name].shape, f"{name} has shape {list(value.shape)}, not {list(want[name].shape)}"
        error = (value.double() - want[name].double()).abs().max().item()
        scale = max(want[name].abs().max().item(), floor)
        if not error <= tolerance * scale:
            errors[name] = error / scale if scale else error
    return errors


def compiled(programs: Sequence[Program], dtype: torch.dtype = torch.float64, *, optimised: bool = False) -> list[Kernel]:
    """The kernels of programs, compiled together. Without optimisation the C compiler needs a tenth of the time."""
    kernel.products(dtype)
    if optimised:
        return kernel.compiled(programs, dtype)
    compiler.flags.cache_clear()
    try:
        with patch.object(compiler, "FLAGS", ("-O0", "-shared", "-fPIC", "-std=gnu11")):
            return kernel.compiled(programs, dtype)
    finally:
        compiler.flags.cache_clear()


def named_results(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], signature: Signature) -> Results:
    """Trajectory and final state, both again in evaluation, and the gradients of inputs, states and weights, by name."""
    states = range(len(signature.states))
    names = [f"trajectory {i}" for i in states] + [f"final state {i}" for i in states]
    names += [f"{name} in evaluation" for name in names] + _gradient_names(signature)
    results = zip(names, [*outputs, *gradients], strict=True)
    return {name: value.detach() for name, value in results if value is not None}


def _gradient_names(signature: Signature) -> list[str]:
    parts = (("input", signature.inputs), ("state", signature.states), ("weight", signature.weights))
    return [f"gradient of {kind} {i}" for kind, members in parts for i in range(len(members))]


def _transposed(x: Tensor | None) -> Tensor | None:
    """The same tensor, with the last of its axes first in memory."""
    return x if x is None or x.dim() == 0 else x.movedim(-1, 0).contiguous().movedim(0, -1)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Inside the block torch.empty and similar functions return NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
