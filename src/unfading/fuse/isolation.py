"""A cell is tried out apart from the caller: nothing of the caller acts on the trial, and nothing of the trial on the caller.

A trial runs in a thread of its own. Modes, autocast, inference mode, the transforms of torch.func and hooks for saved tensors
belong to a thread, so a trial begins without those of the caller. An exception that interrupts the caller at any point, as
Ctrl-C does, finds no mode of a trial in the caller's thread that would have to be taken back. Only the default device, and the
stream of a GPU, are handed on. On a GPU all threads compute float32 products exactly while a trial runs: torch has one setting
for all of them.

Random numbers are not drawn: an operation that would draw some returns ones.
"""

import _thread
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.torch_state import float32_products

Result = TypeVar("Result")

PATIENCE = 5.0  # seconds that an interrupted caller waits for the end of a trial before it is stopped
_of_thread = threading.local()


class _Stopped(BaseException):
    """Ends a trial that nobody waits for any longer. No `except Exception` of a cell catches it."""


def on_trial() -> bool:
    """Whether this thread runs a trial."""
    return hasattr(_of_thread, "on_trial")


def apart(trial: Callable[[], Result]) -> Result:
    """The result of a trial, or its exception. All random number generators are as before."""
    results: list[Result] = []
    errors: list[BaseException] = []
    threads: list[int] = []
    running = threading.Lock()
    running.acquire()
    context = copy_context()
    devices = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            threads.append(threading.get_ident())
            _of_thread.on_trial = True
            torch._C._autograd._saved_tensors_hooks_disable("a step that is compiled has no hooks for saved tensors", False)
            with ExitStack() as stack:
                stack.enter_context(torch._C.DisableTorchFunctionSubclass())
                # The caller may be the thread in which torch runs all gradients on a GPU, and waits for the trial.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                for device in devices:
                    stack.enter_context(device)
                if stream is not None:
                    stack.enter_context(torch.cuda.stream(stream))
                    # With factors of three digits, a sign that rounding decides looks like a dependence on other rows.
                    stack.enter_context(float32_products("ieee"))
                stack.enter_context(_random_streams_restored())
                result = context.run(trial)
            results.append(result)
        except BaseException as error:
            errors.append(error)
        finally:
            running.release()

    with _compiler_unlocked():
        try:
            # An interruption may fall between two lines of threading.Thread.start, which does not expect it.
            _thread.start_new_thread(run, ())
            running.acquire()
        except BaseException:
            # The caller was interrupted. The trial ends by itself, unless the code of the cell hangs, or has not been started.
            if not (results or errors) and not running.acquire(timeout=PATIENCE if threads else 0.2):
                for ident in threads:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Stopped))
            raise
    if errors:
        raise errors.pop()
    return results.pop()


@contextmanager
def _compiler_unlocked() -> Iterator[None]:
    """Lend a trial the lock of torch.compile, where it traces the caller: a step may call a compiled function."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None or not lock._is_owned():
        yield
        return
    times = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(times)


class WithoutDraws(TorchDispatchMode):
    """Operations that draw random numbers return ones instead, so that no generator moves."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in Recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0].fill_(1)
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
        args, kwargs = _pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if "device" in kwargs or not tensors:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("generator", None)
        return _pytree.tree_map_only(Tensor, lambda tensor: torch.ones_like(tensor, device=device), func(*args, **kwargs))


def numbers(index: Tensor, draw: int, size: int) -> Tensor:
    """Numbers in [0, 1] without a pattern, [index, size]: the same for the same index and draw, and drawn by no generator."""
    phase = 12.9898 * torch.arange(size, dtype=torch.float64) + 78.233 * index.unsqueeze(1) + 37.719 * draw
    return (43758.5453 * phase.sin()).frac().abs()


@contextmanager
def _random_streams_restored() -> Iterator[None]:
    """Put back what a cell draws from the generators of Python and NumPy, or seeds. Other generators are copied with a cell."""
    python_state, torch_state, numpy_state = random.getstate(), torch.get_rng_state(), np.random.get_state()
    try:
        yield
    finally:
        # Only what has changed, since another thread may draw at the same time.
        if random.getstate() != python_state:
            random.setstate(python_state)
        if not torch.equal(torch.get_rng_state(), torch_state):
            torch.set_rng_state(torch_state)
        if not all(map(np.array_equal, np.random.get_state(), numpy_state)):
            np.random.set_state(numpy_state)
