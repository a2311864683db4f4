"""The plan of a cell: which program its step is compiled to, and which tensors that program reads.

`plan(cell)` traces the step once (`make_plan`) and returns the same plan until an option of the cell changes. The kernels of a
plan are built when they are first asked for: in C for the CPU, in Triton for a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from unfading.cells.base import Cell
from unfading.fuse.ir.program import Program
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


class TensorNames(NamedTuple):
    """What a cell calls its inputs, its states and its weights."""

    inputs: Sequence[str]
    states: Sequence[str]
    weights: Sequence[str]


# Every program traced in this process, by the hash of its text. The operators receive this key.
PROGRAMS: dict[str, Program] = {}
NAMES: dict[str, TensorNames] = {}  # the names that the first cell with a program uses

_c_kernels: "dict[tuple[str, torch.dtype], Kernel]" = {}
_triton_kernels: "dict[str, TritonKernel | Refusal]" = {}
# For each cell, its last two plans or refusals, with the options they were made for: two, since a training
# loop switches between training and evaluation.
_plans: "WeakKeyDictionary[Cell, list[tuple[CellOptions, Plan | Refusal]]]" = WeakKeyDictionary()


def plan(cell: Cell) -> Plan | Refusal:
    """The plan of a cell with its present options, or why its step cannot be compiled."""
    plans = _plans.setdefault(cell, [])
    for options, result in plans:
        if options.unchanged():
            return result
    from unfading.fuse.make_plan import make_plan

    options, result = CellOptions(cell), make_plan(cell)
    # Inside a transform of torch.func parameters are replaced by wrappers. A refusal there says nothing about later calls.
    if not (isinstance(result, Refusal) and traced()):
        plans[:] = [(options, result), *plans[:1]]
    return result


def plan_or_raise(cell: Cell) -> Plan:
    """The plan of a cell; NotFusable where there is none."""
    result = plan(cell)
    if isinstance(result, Refusal):
        raise NotFusable(*result)
    return result


# -- kernels ------------------------------------------------------------------------------------------------------------------


def c_kernel(key: str, dtype: torch.dtype) -> "Kernel":
    """The program compiled for the CPU. Raises NoCompiler where that fails."""
    kernel = _c_kernels.get((key, dtype))
    if kernel is None:
        from unfading.fuse.c.kernel import compiled

        (kernel,) = compiled([_program(key)], dtype)
        _c_kernels[key, dtype] = kernel
    return kernel


def triton_kernel(key: str) -> "TritonKernel":
    """The program for a GPU, which Triton compiles when it first runs. Raises NoTriton or NotFusable."""
    kernel = _triton_kernels.get(key)
    if kernel is None:
        from unfading.fuse.triton.kernel import TritonKernel

        try:
            kernel = TritonKernel(_program(key), NAMES[key])
        except NotFusable as error:
            kernel = error.refusal
        _triton_kernels[key] = kernel
    if isinstance(kernel, Refusal):
        raise NotFusable(*kernel)
    return kernel


def _program(key: str) -> Program:
    if key not in PROGRAMS:
        raise RuntimeError(
            f"the fused program {key} is not known in this process; call a layer with the same cell once before it is used."
        )
    return PROGRAMS[key]


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


# -- whether a plan still holds -----------------------------------------------------------------------------------------------


class CellOptions:
    """Everything that a step may read beside its arguments: the attributes of a cell and of its submodules.

    Plain values are compared by value; so are lists, sets and dictionaries, entry by entry. Everything else, such as a
    function, is compared by identity.
    """

    PLAIN = (bool, int, float, str, tuple, frozenset, type(None))
    OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}

    def __init__(self, cell: Cell):
        self.attributes = []
        for module in cell.modules():
            own = [(name, value) for name, value in module.__dict__.items() if name not in self.OF_TORCH]
            plain = [(name, value) for name, value in own if isinstance(value, self.PLAIN)]
            others = [(name, value, _entries(value)) for name, value in own if not isinstance(value, self.PLAIN)]
            # The dictionary itself is stored, so that a comparison takes microseconds; a module never replaces its own.
            self.attributes.append((module.__dict__, len(module.__dict__), plain, others))
        self.absent = [(m._parameters, _absent(m._parameters)) for m in cell.modules() if m._parameters]
        self.children = [(module._modules, tuple(module._modules.values())) for module in cell.modules() if module._modules]
        self.parameter = next(
            ((m._parameters, name) for m in cell.modules() for name, p in m._parameters.items() if p is not None), None
        )
        self.kind = self._kind()

    def _kind(self) -> Any:
        """The dtype, the device and the target of the first parameter, which stands for all of them."""
        if self.parameter is None:
            return None
        parameter = self.parameter[0].get(self.parameter[1])
        return None if parameter is None else (parameter.dtype, parameter.device.type, target_of(parameter.device))

    def unchanged(self) -> bool:
        for now, size, plain, others in self.attributes:
            if len(now) != size:
                return False
            for name, value in plain:
                if now.get(name) != value:
                    return False
            for name, value, entries in others:
                if now.get(name) is not value or not self._same(_entries(value), entries):
                    return False
        same_children = all(tuple(now.values()) == then for now, then in self.children)
        same_parameters = all(_absent(now) == then for now, then in self.absent)
        return same_children and same_parameters and self._kind() == self.kind

    def _same(self, now: list[Any], then: list[Any]) -> bool:
        pairs = zip(now, then, strict=False)
        return len(now) == len(then) and all(a is b or (isinstance(b, self.PLAIN) and a == b) for a, b in pairs)


def _absent(parameters: dict[str, Any]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter is None]


def _entries(value: Any) -> list[Any]:
    """The entries of a container; an empty list for any other value."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, list | set) else []
