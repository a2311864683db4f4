"""Random cells as users write them have the results of the reference loop, whichever way they run (see `tests.helpers.attack`).

`python -m tests.helpers.attack SEED --shrink` shows a cell that is wrong in its shortest form.
"""

import pytest
import torch

from tests.helpers import attack, user_cells
from tests.helpers.cell_calls import KINDS, SURROUNDINGS, Call, scenario
from tests.helpers.user_cells import UserCell
from unfading.fuse.ir import rules
from unfading.fuse.ir.program import Op
from unfading.fuse.trace import aten

BLOCK = 100  # cells in one test of the long run


@pytest.fixture(autouse=True)
def _nothing_is_stored(monkeypatch):
    """Each cell is compiled once and never again."""
    monkeypatch.setenv("UNFADING_CACHE", "/dev/null/none")


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (20, 40))])
def test_users_cells_agree_with_the_reference(first):
    reports, calls = attack.run_all(range(first, first + 20))
    assert not reports
    assert calls["fused"] > 10  # of about forty; others are refused, or run as "auto"
    assert calls["undecided"] <= 1
    assert calls["at a pole"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 21_000, BLOCK))
def test_twenty_thousand_users_cells_agree_with_the_reference(first):
    reports, calls = attack.run_all(range(first, first + BLOCK))
    assert not reports
    assert calls["fused"] > 0.25 * BLOCK
    assert calls["undecided"] <= 0.06 * BLOCK
    assert calls["at a pole"] <= 0.06 * BLOCK


def test_a_seed_gives_the_same_cell_and_the_same_calls():
    one, other = user_cells.write(5), user_cells.write(5)
    assert one == other
    assert scenario(one) == scenario(other)


def test_cells_are_called_in_every_way():
    cells = [user_cells.write(seed) for seed in range(240)]
    calls = [call for cell in cells for call in scenario(cell).calls]
    assert {call.kind for call in calls} == set(KINDS)
    assert {call.around for call in calls} == {"", *SURROUNDINGS}
    assert sum(call.change.startswith("change") for call in calls) > 120
    assert 40 < sum(not cell.local for cell in cells) < 160


# -- the attacker notices -----------------------------------------------------------------------------------------------------


PLAIN = """\
from typing import NamedTuple

import torch
from torch import Tensor, nn

import unfading


class Inputs(NamedTuple):
    a: Tensor


class State(NamedTuple):
    h: Tensor


class Weights(NamedTuple):
    U: Tensor


class UserCell(unfading.Cell):
    def __init__(self, input_size):
        super().__init__(input_size, 3)
        self.U = nn.Parameter(torch.randn(3, 3))
        self.P = nn.Linear(input_size, 3)

    def project(self, x, start=0):
        return Inputs(self.P(x))

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, 3))

    def step(self, inputs, state, weights):
"""
ONCE = Call(
    "grad", 6, 3, 0, None, state=True, data="normal", change="", around="", chunk_bytes=1 << 21, form="batched", wanted="all"
)


def planted(*lines):
    """A cell with these lines in its step, called once with a gradient."""
    source = PLAIN + "".join(f"        {line}\n" for line in lines)
    cell = UserCell(3, source, changes=0, local=True, noisy=False)
    easy = {"backend": "fused", "dtype": torch.float64, "layers": 1, "bidirectional": False, "checkpoint_every": None}
    return cell, scenario(cell)._replace(**easy, noise=None, optimised=False, calls=(ONCE,))


def test_a_wrong_gradient_is_noticed_and_shown_with_its_source(monkeypatch):
    cell, plan = planted("return State(torch.erf(state.h + inputs.a))")
    assert attack.attack(cell, plan).verdict == "agrees"
    right = rules.RULES[Op.ERF]
    monkeypatch.setitem(rules.RULES, Op.ERF, lambda b, *given: [b.map(Op.MUL, 1.001, part) for part in right(b, *given)])
    monkeypatch.setattr("unfading.fuse.plan._c_kernels", {})
    outcome = attack.attack(cell, plan)
    assert outcome.verdict == "wrong"
    assert "gradient of x: relative error" in outcome.message
    assert "output" not in outcome.message
    text = attack.report(cell, plan, outcome.message)
    assert "torch.erf(state.h + inputs.a)" in text
    assert "seed 3" in text


def test_a_wrong_value_is_noticed_and_cut_to_the_line_that_shows_it(monkeypatch):
    cell, plan = planted(
        "v0 = torch.cos(state.h)", "v1 = torch.tanh(inputs.a)", "v2 = v1 * v1", "return State(torch.sin(v0 + v2))"
    )
    assert attack.attack(cell, plan).verdict == "agrees"
    wrong = aten.RULES[torch.ops.aten.tanh]
    monkeypatch.setitem(aten.RULES, torch.ops.aten.cos, wrong)
    assert attack.attack(cell, plan).outcomes["refused"] == 1  # the program is tested on data
    monkeypatch.setattr("unfading.fuse.make_plan.check_program", lambda *given, **options: None)
    assert attack.attack(cell, plan).verdict == "wrong"
    short, _ = attack.shrink(cell, plan)
    assert "v0 = torch.cos(state.h)" in short.source
    assert "torch.tanh" not in short.source


def test_a_stale_plan_is_noticed(monkeypatch):
    cell, plan = planted("return State(torch.tanh(self.rate * inputs.a + state.h))")
    change = "\n\ndef change_1(cell):\n    cell.rate = 0.5\n"
    cell = cell._replace(source=cell.source.replace("        self.U", "        self.rate = 2.0\n        self.U", 1) + change)
    plan = plan._replace(calls=(ONCE, ONCE._replace(change="change_1")))
    assert attack.attack(cell, plan).verdict == "agrees"
    monkeypatch.setattr("unfading.fuse.contents.Contents.unchanged", lambda self: True)
    assert attack.attack(cell, plan).verdict == "wrong"


def test_rounding_alone_is_not_counted_as_wrong():
    """The comparison is decided by the last bit of exp and log."""
    cell, plan = planted("v0 = 3 + state.h", "return State(torch.where(torch.exp(torch.log(v0)) > v0, inputs.a, -inputs.a))")
    assert attack.attack(cell, plan).verdict in ("agrees", "undecided")


OF_EQUAL_NUMBERS = "return State(0.5 * state.h + (0.9 + 0 * inputs.a).var(1, keepdim=True))"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_numbers_are_rounded_too(dtype):
    """They have no binary places, so the sine of one has no digits; small numbers with few places are exact."""
    with attack.Rounding(0):
        assert torch.equal(torch.full((50,), 0.75, dtype=dtype) * 0.5, torch.full((50,), 0.375, dtype=dtype))
        assert (torch.full((50,), 1e30, dtype=dtype) * 0.3).unique().numel() > 1


def test_rounding_inside_a_sum_is_not_counted_as_wrong(monkeypatch):
    """The variance of equal numbers is 0 up to the rounding of their mean, which torch does otherwise for other shapes."""
    cell, plan = planted(OF_EQUAL_NUMBERS)
    call = ONCE._replace(kind="no_grad", state=False)
    plan = plan._replace(dtype=torch.float32, quantised=False, calls=(call,))
    assert attack.attack(cell, plan).verdict == "undecided"
    monkeypatch.setitem(aten.RULES, torch.ops.aten.sum, aten.RULES[torch.ops.aten.amax])
    monkeypatch.setattr("unfading.fuse.make_plan.check_program", lambda *given, **options: None)
    cell, plan = planted("return State(0.5 * state.h + inputs.a.sum([1], keepdim=True))")
    assert attack.attack(cell, plan).verdict == "wrong"


def test_a_sum_inside_an_operation_is_rounded_too():
    """One entry of a softmax is 1: its gradient g - sum(g y) is 0 if g and the sum are rounded alike, as torch does."""
    y, g = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.03, 0.07, 0.03]])
    assert not torch.ops.aten._softmax_backward_data(g, y, -1, torch.float32).any()
    with attack.Rounding(0):
        noisy = torch.ops.aten._softmax_backward_data(g, y, -1, torch.float32)
    assert 0 < noisy.abs().max() < 1e-6 * g.max()


SATURATED = "torch.softmax(inputs.a, 1).mean(1, keepdim=True)"  # its gradient is 0, up to rounding
BROKEN = {
    "beside rounding": (Op.ERF, f"torch.erf(state.h) + {SATURATED}"),
    "inside a softmax": (Op.EXP, f"0.5 * state.h + torch.softmax(1e-3 * inputs.a, 1) + {SATURATED}"),
    "under rounding": (Op.SIN, "0.5 * state.h + torch.sin(1e5 * inputs.a)"),  # of which float32 has no digits
}


@pytest.mark.parametrize(("op", "line"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.sample(1)
def test_a_wrong_gradient_is_noticed_among_large_numbers_of_float32(op, line, monkeypatch):
    cell, plan = planted(f"return State({line})")
    plan = plan._replace(dtype=torch.float32, quantised=False, calls=(ONCE._replace(data="large"),))
    assert attack.attack(cell, plan).verdict in ("agrees", "undecided")
    right = rules.RULES[op]
    monkeypatch.setitem(rules.RULES, op, lambda b, *given: [b.map(Op.MUL, 1.001, part) for part in right(b, *given)])
    monkeypatch.setattr("unfading.fuse.plan._c_kernels", {})
    outcome = attack.attack(cell, plan)
    assert outcome.verdict == "wrong"
    assert "output" not in outcome.message
    assert ("in float64" in outcome.message) == (op is not Op.ERF)  # where float32 itself shows nothing


@pytest.mark.parametrize(
    "question",
    [
        "state.h.device.type == 'cpu'",
        "state.h.requires_grad",
        "torch.is_grad_enabled()",
        "inputs.a.is_meta",
        "len(state.h) > 3",
    ],
)
@pytest.mark.parametrize("kind", ["grad", "no_grad"])
@pytest.mark.sample(3)
def test_a_branch_that_a_trace_cannot_follow_is_refused(question, kind):
    cell, plan = planted(f"return State(torch.tanh(inputs.a + state.h) if {question} else torch.sin(inputs.a - state.h))")
    outcome = attack.attack(cell, plan._replace(calls=(ONCE._replace(kind=kind),)))
    assert outcome.verdict == "agrees", outcome.message
    assert outcome.outcomes["refused"] == 1
