"""Steps that cannot be compiled are refused with a reason and the user's line; "auto" then takes the reference."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import unfading
from unfading.fuse import make_plan
from unfading.fuse.trace import recorder as trace


class Refused(unfading.ElmanCell):
    """An Elman cell with another step: `new(self, x, h, W)` returns the new state, or something wrong."""

    def __init__(self, input_size, hidden_size, *, bias=True, new=None):
        super().__init__(input_size, hidden_size, bias=bias)
        self.new = new
        self.leak = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mask", torch.linspace(0, 1, hidden_size))

    def step(self, inputs, state, weights):  # refused as a whole, if not for a single line
        return state._replace(h=self.new(self, inputs.a, state.h, weights.W_h))


class Twice(torch.autograd.Function):  # refused: a gradient of its own
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return 2 * d


def in_place(self, x, h, W):
    new = x + F.linear(h, W)
    new.tanh_()  # refused
    return new


def random_numbers(self, x, h, W):
    torch.manual_seed(3)
    return torch.tanh(x + h) + torch.rand_like(h)  # refused


def a_branch_on_the_state(self, x, h, W):
    if h.sum() > 0:  # refused
        return torch.tanh(x + h)
    return torch.tanh(x)


def a_branch_on_a_weight(self, x, h, W):
    return torch.tanh(x + h) if W[0, 0] > 0 else torch.tanh(x)  # refused


def a_number_out_of_a_tensor(self, x, h, W):
    return torch.tanh(x + h * W[0, 0].item())  # refused


def a_matrix_from_self(self, x, h, W):
    return torch.tanh(x + F.linear(h, self.W_h))  # refused


def a_scalar_from_self(self, x, h, W):
    return torch.tanh(x + self.leak * h)  # refused


def a_buffer_from_self(self, x, h, W):
    return torch.tanh(x + self.mask * h)  # refused


def over_the_batch(self, x, h, W):
    return torch.tanh(x + h - h.mean(0))  # refused


def rows_against_rows(self, x, h, W):
    return torch.tanh(x + (h[:, 0] * h[:, :1]).amax(1, keepdim=True))  # refused


def a_loop_over_the_rows(self, x, h, W):
    return torch.stack([row.tanh() for row in x + h])  # refused


def a_matrix_made_in_the_step(self, x, h, W):
    return torch.tanh(x + F.linear(h, 0.5 * W))  # refused


def a_matrix_of_other_rows(self, x, h, W):
    return torch.tanh(x + F.linear(h[:, :4], W.flatten()[:20].reshape(5, 4)))  # refused


def a_matrix_times_columns(self, x, h, W):
    return torch.tanh(x + (W @ h.T).T)  # refused


def the_batch_as_another_axis(self, x, h, W):
    turned = (x + h).unsqueeze(1).transpose(0, 1)
    return torch.tanh(turned).transpose(0, 1).squeeze(1)  # refused


def two_matrices(self, x, h, W):
    return torch.tanh(x + F.linear(h, W @ W))  # refused


def a_matrix_without_its_gradient(self, x, h, W):
    with torch.no_grad():
        rows = W[:]
    return torch.tanh(x + F.linear(h, rows))  # refused


def a_gradient_of_its_own(self, x, h, W):
    return torch.tanh(x + Twice.apply(h))


def another_precision(self, x, h, W):
    return torch.tanh(x.double() + h).float()  # refused


def a_sum_in_another_precision(self, x, h, W):
    return torch.tanh(x + h.sum(1, keepdim=True, dtype=torch.float64).float())  # refused


def an_unknown_word(self, x, h, W):
    return torch.tanh(x + torch.cumsum(h, 1))  # refused


def a_division_that_rounds(self, x, h, W):
    return torch.tanh(x + torch.div(h, 0.3, rounding_mode="floor"))  # refused


def the_size_of_the_batch(self, x, h, W):
    return torch.tanh(x + h / len(h))


def a_hook_on_a_gradient(self, x, h, W):
    new = torch.tanh(x + h)
    if new.requires_grad:
        new.register_hook(lambda d: d.clamp(-1, 1))
    return new


LEGAL = {
    in_place: "writes into a tensor; a step must be pure",
    random_numbers: "draws random numbers; draw them in project, which runs once for the whole sequence",
    a_branch_on_the_state: "aten.sum runs over the batch; rows do not mix",
    a_branch_on_a_weight: "by .item(), float() or a branch on it; a compiled step cannot do that",
    a_number_out_of_a_tensor: "a number is read out of a tensor, by .item()",
    a_matrix_from_self: "reads a tensor [5, 5] that is not among inputs, state and weights; return it from weights()",
    a_scalar_from_self: "reads a tensor [] that is not among inputs, state and weights; return it from weights()",
    a_buffer_from_self: "reads a tensor [5] that is not among inputs, state and weights; return it from weights()",
    over_the_batch: "aten.mean runs over the batch; rows do not mix",
    rows_against_rows: "gives [B, B], which mixes rows of the batch",
    a_loop_over_the_rows: "aten.unbind runs along the batch or time; rows do not mix",
    a_matrix_made_in_the_step: "a matrix that the step itself computes is multiplied with a vector; compute it in weights()",
    a_matrix_of_other_rows: "a matrix that is multiplied with a vector is not made of blocks of a weight [n, m]",
    a_matrix_times_columns: "the batch is not the first axis of a tensor",
    the_batch_as_another_axis: "the batch is not the first axis of a tensor, which only views and batched products may take",
    two_matrices: "two matrices are multiplied inside the step; do it in weights(), once per call",
    a_matrix_without_its_gradient: "a matrix without its gradient is multiplied with a vector; detach it in weights()",
    a_gradient_of_its_own: "the step uses Twice, an autograd.Function with its own gradient",
    another_precision: "turns torch.float32 into torch.float64; a fused step computes in one precision",
    a_sum_in_another_precision: "turns torch.float32 into torch.float64; a fused step computes in one precision",
    an_unknown_word: "aten.cumsum is not supported in a fused step",
    a_division_that_rounds: "aten.div with rounding_mode is not supported",
    the_size_of_the_batch: "the step computes with the batch size or the number of steps, which a compiled step does not know",
    a_hook_on_a_gradient: "the step registers a hook on a gradient, which a compiled step would not call",
}


def layer_of(new, **options):
    torch.manual_seed(0)
    return unfading.layer(Refused)(2, 5, new=new, **options)


def line_of(new):
    """The refused line: file, number and code."""
    elsewhere = {a_gradient_of_its_own: Twice, the_size_of_the_batch: Refused.step, a_hook_on_a_gradient: Refused.step}
    lines, first = inspect.getsourcelines(elsewhere.get(new, new))
    number = next(i for i, line in enumerate(lines) if "# refused" in line)
    return f"({__file__}:{first + number}: {lines[number].strip()})"


def everything(layer):
    """Output, final state and all gradients."""
    x = torch.linspace(-1, 1, 24).reshape(4, 3, 2).requires_grad_()
    output, state = layer(x)
    parameters = [x, *layer.parameters()]
    gradients = torch.autograd.grad(output.square().sum() + state.h.sum(), parameters, materialize_grads=True)
    return [output, state.h, *gradients]


@pytest.mark.parametrize("new", LEGAL, ids=lambda new: new.__name__)
def test_what_cannot_be_compiled_is_refused_with_its_line(new):
    with pytest.raises(RuntimeError, match=re.escape(LEGAL[new])) as caught:
        layer_of(new, backend="fused")(torch.randn(4, 3, 2))
    assert line_of(new) in str(caught.value)
    assert "backend='auto' runs the reference loop" in str(caught.value)


@pytest.mark.parametrize("new", LEGAL, ids=lambda new: new.__name__)
def test_what_is_refused_runs_by_the_reference(new):
    for got, want in zip(everything(layer_of(new)), everything(layer_of(new, backend="reference")), strict=True):
        assert torch.equal(got, want)
        assert got.isfinite().all()


def a_changed_shape(self, x, h, W):
    return torch.tanh(x + h)[:, 1:]


def a_number(self, x, h, W):
    return 0.5


def truths(self, x, h, W):
    return x > h


ILLEGAL = {
    a_changed_shape: "must return its states as tensors torch.float32 [B, 5]; part 0 is torch.float32 [B, 4]",
    a_number: "must return its states as tensors torch.float32 [B, 5]; part 0 is float",
    truths: "must return its states as tensors torch.float32 [B, 5]; part 0 is torch.bool [B, 5]",
}


@pytest.mark.parametrize("new", ILLEGAL, ids=lambda new: new.__name__)
def test_a_state_of_another_kind_is_refused_by_both(new):
    x = torch.randn(4, 3, 2)
    with pytest.raises(RuntimeError, match=re.escape(ILLEGAL[new])) as caught:
        layer_of(new, backend="fused")(x)
    lines, first = inspect.getsourcelines(Refused.step)
    assert f"({__file__}:{first}: {lines[0].strip()})" in str(caught.value)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        layer_of(new)(x)


@pytest.mark.parametrize(
    ("result", "got"), [(lambda state: state.h, "Tensor"), (lambda state: (state.h, state.h), "a tuple of 2")]
)
def test_another_number_of_states_is_refused_by_both(result, got):
    class Returns(unfading.ElmanCell):
        def step(self, inputs, state, weights):  # refused
            return result(state)

    x = torch.randn(4, 3, 2)
    sentence = f"step must return its state, a tuple of 1 tensors; got {got} ({__file__}:"
    with pytest.raises(RuntimeError, match=re.escape(sentence)) as caught:
        unfading.layer(Returns)(2, 5, backend="fused")(x)
    assert "def step(self, inputs, state, weights):  # refused" in str(caught.value)
    with pytest.raises(TypeError, match="must return its state"):
        unfading.layer(Returns)(2, 5)(x)


def test_a_parameter_that_weights_hands_in_is_followed_as_it_changes():
    """A compiled a_scalar_from_self would miss the value after an optimiser step, and the gradient."""

    class HandsIn(Refused):
        def weights(self):
            return super().weights()._replace(norm=(self.leak,))

        def step(self, inputs, state, weights):
            return state._replace(h=torch.tanh(inputs.a + weights.norm[0] * state.h))

    torch.manual_seed(0)
    layer = unfading.layer(HandsIn)(2, 5, backend="fused")
    results = []
    for leak in (0.5, -0.8):
        with torch.no_grad():
            layer.cells[0].leak.fill_(leak)
        results.append(everything(layer))
        with unfading.use_backend("reference"):
            for got, want in zip(results[-1], everything(layer), strict=True):
                assert_close(got, want, rtol=1e-4, atol=1e-5)  # float32, four steps
    assert not torch.allclose(results[0][0], results[1][0])


class Adjustable(unfading.ElmanCell):
    def __init__(self, input_size, hidden_size, *, bias=True):
        super().__init__(input_size, hidden_size, bias=bias)
        self.phi, self.mix, self.named = torch.tanh, [0.5, 0.2], {"gain": 1.0}

    def step(self, inputs, state, weights):
        gain = getattr(self, "gain", self.named["gain"])
        return state._replace(h=self.mix[0] * self.phi(gain * inputs.a) + self.mix[1] * state.h)


CHANGES = {
    "function": lambda cell: setattr(cell, "phi", torch.sin),
    "entry of a list": lambda cell: cell.mix.__setitem__(0, 0.9),
    "list": lambda cell: setattr(cell, "mix", [0.3, 0.3]),
    "entry of a dictionary": lambda cell: cell.named.__setitem__("gain", 2.0),
    "new attribute": lambda cell: setattr(cell, "gain", 3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.sample(2)
def test_a_step_that_reads_another_attribute_is_compiled_anew(change):
    layer, x = unfading.layer(Adjustable)(2, 5, backend="fused"), torch.randn(4, 3, 2)
    before = layer(x)[0]
    change(layer.cells[0])
    after = layer(x)[0]
    assert not torch.allclose(before, after)
    with unfading.use_backend("reference"):
        assert_close(after, layer(x)[0], rtol=1e-4, atol=1e-5)  # float32


def test_a_refusal_can_fail(monkeypatch):
    """Without the checks of shapes, of rows and of the program a step that mixes rows is compiled to another function."""
    monkeypatch.setattr(trace.Recorder, "_mismatch", lambda self, packet, tensor, value: None)
    test_what_is_refused_runs_by_the_reference(rows_against_rows)  # the check of rows refuses it alone
    monkeypatch.setattr(make_plan, "check_rows_of_step", lambda *arguments: None)
    test_what_is_refused_runs_by_the_reference(rows_against_rows)  # so does the test of the program
    monkeypatch.setattr(make_plan, "check_program", lambda *arguments, **options: None)
    with pytest.raises(AssertionError):
        test_what_is_refused_runs_by_the_reference(rows_against_rows)
