"""Generators that depend on (seed, split, index) alone, so that a batch can be drawn again anywhere, in any order."""

from hashlib import blake2b
from typing import get_args

import torch

from unfading.errors import check_count
from unfading.tasks.base import Split, check_split

# torch's CPU generator reads 32 bits of its seed: two for the split, thirty for the index.
INDEX_BITS = 30


def stream(seed: int, split: Split, index: int, device: torch.device | str, purpose: str = "batch") -> torch.Generator:
    """A generator on `device` for one batch, or for another `purpose` that is counted by `index`.

    Under one seed and purpose no two (split, index) share a stream: what is seeded is a one-to-one function of them, and not a
    hash, which would make some pair in a hundred thousand batches meet.
    """
    check_split(split)
    check_count("index", index, least=0)
    if index >= 1 << INDEX_BITS:
        raise ValueError(f"index must be below 2^{INDEX_BITS}; got {index}. Take another seed and begin anew.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int; got {seed!r} ({type(seed).__name__}).")
    offset = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=4).digest(), "big")
    number = get_args(Split).index(split) << INDEX_BITS | index
    return torch.Generator(device).manual_seed(_mix(number ^ offset))


def _mix(number: int) -> int:
    """A one-to-one map of 32 bits (the end of MurmurHash3), so that neighbours get seeds that have nothing in common."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number ^= number >> 13
    number = number * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
