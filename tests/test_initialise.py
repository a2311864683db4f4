"""Initial values: each function keeps its promise, with a generator on any device, in any dtype."""

import pytest
import torch
from torch.testing import assert_close

import unfading
from unfading import initialise


def test_orthogonal_block_by_block():
    W = initialise.orthogonal_(torch.empty(15, 5, dtype=torch.float64), blocks=3)
    for block in W.chunk(3):
        assert_close(block @ block.T, torch.eye(5, dtype=torch.float64))
    wide = initialise.orthogonal_(torch.empty(3, 7, dtype=torch.float64))
    assert_close(wide @ wide.T, torch.eye(3, dtype=torch.float64))


def test_orthogonal_in_half_precision_is_the_rounded_one():
    generator = torch.Generator()
    full = initialise.orthogonal_(torch.empty(6, 6), generator=generator.manual_seed(1))
    half = initialise.orthogonal_(torch.empty(6, 6, dtype=torch.bfloat16), generator=generator.manual_seed(1))
    assert torch.equal(half, full.bfloat16())


def test_identity():
    assert torch.equal(initialise.identity_(torch.empty(3, 3), scale=0.5), 0.5 * torch.eye(3))


def test_gaussian_and_uniform():
    draw = initialise.gaussian_(torch.empty(200_000), 0.1, generator=torch.Generator().manual_seed(0))
    assert abs(draw.std() - 0.1) < 1e-3
    draw = initialise.uniform_(torch.empty(200_000), 0.1, generator=torch.Generator().manual_seed(0))
    assert draw.abs().max() <= 0.1
    assert abs(draw.std() - 0.1 / 3**0.5) < 1e-3


def test_chrono_spreads_forgetting_times_over_one_to_max_lag():
    b = initialise.chrono_(torch.empty(200_000), 101, generator=torch.Generator().manual_seed(0))
    times = b.exp()
    assert times.min() >= 1
    assert times.max() <= 100.001
    assert abs(times.mean() - 50.5) < 0.5


def test_chrono_signs_in_the_cells():
    H = 400
    lstm, star, janet = (kind(1, H, max_lag=50) for kind in (unfading.LSTMCell, unfading.STARCell, unfading.JANETCell))
    i, f, z, o = lstm.from_input.bias.chunk(4)
    assert torch.equal(i, -f)
    assert f.min() >= 0
    assert f.max() > 3
    assert not z.any()
    assert not o.any()
    z, k = star.from_input.bias.chunk(2)
    assert k.max() <= 0
    assert k.min() < -3
    assert not z.any()
    f, z = janet.from_input.bias.chunk(2)
    assert f.min() >= 0
    assert f.max() > 3
    assert not z.any()


def test_forget_bias_starts_at_one():
    assert (unfading.LSTMCell(1, 4).from_input.bias.chunk(4)[1] == 1).all()
    assert not unfading.LSTMCell(1, 4).from_input.bias.chunk(4)[0].any()
    for kind in (unfading.JANETCell, unfading.ForgetLSTMCell, unfading.UGRNNCell):
        assert (kind(1, 4).from_input.bias.chunk(2)[0] == 1).all()


def test_fast_cells_start_like_the_released_code():
    rnn, gated = unfading.FastRNNCell(1, 4), unfading.FastGRNNCell(1, 4)
    assert_close(rnn.logits.detach(), torch.tensor([-3.0, 3.0]))
    assert_close(gated.logits.detach(), torch.tensor([1.0, -4.0]))
    assert (gated.b == 1).all()


def test_fixed_alpha_and_beta_are_exact_and_not_learned():
    cell = unfading.FastRNN(1, 4, alpha=0.001, beta=1.0, trainable=False, dtype=torch.float64).cells[0]
    assert_close(cell.weights().alpha.item(), 0.001, rtol=1e-12, atol=0)
    assert cell.weights().beta.item() == 1.0
    assert "logits" not in dict(cell.named_parameters())


@pytest.mark.parametrize("cell", [unfading.MinGRU, unfading.MinLSTM])
def test_units_of_linear_cells_remember_for_two_to_max_lag_steps(cell):
    """At x = 0 a step keeps the share k of h, so a unit remembers for 1 / (1 - k) steps."""
    torch.manual_seed(0)
    layer = cell(1, 5_000, max_lag=101)
    kept = layer(torch.zeros(1, 1, 1), (torch.ones(1, 1, 5_000),))[0].flatten()
    steps = 1 / (1 - kept)
    assert 2 <= steps.min() < 2.2
    assert 100.5 < steps.max() < 101.01
    assert abs(steps.mean() - 51.5) < 1.5  # uniform
