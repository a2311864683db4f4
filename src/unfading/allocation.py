"""Memory: how much is available, and the refusal of tensors that do not fit, before they are allocated.

Linux grants more memory than a machine has and ends the process that uses it, so a failed allocation is no safe check. Inside
`refuse_large(...)` the size of every tensor that torch is asked to create is compared with the memory that is available.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# Tensors below this size are not compared: reading the available memory would take longer than creating them.
SMALL = 64 * 2**20
# What a module with a parameter or two takes in Python itself.
MODULE_BYTES = 16 * 2**10


class OutOfMemory(ValueError):
    """Something does not fit in memory; the message names it, its size and what to change."""


def available(device: torch.device | str = "cpu") -> float:
    """Bytes that this process may still allocate on a device; infinite where the system does not say."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_system(), _container()) if device.type == "cpu" else math.inf


def size(count: float) -> str:
    """A number of bytes, in words."""
    if count >= 1000 * 2**30:
        return f"{count / 2**30:,.0f} GiB"
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def check_fits(what: str, needed: float, change: str, device: torch.device | str = "cpu") -> None:
    """Raise if `needed` bytes are more than the device has.

    Args:
        what: the thing that needs them, as the subject of the sentence.
        needed: number of bytes.
        change: what to make smaller.
        device: where it would be allocated.
    """
    if needed >= SMALL and needed > (room := available(device)):
        where = "this machine" if torch.device(device).type == "cpu" else "the GPU"
        raise OutOfMemory(f"{what} needs about {size(needed)}, and {where} has {size(room)} available. Use a smaller {change}.")


@contextmanager
def refuse_large(what: str, change: str) -> Iterator[None]:
    """Inside the block, a tensor larger than the available memory is refused, and a failed allocation gives one sentence.

    In a block inside another one, the sentence is that of the outer block.

    Args:
        what: what is built or read in the block, as the subject of the sentence.
        change: what to make smaller.
    """
    # Modes such as that of fake tensors, and the compiler of torch, allocate nothing.
    allocates = not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    if not allocates or any(isinstance(mode, _Allocations) for mode in _get_current_function_mode_stack()):
        yield
        return
    with one_sentence(what, change), _Allocations(what, change):
        yield


@contextmanager
def one_sentence(what: str, change: str) -> Iterator[None]:
    """Turn the errors of a failed allocation into one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(f"{what} does not fit in memory{_asked(error)}. Use a smaller {change}.") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _asked(error: BaseException) -> str:
    """How many bytes the failed allocation asked for, where the error says so."""
    count = str(error).partition("you tried to allocate ")[2].partition(" ")[0]
    return f": {size(int(count))} were asked for" if count.isdigit() else ""


class _Allocations(TorchFunctionMode):
    """Compares the sizes that are passed to torch's factory functions with the available memory."""

    def __init__(self, what: str, change: str):
        super().__init__()
        self.what, self.change = what, change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = _shape(func, args, kwargs)
        if shape is not None:
            like = args[0] if func in _NEW else None
            device = kwargs.get("device") or (torch.get_default_device() if like is None else like.device)
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            shaped = f"{self.what}: a tensor of shape {list(shape)}"
            check_fits(shaped, math.prod(shape) * dtype.itemsize, self.change, device)
        return func(*args, **kwargs)


# Functions that take a shape, as one argument or as several, or one or two sizes. Others need input that is as large.
_SHAPED = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
_SIZED = {torch.eye, torch.randperm}
# Methods of a tensor, which gives the device and the dtype.
_NEW = {torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full}


def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape that a factory function will create; None for other functions and for wrong arguments."""
    if func is torch.arange or func in _SIZED:
        numbers = [arg for arg in args if isinstance(arg, int | float) and math.isfinite(arg)]
        if len(numbers) != len(args) or not numbers:
            return None
        if func is not torch.arange:
            return (int(numbers[0]), int(numbers[-1])) if func is torch.eye else (int(numbers[0]),)
        start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
        return (max(0, math.ceil((end - start) / (step or 1))),)
    if func in _NEW:
        args = args[1:]
    elif func not in _SHAPED and func is not torch.randint:
        return None
    shape = kwargs.get("size") or next((arg for arg in args if isinstance(arg, list | tuple)), args)
    return tuple(shape) if all(type(count) is int for count in shape) else None


def _system() -> float:
    """Available memory as the kernel estimates it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _container() -> float:
    """What the limit of the container leaves; infinite without one. Cached files are dropped when memory is needed."""
    for folder, limit, used, cached in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "file"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
    ):
        try:
            most, taken = (int((folder / name).read_text()) for name in (limit, used))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, most - taken + int(statistics[cached]))
        except (OSError, ValueError, KeyError):
            continue
    return math.inf
