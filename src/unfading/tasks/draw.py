"""Random generators that depend only on (seed, split, index), so that any batch can be drawn again in any order."""

from hashlib import blake2b
from typing import get_args

import torch

from unfading.errors import check_count
from unfading.tasks.base import Split, check_split

# torch's CPU generator reads 32 bits of its seed: two for the split, thirty for the index.
INDEX_BITS = 30


def stream(seed: int, split: Split, index: int, device: torch.device | str, purpose: str = "batch") -> torch.Generator:
    """A generator on `device` for one batch, or for another `purpose` that is numbered by `index`.

    For one seed and purpose, no two pairs (split, index) share a stream: the generator's seed is a one-to-one function of the
    pair. A hash would make some pair in a hundred thousand batches collide.
    """
    check_split(split)
    check_count("index", index, least=0)
    if index >= 1 << INDEX_BITS:
        raise ValueError(f"index must be below 2^{INDEX_BITS}; got {index}. Use another seed and start again.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int; got {seed!r} ({type(seed).__name__}).")
    offset = int.from_bytes(blake2b(f"{purpose} {seed}".encode(), digest_size=4).digest(), "big")
    number = get_args(Split).index(split) << INDEX_BITS | index
    return torch.Generator(device).manual_seed(_mix(number ^ offset))


def _mix(number: int) -> int:
    """A one-to-one map of 32 bits (the finaliser of MurmurHash3), so that neighbours get unrelated seeds."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & 0xFFFFFFFF
    number ^= number >> 13
    number = number * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
