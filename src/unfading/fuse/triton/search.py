"""The fastest way to cut a cell's loops on the GPU at hand: searched for once, on request, and remembered on disk.

Each loop is timed at its usual setting, then with other numbers of warps, then with vectors cut or whole. What is found is
filed by the loops' source, the GPU, Triton's version and the precision of dots; T and B change nothing about it.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from statistics import median
from typing import NamedTuple

import torch

from unfading.fuse.c.cache import keep, kept
from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.launch_settings import Loop, Setting

WARPS = (4, 8, 16)
ROUNDS = 5


class Choice(NamedTuple):
    """The setting that a loop has from now on, and its time beside that of the usual one."""

    loop: str
    setting: Setting
    milliseconds: float
    usual: float


def best(loop: Loop, usual: Setting, time: Callable[[Setting], float]) -> tuple[Setting, float, float]:
    """The fastest setting, its time, and that of the usual one. One that does not run takes for ever."""
    first = time(usual)
    found, least = usual, first
    for candidates in (_warps, _widths):
        for setting in candidates(loop, found):
            taken = time(setting)
            if taken < least:
                found, least = setting, taken
    return found, least, first


def _warps(loop: Loop, start: Setting) -> Iterator[Setting]:
    yield from (start._replace(warps=warps) for warps in WARPS if warps != start.warps)


def _widths(loop: Loop, start: Setting) -> Iterator[Setting]:
    if loop.flat and loop.widest > 64:
        yield start._replace(width=64 if start.width is None else None)


def tuned(kernel: TritonKernel, precision: str, run: Callable[[str], None], device: torch.device) -> list[Choice]:
    """Search for every loop; `run` runs the loop of a name as the kernel's settings stand."""
    choices = []
    for name, loop in kernel.about.items():
        usual = kernel.setting(name, precision)

        def time(setting: Setting, name: str = name) -> float:
            kernel.settings[name, precision] = setting
            try:
                return _milliseconds(lambda: run(name), device)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # Triton and the driver have many, for too little room on chip
                return float("inf")

        setting, least, first = best(loop, usual, time)
        kernel.settings[name, precision] = setting
        choices.append(Choice(name, setting, least, first))
    text = json.dumps({choice.loop: choice.setting._asdict() for choice in choices})
    keep(_name(kernel, precision, device), text.encode())
    return choices


def remember(kernel: TritonKernel, precision: str, device: torch.device) -> None:
    """Take the settings that were once found for these loops, if any were."""
    text = kept(_name(kernel, precision, device))
    if text is None:
        return
    try:
        found = {name: Setting(**setting) for name, setting in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return  # of another version, or damaged: it is as if nobody had searched
    kernel.settings |= {(name, precision): setting for name, setting in found.items() if name in kernel.about}


def _name(kernel: TritonKernel, precision: str, device: torch.device) -> str:
    import triton

    about = (kernel.at(None).source, triton.__version__, torch.cuda.get_device_name(device), precision)
    return f"{sha256(repr(about).encode()).hexdigest()[:32]}.json"


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """The median of a few runs, after one that compiles."""
    taken = []
    for _ in range(ROUNDS + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize(device)
        taken.append(start.elapsed_time(stop))
    return median(taken[1:])
