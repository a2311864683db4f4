"""The loops as bare operators, without a gradient of their own: what stands for them in compiled and exported graphs.

`models` is 0, or the size of a first axis that every tensor has then: many models in one launch on a GPU. Where models share
a tensor, that axis has stride 0. `dots` names the short numbers that autocast wants multiplied, and is empty without it.
"""

import torch
from torch import Tensor

from unfading.fuse.c.backward import Backward
from unfading.fuse.c.kernel import Walk
from unfading.fuse.devices import place_of
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import kernel, triton_kernel
from unfading.fuse.triton.kernel import Way


def forward(
    key: str,
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
    models: int,
    dots: str,
) -> list[Tensor]:
    """The trajectory, the final states, and what the gradient needs."""
    if place_of(states[0].device) == "triton":
        given = (_with_models(inputs, models), _with_models(states, models), _with_models(weights, models))
        trajectory, final, saved = triton_kernel(key).forward(*given, _way(lengths, reverse, states, models, dots), keep=keep)
        made = [*trajectory, *final, *([] if saved is None else [saved])]
        return made if models else [tensor.squeeze(0) for tensor in made]
    compiled = kernel(key, states[0].dtype)
    trajectory, final, saved = compiled.forward(inputs, states, weights, Walk.of(lengths, reverse), keep=keep)
    return [*trajectory, *final, *([] if saved is None else [saved])]


def backward(
    key: str,
    gradients: list[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    kept: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    wanted: list[bool],
    models: int,
    dots: str,
) -> list[Tensor]:
    """Gradients of inputs, states and weights; empty where one is not wanted."""
    n = len(states)
    if place_of(states[0].device) == "triton":
        given = (_with_models(inputs, models), _with_models(states, models), _with_models(weights, models))
        arriving = [None if d is None else d if models else d.unsqueeze(0) for d in gradients]
        had = _with_models(kept, models)
        way = _way(lengths, reverse, states, models, dots)
        back = triton_kernel(key).backward(
            (arriving[:n], arriving[n:]), given, (had[:n], had[n] if len(had) > n else None), way, wanted
        )
        found = [d if d is None or models else d.squeeze(0) for part in back for d in part]
    else:
        saved = kept[n] if len(kept) > n else None
        walk = Walk.of(lengths, reverse)
        on_cpu = Backward(kernel(key, states[0].dtype), inputs, states, weights, kept[:n], saved, walk, wanted)
        found = [d for part in on_cpu.gradients(gradients[:n], gradients[n:]) for d in part]
    return [states[0].new_empty(0) if d is None else d for d in found]


def _with_models(tensors: list[Tensor], models: int) -> list[Tensor]:
    return tensors if models else [tensor.unsqueeze(0) for tensor in tensors]


def _way(lengths: Tensor | None, reverse: bool, states: list[Tensor], models: int, dots: str) -> Way:
    if lengths is None:
        return Way(reverse, None, dots)
    lengths = lengths.to(states[0].device, torch.int64)
    return Way(reverse, lengths if models else lengths.unsqueeze(0), dots)


forward_op = torch.library.custom_op(
    "unfading::fused_forward",
    forward,
    mutates_args=(),
    schema="(str key, Tensor[] inputs, Tensor[] states, Tensor[] weights, Tensor? lengths, bool reverse, bool keep, "
    "int models, str dots) -> Tensor[]",
)
backward_op = torch.library.custom_op(
    "unfading::fused_backward",
    backward,
    mutates_args=(),
    schema="(str key, Tensor?[] gradients, Tensor[] inputs, Tensor[] states, Tensor[] weights, Tensor[] kept, "
    "Tensor? lengths, bool reverse, bool[] wanted, int models, str dots) -> Tensor[]",
)


@forward_op.register_fake
def _(
    key: str,
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    keep: bool,
    models: int,
    dots: str,
) -> list[Tensor]:
    lead = states[0].shape[:1] if models else ()
    if place_of(states[0].device) == "triton":
        saved_width, kinds = triton_kernel(key).saved, triton_kernel(key).program.kinds
    else:
        saved_width, kinds = kernel(key, states[0].dtype).saved, kernel(key, states[0].dtype).program.kinds
    timed = next(x for x, kind in zip(inputs, kinds, strict=True) if kind != InputKind.CONSTANT)
    T, B = timed.shape[len(lead)], states[0].shape[-2]
    saved = [states[0].new_empty((*lead, T, B, saved_width))] if keep and saved_width else []
    trajectory = [state.new_empty((*lead, T, B, state.shape[-1])) for state in states]
    return [*trajectory, *(state.new_empty(state.shape) for state in states), *saved]


@backward_op.register_fake
def _(
    key: str,
    gradients: list[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    weights: list[Tensor],
    kept: list[Tensor],
    lengths: Tensor | None,
    reverse: bool,
    wanted: list[bool],
    models: int,
    dots: str,
) -> list[Tensor]:
    always = range(len(inputs), len(inputs) + len(states))
    return [x.new_empty(x.shape if wanted[i] or i in always else 0) for i, x in enumerate((*inputs, *states, *weights))]
