"""A plan is used as long as everything that its step reads is as it was, and no longer."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.user import impure
from unfading.fuse.fused import refusal
from unfading.fuse.plan import plan


def layer_of(make, **options):
    torch.manual_seed(0)
    return unfading.Recurrent(make, 3, dtype=torch.float64, **options)


def results(layer, x, backend):
    """The output with and without a gradient, and all gradients."""
    x = x.clone().requires_grad_()
    with unfading.use_backend(backend):
        output, _ = layer(x)
        wanted = [x, *layer.parameters()]
        gradients = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        with torch.no_grad():
            return [output.detach(), layer(x)[0], *gradients]


def held(function):
    return function.__closure__[0].cell_contents


def replaced(cell):
    cell.o = 0.9


CHANGES = {
    "attribute": (lambda n: impure.Attribute(n, o=0.5), replaced),
    "object": (lambda n: impure.OfObject(n, o=SimpleNamespace(alpha=0.5)), lambda c: setattr(c.o, "alpha", 0.9)),
    "slots": (lambda n: impure.OfSlots(n, o=impure.Slots(0.5)), lambda c: setattr(c.o, "alpha", 0.9)),
    "containers": (lambda n: impure.OfContainer(n, o={"a": [{"b": 0.5}]}), lambda c: c.o["a"][0].update(b=0.9)),
    "array": (lambda n: impure.OfArray(n, o=np.array([0.5])), lambda c: c.o.fill(0.9)),
    "callable": (lambda n: impure.OfCall(n, o=impure.Callable()), lambda c: setattr(c.o, "slope", 0.9)),
    "class of callable": (lambda n: impure.OfCall(n, o=impure.Callable()), lambda c: setattr(impure.Callable, "slope", 0.9)),
    "closure": (lambda n: impure.OfCall(n, o=impure.closure({"alpha": 0.5})), lambda c: held(c.o).update(alpha=0.9)),
    "class": (impure.OfClass, lambda c: setattr(impure.OfClass, "alpha", 0.9)),
    "method": (impure.OfMethod, lambda c: setattr(impure.OfMethod, "factor", lambda self: 0.9)),
    "method of the object": (impure.OfMethod, lambda c: setattr(c, "factor", lambda: 0.9)),
    "global": (impure.OfGlobal, lambda c: setattr(impure, "FACTOR", 0.9)),
    "global container": (impure.OfGlobalContainer, lambda c: impure.TABLE["factor"].__setitem__(0, 0.9)),
    "forward hook": (impure.Plain, lambda c: c.W.register_forward_hook(lambda module, inputs, output: 2 * output)),
    "backward hook": (impure.Plain, lambda c: c.W.register_full_backward_hook(lambda module, d, _: (3 * d[0],))),
    "output": (impure.Plain, lambda c: setattr(c, "output", lambda state: 2 * state[0])),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Put classes and globals back after a test."""
    for owner, name in [(impure.OfClass, "alpha"), (impure.OfMethod, "factor"), (impure.Callable, "slope"), (impure, "FACTOR")]:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setitem(impure.TABLE, "factor", [0.5])


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(4)
def test_a_plan_does_not_outlive_what_its_step_reads(name):
    make, change = CHANGES[name]
    layer, x = layer_of(make), torch.randn(5, 2, 3, dtype=torch.float64)
    before = results(layer, x, "fused")
    change(layer.cells[0])
    after = results(layer, x, "auto")
    assert_close(after, results(layer, x, "reference"))
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_buffer_that_is_read_as_a_number_is_refused():
    layer, x = layer_of(impure.OfBuffer), torch.randn(5, 2, 3, dtype=torch.float64)
    layer(x)
    assert refusal(layer.cells[0]) is not None
    layer.cells[0].o.fill_(0.9)
    assert_close(results(layer, x, "auto"), results(layer, x, "reference"))


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: None,
        lambda cell: setattr(cell, "o", {"a": [{"b": 0.5}]}),
        lambda cell: cell.o["a"][0].update(b=0.25 * 2),
        lambda cell: setattr(cell, "extra", (torch.ones(3, dtype=torch.float64),)),
        lambda cell: [p.detach().mul_(2) for p in cell.parameters()],
        lambda cell: setattr(cell.W, "weight", torch.nn.Parameter(torch.ones(5, 3, dtype=torch.float64))),
    ],
)
def test_a_plan_is_not_made_again_for_equal_values(change):
    layer = layer_of(lambda n: impure.OfContainer(n, o={"a": [{"b": 0.5}]}, extra=(torch.ones(3),)))
    cell, x = layer.cells[0], torch.randn(5, 2, 3, dtype=torch.float64)
    first = plan(cell)
    change(cell)
    assert plan(cell) is first
    assert_close(results(layer, x, "fused"), results(layer, x, "reference"))


def test_a_parameter_that_is_removed_is_noticed():
    layer = layer_of(lambda n: unfading.STARCell(n, 5))
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    layer(x)
    layer.cells[0].from_input.bias = None
    assert_close(results(layer, x, "fused"), results(layer, x, "reference"))


def test_what_cannot_be_compared_may_be_held_and_not_read():
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    layer = layer_of(impure.HoldsMuch)
    assert_close(results(layer, x, "fused"), results(layer, x, "reference"))
    for cell, kind in ((impure.ReadsArray, "ndarray"), (impure.ReadsList, "list"), (impure.ReadsLock, "lock")):
        layer = layer_of(cell)
        assert_close(results(layer, x, "auto"), results(layer, x, "reference"))
        assert f"the step reads a {kind}, which a compiled loop could not follow" in refusal(layer.cells[0])


def test_a_cell_is_freed_with_its_plans():
    layer = layer_of(impure.Plain)
    layer(torch.randn(5, 2, 3, dtype=torch.float64))
    cell = weakref.ref(layer.cells[0])
    del layer
    gc.collect()
    assert cell() is None
