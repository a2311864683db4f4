"""Tasks over arrays: the split, the scale, the loss, and what their fields say of the data."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import unfading
from unfading import Run
from unfading.own_data.array_task import hold_out
from unfading.own_data.preparation import Preparation

DRAW = np.random.default_rng(0)
X = 5.0 + 3.0 * DRAW.standard_normal((60, 7, 2))
LABELS = np.repeat(["a", "b", "c"], [30, 20, 10])
NUMBERS = 100.0 + X[:, :, 0].sum(axis=1)


def task(y=LABELS, seed=0, **options):
    return Preparation(**{"test": 0.2, **options}).make_task(X, y, seed)


def test_every_row_is_in_one_split_and_each_class_gives_its_share():
    own = task()
    train, valid = (own.part_on("train", torch.device("cpu")).take(own.rows(split)) for split in ("train", "valid"))
    test = own.part_on("test", torch.device("cpu"))
    rows = torch.cat([part.x for part in (train, valid, test)]).flatten(1)
    assert sorted(rows[:, 0].tolist()) == sorted(X[:, 0, 0].astype(np.float32).tolist())
    for part, size in ((train, 36), (valid, 12), (test, 12)):
        shares = torch.bincount(part.target) / size
        assert torch.allclose(shares, torch.tensor([3, 2, 1]) / 6, atol=0.06)


def test_a_class_of_one_row_stays_in_training():
    target = np.array([0] * 9 + [1])
    for seed in range(20):
        assert 9 not in hold_out(target, 0.4, np.random.default_rng(seed), labelled=True)


def test_the_seed_decides_the_split():
    assert task(seed=1).content == task(seed=1).content
    assert task(seed=1).content != task(seed=2).content


def test_the_key_of_a_run_covers_the_data():
    def key(values, y=LABELS):
        own = Preparation().make_task(values, y, 0)
        return Run(task=own, cell="STAR", epochs=1).key

    changed = X.copy()
    changed[59, 6, 1] += 1e-3
    assert key(X) == key(X.copy())
    assert len({key(X), key(changed), key(X, LABELS[::-1])}) == 3


def test_a_run_of_arrays_is_json_and_its_model_is_built_without_the_data():
    run = Run(task=task(NUMBERS), cell="GRU", hidden=4, epochs=1)
    again = Run.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.key == run.key
    x = torch.randn(7, 3, 2)
    assert torch.equal(again.make_model()(x)[0], run.make_model()(x)[0])
    with pytest.raises(ValueError, match="were arrays in memory, which its files do not hold"):
        again.total()


def test_a_replaced_run_keeps_its_data_only_with_its_task():
    run = Run(task=task(), cell="GRU", epochs=1)
    assert replace(run, seed=3).total() == run.total()
    other = {**run.task_options, "content": "0" * 64}
    with pytest.raises(ValueError, match="arrays in memory"):
        replace(run, task_options=other).total()


def test_other_data_are_refused():
    own, other = task(), task(seed=1)
    with pytest.raises(ValueError, match="these data are not those of the run"):
        own.with_data(other.data)


def test_the_scale_is_that_of_the_training_rows_over_their_own_steps():
    lengths = DRAW.integers(1, 8, 60)
    own = Preparation(test=0.2).make_task([x[:n] for x, n in zip(X, lengths, strict=True)], LABELS, 0)
    train = own.training()
    steps = torch.cat([x[:n] for x, n in zip(train.x, train.lengths, strict=True)]).double()
    assert own.mean == pytest.approx(steps.mean(dim=0).tolist(), rel=1e-6)
    assert own.spread == pytest.approx(steps.std(dim=0, correction=0).tolist(), rel=1e-6)
    encoded = own.encoder()(steps.float())
    assert torch.allclose(encoded.mean(dim=0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(encoded.std(dim=0, correction=0), torch.ones(2), atol=1e-5)


def test_constant_and_tiny_channels_have_a_scale():
    values = np.stack([np.full((60, 7), 1e6), 1e-9 * X[:, :, 0]], axis=-1)
    own = Preparation().make_task(values, LABELS, 0)
    assert own.spread[0] == 1.0
    assert own.encoder()(torch.from_numpy(values).float())[..., 1].std() == pytest.approx(1.0, rel=0.1)


def test_a_model_of_numbers_answers_in_their_units():
    own = task(NUMBERS)
    head = own.head(4)
    torch.nn.init.zeros_(head.head.answer.weight)
    torch.nn.init.zeros_(head.head.answer.bias)
    answers = head(torch.randn(7, 3, 4))
    assert answers.flatten().tolist() == pytest.approx([own.target_mean[0]] * 3)
    batch = own.batch(0, 12, split="test", seed=0, device="cpu")
    answers = answers[:1].expand(12, 1)
    assert own.metrics(answers, batch)["mse"].item() == pytest.approx(own.guess, rel=1e-5)
    assert own.loss(answers, batch).item() == pytest.approx(own.guess / own.target_spread[0] ** 2, rel=1e-5)


def test_weights_of_classes_are_in_the_loss():
    own = task(class_weight={"b": 3.0})
    batch, prediction = own.batch(0, 12, split="test", seed=0, device="cpu"), torch.randn(12, 3)
    expected = functional.cross_entropy(prediction, batch.target, weight=torch.tensor([1.0, 3.0, 1.0]))
    assert torch.equal(own.loss(prediction, batch), expected)
    assert not torch.allclose(expected, task().loss(prediction, batch))


def test_a_guess_is_the_most_common_class_on_the_rows_that_are_scored():
    assert task().guess == pytest.approx(0.5)
    assert task(test=0.0).guess == pytest.approx(0.5)
    assert task(test=0.0, validation=0.0).guess == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        (LABELS, "classification"),
        ([0, 1] * 30, "classification"),
        ([0.0, 1.0] * 30, "classification"),
        (NUMBERS, "regression"),
        (np.arange(60), "regression"),
        (np.ones((60, 2)), "regression"),
        ([True, False] * 30, "classification"),
    ],
)
def test_the_type_of_a_task_follows_from_its_targets(y, kind):
    assert Preparation().task_type(y) == kind


@pytest.mark.parametrize(
    ("options", "y", "sentence"),
    [
        ({"validation": 0.6, "test": 0.5}, LABELS, "leave no row to train on"),
        ({"validation": 1.5}, LABELS, r"validation must lie in \[0, 1\]"),
        ({"task": "clustering"}, LABELS, "unknown task 'clustering'"),
        ({"readout": "first"}, LABELS, "unknown readout 'first'"),
        ({"class_weight": "balanced"}, NUMBERS, "this is a regression"),
        ({}, ["up"] * 60, "the targets have one class, 'up'; a classification needs at least two. Add rows of another class.$"),
        ({}, [1] * 60, "one class, 1; .* If the targets are quantities, choose the task regression"),
        ({}, LABELS[:7], "X has 60 sequences, and y has 7 rows"),
    ],
)
def test_wrong_options_are_named(options, y, sentence):
    with pytest.raises(ValueError, match=sentence):
        task(y, **options)


@pytest.mark.parametrize("y", [LABELS[:1], NUMBERS[:1]])
def test_a_single_sequence_is_refused(y):
    with pytest.raises(ValueError, match="the data have one sample, a single sequence; training needs at least two"):
        Preparation().make_task(X[:1], y, seed=0)


def test_the_examples_of_a_fit_are_not_held_after_it():
    model = unfading.fit(X, LABELS, "Elman", hidden=2, steps=2)
    with pytest.raises(ValueError, match="arrays in memory"):
        model.task.batch(0, 4, split="train", seed=0, device="cpu")
