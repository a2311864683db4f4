"""Checks of arguments and their error messages: the name, the value, what was expected, and the nearest valid value."""

import math
from collections.abc import Iterable
from difflib import get_close_matches

# The largest float32, and the largest int of torch.
LARGEST_FLOAT, LARGEST_INT = 3.4028234e38, 2**63 - 1


class NoKernel(Exception):
    """A kernel cannot be built on this machine; the message is the reason, without a full stop."""


class FasterAsGraphs(str):
    """The reason why a cell that has a kernel runs as CUDA graphs of the reference loop, without a full stop."""


class OfThisCall(str):
    """The reason why a cell does not run compiled in the present call, and may in others, without a full stop."""


class SlowLoopWarning(UserWarning):
    """A cell runs on the plain loop in PyTorch because it cannot be compiled."""


class TaskError(ValueError):
    """A user's task or cell is at fault; the message names the method and the batch."""


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of at least {least}; got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}. Nearest valid: {least}.")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63, the largest number of 64 bits; got {value}.")


def check_rank(name: str, rank: int, size: int, *, least: int = 1) -> None:
    """Raise unless `rank` lies in [least, size], the ranks that a size x size matrix can have."""
    check_count(name, rank, least=least)
    if rank > size:
        raise ValueError(f"{name} cannot be larger than the matrix; got {name}={rank} for size {size}. Largest: {size}.")


def check_heads(heads: int, hidden_size: int) -> None:
    """Raise unless the units can be cut into this number of groups of equal size."""
    check_count("heads", heads)
    if hidden_size % heads:
        raise ValueError(f"heads must be a divisor of hidden_size; got heads={heads} for hidden_size={hidden_size}.")


def check_number(name: str, value: float) -> None:
    """Raise unless `value` is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r} ({type(value).__name__}).")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}.")
    most = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
    if abs(value) > most:
        raise ValueError(f"{name} must be at most {most:.4g} in absolute value; got {value}.")


def check_seed(name: str, value: int) -> None:
    """Raise unless `value` is an integer that a generator of torch takes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r} ({type(value).__name__}).")
    if abs(value) > LARGEST_INT:
        raise ValueError(f"{name} must be an int of 64 bits; got {value}.")


def check_flag(name: str, value: bool) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} ({type(value).__name__}).")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise unless `value` is of a class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}; got {type(value).__name__}.")


def check_share(name: str, value: float) -> None:
    """Raise unless `value` is a number in [0, 1]."""
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1]; got {value}. Nearest valid: {min(max(value, 0.0), 1.0)}.")


def check_positive(name: str, value: float) -> None:
    """Raise unless `value` is a number above zero."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be above 0; got {value}.")


def check_max_lag(max_lag: int | None, bias: bool) -> None:
    """Raise if chrono initialisation is requested and impossible."""
    if max_lag is None:
        return
    check_count("max_lag", max_lag, least=2)
    if not bias:
        raise ValueError(f"max_lag={max_lag} initialises a bias, and bias=False leaves none. Drop one of the two.")


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest known one."""
    known = sorted(known)
    lower = {each.lower(): each for each in known}
    close = get_close_matches(str(name).lower(), lower, n=1)
    hint = f"Did you mean {lower[close[0]]!r}?" if close else f"Known: {', '.join(known) or 'none'}."
    return f"unknown {what} {name!r}. {hint}"


def cell_name(cell: object) -> str:
    """The name of a cell in messages: that of its class or, if the library has wrapped it, of what the user has written."""
    return str(getattr(cell, "described_as", type(cell).__name__))


def cannot_run(cell: object, how: str, reason: str) -> str:
    """The message for a backend that was requested by name and refuses the cell."""
    return f"{cell_name(cell)} cannot run {how}: {reason}. backend='auto' runs the reference loop where no faster backend can."
