"""Every way in which a cell can run on a GPU, with its estimated time or the reason why it cannot: for `unfading doctor`."""

from typing import NamedTuple

from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.launch_settings import Candidate, Gpu
from unfading.fuse.triton.step_time import graph_microseconds, reference_microseconds

WHOLE, DIVIDED, GRAPHS, REFERENCE = "all units in a program", "units divided", "CUDA graphs", "reference loop"
LANES = "a thread for each unit"


class LoopEstimate(NamedTuple):
    """One way to run a cell."""

    loop: str
    microseconds: float | None  # of a step, forward and backward; None where it cannot run
    detail: str  # how it is launched, or why it cannot run


def estimates(kernel: TritonKernel, precision: str, rows: int, gpu: Gpu) -> list[LoopEstimate]:
    """The ways to run a cell on so many rows, the fastest first."""
    every = {name: kernel.candidates(name, precision, (1, rows), gpu) for name in ("train", "back")}
    ways = (
        [_compiled(LANES, list(every.values()), None)]
        if kernel.lanes is not None
        else _with_matrices(kernel, precision, every, gpu)
    )
    ways.append(LoopEstimate(GRAPHS, graph_microseconds(kernel.step, rows, keep=True), "recorded once, 32 steps at a time"))
    ways.append(LoopEstimate(REFERENCE, reference_microseconds(kernel.step, keep=True), "the host launches every operation"))
    return sorted(ways, key=lambda way: float("inf") if way.microseconds is None else way.microseconds)


def _with_matrices(kernel: TritonKernel, precision: str, every: dict[str, list[Candidate]], gpu: Gpu) -> list[LoopEstimate]:
    """The compiled loops of a step whose units read each other."""
    ways = [
        _compiled(WHOLE, [[c for c in each if c.setting.units is None] for each in every.values()], kernel.whole_refused),
        _compiled(
            DIVIDED,
            [[c for c in each if c.setting.units is not None] for each in every.values()],
            kernel.split_refused(precision, gpu),
        ),
    ]
    mixed = _compiled(f"{WHOLE} in one direction, {DIVIDED} in the other", list(every.values()), None)
    if all(way.microseconds is not None and way.microseconds > (mixed.microseconds or 0) for way in ways):
        ways.append(mixed)
    return ways


def _compiled(loop: str, every: list[list[Candidate]], refused: str | None) -> LoopEstimate:
    if not all(every):
        return LoopEstimate(loop, None, refused or "it does not fit on the GPU")
    forward, backward = (each[0] for each in every)
    detail = f"forward {_launched(forward)}, backward {_launched(backward)}"
    return LoopEstimate(loop, forward.microseconds + backward.microseconds, detail)


def _launched(candidate: Candidate) -> str:
    rows, units = candidate.setting.rows, candidate.setting.units
    program = f"{rows} rows" if units is None else f"{rows} rows x {units} units"
    return f"{duration(candidate.microseconds)} with {program} in a program"


def duration(microseconds: float) -> str:
    """As text, with three digits."""
    return f"{microseconds:.0f} us" if microseconds >= 100 else f"{microseconds:.3g} us"
