"""The calls of a random user's cell: how its layer is built, what it is called with, and what is read of each call.

`attack` compares a layer that runs as the user's would with one that runs on the reference loop.
"""

import io
import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

import unfading
from tests.helpers.user_cells import UserCell
from unfading.layers.truncated import truncated

KINDS = ("grad", "grad", "grad", "no_grad", "no_grad", "inference", "trajectory", "stream", "truncated")
SURROUNDINGS = ("threads", "checkpoint", "reentrant", "saved_tensors", "functional", "vmap", "func_grad", "fork")
DATA = ("normal",) * 6 + ("quantised", "quantised", "repeated", "zeros", "special", "large")

Results = dict[str, Tensor | None]


class Call(NamedTuple):
    """One call of the layer."""

    kind: str  # of KINDS
    T: int
    B: int
    start: int
    lengths: tuple[int, ...] | None
    state: bool  # whether an initial state is passed
    data: str  # of DATA
    change: str  # before the call: "", "change_1", "train", "eval", "update"
    around: str  # "", or one of SURROUNDINGS
    chunk_bytes: int  # of the no_grad chunks
    form: str  # of x: "batched", "unbatched", "packed"
    wanted: str  # what the loss is computed from: "all", "output", "final"


class Scenario(NamedTuple):
    """A layer of the cell, and its calls."""

    seed: int
    backend: str
    dtype: torch.dtype
    input_size: int
    layers: int
    bidirectional: bool
    batch_first: bool
    checkpoint_every: int | None
    learn_initial_state: bool
    noise: tuple[str, float] | None  # recurrent_dropout or zoneout
    evaluation: bool
    quantised: bool
    optimised: bool  # compile with the flags of the product
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items() if name != "calls")
        return "\n".join([f"Scenario({options})", *(f"    {call}" for call in self.calls)])


def scenario(cell: UserCell) -> Scenario:
    """The calls for a cell, drawn from its seed."""
    r = Random(f"scenario {cell.seed}")

    def chance(share: float) -> bool:
        return r.random() < share

    bidirectional, layers = chance(0.2), 2 if chance(0.15) else 1
    checkpoint = r.choice([1, 2, 3, 5]) if chance(0.25) else None
    noise = (r.choice(["recurrent_dropout", "zoneout"]), 0.3) if chance(0.05) else None
    if noise or cell.noisy:
        checkpoint = None
    changes = [f"change_{i + 1}" for i in range(cell.changes)]
    calls = []
    for i in range(1 + max(len(changes), r.choice([0, 1, 1]))):
        T, B = r.choice([1, 2, 3, 4, 5, 7, 9, 12]), r.choice([1, 1, 2, 3, 5])
        form = r.choices(["batched", "unbatched", "packed"], [10, 1, 1])[0]
        B = 1 if form == "unbatched" else B
        kind = r.choice(KINDS)
        if kind in ("stream", "truncated") and (bidirectional or noise or cell.noisy or (cell.draws and layers > 1)):
            kind = "grad"
        ragged = form == "batched" and kind not in ("stream", "truncated") and chance(0.3)
        change = changes[i - 1] if 0 < i <= len(changes) else r.choice(["", "train", "eval", "update"]) if i else ""
        around = r.choice(SURROUNDINGS) if chance(0.1) and not noise and not cell.noisy and form == "batched" else ""
        around = "" if around == "threads" and cell.draws else around
        kind = "grad" if around not in ("", "threads", "fork") else kind
        calls.append(
            Call(
                kind, T, B,
                start=r.choice([1, 2, 3, 5, 7, 30]) if chance(0.35) else 0,
                lengths=tuple(r.randint(1, T) for _ in range(B)) if ragged else None,
                state=chance(0.5) and form == "batched",
                # Past the end of a row the reference multiplies its last state by zero, which is NaN if the state was.
                data=r.choice([kind for kind in DATA if kind != "special" or not (ragged or form == "packed")]),
                change=change,
                around=around,
                chunk_bytes=r.choice([1, 100, 300, 1000]) if chance(0.6) else 1 << 21,
                form=form if kind not in ("stream", "truncated") else "batched",
                wanted=r.choice(["all", "all", "output", "final"]),
            )
        )  # fmt: skip
    return Scenario(
        cell.seed,
        backend="auto" if chance(0.2) else "fused",
        dtype=torch.float32 if chance(0.25) else torch.float64,
        input_size=r.choice([1, 2, 3, 4]),
        layers=layers,
        bidirectional=bidirectional,
        batch_first=chance(0.2),
        checkpoint_every=checkpoint,
        learn_initial_state=chance(0.08),
        noise=noise,
        evaluation=chance(0.3),
        quantised=chance(0.2),
        optimised=chance(0.04),
        calls=tuple(calls),
    )


# -- a layer ------------------------------------------------------------------------------------------------------------------


def build(module: Any, plan: Scenario, *, backend: str, checkpoint_every: int | None) -> Any:
    """The layer of a scenario, always with the same parameters."""
    seed_everything(plan.seed)
    noise = {} if plan.noise is None else {plan.noise[0]: plan.noise[1]}
    layer = unfading.Recurrent(
        module.UserCell, plan.input_size, plan.layers, plan.batch_first, bidirectional=plan.bidirectional, dtype=plan.dtype,
        learn_initial_state=plan.learn_initial_state, checkpoint_every=checkpoint_every, backend=backend, **noise,
    )  # fmt: skip
    if plan.quantised:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_((4 * parameter).round() / 4)
    return layer.eval() if plan.evaluation else layer


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def numbers(call: Call, plan: Scenario, index: int) -> Tensor:
    """x, [T, B, I]."""
    generator = torch.Generator().manual_seed(1000 * plan.seed + index)
    x = torch.randn(call.T, call.B, plan.input_size, generator=generator, dtype=torch.float64)
    if call.data == "quantised":
        x = (2 * x).round() / 4
    elif call.data == "repeated":
        x = x[:1, :1].expand_as(x).clone()
    elif call.data == "zeros":
        x = 0 * x
    elif call.data == "large":
        x = 1e3 * x
    elif call.data == "special":
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30, 1e-40, 0.0])
        picked = torch.randint(0, 7, x.shape, generator=generator)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.08, values[picked].double(), x)
    return x.to(plan.dtype)


def change(module: Any, layer: Any, call: Call) -> None:
    """What the caller does before a call."""
    if call.change.startswith("change"):
        for cell in layer.cells:
            getattr(module, call.change)(cell)
    elif call.change == "train":
        layer.train()
    elif call.change == "eval":
        layer.eval()
    elif call.change == "update":
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.75).add_(0.1)  # what is 0 or 1 before training does not stay so


# -- one call -----------------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    state: Any
    lengths: Tensor | None


def arguments(layer: Any, call: Call, plan: Scenario, index: int) -> Arguments:
    """Fresh leaves for a call."""
    x = numbers(call, plan, index)
    state = None
    if call.state:
        generator = torch.Generator().manual_seed(2000 * plan.seed + index)
        with torch.no_grad():
            initial = layer.initial_states(call.B)

        def random_like(part: Tensor) -> Tensor:
            return torch.randn(part.shape, generator=generator, dtype=torch.float64).div(2).to(part.dtype)

        if layer.stacked_state:
            state = type(initial[0])(
                *(random_like(torch.stack(parts)).requires_grad_() for parts in zip(*initial, strict=True))
            )
        else:
            state = tuple(type(one)(*(random_like(part).requires_grad_() for part in one)) for one in initial)
    lengths = None if call.lengths is None else torch.tensor(call.lengths)
    if call.form == "unbatched":
        x = x[:, 0]
    elif call.form == "batched" and plan.batch_first:
        x = x.transpose(0, 1).contiguous()
    return Arguments(x.requires_grad_(), state, lengths)


def perform(layer: Any, call: Call, plan: Scenario, index: int, around: str = "") -> Results:
    """All results of a call, by name."""
    given = arguments(layer, call, plan, index)
    seed_everything(31 * plan.seed + index)
    if around == "threads":
        return in_threads(partial(perform, layer, call, plan, index))
    if around == "fork":
        return in_fork(partial(perform, layer, call, plan, index))
    if call.kind in ("stream", "truncated"):
        results = in_pieces(layer, call, given)
    elif around in ("vmap", "func_grad"):
        results = transformed(layer, call, given, around)
    elif call.kind == "grad":
        results = with_gradient(layer, call, given, around)
    elif call.kind == "trajectory":
        results = {
            f"trajectory {i}": part
            for i, part in enumerate(leaves(layer.trajectory(given.x, given.state, lengths=given.lengths, start=call.start)))
        }
        results |= gradients(layer, given, list(results.values()))
    else:
        with torch.no_grad() if call.kind == "no_grad" else torch.inference_mode():
            results = named(layer(packed(given.x, call), given.state, lengths=given.lengths, start=call.start))
    return {name: None if value is None else value.detach().clone() for name, value in results.items()}


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def named(answer: Any) -> Results:
    output, final = answer
    output = output.data if isinstance(output, torch.nn.utils.rnn.PackedSequence) else output
    return {"output": output, **{f"final {i}": part for i, part in enumerate(leaves(final))}}


def packed(x: Tensor, call: Call) -> Any:
    if call.form != "packed":
        return x
    lengths = [max(1, call.T - i) for i in range(call.B)]
    first = x.shape[0] == call.B and x.shape[0] != call.T
    return torch.nn.utils.rnn.pack_padded_sequence(
        x[:, : call.T] if first else x, torch.tensor(lengths), batch_first=first, enforce_sorted=True
    )


def with_gradient(layer: Any, call: Call, given: Arguments, around: str) -> Results:
    def run(x: Tensor) -> Any:
        return layer(packed(x, call), given.state, lengths=given.lengths, start=call.start)

    with ExitStack() as stack:
        if around == "saved_tensors":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t))
        if around in ("checkpoint", "reentrant"):
            answer = torch.utils.checkpoint.checkpoint(run, given.x, use_reentrant=around == "reentrant")
        elif around == "functional":
            answer = torch.func.functional_call(
                layer, dict(layer.named_parameters()), (given.x, given.state), {"lengths": given.lengths, "start": call.start}
            )
        else:
            answer = run(given.x)
        results = named(answer)
        if around == "reentrant":  # supports backward() only
            return results
        chosen = {
            "all": list(results.values()),
            "output": [results["output"]],
            "final": [v for k, v in results.items() if k != "output"],
        }
        return results | gradients(layer, given, chosen[call.wanted])


def gradients(layer: Any, given: Arguments, outputs: list[Tensor]) -> Results:
    """The gradients of a random combination of outputs, for everything that requires one."""
    generator = torch.Generator().manual_seed(7)
    total = sum((out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum() for out in outputs)
    inputs = {"x": given.x, **{f"state {i}": part for i, part in enumerate(leaves(given.state))}}
    inputs |= {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not total.requires_grad:
        return {f"gradient of {name}": None for name in inputs}
    results = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return {f"gradient of {name}": value for name, value in zip(inputs, results, strict=True)}


def transformed(layer: Any, call: Call, given: Arguments, around: str) -> Results:
    x = given.x.detach()

    def run(x: Tensor) -> Tensor:
        output, _ = layer(x, given.state, lengths=given.lengths, start=call.start)
        return output

    if around == "vmap":
        return {"output": torch.func.vmap(run, randomness="same")(torch.stack([x, 0.5 * x]))}
    return {"gradient of x": torch.func.grad(lambda x: run(x).sin().sum())(x)}


def in_pieces(layer: Any, call: Call, given: Arguments) -> Results:
    """A stream, or truncated backpropagation: the output of every step, and the final state."""
    x = given.x.detach()
    if call.kind == "stream":
        stream = layer.stream(call.B, given.state, start=call.start)
        axis = 1 if layer.batch_first else 0
        output = torch.stack([stream.push(step) for step in x.unbind(axis)], axis)
        states = stream.states
        parts = [torch.stack(parts) for parts in zip(*states, strict=True)] if layer.stacked_state else leaves(states)
        return {"output": output, **{f"final {i}": part for i, part in enumerate(parts)}}
    chunks = list(truncated(layer, x, 1 + call.T // 3, state=given.state, start=call.start))
    output = torch.cat([chunk.output for chunk in chunks], 1 if layer.batch_first else 0)
    return named((output, chunks[-1].state))


def in_threads(function: Callable[[], Results]) -> Results:
    """The results of one of three threads that run at once; all must be equal."""
    answers: list[Any] = [None] * 3
    barrier = threading.Barrier(3)

    def work(i: int) -> None:
        try:
            barrier.wait()
            answers[i] = function()
        except BaseException as error:
            answers[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return {f"{name} of thread {i}": value for i, answer in enumerate(answers) for name, value in answer.items()}


def in_fork(function: Callable[[], Results]) -> Results:
    """The results in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            with os.fdopen(write, "wb") as file:
                torch.save(function(), file)
            os._exit(0)
        except BaseException:
            os._exit(3)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 3:  # the error, here
        return function()
    if os.waitstatus_to_exitcode(status):
        raise ChildProcessError(f"a forked child ended with status {status}")
    return torch.load(io.BytesIO(data))
