"""Training batches that begin short and grow."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

import unfading
from tests.helpers.trained import OWN, outcome, stopped_after, train_outcome
from tests.user.growing import Growing
from tests.user.own_tasks import Breaks
from unfading.diagnostics.subject import cell_on_task
from unfading.papers import budget
from unfading.papers.row import Row
from unfading.tasks.growing_length import GrowingLength
from unfading.training import captured_step
from unfading.training.active_run import ActiveRun
from unfading.training.check_task import TaskError, check_declared, sequence_length
from unfading.training.fleet import Fleet
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.stepper import Stepper
from unfading.training.sweep.sweep import Sweep


@pytest.mark.parametrize(("first", "T"), [(1, 2), (28, 1000), (40, 41), (7, 300)])
@pytest.mark.parametrize(("warmup", "growth"), [(0, 2), (0, 17), (1, 0), (1, 1), (5, 0), (5, 17)])
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
    lengths = GrowingLength(50)
    assert lengths.full_from == 0
    assert {lengths.at(k) for k in range(5)} == {50}


RUN = unfading.Run(task=Growing(), cell="STAR", hidden=4, batch=3, steps=9, valid_every=3)


def test_a_run_trains_on_the_lengths_of_its_task(monkeypatch):
    trained = []
    gradients = Fleet.gradients

    def noted(self, batches, *arguments):
        trained.append(batches[0].x.shape[0])
        return gradients(self, batches, *arguments)

    monkeypatch.setattr(Fleet, "gradients", noted)
    unfading.train(RUN)
    assert trained == [4, 4, 6, 8, 12, 12, 12, 12, 12]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_stopped_run_continues_with_the_length_at_which_it_stopped(steps, tmp_path, monkeypatch):
    expected = train_outcome(RUN, tmp_path / "whole")
    stopped_after(steps, monkeypatch, lambda: unfading.train(RUN, tmp_path))
    unfading.train(RUN, tmp_path, resume=True)
    assert outcome(tmp_path / RUN.key) == expected


def test_patience_counts_evaluations_after_the_growth():
    run = replace(RUN, rate=1e-30, valid_every=1, patience=2)  # no score is better than the first
    assert unfading.train(run)["steps"] == Growing.full_length_from + 2
    constant = replace(run, task=f"{OWN}:Sum", task_options={})
    assert unfading.train(constant)["steps"] == 1 + 2
    # The growth ends between two evaluations, and the second one, at step 6, is of full length.
    assert unfading.train(replace(run, valid_every=3, patience=1))["steps"] == 6


@dataclass(frozen=True)
class GrowingBreaks(Growing, Breaks):
    """Growing, with a loss that is not finite at some steps."""


@pytest.mark.parametrize("at", [3, 7])
def test_a_stopped_run_returns_to_the_same_weights(at, tmp_path, monkeypatch):
    run = replace(RUN, task=GrowingBreaks(at=at, times=1), retries=1)
    expected = train_outcome(run, tmp_path / "whole")
    assert unfading.train(run)["returns"] == 1
    stopped_after(at - 1, monkeypatch, lambda: unfading.train(run, tmp_path))
    unfading.train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


def test_while_the_length_grows_a_run_returns_to_its_last_weights_and_later_to_the_best():
    each = ActiveRun(RUN, Growing())
    assert each.log_every == 1
    assert Growing.full_length_from == 4
    returned_to = [
        step for step, loss in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 4.0, 5.0], 1) if each.update_lowest_loss(step, loss)
    ]
    # Step 5 has the first batch of full length: its loss is not compared with those of shorter ones.
    assert returned_to == [1, 2, 3, 4, 5, 7]


def test_an_exploded_loss_is_not_returned_to_while_the_length_grows():
    each = ActiveRun(RUN, Growing())
    each.explosion.guess = 1.0
    for step, loss in ((1, 1.0), (2, 1e6)):
        each.explosion.update(step, loss)
        assert each.update_lowest_loss(step, loss) == (step == 1)


def test_a_run_that_ends_before_the_full_length_says_so():
    said = []
    train_together([replace(RUN, steps=4)], TrainOptions(say=said.append))
    assert len(said) == 1
    assert "full length after 4 steps, and the run ends after 4" in said[0]
    said.clear()
    train_together([replace(RUN, steps=5)], TrainOptions(say=said.append))
    assert said == []


@dataclass(frozen=True)
class BreaksAtFullLength(Growing):
    """Growing, with a fault that only long batches have."""

    def loss(self, prediction, batch):
        assert batch.x.shape[0] < 12
        return super().loss(prediction, batch)


def test_a_batch_of_full_length_is_examined_before_training(monkeypatch):
    monkeypatch.setattr(Stepper, "take", lambda self, running: pytest.fail("a step was taken"))
    with pytest.raises(TaskError, match=r"batch 4\)"):
        unfading.train(replace(RUN, task=BreaksAtFullLength()))


@pytest.mark.parametrize("value", ["4", -1, 2.0, True, lambda self: 4])
def test_a_wrong_full_length_from_is_one_sentence(value):
    task = type("Wrong", (Growing,), {"full_length_from": value})()
    for call in (lambda: check_declared(task), lambda: sequence_length(task, 3, 0)):
        with pytest.raises(TaskError, match=r"^Wrong\.full_length_from must be .*; got "):
            call()


def test_a_diagnosis_has_the_full_length():
    subject = cell_on_task("STAR", "tests/user/growing.py:Growing", layers=1, hidden=3, batch=2, seed=0)
    assert subject.x.x.shape[0] == 12


def test_trials_are_not_pruned_while_the_length_grows():
    optuna = pytest.importorskip("optuna")
    run = replace(RUN, valid_every=1, steps=15)  # so few that a fifth of them is shorter than the growth
    for prune in ("median", "hyperband"):
        pruner = Sweep(run, ("rate=log:0.001:0.1",), prune).make_pruner()
        study = optuna.create_study(direction="minimize", pruner=pruner, sampler=optuna.samplers.RandomSampler(0))
        pruned_at = []
        for score in [1.0] * 12 + [9.0] * 12:  # the first trials are good, and the others bad from the beginning
            trial = study.ask()
            for number in range(15):
                trial.report(score, number)
                if trial.should_prune():
                    pruned_at.append(number)
                    break
            study.tell(trial, score)
        assert min(pruned_at) == Growing.full_length_from


def test_budgets_keep_the_growth_in_proportion():
    grown = {"warmup_T": 40, "warmup_batches": 18_000, "growth_batches": 4}
    row = Row(
        unfading.Run(task="noisy_cifar", task_options=grown, cell="GRU", hidden=4, batch=4, epochs=50), None, 0.0, name="row"
    )
    short, smoke = (budget.within([row], name)[0].run.task_options for name in ("short", "smoke"))
    assert short == {"warmup_T": 40, "warmup_batches": 1_800, "growth_batches": 1}
    assert smoke == {"warmup_T": 40, "warmup_batches": 1, "growth_batches": 1}  # the second of two steps has all steps
    for count in (2, 10, 200):
        run = replace(row.run, task_options={"warmup_T": 40, "growth_batches": count})
        for name in ("short", "smoke"):
            shortened = budget.within([replace(row, run=run)], name)[0].run
            assert shortened.make_task().full_length_from == max(1, -(-count // 10) - 1 if name == "short" else 1)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"T": 12.5}, "T must be an int"),
        ({"warmup_batches": 3}, "need warmup_T"),
        ({"warmup_T": 4, "warmup_batches": -1}, "warmup_batches must be at least 0"),
        ({"warmup_T": 4, "growth_batches": 1}, "has no effect"),
        ({"warmup_T": 12, "warmup_batches": 1}, "below T = 12"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(options, wrong):
    with pytest.raises((TypeError, ValueError), match=wrong):
        GrowingLength(**{"T": 12, **options})


def test_the_image_must_fit_into_the_first_batch():
    with pytest.raises(
        ValueError,
        match="start must be at most 14, so that the 28 rows of the image fit into the 42 steps of the first training batch; "
        "got 20",
    ):
        unfading.tasks.NoisyMNIST(60, warmup_T=30, growth_batches=2, start=20)


def test_a_recipe_reads_the_full_length():
    assert sequence_length(Growing(), 3, 0) == 12


class NoGraph:
    """In the place of a captured step, on a machine without a GPU: which steps share one."""

    def __init__(self, steps):
        self.steps, self.own, self.trouble = steps, [], None
        self.clock = self
        steps.append(self.own)

    def set(self, step, running):
        self.own.append(step)

    def step(self, batches, shares):
        self.own[-1] = (self.own[-1], batches[0].x.shape[0])


def test_a_graph_is_captured_anew_for_the_full_length(monkeypatch):
    """A graph is of one shape: that of the short batches would leave all others to launches by the host."""
    captures = []
    monkeypatch.setattr(Stepper, "_make_captured_step", lambda self: NoGraph(captures))
    train_together([RUN], TrainOptions())
    short, full = captures
    assert short == [(0, 4), (1, 4), (2, 6), (3, 8)]
    assert full == [(step, 12) for step in range(4, 9)]
    assert len(full) > captured_step.WARM_UP  # long enough that a graph would be captured
