"""Kernels of pixels for a GPU: one launch for all stores of one width, one thread for each channel of a pixel."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unfading.fuse.frames.pixel_groups import Group
from unfading.fuse.ir.program import NUMBERS, Op, TensorId, TensorKind, Value
from unfading.fuse.triton.language import EXPRESSIONS, PRELUDE, number, power
from unfading.fuse.triton.source import module

if TYPE_CHECKING:
    from unfading.fuse.frames.pixels import PixelKernel

BLOCK = 1024  # entries of one program of the grid


def launch(kernel: "PixelKernel", tensors: Mapping[TensorId, Tensor], pixels: int) -> None:
    """Run a kernel on tensors [pixels, channels] and flat weights, which all are contiguous."""
    functions = _functions(triton_source(kernel.groups, kernel.program.widths))
    for k, group in enumerate(kernel.groups):
        size = pixels * group.width
        arguments = [tensors[tensor] for tensor in tensors_of(group)]
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current device
            getattr(functions, f"pixels{k}")[(-(-size // BLOCK),)](*arguments, size, FAST=False, BLOCK=BLOCK)


def tensors_of(group: Group) -> list[TensorId]:
    """The tensors that the values of a group read or write, in the order of the arguments."""
    read = {(value.leaf.kind, value.leaf.index) for value in group.values if value.op is Op.LEAF}
    return sorted(read | {(store.kind, store.index) for store in group.stores})


def triton_source(groups: list[Group], widths: Mapping[TensorId, int]) -> str:
    """A module with a function for every group."""
    return "\n\n".join([PRELUDE, *(_function(f"pixels{k}", group, widths) for k, group in enumerate(groups))])


@cache
def _functions(source: str) -> Any:
    return module(source)


def _function(name: str, group: Group, widths: Mapping[TensorId, int]) -> str:
    n = group.width

    def address(kind: TensorKind, index: int, start: int, size: int) -> str:
        row = "" if kind == TensorKind.WEIGHT else f" + row * {widths[kind, index]}"
        return f"{kind}{index}{row} + {start} + {'channel' if size == n else 'channel * 0'}"

    names: dict[int, str] = {}
    lines = []
    for value in group.values:
        if value.op in NUMBERS:
            names[value.id] = number(value.number) if value.op is Op.CONST else "0.0"
        elif value.op is Op.EXPAND:
            names[value.id] = names[value.args[0].id]
        elif value.op is Op.LEAF:
            names[value.id] = f"v{value.id}"
            place = address(value.leaf.kind, value.leaf.index, value.leaf.start, value.size)
            lines.append(f"v{value.id} = tl.load({place}, mask=inside, other=0.0).to(tl.float32)")
        else:
            names[value.id] = f"v{value.id}"
            lines.append(f"v{value.id} = {_expression(value, [names[arg.id] for arg in value.args])}")
    for store in group.stores:
        place = address(store.kind, store.index, store.start, store.value.size)
        lines.append(f"tl.store({place}, channel * 0.0 + {names[store.value.id]}, mask=inside)")
    pointers = ", ".join(f"{kind}{index}" for kind, index in tensors_of(group))
    body = "\n".join(f"    {line}" for line in lines)
    return f"""@triton.jit
def {name}({pointers}, size, FAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = at // {n}
    channel = at % {n}
{body}
"""


def _expression(value: Value, args: list[str]) -> str:
    return power(args[0], value.number) if value.op is Op.POWER else EXPRESSIONS[value.op].format(*args)
