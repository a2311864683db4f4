"""`Run`: every field is checked, survives JSON and is part of the key; unknown names get a suggestion."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unfading
from tests.helpers.paths import ROOT
from tests.helpers.trained import OTHER, OWN, WITH, changed, small
from unfading import Run, catalogue
from unfading.papers import ledger
from unfading.training.learning_rate import SCHEDULES
from unfading.training.names import layer_class, parse, task_class
from unfading.training.optimise import OPTIMISERS
from unfading.training.settings import FIELDS
from unfading.training.user_code import read_code

QUIET = Path(__file__).parent.parent / "user" / "quiet.py"
every_field = pytest.mark.parametrize("name", FIELDS)


@every_field
def test_every_field_is_in_the_key_and_survives_json(name):
    base = (
        small(**WITH.get(name, {}) | ({"steps": 24} if name == "epochs" else {}))
        if name != "task"
        else small(task_options={"T": 12})
    )
    other = changed(base, **{**WITH.get(name, {}), name: OTHER[name]})
    assert getattr(other, name) == OTHER[name]
    assert other != base
    assert other.key != base.key
    again = Run.from_json(json.loads(json.dumps(other.to_json())))
    assert again == other
    assert again.key == other.key
    assert len(other.key) == 12
    assert int(other.key, 16) >= 0


def test_the_keys_of_committed_records_are_those_of_their_runs():
    """A setting that was added later leaves the keys of earlier runs as they were."""
    lines = [line for path in (ROOT / "benchmarks" / "results").glob("papers-*.jsonl") for line in ledger.read(path)]
    runs = {line["key"]: line["run"] for line in lines if line["kind"] == "run"}
    assert len(runs) > 400
    for key, run in runs.items():
        assert Run.from_json(run).key == key
        assert Run.from_json(run).to_json() == run


def test_a_field_that_is_left_out_of_a_file_has_its_default():
    assert Run.from_json({"task": "adding", "cell": "STAR", "steps": 3}) == Run(task="adding", cell="STAR", steps=3)


def test_1_and_1_0_are_the_same_rate_and_a_tuple_is_a_list():
    one = small(rate=1, rates={"W_h": 2}, clip_norm=3, stop_at=1)
    same = small(rate=1.0, rates={"W_h": 2.0}, clip_norm=3.0, stop_at=1.0)
    assert one == same == Run.from_json(one.to_json())
    assert one.key == same.key == Run.from_json(one.to_json()).key
    deep = small(cell="DeepTransition", cell_options={"network": (3, 4)})
    assert deep == Run.from_json(json.loads(json.dumps(deep.to_json())))
    assert deep.make_model() is not None


def test_a_run_copies_its_values_and_is_frozen():
    options = {"T": 6}
    run = small(task_options=options)
    key = run.key
    options["T"] = 9
    assert run.key == key
    run.to_json()["task_options"]["T"] = 9
    assert run.key == key
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 3


KEY = """
from unfading import Run
print(Run(task="adding", task_options={"T": 6}, cell="STAR", steps=3, rates={"a": 0.1, "b": 1}).key)
"""


@pytest.mark.parametrize("hash_seed", ["77"])
def test_the_key_is_the_same_in_every_process(hash_seed):
    command = [sys.executable, "-c", KEY]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed}
    )
    run = Run(cell="STAR", rates={"b": 1, "a": 0.1}, task="adding", steps=3, task_options={"T": 6})
    assert answer.stdout.strip() == run.key


CASES = {
    "task": ({"task": "ading"}, "unknown task 'ading'. Did you mean 'adding'"),
    "task kind": ({"task": 3}, r"task must be a str; got 3 \(int\)"),
    "task_options": ({"task_options": {"TT": 3}}, "unknown option of task adding 'TT'"),
    "task_options value": ({"task_options": {"T": 1}}, "task adding: T must be at least 2; got 1"),
    "task_options kind": ({"task_options": [1]}, "task_options must be a dict"),
    "cell": ({"cell": "STRA"}, "unknown cell 'STRA'. Did you mean 'STAR'"),
    "cell in small letters": ({"cell": "lstm"}, "unknown cell 'lstm'. Did you mean 'LSTM'"),
    "cell_options": ({"cell_options": {"max_leg": 3}}, "unknown option of cell STAR 'max_leg'. Did you mean 'max_lag'"),
    "cell_options reserved": ({"cell_options": {"batch_first": True}}, "cell_options cannot hold 'batch_first'"),
    "cell_options size": ({"cell_options": {"hidden_size": 3}}, "cell_options cannot hold 'hidden_size'"),
    "cell_options kind": ({"cell_options": None}, "cell_options must be a dict"),
    "cell_options no JSON": ({"cell_options": {"shift": torch.ones(2)}}, "cell_options must be of JSON values"),
    "cell_options nan": ({"cell_options": {"shift": math.nan}}, "cell_options must be of JSON values, its numbers finite"),
    "hidden": ({"hidden": 0}, "hidden must be at least 1; got 0"),
    "hidden kind": ({"hidden": 3.0}, "hidden must be an int of at least 1; got 3.0"),
    "layers": ({"layers": 0}, "layers must be at least 1"),
    "optimiser": ({"optimiser": "adamm"}, "unknown optimiser 'adamm'. Did you mean 'adam'"),
    "optimiser_options": ({"optimiser_options": {"momentun": 1}, "optimiser": "sgd"}, "Did you mean 'momentum'"),
    "optimiser_options value": ({"optimiser_options": {"b1": 2}}, r"optimiser adam: b1 must lie in \[0, 1\]; got 2"),
    "optimiser_options inf": ({"optimiser_options": {"l2": math.inf}}, "optimiser_options must be of JSON values"),
    "rate": ({"rate": 0}, "rate must be above 0; got 0"),
    "rate kind": ({"rate": "fast"}, "rate must be a number; got 'fast'"),
    "rate true": ({"rate": True}, "rate must be a number; got True"),
    "rate nan": ({"rate": math.nan}, "rate must be of JSON values, its numbers finite; got nan"),
    "rate inf": ({"rate": math.inf}, "rate must be of JSON values, its numbers finite; got inf"),
    "rates": ({"rates": {"W_h": -1}}, r"rates\['W_h'\] must be at least 0, which holds the parameter; got -1"),
    "rates kind": ({"rates": {"W_h": "x"}}, r"rates\['W_h'\] must be a number; got 'x'"),
    "rates nan": ({"rates": {"W_h": math.nan}}, "rates must be of JSON values, its numbers finite"),
    "schedule": ({"schedule": "cosin"}, "unknown schedule 'cosin'. Did you mean 'cosine'"),
    "schedule_options": ({"schedule": "step", "schedule_options": {"evry": 3}}, "Did you mean 'every'"),
    "schedule_options value": ({"schedule": "cosine", "schedule_options": {"floor": 2}}, "schedule cosine: floor must lie in"),
    "clip_norm": ({"clip_norm": 0}, "clip_norm must be above 0"),
    "clip_value": ({"clip_norm": None, "clip_value": -1.0}, "clip_value must be above 0"),
    "clip_norm and clip_value": (
        {"clip_value": 1.0},
        "clips by norm or by value; got clip_norm=1.0 and clip_value=1.0. Set one",
    ),
    "batch": ({"batch": 0}, "batch must be at least 1"),
    "steps": ({"steps": 0}, "steps must be at least 1"),
    "epochs": ({"epochs": -1}, "epochs must be at least 1"),
    "steps and epochs": ({"steps": 3, "epochs": 1}, "steps or epochs, one of the two; got steps=3 and epochs=1"),
    "neither": ({"steps": None}, "steps or epochs, one of the two; got steps=None and epochs=None"),
    "truncate": ({"truncate": 0}, "truncate must be at least 1"),
    "truncate both ways": ({"truncate": 2, "cell_options": {"bidirectional": True}}, "truncate=2 carries the state forward"),
    "split": ({"split": "valid"}, "unknown split 'valid'"),
    "split and valid_every": (
        {"split": "full", "valid_every": 3},
        "nothing is evaluated during training; got valid_every=3. Leave it",
    ),
    "valid_every": ({"valid_every": 0}, "valid_every must be at least 1"),
    "valid_batches": ({"valid_batches": 0}, "valid_batches must be at least 1"),
    "stop_at": ({"stop_at": "soon"}, "stop_at must be a number; got 'soon'"),
    "patience": ({"patience": 0}, "patience must be at least 1"),
    "split and stop_at": ({"split": "full", "stop_at": 0.1}, "nothing is evaluated during training; got stop_at=0.1"),
    "select_by": ({"select_by": "accuracy"}, "unknown select_by 'accuracy'"),
    "split and select_by": ({"split": "full", "select_by": "loss"}, "nothing is evaluated during training; got select_by=loss"),
    "compress": ({"compress": {"sparsity": 2}}, "compress: sparsity is the share of zeros in each matrix"),
    "compress kind": ({"compress": "bits=8"}, "compress must be a dict"),
    "retries": ({"retries": -1}, "retries must be at least 0"),
    "dtype": ({"dtype": "float16"}, "unknown dtype 'float16'"),
    "device": ({"device": "gpu"}, "unknown device 'gpu'"),
    "backend": ({"backend": "fussed"}, "unknown backend 'fussed'. Did you mean 'fused'"),
    "seed": ({"seed": 0.5}, r"seed must be an int; got 0.5 \(float\)"),
    "seed true": ({"seed": True}, r"seed must be an int; got True \(bool\)"),
    "seed large": ({"seed": 2**64}, "seed must have 64 bits at most; got 18446744073709551616"),
}


@pytest.mark.parametrize(("fields", "sentence"), CASES.values(), ids=CASES)
def test_a_wrong_field_raises_an_error_of_one_sentence(fields, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        small(**fields) if "epochs" not in fields else Run(**{"task": "adding", "cell": "STAR", **fields})
    assert "\n" not in str(caught.value)


@every_field
def test_every_field_has_a_wrong_value_in_the_cases(name):
    assert name in {word for case in CASES for word in case.split()}, f"give {name} a wrong value in CASES"
    assert name in OTHER


FILES = {
    "unknown field": ({"sead": 1}, "unknown field of a run 'sead'. Did you mean 'seed'"),
    "number in quotes": ({"rate": "0.1"}, "rate must be a number; got '0.1'"),
    "count in quotes": ({"hidden": "128"}, "hidden must be an int of at least 1; got '128'"),
    "fraction": ({"hidden": 12.5}, "hidden must be an int of at least 1; got 12.5"),
    "options": ({"task_options": [3]}, "task_options must be a dict; got "),
    "factor": ({"rates": {"eta": "a tenth"}}, r"rates\['eta'\] must be a number; got 'a tenth'"),
    "none": ({"seed": None}, "seed must be an int; got None"),
    "choice": ({"dtype": "half"}, "unknown dtype 'half'. Known: float32, float64, tf32"),
    "task": ({"task": "ading"}, "Did you mean 'adding'"),
    "option": ({"cell_options": {"max_leg": 3}}, "Did you mean 'max_lag'"),
    "option value": ({"task_options": {"T": 6.5}}, "task adding: T must be an int"),
    "contradiction": ({"epochs": 3}, "steps or epochs"),
    "large seed": ({"seed": 2**64}, "seed must have 64 bits"),
    "nan": ({"rate": math.nan}, "rate"),
    "seed true": ({"seed": True}, "seed must be an int; got True"),
}


@pytest.mark.parametrize(("fields", "sentence"), FILES.values(), ids=FILES)
def test_a_wrong_value_in_a_file_raises_an_error_of_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        Run.from_json({**small().to_json(), **fields})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [None, [], 3, "adding", {}, {"task": "adding", "steps": 3}])
def test_values_that_are_not_a_run_are_refused(values):
    with pytest.raises(ValueError) as caught:
        Run.from_json(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
def test_every_cell_has_the_name_of_its_layer(cell):
    name = cell.__name__.removesuffix("Cell")
    assert layer_class(name) is getattr(unfading, name)
    run = small(cell=name, hidden=8)
    model = run.make_model()
    assert isinstance(model.rnn, getattr(unfading, name))
    prediction, _ = model(torch.rand(6, 4, 2))
    assert prediction.shape == (4, 1)


def test_every_task_optimiser_and_schedule_has_a_name():
    assert {name: task_class(name) for name in catalogue.tasks()} == catalogue.tasks()
    for name, kind in OPTIMISERS.items():
        assert type(small(optimiser=name).make_optimiser()) is kind
    for name, kind in SCHEDULES.items():
        assert type(small(schedule=name).make_schedule()) is kind


def test_initial_weights_depend_only_on_the_seed():
    torch.manual_seed(5)
    first = small(seed=3).make_model().state_dict()
    wanted = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), wanted)
    torch.manual_seed(9)
    again = small(seed=3, rate=0.5, batch=7).make_model().state_dict()
    other = small(seed=4).make_model().state_dict()
    for name in first:
        assert torch.equal(first[name], again[name])
    assert not torch.equal(first["rnn.cells.0.W_h"], other["rnn.cells.0.W_h"])


def test_a_model_is_built_in_the_dtype_of_the_run():
    for name in ("float32", "float64"):
        model = small(dtype=name, cell="OrthogonalRNN").make_model()
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, name)}
    W = model.rnn.cells[0].W_h
    # An orthogonal initialisation is orthogonal to float64 precision, not cast from float32.
    assert (W @ W.T - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-14


def test_epochs_are_passes_over_the_training_rows(made):
    run = Run(task="digits", cell="STAR", epochs=3, batch=4)
    task = run.make_task()
    assert run.total() == 3 * task.length("train", 4)
    assert changed(run, split="full").total() == 3 * task.length("full", 4) > run.total()
    assert small(steps=11).total() == 11
    with pytest.raises(ValueError, match=r"generates its data and has no epochs; got epochs=2. Set steps"):
        small(epochs=2).total()


def test_factors_match_parameters_by_name_pattern_and_path():
    names = ["rnn.cells.0.eta", "rnn.cells.0.W_h", "rnn.cells.1.eta", "head.answer.weight"]
    assert small(rates={"eta": 0.1}).factors(names) == dict(zip(names, [0.1, 1.0, 0.1, 1.0], strict=True))
    assert small(rates={"rnn.*": 0.2, "rnn.cells.1.*": 0}).factors(names) == dict(zip(names, [0.2, 0.2, 0.0, 1.0], strict=True))
    assert small(rates={"W_*": 3}).factors(names)["rnn.cells.0.W_h"] == 3.0
    with pytest.raises(ValueError, match=r"rates: unknown parameter 'etta'. Did you mean 'eta'"):
        small(rates={"etta": 0.1}).factors(names)


def test_a_users_cell_and_task_are_named_by_their_file(tmp_path, monkeypatch):
    run = Run(
        task=f"{OWN}:Breaks", task_options={"at": 3}, cell=f"{QUIET}:QuietCell", cell_options={"leak": 0.5}, hidden=4, steps=2
    )
    assert type(run.make_task()).__name__ == "Breaks"
    assert run.make_task().at == 3
    assert type(run.make_model().rnn).__name__ == "Quiet"
    assert Run.from_json(run.to_json()) == run
    assert task_class(f"{OWN}:Breaks") is task_class(f"{OWN}:Breaks")
    (tmp_path / "mine.py").write_text("from unfading import LSTMCell\nclass MineCell(LSTMCell): pass\n")
    monkeypatch.chdir(tmp_path)
    assert layer_class("mine.py:MineCell").__name__ == "Mine"
    monkeypatch.syspath_prepend(tmp_path)
    assert layer_class("mine:MineCell").__name__ == "Mine"
    assert len(read_code("mine.py:MineCell").digest) == 64
    assert read_code("mine.py:MineCell").digest == read_code("mine:MineCell").digest


OWN_CASES = {
    "class": (
        lambda: small(task=f"{OWN}:Brakes", task_options={}),
        "has no task of that name: unknown task 'Brakes'. Did you mean 'Breaks'",
    ),
    "kind": (lambda: small(task=f"{OWN}:SortedCell", task_options={}), "has no task of that name"),
    "cell for task": (lambda: small(cell=f"{OWN}:Breaks"), "has no cell of that name"),
    "file": (lambda: small(cell="nowhere.py:MyCell"), "'nowhere.py:MyCell' names a file that does not exist: .*nowhere.py"),
    "module": (lambda: small(cell="no.where:MyCell"), "'no.where:MyCell' names a module that cannot be imported"),
    "option": (
        lambda: small(task=f"{OWN}:Breaks", task_options={"att": 3}),
        "unknown option of task .*Breaks 'att'. Did you mean 'at'",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), OWN_CASES.values(), ids=OWN_CASES)
def test_a_missing_user_class_raises_an_error_of_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


PARSED = {
    "adding": ("adding", {}),
    "adding,T=200": ("adding", {"T": 200}),
    "DeepTransition,network=[3,4],steps=2": ("DeepTransition", {"network": [3, 4], "steps": 2}),
    "permuted_mnist,permutation=nru": ("permuted_mnist", {"permutation": "nru"}),
    'ucr,name="Crop"': ("ucr", {"name": "Crop"}),
    "STAR,bias=false,max_lag=None,shift=1e-2": ("STAR", {"bias": False, "max_lag": None, "shift": 0.01}),
    "my.py:Cell,a=True,b=null": ("my.py:Cell", {"a": True, "b": None}),
    "LSTM,x=": ("LSTM", {"x": ""}),
}


@pytest.mark.parametrize(("text", "expected"), PARSED.items())
def test_a_name_with_options_is_parsed(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "expected NAME"), ("T=3", "expected NAME"), ("a,b", "expected NAME"), ("a,b=1,b=2", "gives b twice")],
)
def test_text_that_is_not_a_name_with_options_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(text)
