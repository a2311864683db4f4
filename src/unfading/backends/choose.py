"""Which implementation runs the loop over time, and why the others do not.

Every layer has `backend="auto"`, which takes the first implementation that does not refuse the cell. An implementation that is
asked for by name runs, or raises its reason. `with use_backend("reference"):` overrides the layers' own choice for a block.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from unfading.backends.time_checkpointing import run_in_segments
from unfading.cells.base import Cell
from unfading.cells.reset import with_resets
from unfading.errors import FasterAsGraphs, NoKernel, OfThisCall, SlowLoopWarning, cannot_run, cell_name, unknown
from unfading.lengths import zero_past
from unfading.loop_options import LoopOptions
from unfading.reference import reference
from unfading.torch_state import constant_when_compiled, traced

Implementation = Callable[..., tuple[Any, Any]]  # with the arguments and results of `reference`

# In the order in which "auto" tries them. The reference accepts every cell, so it is the last. None: `choose` imports it.
# "scan" is not in this order: where a scan is faster, the compiled loop of "auto" is one.
IMPLEMENTATIONS: dict[str, Implementation | None] = {"fused": None, "graph": None, "reference": reference, "scan": None}

# Set by `use_backend`. A plain global, so one for all threads: Dynamo guards on it, so that a compiled layer follows the block
# it runs in. Dynamo cannot trace a ContextVar, and treats a thread-local as a constant.
_override: str | None = None
# Set by `run_by`: replaces every implementation.
_stand_in: Implementation | None = None
# Set by `observe_backends`: gets an entry for every loop that runs.
_observed: dict[str, dict[str, str | None]] | None = None
# The modules of the two fast implementations, which are most of the library's code: imported when they are first asked for a
# cell. Globals, since an import statement inside a function costs two microseconds at every call.
_fused_module: ModuleType | None = None
_graph_module: ModuleType | None = None
_wavefront_module: ModuleType | None = None

# Classes and names of cells that run on the reference loop, of which the user has been told. Cells that the library wraps share
# a class, and differ in their names.
_slow: set[tuple[type[Cell], str]] = set()

LEAST_LAYERS = 3  # of a stack whose layers may run side by side: two layers gain little, since both wait for each other


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every layer inside the block, in every thread, on the backend `name` instead of its own.

    Args:
        name: "fused", the compiled loop; "graph", the reference loop recorded as CUDA graphs; "reference", the plain loop in
            PyTorch; "scan", a parallel scan over time on a GPU, for steps that are linear in their state and mix no units; or
            "auto", the first of the first three that can run the cell, as a scan where that is faster. A named backend runs or
            raises an error.
    """
    global _override
    check_backend(name)
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


@contextmanager
def run_by(implementation: Implementation) -> Iterator[None]:
    """Run every layer inside the block by a function like `reference`, each call as one sequence: to observe the loop."""
    global _stand_in
    before, _stand_in = _stand_in, implementation
    try:
        yield
    finally:
        _stand_in = before


@contextmanager
def observe_backends() -> Iterator[dict[str, dict[str, str | None]]]:
    """Inside the block, write down which backend runs each kind of cell, and why it is not a faster one.

    Yields a dict from the class of a cell to {"backend": name, "reason": None or a sentence}.
    """
    global _observed
    before, _observed = _observed, {}
    try:
        yield _observed
    finally:
        _observed = before


def _observe(cell: Cell, implementation: Implementation, backend: str, batch: int) -> None:
    assert _observed is not None
    names = {IMPLEMENTATIONS["reference"]: "reference"}
    if _graph_module is not None:
        names |= {_graph_module.graph: "graph", _graph_module.graph_if_possible: "graph"}
    if _fused_module is not None:
        names[_fused_module.fused] = "fused"
    function = implementation.func if isinstance(implementation, partial) else implementation
    compiled_step = isinstance(implementation, partial) and implementation.keywords.get("plan") is not None
    name, asked, reason = "fused" if compiled_step else names.get(function, "stand-in"), _override or backend, None
    if name != "fused":
        compiler = cast(ModuleType, _fused_module)
        reason = f"backend={asked!r} was requested" if asked != "auto" else compiler.refusal(cell, batch, or_graphs=True)
        reason = reason or "the reference loop is estimated to be faster for frames of this size"
    _observed[type(cell).__name__] = {"backend": name, "reason": reason}


def check_backend(name: str) -> None:
    """Raise for a backend that does not exist."""
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(unknown("backend", name, ["auto", *IMPLEMENTATIONS]))


def choose(cell: Cell, backend: str, batch: int = 1) -> Implementation:
    """The implementation that runs this cell now: the named one, or the first that does not refuse the cell.

    On a GPU that depends on the number of rows. The compiled loop comes as a `partial` with the plan of the cell.
    """
    if _stand_in is not None:
        return _stand_in
    name = _override or backend
    if name == "scan":
        return _scan(cell, batch)
    if name in ("auto", "fused"):
        _load_fused()
        compiler = cast(ModuleType, _fused_module)
        answer = compiler.runnable(cell, batch, or_graphs=name == "auto")
        if isinstance(answer, FasterAsGraphs):
            if _graph_refusal(cell) is None:
                return partial(cast(ModuleType, _graph_module).graph_if_possible, otherwise=compiler.fused)
            answer = compiler.runnable(cell, batch)
        if isinstance(answer, compiler.FramePlan) and answer.target == "triton" and _graph_refusal(cell) is None:
            eager = partial(compiler.fused, cell_plan=answer)
            return partial(cast(ModuleType, _graph_module).graph_if_possible, otherwise=eager, plan=answer)
        if isinstance(answer, compiler.FramePlan):
            return partial(compiler.fused, cell_plan=answer, if_faster=name == "auto")
        if not isinstance(answer, str):
            scan = None if name == "auto" else False
            loop = compiler.fused if answer is None else partial(compiler.fused, cell_plan=answer, scan=scan)
            return cast(Implementation, loop)
        if name == "fused":
            raise RuntimeError(cannot_run(cell, "fused", answer))
        implementation = _without_kernel(cell, name)
        if implementation is reference and not isinstance(answer, OfThisCall) and not traced():
            _warn_once(cell, answer)
        return implementation
    return _without_kernel(cell, name)


def _scan(cell: Cell, batch: int) -> Implementation:
    """The compiled loop as a parallel scan; raises RuntimeError with the reason where it is none."""
    _load_fused()
    compiler = cast(ModuleType, _fused_module)
    answer = compiler.runnable(cell, batch)
    reason = answer if isinstance(answer, str) else compiler.not_a_scan(answer)
    if reason is not None:
        raise RuntimeError(cannot_run(cell, "as a parallel scan", reason))
    return partial(compiler.fused, cell_plan=answer, scan=True)


def _warn_once(cell: Cell, reason: str) -> None:
    """Say that a cell runs on the reference loop, once for each class and name."""
    name = cell_name(cell)
    if (type(cell), name) in _slow:
        return
    _slow.add((type(cell), name))
    warnings.warn(
        f"{name} runs on the plain loop in PyTorch, which is slow: {reason}. backend='reference' hides this.",
        SlowLoopWarning,
        stacklevel=3,
    )


def _without_kernel(cell: Cell, name: str) -> Implementation:
    """The implementation that runs a cell where it is not compiled."""
    if name in ("auto", "graph"):
        reason = _graph_refusal(cell)
        if reason is None:
            graphs = cast(ModuleType, _graph_module)
            return cast(Implementation, graphs.graph if name == "graph" else graphs.graph_if_possible)
        if name == "graph":
            raise RuntimeError(cannot_run(cell, "as CUDA graphs", reason))
        name = "reference"
    return cast(Implementation, IMPLEMENTATIONS[name])


def _graph_refusal(cell: Cell) -> str | None:
    _load_graph()
    reason: str | None = cast(ModuleType, _graph_module).graph_refusal(cell)
    return reason


def runs_compiled(implementation: Implementation) -> bool:
    """Whether `choose` has returned the compiled loop, outside torch.compile."""
    return isinstance(implementation, partial) and implementation.func is cast(ModuleType, _fused_module).fused


def run(cell: Cell, x: Tensor, state: Any, options: LoopOptions, *, weights: Any = None) -> tuple[Any, Any]:
    """Project x [T, B, I] and run the cell over it; return the states after every step and the final state, as `scan`.

    Args:
        weights: in the place of the cell's own.
    """
    return _run(choose(cell, options.backend, x.shape[1]), cell, x, state, options, weights)


def _run(
    implementation: Implementation, cell: Cell, x: Tensor, state: Any, options: LoopOptions, weights: Any = None
) -> tuple[Any, Any]:
    if _observed is not None:
        _observe(cell, implementation, options.backend, x.shape[1])
    weights = _weights(cell, x) if weights is None else weights
    segments = options.checkpoint_every is not None and implementation is not _stand_in
    try:
        if segments:
            return run_in_segments(implementation, cell, x, state, weights, options)
        return implementation(cell, x, state, weights, options)
    except NoKernel as error:  # the GPU has no room for this call, or the reference loop is faster
        name = _override or options.backend
        if name != "auto":
            raise RuntimeError(cannot_run(cell, name, str(error))) from error
    return _run(_without_kernel(cell, "auto"), cell, x, state, options, weights)


def outputs(cell: Cell, x: Tensor, state: Any, options: LoopOptions, resets: Tensor | None = None) -> tuple[Tensor, Any]:
    """As `run`, but only `cell.output` of the states; without a gradient the states are not even stored.

    Args:
        resets: [T, B], of a cell that reads them behind its input.
    """
    implementation = choose(cell, options.backend, x.shape[1])
    # Without a gradient, on the CPU.
    if not (torch.is_grad_enabled() or x.is_cuda or traced()) and runs_compiled(implementation):
        compiler, cell_plan = cast(ModuleType, _fused_module), cast("partial[Any]", implementation).keywords["cell_plan"]
        result: tuple[Tensor, Any] | None = compiler.fused_outputs(cell_plan, cell, x, state, cell.weights(), options, resets)
        if result is not None:
            return result
    x = x if resets is None else with_resets(x, resets)
    trajectory, final = _run(implementation, cell, x, state, options)
    return output_of(cell, trajectory, options.lengths), final


def stack_outputs(
    cells: Sequence[Cell],
    x: Tensor,
    states: Sequence[Any],
    options: LoopOptions,
    dropout: float,
    resets: Tensor | None = None,
) -> tuple[Tensor, list[Any]] | None:
    """The output of the last layer and the final states of all layers, which run side by side; None where they do not.

    Args:
        dropout: the probability of dropping an entry between two layers, 0 outside training.
        resets: [T, B], of cells that read them.
    """
    if len(cells) < LEAST_LAYERS or options.checkpoint_every is not None or _stand_in is not None or traced() or x.dim() > 3:
        return None
    _load_fused()
    if cast(ModuleType, _fused_module).target_of(x.device) != "triton":
        return None
    global _wavefront_module
    if _wavefront_module is None:
        from unfading.fuse import wavefront

        _wavefront_module = wavefront
    if not _wavefront_module.is_worth_asking(x.device):
        return None
    implementations = [choose(cell, options.backend, x.shape[1]) for cell in cells]
    if not all(runs_compiled(implementation) for implementation in implementations):
        return None
    plans = [cast("partial[Any]", implementation).keywords["cell_plan"] for implementation in implementations]
    result: tuple[Tensor, list[Any]] | None = _wavefront_module.wavefront(cells, plans, x, states, dropout, options, resets)
    if result is not None and _observed is not None:
        for cell, implementation in zip(cells, implementations, strict=True):
            _observe(cell, implementation, options.backend, x.shape[1])
    return result


def output_of(cell: Cell, trajectory: Any, lengths: Tensor | None) -> Tensor:
    """What the next layer sees of the states of every step; zeros past a row's end."""
    # Like the state, the output has the precision of the parameters, also under autocast.
    output = cell.output(trajectory).to(trajectory[0].dtype)
    # States past a row's end are zeros already; an output computed from them may not be.
    return output if lengths is None or output is trajectory[0] else zero_past(output, lengths)


# torch.compile calls these two while it traces, and does not look inside: it would see `None` there at the first call, a module
# at the second, and compile again.


@constant_when_compiled
def _load_fused() -> bool:
    global _fused_module
    if _fused_module is None:
        from unfading.fuse import fused

        _fused_module = fused
    return True


@constant_when_compiled
def _load_graph() -> bool:
    global _graph_module
    if _graph_module is None:
        from unfading.backends.cuda_graph import backend

        _graph_module = backend
    return True


def _weights(cell: Cell, x: Tensor) -> Any:
    """Matrices are built in the precision of their parameters; autocast applies to the products with them."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast on the device "meta"
        return cell.weights()
    with torch.autocast(x.device.type, enabled=False):
        return cell.weights()
