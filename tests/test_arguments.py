"""Wrong arguments of public names: a ValueError or a TypeError of one sentence, or a result."""

import inspect
import warnings

import pytest
import torch

import unfading
from unfading.layers import allocation

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
    "load": (unfading.load, lambda: {"path_or_url": "no-such-file.safetensors", "sha256": None}),
}
for _layer in (unfading.STAR, unfading.NRU, unfading.LSTM):
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
            if allocation.out_of_memory(error):  # torch refuses it
                return None
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
def test_a_wrong_argument_is_a_value_error_or_a_type_error(name):
    wrong = {
        (argument, kind): result
        for argument in arguments(name)
        for kind, value in VALUES.items()
        if (result := outcome(name, argument, value)) is not None
    }
    assert wrong == {}
