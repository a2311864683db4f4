"""scan: a step function compiled like the step of a cell; the same numbers as a loop written by hand."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree

import unfading
from unfading.backends.choose import observe_backends
from unfading.layers import scan_function

T, B, H = 6, 3, 4


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def elman(h, a, W):
    h = torch.tanh(a + unfading.linear(h, W))
    return h, h


def nested(carry, x, weights):
    """Carries of any shape in a dict; outputs that are in the carry, twice the same, and of their own."""
    h = torch.tanh(x["a"] + x["gate"].unsqueeze(-1) * unfading.linear(carry["h"], weights["U"]) + weights["b"])
    memory = 0.9 * carry["memory"] + h.unsqueeze(-1) * h.unsqueeze(-2)
    twice = 2 * h
    return {"h": h, "count": carry["count"] + 1, "memory": memory}, (h, [twice, twice], h.sum(-1), memory)


def without_output(h, x):
    return 0.5 * h + x, None


def low_rank(h, a, W):
    h = torch.tanh(a + unfading.linear(h, W))
    return h, (h, a)


def reads_itself(h, x):
    h = torch.tanh(x + h @ reads_itself.U)
    return h, h


reads_itself.U = random(H, H)


def mixes_rows(h, x):
    return h + x.mean(0, keepdim=True), x


STEPS = {
    "a tensor": (elman, lambda: random(B, H), lambda: random(T, B, H), lambda: random(H, H)),
    "nested": (
        nested,
        lambda: {"h": random(B, H), "count": random(B), "memory": random(B, H, H)},
        lambda: {"a": random(T, B, H), "gate": random(T, B)},
        lambda: {"U": random(H, H), "b": random(H)},
    ),
    "no output": (without_output, lambda: random(B, H), lambda: random(T, B, H), lambda: None),
    "low rank": (
        low_rank, lambda: random(B, H), lambda: random(T, B, H), lambda: unfading.LowRank(random(H, 2), random(2, H), 0.5)
    ),
}  # fmt: skip
OUTSIDE_THE_RULES = {
    "a tensor of its own": (reads_itself, lambda: random(B, H), lambda: random(T, B, H), lambda: None),
    "rows that mix": (mixes_rows, lambda: random(B, H), lambda: random(T, B, H), lambda: None),
}


def by_hand(step, carry, xs, weights, *, reverse=False, lengths=None):
    """Each row alone, in a Python loop."""
    rows = []
    for b in range(B):
        own, ys = _pytree.tree_map(lambda part, b=b: part[b : b + 1], carry), []
        steps = range(T if lengths is None else int(lengths[b]))
        for t in reversed(steps) if reverse else steps:
            x = _pytree.tree_map(lambda each, t=t, b=b: each[t, b : b + 1], xs)
            own, y = step(own, x, *([] if weights is None else [weights]))
            ys.insert(0 if reverse else len(ys), y)
        ys += [_pytree.tree_map_only(torch.Tensor, lambda each: each * 0, ys[0])] * (T - len(ys))
        rows.append((own, None if y is None else _pytree.tree_map(lambda *each: torch.stack(each), *ys)))
    carries, outputs = zip(*rows, strict=True)
    joined = None if outputs[0] is None else _pytree.tree_map(lambda *each: torch.cat(each, 1), *outputs)
    return _pytree.tree_map(lambda *each: torch.cat(each), *carries), joined


def tensors(tree):
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def gradients(results, arguments):
    loss = sum((part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).reshape(part.shape)).sum() for part in results)
    return torch.autograd.grad(loss, arguments, allow_unused=True)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"reverse": True}, {"lengths": [6, 2, 4]}, {"reverse": True, "lengths": [1, 6, 3]}], ids=str
)
@pytest.mark.parametrize("what", STEPS)
@pytest.mark.sample(10)
def test_a_step_function_gives_what_a_loop_gives(what, options, backend):
    step, *makers = STEPS[what]
    init, xs, weights = (make() for make in makers)
    options = {name: torch.tensor(value) if name == "lengths" else value for name, value in options.items()}
    arguments = [each.requires_grad_() for each in tensors((init, xs, weights))]
    with observe_backends() as ran:
        got = unfading.scan(step, init, xs, weights=weights, backend=backend, **options)
    assert {each["backend"] for each in ran.values()} == {backend}
    want = by_hand(step, init, xs, weights, **options)
    assert _pytree.tree_structure(got) == _pytree.tree_structure(want)
    assert_close(got, want, rtol=1e-11, atol=1e-11)
    pairs = zip(gradients(tensors(got), arguments), gradients(tensors(want), arguments), strict=True)
    for mine, expected in pairs:
        assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("what", OUTSIDE_THE_RULES)
def test_a_step_outside_the_rules_runs_as_a_plain_loop(what):
    step, *makers = OUTSIDE_THE_RULES[what]
    init, xs, _ = (make() for make in makers)
    with observe_backends() as ran:
        _, ys = unfading.scan(step, init, xs)
    assert ran["StepCell"]["backend"] == "reference"
    carry, outputs = init, []
    for x in xs:
        carry, y = step(carry, x)
        outputs.append(y)
    assert_close(ys, torch.stack(outputs))
    with pytest.raises(RuntimeError, match="cannot run fused"):
        unfading.scan(step, init, xs, backend="fused")


def test_a_function_is_traced_once_for_each_shape(monkeypatch):
    made = []
    original = scan_function.StepCell.__init__
    monkeypatch.setattr(scan_function.StepCell, "__init__", lambda self, *given: (made.append(1), original(self, *given))[1])

    def step(h, a, W):
        return elman(h, a, W)

    for rows, steps, units in ((3, 6, 4), (5, 2, 4), (3, 6, 4), (3, 6, 5), (5, 2, 5)):
        unfading.scan(step, torch.zeros(rows, units), torch.zeros(steps, rows, units), weights=torch.zeros(units, units))
    assert len(made) == 2


def test_the_weights_are_those_of_the_call():
    init, xs = random(B, H), random(T, B, H)
    for _ in range(2):
        W = random(H, H)
        assert_close(unfading.scan(elman, init, xs, weights=W), by_hand(elman, init, xs, W))


def test_a_method_may_be_the_step():
    class Module(nn.Module):
        def step(self, h, a, W):
            return elman(h, a, W)

    init, xs, W = random(B, H), random(T, B, H), random(H, H)
    assert_close(unfading.scan(Module().step, init, xs, weights=W), by_hand(elman, init, xs, W))


def test_transforms_compilation_and_export():
    init, xs, W = random(B, H), random(T, B, H), random(H, H)
    want = unfading.scan(elman, init, xs, weights=W)
    together = torch.func.vmap(lambda W: unfading.scan(elman, init, xs, weights=W)[1])(torch.stack([W, 2 * W]))
    assert_close(together, torch.stack([want[1], unfading.scan(elman, init, xs, weights=2 * W)[1]]))
    first = lambda h, a, W: elman(h, a, W)  # noqa: E731
    assert_close(torch.func.vmap(lambda W: unfading.scan(first, init, xs, weights=W)[1])(W.unsqueeze(0))[0], want[1])
    compiled = torch.compile(lambda W: unfading.scan(elman, init, xs, weights=W), backend="eager")
    assert_close(compiled(W), want)
    assert torch.autograd.gradgradcheck(
        lambda W: unfading.scan(elman, init[:1], xs[:2, :1], weights=W)[1], W.clone().requires_grad_()
    )

    class Module(nn.Module):
        def forward(self, xs, W):
            return unfading.scan(elman, init, xs, weights=W)

    assert_close(torch.export.export(Module(), (xs, W)).module()(xs, W), want)


ok, z, x = without_output, torch.zeros(B, H), torch.zeros(T, B, H)
WRONG = {
    "a cell": ((unfading.STARCell(H, H), z, x), TypeError, "got STARCell. To run a cell, use unfading.Recurrent"),
    "no pair": ((lambda h, x: h, z, x), TypeError, "step must return a pair, the next carry and the output.*got Tensor"),
    "another shape": ((lambda h, x: (h[:, 1:], x), z, x), ValueError, r"a carry like init, .*\[3, 4\]; got .*\[3, 3\]"),
    "another nesting": ((lambda h, x: ([h], x), z, x), ValueError, "nested otherwise"),
    "another dtype": ((ok, z, x.double()), TypeError, r"got torch.float64 on cpu in xs. Convert it with .to\(torch.float32\)"),
    "tokens": ((ok, z, x.long()), TypeError, "tensors of one floating-point type"),
    "another batch": ((ok, z, x[:, 1:]), ValueError, r"the same number of rows B: .*got 3 in .*, and shape \[6, 2, 4\] in xs"),
    "unequal carries": ((ok, (z, z[1:]), x), ValueError, r"the same number of rows B: .*; got 3 .* and shape \[2, 4\] in init"),
    "unequal steps": ((ok, z, (x, x[1:])), ValueError, "must have the same number of steps, their first axis; got 6 and 5"),
    "no steps": ((ok, z, x[:0]), ValueError, r"\[T, B, ...\] with at least one step and one row; got shape \[0, 3, 4\]"),
    "no rows": ((ok, z[:0], x[:, :0]), ValueError, r"\[B, ...\] with at least one row; got shape \[0, 4\]"),
    "no axes": ((ok, z, x[0, 0, 0]), ValueError, r"xs of scan must have tensors \[T, B, ...\].*; got shape \[\]"),
    "no carry": ((ok, (), x), ValueError, "init of scan must have at least one tensor"),
    "numbers": ((ok, z, [1.0]), TypeError, "xs must be a tensor, or nested tuples, lists or dicts of tensors; got float in it"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_one_sentence(what):
    arguments, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        unfading.scan(*arguments)


def test_a_refusal_names_the_users_step_and_cell_and_not_the_wrapper():
    def unsupported_step(carry, x):
        return carry + torch.erfinv(torch.tanh(x)), carry

    class UnsupportedCell(unfading.STARCell):
        def step(self, inputs, state, weights):
            new = super().step(inputs, state, weights)
            return type(new)(torch.erfinv(torch.tanh(new.h)))

    with unfading.use_backend("fused"):
        with pytest.raises(RuntimeError, match=r"^the step unsupported_step cannot run fused"):
            unfading.scan(unsupported_step, torch.zeros(2, 3), torch.zeros(4, 2, 3))
        stack = unfading.Recurrent(lambda size: UnsupportedCell(size, 3), 2)
        for options in ({}, {"resets": torch.zeros(4, 2, dtype=torch.bool)}):
            with pytest.raises(RuntimeError, match=r"^UnsupportedCell cannot run fused"):
                stack(torch.zeros(4, 2, 2), **options)
