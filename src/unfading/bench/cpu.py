"""Measure a case on a CPU: build the layer, check that it agrees with the reference, then time it."""

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from unfading.backends.choose import use_backend
from unfading.bench.agreement import difference, disagreement
from unfading.bench.cases import Case
from unfading.bench.contenders import Call, both_passes, build_layer, forward_pass, torch_equivalent
from unfading.bench.results import Pass, Result, case_fields
from unfading.bench.timing import WALL, Timings, time_in_turns, torch_threads
from unfading.cells.base import Cell
from unfading.cells.matrix import LowRank
from unfading.fuse.fused import refusal
from unfading.layers.factory import Layer

# Seconds that a contender may take for all its rounds. The reference loop is many times slower than the others, and the ratio
# to it needs less precision.
SECONDS, SLOW_SECONDS = 3.0, 1.0
STEADY = 0.1  # how far a control may be from 1 on several threads

Contenders = dict[str, Call]


def measure(case: Case, *, threads: int = 1, rounds: int = 15, seed: int = 0, loops: bool = True) -> Result:
    """Measure one case. The number of torch threads and the random state are the same afterwards as before.

    Args:
        case: What to measure.
        threads: Number of torch threads.
        rounds: Largest number of rounds. Slow contenders get fewer.
        seed: Seed of weights, data and order.
        loops: Whether the reference loop is timed.
    """
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = build_layer(case)
        cell = cast(Cell, layer.cells[0])
        fields = case_fields(case, threads) | {"dense": _is_dense(cell), "matrices": _matrices(cell, case.H)}
        reason = refusal(cell)
        if reason is not None:
            return Result(**fields, status="refused", reason=reason)
        x = torch.randn(case.T, case.B, case.input_size)
        check, time = {
            "layer": (_check_layer, _time_layer),
            "lengths": (_check_layer, _time_lengths),
            "stream": (_check_stream, _time_stream),
        }[case.kind]
        reason = check(case, layer, x)
        if reason is not None:
            return Result(**fields, status="wrong", reason=reason)

        def run(every: Contenders) -> Timings:
            contenders = {name: call for name, call in every.items() if loops or name != "reference"}
            seconds = {name: SLOW_SECONDS if name == "reference" else SECONDS for name in contenders}
            return time_in_turns(contenders, WALL, rounds=rounds, seconds=seconds, order=random.Random(seed))

        passes = time(case, layer, x, run)
    unsteady = [name for name in ("forward", "both") if name in passes and abs(passes[name].control - 1) > STEADY]
    if threads > 1 and unsteady:
        controls = " and ".join(f"{passes[name].control:.2f}" for name in unsteady)
        reason = f"the same call timed twice differs by a factor of {controls} on {threads} threads"
        return Result(**fields, status="unsteady", reason=reason)
    return Result(**fields, status="measured", **passes)


def _check_layer(case: Case, layer: Layer, x: Tensor) -> str | None:
    """Why the fused loop must not be timed; None if it agrees with the reference."""
    return disagreement(layer, x, half_lengths(case) if case.kind == "lengths" else None)


def _time_layer(case: Case, layer: Layer, x: Tensor, run: Callable[[Contenders], Timings]) -> dict[str, Any]:
    """A whole call beside the reference loop, torch.nn's equivalent and, with gradients, the cell's own matrix products."""
    backward = _backward(case, layer)
    peer = torch_equivalent(layer)
    forward: Contenders = {
        "fused": forward_pass(layer, x),
        "control": forward_pass(layer, x),
        "reference": _by_reference(forward_pass(layer, x)),
    }
    both: Contenders = {
        "fused": both_passes(layer, x, backward),
        "control": both_passes(layer, x, backward),
        "reference": _by_reference(both_passes(layer, x, backward)),
    }
    if peer is not None:
        forward["torch"], both["torch"] = forward_pass(peer, x), both_passes(peer, x, backward)
    matrices = _matrices(cast(Cell, layer.cells[0]), case.H)
    if matrices is not None:
        both["products"] = _products(round(matrices), case.T * case.B, case.H)
    return {
        "torch_name": None if peer is None else f"nn.{type(peer).__name__}",
        "forward": _pass(run(forward)),
        "both": _pass(run(both)),
    }


def _time_lengths(case: Case, layer: Layer, x: Tensor, run: Callable[[Contenders], Timings]) -> dict[str, Any]:
    """Rows of half the length on average beside the same batch at full length."""
    backward = _backward(case, layer)
    short = both_passes(layer, x, backward, lengths=half_lengths(case))
    return {"both": _pass(run({"fused": short, "control": short, "full": both_passes(layer, x, backward)}))}


def _time_stream(case: Case, layer: Layer, x: Tensor, run: Callable[[Contenders], Timings]) -> dict[str, Any]:
    """A layer that gets one step at a time beside nn.LSTM called for one step at a time, with its state carried along."""
    peer = nn.LSTM(case.input_size, case.H)
    steps, singles = x.unbind(0), x.split(1)
    stream = cast(Any, layer).stream(batch=case.B)  # created once, as in use

    def push() -> None:
        for step in steps:
            stream.push(step)

    @torch.no_grad()
    def call() -> None:
        state = None
        for single in singles:
            _, state = peer(single, state)

    timings = run({"fused": push, "control": push, "torch": call})
    return {"torch_name": "nn.LSTM, one step a call", "forward": _pass(timings, calls=case.T)}


def _check_stream(case: Case, layer: Layer, x: Tensor) -> str | None:
    with torch.no_grad(), use_backend("reference"):
        exact, reference = copy.deepcopy(layer).double()(x.double())[0], layer(x)[0]
    stream = cast(Any, layer).stream(batch=case.B)
    streamed = torch.stack([stream.push(step) for step in x.unbind(0)])
    problem = difference(streamed, reference, exact)
    return problem and f"the output of stream() {problem}"


def _backward(case: Case, layer: Layer) -> Callable[[Tensor], object]:
    """The backward pass from a random cotangent of the whole output."""
    cotangent = torch.randn(case.T, case.B, layer.output_size)
    return lambda output: output.backward(cotangent)


def _by_reference(call: Call) -> Call:
    def reference() -> None:
        with use_backend("reference"):
            call()

    return reference


def _products(matrices: int, rows: int, H: int) -> Call:
    """For each H x H matrix: the product with it, with its transpose for the backward pass, and its gradient, over all time."""
    W, v, d = torch.randn(H, H), torch.randn(rows, H), torch.randn(rows, H)

    def run() -> None:
        for _ in range(matrices):
            torch.mm(v, W.t())
            torch.mm(d, W)
            torch.mm(d.t(), v)

    return run


def _pass(timings: Timings, calls: int = 1) -> Pass:
    def over(name: str, other: str) -> float | None:
        return round(timings.ratio(name, other), 4) if {name, other} <= timings.seconds.keys() else None

    return Pass(
        ms=round(1e3 * timings.median("fused") / calls, 5),
        rounds=timings.rounds("fused"),
        control=round(timings.ratio("control", "fused"), 4),
        x_reference=over("reference", "fused"),
        x_torch=over("torch", "fused"),
        of_products=over("fused", "products"),
        of_full=over("fused", "full"),
    )


def half_lengths(case: Case) -> Tensor:
    """Lengths from 1 to T - 1 in even steps, shuffled: T / 2 on average."""
    lengths = torch.linspace(1, max(case.T - 1, 1), case.B).round().long()
    return lengths[torch.randperm(case.B, generator=torch.Generator().manual_seed(0))]


def _is_dense(cell: Cell) -> bool:
    leaves = _pytree.tree_leaves(cell.weights(), is_leaf=lambda node: isinstance(node, LowRank))
    return not any(isinstance(leaf, LowRank) for leaf in leaves)


def _matrices(cell: Cell, H: int) -> int | None:
    """Products inside a step in units of one H x H matrix, counted while it runs; None for matrices of other shapes."""
    shapes = [leaf.shape for leaf in _pytree.tree_leaves(cell.weights()) if leaf.dim() == 2]
    if not shapes or not _is_dense(cell) or any(size % H for shape in shapes for size in shape):
        return None
    with torch.no_grad():
        weights, inputs = cell.weights(), cell.project(torch.ones(1, 1, cell.input_size))
        with FlopCounterMode(display=False) as counter:
            cell.step(type(inputs)(*(field[0] for field in inputs)), cell.initial_state(1), weights)
    return counter.get_total_flops() // (2 * H * H)
