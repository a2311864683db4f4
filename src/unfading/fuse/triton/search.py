"""Search for the fastest launch settings of a cell's loops on this GPU, and store them on disk.

Each loop is timed with its usual settings, then with other numbers of warps, then with vectors divided or whole. The result is
stored under a hash of the source of the loops, the GPU, the version of Triton and the precision of dots, for numbers of rows
up to the next power of two. It does not depend on T.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from statistics import median
from typing import NamedTuple

import torch

from unfading.fuse.c.cache import read_file, write_file
from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.launch_settings import LaunchSettings, LoopShape

WARPS = (4, 8, 16)
ROUNDS = 5


class Choice(NamedTuple):
    """The settings that were chosen for a loop, its time with them, and its time with the usual ones."""

    loop: str
    setting: LaunchSettings
    milliseconds: float
    usual: float


def best(
    loop: LoopShape, usual: LaunchSettings, time: Callable[[LaunchSettings], float]
) -> tuple[LaunchSettings, float, float]:
    """The fastest settings, their time, and the time of the usual ones. `time` is infinite for settings that do not run."""
    first = time(usual)
    fastest, least = usual, first
    for candidates in (_warps, lambda start: _widths(loop, start)):
        for setting in candidates(fastest):
            milliseconds = time(setting)
            if milliseconds < least:
                fastest, least = setting, milliseconds
    return fastest, least, first


def _warps(start: LaunchSettings) -> Iterator[LaunchSettings]:
    yield from (start._replace(warps=warps) for warps in WARPS if warps != start.warps)


def _widths(loop: LoopShape, start: LaunchSettings) -> Iterator[LaunchSettings]:
    if loop.flat and loop.widest > 64 and start.units is None:
        yield start._replace(width=64 if start.width is None else None)


def tuned(
    kernel: TritonKernel, precision: str, run: Callable[[str], None], rows: tuple[int, int], device: torch.device
) -> list[Choice]:
    """Search for the settings of every loop. `run` runs a loop by name, on these rows, with the present settings."""
    choices = []
    for name, loop in kernel.shapes.items():
        usual = kernel.setting(name, precision, rows, device)
        assert usual is not None

        def time(setting: LaunchSettings, name: str = name) -> float:
            kernel.set(name, precision, rows, device, setting)
            try:
                return _milliseconds(lambda: run(name), device)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # Triton and the driver have many types, for too little memory on chip
                return float("inf")

        setting, least, first = best(loop, usual, time)
        kernel.set(name, precision, rows, device, setting)
        choices.append(Choice(name, setting, least, first))
    stored = {
        f"{loop} {size}": setting._asdict()
        for (loop, dots, size, on), setting in kernel.settings.items()
        if (dots, on) == (precision, device)
    }
    text = json.dumps(stored)
    write_file(_name(kernel, precision, device), text.encode())
    return choices


def remember(kernel: TritonKernel, precision: str, device: torch.device) -> None:
    """Load the settings that an earlier search stored for these loops, if there are any."""
    text = read_file(_name(kernel, precision, device))
    if text is None:
        return
    try:
        settings = {}
        for key, setting in json.loads(text).items():
            name, size = key.split()
            settings[name, precision, int(size), device] = LaunchSettings(**setting)
    except (ValueError, TypeError, AttributeError):
        return  # the file is from another version or damaged: use the usual settings
    kernel.add_settings({key: setting for key, setting in settings.items() if key[0] in kernel.shapes})


def _name(kernel: TritonKernel, precision: str, device: torch.device) -> str:
    import triton

    sources = (kernel.at(None).source, "" if kernel.split is None else kernel.split.source)
    about = (*sources, triton.__version__, torch.cuda.get_device_name(device), precision)
    return f"{sha256(repr(about).encode()).hexdigest()[:32]}.json"


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """The median time of a few runs, after one that compiles."""
    times = []
    for _ in range(ROUNDS + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop))
    return median(times[1:])
