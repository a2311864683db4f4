"""Timing things against each other: one process, a new order every round, medians of per-round ratios.

Who runs after whom matters for caches and clock, and a shared machine drifts; a ratio of two neighbours in one round feels
neither. The same thing entered twice shows what is left.

A CPU is timed by the wall clock, a GPU by events around calls that are queued one behind the other, as in training: what the
host does meanwhile counts only where the GPU waits for it.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

FEWEST = 3  # rounds of even the slowest
LONG = 0.2  # seconds of calls after which nothing needs more of them to warm up


class Clock(NamedTuple):
    """How calls are timed."""

    seconds: Callable[[Callable[[], object], int], float]  # of one call of a contender, from several in a row
    shortest: float  # seconds of one timing: below that, calls are repeated, since reading a clock costs microseconds
    warm_ups: int  # calls before the first that counts; fewer of what is slow


class Race(NamedTuple):
    """Seconds of one call per contender and round; None where it sat the round out."""

    seconds: dict[str, list[float | None]]

    def median(self, name: str) -> float:
        return statistics.median(taken for taken in self.seconds[name] if taken is not None)

    def ratio(self, name: str, other: str) -> float:
        """Time of one over time of another: the median over the rounds in which both ran."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs if a is not None and b is not None)

    def rounds(self, name: str) -> int:
        return sum(taken is not None for taken in self.seconds[name])


def race(
    contenders: Mapping[str, Callable[[], object]],
    clock: Clock,
    *,
    rounds: int,
    seconds: Mapping[str, float],
    order: random.Random,
) -> Race:
    """Time every contender in at most `rounds` rounds; one that needs more than its `seconds` for that gets fewer."""
    calls, shares = {}, {}
    for name, contender in contenders.items():
        once = _warmed_up(contender, clock)
        calls[name] = max(1, round(clock.shortest / once))
        shares[name] = min(rounds, max(FEWEST, int(seconds[name] / (calls[name] * once))))
    total = max(shares.values())
    taken: dict[str, list[float | None]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(total):
            # A slow contender's rounds are spread evenly over all.
            running = {name for name, n in shares.items() if (i + 1) * n // total > i * n // total}
            for name in order.sample(sorted(contenders), len(contenders)):
                taken[name].append(clock.seconds(contenders[name], calls[name]) if name in running else None)
    finally:
        if collecting:
            gc.enable()
    return Race(taken)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads inside the block, and with as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warmed_up(contender: Callable[[], object], clock: Clock) -> float:
    """Seconds of the last of the calls that warm a contender up."""
    spent = 0.0
    for _ in range(clock.warm_ups):
        once = clock.seconds(contender, 1)
        spent += once
        if spent >= LONG:
            break
    return once


def _by_the_wall(contender: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - started) / calls


def _by_events(contender: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if calls > 1:
        contender()  # keeps the GPU at work until the first that counts is queued
    start.record()
    for _ in range(calls):
        contender()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / calls


WALL = Clock(_by_the_wall, shortest=2e-3, warm_ups=2)
EVENTS = Clock(_by_events, shortest=5e-3, warm_ups=20)
