"""Which cells and options the laws run over: every cell the catalogue finds, with and without bias, and these.

`make test` runs expensive laws on a sample, `make test-all` on everything: `sampled` marks the rest as long.
"""

import pytest

from unfading import catalogue

OPTIONS = {
    "AntisymmetricRNN": [{"epsilon": 0.3, "gamma": 0.1, "sigma": 2.0}],
    "ConvForgetLSTM": [{"max_lag": 30}, {"groups": 2}],
    "ConvGRU": [{"stride": [2, 1], "padding": [0, 2], "kernel_size": [1, 3]}, {"groups": 2}],
    "ConvLSTM": [{"max_lag": 30}, {"kernel_size": [1, 3], "dilation": [1, 2]}, {"stride": 2, "groups": 2}],
    "ConvSTAR": [{"max_lag": 30}, {"stride": 2}, {"padding": 0, "dilation": 2}, {"groups": 2}],
    "ContinuousRNN": [
        {"exponential": True, "tau": 2.0, "alpha": 0.5, "gap": 0.7},
        {"gaps_in_input": True, "activation": "relu"},
        {"gaps_in_input": True, "exponential": True},
    ],
    "DeepTransition": [{"network": [3, 4], "inner_steps": 2, "steps": 3, "alpha": 0.8}, {"network": [], "learn_eta": False}],
    "Elman": [{"activation": "relu"}, {"normalise": True}],
    "EquilibriumRNN": [{"activation": "tanh", "alpha": 0.8}, {"activation": "sigmoid", "minus": True}],
    "EURNN": [{"capacity": 3}, {"complex_state": True}, {"complex_state": True, "capacity": 2}],
    "FullUnitaryRNN": [{"exponential": True}],
    "GatedAntisymmetricRNN": [{"epsilon": 0.3, "gamma": 0.1}],
    "GORU": [{"capacity": 3}],
    "IdentityRNN": [{"normalise": True, "scale": 0.5}],
    "LinearRNN": [{"normalise": True}],
    "OrthogonalRNN": [{"normalise": True}],
    "RecurrentHighway": [{"coupled": False, "depth": 3}, {"depth": 1}, {"max_lag": 30, "coupled": False}],
    "SoftOrthogonalRNN": [{"activation": "relu", "strength": 0.1}],
    "SpectralRNN": [{"reflectors": 5, "margin": 0.3, "activation": "tanh"}, {"reflectors": 1}],
    "StableIncrementalRNN": [
        {"inner_steps": 3, "rank": 2, "steps": 4, "eta": 0.2},
        {"bounded_eta": True, "alpha": 0.7, "activation": "tanh", "eta": 0.3},
    ],
    "StatisticalRNN": [{"statistics": 4, "summary_size": 3, "scales": [0.0, 0.5, 0.999]}],
    "FastGRNN": [{"rank": 2, "input_rank": 1, "gate_activation": "tanh"}],
    "FastRNN": [{"trainable": False, "alpha": 0.01, "beta": 0.99}],
    "ForgetLSTM": [{"max_lag": 30}],
    "GRU": [{"reset_after": True}, {"reset_after": True, "bias": False}, {"normalise": True}, {"heads": 3}],
    "IncrementalRNN": [
        {"steps": 4, "inner_steps": 3, "eta": 0.3, "activation": "tanh"},
        {"rank": 2, "projection_rank": 1, "eta": 0.2, "from_zero": True},
        {"rank": 5, "projection_rank": 0, "eta": 0.2, "alpha": 0.7},
        {"rank": 5, "projection_rank": 2, "eta": 0.2, "minus": True, "from_zero": True, "activation": "sigmoid"},
        {"rank": 5, "projection_rank": 5, "eta": 0.1, "minus": True, "inner_steps": 2, "learn_eta": False, "steps": 6},
        {"rank": 5, "eta": 0.2, "bias": False},
        {"steps": 3, "inner_steps": 2, "eta": 0.3, "bounded_eta": True, "alpha": 0.7, "std": 0.3},
    ],
    "JANET": [{"beta": 0.0, "max_lag": 30}],
    "LSTM": [{"max_lag": 30}, {"normalise": True}],
    "NRU": [
        {"memory_size": 9, "heads": 1},
        {"memory_size": 4, "heads": 4, "erase_heads": 1, "relu_heads": True, "norm": 3.0},
        {"memory_size": 5, "heads": 2, "erase_heads": 3, "factored": False, "mean_over_heads": True},
        {"memory_size": 4, "heads": 1, "heads_see_input": False, "mean_over_heads": True},
        {"memory_size": 4, "heads": 1, "heads_see_input": False, "bias": False},
        {"memory_size": 4, "heads": 1, "multiplicative": True},
        {"memory_size": 4, "heads": 1, "normalise": True},
    ],
    "PeepholeLSTM": [{"max_lag": 30}],
    "SiRNN": [{"steps": 3, "eta": 0.2}, {"eta": 0.2, "bounded_eta": True, "std": 0.3}],
    "STAR": [{"max_lag": 30}, {"shift": 1.0}, {"heads": 3}],
    "CoRNN": [{"dt": 0.2, "gamma": 1.5, "epsilon": 0.5}],
    "GatedLRU": [{"r_min": 0.0, "r_max": 0.5, "max_phase": 6.0}],
    "IndRNN": [{"activation": "tanh", "max_lag": 30}],
    "LEM": [{"dt": 0.3}],
    "LipschitzRNN": [{"epsilon": 0.3, "beta": 0.9, "gamma": 0.1, "sigma": 2.0}],
    "LMU": [{"memory_size": 4, "theta": 7.0}],
    "LRU": [{"r_min": 0.0, "r_max": 0.5, "max_phase": 6.0}],
    "MinGRU": [{"positive": True}, {"max_lag": 30}],
    "MinLSTM": [{"positive": True, "max_lag": 30}],
    "SCRN": [{"context_size": 3, "alpha": 0.5}],
    "SLSTM": [{"exponential_forget": True}, {"heads": 3}],
    "UnICORNN": [{"dt": 0.4, "alpha": 0.3}],
}


# One of each kind of step: one matrix, four gates, a reset before the product, steps inside a step, complex numbers, a memory,
# and a user's own cell of low rank.
SAMPLE = ("STAR", "LSTM", "GRU", "IncrementalRNN", "UnitaryRNN", "NRU", "Quiet")
# Of the options, those with another kind of product: normalised, in groups, of low rank, of rotations, of frames.
SAMPLE_OPTIONS = (
    ("Elman", {"normalise": True}),
    ("GRU", {"heads": 3}),
    ("FastGRNN", {"rank": 2, "input_rank": 1, "gate_activation": "tanh"}),
    ("EURNN", {"complex_state": True}),
    ("ConvLSTM", {}),
)


def name(cell):
    return cell.__name__.removesuffix("Cell")


def hidden_size(cell, options=None):
    """A size that divides nothing, where the cell and its options allow one."""
    options = options or {}
    if name(cell) != "NRU" and 5 % options.get("heads", options.get("groups", 1)):
        return 6
    return 8 if name(cell) in ("EURNN", "GORU") else 5


def few_iterations(cell):
    """Options under which EquilibriumRNN ends after ten iterations. Traced or under vmap it cannot end before the last one."""
    return {"iterations": 10} if name(cell) == "EquilibriumRNN" else {}


def _label(options):
    return "-".join(f"{key}={value}" for key, value in options.items())


def every_cell():
    """(cell class, options) for every cell over feature vectors and every variant, as pytest parameters."""
    return _variants(catalogue.cells())


def every_convolutional_cell():
    """The same, of the cells over frames."""
    return _variants(catalogue.convolutional_cells())


def _variants(cells):
    found = [(cell, o) for cell in cells for o in [{}, {"bias": False}, *OPTIONS.get(name(cell), [])]]
    return [pytest.param(c, o, id=f"{name(c)}-{_label(o)}" if o else name(c)) for c, o in found]


def every_cell_that_claims(claim):
    """The same, of those that declare the claim."""
    found = []
    for param in [*every_cell(), *every_convolutional_cell()]:
        cell, options = param.values
        if getattr(cell(2, hidden_size(cell, options), **options), claim) is not None:
            found.append(param)
    return found


def defaults_of(variants):
    """The variants, of which those with options are long."""
    return sampled(variants, [name(param.values[0]) for param in variants])


def sampled(cells, sample=SAMPLE):
    """The cells, or the variants of `every_cell`, as pytest parameters; those outside the sample are long.

    Args:
        cells: classes of cells, or parameters (cell class, options).
        sample: names of cells. A variant is in the sample with the defaults of these, and if SAMPLE_OPTIONS holds it.
    """
    params = []
    for cell in cells:
        param = pytest.param(cell, id=name(cell)) if isinstance(cell, type) else cell
        kind, options = name(param.values[0]), dict(*param.values[1:2])
        short = (kind in sample and not options) or (kind, options) in SAMPLE_OPTIONS
        params.append(pytest.param(*param.values, id=param.id, marks=[] if short else pytest.mark.long))
    return params
