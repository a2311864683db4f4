"""The plan of a cell: which program its step is compiled to, and which tensors that program reads.

`plan(cell)` traces the step once (`make_plan`) and returns the same plan until the contents of the cell change. The kernels of
a plan are built when they are first asked for: in C for the CPU, in Triton for a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch

from unfading.cells.base import Cell
from unfading.fuse.contents import Contents
from unfading.fuse.fork_lock import ForkLock
from unfading.fuse.ir.program import Program
from unfading.fuse.isolation import on_trial
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.torch_state import traced

if TYPE_CHECKING:
    from unfading.fuse.c.kernel import Kernel
    from unfading.fuse.trace.recorder import Signature
    from unfading.fuse.trace.tree import Structure
    from unfading.fuse.triton.kernel import TritonKernel

Target = Literal["c", "triton"]


class Plan(NamedTuple):
    """The program of a cell, and where the tensors that it reads come from."""

    key: str  # of the program, in PROGRAMS
    signature: "Signature"
    inputs: "Structure"  # the nesting of what project returns
    names: tuple[str, ...]  # of its leaves
    weights: "Structure"
    dense: tuple[bool, ...]  # for each LowRank matrix of the weights: whether one dense product is cheaper than two thin ones
    parameters: tuple[str, ...]  # that project reads, where it is compiled with the step
    with_project: bool  # whether the program contains the projection
    affine: bool  # whether it does so as x A + c, for one feature x
    target: Target

    @property
    def local(self) -> bool:
        """Whether the program shows that the projection is local in time: x at one step is all that it reads of a sequence."""
        return self.with_project and len(self.signature.kinds) == 1


class FramePlan(NamedTuple):
    """The program of a convolutional cell (`frames/`), and where the tensors that it reads come from."""

    key: str  # of the program, in FRAME_PROGRAMS
    dtype: torch.dtype
    inputs: "Structure"  # the nesting of what project returns
    names: tuple[str, ...]  # of its leaves
    weights: "Structure"
    parameters: tuple[str, ...]  # that project reads, where it is compiled with the step
    with_project: bool  # whether the program contains the projection
    channels: tuple[int, ...]  # of the inputs, then of the states
    shapes: tuple[tuple[int, ...], ...]  # of the weights and parameters
    target: Target


class TensorNames(NamedTuple):
    """What a cell calls its inputs, its states and its weights."""

    inputs: Sequence[str]
    states: Sequence[str]
    weights: Sequence[str]


# Every program traced in this process, or loaded with an exported graph, by the hash of its text.
PROGRAMS: dict[str, Program] = {}
NAMES: dict[str, TensorNames] = {}  # the names that the first cell with a program uses

_c_kernels: "dict[tuple[str, torch.dtype], Kernel]" = {}
_triton_kernels: "dict[str, TritonKernel | Refusal]" = {}
# For each cell, its last two plans or refusals, with the contents they were made for: two, since a training
# loop switches between training and evaluation.
_plans: "WeakKeyDictionary[Cell, list[tuple[Contents, FirstParameter, Plan | FramePlan | Refusal]]]" = WeakKeyDictionary()
# Held while a cell is planned. Planning works on copies, so the lock is there to do the work once. A cell that is planned
# inside the trial of another one goes without it: the thread that waits for that trial holds the lock.
_planning = ForkLock()


def plan(cell: Cell) -> Plan | FramePlan | Refusal:
    """The plan of a cell with its present contents, or why its step cannot be compiled."""
    return _stored(cell) or _new(cell)


def _stored(cell: Cell) -> Plan | FramePlan | Refusal | None:
    for contents, parameter, result in _plans.get(cell, ()):
        if parameter.unchanged() and contents.unchanged():
            return result
    return None


def _new(cell: Cell) -> Plan | FramePlan | Refusal:
    from unfading.fuse.make_plan import make_plan

    with nullcontext() if on_trial() else _planning.lock:
        result = _stored(cell)  # another thread may have made it meanwhile
        if result is None:
            parameter = FirstParameter(cell)
            contents, result = make_plan(cell)
            # Inside a transform of torch.func parameters have no values. A refusal there says nothing about later calls.
            if not (isinstance(result, Refusal) and traced()):
                _plans[cell] = [(contents.for_comparison(), parameter, result), *_plans.get(cell, [])[:1]]
        return result


class FirstParameter:
    """The dtype and the device of the first parameter of a cell, which stands for all of them."""

    def __init__(self, cell: Cell):
        first = (
            (module._parameters, name) for module in cell.modules() for name, p in module._parameters.items() if p is not None
        )
        # The dictionary that it is in, since the parameter itself may be replaced.
        self.parameters, self.name = next(first, ({}, ""))
        self.kind = self._kind()

    def unchanged(self) -> bool:
        return self._kind() == self.kind

    def _kind(self) -> tuple[torch.dtype, str, Target | None] | None:
        parameter = self.parameters.get(self.name)
        return None if parameter is None else (parameter.dtype, parameter.device.type, target_of(parameter.device))


def plan_or_raise(cell: Cell) -> Plan:
    """The plan of a cell over vectors; NotFusable where there is none."""
    result = plan(cell)
    if isinstance(result, Refusal):
        raise NotFusable(*result)
    if isinstance(result, FramePlan):
        raise NotFusable("the cell reads frames")
    return result


# -- kernels ------------------------------------------------------------------------------------------------------------------


def c_kernel(key: str, dtype: torch.dtype) -> "Kernel":
    """The program compiled for the CPU. Raises NoCompiler where that fails."""
    kernel = _c_kernels.get((key, dtype))
    if kernel is None:
        from unfading.fuse.c.kernel import compiled

        (kernel,) = compiled([PROGRAMS[key]], dtype)
        _c_kernels[key, dtype] = kernel
    return kernel


def triton_kernel(key: str) -> "TritonKernel":
    """The program for a GPU, which Triton compiles when it first runs. Raises NoTriton or NotFusable."""
    kernel = _triton_kernels.get(key)
    if kernel is None:
        from unfading.fuse.triton.kernel import TritonKernel

        try:
            kernel = TritonKernel(PROGRAMS[key], NAMES[key])
        except NotFusable as error:
            kernel = error.refusal
        _triton_kernels[key] = kernel
    if isinstance(kernel, Refusal):
        raise NotFusable(*kernel)
    return kernel


# -- devices ------------------------------------------------------------------------------------------------------------------

_interpreted = False
_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside the block, cells on the CPU run as Triton kernels in Triton's interpreter: slowly, and in float32.

    This tests the kernels for a GPU without one. TRITON_INTERPRET=1 must be set in the environment before Triton is imported.
    """
    global _interpreted
    before, _interpreted = _interpreted, True
    try:
        yield
    finally:
        _interpreted = before


def target_of(device: torch.device) -> Target | None:
    """The kind of kernel that runs on a device; None where there is none."""
    if device.type == "cpu":
        return "triton" if _interpreted else "c"
    return "triton" if device.type == "cuda" else None


def autocast_precision(device_type: str) -> str:
    """The precision in which autocast multiplies on a type of device, "bf16" or "fp16"; empty where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return _SHORT_NAMES.get(torch.get_autocast_dtype(device_type), "")


def float32_dots(device: torch.device) -> str:
    """The precision of the dots of a kernel for a GPU without autocast: tf32 where torch allows it for float32 products."""
    return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
