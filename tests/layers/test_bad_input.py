"""Wrong arguments raise one sentence that names the thing, what was passed, what was expected, and the way out."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import unfading
from unfading import initialise

x = torch.randn(7, 3, 2)
star = unfading.STAR(2, 5)
lstm = unfading.LSTM(2, 5, 2)
h = torch.zeros(1, 3, 5)


class Misdeclared(unfading.ElmanCell):
    """Makes a wrong declaration about its inputs."""

    def __init__(self, how):
        super().__init__(2, 5)
        self.how = how
        self.shared = {"name": ("b",), "shared": ("a",)}.get(how, ())

    def project(self, x, start=0):
        inputs = super().project(x)
        return {"tuple": tuple(inputs), "time": inputs._replace(a=inputs.a[1:, :2])}.get(self.how, inputs)

    def output(self, state):
        return state.h[..., :4] if self.how == "width" else state.h


def misdeclared(how):
    return unfading.Recurrent(lambda size: Misdeclared(how), 2)(x)


class Wrong(unfading.ElmanCell):
    """Returns a state of a wrong kind."""

    def __init__(self, input_size, hidden_size, *, bias=True, how=""):
        super().__init__(input_size, hidden_size, bias=bias)
        self.how = how

    def step(self, inputs, state, weights):
        new = super().step(inputs, state, weights)
        changed = {"shape": new.h[:, 1:], "dtype": new.h.double()}
        return new.h if self.how == "kind" else new._replace(h=changed[self.how])


def autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


CASES = {
    "features": (lambda: star(torch.randn(7, 3, 4)), ValueError, r"input_size=2; got 4 features in input \[7, 3, 4\]"),
    "features batch first": (
        lambda: unfading.STAR(2, 5, batch_first=True)(torch.randn(3, 7, 4)),
        ValueError,
        r"got 4 features in input \[3, 7, 4\]",
    ),
    "dimensions": (lambda: star(torch.randn(7)), ValueError, r"\[T, B, 2\], or \[T, 2\] unbatched; got \[7\]"),
    "kind": (lambda: star([1, 2]), TypeError, "takes a Tensor or a PackedSequence; got list"),
    "dtype": (lambda: star(x.double()), TypeError, r"torch.float32; got input in torch.float64. Convert"),
    "tokens": (lambda: star(x.long()), TypeError, "torch.int64. For tokens, put an nn.Embedding"),
    "device": (lambda: star(x.to("meta")), ValueError, "lives on cpu, its input on meta. Move"),
    "empty batch": (lambda: star(x[:, :0]), ValueError, r"at least one row in the batch; got input of shape \[7, 0, 2\]"),
    "no steps": (lambda: star(x[:0]), ValueError, r"at least one time step; got input of shape \[0, 3, 2\]"),
    "no steps unbatched": (lambda: star(x[:0, 0]), ValueError, "at least one time step"),
    "lengths kind": (lambda: star(x, lengths=[1, 2, 3]), TypeError, r"int64 tensor of shape \[3\]; got list"),
    "lengths dtype": (lambda: star(x, lengths=torch.tensor([1.0, 2, 3])), TypeError, "got torch.float32"),
    "lengths shape": (lambda: star(x, lengths=torch.tensor([1, 2])), ValueError, r"shape \[3\]; got \[2\]"),
    "lengths 0": (lambda: star(x, lengths=torch.tensor([1, 0, 3])), ValueError, r"1..7, the steps of the input; got 0"),
    "lengths 8": (lambda: star(x, lengths=torch.tensor([1, 8, 3])), ValueError, "got 8"),
    "lengths unbatched": (lambda: star(x[:, 0], lengths=torch.tensor([3])), ValueError, "needs a batch"),
    "lengths packed": (lambda: star(pack_sequence([x[:, 0]]), lengths=torch.tensor([7])), ValueError, "its own lengths"),
    "start": (lambda: star(x, start=-1), ValueError, "start must be at least 0; got -1"),
    "state bare": (lambda: star(x, h), TypeError, r"a tuple \(h\) of 1 tensors; got Tensor. Pass \(h,\)"),
    "state count": (lambda: lstm(x, (h,)), TypeError, r"a tuple \(h, c\) of 2 tensors; got a tuple of 1"),
    "state shape": (
        lambda: lstm(x, (h, h)),
        ValueError,
        r"state h must have shape \[2, 3, 5\] for this input; got \[1, 3, 5\]",
    ),
    "state unbatched": (lambda: star(x[:, 0], (h,)), ValueError, r"must have shape \[1, 5\]"),
    "state dtype": (lambda: star(x, (h.double(),)), TypeError, "must be torch.float32; got torch.float64. Convert"),
    "state device": (lambda: star(x, (h.to("meta"),)), ValueError, "lives on cpu, its state h on meta. Move"),
    "state entries": (lambda: star(x, (None,)), TypeError, "got NoneType for h"),
    "hidden size": (lambda: unfading.STAR(2, 0), ValueError, "hidden_size must be at least 1; got 0. Nearest valid: 1"),
    "hidden size kind": (lambda: unfading.STAR(2, 5.0), TypeError, r"hidden_size must be an int of at least 1; got 5.0"),
    "input size": (lambda: unfading.STAR(-2, 5), ValueError, "input_size must be at least 1; got -2"),
    "layers": (lambda: unfading.STAR(2, 5, 0), ValueError, "num_layers must be at least 1"),
    "dropout": (lambda: unfading.STAR(2, 5, 2, dropout=1.5), ValueError, r"in \[0, 1\]; got 1.5. Nearest valid: 1.0"),
    "option": (lambda: unfading.STAR(2, 5, max_lags=3), TypeError, "unknown option of STAR 'max_lags'. Did you mean 'max_lag'"),
    "backend": (lambda: unfading.STAR(2, 5, backend="referense"), ValueError, "Did you mean 'reference'"),
    "backend block": (
        lambda: unfading.use_backend("x").__enter__(),
        ValueError,
        "unknown backend 'x'. Known: auto, fused, graph, reference",
    ),
    "layer dtype": (lambda: unfading.STAR(2, 5, dtype=torch.int64), TypeError, "floating-point type; got torch.int64"),
    "activation": (lambda: unfading.Elman(2, 5, activation="tahn"), ValueError, "Did you mean 'tanh'"),
    "max_lag": (lambda: unfading.LSTM(2, 5, max_lag=1), ValueError, "max_lag must be at least 2; got 1"),
    "max_lag without bias": (lambda: unfading.STAR(2, 5, bias=False, max_lag=9), ValueError, "bias=False leaves none"),
    "square": (lambda: unfading.NRU(2, 5, memory_size=65), ValueError, r"65 \* 4 = 260. Nearest memory_size: 64"),
    "square never": (lambda: unfading.NRU(2, 5, heads=2, erase_heads=3), ValueError, "Take equal numbers, or factored=False"),
    "square both": (
        lambda: unfading.NRU(2, 5, memory_size=15, heads=2, erase_heads=8),
        ValueError,
        "Nearest memory_size: 18",
    ),
    "norm": (lambda: unfading.NRU(2, 5, norm=0.5), ValueError, "norm must be at least 1"),
    "heads": (lambda: unfading.NRU(2, 5, heads=-1), ValueError, "heads must be at least 1; got -1"),
    "rank": (lambda: unfading.SiRNN(2, 5, rank=6), ValueError, "got rank=6 for size 5. Largest: 5"),
    "rank zero": (lambda: unfading.SiRNN(2, 5, rank=0), ValueError, "rank must be at least 1"),
    "projection rank": (lambda: unfading.SiRNN(2, 5, projection_rank=9), ValueError, "projection_rank=9 for size 5"),
    "input rank": (lambda: unfading.FastGRNN(2, 5, input_rank=3), ValueError, "input_rank=3 for size 2"),
    "inner steps": (lambda: unfading.IncrementalRNN(2, 5, inner_steps=0), ValueError, "inner_steps must be at least 1"),
    "steps": (lambda: unfading.IncrementalRNN(2, 5, steps=-3), ValueError, "steps must be at least 1; got -3"),
    "alpha": (lambda: unfading.FastRNN(2, 5, alpha=1.0), ValueError, "cannot be learned"),
    "alpha range": (lambda: unfading.FastRNN(2, 5, alpha=-1), ValueError, r"alpha must lie in \[0, 1\]; got -1"),
    "make_cell kind": (lambda: unfading.Recurrent(lambda n: 3, 2), TypeError, "must return an unfading.Cell; got int"),
    "make_cell size": (lambda: unfading.Recurrent(lambda n: unfading.STARCell(3, 5), 2), ValueError, r"input_size=2; got 3"),
    "step kind": (lambda: unfading.Recurrent(lambda n: Wrong(n, 5, how="kind"), 2)(x), TypeError, "must return its state, h"),
    "step shape": (lambda: unfading.Recurrent(lambda n: Wrong(n, 5, how="shape"), 2)(x), ValueError, "must keep the shapes"),
    "step dtype": (lambda: unfading.Recurrent(lambda n: Wrong(n, 5, how="dtype"), 2)(x), TypeError, "must keep the dtypes"),
    "cell called": (lambda: unfading.STARCell(2, 5)(x), TypeError, "is a cell, one step of a network, and cannot be called"),
    "make_cell a cell": (lambda: unfading.Recurrent(unfading.STARCell(2, 5), 2), TypeError, "got one STARCell"),
    "inputs kind": (lambda: misdeclared("tuple"), TypeError, "project must return a NamedTuple of tensors; got tuple"),
    "shared name": (lambda: misdeclared("name"), ValueError, "shared names 'b', which is not a field of its inputs: a"),
    "shared shape": (lambda: misdeclared("shared"), ValueError, r"must return a of shape \[7, 1, n\]; got \[7, 3, 5\]"),
    "inputs shape": (lambda: misdeclared("time"), ValueError, r"must return a of shape \[6, 3, n\]; got \[6, 2, 5\]"),
    "output width": (lambda: misdeclared("width"), ValueError, "declares output_size=5, and its output has 4 features"),
    "autocast float64": (lambda: autocast(star, x.double()), TypeError, "got input in torch.float64"),
    "eta kind": (lambda: unfading.SiRNN(2, 5, eta="0.1"), TypeError, "eta must be a number; got '0.1'"),
    "norm kind": (lambda: unfading.NRU(2, 5, norm="5"), TypeError, "norm must be a number"),
    "shift kind": (lambda: unfading.STAR(2, 5, shift=None), TypeError, "shift must be a number; got None"),
    "power of two": (lambda: unfading.EURNN(2, 100), ValueError, "got 100. Nearest: 128; or give a capacity"),
    "power of two below": (lambda: unfading.GORU(2, 70), ValueError, "got 70. Nearest: 64"),
    "even": (lambda: unfading.EURNN(2, 5, capacity=2), ValueError, "must be even, got 5. Nearest: 6"),
    "capacity": (lambda: unfading.EURNN(2, 4, capacity=0), ValueError, "capacity must be at least 1"),
    "reflectors": (lambda: unfading.SpectralRNN(2, 5, reflectors=6), ValueError, "reflectors=6 for size 5"),
    "margin": (lambda: unfading.SpectralRNN(2, 5, margin=2.0), ValueError, "margin must lie in"),
    "depth": (lambda: unfading.RecurrentHighway(2, 5, depth=0), ValueError, "depth must be at least 1"),
    "scales": (lambda: unfading.StatisticalRNN(2, 5, scales=[]), ValueError, "at least one time scale"),
    "scales kind": (lambda: unfading.StatisticalRNN(2, 5, scales=0.5), ValueError, "at least one time scale; got 0.5"),
    "scale one": (lambda: unfading.StatisticalRNN(2, 5, scales=[1.0]), ValueError, "never moves"),
    "tau": (lambda: unfading.ContinuousRNN(2, 5, tau=0), ValueError, "tau must be above 0; got 0"),
    "gaps": (lambda: unfading.ContinuousRNN(1, 5, gaps_in_input=True), ValueError, "input_size must be at least 2"),
    "bounded eta": (lambda: unfading.StableIncrementalRNN(2, 5, eta=2.0, bounded_eta=True), ValueError, "got eta=2.0"),
    "bounded eta of the paper": (
        lambda: unfading.IncrementalRNN(2, 5, eta=-0.1, alpha=-1.0, bounded_eta=True),
        ValueError,
        "got eta=-0.1 with alpha=-1.0",
    ),
    "std": (lambda: unfading.SiRNN(2, 5, std=0.0), ValueError, "std must be above 0; got 0.0"),
    "widths": (lambda: unfading.DeepTransition(2, 5, network=[0]), ValueError, "each width of network must be at least 1"),
    "iterations": (lambda: unfading.EquilibriumRNN(2, 5, iterations=0), ValueError, "iterations must be at least 1"),
    "zoneout": (lambda: unfading.STAR(2, 5, zoneout=1.5), ValueError, r"zoneout must lie in \[0, 1\]"),
    "all dropped": (lambda: unfading.STAR(2, 5, recurrent_dropout=1.0), ValueError, "take a rate below 1"),
    "nothing to drop": (lambda: unfading.EquilibriumRNN(2, 5, recurrent_dropout=0.1), ValueError, "no recurrent matrix"),
    "checkpoint_every": (lambda: unfading.STAR(2, 5, checkpoint_every=0), ValueError, "checkpoint_every must be at least 1"),
    "model": (
        lambda: unfading.Model(torch.nn.Identity(), unfading.STAR(2, 5, batch_first=True), unfading.LastStep(5, 2)),
        ValueError,
        "batch_first=True",
    ),
    "head": (lambda: unfading.LastStep(5, 0), ValueError, "answers must be at least 1"),
    "chrono": (lambda: initialise.chrono_(torch.empty(3), 1), ValueError, "max_lag must be at least 2"),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), CASES.values(), ids=CASES.keys())
def test_bad_input_raises_one_clear_sentence(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)
