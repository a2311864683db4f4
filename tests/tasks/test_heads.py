"""Heads read the last step, every step or the mean, of each row's own length; Model passes lengths and state on."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading

T, B, n = 6, 3, 5
lengths = torch.tensor([6, 2, 4])


@pytest.mark.parametrize("head", [unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime])
def test_a_padded_row_has_the_prediction_of_the_row_alone(head):
    layer, output = head(n, 2), torch.randn(T, B, n)
    answer = layer(output, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone = layer(output[:length, b : b + 1])
        got = answer[:length, b : b + 1] if head is unfading.EveryStep else answer[b : b + 1]
        assert_close(got, alone)


def test_what_each_head_reads():
    output = torch.randn(T, B, n)
    last, every, mean = unfading.LastStep(n, 2), unfading.EveryStep(n, 2), unfading.MeanOverTime(n, 2)
    assert_close(last(output), last.answer(output[-1]))
    assert_close(every(output), every.answer(output))
    assert_close(mean(output), mean.answer(output.mean(0)))


@pytest.mark.parametrize("head", [unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime])
def test_a_head_applies_dropout_to_its_input_in_training_only(head):
    layer, output = head(400, 1, 0.25), torch.ones(T, B, 400)
    with torch.no_grad():
        layer.answer.weight.fill_(1.0)
        layer.answer.bias.zero_()
    sums = layer(output)  # of 400 entries, a quarter of them dropped and the rest enlarged: 400 +/- 11.5
    assert ((sums - 400).abs() < 70).all()
    assert len(sums.unique()) > 1
    assert (layer.eval()(output) == 400).all()
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\]; got 1.5"):
        head(4, 1, 1.5)


@pytest.mark.parametrize("head", [unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime])
def test_model_is_encoder_stack_and_head(head):
    rnn = unfading.STAR(4, n, 2, bidirectional=True)
    model = unfading.Model(nn.Embedding(9, 4), rnn, head(rnn.output_size, 2))
    tokens = torch.randint(9, (T, B))
    prediction, state = model(tokens, lengths=lengths)
    output, end = rnn(model.encoder(tokens), lengths=lengths)
    assert_close(prediction, model.head(output, lengths))
    assert torch.equal(state.h, end.h)


def test_model_passes_state_and_start_on():
    rnn = unfading.SiRNN(2, n, steps=5, eta=0.3)
    with torch.no_grad():
        rnn.cells[0].eta.copy_(torch.rand(5, 1))
    model = unfading.Model(nn.Identity(), rnn, unfading.EveryStep(n, 2))
    x = torch.randn(T, B, 2)
    whole, _ = model(x)
    first, state = model(x[:2])
    second, _ = model(x[2:], state, start=2)
    assert_close(torch.cat([first, second]), whole)
