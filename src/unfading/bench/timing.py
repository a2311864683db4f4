"""Timing calls against each other: one process, a new order in every round, medians of the ratios of single rounds.

The order matters for caches and clock speed, and the load of a shared machine changes; the ratio of two neighbours in one
round depends on neither. The same call entered twice, as a control, shows the remaining error.

A CPU is timed by the wall clock. A GPU is timed by events around calls that are queued one behind the other, as in training:
the time of the host counts only if the GPU waits for it.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

FEWEST = 3  # rounds of the slowest contender
LONG = 0.2  # seconds of calls after which every contender has warmed up


class Timer(NamedTuple):
    """How calls are timed."""

    seconds: Callable[[Callable[[], object], int], float]  # of one call of a contender, from several in a row
    shortest: float  # seconds of one timing; shorter calls are repeated, since reading a clock costs microseconds
    warm_ups: int  # calls before the first timed one; a slow contender gets fewer


class Timings(NamedTuple):
    """Seconds of one call by contender and round; None for a round in which the contender did not run."""

    seconds: dict[str, list[float | None]]

    def median(self, name: str) -> float:
        return statistics.median(taken for taken in self.seconds[name] if taken is not None)

    def ratio(self, name: str, other: str) -> float:
        """Time of one over time of another: the median over the rounds in which both ran."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs if a is not None and b is not None)

    def rounds(self, name: str) -> int:
        return sum(taken is not None for taken in self.seconds[name])


def time_in_turns(
    contenders: Mapping[str, Callable[[], object]],
    timer: Timer,
    *,
    rounds: int,
    seconds: Mapping[str, float],
    order: random.Random,
) -> Timings:
    """Time every contender in at most `rounds` rounds; one that would need more than its `seconds` gets fewer rounds."""
    calls, shares = {}, {}
    for name, contender in contenders.items():
        once = _warm_up(contender, timer)
        calls[name] = max(1, round(timer.shortest / once))
        shares[name] = min(rounds, max(FEWEST, int(seconds[name] / (calls[name] * once))))
    total = max(shares.values())
    taken: dict[str, list[float | None]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(total):
            # The rounds of a slow contender are spread evenly over all rounds.
            running = {name for name, n in shares.items() if (i + 1) * n // total > i * n // total}
            for name in order.sample(sorted(contenders), len(contenders)):
                taken[name].append(timer.seconds(contenders[name], calls[name]) if name in running else None)
    finally:
        if collecting:
            gc.enable()
    return Timings(taken)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads inside the block, and with the previous number after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm_up(contender: Callable[[], object], timer: Timer) -> float:
    """Call a contender until it has warmed up; returns the seconds of the last call."""
    spent = 0.0
    for _ in range(timer.warm_ups):
        once = timer.seconds(contender, 1)
        spent += once
        if spent >= LONG:
            break
    return once


def _wall_seconds(contender: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - started) / calls


def _event_seconds(contender: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if calls > 1:
        contender()  # keeps the GPU busy until the first timed call is queued
    start.record()
    for _ in range(calls):
        contender()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / calls


WALL = Timer(_wall_seconds, shortest=2e-3, warm_ups=2)
EVENTS = Timer(_event_seconds, shortest=5e-3, warm_ups=20)
