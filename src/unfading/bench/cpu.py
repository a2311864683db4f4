"""From a case to a row on a CPU: build the layer, check that it agrees with the reference, then time it."""

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from unfading.backends.choose import use_backend
from unfading.bench.agreement import disagreement, parts_from
from unfading.bench.cases import Case
from unfading.bench.contenders import Call, both, built, forward, nearest
from unfading.bench.results import Pass, Row, of_case
from unfading.bench.timing import WALL, Race, race, torch_threads
from unfading.cells.base import Cell
from unfading.cells.matrix import LowRank
from unfading.fuse.fused import refusal
from unfading.layers.factory import Layer

# What a contender may take for all its rounds. The reference loop is many times slower than the others, and nobody needs
# the ratio to it as exactly.
SECONDS, SLOW_SECONDS = 3.0, 1.0
STEADY = 0.1  # how far a control may be from 1 on several threads

Contenders = dict[str, Call]


def measure(case: Case, *, threads: int = 1, rounds: int = 15, seed: int = 0) -> Row:
    """Measure one case with one torch thread, or as many as said; the process gets its own number back.

    Args:
        case: what to measure.
        threads: torch threads.
        rounds: at most so many rounds; what is slow gets fewer.
        seed: of weights, data and order.
    """
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = built(case)
        cell = cast(Cell, made.cells[0])
        told = of_case(case, threads) | {"dense": _is_dense(cell), "matrices": _matrices(cell, case.H)}
        reason = refusal(cell)
        if reason is not None:
            return Row(**told, status="refused", reason=reason)
        x = torch.randn(case.T, case.B, case.input_size)
        check, time = {"layer": (_wrong, _layer), "lengths": (_wrong, _lengths), "stream": (_wrong_stream, _stream)}[case.kind]
        reason = check(case, made, x)
        if reason is not None:
            return Row(**told, status="wrong", reason=reason)

        def run(contenders: Contenders) -> Race:
            seconds = {name: SLOW_SECONDS if name == "reference" else SECONDS for name in contenders}
            return race(contenders, WALL, rounds=rounds, seconds=seconds, order=random.Random(seed))

        passes = time(case, made, x, run)
    off = [name for name in ("forward", "both") if name in passes and abs(passes[name].control - 1) > STEADY]
    if threads > 1 and off:
        controls = " and ".join(f"{passes[name].control:.2f}" for name in off)
        reason = f"the same call timed twice differs by a factor of {controls} on {threads} threads"
        return Row(**told, status="unsteady", reason=reason)
    return Row(**told, status="measured", **passes)


def _wrong(case: Case, made: Layer, x: Tensor) -> str | None:
    return disagreement(made, x, half_lengths(case) if case.kind == "lengths" else None)


def _layer(case: Case, made: Layer, x: Tensor, run: Callable[[Contenders], Race]) -> dict[str, Any]:
    """A whole call against the reference loop, torch.nn's nearest and, with its gradients, the cell's own products."""
    pull = _pull(case, made)
    peer = nearest(made)
    once: Contenders = {"fused": forward(made, x), "control": forward(made, x), "reference": _slowly(forward(made, x))}
    twice: Contenders = {
        "fused": both(made, x, pull),
        "control": both(made, x, pull),
        "reference": _slowly(both(made, x, pull)),
    }
    if peer is not None:
        once["torch"], twice["torch"] = forward(peer, x), both(peer, x, pull)
    matrices = _matrices(cast(Cell, made.cells[0]), case.H)
    if matrices is not None:
        twice["products"] = _products(round(matrices), case.T * case.B, case.H)
    return {
        "torch_name": None if peer is None else f"nn.{type(peer).__name__}",
        "forward": _pass(run(once)),
        "both": _pass(run(twice)),
    }


def _lengths(case: Case, made: Layer, x: Tensor, run: Callable[[Contenders], Race]) -> dict[str, Any]:
    """Rows of half the length on average against the same batch at full length."""
    pull = _pull(case, made)
    lengths = half_lengths(case)
    short = both(made, x, pull, lengths=lengths)
    return {"both": _pass(run({"fused": short, "control": short, "full": both(made, x, pull)}))}


def _stream(case: Case, made: Layer, x: Tensor, run: Callable[[Contenders], Race]) -> dict[str, Any]:
    """A layer pushed step by step against nn.LSTM called for one step at a time, which carries its state along."""
    peer = nn.LSTM(case.input_size, case.H)
    steps, singles = x.unbind(0), x.split(1)
    stream = cast(Any, made).stream(batch=case.B)  # made once, as its user does

    def push() -> None:
        for step in steps:
            stream.push(step)

    @torch.no_grad()
    def call() -> None:
        state = None
        for single in singles:
            _, state = peer(single, state)

    found = run({"fused": push, "control": push, "torch": call})
    return {"torch_name": "nn.LSTM, one step a call", "forward": _pass(found, calls=case.T)}


def _wrong_stream(case: Case, made: Layer, x: Tensor) -> str | None:
    with torch.no_grad(), use_backend("reference"):
        want, plain = copy.deepcopy(made).double()(x.double())[0], made(x)[0]
    stream = cast(Any, made).stream(batch=case.B)
    got = torch.stack([stream.push(step) for step in x.unbind(0)])
    problem = parts_from(got, plain, want)
    return problem and f"the output of stream() {problem}"


def _pull(case: Case, made: Layer) -> Callable[[Tensor], object]:
    """The backward pass from a random cotangent of the whole output."""
    cotangent = torch.randn(case.T, case.B, made.output_size)
    return lambda output: output.backward(cotangent)


def _slowly(run: Call) -> Call:
    def slow() -> None:
        with use_backend("reference"):
            run()

    return slow


def _products(matrices: int, rows: int, H: int) -> Call:
    """Per H x H matrix: the product with it, its transpose's for the way back, and its gradient, each over all time."""
    W, v, d = torch.randn(H, H), torch.randn(rows, H), torch.randn(rows, H)

    def run() -> None:
        for _ in range(matrices):
            torch.mm(v, W.t())
            torch.mm(d, W)
            torch.mm(d.t(), v)

    return run


def _pass(found: Race, calls: int = 1) -> Pass:
    def over(name: str, other: str) -> float | None:
        return round(found.ratio(name, other), 4) if {name, other} <= found.seconds.keys() else None

    return Pass(
        ms=round(1e3 * found.median("fused") / calls, 5),
        rounds=found.rounds("fused"),
        control=round(found.ratio("control", "fused"), 4),
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
    """Products inside a step in units of one H x H matrix, counted while it runs; None where its matrices are no such."""
    shapes = [leaf.shape for leaf in _pytree.tree_leaves(cell.weights()) if leaf.dim() == 2]
    if not shapes or not _is_dense(cell) or any(size % H for shape in shapes for size in shape):
        return None
    with torch.no_grad():
        weights, inputs = cell.weights(), cell.project(torch.ones(1, 1, cell.input_size))
        with FlopCounterMode(display=False) as counter:
            cell.step(type(inputs)(*(field[0] for field in inputs)), cell.initial_state(1), weights)
    return counter.get_total_flops() // (2 * H * H)
