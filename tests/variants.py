"""Which cells and options the laws run over: every cell the catalogue finds at its defaults, and these options besides."""

import pytest

from unfading import catalogue

OPTIONS = {
    "Elman": [{"activation": "relu"}],
    "FastGRNN": [{"rank": 2, "input_rank": 1, "gate_activation": "tanh"}, {"bias": False}],
    "FastRNN": [{"trainable": False, "alpha": 0.01, "beta": 0.99}],
    "ForgetLSTM": [{"max_lag": 30}],
    "GRU": [{"reset_after": True}, {"reset_after": True, "bias": False}, {"bias": False}],
    "IncrementalRNN": [
        {"steps": 4, "inner_steps": 3, "eta": 0.3, "activation": "tanh"},
        {"rank": 2, "projection_rank": 1, "eta": 0.2, "from_zero": True},
        {"rank": 5, "projection_rank": 0, "eta": 0.2, "alpha": 0.7},
        {"rank": 5, "projection_rank": 2, "eta": 0.2, "minus": True, "from_zero": True, "activation": "sigmoid"},
        {"rank": 5, "projection_rank": 5, "eta": 0.1, "minus": True, "inner_steps": 2, "learn_eta": False, "steps": 6},
        {"rank": 5, "eta": 0.2, "bias": False},
    ],
    "JANET": [{"beta": 0.0, "max_lag": 30}],
    "LSTM": [{"max_lag": 30}, {"bias": False}],
    "NRU": [
        {"memory_size": 9, "heads": 1},
        {"memory_size": 4, "heads": 4, "erase_heads": 1, "relu_heads": True, "norm": 3.0},
        {"memory_size": 5, "heads": 2, "erase_heads": 3, "factored": False, "mean_over_heads": True},
        {"memory_size": 4, "heads": 1, "heads_see_input": False, "mean_over_heads": True},
        {"memory_size": 4, "heads": 1, "heads_see_input": False, "bias": False},
        {"memory_size": 4, "heads": 1, "multiplicative": True},
    ],
    "PeepholeLSTM": [{"max_lag": 30}],
    "SiRNN": [{"steps": 3, "eta": 0.2}],
    "STAR": [{"max_lag": 30}, {"shift": 1.0}],
}


def name(cell):
    return cell.__name__.removesuffix("Cell")


def _label(options):
    return "-".join(f"{key}={value}" for key, value in options.items())


def every_cell():
    """(cell class, options) for every cell and variant, as pytest parameters."""
    found = [(cell, options) for cell in catalogue.cells() for options in [{}, *OPTIONS.get(name(cell), [])]]
    return [pytest.param(c, o, id=f"{name(c)}-{_label(o)}" if o else name(c)) for c, o in found]


def every_cell_that_claims(claim):
    """The same, of those that declare the claim."""
    return [param for param in every_cell() if getattr(param.values[0](2, 5, **param.values[1]), claim) is not None]


def test_every_variant_names_a_cell_that_exists():
    assert set(OPTIONS) <= {name(cell) for cell in catalogue.cells()}
