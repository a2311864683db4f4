"""Search for the fastest launch settings of a cell's loops on this GPU, and store them on disk.

Each loop is timed with its usual settings, then with other rows and units in a program and with all units in one, then with
other numbers of warps, then with vectors divided or whole. `unfading.tune` also times CUDA graphs of the reference loop. The
result is stored under a hash of the source of the loops, the GPU, the version of Triton and the precision of dots, for numbers
of rows up to the next power of two. It does not depend on T.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from statistics import median
from typing import Any, NamedTuple

import torch

from unfading.fuse.c.cache import read_file, write_file
from unfading.fuse.triton.kernel import SearchKey, TritonKernel, gpu
from unfading.fuse.triton.launch_settings import CHUNKS, LaunchSettings, LoopShape

WARPS = (4, 8, 16)
ROUNDS = 5
WORTH = 2.0  # settings are timed whose estimate is below this multiple of the least one
GRAPHS = "graphs"


class Choice(NamedTuple):
    """The settings that were chosen for a loop, its time with them, and its time with the usual ones."""

    loop: str
    setting: LaunchSettings
    milliseconds: float
    usual: float


def best(
    loop: LoopShape, settings: Sequence[LaunchSettings], time: Callable[[LaunchSettings], float]
) -> tuple[LaunchSettings, float, float]:
    """The fastest settings, their time, and the time of the usual ones.

    Args:
        settings: the usual ones, then others that may be faster.
        time: infinite for settings that do not run.
    """
    usual, *others = settings
    first = time(usual)
    fastest, least = usual, first
    for changed in (lambda _: others, _warps, lambda start: _widths(loop, start)):
        for setting in changed(fastest):
            milliseconds = time(setting)
            if milliseconds < least:
                fastest, least = setting, milliseconds
    return fastest, least, first


def _warps(start: LaunchSettings) -> Iterator[LaunchSettings]:
    yield from (start._replace(warps=warps) for warps in WARPS if warps != start.warps)


def _widths(loop: LoopShape, start: LaunchSettings) -> Iterator[LaunchSettings]:
    if loop.flat and loop.widest > 64 and start.units is None:
        yield start._replace(width=64 if start.width is None else None)
    elif start.units is not None and start.width is not None:
        yield from (start._replace(width=width) for width in CHUNKS if width != start.width)


def tuned(
    kernel: TritonKernel, precision: str, run: Callable[[str], None], rows: tuple[int, int], device: torch.device
) -> list[Choice]:
    """Search for the settings of every loop. `run` runs a loop by name, on these rows, with the present settings."""
    choices = []
    for name, loop in kernel.shapes.items():
        usual = kernel.setting(name, precision, rows, device)
        assert usual is not None
        estimated = kernel.candidates(name, precision, rows, gpu(device))
        others = [each.setting for each in estimated if each.microseconds < WORTH * estimated[0].microseconds]

        def time(setting: LaunchSettings, name: str = name) -> float:
            kernel.set(name, precision, rows, device, setting)
            try:
                milliseconds = milliseconds_of(lambda: run(name), device)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # Triton and the driver have many types, for too little memory on chip
                return float("inf")
            # Where the GPU does not accept these settings, the loop has run with others.
            return milliseconds if kernel.setting(name, precision, rows, device) == setting else float("inf")

        setting, least, first = best(loop, [usual, *(other for other in others if other != usual)], time)
        kernel.set(name, precision, rows, device, setting)
        choices.append(Choice(name, setting, least, first))
    store(kernel, precision, device)
    return choices


def store(kernel: TritonKernel, precision: str, device: torch.device) -> None:
    """Write what searches have found for these loops."""
    stored: dict[str, Any] = {
        f"{loop} {size}": setting._asdict()
        for (loop, dots, size, on), setting in kernel.settings.items()
        if (dots, on) == (precision, device)
    }
    for (dots, size, on, keep), faster in kernel.graphs_win.items():
        if (dots, on) == (precision, device):
            stored.setdefault(f"{GRAPHS} {size}", {})["gradient" if keep else "no gradient"] = faster
    write_file(_name(kernel, precision, device), json.dumps(stored).encode())


def remember(kernel: TritonKernel, precision: str, device: torch.device) -> None:
    """Load the settings that an earlier search stored for these loops, if there are any."""
    text = read_file(_name(kernel, precision, device))
    if text is None:
        return
    try:
        settings: dict[SearchKey, LaunchSettings] = {}
        graphs: dict[tuple[str, int, torch.device, bool], bool] = {}
        for key, stored in json.loads(text).items():
            name, size = key.split()
            if name == GRAPHS:
                graphs |= {(precision, int(size), device, when == "gradient"): bool(faster) for when, faster in stored.items()}
            else:
                settings[name, precision, int(size), device] = LaunchSettings(**stored)
    except (ValueError, TypeError, AttributeError):
        return  # the file is from another version or damaged: use the usual settings
    kernel.graphs_win |= graphs
    kernel.add_settings({key: setting for key, setting in settings.items() if key[0] in kernel.shapes})


def _name(kernel: TritonKernel, precision: str, device: torch.device) -> str:
    import triton

    divided = (kernel.split, kernel.streamed, kernel.summed)
    sources = (kernel.at(None).source, *("" if loops is None else loops.source for loops in divided))
    about = (*sources, triton.__version__, torch.cuda.get_device_name(device), precision)
    return f"{sha256(repr(about).encode()).hexdigest()[:32]}.json"


def milliseconds_of(run: Callable[[], None], device: torch.device) -> float:
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
