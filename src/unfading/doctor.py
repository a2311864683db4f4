"""Which fast paths work on this machine, and why the others do not."""

import platform
from typing import NamedTuple

import torch

from unfading import catalogue
from unfading.backends.cuda_graph.backend import unrecordable
from unfading.cells.base import Cell
from unfading.errors import unknown
from unfading.fuse.c import cache
from unfading.fuse.c.compiler import NoCompiler
from unfading.fuse.frames.frame_kernels import FRAME_PROGRAMS
from unfading.fuse.ir.differentiate import Source, differentiate
from unfading.fuse.plan import PROGRAMS, FramePlan, interpreted, plan, triton_kernel
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.triton.estimates import GRAPHS, REFERENCE, LoopEstimate, estimates
from unfading.fuse.triton.kernel import gpu
from unfading.fuse.triton.launch_settings import H200, Gpu
from unfading.fuse.triton.source import NoTriton, triton_missing

# The smallest library: only a compiled library shows that the compiler works.
PROBE = "int unfading_probe(void) { return 42; }\n"


class Check(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    good: bool


def checks() -> list[Check]:
    """The machine, the compiler, its cache and the GPU, each with whether it works."""
    cached = cache.describe()
    lines = [
        Check("torch", f"{torch.__version__}, {torch.get_num_threads()} threads", True),
        Check("machine", f"{platform.machine()}, {platform.system()} {platform.release()}", True),
        Check("compiler", f"{cached.compiler} ({cached.version})" if cached.compiler else "none", bool(cached.compiler)),
        Check("flags", cached.flags, True),
        Check(
            "cache",
            f"{cached.folder}: {cached.entries} kernels, {cached.bytes / 1e6:.1f} MB of at most {cached.limit / 1e6:g} MB",
            cached.writable,
        ),
    ]
    if cached.trouble:
        lines.append(Check("trouble", cached.trouble, False))
    try:
        works = cache.library(PROBE).unfading_probe() == 42
        lines.append(Check("compiling", "works" if works else "gives wrong results; set CC to another compiler", works))
    except NoCompiler as error:
        lines.append(Check("compiling", f"{error}; every cell runs by the reference loop", False))
    lines.append(_gpu())
    return lines


def _gpu() -> Check:
    """Whether layers on a GPU run fused."""
    if not torch.cuda.is_available():
        return Check("gpu", "none that torch can use", True)
    missing = triton_missing()
    name = torch.cuda.get_device_name()
    return Check("gpu", f"{name}; {missing or 'kernels by Triton'}", missing is None)


class Explanation(NamedTuple):
    """How a cell runs on the CPU."""

    name: str
    fused: bool
    reason: str  # why it is not fused; if it is, what is compiled


def explain(cell: type[Cell]) -> Explanation:
    """Whether a cell's step can be compiled at its default options. The C compiler is not run."""
    name = cell.__name__.removesuffix("Cell")
    cell_plan = plan(cell(1, 8))
    if isinstance(cell_plan, Refusal):
        return Explanation(name, False, str(cell_plan))
    compiled = "step and projection" if cell_plan.with_project else "step; the projection runs before the loop"
    return Explanation(name, True, compiled)


def programs(name: str, *, input_size: int, hidden_size: int) -> str:
    """The program of a cell's step and its reverse program, as text."""
    cells = {cell.__name__.removesuffix("Cell"): cell for cell in (*catalogue.cells(), *catalogue.convolutional_cells())}
    if name not in cells:
        raise ValueError(unknown("cell", name, list(cells)))
    cell_plan = plan(cells[name](input_size, hidden_size))
    if isinstance(cell_plan, Refusal):
        raise ValueError(f"{name} is not compiled: {cell_plan}.")
    if isinstance(cell_plan, FramePlan):
        program = FRAME_PROGRAMS[cell_plan.key]
        reverse = "\n".join(f"stage {i}\n{both.reverse}" for i, both in reversed(list(enumerate(program.reversed()))))
        return f"forward, every step, for each pixel:\n{program}\n\nbackward, every step, for each pixel:\n{reverse}"
    both = differentiate(PROGRAMS[cell_plan.key])
    after = [f"W{p.block.weight} += {p.scale:g} * {_where(p.dy)}^T {_where(p.v)}" for p in both.outer]
    after += [f"weight{t.weight} += sum of {_where(t.dy)}" for t in both.totals]
    forward, back = str(both.forward), str(both.reverse)
    return f"forward, every step:\n{forward}\n\nbackward, every step:\n{back}\n\nafter the loop:\n" + "\n".join(after)


def _where(source: Source) -> str:
    return f"{source.kind}{source.index}[{source.start}:]"


def explanations() -> list[Explanation]:
    """The explanation of every cell of the library."""
    return [explain(cell) for cell in (*catalogue.cells(), *catalogue.convolutional_cells())]


class GpuCall(NamedTuple):
    """A call of a layer on a GPU, for which the choice of a loop is explained."""

    hidden_size: int = 128
    batch: int = 128
    tf32: bool = False
    gpu: Gpu = H200

    @property
    def precision(self) -> str:
        """Of the dots of a kernel."""
        return "tf32" if self.tf32 else "tf32x3"


class OnGPU(NamedTuple):
    """How a cell runs on a GPU."""

    name: str
    backend: str  # the one that "auto" takes: fused, graph or reference; none where the cell does not exist in this size
    reason: str  # why no faster one
    loops: list[LoopEstimate]  # every way to run it, the fastest first, and those that cannot run


def explain_on_gpu(cell: type[Cell], call: GpuCall) -> OnGPU:
    """How a cell runs on a GPU, and why: by a kernel, by CUDA graphs, or by the reference loop. It needs no GPU."""
    name = cell.__name__.removesuffix("Cell")
    try:
        example = cell(1, call.hidden_size)
    except ValueError as error:
        return OnGPU(name, "none", str(error), [])
    loops: list[LoopEstimate] = []
    with interpreted():
        cell_plan = plan(example)
        try:
            if isinstance(cell_plan, Refusal):
                reason = str(cell_plan)
            else:
                loops = estimates(triton_kernel(cell_plan.key), call.precision, call.batch, call.gpu)
                reason = "; ".join(loop.detail for loop in loops if loop.microseconds is None)
        except (NoTriton, NotFusable) as error:
            reason = str(error)
    trouble = unrecordable(example)
    if trouble is not None:
        loops = [loop._replace(microseconds=None, detail=trouble) if loop.loop == GRAPHS else loop for loop in loops]
    fastest = next((loop.loop for loop in loops if loop.microseconds is not None), None)
    if fastest not in (None, GRAPHS, REFERENCE):
        return OnGPU(name, "fused", "", loops)
    if trouble is None:
        return OnGPU(name, "graph", reason or "CUDA graphs are estimated to be faster", loops)
    return OnGPU(name, "reference", f"{reason}; {trouble}", loops)


def explanations_on_gpu(call: GpuCall, cell: str | None = None) -> list[OnGPU]:
    """How every cell of the library, or one of them, runs on a GPU."""
    cells = {each.__name__.removesuffix("Cell"): each for each in catalogue.cells()}
    if cell is not None and cell not in cells:
        raise ValueError(unknown("cell", cell, list(cells)))
    return [explain_on_gpu(each, call) for name, each in cells.items() if cell in (None, name)]


def present_gpu() -> tuple[str, Gpu] | None:
    """The name and the properties of the GPU of this machine; None where there is none that kernels run on."""
    if not torch.cuda.is_available() or triton_missing() is not None:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_name(device), gpu(device)
