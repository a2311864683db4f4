"""Elman, LSTM and GRU(reset_after=True) with torch.nn's weights agree with torch.nn to 1e-12, in every form of call."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing import assert_close

import unfading

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MODULES = {
    "RNN-tanh": lambda **kw: nn.RNN(3, 5, dtype=torch.float64, **kw),
    "RNN-relu": lambda **kw: nn.RNN(3, 5, nonlinearity="relu", dtype=torch.float64, **kw),
    "LSTM": lambda **kw: nn.LSTM(3, 5, dtype=torch.float64, **kw),
    "GRU": lambda **kw: nn.GRU(3, 5, dtype=torch.float64, **kw),
}
each = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
FORMS = [{}, {"num_layers": 3}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "bias": False}]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


def states_for(module, batch=()):
    count = module.num_layers * (2 if module.bidirectional else 1)
    parts = 2 if isinstance(module, nn.LSTM) else 1
    return tuple(torch.randn(count, *batch, 5, dtype=torch.float64) for _ in range(parts))


def as_torch(state):
    return state[0] if len(state) == 1 else state


def check(module, layer, x, state=None):
    want, last = module(x, None if state is None else as_torch(state))
    got, end = layer(x, state)
    if isinstance(got, torch.nn.utils.rnn.PackedSequence):
        assert torch.equal(got.batch_sizes, want.batch_sizes)
        for a, b in ((got.sorted_indices, want.sorted_indices), (got.unsorted_indices, want.unsorted_indices)):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        got, want = got.data, want.data
    assert_close(got, want, **EXACT)
    for a, b in zip(end, last if isinstance(last, tuple) else (last,), strict=True):
        assert_close(a, b, **EXACT)


@each
@forms
@pytest.mark.sample(4)
def test_batched_unbatched_and_states(make, form):
    module = make(**form)
    layer = unfading.from_torch(module)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    check(module, layer, x)
    check(module, layer, x, states_for(module, (4,)))
    check(module, layer, x[:, 0])
    check(module, layer, x[:, 0], states_for(module))


@each
@forms
@pytest.mark.sample(4)
def test_batch_first(make, form):
    module = make(batch_first=True, **form)
    check(module, unfading.from_torch(module), torch.randn(4, 7, 3, dtype=torch.float64), states_for(module, (4,)))


@each
@forms
@pytest.mark.parametrize("order", [[7, 5, 2], [2, 7, 5]], ids=["sorted", "unsorted"])
@pytest.mark.sample(8)
def test_packed(make, form, order):
    module = make(**form)
    x = torch.randn(7, 3, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(order), enforce_sorted=order == sorted(order, reverse=True))
    layer = unfading.from_torch(module)
    check(module, layer, packed)
    check(module, layer, packed, states_for(module, (3,)))


@each
@forms
@pytest.mark.sample(4)
def test_lengths_agree_with_packing(make, form):
    module = make(**form)
    layer = unfading.from_torch(module)
    x, lengths = torch.randn(7, 3, 3, dtype=torch.float64), torch.tensor([2, 7, 5])
    want, last = module(pack_padded_sequence(x, lengths, enforce_sorted=False))
    want, _ = torch.nn.utils.rnn.pad_packed_sequence(want)
    got, end = layer(x, lengths=lengths)
    assert_close(got, want, **EXACT)
    for a, b in zip(end, last if isinstance(last, tuple) else (last,), strict=True):
        assert_close(a, b, **EXACT)


@each
@forms
@pytest.mark.sample(6)
def test_gradients(make, form):
    module = make(**form)
    layer = unfading.from_torch(module)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 2, module.hidden_size * (2 if module.bidirectional else 1), dtype=torch.float64)
    (want,) = torch.autograd.grad((module(x)[0] * weight).sum(), x)
    (got,) = torch.autograd.grad((layer(x)[0] * weight).sum(), x)
    assert_close(got, want, **EXACT)


@each
@forms
def test_round_trip(make, form):
    module = make(**form)
    back = unfading.to_torch(unfading.from_torch(module))
    assert type(back) is type(module)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    assert_close(back(x)[0], module(x)[0], **EXACT)


def test_conversion_keeps_the_settings():
    module = nn.LSTM(3, 5, 2, batch_first=True, dropout=0.25, bidirectional=True).eval()
    layer = unfading.from_torch(module)
    assert isinstance(layer, unfading.LSTM)
    assert (layer.dropout, layer.batch_first, layer.bidirectional, layer.training) == (0.25, True, True, False)
    back = unfading.to_torch(layer)
    assert (back.dropout, back.batch_first, back.bidirectional, back.training) == (0.25, True, True, False)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda: unfading.from_torch(nn.LSTM(3, 5, proj_size=2)), "proj_size=2"),
        (lambda: unfading.from_torch(nn.Linear(3, 5)), "got Linear"),
        (lambda: unfading.to_torch(nn.LSTM(3, 5)), "got LSTM"),
        (lambda: unfading.to_torch(unfading.LSTM(3, 5, zoneout=0.1)), "neither recurrent dropout nor zoneout"),
        (lambda: unfading.to_torch(unfading.LSTM(3, 5, normalise=True)), "normalise=True"),
        (lambda: unfading.to_torch(unfading.STAR(3, 5)), "got STAR"),
        (lambda: unfading.to_torch(unfading.GRU(3, 5)), "reset_after=False"),
        (lambda: unfading.to_torch(unfading.Elman(3, 5, activation="sigmoid")), "activation='sigmoid'"),
        (lambda: unfading.to_torch(unfading.LSTM(3, 5, learn_initial_state=True)), "learn_initial_state=True"),
    ],
)
def test_layers_without_a_counterpart_are_refused(what, error):
    with pytest.raises((TypeError, ValueError), match=error):
        what()
