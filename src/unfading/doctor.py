"""What of the fast paths works on this machine, and why the rest does not."""

import platform
from typing import NamedTuple

import torch

from unfading import catalogue
from unfading.backends.cuda_graph.backend import unrecordable
from unfading.cells.base import Cell
from unfading.errors import unknown
from unfading.fuse.c import cache
from unfading.fuse.c.compiler import NoCompiler
from unfading.fuse.devices import interpreted
from unfading.fuse.ir.differentiate import Source, differentiate
from unfading.fuse.plan import PROGRAMS, plan, triton_kernel
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.triton.source import NoTriton, triton_missing

# The smallest library: whether the compiler works at all is known only once it has made one.
PROBE = "int unfading_probe(void) { return 42; }\n"


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    good: bool


def findings() -> list[Finding]:
    """The machine, the compiler and its cache, each with whether it is as it should be."""
    cached = cache.describe()
    lines = [
        Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads", True),
        Finding("machine", f"{platform.machine()}, {platform.system()} {platform.release()}", True),
        Finding("compiler", f"{cached.compiler} ({cached.version})" if cached.compiler else "none", bool(cached.compiler)),
        Finding("flags", cached.flags, True),
        Finding("cache", f"{cached.folder}: {cached.entries} kernels, {cached.bytes / 1e6:.1f} MB", cached.writable),
    ]
    if cached.trouble:
        lines.append(Finding("trouble", cached.trouble, False))
    try:
        works = cache.library(PROBE).unfading_probe() == 42
        lines.append(Finding("compiling", "works" if works else "gives wrong results; set CC to another compiler", works))
    except NoCompiler as error:
        lines.append(Finding("compiling", f"{error}; every cell runs by the reference loop", False))
    lines.append(_gpu())
    return lines


def _gpu() -> Finding:
    """Whether layers on a GPU run fused."""
    if not torch.cuda.is_available():
        return Finding("gpu", "none that torch can use", True)
    missing = triton_missing()
    name = torch.cuda.get_device_name()
    return Finding("gpu", f"{name}; {missing or 'kernels by Triton'}", missing is None)


class Explanation(NamedTuple):
    """How a cell runs on the CPU."""

    name: str
    fused: bool
    reason: str  # why not; where it does, what is compiled


def explain(cell: type[Cell]) -> Explanation:
    """Whether a cell's step, at its default options, can be compiled; what the compiler makes of it is not tried."""
    name = cell.__name__.removesuffix("Cell")
    found = plan(cell(1, 8))
    if isinstance(found, Refusal):
        return Explanation(name, False, str(found))
    return Explanation(name, True, "step and projection" if found.with_project else "step; the projection runs before the loop")


def programs(name: str, *, input_size: int, hidden_size: int) -> str:
    """The program of a cell's step and its reverse, as text."""
    cells = {cell.__name__.removesuffix("Cell"): cell for cell in catalogue.cells()}
    if name not in cells:
        raise ValueError(unknown("cell", name, list(cells)))
    found = plan(cells[name](input_size, hidden_size))
    if isinstance(found, Refusal):
        raise ValueError(f"{name} is not compiled: {found}.")
    made = differentiate(PROGRAMS[found.key])
    after = [f"W{p.block.weight} += {p.scale:g} * {_where(p.dy)}^T {_where(p.v)}" for p in made.outer]
    after += [f"weight{t.weight} += sum of {_where(t.dy)}" for t in made.totals]
    forward, back = str(made.forward), str(made.reverse)
    return f"forward, every step:\n{forward}\n\nbackward, every step:\n{back}\n\nafter the loop:\n" + "\n".join(after)


def _where(source: Source) -> str:
    return f"{source.kind}{source.index}[{source.start}:]"


def explanations() -> list[Explanation]:
    """Of every cell of the library."""
    return [explain(cell) for cell in catalogue.cells()]


class OnGPU(NamedTuple):
    """How a cell runs on a GPU, in float32."""

    name: str
    backend: str  # which "auto" takes: fused, graph or reference; none where the cell does not come in the size
    reason: str  # why none that is faster


def explain_on_gpu(cell: type[Cell], hidden_size: int) -> OnGPU:
    """What of a cell can be written as a kernel or recorded, at a size; needs no GPU, and does not ask one for room on it."""
    name = cell.__name__.removesuffix("Cell")
    try:
        made = cell(1, hidden_size)
    except ValueError as error:
        return OnGPU(name, "none", str(error))
    with interpreted():
        found = plan(made)
        try:
            if not isinstance(found, Refusal):
                triton_kernel(found.key)
                return OnGPU(name, "fused", "")
            reason = str(found)
        except (NoTriton, NotFusable) as error:
            reason = str(error)
    trouble = unrecordable(made)
    return OnGPU(name, "graph", reason) if trouble is None else OnGPU(name, "reference", f"{reason}; {trouble}")


def explanations_on_gpu(hidden_size: int) -> list[OnGPU]:
    """Of every cell of the library, where there is a GPU to run them."""
    return [explain_on_gpu(cell, hidden_size) for cell in catalogue.cells()] if torch.cuda.is_available() else []
