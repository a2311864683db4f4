"""On a GPU every cell agrees with the CPU in float64, gradients included; skipped without a GPU."""

import copy

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.small_tasks import small, small_stack
from tests.helpers.variants import every_cell, hidden_size, name
from unfading import catalogue
from unfading.tasks.moving_digits import MovingDigits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Rounding of 1e-16, amplified where |z| is small by the slope of modReLU, whose |z| is smoothed over 1e-5.
EXACT = {"rtol": 1e-8, "atol": 1e-8}


def everything(layer, x, lengths):
    x = x.clone().requires_grad_()
    output, state = layer(x, lengths=lengths)
    sum(part.square().sum() for part in (output, *state)).backward()
    return [t.cpu() for t in (output, *state, x.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize(("cell", "options"), every_cell())
def test_gpu_agrees_with_the_cpu(cell, options):
    layer = unfading.layer(cell)(laws.I, hidden_size(cell, options), 2, bidirectional=True, dtype=torch.float64, **options)
    x, lengths = laws.random_input(), torch.tensor([7, 2, 5])
    want = everything(layer, x, lengths)
    moved = copy.deepcopy(layer).to("cuda")
    moved.zero_grad()
    for a, b in zip(everything(moved, x.to("cuda"), lengths), want, strict=True):
        assert_close(a, b, **EXACT)
    assert_close(moved.to("cpu")(x)[0], layer(x)[0], rtol=0, atol=0)


@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
def test_one_cpu_generator_gives_the_same_weights_on_every_device(cell):
    pair = cell(laws.I, hidden_size(cell)), cell(laws.I, hidden_size(cell)).to("cuda")
    for each in pair:
        each.reset_parameters(torch.Generator().manual_seed(3))
    for a, b in zip(pair[0].state_dict().values(), pair[1].state_dict().values(), strict=True):
        assert_close(b.cpu(), a, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}, {"checkpoint_every": 3}], ids=str)
def test_a_layer_created_on_the_gpu_with_every_option(noise):
    layer = unfading.LSTM(2, 5, 2, device="cuda", learn_initial_state=True, **noise)
    assert all(p.is_cuda for p in layer.parameters())
    output, state = layer(torch.randn(7, 3, 2, device="cuda"))
    output.sum().backward()
    assert output.is_cuda
    assert state.h.is_cuda


def test_packed_and_model_with_lengths_on_the_cpu():
    layer = unfading.STAR(2, 5, device="cuda")
    x, lengths = torch.randn(7, 3, 2, device="cuda"), torch.tensor([2, 7, 5])
    packed, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    assert_close(pad_packed_sequence(packed)[0], layer(x, lengths=lengths)[0])
    for head in (unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime):
        model = unfading.Model(torch.nn.Identity(), layer, head(5, 2).to("cuda"))
        assert torch.isfinite(model(x, lengths=lengths)[0]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
def test_autocast(cell, dtype):
    layer, x = unfading.layer(cell)(2, 16, device="cuda"), torch.randn(5, 3, 2, device="cuda")
    with torch.autocast("cuda", dtype):
        output, _ = layer(x)
    output.sum().backward()
    assert output.dtype == torch.float32
    assert_close(output, layer(x)[0], rtol=0.1, atol=0.1)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("task", catalogue.tasks())
def test_a_task_draws_on_the_gpu_and_shows_the_same_rows(task):
    instance = small(task)
    batch, again = (instance.batch(1, 4, split="train", seed=0, device=device) for device in ("cuda", "cuda:0"))
    assert all(part is None or part.is_cuda for part in batch)
    for one, other in zip(batch, again, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    # The movement of digits is drawn, on the GPU as other numbers than on the CPU.
    if instance.dataset is not None and not isinstance(instance, MovingDigits):
        assert torch.equal(batch.target.cpu(), instance.batch(1, 4, split="train", seed=0, device="cpu").target)
    head, encoder = instance.head(5).to("cuda"), instance.encoder().to("cuda")
    layer = small_stack(instance, batch, 5, device="cuda")
    prediction, _ = unfading.Model(encoder, layer, head)(batch.x, lengths=batch.lengths)
    assert all(value.isfinite() for value in instance.metrics(prediction, batch).values())
