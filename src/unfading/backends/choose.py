"""Which implementation runs the loop over time, and why the others do not.

Every layer has `backend="auto"`, which takes the first implementation that does not refuse the cell; a named one runs or
raises with its reason. `with use_backend("reference"):` overrides the layers' own choice for a block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.backends.time_checkpointing import run_in_segments
from unfading.cells.base import Cell
from unfading.errors import cannot_run, unknown
from unfading.lengths import zero_past
from unfading.reference import reference
from unfading.torch_state import traced

Implementation = Callable[..., tuple[Any, Any]]

# In the order in which "auto" tries them. The reference takes every cell, so it stands last.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "fused": lambda *arguments, **keywords: _compiler().fused(*arguments, **keywords),
    "graph": lambda *arguments, **keywords: _recorder().graph(*arguments, **keywords),
    "reference": reference,
}

# What `use_backend` says. A plain global, hence one for all threads: Dynamo guards on it, so that a compiled layer follows
# the block it runs in; it cannot trace a ContextVar and bakes a thread-local in.
_override: str | None = None
# What `run_by` puts in the place of every implementation.
_stand_in: Implementation | None = None
# The modules of the two fast implementations, which are most of the library's code: imported when a layer first runs. Globals
# and not imports inside functions, which would cost two microseconds at every call.
_fused_module: ModuleType | None = None
_graph_module: ModuleType | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every layer inside the block, in every thread, on the backend `name`, whatever the layers themselves say."""
    global _override
    check_backend(name)
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


@contextmanager
def run_by(implementation: Implementation) -> Iterator[None]:
    """Run every layer inside the block by a function like `reference`, each call in one piece: for what looks into the loop."""
    global _stand_in
    before, _stand_in = _stand_in, implementation
    try:
        yield
    finally:
        _stand_in = before


def check_backend(name: str) -> None:
    """Raise for a backend that does not exist."""
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(unknown("backend", name, ["auto", *IMPLEMENTATIONS]))


def choose(cell: Cell, backend: str) -> Implementation:
    """The implementation that runs this cell now: the one that was named, or the first that does not refuse it."""
    if _stand_in is not None:
        return _stand_in
    name = _override or backend
    if name in ("auto", "fused"):
        reason = _compiler().refusal(cell)
        if reason is None:
            return _compiler().fused
        if name == "fused":
            raise RuntimeError(cannot_run(cell, "fused", reason))
    if name in ("auto", "graph"):
        recorder = _recorder()
        reason = recorder.graph_refusal(cell)
        if reason is None:
            return recorder.graph if name == "graph" else recorder.graph_or_scan
        if name == "graph":
            raise RuntimeError(cannot_run(cell, "as CUDA graphs", reason))
        name = "reference"
    return IMPLEMENTATIONS[name]


class How(NamedTuple):
    """How a sequence is run."""

    lengths: Tensor | None
    reverse: bool
    start: int
    backend: str
    checkpoint_every: int | None


def run(cell: Cell, x: Tensor, state: Any, how: How) -> tuple[Any, Any]:
    """Project x [T, B, I] and run the cell over it: the states after every step, and the final state, as `scan`."""
    return _run(choose(cell, how.backend), cell, x, state, how)


def _run(implementation: Implementation, cell: Cell, x: Tensor, state: Any, how: How) -> tuple[Any, Any]:
    lengths, reverse, start, _, every = how
    weights = _weights(cell, x)
    if every is None or implementation is _stand_in:
        return implementation(cell, x, state, weights, lengths=lengths, reverse=reverse, start=start)
    return run_in_segments(implementation, cell, x, state, weights, every=every, lengths=lengths, reverse=reverse, start=start)


def outputs(cell: Cell, x: Tensor, state: Any, how: How) -> tuple[Tensor, Any]:
    """As `run`, but of the states only `cell.output`; where no gradient is wanted, the states are not even kept."""
    implementation = choose(cell, how.backend)
    compiler = _fused_module
    if (
        compiler is not None
        and implementation is compiler.fused
        and not torch.is_grad_enabled()
        and not traced()
        and not x.is_cuda
    ):
        result: tuple[Tensor, Any] | None = compiler.fused_outputs(
            cell, x, state, cell.weights(), lengths=how.lengths, reverse=how.reverse, start=how.start
        )
        if result is not None:
            return result
    trajectory, final = _run(implementation, cell, x, state, how)
    return output_of(cell, trajectory, how.lengths), final


def output_of(cell: Cell, trajectory: Any, lengths: Tensor | None) -> Tensor:
    """What the next layer sees of the states of every step; zeros past a row's end."""
    # As the state, in the precision of the parameters, also under autocast.
    output = cell.output(trajectory).to(trajectory[0].dtype)
    # States past a row's end are zeros already; what is made of them need not be.
    return output if lengths is None or output is trajectory[0] else zero_past(output, lengths)


def _compiler() -> ModuleType:
    global _fused_module
    if _fused_module is None:
        from unfading.fuse import fused

        _fused_module = fused
    return _fused_module


def _recorder() -> ModuleType:
    global _graph_module
    if _graph_module is None:
        from unfading.backends.cuda_graph import backend

        _graph_module = backend
    return _graph_module


def _weights(cell: Cell, x: Tensor) -> Any:
    """Matrices are built in the precision of their parameters; autocast is for the products with them."""
    casting = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if casting else nullcontext():
        return cell.weights()
