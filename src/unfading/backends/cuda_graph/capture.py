"""A function recorded once as a CUDA graph, and played again: the same kernels on the same addresses, in one launch.

    captured = Captured(function, buffers, room)     runs function(buffers) once to warm up, and once to record it
    made = captured.replay()                         what it returns, until anything else is played in the same room

A recording holds addresses and no values, so what changes is copied into `buffers` beforehand, and out of `made` at once. It
holds no Python either: no branch on a value, no random number, no tensor that only Python knows. `Watch` tells which.
"""

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.source_lines import first_line, user_line

# What torch itself says of its operations, and what that means for a recording.
TAGS = {
    torch.Tag.data_dependent_output: "looks at a value, for which the host would have to wait; torch.where chooses without",
    torch.Tag.dynamic_output_shape: "gives a shape that depends on values; torch.where and masks keep theirs",
    torch.Tag.nondeterministic_seeded: "draws random numbers, which a recording would repeat; draw them in project",
}


class NotGraphable(RuntimeError):
    """In words why something cannot be recorded."""


class NotNow(NotGraphable):
    """The same, where it may be otherwise at the next call."""


class Captured:
    """A function of tensors at fixed addresses as a CUDA graph. All that is CUDA about graphs is here.

    Args:
        function: takes the buffers, may write into them, and returns tensors; without a branch on a value.
        buffers: a tree of tensors; the recording reads and writes these very ones.
        room: the memory of what is made inside, shared by recordings of which one is played at a time.
    """

    kind: ClassVar[str] = "cuda"
    _recording: ClassVar[threading.Lock] = threading.Lock()
    _playing: ClassVar[threading.Lock] = threading.Lock()
    # Of each device: where recordings are made, and when the last one played is done.
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _done: ClassVar[dict[torch.device, torch.cuda.Event]] = {}

    def __init__(self, function: Callable[[Any], list[Tensor | None]], buffers: Any, room: Any):
        device = next(leaf.device for leaf in _pytree.tree_leaves(buffers) if isinstance(leaf, Tensor))
        # Never waits: whoever records may need the very thread that would be waiting here, autograd's.
        if not self._recording.acquire(blocking=False):
            raise NotNow("another thread is recording a CUDA graph just now")
        try:
            with torch.cuda.device(device):
                self._graph, self._made = self._recorded(function, buffers, room, device)
        except Exception as error:  # CUDA, its libraries and torch have many
            raise NotGraphable(f"recording it failed: {type(error).__name__}: {first_line(error)}") from error
        finally:
            self._recording.release()

    def _recorded(self, function: Any, buffers: Any, room: Any, device: torch.device) -> tuple[Any, list[Tensor | None]]:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # On copies: a recording that is being played may be using the buffers themselves. Recording runs nothing.
            function(_pytree.tree_map_only(Tensor, torch.clone, buffers))
            # Other threads may do as they like meanwhile; a data loader's looks at events all the time.
            graph.capture_begin(pool=room, capture_error_mode="thread_local")
            try:
                made = function(buffers)
                graph.capture_end()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                with suppress(Exception):  # an end that fails leaves the allocator in the room
                    torch._C._cuda_endAllocateToPool(device.index, room)
                raise
        current.wait_stream(stream)
        return graph, made

    def replay(self) -> list[Tensor | None]:
        """Play it on the current stream; return what it makes."""
        self._graph.replay()
        return self._made

    @staticmethod
    def room(device: torch.device) -> Any:
        """New memory for recordings."""
        return torch.cuda.graph_pool_handle()

    @staticmethod
    def under_way() -> bool:
        """Whether something is being recorded now: by the caller, or by another thread."""
        return torch.cuda.is_current_stream_capturing() or Captured._recording.locked()

    @classmethod
    @contextmanager
    def turn(cls, device: torch.device) -> Iterator[None]:
        """One at a time fills its buffers, plays and takes what it made, on whatever thread and stream.

        Also recordings with buffers of their own: cuBLAS has one workspace for all that were recorded on one stream.
        """
        with cls._playing, torch.cuda.device(device):
            done = cls._done.setdefault(device, torch.cuda.Event())
            torch.cuda.current_stream().wait_event(done)
            try:
                yield
            finally:
                done.record()


@contextmanager
def undisturbed(kind: str) -> Iterator[None]:
    """As if nothing stood around the call: what is recorded must not depend on where the first call happens to be."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    collecting = gc.isenabled()
    # Hooks would move what is saved, or count it; the collector could free a graph while another is recorded.
    torch._C._autograd._saved_tensors_hooks_disable("a CUDA graph is being recorded", False)
    gc.disable()
    try:
        with torch.inference_mode(False), torch.autocast(kind, enabled=False):
            yield
    finally:
        if collecting:
            gc.enable()
        if message is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(message, False)


class Watch(TorchDispatchMode):
    """Sees every operation inside its block; raises NotGraphable at one that a recording cannot hold, with its line.

    Args:
        arguments: all tensors that are handed in.
    """

    def __init__(self, arguments: list[Tensor]):
        super().__init__()
        self.device = arguments[0].device
        self.known = {_memory(tensor): tensor for tensor in arguments}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = [t for t in _pytree.tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
        reason = next((TAGS[tag] for tag in function.tags if tag in TAGS), None)
        if function is torch.ops.aten.lift_fresh.default:
            if given[0].dim() > 0 or given[0].device.type != "cpu":
                reason = "copies numbers from the host; hand them in by weights()"
        elif any(_memory(tensor) not in self.known for tensor in given):
            reason = "reads a tensor that is no argument of step, and may not be there later; hand it in by weights()"
        made = None if reason else function(*arguments, **(keywords or {}))
        results = [t for t in _pytree.tree_leaves(made) if isinstance(t, Tensor)]
        if any(t.device != self.device and t.dim() > 0 for t in results):
            reason = f"leaves {self.device}; what a step reads must lie there"
        if reason:
            line = user_line(traceback.extract_stack()[:-1])
            raise NotGraphable(f"{function.overloadpacket} {reason}" + ("" if line is None else f" ({line})"))
        self.known.update({_memory(tensor): tensor for tensor in results})  # kept, so that no memory is met twice
        return made


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
