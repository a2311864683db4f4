"""Equal cells share their plans and what is known about their projection; cells that a trace could tell apart do not."""

import gc
import weakref

import pytest
import torch

import unfading
from tests.helpers.variants import hidden_size, name
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.fuse import locality as locality_module
from unfading.fuse import make_plan
from unfading.fuse.locality import locality
from unfading.fuse.plan import interpreted, plan
from unfading.fuse.refusal import Refusal

CELLS = [*catalogue.cells(), *catalogue.convolutional_cells()]


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch):
    """In place of the one of this folder: here nothing is known at first."""
    for module in (make_plan, locality_module):
        monkeypatch.setattr(module, "_known", type(module._known)())


@pytest.fixture
def work(monkeypatch):
    """What is done, as a list of names: plans made and projections tested."""
    done = []
    for module, function in ((make_plan, "_plan_or_refusal"), (locality_module, "_tested")):
        whole = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, f=whole, n=function: (done.append(n), f(*a))[1])
    return done


@pytest.mark.parametrize("cell", CELLS, ids=name)
@pytest.mark.sample(10)
def test_the_second_of_two_equal_cells_needs_no_work(cell, work):
    first, second = (cell(3, hidden_size(cell)) for _ in "12")
    known = plan(first), locality(first, 10)
    assert not isinstance(known[0], Refusal)
    assert sorted(work) == ["_plan_or_refusal", "_tested"]
    assert (plan(second), locality(second, 10)) == known
    assert len(work) == 2


def changed(change):
    cell = unfading.LSTMCell(3, 5)
    change(cell)
    return cell


def share_one_parameter(cell):
    cell.W_h = torch.nn.Parameter(torch.randn(20, 5))
    cell.other = cell.W_h


OTHERS = {
    "size": lambda: unfading.LSTMCell(3, 6),
    "features": lambda: unfading.LSTMCell(4, 5),
    "bias": lambda: unfading.LSTMCell(3, 5, bias=False),
    "option": lambda: unfading.LSTMCell(3, 5, normalise=True),
    "class": lambda: unfading.PeepholeLSTMCell(3, 5),
    "subclass": lambda: type("Own", (unfading.LSTMCell,), {})(3, 5),
    "dtype": lambda: unfading.LSTMCell(3, 5).double(),
    "evaluation": lambda: unfading.LSTMCell(3, 5).eval(),
    "frozen": lambda: unfading.LSTMCell(3, 5).requires_grad_(False),
    "shared": lambda: changed(share_one_parameter),
    "attribute": lambda: changed(lambda cell: setattr(cell, "mine", 3)),
    "method": lambda: changed(lambda cell: setattr(cell, "step", lambda *arguments: type(cell).step(cell, *arguments))),
    "object": lambda: changed(lambda cell: setattr(cell, "mine", QuietCell)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_cell_that_differs_is_planned_by_itself(other, work):
    plan(unfading.LSTMCell(3, 5))
    plan(OTHERS[other]())
    assert work == ["_plan_or_refusal"] * 2


def test_a_class_that_changes_is_planned_again(work, monkeypatch):
    plan(unfading.STARCell(3, 5))
    whole = unfading.STARCell.step
    monkeypatch.setattr(unfading.STARCell, "step", lambda *arguments: whole(*arguments))
    plan(unfading.STARCell(3, 5))
    assert len(work) == 2


def test_each_kind_of_kernel_has_its_own_plan(work):
    assert plan(unfading.STARCell(1, 5)).target == "c"
    with interpreted():
        assert plan(unfading.STARCell(1, 5)).target == "triton"
    assert len(work) == 2


def test_cells_of_users_share_nothing(work):
    for _ in range(2):
        plan(QuietCell(3, 5))
    assert work == ["_plan_or_refusal"] * 2


def test_an_object_of_the_user_is_freed_with_its_cell():
    class Mine:
        pass

    cell = unfading.STARCell(3, 5)
    cell.mine = Mine()
    alive = weakref.ref(cell.mine)
    plan(cell)
    del cell
    gc.collect()
    assert alive() is None


def test_longer_sequences_and_the_other_direction_are_tested_by_themselves(work):
    locality(unfading.STARCell(3, 5), 10)
    locality(unfading.STARCell(3, 5), 64)
    assert len(work) == 1
    locality(unfading.STARCell(3, 5), 65)
    locality(unfading.STARCell(3, 5), 10, reverse=True)
    assert len(work) == 3
