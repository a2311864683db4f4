"""Phase portraits and the noise experiment agree with brute force and with known cases."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.helpers import laws
from unfading import catalogue
from unfading.cells.elman import ElmanCell
from unfading.cells.equilibrium import EquilibriumRNNCell
from unfading.cells.fast import FastRNNCell
from unfading.cells.incremental import IncrementalRNNCell
from unfading.cells.lstm import LSTMCell
from unfading.diagnostics.equilibrium import trajectory
from unfading.diagnostics.measure.noise import after_noise


def two_units(eta=0.5, minus=False):
    torch.manual_seed(3)
    cell = IncrementalRNNCell(
        1, 2, rank=2, projection_rank=0, inner_steps=120, eta=eta, activation="tanh", minus=minus
    ).double()
    with torch.no_grad():
        U = torch.randn(2, 2, dtype=torch.float64)
        cell.U.factors[0].copy_(0.6 / torch.linalg.matrix_norm(U, 2) * U - torch.eye(2))
        cell.from_input.weight.normal_()
    return cell


def test_a_random_walk_has_the_variance_it_is_given():
    x = trajectory.random_walk(20_000, 3.0, seed=1)
    moves = x[1:] - x[:-1]
    assert x.shape == (20_000, 1, 1)
    assert float(moves.std()) == pytest.approx(3.0, rel=0.03)
    assert torch.equal(x, trajectory.random_walk(20_000, 3.0, seed=1))


@pytest.mark.parametrize("cell", [ElmanCell, FastRNNCell, IncrementalRNNCell])
def test_states_are_those_of_the_cell_from_the_given_start(cell):
    own = cell(1, 2).double()
    x, h = trajectory.random_walk(50, 0.3, seed=0), torch.tensor([0.5, -2.0], dtype=torch.float64)
    states = trajectory.states(own, x, h)
    want = laws.run(own, x, own.initial_state(1)._replace(h=h[None]))[0].h[:, 0].detach()
    assert torch.equal(states[0], h)
    assert_close(states[1:], want, rtol=0, atol=0)


@pytest.mark.parametrize("minus", [False, True])
def test_sums_of_a_solved_cell_lie_on_the_curve(minus):
    cell = two_units(minus=minus)
    if minus:
        cell.from_zero = True  # with g_0 = h, the -h form does not move
    x = trajectory.random_walk(60, 0.5, seed=2)
    h = trajectory.states(cell, x, torch.tensor([1.0, -1.0], dtype=torch.float64))
    curve = trajectory.equilibrium_curve(cell, x[:, 0, 0])
    assert_close(trajectory.sums(cell, h), curve, rtol=0, atol=1e-6)
    # The curve solves its equation.
    U, W, b = cell.U().detach(), cell.from_input.weight.detach(), cell.from_input.bias.detach()
    assert_close(torch.tanh(curve @ U.T + x[:, 0] @ W.T + b), curve, rtol=0, atol=1e-12)


def test_distance_to_a_polygon():
    curve = torch.tensor([[0.0, 0.0], [1.0, 0.0], [math.nan, math.nan], [5.0, 5.0], [5.0, 7.0]], dtype=torch.float64)
    points = torch.tensor([[0.5, 0.3], [-3.0, 4.0], [6.0, 6.5], [1.0, 0.0]], dtype=torch.float64)
    assert_close(trajectory.distance_to(curve, points), torch.tensor([0.3, 5.0, 1.0, 0.0], dtype=torch.float64))


def test_a_portrait_distinguishes_a_line_from_an_oscillation():
    line = torch.stack([torch.arange(10.0), torch.zeros(10)], 1).double()
    there_and_back = line.clone()
    there_and_back[1::2] *= -1
    square = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0], [1, 0.0]], dtype=torch.float64)
    assert trajectory.portrait(line) == {"length": 9.0, "extent": 9.0, "median_turn": 0.0}
    assert trajectory.portrait(there_and_back)["median_turn"] == pytest.approx(180)
    assert trajectory.portrait(square)["median_turn"] == pytest.approx(90)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, h: trajectory.states(ElmanCell(1, 3).double(), x, h), "a state of two numbers; got 3"),
        (lambda x, h: trajectory.states(LSTMCell(1, 2).double(), x, h), "a state of one part; LSTMCell has h, c"),
        (lambda x, h: trajectory.equilibrium_curve(ElmanCell(1, 2), x[:, 0, 0]), "cells that take inner steps.*got ElmanCell"),
        (lambda x, h: trajectory.random_walk(5, 0.0, seed=0), "deviation must be above 0; got 0.0"),
        (
            lambda x, h: after_noise(ElmanCell(1, 2), torch.zeros(4, 1, 1)),
            r"B at least 2, because pairs of rows are compared; got \[4, 1, 1\]",
        ),
    ],
)
def test_wrong_arguments(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(trajectory.random_walk(5, 1.0, seed=0), torch.zeros(2, dtype=torch.float64))


def test_noise_by_hand():
    """A plain RNN in NumPy, with the noise that torch draws."""
    cell = ElmanCell(3, 6).double()
    signal = torch.randn(5, 3, 3, dtype=torch.float64)
    W, U, b = (p.detach().numpy() for p in (cell.from_input.weight, cell.W_h, cell.from_input.bias))

    def run(x, h):
        for row in x:
            h = np.tanh(row @ W.T + h @ U.T + b)
        return h

    v = run(signal.numpy(), np.zeros((3, 6)))
    drawn = torch.randn(40, 1, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    rows = after_noise(cell, signal, steps=40, seed=4)
    assert [(row["part"], row["after"]) for row in rows] == [("h", "zeros"), ("h", "noise")]
    for row, x in zip(rows, (np.zeros_like(drawn), drawn), strict=True):
        w = run(np.broadcast_to(x, (40, 3, 3)), v)
        norm = np.linalg.norm
        assert row["norm_before"] == pytest.approx(norm(v, axis=1).mean(), abs=1e-12)
        assert row["norm_after"] == pytest.approx(norm(w, axis=1).mean(), abs=1e-12)
        assert row["cosine"] == pytest.approx(((v * w).sum(1) / norm(v, axis=1) / norm(w, axis=1)).mean(), abs=1e-8)
        distance_ratio = (norm(w[1:] - w[:-1], axis=1) / norm(v[1:] - v[:-1], axis=1)).mean()
        assert row["kept"] == pytest.approx(distance_ratio, rel=1e-8)


def test_noise_continues_at_the_step_where_the_signal_ended():
    """A table of eta continues at the next step; it does not start again."""
    cell = IncrementalRNNCell(2, 4, steps=6, eta=0.1).double()
    with torch.no_grad():
        cell.eta.copy_(torch.linspace(-0.2, 0.3, 30).reshape(6, 5))
    signal = torch.randn(3, 2, 2, dtype=torch.float64)
    whole, _ = laws.run(cell, torch.cat([signal, torch.zeros(4, 2, 2, dtype=torch.float64)]))
    assert after_noise(cell, signal, steps=4)[0]["norm_after"] == pytest.approx(
        float(whole.h[-1].detach().norm(dim=1).mean()), rel=1e-12
    )


def test_an_exact_equilibrium_keeps_the_signal_and_accumulates_noise():
    cell = EquilibriumRNNCell(4, 16)
    zeros, noise = after_noise(cell, torch.randn(9, 5, 4), steps=100)
    assert zeros["cosine"] == pytest.approx(1)
    assert zeros["norm_after"] == pytest.approx(zeros["norm_before"])
    assert zeros["kept"] == pytest.approx(1)
    assert noise["kept"] == pytest.approx(1)
    assert noise["norm_after"] > 1.5 * noise["norm_before"]
    odd = after_noise(cell, torch.randn(9, 5, 4), steps=101)[0]
    assert odd["cosine"] == pytest.approx(-1)


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
@pytest.mark.sample(8)
def test_every_cell_can_be_measured(cell):
    own = cell(3, 8)
    rows = after_noise(own, torch.randn(4, 3, 3), steps=6)
    assert {row["part"] for row in rows} == set(own.initial_state(1)._fields)
    assert all(isinstance(row["norm_after"], float) for row in rows)
    assert all(-1 - 1e-9 <= row["cosine"] <= 1 + 1e-9 for row in rows if row["cosine"] is not None)
