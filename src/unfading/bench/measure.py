"""From a case to a row: build the layer, check that it agrees with the reference, then time it."""

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from unfading.backend import use_backend
from unfading.bench.agreement import disagreement, parts_from
from unfading.bench.cases import INPUT, Case, cell_classes
from unfading.bench.rows import Pass, Row
from unfading.bench.timing import Race, race, torch_threads
from unfading.cells.base import Cell, LowRank
from unfading.convert import to_torch
from unfading.fuse.fused import refusal
from unfading.layer import Layer, layer
from unfading.recurrent import Recurrent

# What a contender may take for all its rounds. The reference loop is many times slower than the others, and nobody needs
# the ratio to it as exactly.
SECONDS, SLOW_SECONDS = 3.0, 1.0
STEADY = 0.1  # how far a control may be from 1 on several threads

Contenders = dict[str, Callable[[], object]]


def measure(case: Case, *, threads: int = 1, rounds: int = 15, seed: int = 0) -> Row:
    """Measure one case with one torch thread, or as many as said; the process gets its own number back.

    Args:
        case: what to measure.
        threads: torch threads.
        rounds: at most so many rounds; what is slow gets fewer.
        seed: of weights, data and order.
    """
    variant = case.variant
    options = variant.options(case.T, case.H)
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = layer(cell_classes()[variant.cell])(INPUT, case.H, backend="fused", **options)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(variant.scale(case.T))
        cell = cast(Cell, made.cells[0])
        told: dict[str, Any] = {
            "kind": case.kind,
            "name": variant.name,
            "cell": variant.cell,
            "options": options,
            "scale": variant.scale(case.T),
            "T": case.T,
            "B": case.B,
            "H": case.H,
            "input_size": INPUT,
            "dtype": "float32",
            "threads": threads,
            "dense": _is_dense(cell),
            "matrices": _matrices(cell, case.H),
        }
        reason = refusal(cell)
        if reason is not None:
            return Row(**told, status="refused", reason=reason)
        x = torch.randn(case.T, case.B, INPUT)
        check, time = {"layer": (_wrong, _layer), "lengths": (_wrong, _lengths), "stream": (_wrong_stream, _stream)}[case.kind]
        reason = check(case, made, x)
        if reason is not None:
            return Row(**told, status="wrong", reason=reason)

        def run(contenders: Contenders) -> Race:
            seconds = {name: SLOW_SECONDS if name == "reference" else SECONDS for name in contenders}
            return race(contenders, rounds=rounds, seconds=seconds, order=random.Random(seed))

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
    cotangent = torch.randn(case.T, case.B, made.output_size)
    peer = _nearest(made)
    forward: Contenders = {"fused": _forward(made, x), "control": _forward(made, x), "reference": _slowly(_forward(made, x))}
    both: Contenders = {
        "fused": _both(made, x, cotangent),
        "control": _both(made, x, cotangent),
        "reference": _slowly(_both(made, x, cotangent)),
    }
    if peer is not None:
        forward["torch"], both["torch"] = _forward(peer, x), _both(peer, x, cotangent)
    matrices = _matrices(cast(Cell, made.cells[0]), case.H)
    if matrices is not None:
        both["products"] = _products(round(matrices), case.T * case.B, case.H)
    return {
        "torch_name": None if peer is None else f"nn.{type(peer).__name__}",
        "forward": _pass(run(forward)),
        "both": _pass(run(both)),
    }


def _lengths(case: Case, made: Layer, x: Tensor, run: Callable[[Contenders], Race]) -> dict[str, Any]:
    """Rows of half the length on average against the same batch at full length."""
    cotangent = torch.randn(case.T, case.B, made.output_size)
    lengths = half_lengths(case)
    short = _both(made, x, cotangent, lengths=lengths)
    return {"both": _pass(run({"fused": short, "control": short, "full": _both(made, x, cotangent)}))}


def _stream(case: Case, made: Layer, x: Tensor, run: Callable[[Contenders], Race]) -> dict[str, Any]:
    """A layer pushed step by step against nn.LSTM called for one step at a time, which carries its state along."""
    peer = nn.LSTM(INPUT, case.H)
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


def _forward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> None:
        module(x)

    return run


def _both(module: nn.Module, x: Tensor, cotangent: Tensor, **arguments: Any) -> Callable[[], object]:
    parameters = list(module.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        output, _ = module(x, **arguments)
        output.backward(cotangent)

    return run


def _slowly(run: Callable[[], object]) -> Callable[[], object]:
    def slow() -> None:
        with use_backend("reference"):
            run()

    return slow


def _products(matrices: int, rows: int, H: int) -> Callable[[], object]:
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


def _nearest(made: Recurrent) -> nn.Module | None:
    """torch.nn's module with the same weights, where there is one that computes the same."""
    try:
        return to_torch(made)
    except (TypeError, ValueError):
        return None


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
