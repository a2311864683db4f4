"""The generated tasks, entry by entry: layouts of the papers, and guesses against guessers."""

from math import log

import pytest
import torch
from torch.testing import assert_close

from unfading.tasks import Adding, Copying, Denoising, RandomLabels, VariableCopying

B = 6


def draw(task, index=0, size=B, seed=0):
    return task.batch(index, size, split="train", seed=seed, device="cpu")


def scores(answers, symbols):
    """Logits of a guesser who is sure of the blanks and has no idea which symbol it is: answers [T, B], 1 where one is due."""
    sure = torch.full((*answers.shape, symbols + 1), -40.0)
    sure[..., 0] = torch.where(answers, -40.0, 40.0)
    sure[..., 1:] = torch.where(answers, 40.0, -40.0).unsqueeze(-1)
    return sure


@pytest.mark.parametrize("T", [2, 3, 10, 51])
def test_adding_marks_one_step_in_each_half_and_asks_for_their_sum(T):
    batch = draw(Adding(T), size=200)
    values, marks = batch.x.unbind(dim=-1)
    assert values.min() >= 0
    assert values.max() < 1
    assert set(marks.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(marks[: T // 2].sum(dim=0), torch.ones(200))
    assert torch.equal(marks[T // 2 :].sum(dim=0), torch.ones(200))
    assert_close(batch.target, (values * marks).sum(dim=0).unsqueeze(1))
    # Every place of both halves is taken by someone.
    assert (draw(Adding(T), size=3000).x[..., 1].sum(dim=1) > 0).all()


def test_answering_one_has_the_error_of_a_guess():
    task = Adding(20)
    batch = draw(task, size=1_000_000)
    error = task.metrics(torch.ones(1_000_000, 1), batch)["mse"].item()
    assert task.guess == 1 / 6
    assert error == pytest.approx(task.guess, rel=0.01)


def test_copying_has_the_published_layout():
    T, marker = 7, 9
    batch = draw(Copying(T))
    assert batch.x.shape == batch.target.shape == (T + 20, B)
    items = batch.x[:10]
    assert 1 <= items.min() <= items.max() <= 8
    assert torch.equal(batch.x[10 + T - 1], torch.full((B,), marker))
    rest = torch.cat([batch.x[10 : 10 + T - 1], batch.x[10 + T :]])
    assert not rest.any()
    assert not batch.target[: T + 10].any()
    assert torch.equal(batch.target[T + 10 :], items)


def test_copying_draws_every_symbol_equally():
    items = draw(Copying(1), size=40_000).x[:10]
    shares = torch.bincount(items.flatten(), minlength=9)[1:] / items.numel()
    assert_close(shares, torch.full((8,), 1 / 8), atol=0.003, rtol=0)


@pytest.mark.parametrize(
    ("task", "guess"),
    [
        (Copying(100), 10 * log(8) / 120),
        (Copying(7, items=3, symbols=5), 3 * log(5) / 13),
        (RandomLabels(100), 10 * log(8) / 120),
        (Denoising(100), log(8)),
        (Denoising(100, all_steps=True), 10 * log(8) / 111),
    ],
)
def test_a_guesser_without_memory_scores_the_guess(task, guess):
    assert task.guess == pytest.approx(guess)
    batch = draw(task)
    prediction = scores(batch.target > 0, task.symbols)
    assert task.metrics(prediction, batch)["cross_entropy"].item() == pytest.approx(guess, rel=1e-5)
    assert task.loss(prediction, batch).item() == pytest.approx(guess, rel=1e-5)


@pytest.mark.parametrize("per_row", [False, True])
def test_the_guess_of_variable_copying_is_a_mean_over_lags(per_row):
    task = VariableCopying(12, per_row=per_row)
    losses = []
    for index in range(400):
        batch = draw(task, index, size=5)
        losses.append(task.loss(scores(batch.target > 0, 8), batch).item())
    assert sum(losses) / len(losses) == pytest.approx(task.guess, rel=0.02)


def test_perfect_recall_scores_perfectly_and_only_recall_counts_for_accuracy():
    for task in (
        Copying(7),
        VariableCopying(7),
        VariableCopying(7, per_row=True),
        Denoising(12),
        Denoising(12, all_steps=True),
    ):
        batch = draw(task)
        right = 40.0 * torch.nn.functional.one_hot(batch.target, 9).float()
        metrics = task.metrics(right, batch)
        assert metrics["accuracy"] == 1
        assert metrics["cross_entropy"] < 1e-6
        blanks = 40.0 * torch.nn.functional.one_hot(torch.zeros_like(batch.target), 9).float()
        assert task.metrics(blanks, batch)["accuracy"] == 0


def test_one_wrong_item_costs_its_share():
    task = Copying(7)
    batch = draw(task, size=1)
    answer = batch.target.clone()
    answer[-1] = batch.target[-1] % 8 + 1
    assert task.metrics(torch.nn.functional.one_hot(answer, 9).float(), batch)["accuracy"].item() == pytest.approx(0.9)


def test_variable_copying_draws_one_lag_per_batch():
    task = VariableCopying(5)
    lags = []
    for index in range(60):
        batch = draw(task, index, size=3)
        length = int(batch.mask[:, 0].sum())
        lags.append(length - 20)
        assert batch.x.shape == batch.target.shape == (25, 3)  # the shape does not depend on the lag
        assert batch.lengths is None
        assert torch.equal(batch.mask, (torch.arange(25) < length).unsqueeze(1).expand(-1, 3))
        fixed = Copying(lags[-1]).copied(batch.x[:10], lags[-1])
        assert torch.equal(batch.x[:length], fixed.x)
        assert torch.equal(batch.target[:length], fixed.target)
        prediction = torch.randn(25, 3, 9, generator=torch.Generator().manual_seed(index))
        assert_close(task.loss(prediction, batch), Copying(lags[-1]).loss(prediction[:length], fixed))
    assert set(lags) == {1, 2, 3, 4, 5}


def test_variable_copying_per_row_is_copying_row_by_row():
    task = VariableCopying(5, per_row=True)
    batch = draw(task, size=200)
    assert set((batch.lengths - 20).tolist()) == {1, 2, 3, 4, 5}
    for b, length in enumerate(batch.lengths.tolist()):
        x, target = batch.x[:, b], batch.target[:, b]
        assert torch.equal(batch.mask[:, b], torch.arange(25) < length)
        assert torch.equal((x == 9).nonzero(), torch.tensor([[length - 11]]))
        assert not x[10 : length - 11].any()
        assert not x[length - 10 :].any()
        assert not target[: length - 10].any()
        assert torch.equal(target[length - 10 : length], x[:10])
        assert not target[length:].any()


def test_a_row_of_variable_copying_weighs_the_same_alone():
    task = VariableCopying(5, per_row=True)
    batch = draw(task, size=4)
    prediction = torch.randn(25, 4, 9)
    alone = [
        torch.nn.functional.cross_entropy(prediction[:n, b], batch.target[:n, b]) for b, n in enumerate(batch.lengths.tolist())
    ]
    assert_close(task.loss(prediction, batch), torch.stack(alone).mean())


@pytest.mark.parametrize("T", [10, 11, 60])
def test_denoising_strews_the_items_in_order_over_distinct_places(T):
    batch = draw(Denoising(T), size=300)
    assert batch.x.shape == (T + 11, 300)
    assert torch.equal(batch.x[T], torch.full((300,), 9))
    assert not batch.x[T + 1 :].any()
    assert not batch.target[: T + 1].any()
    assert torch.equal((batch.x[:T] > 0).sum(dim=0), torch.full((300,), 10))
    for b in range(20):
        column = batch.x[:T, b]
        assert torch.equal(column[column > 0], batch.target[-10:, b])
    assert torch.equal(batch.mask, torch.arange(T + 11).unsqueeze(1).expand(-1, 300) > T)
    # Each step has an item equally often.
    shares = (draw(Denoising(T), size=5000).x[:T] > 0).float().mean(dim=1)
    assert_close(shares, torch.full((T,), 10 / T), atol=0.035, rtol=0)


def test_denoising_counts_the_recalled_steps_or_all():
    prediction = torch.randn(23, B, 9)
    some, every = Denoising(12), Denoising(12, all_steps=True)
    batch = draw(some)
    assert_close(
        some.loss(prediction, batch), torch.nn.functional.cross_entropy(prediction[batch.mask], batch.target[batch.mask])
    )
    assert draw(every).mask is None
    assert_close(
        every.loss(prediction, draw(every)), torch.nn.functional.cross_entropy(prediction.flatten(0, 1), batch.target.flatten())
    )


def test_random_labels_have_nothing_to_do_with_the_input():
    batch = draw(RandomLabels(3), size=4000)
    agree = (batch.target[-10:] == batch.x[:10]).float().mean().item()
    assert agree == pytest.approx(1 / 8, abs=0.01)
    assert not batch.target[:-10].any()
    assert torch.equal(batch.x, draw(Copying(3), size=4000).x)


def test_state_is_kept_over_the_examples_asked_for():
    assert [Copying(5).carried(index, 4, split="train") for index in range(4)] == [False] * 4
    assert [Copying(5, keep=3).carried(index, 4, split="train") for index in range(7)] == [
        False, True, True, False, True, True, False,
    ]  # fmt: skip
