"""Clips of moving digits: what moves where, which digits are shown, and what a guess is worth."""

import numpy as np
import pytest
import torch

from unfading.tasks import MovingMNIST, MovingMNISTDirection, image_files
from unfading.tasks.moving_digits import DIRECTIONS, reflected

KINDS = (MovingMNIST, MovingMNISTDirection)
both = pytest.mark.parametrize("kind", KINDS)
ROWS = {"train": 60, "test": 23}


def draw(task, index=0, size=6, split="train", seed=0):
    return task.batch(index, size, split=split, seed=seed, device="cpu")


@pytest.fixture
def numbered(monkeypatch, tmp_path):
    """Images of one brightness each, which tells the file and the row: 1..60 of training, 101..123 of test."""

    def mnist(part):
        brightness = torch.arange(1, ROWS[part] + 1) + (100 if part == "test" else 0)
        return brightness.byte().reshape(-1, 1, 1).expand(-1, 28, 28).clone(), torch.zeros(ROWS[part], dtype=torch.int64)

    monkeypatch.setattr(image_files, "mnist", mnist)
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))  # another folder is another dataset to the caches


def brightnesses(batch):
    """All brightnesses in a batch's frames."""
    return set((255 * batch.x).round().long().unique().tolist()) - {0}


@pytest.mark.usefixtures("numbered")
@both
@pytest.mark.parametrize("split", ["train", "valid", "full", "test"])
def test_a_split_shows_its_own_digits_only(kind, split):
    task = kind(T=3, size=9, digit_size=4, digits=3)
    batches = [draw(task, index, 5, split) for index in range(task.length(split, 5))]
    own = set((task.rows(split) + (101 if split == "test" else 1)).tolist())
    shown = set().union(*map(brightnesses, batches))
    assert shown <= own
    assert len(shown) > 0.8 * len(own)


@pytest.mark.usefixtures("numbered")
@both
def test_every_digit_of_a_split_comes_in_a_pass(kind):
    task = kind(T=2, size=9, digit_size=4, digits=1)
    for split in ("train", "valid", "test"):
        shown = [brightnesses(draw(task, index, 4, split)) for index in range(task.length(split, 4))]
        assert len(set().union(*shown)) == sum(map(len, shown)) == len(task.rows(split))


@pytest.mark.usefixtures("numbered")
def test_the_further_digits_are_those_of_the_batch_in_another_order(monkeypatch):
    images = []
    monkeypatch.setattr(MovingMNIST, "clips", lambda task, own, random: images.append(own) or random)
    draw(MovingMNIST(digits=3), size=20)
    first, *others = images[0][:, :, 0, 0].T.tolist()
    for other in others:
        assert sorted(other) == sorted(first)
        assert other != first
    assert others[0] != others[1]


def rendered(task, images, y, x):
    """The frames, pixel by pixel."""
    T, B, D = y.shape
    frames = np.zeros((T, B, 1, task.size, task.size), dtype=np.float32)
    for t, b, d in np.ndindex(T, B, D):
        for i, j in np.ndindex(task.digit_size, task.digit_size):
            at = (int(y[t, b, d].round()) + i) % task.size, (int(x[t, b, d].round()) + j) % task.size
            frames[(t, b, 0, *at)] = max(frames[(t, b, 0, *at)], images[b, d, i, j] / 255)
    return frames


def test_frames_are_the_brightest_of_the_digits_at_their_positions():
    task, generator = MovingMNIST(size=6, digit_size=4, digits=3), torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 3, 4, 4), generator=generator).byte()
    y, x = (20 * torch.rand(5, 2, 3, generator=generator) - 7 for _ in range(2))
    got = task.frames(images, y, x).numpy()
    np.testing.assert_allclose(got, rendered(task, images.numpy(), y.numpy(), x.numpy()), rtol=1e-6)


@pytest.mark.usefixtures("made")
def test_the_target_is_the_next_frame_and_digits_stay_inside():
    task = MovingMNIST(T=30, size=12, digit_size=7, digits=1)
    batch = draw(task)
    assert torch.equal(batch.x[1:], batch.target[:-1])
    assert not torch.equal(batch.x[0], batch.x[1])
    # No pixel is lost at an edge.
    brightness = batch.x.sum(dim=(2, 3, 4))
    assert torch.allclose(brightness, brightness[:1].expand_as(brightness))


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("digits", [1, 2])
def test_all_digits_move_in_the_direction_that_is_asked_for(digits):
    task = MovingMNISTDirection(T=9, size=13, digit_size=7, digits=digits, speed=1)
    batch = draw(task, size=40)
    assert set(batch.target.tolist()) == set(range(8))
    for b, direction in enumerate(batch.target.tolist()):
        for t in range(8):
            assert torch.equal(batch.x[t + 1, b, 0], batch.x[t, b, 0].roll(DIRECTIONS[direction], dims=(0, 1)))


def test_directions_go_round_the_clock():
    angles = [np.arctan2(-y, x) % (2 * np.pi) for y, x in DIRECTIONS]
    np.testing.assert_allclose(angles, np.arange(8) * np.pi / 4, atol=1e-12)


@pytest.mark.usefixtures("made")
def test_speeds_lie_between_1_and_the_largest():
    speeds = MovingMNIST(speed=4).speeds(torch.linspace(0, 1, 5))
    assert speeds.tolist() == [1, 1.75, 2.5, 3.25, 4]
    still = MovingMNIST(T=4, size=12, digit_size=7, speed=1)
    assert not torch.equal(draw(still).x[0], draw(still).x[3])


def test_a_reflected_position_turns_back_at_both_ends():
    at = reflected(torch.tensor([0.0, 2.0, 5.0, 6.0, 10.0, 11.0, -1.0, -6.0, 23.0]), 5)
    assert at.tolist() == [0, 2, 5, 4, 0, 1, 1, 4, 3]


@pytest.mark.usefixtures("made")
def test_the_guess_of_a_frame_is_the_error_of_the_mean_frame():
    task = MovingMNIST(T=4, size=9, digit_size=7)
    train, test = (draw(task, size=1024, split=split).target.numpy() for split in ("train", "test"))
    assert task.guess == pytest.approx(np.square(test - train.mean(axis=(0, 1))).mean(), rel=1e-5)
    # No constant frame does better on the clips from which it is computed.
    assert np.square(train - train.mean(axis=(0, 1))).mean() < np.square(train - train.mean()).mean()


@pytest.mark.usefixtures("made")
def test_a_perfect_frame_has_no_error_and_its_loss_is_the_least():
    task = MovingMNIST(T=3, size=9, digit_size=7)
    batch = draw(task)
    logits = torch.logit(batch.target.clamp(1e-6, 1 - 1e-6))
    metrics = task.metrics(logits, batch)
    assert metrics["mse"] < 1e-10
    assert task.loss(logits, batch) < task.loss(logits + 0.1, batch)
    assert task.loss(logits, batch) < task.loss(logits - 0.1, batch)
