"""Laws of tasks: batches are pure, splits are apart, losses and metrics are finite, guesses are what guessers get."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

import unfading
from tests.helpers.small_tasks import TASKS, frame_of, small, small_stack
from unfading.data import store
from unfading.tasks.base import Batch, Task
from unfading.tasks.draw import stream
from unfading.tasks.moving_digits import MovingDigits
from unfading.tasks.resident import Examples, Labelled, Resident
from unfading.tasks.synthetic import Adding

# Of each option, another value. An option that no one can turn has no place in a task.
OTHER = {
    "readout": "pooled",
    "stretch": 0.2,
    "start": 3,
    "dropout": 0.5,
    "T": 45,
    "items": 4,
    "symbols": 5,
    "keep": 2,
    "scale": "pixelwise",
    "permutation": "urnn",
    "normalise": "none",
    "split_by": "segments",
    "steps": 6,
    "embedding": 3,
    "reset_every": 3,
    "embedding_std": 1.0,
    "reviews": 40,
    "words": 3,
    "per": "sequence",
    "name": "Vowels",
    "size": 11,
    "digit_size": 4,
    "digits": 3,
    "speed": 5,
    "shift": 2.0,
    "rotate": 15.0,
    "zoom": 0.2,
    "warmup_T": 33,
    "warmup_batches": 2,
    "growth_batches": 2,
}
# What an option needs beside it.
BESIDE = {
    "warmup_T": {"warmup_batches": 1},
    "warmup_batches": {"warmup_T": 34},
    "growth_batches": {"warmup_T": 34},
}
# What differs only on the published files; test_images.py turns it there.
ON_REAL_DATA = {"validation"}
every_task = pytest.mark.parametrize("name", TASKS)
pytestmark = pytest.mark.usefixtures("made")
SPLITS = ("train", "valid", "full", "test")


def draw(task, index=0, size=4, split="train", seed=0, device="cpu"):
    return task.batch(index, size, split=split, seed=seed, device=device)


def same(one, other):
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@every_task
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.sample(23)
def test_a_batch_depends_on_its_arguments_alone(name, split):
    task = small(name)
    first = draw(task, 1, split=split)
    kept = Batch(*(None if part is None else part.clone() for part in first))
    draw(task, 0, split="train", seed=3)
    torch.manual_seed(7)
    again = draw(small(name), 1, split=split)
    assert same(again, kept)
    # What one caller does to a batch must not reach the next.
    again.x.fill_(0)
    again.target.fill_(0)
    assert same(draw(task, 1, split=split), kept)


@every_task
@pytest.mark.sample(6)
def test_another_index_seed_or_split_is_another_batch(name):
    task = small(name)
    batch = draw(task)
    for other in (draw(task, index=1), draw(task, split="full"), draw(task, split="test")):
        assert not same(batch, other)
    # A text that is read in its order has nothing to draw.
    assert same(batch, draw(task, seed=1)) == task.carried(1, 4, split="train")


@every_task
@pytest.mark.sample(6)
def test_drawing_leaves_the_global_generator_alone(name):
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    draw(small(name))
    assert torch.equal(torch.rand(2), wanted)


def test_no_two_batches_of_a_seed_share_a_stream():
    seeds = [stream(5, split, index, "cpu").initial_seed() for split in SPLITS for index in range(5000)]
    assert len(set(seeds)) == len(seeds)
    # torch's CPU generator reads 32 bits; what is above them would be lost.
    assert max(seeds) < 2**32


def test_seeds_and_purposes_have_streams_of_their_own():
    first = {stream(seed, "train", 0, "cpu", purpose).initial_seed() for seed in range(-9, 9) for purpose in ("batch", "order")}
    assert len(first) == 36


@every_task
@pytest.mark.sample(6)
def test_a_batch_has_the_declared_layout(name):
    task = small(name)
    batch = draw(task, size=5)
    T, B = batch.x.shape[:2]
    assert B == 5
    assert batch.x.is_contiguous()
    assert batch.x.dtype == (torch.int64 if batch.x.dim() == 2 else torch.float32)
    encoded = task.encoder()(batch.x)
    assert encoded.shape == (T, B, task.input_size, *frame_of(task, batch))
    assert len(frame_of(task, batch)) in (0, 2)
    assert batch.target.shape[0] == B or batch.target.shape[:2] == (T, B)
    if batch.mask is not None:
        assert batch.mask.dtype == torch.bool
        assert batch.mask.shape == batch.target.shape
    if batch.lengths is not None:
        assert batch.lengths.dtype == torch.int64
        assert 1 <= batch.lengths.min() <= batch.lengths.max() <= T


@every_task
@pytest.mark.sample(8)
def test_a_model_trains_on_it(name):
    task = small(name)
    batch = draw(task, size=3)
    rnn = small_stack(task, batch, 6)
    model = unfading.Model(task.encoder(), rnn, task.head(rnn.output_size))
    # The head of the gestures has five layers, which a large rate throws apart.
    optimiser = torch.optim.Adam(model.parameters(), lr=0.001 if name == "jester" else 0.03)
    losses = []
    for _ in range(4):
        prediction, _ = model(batch.x, lengths=batch.lengths)
        loss = task.loss(prediction, batch)
        assert loss.dim() == 0
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    metrics = task.metrics(prediction, batch)
    assert next(iter(metrics)) == task.metric
    assert all(value.dim() == 0 and value.isfinite() for value in metrics.values())
    assert task.weight(batch) >= 1


@every_task
def test_options_are_json_and_make_the_same_task(name):
    task = small(name)
    assert dataclasses.is_dataclass(task)
    options = json.loads(json.dumps(dataclasses.asdict(task)))
    assert type(task)(**options) == task
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.anything = 1


def behaviour(task):
    """All that an option can change: the batch, then the rest."""
    batch = draw(task)
    shape = task.head(2)(torch.zeros(*batch.x.shape[:2], 2, *frame_of(task, batch))).shape
    prediction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    carried = [task.carried(index, 4, split="train") for index in range(4)]
    modules = str(task.encoder()), str(task.head(2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values = [parameter.tolist() for parameter in task.encoder().parameters()]
    return batch, carried, shape, task.input_size, modules, values, task.loss(prediction, batch).item(), task.guess


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, field.name)
        for name, task in TASKS.items()
        for field in dataclasses.fields(task)
        if field.name not in ON_REAL_DATA
    ],
)
@pytest.mark.sample(25)
def test_every_option_changes_something(name, option):
    task = small(name)
    value = getattr(task, option)
    assert isinstance(value, bool) or option in OTHER, f"give {option} another value in OTHER"
    other = not value if isinstance(value, bool) else OTHER[option]
    batch, *rest = behaviour(task)
    other_batch, *other_rest = behaviour(small(name, **{option: other}, **BESIDE.get(option, {})))
    assert rest != other_rest or not same(batch, other_batch)


@every_task
@pytest.mark.sample(6)
def test_a_guess_is_a_score(name):
    task = small(name)
    assert 0 < task.guess < (1 if task.metric == "accuracy" else float("inf"))


@every_task
def test_splits_of_a_dataset_are_apart_and_whole(name):
    task = small(name)
    if not isinstance(task, Resident):
        assert (task.length("train", 4) is None) == (task.dataset is None)
        return
    train, valid, full = (set(task.rows(split).tolist()) for split in ("train", "valid", "full"))
    assert train
    assert valid
    assert not train & valid
    assert train | valid == full == set(range(len(full)))
    # A fifth, and the same one whatever is asked of it in between.
    assert abs(len(valid) - len(full) / 5) <= 1
    draw(task, seed=9)
    assert set(task.rows("valid").tolist()) == valid


RESIDENT = [name for name, task in TASKS.items() if issubclass(task, Resident)]


@dataclasses.dataclass(frozen=True)
class Numbered(Labelled):
    """Rows that are their own numbers; those of the test part from 1000 on."""

    paper = "none"
    input_size = 1
    classes = 2000

    def examples(self, part):
        n = torch.arange(53) if part == "train" else torch.arange(1000, 1017)
        return Examples(n.float().view(-1, 1, 1), n)


def seen(split, size, seed=0, epoch=0):
    """The rows that come in a pass, in their order."""
    task = Numbered()
    batches = task.length(split, size)
    got = [task.batch(epoch * batches + i, size, split=split, seed=seed, device="cpu").target for i in range(batches)]
    return torch.cat(got).tolist()


@pytest.mark.parametrize("size", [1, 4, 10, 42, 43, 100])
def test_an_epoch_shows_each_row_at_most_once_and_evaluation_each_row_in_order(size):
    train, valid = Numbered().rows("train").tolist(), Numbered().rows("valid").tolist()
    epochs = [seen("train", size, epoch=epoch) for epoch in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == (len(train) // size * size or len(train))
        assert set(epoch) <= set(train)
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2]
    assert seen("train", size, seed=1) != epochs[0]
    assert seen("valid", size) == valid == seen("valid", size, seed=5)
    assert seen("test", size) == list(range(1000, 1017))
    assert set(seen("full", size)) & set(valid)


def test_rows_left_over_in_one_epoch_come_in_another():
    assert set().union(*(seen("train", 10, epoch=epoch) for epoch in range(20))) == set(Numbered().rows("train").tolist())


DRAW_IN_ANOTHER_PROCESS = """
from unfading.tasks import Adding, Copying
batches = [task.batch(5, 4, split="train", seed=2, device="cpu") for task in (Adding(10), Copying(7))]
print([part.tolist() for batch in batches for part in batch[:2]])
"""


def test_a_worker_draws_what_the_main_process_draws():
    answer = subprocess.run([sys.executable, "-c", DRAW_IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
    batches = [task.batch(5, 4, split="train", seed=2, device="cpu") for task in (small("adding"), small("copying"))]
    assert answer.stdout.strip() == str([part.tolist() for batch in batches for part in batch[:2]])


# Of moving digits the movement is drawn batch by batch, and with it the target.
@pytest.mark.parametrize("name", [name for name in RESIDENT if not issubclass(TASKS[name], MovingDigits)])
@pytest.mark.sample(5)
def test_means_over_uneven_batches_combine_by_weight(name):
    task = small(name)
    n = len(task.rows("test"))
    rnn = (unfading.ConvLSTM if frame_of(task, draw(task)) else unfading.Elman)(task.input_size, 3)
    model = unfading.Model(task.encoder(), rnn, task.head(3))

    def score(size):
        total, weights = 0.0, 0
        for index in range(task.length("test", size)):
            batch = draw(task, index, size, split="test")
            # Noise is drawn batch by batch, and here it must not be what differs.
            x = batch.x if batch.target.shape == batch.x.shape[:2] else batch.x[:20]
            value = task.metrics(torch.sin(9.0 * model.head(rnn(model.encoder(x))[0])), batch)[task.metric]
            total += value.item() * task.weight(batch)
            weights += task.weight(batch)
        return total / weights

    assert task.length("test", n - 1) == 2
    assert score(n - 1) == pytest.approx(score(n), rel=1e-5)


def answers(task, split):
    """The answers of a pass that count, in one row."""
    batches = [draw(task, index, 1, split=split) for index in range(task.length(split, 1))]
    return torch.cat([batch.target.flatten() if batch.mask is None else batch.target[batch.mask] for batch in batches])


@pytest.mark.parametrize("name", RESIDENT)
@pytest.mark.sample(4)
def test_a_guess_is_the_share_of_the_commonest_class(name):
    task = small(name)
    if not isinstance(task, Labelled):
        pytest.skip(f"{name} has no classes")
    train, test = (answers(task, split) for split in ("train", "test"))
    common = Counter(train.tolist()).most_common(1)[0][0]
    assert task.guess == pytest.approx((test == common).double().mean().item())


def test_another_data_folder_is_another_dataset(tmp_path, monkeypatch):
    from tests.helpers import made_data

    task = small("pixel_mnist")
    before = draw(task)
    made_data.lay_out(tmp_path, seed=1)
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    assert not same(draw(task), before)


CASES = {
    "split": (lambda: draw(small("adding"), split="tset"), ValueError, "unknown split 'tset'. Did you mean 'test'"),
    "split of a dataset": (lambda: draw(small("digits"), split="validation"), ValueError, "unknown split 'validation'"),
    "index": (lambda: draw(small("adding"), index=-1), ValueError, "index must be at least 0; got -1"),
    "index of a dataset": (lambda: draw(small("digits"), index=-1), ValueError, "index must be at least 0; got -1"),
    "index too large": (lambda: draw(small("adding"), index=2**30), ValueError, r"index must be below 2\^30; got 1073741824"),
    "past the end": (
        lambda: draw(small("digits"), index=3, size=4, split="test"),
        ValueError,
        "test has 3 batches of 4; got index 3. Last: 2",
    ),
    "size": (lambda: draw(small("adding"), size=0), ValueError, "size must be at least 1; got 0"),
    "size of a dataset": (lambda: draw(small("digits"), size=0), ValueError, "size must be at least 1; got 0"),
    "seed": (lambda: draw(small("adding"), seed=0.5), TypeError, r"seed must be an int; got 0.5 \(float\)"),
    "adding": (lambda: small("adding", T=1), ValueError, "T must be at least 2; got 1. Nearest valid: 2"),
    "adding kind": (lambda: small("adding", T=10.0), TypeError, "T must be an int of at least 2; got 10.0"),
    "copying": (lambda: small("copying", T=0), ValueError, "T must be at least 1; got 0"),
    "items": (lambda: small("copying", items=0), ValueError, "items must be at least 1"),
    "symbols": (lambda: small("copying", symbols=0), ValueError, "symbols must be at least 1"),
    "keep": (lambda: small("copying", keep=0), ValueError, "keep must be at least 1"),
    "denoising": (lambda: small("denoising", T=9), ValueError, "a step to each of the 10 items; got T=9. Nearest: 10"),
    "noisy start": (
        lambda: small("noisy_mnist", T=35, start=8),
        ValueError,
        "start must be at most 7, so that the 28 rows of the image fit into the 35 steps of the first training batch; got 8. "
        "Use a smaller start or a larger T.",
    ),
    "noisy start name": (lambda: small("noisy_mnist", start="end"), ValueError, "unknown start 'end'"),
    "warm-up alone": (lambda: small("noisy_mnist", warmup_T=30), ValueError, "warmup_T=30 has no effect with warmup_batches=0"),
    "growth alone": (lambda: small("noisy_mnist", growth_batches=5), ValueError, "need warmup_T.*got warmup_T=None, .*=5"),
    "warm-up count": (
        lambda: small("noisy_mnist", warmup_T=30, warmup_batches=-1),
        ValueError,
        "warmup_batches must be at least 0; got -1",
    ),
    "growth count": (lambda: small("noisy_mnist", warmup_T=30, growth_batches=0.5), TypeError, "growth_batches must be an int"),
    "short warm-up": (
        lambda: small("noisy_mnist", warmup_T=27, warmup_batches=1),
        ValueError,
        "warmup_T must be at least 28; got 27",
    ),
    "long warm-up": (lambda: small("noisy_mnist", warmup_T=35, warmup_batches=1), ValueError, "warmup_T must be below T = 35"),
    "start past the warm-up": (
        lambda: small("noisy_mnist", T=60, start=8, warmup_T=35, warmup_batches=1),
        ValueError,
        "start must be at most 7, so that the 28 rows of the image fit into the 35 steps of the first training batch; got 8. "
        "Use a smaller start or a larger warmup_T.",
    ),
    "noisy mnist": (lambda: small("noisy_mnist", T=27), ValueError, "T must be at least 28; got 27"),
    "digit size": (
        lambda: small("moving_mnist", digit_size=8),
        ValueError,
        "digit_size must divide 28.*got 8. Nearest valid: 7",
    ),
    "frame size": (
        lambda: small("moving_mnist", size=7),
        ValueError,
        "size must be larger than digit_size=7.*got 7. Nearest valid: 8",
    ),
    "speed": (lambda: small("moving_mnist", speed=0.5), ValueError, "speed must be at least 1 pixel a step.*got 0.5"),
    "digits": (lambda: small("moving_mnist", digits=0), ValueError, "digits must be at least 1; got 0"),
    "scale": (lambda: small("pixel_mnist", scale="standart"), ValueError, "Did you mean 'standard'"),
    "validation": (lambda: small("pixel_mnist", validation="half"), ValueError, "unknown validation 'half'"),
    "permutation": (lambda: small("permuted_mnist", permutation="nur"), ValueError, "Did you mean 'nru'.*Or give a seed"),
    "permutation seed": (lambda: small("permuted_mnist", permutation=-1), ValueError, "permutation must be at least 0"),
    "one hot": (lambda: unfading.tasks.base.OneHot(0), ValueError, "symbols must be at least 1"),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), CASES.values(), ids=CASES.keys())
def test_bad_input_gets_one_sentence(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.dataset is not None])
def test_a_missing_dataset_is_named_with_the_way_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr(store, "find_spec", lambda package: None)
    with pytest.raises(FileNotFoundError, match=r"Set UNFADING_DATA to the folder that has it, or get it") as caught:
        draw(small(name))
    assert repr(TASKS[name].dataset) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_task_is_exported():
    assert {task.__name__ for task in TASKS.values()} == set(unfading.tasks.__all__)
    assert all(issubclass(getattr(unfading.tasks, name), Task) for name in unfading.tasks.__all__)


def test_the_earlier_names_of_the_metric_are_read():
    class Earlier(Adding):
        measure = "accuracy"
        rising = True

    assert (Earlier.metric, Earlier.higher_is_better) == ("accuracy", True)
    assert (Adding.metric, Adding.higher_is_better) == ("mse", False)
