"""Each law fails for a cell that breaks it."""

import dataclasses
import sys

import torch
from torch.nn import functional

from tests.helpers import laws
from unfading.cells.conv_lstm import ConvLSTMCell
from unfading.cells.elman import ElmanCell
from unfading.cells.incremental import IncrementalRNNCell
from unfading.cells.lstm import LSTMCell
from unfading.cells.star import STARCell


class SwapsTwoGates(LSTMCell):
    def step(self, inputs, state, weights):
        i, f, z, o = inputs.a.chunk(4, dim=-1)
        return super().step(inputs._replace(a=torch.cat([f, i, z, o], dim=-1)), state, weights)


class MirrorsTheKernel(ConvLSTMCell):
    def weights(self):
        (W_h,) = super().weights()
        return type(super().weights())(dataclasses.replace(W_h, weight=W_h.weight.flip(2)))


class GivesGatesToGroups(ConvLSTMCell):
    def step(self, inputs, state, weights):
        W_h = weights.W_h
        a = inputs.a + functional.conv2d(state.h, W_h.weight, padding=1, groups=W_h.groups)
        W_h = dataclasses.replace(W_h, weight=0 * W_h.weight)
        return super().step(inputs._replace(a=a), state, weights._replace(W_h=W_h))


class DropsTheStart(IncrementalRNNCell):
    def project(self, x, start=0):
        return super().project(x)


class MixesRows(ElmanCell):
    def step(self, inputs, state, weights):
        return super().step(inputs, state._replace(h=state.h.flip(0)), weights)


class SeesTheFuture(ElmanCell):
    def project(self, x, start=0):
        return super().project(x + x.mean(0))


class TakesNumbersFromTheHost(ElmanCell):
    def project(self, x, start=0):
        return super().project(x * x.new_tensor([2.0]))


class DetachesTheState(STARCell):
    def step(self, inputs, state, weights):
        return super().step(inputs, state._replace(h=state.h.detach()), weights)


class ForgetsABias(STARCell):
    def project(self, x, start=0):
        inputs = super().project(x)
        return inputs._replace(a=inputs.a - self.from_input.bias[self.output_size :])


class SwallowsNaN(ElmanCell):
    def step(self, inputs, state, weights):
        return super().step(inputs._replace(a=inputs.a.nan_to_num()), state, weights)


class HasAHiddenSeed(ElmanCell):
    def reset_parameters(self, generator=None):
        super().reset_parameters(torch.Generator().manual_seed(42))


class RemembersCalls(ElmanCell):
    calls = 0

    def project(self, x, start=0):
        self.calls += 1
        return super().project(x * self.calls)


class NeverUsesItsMatrix(ElmanCell):
    def step(self, inputs, state, weights):
        return state._replace(h=torch.tanh(inputs.a) + 0 * state.h @ weights.W_h)


def test_swapped_gates_break_the_twin_law():
    cell = laws.make(SwapsTwoGates, {})
    laws.fails(laws.equation_is_the_papers, cell, "LSTM", {})


def test_a_mirrored_kernel_and_gates_divided_among_groups_break_the_twin_law():
    laws.fails(laws.equation_is_the_papers, laws.make(MirrorsTheKernel, {}), "ConvLSTM", {})
    for groups in (1, 2):
        cell = laws.make(GivesGatesToGroups, {"groups": groups})
        if groups == 1:
            laws.equation_is_the_papers(cell, "ConvLSTM", {"groups": groups})
        else:
            laws.fails(laws.equation_is_the_papers, cell, "ConvLSTM", {"groups": groups})


def test_a_forgotten_bias_breaks_the_twin_law():
    laws.fails(laws.equation_is_the_papers, laws.make(ForgetsABias, {}), "STAR", {})


def test_a_dropped_start_breaks_the_law_of_halves():
    laws.fails(laws.two_halves_make_the_whole, laws.make(DropsTheStart, {"steps": 6, "eta": 0.3}))


def test_mixed_rows_break_the_law_of_rows():
    laws.fails(laws.batch_rows_do_not_mix, laws.make(MixesRows, {}))


def test_reading_the_future_breaks_causality():
    laws.fails(laws.the_future_does_not_reach_back, laws.make(SeesTheFuture, {}))


def test_numbers_of_the_host_break_the_law_of_captures():
    laws.fails(laws.a_call_can_be_captured, laws.make(TakesNumbersFromTheHost, {}))


def test_a_detached_state_breaks_the_gradient():
    laws.fails(laws.step_has_the_right_gradient, laws.make(DetachesTheState, {}))


def test_an_unused_matrix_breaks_the_gradient_law():
    laws.fails(laws.every_parameter_gets_a_gradient, laws.make(NeverUsesItsMatrix, {}))


def test_a_swallowed_nan_breaks_the_nan_law():
    laws.fails(laws.nan_stays_in_its_row, laws.make(SwallowsNaN, {}))


def test_a_hidden_seed_breaks_the_seed_law():
    def make(seed):
        torch.manual_seed(seed)
        return HasAHiddenSeed(2, 5)

    laws.fails(laws.same_seed_same_weights, make)


def test_state_on_self_breaks_the_law_of_copies():
    laws.fails(laws.survives_copying, laws.make(RemembersCalls, {}))


def test_ignored_lengths_break_the_law_of_padding(monkeypatch):
    monkeypatch.setattr(sys.modules["unfading.reference"], "flip", lambda value, lengths: value.flip(0))
    laws.fails(laws.padding_changes_nothing, laws.make(ElmanCell, {}), True)
