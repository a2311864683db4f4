"""A cell that computes with sizes or with the index of a step runs as by the reference: compiled code knows neither."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import unfading
from tests.helpers.variants import hidden_size, name
from tests.user.along_time import Along, SharedInputs, SharedOverSteps, State
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.fuse import make_plan
from unfading.fuse.plan import interpreted, plan
from unfading.fuse.refusal import Refusal

I = 3


class UntrainedWeights(NamedTuple):
    U: Tensor
    b: Tensor


# The arguments: a = W x, x [T, B, I], the index of the first step.
IN_PROJECT = {
    "one over T": lambda a, x, start: a / len(x),
    "sqrt T": lambda a, x, start: a / math.sqrt(len(x)),
    "log T": lambda a, x, start: a * math.log(len(x) + 1),
    "T plus one": lambda a, x, start: a / (len(x) + 1),
    "T over 100": lambda a, x, start: a * (len(x) / 100),
    "sqrt B": lambda a, x, start: a / math.sqrt(x.shape[1]),
    "numel": lambda a, x, start: a / x.numel() * 10,
    "one step": lambda a, x, start: 2 * a if len(x) == 1 else a,
    "one row": lambda a, x, start: 2 * a if x.shape[1] == 1 else a,
    "long sequences": lambda a, x, start: 2 * a if len(x) > 100 else a,
    "large batches": lambda a, x, start: 2 * a if x.shape[1] >= 40 else a,
    "an even T": lambda a, x, start: 2 * a if len(x) % 2 == 0 else a,
    "start": lambda a, x, start: a / (start + 1),
    "start modulo 4": lambda a, x, start: 2 * a if start % 4 == 2 else a,
    "no start": lambda a, x, start: 2 * a if start == 0 else a,
    "one start": lambda a, x, start: 2 * a if start == 60 else a,
    "a late start": lambda a, x, start: 2 * a if start > 50 else a,
    "one start where x is large": lambda a, x, start: (torch.sigmoid(a) + (start == 60) > 0) * a,
    "a sum over B": lambda a, x, start: a + 0.1 * a.sum(1, keepdim=True),
    "the first step": lambda a, x, start: a + a.flatten(0, 1)[: x.shape[1]],
}
IN_STEP = {
    "one over B": lambda h, B: h / B,
    "sqrt B": lambda h, B: h / math.sqrt(B),
    "B plus one": lambda h, B: h * ((B + 1) / 100),
    "one row": lambda h, B: 2 * h if B == 1 else h,
    "large batches": lambda h, B: 2 * h if B >= 40 else h,
    "an even B": lambda h, B: 2 * h if B % 2 == 0 else h,
    "more than three rows": lambda h, B: 2 * h if B > 3 else h,
}
SIZES = [(6, 4, 2), (1, 1, 0), (7, 1, 3), (1, 5, 60), (110, 2, 0), (3, 41, 1)]  # T, B, start


class SizedProject(Along):
    def __init__(self, input_size, form):
        super().__init__(input_size)
        self.form = form

    def mixed(self, a, x, start):
        return self.form(a, x, start)


class SizedStep(Along):
    def __init__(self, input_size, form):
        super().__init__(input_size)
        self.form = form

    def step(self, inputs, state, weights):
        h = self.form(state.h, len(state.h))
        return State(torch.tanh(inputs.a + unfading.linear(h, weights.U)))


def everything(layer, x, start):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output, state = layer(x, start=start)
    (output.square().sum() + state.h.sin().sum()).backward()
    with torch.no_grad():
        again, _ = layer(x, start=start)
    return [output, again, *state, x.grad, *(p.grad for p in layer.parameters())]


def agrees_with_the_reference(kind, form):
    torch.manual_seed(0)
    layer = unfading.Recurrent(lambda size: kind(size, form), I, dtype=torch.float64)
    for T, B, start in SIZES:
        x = torch.randn(T, B, I, dtype=torch.float64)
        with unfading.use_backend("reference"):
            want = everything(layer, x, start)
        for a, b in zip(everything(layer, x, start), want, strict=True):
            assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", IN_PROJECT.values(), ids=IN_PROJECT.keys())
@pytest.mark.sample(8)
def test_sizes_and_starts_in_project_are_those_of_the_call(form):
    agrees_with_the_reference(SizedProject, form)
    cell_plan = plan(SizedProject(I, form))
    assert not isinstance(cell_plan, Refusal)  # the step is compiled, the projection runs before the loop
    assert not cell_plan.with_project


@pytest.mark.parametrize("form", IN_STEP.values(), ids=IN_STEP.keys())
@pytest.mark.sample(2)
def test_the_batch_size_in_a_step_is_that_of_the_call(form):
    agrees_with_the_reference(SizedStep, form)
    refusal = plan(SizedStep(I, form))
    assert isinstance(refusal, Refusal)
    assert "test_row_law.py" in str(refusal)
    assert "def step(self, inputs, state, weights):" in str(refusal)


@pytest.mark.parametrize("form", IN_PROJECT.values(), ids=IN_PROJECT.keys())
@pytest.mark.sample(8)
def test_no_such_projection_is_taken_as_affine(form):
    with interpreted():
        cell_plan = plan(SizedProject(1, form))
        assert not isinstance(cell_plan, Refusal)
        assert not cell_plan.with_project
        assert plan(SizedProject(1, lambda a, x, start: 2 * a)).with_project


class SharedOfX(SharedOverSteps):
    """A shared field that depends on x, in a way that has no gradient."""

    def project(self, x, start=0):
        return SharedInputs(self.W(x), (x.mean((1, 2), keepdim=True) > 0).to(x.dtype) + 1)


def test_a_shared_field_of_x_is_computed_from_all_rows():
    torch.manual_seed(0)
    layer, x = unfading.Recurrent(SharedOfX, I, dtype=torch.float64), torch.randn(40, 5, I, dtype=torch.float64)
    with unfading.use_backend("reference"):
        want = everything(layer, x, 0)
    for a, b in zip(everything(layer, x, 0), want, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert not plan(layer.cells[0]).with_project


@pytest.mark.parametrize("cell", [*catalogue.cells(), QuietCell], ids=name)
@pytest.mark.sample(10)
def test_the_rows_of_every_cell_of_the_library_are_apart(cell):
    assert not isinstance(plan(cell(I, hidden_size(cell))), Refusal)


@pytest.mark.parametrize("form", ["one step", "start modulo 4"])
def test_only_the_check_of_rows_finds_some(form, monkeypatch):
    monkeypatch.setattr(make_plan, "check_rows_of_project", lambda *arguments: None)
    with pytest.raises(AssertionError):
        agrees_with_the_reference(SizedProject, IN_PROJECT[form])


def on_the_cpu(v, a, b):
    return a(v) if v.device.type == "cpu" else b(v)


# Branches that a trace, on tensors without data that require gradients and lie in order, takes otherwise than a call may.
BRANCHES = {
    "a little": lambda h, W: on_the_cpu(h, lambda v: v, lambda v: 1.0002 * v),
    "the gradient": lambda h, W: h - on_the_cpu(h, torch.tanh, torch.sin).detach() + on_the_cpu(h, torch.tanh, torch.sin),
    "the gradient of a weight": lambda h, W: h + on_the_cpu(W, lambda v: v, lambda v: v.detach())[0],
    "requires_grad": lambda h, W: torch.tanh(h) if h.requires_grad else h,
    "the layout": lambda h, W: torch.tanh(h) if h.is_contiguous() else h,
}


class LargeStep(SizedStep):
    """A branch on the size of a tensor of one row alone, of which nothing is left where h is large."""

    def step(self, inputs, state, weights):
        h = state.h.tanh() if state.h.numel() > 8 else state.h
        return State(torch.tanh(unfading.linear(h, weights.U) - 5 * state.h.square().sum(1, keepdim=True)))


def test_a_branch_that_only_small_numbers_show_is_refused():
    torch.manual_seed(0)
    assert isinstance(plan(LargeStep(I, None)), Refusal)


# In small batches alone: v is an input or a state.
ONLY_UNUSUAL = {
    "large numbers": lambda v: v.clamp(-50, 50),
    "very large numbers": lambda v: v.clamp(-5e3, 5e3),
    "zeros": lambda v: torch.where(v == 0, 0.5, v),
    "rows of zeros": lambda v: v + (v == 0).all(-1, keepdim=True),
    "large rows": lambda v: v / (v.norm(dim=-1, keepdim=True) / 60).clamp(min=1),
}


class UnusualStep(SizedStep):
    def step(self, inputs, state, weights):
        a, h = (self.form(v) if len(v) < 3 else v for v in (inputs.a, state.h))
        return State(0.5 * h + 0.1 * a + torch.tanh(unfading.linear(h, weights.U)))


class UnusualInputs(SizedStep):
    def step(self, inputs, state, weights):
        a = self.form(inputs.a) if len(inputs.a) < 3 else inputs.a
        return State(0.5 * a + torch.tanh(unfading.linear(state.h, weights.U)))


class UnusualProject(SizedProject):
    def mixed(self, a, x, start):
        return self.form(a) if x.shape[1] == 1 and len(x) < 3 else a


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ONLY_UNUSUAL.values(), ids=ONLY_UNUSUAL.keys())
@pytest.mark.parametrize("kind", [UnusualStep, UnusualInputs], ids=name)
@pytest.mark.sample(8)
def test_a_branch_that_only_unusual_numbers_show_is_refused(kind, form, dtype):
    torch.manual_seed(0)
    assert isinstance(plan(kind(I, form).to(dtype)), Refusal)
    assert not isinstance(plan(kind(I, lambda v: v).to(dtype)), Refusal)


@pytest.mark.parametrize("form", [form for key, form in ONLY_UNUSUAL.items() if "zeros" not in key])
def test_such_a_projection_is_not_compiled_into_the_loop(form):
    torch.manual_seed(0)
    assert not plan(UnusualProject(I, form)).with_project
    assert plan(UnusualProject(I, lambda v: v)).with_project


# Of large numbers these have no digits, or other ones in another shape; all are computed row by row.
SENSITIVE = {
    "sine": lambda v: torch.sin(1e3 * v),
    "exponential": lambda v: torch.exp(v) / (1 + torch.exp(v)),
    "comparison": lambda v: torch.where(torch.sin(v) > 0, v, -v),
    "softmax": lambda v: torch.softmax(1e3 * v, -1),
    "norm": lambda v: torch.nn.functional.layer_norm(v, v.shape[-1:]),
    "cancellation": lambda v: (v + 1e6) - 1e6,
}


class SensitiveStep(SizedStep):
    def step(self, inputs, state, weights):
        return State(self.form(inputs.a + unfading.linear(state.h, weights.U)) + self.form(state.h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", SENSITIVE.values(), ids=SENSITIVE.keys())
@pytest.mark.sample(4)
def test_rounding_of_unusual_numbers_refuses_no_cell(form, dtype):
    for seed in range(2):
        torch.manual_seed(seed)
        assert not isinstance(plan(SensitiveStep(I, form).to(dtype)), Refusal)
        assert plan(SizedProject(I, lambda a, x, start: form(a)).to(dtype)).with_project


def test_noise_hides_no_branch():
    """Zoneout that keeps the whole state, or dropout that drops it, would hide the step."""
    for wrapper in (unfading.ZoneoutCell, unfading.RecurrentDropoutCell):
        assert isinstance(plan(wrapper(SizedStep(I, IN_STEP["one row"]), 0.3)), Refusal)


class RareInputs(Along):
    """Inputs that are zero for most x and many rows, in a step that takes another branch where they need no gradient."""

    def mixed(self, a, x, start):
        return (a.abs() > 30 * x.shape[1]) * a

    def step(self, inputs, state, weights):
        a = torch.tanh(inputs.a) if inputs.a.requires_grad else inputs.a * inputs.a
        return State(torch.tanh(a + unfading.linear(state.h, weights.U)))


class SparseInputs(Along):
    """Inputs that are zero for most x, in a projection that can be compiled into the loop."""

    def mixed(self, a, x, start):
        return (a.abs() > 30) * a


class SparseInputsInBranch(SparseInputs):
    step = RareInputs.step


@pytest.mark.parametrize("kind", [RareInputs, SparseInputsInBranch], ids=name)
def test_a_branch_that_rare_inputs_show_is_refused(kind):
    torch.manual_seed(0)
    assert isinstance(plan(kind(I)), Refusal)


def test_a_projection_with_rare_inputs_is_compiled_into_the_loop():
    assert plan(SparseInputs(I)).with_project


class LateInputs(Along):
    """Inputs that are zero in the first steps, in a step that takes another branch in small batches."""

    def mixed(self, a, x, start):
        return torch.cat([torch.zeros_like(a[:5]), a])[: len(x)]

    def step(self, inputs, state, weights):
        a = torch.tanh(inputs.a) if len(state.h) > 3 else inputs.a * inputs.a
        return State(torch.tanh(a + unfading.linear(state.h, weights.U)))


class MostlyNaN(Along):
    """A step that is NaN unless all of a row is positive, and takes another branch in small batches."""

    def step(self, inputs, state, weights):
        h = 0.5 * state.h if len(state.h) > 3 else state.h
        return State(h + 0.1 * unfading.linear(inputs.a**2.5, weights.U))


@pytest.mark.parametrize("kind", [LateInputs, MostlyNaN], ids=name)
def test_a_branch_that_few_rows_show_is_refused(kind):
    torch.manual_seed(0)
    assert isinstance(plan(kind(I)), Refusal)


class BranchedStep(SizedStep):
    def project(self, x, start=0):
        return super().project(x + x.shape[1], start)  # with many rows, tanh is flat

    def step(self, inputs, state, weights):
        h = self.form(state.h, weights.U)
        return State(torch.tanh(inputs.a + unfading.linear(h, weights.U)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", BRANCHES.values(), ids=BRANCHES.keys())
@pytest.mark.sample(3)
def test_a_branch_that_a_trace_takes_otherwise_is_refused(form, dtype):
    torch.manual_seed(0)
    refusal = plan(BranchedStep(I, form).to(dtype))
    assert isinstance(refusal, Refusal)
    assert "def step(self, inputs, state, weights):" in str(refusal)


def test_a_step_whose_branch_changes_nothing_is_compiled():
    cell = BranchedStep(I, lambda h, W: on_the_cpu(h, torch.tanh, lambda v: torch.tanh(1.0 * v)))
    assert not isinstance(plan(cell), Refusal)


class Untrained(Along):
    """A branch in small batches on a weight that hides it until training changes it."""

    def __init__(self, input_size, start, form):
        super().__init__(input_size)
        self.b = torch.nn.Parameter(torch.full_like(self.U, start))
        self.form = form

    def weights(self):
        return UntrainedWeights(self.U, self.b)

    def step(self, inputs, state, weights):
        h = self.form(state.h, weights.b) if len(state.h) < 3 else state.h
        return State(torch.tanh(inputs.a + unfading.linear(h, weights.U)))


class UntrainedProject(Untrained):
    def mixed(self, a, x, start):
        return self.form(a, self.b) if x.shape[1] < 3 else a

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.a + unfading.linear(state.h, weights.U)))


HIDING = {"zero is added": (0.0, lambda v, b: v + b[0]), "one is a factor": (1.0, lambda v, b: v * b[0])}
HIDING |= {
    "zero is a factor": (0.0, lambda v, b: v + b[0] * v.sin()),
    "zero matrix": (0.0, lambda v, b: v + unfading.linear(v, b)),
}


@pytest.mark.parametrize(("start", "form"), HIDING.values(), ids=HIDING.keys())
@pytest.mark.sample(2)
def test_a_weight_that_training_will_change_hides_no_branch(start, form):
    for kind in (Untrained, UntrainedProject):
        torch.manual_seed(0)
        layer = unfading.Recurrent(lambda size, kind=kind: kind(size, start, form), I, dtype=torch.float64)
        x = torch.randn(6, 1, I, dtype=torch.float64)
        layer(x)
        with torch.no_grad():
            layer.cells[0].b.add_(0.5)
        with unfading.use_backend("reference"):
            want = everything(layer, x, 0)
        for a, b in zip(everything(layer, x, 0), want, strict=True):
            assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert isinstance(plan(Untrained(I, start, form)), Refusal)
    assert not plan(UntrainedProject(I, start, form)).with_project
    assert not isinstance(plan(Untrained(I, start, lambda h, b: h)), Refusal)


def test_equal_weights_hide_no_branch():
    class Twins(Untrained):
        def __init__(self, input_size):
            super().__init__(input_size, 0.0, None)
            self.b = torch.nn.Parameter(self.U.detach().clone())

        def step(self, inputs, state, weights):
            return State(torch.tanh(inputs.a + unfading.linear(state.h, weights.U if len(state.h) > 1 else weights.b)))

    assert isinstance(plan(Twins(I)), Refusal)


class Guarded(Along):
    """A cell that takes its own numbers only: by an error, or by NaN for others."""

    def __init__(self, input_size, strict):
        super().__init__(input_size)
        self.one = torch.nn.Parameter(torch.ones(len(self.U)))
        self.strict = strict

    def weights(self):
        if self.strict and (self.one > 1).any():
            raise ValueError("one must be at most 1")
        return UntrainedWeights(self.U, torch.sqrt(1 - self.one))

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.a + unfading.linear(state.h, weights.U) + weights.b))


@pytest.mark.parametrize("strict", [True, False], ids=["error", "NaN"])
def test_a_cell_that_takes_only_its_own_numbers_is_compiled(strict):
    assert not isinstance(plan(Guarded(I, strict)), Refusal)


def test_a_cell_with_a_weight_without_entries_is_compiled():
    assert not isinstance(plan(unfading.RecurrentHighwayCell(I, 4, depth=1)), Refusal)  # its upper layers have none
