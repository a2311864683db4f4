"""Fleets: every model of a fleet is trained exactly as it would be alone, whatever the other models do."""

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.trained import OWN, changed, fleet, small, untimed, weights
from tests.helpers.variants import hidden_size, name, sampled
from unfading import Run, catalogue, train
from unfading.backends import choose as backend
from unfading.fuse.fused import fused
from unfading.training.fleet import Fleet
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions

# Twenty steps in float64 with sums in another order; training amplifies the differences.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
STEPS = 20
# Fields in which runs of a fleet may differ.
DIFFERENT = [
    {"seed": 0, "rate": 0.01},
    {
        "seed": 1,
        "rate": 0.002,
        "steps": 13,
        "clip_norm": 0.05,
        "schedule": "cosine",
        "schedule_options": {"warmup": 0.4},
    },
    {
        "seed": 2,
        "rate": 0.03,
        "rates": {"head.*": 0.1},
        "clip_norm": None,
        "schedule": "step",
        "schedule_options": {"every": 5},
    },
    {"seed": 0, "rate": 0.01, "clip_norm": None, "clip_value": 0.001, "steps": 17},
]


def fleet_runs(**fields):
    base = small(**{"dtype": "float64", "steps": STEPS, "valid_every": 10, **fields})
    return [changed(base, **each) for each in DIFFERENT]


def each_is_its_single_run(runs, tmp_path, **keywords):
    for run, (got, record) in zip(runs, fleet(runs, tmp_path / "together", **keywords), strict=True):
        single = train(run, tmp_path / "alone")
        for part, expected in weights(tmp_path / "alone" / run.key).items():
            assert_close(got[part], expected, **CLOSE)
        for what in ("status", "reason", "steps", "returns"):
            assert record[what] == single[what]
        close_enough(record["curve"], single["curve"])
        close_enough(record["test"], single["test"])
        assert record["together"] == len(runs)


def close_enough(got, expected):
    """Assert that two JSON values agree, with numbers equal to 1e-9."""
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for a, b in zip(untimed(got), untimed(expected), strict=True):
            close_enough(a, b)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            close_enough(got[key], expected[key])
    else:
        assert got == (expected if expected is None else pytest.approx(expected, rel=1e-8, abs=1e-9))


FEW = {"STAR", "LSTM", "IncrementalRNN", "UnitaryRNN"}


@pytest.mark.parametrize("cell", sampled(catalogue.cells(), FEW))
@pytest.mark.sample(2)
def test_each_model_of_a_fleet_equals_its_single_run(cell, tmp_path):
    each_is_its_single_run(fleet_runs(cell=name(cell), hidden=hidden_size(cell)), tmp_path)


KINDS = {
    "one after the other": ({}, {"together": False}),
    "sgd": ({"optimiser": "sgd", "optimiser_options": {"momentum": 0.9, "l2": 0.1}}, {}),
    "amsgrad": ({"optimiser": "amsgrad", "optimiser_options": {"weight_decay": 0.1}}, {}),
    "rmsprop": ({"optimiser": "rmsprop"}, {}),
    "two layers, both ways": ({"layers": 2, "cell_options": {"bidirectional": True}}, {}),
    "tokens, one hot": ({"task": "copying", "task_options": {"T": 3, "items": 2}}, {}),
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
    "a mask of one length": ({"task": "variable_copying", "task_options": {"T": 4, "items": 2}}, {}),
    "rows of several lengths": ({"task": "variable_copying", "task_options": {"T": 4, "items": 2, "per_row": True}}, {}),
    "a mask": ({"task": "denoising", "task_options": {"T": 4, "items": 2}}, {}),
    "truncated": ({"truncate": 2}, {}),
    "penalty": ({"cell": "SoftOrthogonalRNN"}, {}),
    "learnt state": ({"cell_options": {"learn_initial_state": True}}, {}),
    "in segments": ({"cell_options": {"checkpoint_every": 2}}, {}),
    "compressed": ({"compress": {"sparsity": 0.5, "bits": 8}}, {}),
    "float32": ({"dtype": "float32", "rate": 0.001}, {}),
}


# Those that others contain: another optimiser, a mask of another form.
CONTAINED = ("amsgrad", "rmsprop", "tokens, one hot", "a mask of one length", "a mask", "learnt state")


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [pytest.param(*KINDS[kind], id=kind, marks=pytest.mark.long if kind in CONTAINED else []) for kind in KINDS],
)
@pytest.mark.sample(4)
def test_a_fleet_equals_single_runs_for_all_kinds_of_settings(fields, keywords, tmp_path, monkeypatch):
    if fields.get("dtype") == "float32":
        # Twenty steps in float32, each off by some units in the last place; Adam divides small numbers by small numbers.
        monkeypatch.setitem(CLOSE, "rtol", 1e-3)
        monkeypatch.setitem(CLOSE, "atol", 1e-3)
        monkeypatch.setattr("tests.training.test_fleet.close_enough", lambda got, expected: None)
    each_is_its_single_run(fleet_runs(**fields), tmp_path, **keywords)


@pytest.mark.parametrize("task", ["moving_mnist", "moving_mnist_direction"])
def test_a_fleet_over_frames_equals_single_runs(task, made, tmp_path):
    frames = {"task": task, "task_options": {"T": 3, "size": 5, "digit_size": 4}}
    each_is_its_single_run(fleet_runs(**frames, cell="ConvSTAR", layers=2)[:3], tmp_path)


def test_the_state_of_a_text_is_carried_in_each_model(made, tmp_path):
    run = Run(
        task="ptb_characters",
        task_options={"steps": 7, "embedding": 3},
        cell="LSTM",
        hidden=3,
        batch=4,
        steps=8,
        valid_every=4,
        dtype="float64",
        backend="reference",
    )
    each_is_its_single_run([run, changed(run, seed=1, rate=0.01)], tmp_path)


def test_each_model_keeps_its_own_buffers():
    runs = fleet_runs(cell="UnitaryRNN", hidden=5)
    models = [run.make_model() for run in runs]
    buffers = [dict(model.named_buffers()) for model in models]
    assert any(not torch.equal(buffers[0][key], buffers[1][key]) for key in buffers[0])
    task = runs[0].make_task()
    batch = task.batch(0, 4, split="valid", seed=0, device="cpu")
    apart = [Fleet([run.make_model()], task, together=False).scores(batch, None, 0)[0]["mse"].item() for run in runs]
    together, _, _ = Fleet(models, task, together=True).scores(batch, None, 0)
    assert together["mse"].tolist() == pytest.approx(apart, rel=1e-12)
    assert len(set(apart)) > 1


def test_parameters_are_views_of_one_matrix():
    models = [run.make_model() for run in fleet_runs(layers=2)]
    fleet = Fleet(models, fleet_runs()[0].make_task(), together=True)
    fleet.w.fill_(3.0)
    fleet.g.fill_(2.0)
    for model in models:
        assert all((parameter == 3.0).all() and (parameter.grad == 2.0).all() for parameter in model.parameters())


def test_a_fleet_ends_when_all_its_models_have_reached_their_target():
    runs = [changed(small(steps=40, valid_every=4, rate=0.05), seed=seed) for seed in range(3)]
    whole = train_together(runs)
    curves = [{row["step"]: row["valid"]["mse"] for row in record["curve"] if "valid" in row} for record in whole]
    target = max(min(score for step, score in curve.items() if step <= 20) for curve in curves)  # all reach it by then
    firsts = [min(step for step, score in curve.items() if score <= target) for curve in curves]
    records = train_together([changed(run, stop_at=target) for run in runs])
    assert [record["steps"] for record in records] == firsts
    assert max(firsts) <= 20
    assert len(set(firsts)) > 1


def test_batches_of_several_shapes_are_taken_model_by_model():
    runs = fleet_runs()
    batches = [
        Run.from_json({**run.to_json(), "task_options": {"T": T}}).make_task().batch(0, 4, split="train", seed=T, device="cpu")
        for run, T in zip(runs, (5, 7, 6, 5), strict=True)
    ]
    together, apart = (Fleet([run.make_model() for run in runs], runs[0].make_task(), together=flag) for flag in (True, False))
    losses, expected = (each.gradients(batches, None, 0, None)[0] for each in (together, apart))
    assert_close(losses, expected)
    assert_close(together.g, apart.g)
    assert together.g.abs().sum(dim=1).min() > 0


def test_models_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"must have parameters of equal shapes. Train these separately"):
        Fleet([small(hidden=hidden).make_model() for hidden in (3, 4)], small().make_task(), together=True)


OTHERWISE = {
    "batch": 5,
    "optimiser": "sgd",
    "optimiser_options": {"l2": 0.1},
    "task_options": {"T": 7},
    "task": "denoising",
    "cell": "JANET",
    "cell_options": {"shift": 1.0},
    "hidden": 4,
    "layers": 2,
    "truncate": 2,
    "split": "full",
    "valid_batches": 3,
    "valid_every": 5,
    "compress": {"bits": 8},
    "dtype": "float64",
    "backend": "auto",
}


@pytest.mark.parametrize("field", OTHERWISE)
def test_runs_of_different_shapes_are_refused(field, tmp_path):
    """A fleet has one optimiser, one batch size and one task; a run with another would be trained with the wrong settings."""
    beside = {"task": {"task_options": {"T": 12}}, "split": {"valid_every": None}}.get(field, {})
    runs = [small(), small(**{**beside, field: OTHERWISE[field], "seed": 1})]
    with pytest.raises(ValueError, match=f"trained together.*{field}"):
        train_together(runs, TrainOptions(tmp_path))
    assert not list(tmp_path.iterdir())


def breaking(**fields):
    return small(
        **{"task": f"{OWN}:Breaks", "task_options": {"at": 7, "above": 3.0}, "dtype": "float64", "steps": STEPS, **fields}
    )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.sample(2)
def test_a_model_that_diverges_does_not_affect_the_others(together, retries, tmp_path):
    """The loss is not finite where predictions are large, which happens only at a high rate."""
    runs = [breaking(seed=seed, rate=rate, retries=retries) for seed, rate in ((0, 1e-3), (1, 3.0), (2, 2e-3))]
    runs[2] = changed(runs[2], steps=12)
    records = train_together(runs, TrainOptions(tmp_path), together=together)
    assert [record["status"] for record in records] == ["finished", "diverged", "finished"]
    assert [record["returns"] for record in records] == [0, retries, 0]
    for run in runs:
        single = train(run, tmp_path / "alone")
        for part, expected in weights(tmp_path / "alone" / run.key).items():
            assert_close(weights(tmp_path / run.key)[part], expected, **CLOSE)
        assert single["reason"] == records[runs.index(run)]["reason"]


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.sample(1)
def test_a_model_that_returned_once_continues_as_it_would_alone(how, tmp_path):
    """Parameters whose sizes leave gaps in a row of gradients: numbers that are not finite must not stay in the gaps."""
    options = {"at": 7, "times": 1, "how": how}
    runs = [breaking(task_options=options, seed=seed, retries=2, hidden=5) for seed in range(3)]
    each_is_its_single_run(runs, tmp_path)
    assert [record["returns"] for _, record in fleet(runs, tmp_path / "again")] == [1, 1, 1]


def test_every_model_draws_its_own_noise(monkeypatch):
    make = Run.make_model
    monkeypatch.setattr(Run, "make_model", lambda run: make(changed(run, seed=0)))
    runs = [small(task=f"{OWN}:Same", task_options={}, cell_options={"zoneout": 0.5}, seed=seed, steps=2) for seed in range(3)]
    assert len({record["curve"][0]["loss"] for record in train_together(runs)}) == 3


@pytest.mark.parametrize("cell", ["STAR", "NRU"])
def test_a_pass_of_many_models_runs_compiled(cell, monkeypatch):
    runs = [Run(task="adding", task_options={"T": 5}, cell=cell, hidden=4, batch=3, steps=2, seed=seed) for seed in (0, 1)]
    task, taken = runs[0].make_task(), []
    fleet = Fleet([run.make_model() for run in runs], task, together=True)
    choose = backend.choose
    monkeypatch.setattr(backend, "choose", lambda *given: taken.append(choose(*given)) or taken[-1])
    batches = [task.batch(0, 3, split="train", seed=seed, device="cpu") for seed in (0, 1)]
    fleet.train()
    fleet.gradients(batches, None, 0, None)
    fleet.eval()
    fleet.scores(batches[0], None, 0)
    assert [implementation.func for implementation in taken] == [fused, fused]
