"""Heads read the last step, every step, the mean, or several of them, of each row's own length; Model passes lengths on."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading

T, B, n = 6, 3, 5
lengths = torch.tensor([6, 2, 4])
HEADS = (unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime, unfading.PooledOverTime)
every_head = pytest.mark.parametrize("head", HEADS)


@every_head
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
    pooled = unfading.PooledOverTime(n, 2)
    assert_close(pooled(output), pooled.answer(torch.cat([output[-1], output.mean(0), output.max(0).values], -1)))


def test_padding_is_not_the_largest_value():
    """Padding holds zeros, which are larger than every output of this row."""
    head, output = unfading.PooledOverTime(n, 2), -1 - torch.rand(T, 1, n)
    output[2:] = 0
    assert_close(head(output, torch.tensor([2])), head(output[:2]))


@every_head
def test_a_head_applies_dropout_to_its_input_in_training_only(head):
    size = 1200 // head.vectors
    layer, output = head(size, 1, 0.25), torch.ones(T, B, size)
    with torch.no_grad():
        layer.answer.weight.fill_(1.0)
        layer.answer.bias.zero_()
    sums = layer(output)  # of 1200 entries, a quarter of them dropped and the rest enlarged: 1200 +/- 20
    assert ((sums - 1200).abs() < 120).all()
    assert len(sums.unique()) > 1
    assert (layer.eval()(output) == 1200).all()
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\]; got 1.5"):
        head(4, 1, 1.5)


@every_head
@pytest.mark.sample(1)
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


FRAME_HEADS = (unfading.LastFrame, unfading.MeanFrame, unfading.EveryFrame, unfading.GestureHead)
frame_head = pytest.mark.parametrize("head", FRAME_HEADS)


@frame_head
def test_a_padded_clip_has_the_prediction_of_the_clip_alone(head):
    layer, output = head(n, 2), torch.randn(T, B, n, 4, 3)
    answer = layer(output, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone = layer(output[:length, b : b + 1])
        got = answer[:length, b : b + 1] if head is unfading.EveryFrame else answer[b : b + 1]
        assert_close(got, alone)


def test_what_each_head_over_frames_reads():
    output = torch.randn(T, B, n, 4, 3)
    last, mean, every, gesture = (head(n, 2) for head in FRAME_HEADS)
    assert_close(mean(output), mean.answer(output.mean(dim=(0, 3, 4))))
    assert_close(last(output), last.answer(output[-1].mean(dim=(2, 3))))
    assert every(output).shape == (T, B, 2, 4, 3)
    pixel = every.answer.weight[:, :, 0, 0] @ output[2, 1, :, 3, 0] + every.answer.bias
    assert_close(every(output)[2, 1, :, 3, 0], pixel)
    frame = output.mean(0)
    for convolution in gesture.convolutions:
        frame = torch.relu(convolution(frame))
    assert frame.shape == (B, 256, 1, 1)
    assert_close(gesture(output), gesture.answer(frame.mean(dim=(2, 3))))
    assert not torch.equal(gesture(output), gesture(output.flip(3)))  # it sees where in the frame something is


def test_the_gesture_head_has_the_filters_of_the_paper():
    head = unfading.GestureHead(64, 27)
    assert [(c.out_channels, c.kernel_size) for c in head.convolutions] == [(m, (3, 3)) for m in (128, 128, 256, 256)]
    kernels = 9 * (64 * 128 + 128 * 128 + 128 * 256 + 256 * 256)
    assert sum(p.numel() for p in head.parameters()) == kernels + 128 + 128 + 256 + 256 + 257 * 27
    assert head(torch.randn(2, 1, 64, 112, 112)).shape == (1, 27)


@frame_head
def test_a_head_over_frames_names_the_output_that_it_wants(head):
    layer, name = head(4, 2), head.__name__
    with pytest.raises(ValueError, match=rf"{name} takes output of shape \[T, B, 4, height, width\]; got \[6, 3, 5, 2, 2\]"):
        layer(torch.zeros(6, 3, 5, 2, 2))
    with pytest.raises(ValueError, match=r"got \[6, 3, 4\]. Frames are the output of convolutional cells, e.g. ConvSTAR"):
        layer(torch.zeros(6, 3, 4))
    with pytest.raises(TypeError, match=f"{name} takes the output of a layer, a Tensor; got list"):
        layer([1])
    with pytest.raises(ValueError, match=r"lengths must lie in 1..6, the steps of the input; got 7"):
        layer(torch.zeros(6, 2, 4, 2, 2), torch.tensor([7, 1]))
    with pytest.raises(ValueError, match="answers must be at least 1; got 0"):
        head(4, 0)
