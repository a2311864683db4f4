"""Training: equal to a loop written by hand, reproducible, selected by validation only, and truncated as asked."""

from math import cos, pi

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree

import unfading
from tests.helpers.trained import OTHER, OWN, WITH, changed, small, train_outcome, untimed, weights
from unfading import Run, catalogue, train
from unfading.tasks import Adding

# float64; the same operations, some of them in another order, over a few dozen steps.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def by_hand(run, make=torch.optim.Adam, clip=lambda parameters: None, schedule=None, factors=None):
    """Train the run in a loop written with torch: the final weights, and the losses."""
    model, task = run.make_model(), run.make_task()
    groups = [{"params": [p], "lr": run.rate * (factors or {}).get(name, 1.0)} for name, p in model.named_parameters()]
    optimiser = make(groups, lr=run.rate)
    scheduler = None if schedule is None else schedule(optimiser)
    losses, state, start = [], None, 0
    for step in range(run.total()):
        batch = task.batch(step, run.batch, split="train", seed=run.seed, device="cpu")
        x, target = (part.to(model.head.answer.weight.dtype) if part.is_floating_point() else part for part in batch[:2])
        if not task.carried(step, run.batch, split="train"):
            state, start = None, 0
        prediction, state = model(x, state, lengths=batch.lengths, start=start, truncate=run.truncate)
        state, start = unfading.detach(state), start + len(x)
        loss = task.loss(prediction, batch._replace(x=x, target=target))
        penalty = model.rnn.penalty()
        optimiser.zero_grad()
        (loss if penalty is None else loss + penalty).backward()
        clip(list(model.parameters()))
        optimiser.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return {f"model.{name}": part for name, part in model.state_dict().items()}, losses


EXACTLY = {"dtype": "float64", "clip_norm": None}
BY_HAND = {
    "plain": ({}, {}),
    "clip by norm": ({"clip_norm": 0.05}, {"clip": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.05)}),
    "clip by value": ({"clip_value": 0.01}, {"clip": lambda p: torch.nn.utils.clip_grad_value_(p, 0.01)}),
    "cosine": ({"schedule": "cosine"}, {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 24)}),
    "cosine after a warm-up": (
        {"schedule": "cosine", "schedule_options": {"warmup": 0.25}},
        {"schedule": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1, (s + 1) / 6) * cos(pi * s / 48) ** 2)},
    ),
    "rates": (
        {"rates": {"W_h": 0.1, "head.*": 0.0}},
        {"factors": {"rnn.cells.0.W_h": 0.1, "head.answer.weight": 0, "head.answer.bias": 0}},
    ),
    "sgd": (
        {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9, "l2": 0.1}},
        {"make": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=0.1)},
    ),
    "rmsprop": ({"optimiser": "rmsprop"}, {"make": torch.optim.RMSprop}),
    "adamw": (
        {"optimiser_options": {"weight_decay": 0.1}},
        {"make": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)},
    ),
    "amsgrad": ({"optimiser": "amsgrad"}, {"make": lambda groups, lr: torch.optim.Adam(groups, lr=lr, amsgrad=True)}),
    "two layers": ({"layers": 2, "cell": "LSTM"}, {}),
    "both ways": ({"cell_options": {"bidirectional": True}}, {}),
    "learnt state": ({"cell": "GRU", "cell_options": {"learn_initial_state": True}}, {}),
    "penalty": ({"cell": "SoftOrthogonalRNN"}, {}),
    "truncated": ({"truncate": 2}, {}),
    "tokens": ({"task": "copying", "task_options": {"T": 3, "items": 2}}, {}),
    "carried": ({"task": "copying", "task_options": {"T": 3, "items": 2, "keep": 5}}, {}),
    "carried eta": (
        {
            "task": "copying",
            "task_options": {"T": 3, "items": 2, "keep": 3},
            "cell": "IncrementalRNN",
            "cell_options": {"steps": 15},
        },
        {},
    ),
    "rows of several lengths": ({"task": "variable_copying", "task_options": {"T": 4, "items": 2, "per_row": True}}, {}),
}


@pytest.mark.parametrize(("fields", "parts"), BY_HAND.values(), ids=BY_HAND)
@pytest.mark.sample(7)
def test_a_run_equals_a_loop_written_by_hand(fields, parts, tmp_path):
    run = small(**{**EXACTLY, **fields})
    record = train(run, tmp_path)
    expected, losses = by_hand(run, **parts)
    got = weights(tmp_path / run.key)
    assert got.keys() == expected.keys()
    for name in expected:
        assert_close(got[name], expected[name], **EXACT)
    assert [row["loss"] for row in record["curve"]] == pytest.approx(losses, rel=1e-9)
    assert record["steps"] == 24
    if "rates" in fields:
        begin = run.make_model().state_dict()
        assert torch.equal(got["model.head.answer.weight"], begin["head.answer.weight"])


def test_an_epoch_follows_the_order_of_the_task_and_carries_the_state(made, tmp_path):
    run = Run(
        task="ptb_characters", task_options={"steps": 9, "embedding": 2}, cell="LSTM", hidden=3, batch=5, epochs=2, **EXACTLY
    )
    train(run, tmp_path)
    expected, _ = by_hand(run)
    for name, part in weights(tmp_path / run.key).items():
        assert_close(part, expected[name], **EXACT)


NOISY = {"layers": 2, "cell_options": {"dropout": 0.3, "zoneout": 0.2, "recurrent_dropout": 0.2}}


@pytest.mark.parametrize("fields", [{}, NOISY], ids=["plain", "noisy"])
def test_the_same_seed_gives_the_same_run_bit_for_bit(fields, tmp_path):
    run = small(**fields)
    first = train_outcome(run, tmp_path / "a")
    torch.manual_seed(77)
    assert train_outcome(run, tmp_path / "b") == first
    assert train_outcome(changed(run, seed=1), tmp_path / "c") != first


def test_every_seed_draws_its_own_noise(monkeypatch):
    """Weights and rows are those of one seed; only the noise can differ."""
    make = Run.make_model
    monkeypatch.setattr(Run, "make_model", lambda run: make(changed(run, seed=0)))

    def losses(seed):
        run = small(steps=3, task=f"{OWN}:Same", task_options={}, cell_options={"zoneout": 0.5}, seed=seed)
        return [row["loss"] for row in train(run)["curve"]]

    assert losses(2) == losses(2)
    assert len({losses(seed)[0] for seed in (0, 1, 2, 2**40)}) == 4


def test_training_does_not_change_the_global_generator_or_the_default_dtype():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    train(small(**NOISY, dtype="float64"))
    assert torch.equal(torch.rand(2), wanted)
    assert torch.get_default_dtype() == torch.float32


# Fields that do not change the weights, and the part of the record that they change.
IN_RECORD = {
    "valid_batches": lambda record: record["best"]["valid"],
    "retries": lambda record: record["run"],
    "backend": lambda record: record["run"],
    "valid_every": lambda record: [row["step"] for row in record["curve"] if "valid" in row],
    "stop_at": lambda record: record["steps"],
    "patience": lambda record: record["steps"],
    "select_by": lambda record: record["run"],  # the loss of this task is its metric
}
# Fields that change shapes, so that weights cannot be compared.
SHAPES = {"task", "cell", "cell_options", "hidden", "layers", "dtype"}


@pytest.mark.parametrize("name", [name for name in OTHER if name not in ("device", "epochs", "split")])
@pytest.mark.sample(9)
def test_every_field_changes_the_result_or_the_record(name, tmp_path):
    base = small(cell_options={} if name == "cell" else {"max_lag": 4}, task_options={"T": 6 if name == "task_options" else 12})
    base = changed(base, **WITH.get(name, {}))
    other = changed(base, **{name: {"stop_at": 10.0, "valid_batches": 3, "patience": 1}.get(name, OTHER[name])})
    one, two = train(base, tmp_path), train(other, tmp_path)
    if name in IN_RECORD:
        assert IN_RECORD[name](one) != IN_RECORD[name](two)
        return
    first, second = weights(tmp_path / base.key), weights(tmp_path / other.key)
    moved = [
        part
        for part in first
        if part not in second or first[part].shape != second[part].shape or (first[part] != second[part]).any()
    ]
    assert moved
    assert untimed(one["curve"]) != untimed(two["curve"])


def test_a_named_backend_runs_or_raises_an_error_with_the_reason():
    run = small(cell="STAR", backend="fused", **EXACTLY)
    assert train(run)["test"]["mse"] == pytest.approx(train(changed(run, backend="reference"))["test"]["mse"], rel=1e-9)
    with pytest.raises(RuntimeError, match="cannot run fused"):
        train(small(cell=f"{OWN}:SortedCell", backend="fused"))


@pytest.mark.parametrize("fields", [{}, NOISY], ids=["plain", "noisy"])
def test_evaluations_do_not_change_training(fields, tmp_path):
    runs = [small(**fields, valid_every=every) for every in (1, 7, 24)]
    records = [train(run, tmp_path) for run in runs]
    first = weights(tmp_path / runs[0].key)
    for run in runs[1:]:
        for name, part in weights(tmp_path / run.key).items():
            assert torch.equal(part, first[name]), name
    # The same weights have the same scores at every evaluation: evaluations have no noise.
    scores = [record["curve"][-1]["valid"] for record in records]
    assert scores[0] == scores[1] == scores[2]


def test_scores_are_means_over_the_whole_split(made, tmp_path):
    run = Run(task="digits", cell="STAR", hidden=3, batch=3, epochs=1, dtype="float64")
    record = train(run, tmp_path)
    task, model = run.make_task(), run.make_model()
    for split, name in (("valid", "last"), ("test", "best")):
        chosen = weights(tmp_path / run.key, name)
        model.load_state_dict({key.removeprefix("model."): part for key, part in chosen.items()})
        rows = len(task.rows(split))
        batch = task.batch(0, rows, split=split, seed=0, device="cpu")
        prediction, _ = model(batch.x.double())
        got = record["curve"][-1]["valid"] if split == "valid" else record["test"]
        assert got["loss"] == pytest.approx(task.loss(prediction, batch).item(), rel=1e-9)
        assert got["accuracy"] == pytest.approx((prediction.argmax(1) == batch.target).double().mean().item(), rel=1e-9)
        assert rows % 3


def test_scores_have_no_noise(tmp_path):
    run = small(**NOISY, dtype="float64")
    record = train(run, tmp_path)
    model, task = run.make_model().eval(), run.make_task()
    for split, name in (("valid", "last"), ("test", "best")):
        chosen = weights(tmp_path / run.key, name)
        model.load_state_dict({key.removeprefix("model."): part for key, part in chosen.items()})
        batch = task.batch(0, run.batch, split=split, seed=0, device="cpu")
        expected = task.loss(model(batch.x.double())[0], batch._replace(target=batch.target.double())).item()
        got = record["curve"][-1]["valid"] if split == "valid" else record["test"]
        assert got["mse"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["Worsens", "Rises"])
def test_the_best_weights_by_validation_are_tested(kind, tmp_path):
    run = small(task=f"{OWN}:{kind}", task_options={}, valid_every=4, rate=0.02, dtype="float64", valid_batches=10)
    record = train(run, tmp_path)
    scores = {row["step"]: row["valid"]["mse"] for row in record["curve"] if "valid" in row}
    assert list(scores) == [4, 8, 12, 16, 20, 24]
    assert record["best"] == {"step": 4, "valid": record["curve"][3]["valid"]}
    assert (max if kind == "Rises" else min)(scores.values()) == scores[4]
    # The last weights have a better test score, and are not chosen for it.
    early = train(changed(run, steps=4))
    assert record["test"] == early["test"]
    whole = train(changed(run, valid_every=24))
    assert abs(whole["test"]["mse"]) < 0.9 * abs(record["test"]["mse"])
    best, last = weights(tmp_path / run.key, "best"), weights(tmp_path / run.key)
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_of_equal_scores_the_first_stays_the_best(tmp_path):
    run = small(task=f"{OWN}:Level", task_options={}, valid_every=4)
    assert train(run)["best"]["step"] == 4


def spied(monkeypatch, kind):
    batches, batch = [], kind.batch

    def spy(task, index, size, **keywords):
        batches.append((keywords["split"], index, keywords["seed"]))
        return batch(task, index, size, **keywords)

    monkeypatch.setattr(kind, "batch", spy)
    return batches


def test_the_test_rows_are_read_once_at_the_end(monkeypatch):
    batches = spied(monkeypatch, Adding)
    train(small(valid_every=8, valid_batches=3, seed=5))
    assert [split for split, _, _ in batches[-3:]] == ["test"] * 3
    assert {split for split, _, _ in batches[:-3]} == {"train", "valid"}
    # The first batches of training and validation are examined before the first step.
    assert [index for split, index, _ in batches if split == "train"] == [0, *range(24)]
    assert [index for split, index, _ in batches if split == "valid"] == [0, *[0, 1, 2] * 3]
    # Every run is evaluated on the same rows, whatever its seed.
    assert {seed for split, _, seed in batches if split == "train"} == {5}
    assert len({seed for split, _, seed in batches if split != "train"}) == 1


def test_full_trains_on_all_rows_and_tests_the_last_weights(made, monkeypatch, tmp_path):
    run = Run(task="digits", cell="STAR", hidden=3, batch=4, epochs=2, split="full")
    batches = spied(monkeypatch, type(run.make_task()))
    record = train(run, tmp_path)
    assert {split for split, _, _ in batches} == {"full", "test"}
    assert record["best"] is None
    assert not any("valid" in row for row in record["curve"])
    assert not (tmp_path / run.key / "best.safetensors").exists()
    assert record["steps"] == 2 * run.make_task().length("full", 4)
    model, task = run.make_model(), run.make_task()
    model.load_state_dict({key.removeprefix("model."): part for key, part in weights(tmp_path / run.key).items()})
    rows = len(task.rows("test"))
    batch = task.batch(0, rows, split="test", seed=0, device="cpu")
    # float32, summed in another order.
    assert record["test"]["loss"] == pytest.approx(task.loss(model(batch.x)[0], batch).item(), rel=1e-5)


def test_the_weights_to_test_are_chosen_by_the_metric_or_by_the_loss(made, tmp_path):
    """Both have one curve, and the test score is that of the chosen weights."""
    fields = {"task": "digits", "cell": "STAR", "hidden": 6, "batch": 8, "epochs": 12, "rate": 0.3, "dtype": "float64"}
    by_metric, by_loss = (train(Run(**fields, select_by=name), tmp_path) for name in ("metric", "loss"))
    assert untimed(by_metric["curve"]) == untimed(by_loss["curve"])
    scores = {row["step"]: row["valid"] for row in by_loss["curve"] if "valid" in row}
    assert by_metric["best"]["step"] == max(scores, key=lambda step: scores[step]["accuracy"])
    assert by_loss["best"]["step"] == min(scores, key=lambda step: scores[step]["loss"])
    assert by_metric["best"]["step"] != by_loss["best"]["step"]
    assert by_loss["best"]["valid"] == scores[by_loss["best"]["step"]]
    assert by_metric["test"] != by_loss["test"]


def test_a_run_ends_when_a_score_reaches_stop_at(tmp_path):
    whole = train(small(valid_every=4, rate=0.05, steps=40, valid_batches=10))
    scores = {row["step"]: row["valid"]["mse"] for row in whole["curve"] if "valid" in row}
    enough = scores[16]
    record = train(small(valid_every=4, rate=0.05, steps=40, valid_batches=10, stop_at=enough), tmp_path)
    first = min(step for step, score in scores.items() if score <= enough)
    assert record["steps"] == first < 40
    assert record["status"] == "finished"
    assert record["best"]["step"] == first
    assert untimed(record["curve"]) == untimed(whole["curve"])[:first]


def test_an_evaluation_of_a_text_carries_the_state(made):
    """Evaluated in consecutive batches of 9 steps, the text is one sequence."""
    fields = {"task": "ptb_characters", "cell": "LSTM", "hidden": 3, "batch": 5, "steps": 1, "dtype": "float64"}
    short = train(Run(**fields, task_options={"steps": 9, "embedding": 2}, rate=1e-30))
    long = train(Run(**fields, task_options={"steps": 10_000, "embedding": 2}, rate=1e-30))
    assert short["test"] == pytest.approx(long["test"], rel=1e-12)


def model_and_rows(cell="LSTM", T=11):
    torch.manual_seed(0)
    rnn = getattr(unfading, cell)(2, 3, dtype=torch.float64)
    model = unfading.Model(torch.nn.Identity(), rnn, unfading.EveryStep(3, 2).double())
    return model, torch.randn(T, 4, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    "cell",
    ["LSTM", pytest.param("STAR", marks=pytest.mark.long), pytest.param("NRU", marks=pytest.mark.long), "IncrementalRNN"],
)
@pytest.mark.parametrize("every", [1, 4, 11, 50])
@pytest.mark.sample(2)
def test_truncate_keeps_the_prediction_and_cuts_the_gradient(cell, every):
    model, x = model_and_rows(cell)
    whole, final = model(x, start=3)
    cut, end = model(x, start=3, truncate=every)
    assert_close(cut, whole, **EXACT)
    for a, b in zip(_pytree.tree_leaves(end), _pytree.tree_leaves(final), strict=True):
        assert_close(a, b, **EXACT)
    weight = torch.randn_like(cut)
    got = torch.autograd.grad((weight * cut).sum(), list(model.parameters()))
    pieces = torch.cat([piece.output for piece in unfading.truncated(model, x, every, start=3)])
    expected = torch.autograd.grad((weight * pieces).sum(), list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, **EXACT)
    full = torch.autograd.grad((weight * whole).sum(), list(model.parameters()))
    same = all(torch.allclose(a, b) for a, b in zip(got, full, strict=True))
    assert same == (every >= 11)


def test_no_gradient_crosses_a_cut():
    model, x = model_and_rows()
    x.requires_grad_()
    prediction, _ = model(x, truncate=4)
    (reach,) = torch.autograd.grad(prediction[9].sum(), x)
    assert (reach[:8] == 0).all()
    assert (reach[8:10] != 0).any()
    state = unfading.detach(model(x)[1])
    begin = type(state)(*(part.requires_grad_() for part in state))
    prediction, _ = model(x, begin, truncate=4)
    # An initial state with a graph is detached too: gradients reach no further back than the first step.
    assert torch.autograd.grad(prediction.sum(), begin.h, allow_unused=True) == (None,)


def test_truncate_is_refused_if_no_state_can_be_carried():
    model, x = model_and_rows()
    with pytest.raises(ValueError, match=r"rows of different lengths cannot do. Leave it out"):
        model(x, lengths=torch.tensor([3, 4, 5, 11]), truncate=4)
    with pytest.raises(ValueError, match="truncate must be at least 1; got 0"):
        model(x, truncate=0)
    both = unfading.Model(torch.nn.Identity(), unfading.LSTM(2, 3, bidirectional=True), unfading.EveryStep(6, 2))
    with pytest.raises(ValueError, match="a bidirectional stack cannot do"):
        both(x.float(), truncate=4)


@pytest.mark.parametrize("name", catalogue.tasks())
def test_higher_is_better_gives_the_direction_of_the_metric(name, made):
    """A perfect answer scores better than a wrong one."""
    task = catalogue.tasks()[name]
    assert task.higher_is_better == (task.metric == "accuracy")


def test_a_listener_gets_every_log_row():
    updates = []
    record = train(small(steps=40, valid_every=10), listen=updates.append)
    reported = [(update.step, update.loss, update.valid, update.status) for update in updates]
    logged = [(row["step"], row["loss"], row.get("valid"), None) for row in record["curve"]]
    assert reported == [*logged, (40, record["curve"][-1]["loss"], None, "finished")]
    assert {update.total for update in updates} == {40}
