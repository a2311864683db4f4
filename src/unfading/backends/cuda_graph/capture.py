"""Record a function once as a CUDA graph and replay it: the same kernels on the same addresses, in one launch.

    captured = CapturedGraph(function, buffers, pool)     runs function(buffers) once to warm up, and once to record it
    results = captured.replay()                           valid until another graph is replayed in the same memory pool

A recording contains addresses and no values. Values that change are copied into `buffers` before a replay, and results are
copied out at once. A recording contains no Python either: no branch on a value, no random number, no tensor that only Python
knows. `Watch` raises an error for a function that needs one of these.
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

# The tags of torch's operations that a recording cannot contain, and the reasons.
TAGS = {
    torch.Tag.data_dependent_output: "looks at a value, for which the host would have to wait; torch.where does not",
    torch.Tag.dynamic_output_shape: "gives a shape that depends on values; torch.where and masks have fixed shapes",
    torch.Tag.nondeterministic_seeded: "draws random numbers, which a recording would repeat; draw them in project",
}


class NotGraphable(RuntimeError):
    """A function cannot be recorded; the message is the reason."""


class NotNow(NotGraphable):
    """A function cannot be recorded at this moment; the next call may succeed."""


class CapturedGraph:
    """A function of tensors at fixed addresses as a CUDA graph. All calls of the CUDA graph API are in this class.

    Args:
        function: takes the buffers, may write into them, and returns tensors, without a branch on a value.
        buffers: a tree of tensors, which the recording itself reads and writes.
        pool: the memory pool of the tensors allocated inside. Recordings that share one are replayed one at a time.
    """

    kind: ClassVar[str] = "cuda"
    _recording: ClassVar[threading.Lock] = threading.Lock()
    _playing: ClassVar[threading.Lock] = threading.Lock()
    # By device: the stream on which graphs are recorded, and the event after the last replay.
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _done: ClassVar[dict[torch.device, torch.cuda.Event]] = {}

    def __init__(self, function: Callable[[Any], list[Tensor | None]], buffers: Any, pool: Any):
        device = next(leaf.device for leaf in _pytree.tree_leaves(buffers) if isinstance(leaf, Tensor))
        # Never waits: the thread that records may depend on the one that would wait here, the thread of autograd.
        if not self._recording.acquire(blocking=False):
            raise NotNow("another thread is recording a CUDA graph just now")
        try:
            with torch.cuda.device(device):
                self._graph, self._results = self._record(function, buffers, pool, device)
        except Exception as error:  # CUDA, its libraries and torch have many types
            raise NotGraphable(f"recording it failed: {type(error).__name__}: {first_line(error)}") from error
        finally:
            self._recording.release()

    def _record(self, function: Any, buffers: Any, pool: Any, device: torch.device) -> tuple[Any, list[Tensor | None]]:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # On copies, since a replay may be using the buffers themselves. Recording runs nothing.
            function(_pytree.tree_map_only(Tensor, torch.clone, buffers))
            # Other threads may use CUDA meanwhile; those of a data loader query events all the time.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = function(buffers)
                graph.capture_end()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                with suppress(Exception):  # an end that fails leaves the allocator in the pool
                    torch._C._cuda_endAllocateToPool(device.index, pool)
                raise
        current.wait_stream(stream)
        return graph, results

    def replay(self) -> list[Tensor | None]:
        """Replay the graph on the current stream; return its results."""
        self._graph.replay()
        return self._results

    @staticmethod
    def pool() -> Any:
        """A new memory pool for recordings."""
        return torch.cuda.graph_pool_handle()

    @staticmethod
    def under_way() -> bool:
        """Whether the caller or another thread is recording now."""
        return torch.cuda.is_current_stream_capturing() or CapturedGraph._recording.locked()

    @classmethod
    @contextmanager
    def turn(cls, device: torch.device) -> Iterator[None]:
        """A context in which one caller at a time fills buffers, replays and copies results, on any thread and stream.

        Recordings with separate buffers also take turns: cuBLAS has one workspace for all graphs recorded on one stream.
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
    """A context without the caller's settings: a recording must not depend on where the first call happens."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    collecting = gc.isenabled()
    # Hooks would move or count saved tensors; the garbage collector could free a graph while another is recorded.
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
    """Observes every operation inside its block; raises NotGraphable with the line of one that cannot be recorded.

    Args:
        arguments: all tensors that the function receives.
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
                reason = "copies numbers from the host; return them from weights()"
        elif any(_memory(tensor) not in self.known for tensor in given):
            reason = "reads a tensor that is not an argument of step, and may be freed later; return it from weights()"
        result = None if reason else function(*arguments, **(keywords or {}))
        results = [t for t in _pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.device != self.device and t.dim() > 0 for t in results):
            reason = f"leaves {self.device}; all tensors of a step must be on that device"
        if reason:
            line = user_line(traceback.extract_stack()[:-1])
            raise NotGraphable(f"{function.overloadpacket} {reason}" + ("" if line is None else f" ({line})"))
        self.known.update({_memory(tensor): tensor for tensor in results})  # held, so that their memory is not reused
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
