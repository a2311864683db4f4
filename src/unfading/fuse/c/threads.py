"""How the work of a call is divided among threads: as many as torch has, and torch's own where its OpenMP can be called.

A loop is divided by rows: each thread runs tiles of rows through all of their steps, and waits for no other. If there are few
rows, or if every thread would have to read all matrices from a far cache at every step, teams of threads run their rows
together: each member computes some of the units, and they meet several times in a step (`team.h`). `divide` chooses what takes
less time by a rough model. The results of a row do not depend on the division.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from unfading.fuse.c.cache import library
from unfading.fuse.c.emit import c_file

Pointer, Int, Long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

WORTH = 4_000_000  # multiply-adds below which a second thread does not pay: about a tenth of a millisecond
ROWS = 48  # of a tile at most: a multiple of the six rows that a product holds in registers; more gain nothing
TEAM_ROWS = 96  # of the tile of a team at most

# What a thread can do in a nanosecond, while all others do the same.
MULTIPLY_ADDS = 45.0  # of float32, in groups of six rows
NEAR_BYTES, FAR_BYTES = 80.0, 8.0  # that it reads from its own caches, and from one that all threads share
NEAR = 1 << 20  # bytes of a thread's own cache
MEETINGS = 3  # in a step
GAIN = 1.25  # by how much a team must be faster, since its members also read what others computed


class Division(NamedTuple):
    """The rows of a tile, the threads of a call, and how many of them run a tile together."""

    tile: int
    threads: int = 1
    together: int = 1


@lru_cache(maxsize=1024)  # so that a warm call does not run through this module
def threads_for(work: int, threads: int) -> int:
    """The threads, of at most so many, that pay for so many multiply-adds."""
    return threads if work >= WORTH else 1


@lru_cache(maxsize=1024)
def divide(T: int, B: int, work: int, size: int, threads: int) -> Division:
    """How to divide T steps of B rows among at most so many threads.

    Args:
        work: multiply-adds of one row in one step.
        size: bytes of all matrices.
    """
    if threads == 1 or T * B * work < WORTH:
        return by_rows(B, 1)
    times = {together: _step(B, work, size, threads // together, together) for together in _sizes(threads)}
    together = min(times, key=lambda each: times[each])
    # More threads than cores would wait for each other at every meeting.
    if GAIN * times[together] > times[1] or threads > cores():
        return by_rows(B, threads)
    teams = threads // together
    tiles = min(B, teams * -(-B // (teams * TEAM_ROWS)))
    return Division(-(-B // tiles), threads, together)


def by_rows(B: int, threads: int) -> Division:
    """Each tile on one thread: tiles of at most ROWS rows, equal, and the same number for each thread."""
    tiles = -(-B // ROWS)
    return Division(-(-B // min(B, -(-tiles // threads) * threads)), threads)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sizes(threads: int) -> list[int]:
    """The sizes of teams to choose from."""
    return [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if size <= threads]


def _step(B: int, work: int, size: int, teams: int, together: int) -> float:
    """Nanoseconds of a step of all rows."""
    rows = -(-B // teams)
    passes = -(-rows // (ROWS if together == 1 else TEAM_ROWS))
    own = size / together
    reading = passes * own / (NEAR_BYTES if own <= NEAR else FAR_BYTES)
    meeting = 0.0 if together == 1 else MEETINGS * (300.0 + 50.0 * together)
    # A group of g rows multiplies by each entry that it loads g times.
    group = rows / -(-rows // 6)
    multiplying = rows * work / together / MULTIPLY_ADDS * (group + 1.5) / group / 1.25
    return max(multiplying, reading) + meeting


# -- the functions of team.c --------------------------------------------------------------------------------------------------

_forked = False  # a forked child inherits the state of OpenMP and none of its threads


@cache
def team() -> ctypes.CDLL:
    """The functions that run work on several threads."""
    functions = library(c_file("team.h") + c_file("team.c"))
    functions.use.argtypes = [Pointer, Pointer]
    functions.use.restype = None
    functions.loops.argtypes = [Int, Pointer, Pointer, Long, Long, Long, Long, Int, Pointer, Pointer]
    functions.loops.restype = Int
    functions.outers.argtypes = [
        Int,
        Pointer,
        Long,
        Pointer,
        Long,
        Pointer,
        Long,
        Long,
        Long,
        Long,
        Pointer,
        Long,
        ctypes.c_double,
    ]
    functions.outers.restype = None
    functions.packs.argtypes = [Int, Pointer, Pointer, Long, Pointer, Pointer]
    functions.packs.restype = None
    functions.shares.argtypes = [Int, Pointer, Pointer]
    functions.shares.restype = Int
    functions.use(*(None, None) if _forked else _openmp())
    return functions


def on_threads(address: int, call: ctypes.Array[ctypes.c_int64], threads: int) -> None:
    """Run `int function(const int64_t* call, int me, int members)` at an address, each thread its part."""
    if threads == 1:
        failed = _share(address)(call, 0, 1)
    else:
        failed = team().shares(threads, address, call)
    if failed:
        raise MemoryError("there is no memory for the buffers of a fused step.")


@cache
def _share(address: int) -> Callable[[ctypes.Array[ctypes.c_int64], int, int], int]:
    """The function at an address."""
    return ctypes.CFUNCTYPE(Int, Pointer, Int, Int)(address)


def _openmp() -> tuple[int | None, int | None]:
    """Torch's functions to start threads and to count them, under the names of GNU's OpenMP, which others have as well."""
    loaded = ctypes.CDLL(None)
    try:
        start, count = loaded.GOMP_parallel, loaded.omp_get_num_threads
    except AttributeError:
        return None, None
    return ctypes.cast(start, Pointer).value, ctypes.cast(count, Pointer).value


def _after_fork() -> None:
    global _forked
    _forked = True
    if team.cache_info().currsize:
        team().use(None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
