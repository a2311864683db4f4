"""Tiles of batch rows over as many threads as torch has. The pool is created on first use, and again after a fork."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch

WORTH = 20_000_000  # multiply-adds below which a second thread does not pay: about a millisecond


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="unfading")


# A forked child inherits the object of the pool and none of its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run_tiles(run: Callable[[int, int], None], tiles: int, work: int) -> None:
    """Call `run(first, last)` over 0..tiles, in equal shares on several threads if there is enough work."""
    threads = min(torch.get_num_threads(), tiles) if work >= WORTH else 1
    if threads == 1:
        run(0, tiles)
        return
    edges = [tiles * k // threads for k in range(threads + 1)]
    # ctypes releases the interpreter lock while a kernel runs.
    others = [_pool().submit(run, edges[k], edges[k + 1]) for k in range(1, threads)]
    try:
        run(edges[0], edges[1])
    finally:
        _wait_for_all(others)
    for other in others:
        other.result()


def _wait_for_all(others: list[Future[None]]) -> None:
    """Wait for all threads, also if that is interrupted: they write into memory that must not be freed before they end."""
    interruption: BaseException | None = None
    while True:
        try:
            wait(others)
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
