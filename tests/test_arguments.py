"""Wrong arguments of public names: a ValueError or a TypeError of one sentence, or a result."""

import contextlib
import inspect
import tempfile
import warnings

import pytest
import torch

import unfading

NAN, INF = float("nan"), float("inf")
# Wrong for most arguments: another type, out of range, not finite, too large, and tensors of a wrong kind.
VALUES = {
    "None": None,
    "a str": "three",
    "empty": "",
    "negative": -3,
    "zero": 0,
    "nan": NAN,
    "inf": INF,
    "huge": 10**30,
    "large": 10**12,
    "a fraction": 2.5,
    "True": True,
    "a list": [1, 2],
    "a dict": {"a": 1},
    "an object": object(),
    "a class": int,
    "a tensor": torch.ones(3),
    "a scalar tensor": torch.tensor(3),
    "an integer tensor": torch.ones(4, 3, dtype=torch.int64),
    "float64": torch.ones(4, 3, 2, dtype=torch.float64),
    "on meta": torch.ones(4, 3, 2, device="meta"),
    "bytes": b"three",
    "a set": {1},
    "a complex number": 1j,
}


def star():
    return unfading.STAR(2, 3, backend="reference")


def model():
    return unfading.Model(torch.nn.Identity(), star(), unfading.LastStep(3, 1))


def call_layer(**keywords):
    return star()(**keywords)


def call_model(**keywords):
    return model()(**keywords)


def call_stream(push, **keywords):
    return star().stream(**keywords).push(push)


def call_truncated(**keywords):
    return list(unfading.truncated(star(), **keywords))


def call_head(**keywords):
    return unfading.LastStep(3, 1)(**keywords)


def call_linear(v, W, low_rank, heads):
    return unfading.linear(v, W), unfading.linear(v, low_rank), unfading.linear(v, heads)


def call_block_diagonal(blocks, heads):
    return unfading.linear(torch.ones(4, 3), unfading.BlockDiagonal(blocks, heads))


def call_scan(**keywords):
    cell = unfading.STARCell(2, 3)
    return unfading.reference.scan(**{"cell": cell, "weights": cell.weights(), **keywords})


def scan_arguments():
    cell = unfading.STARCell(2, 3)
    inputs = cell.project(torch.randn(4, 3, 2))
    return {"cell": cell, "inputs": inputs, "state": cell.initial_state(3), "lengths": None, "reverse": False}


def call_tune(**keywords):
    try:
        return unfading.tune(**keywords)
    except ValueError as error:
        if "on a GPU" not in str(error):
            raise


def in_a_folder(function):
    def call(**keywords):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return function(**keywords, say=lambda message: None)

    call.__signature__ = inspect.signature(function)
    return call


def run():
    return unfading.Run(task="adding", task_options={"T": 4}, cell="STAR", hidden=2, batch=2, steps=1)


# The right arguments of each function, made anew for each call, and those that are replaced.
CALLS = {
    "Recurrent": (unfading.Recurrent, lambda: {"make_cell": lambda size: unfading.STARCell(size, 3), "input_size": 2}),
    "layer call": (call_layer, lambda: {"x": torch.randn(4, 3, 2), "state": None, "lengths": None, "start": 0}),
    "stream": (call_stream, lambda: {"push": torch.randn(3, 2), "batch": 3, "state": None, "start": 0}),
    "truncated": (call_truncated, lambda: {"x": torch.randn(4, 3, 2), "every": 2, "state": None}),
    "Model": (unfading.Model, lambda: {"encoder": torch.nn.Identity(), "rnn": star(), "head": unfading.LastStep(3, 1)}),
    "model call": (
        call_model,
        lambda: {"x": torch.randn(4, 3, 2), "state": None, "lengths": None, "start": 0, "truncate": None},
    ),
    "LastStep": (unfading.LastStep, lambda: {"size": 3, "answers": 2, "dropout": 0.0}),
    "layer": (unfading.layer, lambda: {"cell": unfading.STARCell}),
    "from_torch": (unfading.from_torch, lambda: {"module": torch.nn.LSTM(2, 3)}),
    "to_torch": (unfading.to_torch, lambda: {"layer": unfading.LSTM(2, 3)}),
    "detach": (unfading.detach, lambda: {"state": (torch.ones(2),)}),
    "use_backend": (unfading.use_backend, lambda: {"name": "reference"}),
    "RecurrentDropoutCell": (unfading.RecurrentDropoutCell, lambda: {"cell": unfading.STARCell(2, 3), "rate": 0.5}),
    "ZoneoutCell": (unfading.ZoneoutCell, lambda: {"cell": unfading.STARCell(2, 3), "rate": 0.5}),
    "Run": (unfading.Run, lambda: {"task": "adding", "task_options": {"T": 4}, "cell": "STAR", "steps": 1}),
    "head call": (call_head, lambda: {"output": torch.randn(4, 3, 3), "lengths": None}),
    "scan": (call_scan, scan_arguments),
    "linear": (
        call_linear,
        lambda: {
            "v": torch.randn(4, 3),
            "W": torch.randn(2, 3),
            "low_rank": unfading.LowRank(torch.randn(3, 1), torch.randn(1, 3)),
            "heads": unfading.BlockDiagonal(torch.randn(6, 1), 3),
        },
    ),
    "LowRank": (unfading.LowRank, lambda: {"left": torch.randn(3, 1), "right": torch.randn(1, 3), "identity": 1.0}),
    "BlockDiagonal": (call_block_diagonal, lambda: {"blocks": torch.randn(6, 1), "heads": 3}),
    "diagnose": (unfading.diagnose, lambda: {"model": star(), "x": torch.randn(4, 3, 2)}),
    "flat_start": (unfading.flat_start, lambda: {"model": model(), "data": torch.randn(4, 3, 2), "rounds": 1}),
    "tune": (call_tune, lambda: {"layer": star()}),
    "train": (in_a_folder(unfading.train), lambda: {"run": run(), "where": None}),
    "compare": (in_a_folder(unfading.compare), lambda: {"runs": [], "where": "runs"}),
    "STARCell": (unfading.STARCell, lambda: {"input_size": 2, "hidden_size": 3}),
    "load": (unfading.load, lambda: {"path_or_url": "no-such-file.safetensors", "sha256": None}),
}
for _layer in (unfading.STAR, unfading.NRU, unfading.LSTM, unfading.EURNN, unfading.IncrementalRNN):
    CALLS[_layer.__name__] = (_layer, lambda: {"input_size": 2, "hidden_size": 4})


def arguments(name):
    """The arguments to replace: those given, and all others that the function has."""
    function, right = CALLS[name]
    parameters = inspect.signature(function).parameters.values()
    others = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return list(dict.fromkeys([*right(), *(other for other in others if other not in ("listen", "watch", "say", "generator"))]))


def outcome(name, argument, value):
    """None where the call works or is refused in one sentence; else what it raised."""
    function, right = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(**{**right(), argument: value})
        except (ValueError, TypeError, OSError, NotImplementedError) as error:
            return None if str(error) and len(str(error)) < 1500 else f"no sentence: {type(error).__name__}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    return None


@pytest.mark.parametrize("name", CALLS)
def test_the_right_arguments_work(name):
    function, right = CALLS[name]
    if name == "load":  # there is no such file
        with pytest.raises(ValueError, match="does not exist"):
            function(**right())
    else:
        function(**right())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(10)
def test_a_wrong_argument_is_a_value_error_or_a_type_error(name):
    wrong = {
        (argument, kind): result
        for argument in arguments(name)
        for kind, value in VALUES.items()
        if (result := outcome(name, argument, value)) is not None
    }
    assert wrong == {}
