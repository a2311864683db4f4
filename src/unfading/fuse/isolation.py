"""A context in which a cell is tried out: nothing of the caller acts inside it, and nothing inside it acts on the caller.

Outside stay dispatch modes, function modes, autocast, inference mode, the transforms of torch.func and hooks for saved tensors.
Random numbers are not drawn: an operation that would draw some returns ones. The default device is a function mode of torch's
own, and stays.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


@contextmanager
def isolated() -> Iterator[None]:
    """Run the block without the caller's modes, and leave all random number generators as they were."""
    with ExitStack() as stack:
        for context in (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            stack.enter_context(context)
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):  # which is the lowest
                stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_without_hooks_for_saved_tensors())
        stack.enter_context(_random_streams_restored())
        yield


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
def _without_hooks_for_saved_tensors() -> Iterator[None]:
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_disable("a step that is compiled has no hooks for saved tensors", False)
    try:
        yield
    finally:
        if message is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(message, False)


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
