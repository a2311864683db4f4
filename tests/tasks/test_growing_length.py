"""Training batches that begin short and grow."""

from itertools import pairwise

import pytest

import unfading
from tests.user.growing import Growing
from unfading.tasks.growing_length import GrowingLength
from unfading.training import captured_step
from unfading.training.check_task import sequence_length
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.stepper import Stepper


@pytest.mark.parametrize(("first", "T"), [(1, 2), (28, 1000), (40, 41), (7, 300)])
@pytest.mark.parametrize(("warmup", "growth"), [(0, 1), (0, 2), (0, 17), (1, 0), (1, 1), (5, 0), (5, 17)])
def test_lengths_begin_with_the_first_and_grow_by_equal_factors_to_the_last(first, T, warmup, growth):
    lengths = GrowingLength(T, first, warmup, growth)
    values = [lengths.at(k) for k in range(warmup + growth + 3)]
    assert values[:warmup] == [first] * warmup
    assert values[warmup + max(growth - 1, 0) :] == [T] * (3 + min(growth, 1))
    assert lengths.full_from == warmup + max(growth - 1, 0)
    growing = [first, *values[warmup : warmup + growth]]
    factor = (T / first) ** (1 / max(growth, 1))
    for k, (before, after) in enumerate(pairwise(growing)):
        assert before <= after
        assert abs(after - first * factor ** (k + 1)) <= 0.5 + 1e-9


def test_without_a_first_length_all_batches_have_the_last():
    lengths = GrowingLength(50, None, 0, 0)
    assert lengths.full_from == 0
    assert {lengths.at(k) for k in range(5)} == {50}


RUN = unfading.Run(task=Growing(), cell="STAR", hidden=4, batch=3, steps=9, valid_every=3)


def test_a_run_trains_on_the_lengths_of_its_task(monkeypatch):
    trained = []
    step = Stepper._step

    def noted(self, running):
        place = self.state.place(0, self.state.step)
        trained.append(self.state.task.batch(place.number, 3, split="train", seed=0, device="cpu").x.shape[0])
        return step(self, running)

    monkeypatch.setattr(Stepper, "_step", noted)
    unfading.train(RUN)
    assert trained == [4, 4, 6, 8, 12, 12, 12, 12, 12]


def test_a_recipe_reads_the_full_length():
    assert sequence_length(Growing(), 3, 0) == 12


class NoGraph:
    """In the place of a captured step, on a machine without a GPU: which steps share one."""

    def __init__(self, steps):
        self.steps, self.own = steps, []
        self.clock = self
        steps.append(self.own)

    def set(self, step, running):
        self.own.append(step)

    def step(self, batches, shares):
        self.own[-1] = (self.own[-1], batches[0].x.shape[0])


def test_a_graph_is_captured_anew_for_the_full_length(monkeypatch):
    """A graph is of one shape: that of the short batches would leave all others to launches by the host."""
    captures = []
    monkeypatch.setattr(Stepper, "_capture", lambda self: NoGraph(captures))
    train_together([RUN], TrainOptions())
    short, full = captures
    assert short == [(0, 4), (1, 4), (2, 6), (3, 8)]
    assert full == [(step, 12) for step in range(4, 9)]
    assert len(full) > captured_step.WARM_UP  # long enough that a graph would be captured
