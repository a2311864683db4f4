"""Exported ONNX computes what the reference loop computes, for any number of steps and rows."""

import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.contractive import contractive
from tests.helpers.variants import OPTIONS
from unfading import catalogue
from unfading.cells.base import Cell
from unfading.export.fold import FOR_GRADIENTS
from unfading.export.model_stages import exported
from unfading.export.onnx_graph import ELEMENTWISE, WITH_ATTRIBUTES
from unfading.fuse.ir.program import NUMBERS, Op
from unfading.tasks.base import OneHot
from unfading.tasks.scaling import Scale

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

WITHOUT_PROGRAM = {"EquilibriumRNN"}  # its projection iterates to a fixed point
NAMES = [cell.__name__.removesuffix("Cell") for cell in catalogue.cells()]
EXPORTED = [name for name in NAMES if name not in WITHOUT_PROGRAM]
FEATURES, HIDDEN = 3, 5
SIZES = [(1, 1, None), (9, 4, [3, 9, 1, 6])]  # steps, rows, lengths


def layer_of(name, hidden=HIDDEN, **keywords):
    hidden = 4 if name in ("EURNN", "GORU") else hidden
    return contractive(getattr(unfading, f"{name}Cell"), hidden, **keywords).eval()


def samples(T, B):
    return torch.randn(T, B, FEATURES, generator=torch.Generator().manual_seed(T))


def session(model, path, **options):
    """The exported model in onnxruntime, after the checks of ONNX."""
    onnx.checker.check_model(unfading.export.onnx(model, path, **options), full_check=True)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3  # a warning for every input with a default
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def run(runtime, x, **more):
    """The outputs by name."""
    given = {name: value.numpy() for name, value in {"x": x, **more}.items() if value is not None}
    return dict(zip([each.name for each in runtime.get_outputs()], runtime.run(None, given), strict=True))


def reference(model, x, *arguments, **keywords):
    with torch.no_grad(), unfading.use_backend("reference"):
        return model(x, *arguments, **keywords)


def assert_close(got, want):
    want = want.numpy()
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= 1e-5 * max(np.linalg.norm(want), 1e-3)


def assert_layer(runtime, layer, x, lengths=None):
    """Output and final state are those of the reference, from the initial state and from the state after the sequence."""
    lengths = None if lengths is None else torch.tensor(lengths)
    if lengths is not None:
        x[torch.arange(len(x))[:, None] >= lengths] = float("nan")  # what is past the end of a row is not read
    if layer.batch_first:
        x = x.transpose(0, 1).contiguous()
    output, state = reference(layer, x, lengths=lengths)
    got = run(runtime, x, lengths=lengths)
    assert_close(got["output"], output)
    for name, part in state._asdict().items():
        assert_close(got[name], part)
    before = {f"initial_{name}": part for name, part in state._asdict().items()}
    assert_close(run(runtime, x, lengths=lengths, **before)["output"], reference(layer, x, state, lengths=lengths)[0])


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.sample(10)
def test_every_cell_at_any_length_and_batch(name, tmp_path):
    layer = layer_of(name)
    runtime = session(layer, tmp_path / "layer.onnx")
    for T, B, lengths in SIZES:
        assert_layer(runtime, layer, samples(T, B), lengths)


@pytest.mark.parametrize("name", ["LSTM", "IncrementalRNN", "StatisticalRNN"])
@pytest.mark.sample(1)
def test_layers_directions_and_batch_first(name, tmp_path):
    layer = layer_of(name, num_layers=2, bidirectional=True, batch_first=True, zoneout=0.3, learn_initial_state=True)
    with torch.no_grad():
        for part in layer.learned_state:
            part.normal_(std=0.2)
    runtime = session(layer, tmp_path / "layer.onnx")
    for T, B, lengths in SIZES:
        assert_layer(runtime, layer, samples(T, B), lengths)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_every_option_and_depth(name, tmp_path):
    for i, options in enumerate([{}, *OPTIONS.get(name, [])]):
        hidden = 6 if options.get("heads") == 3 and name != "NRU" else HIDDEN
        gaps = "gaps_in_input" in options  # of which a negative one would let the state grow without a bound
        layer = layer_of(name, hidden, num_layers=1 if gaps else 2, bidirectional=True, **options)
        runtime = session(layer, tmp_path / f"{i}.onnx")
        for T, B, lengths in SIZES:
            assert_layer(runtime, layer, samples(T, B).abs() if gaps else samples(T, B), lengths)


@cache  # planning its cells takes most of the time
def clocked():
    """A layer with step sizes for each of three positions, and for all later ones those of the last."""
    layer = layer_of("IncrementalRNN", steps=3, inner_steps=2, bounded_eta=True, num_layers=2)
    with torch.no_grad():
        for cell in layer.cells:
            cell.eta.copy_(torch.rand_like(cell.eta) - 0.5)
    return layer


def test_chunks_with_a_start_equal_the_whole(tmp_path):
    layer, x = clocked(), samples(11, 2)
    runtime = session(layer, tmp_path / "layer.onnx")
    output, _ = reference(layer, x)
    first = run(runtime, x[:2])
    assert_close(first["output"], output[:2])
    before = torch.from_numpy(first["h"])
    assert_close(run(runtime, x[2:], initial_h=before, start=torch.tensor(2))["output"], output[2:])
    without = run(runtime, x[2:], initial_h=before)["output"]
    assert np.abs(without - output[2:].numpy()).max() > 1e-3


def test_a_stack_of_different_cells_has_a_state_per_layer(tmp_path):
    torch.manual_seed(0)
    cells = iter([unfading.STARCell(FEATURES, HIDDEN), unfading.LSTMCell(HIDDEN, 4)])
    layer = unfading.Recurrent(lambda size: next(cells), FEATURES, num_layers=2).eval()
    runtime, x = session(layer, tmp_path / "layer.onnx"), samples(6, 3)
    output, (lower, upper) = reference(layer, x)
    got = run(runtime, x)
    assert list(got) == ["output", "h_layer0", "h_layer1", "c_layer1"]
    for name, want in zip(got, [output, *lower, *upper], strict=True):
        assert_close(got[name], want)
    before = {"initial_h_layer0": lower.h, "initial_h_layer1": upper.h, "initial_c_layer1": upper.c}
    assert_close(run(runtime, x, **before)["output"], reference(layer, x, (lower, upper))[0])


# -- whole models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime, unfading.PooledOverTime])
def test_a_whole_model_with_normalisation(head, tmp_path):
    model = unfading.Model(torch.nn.Identity(), clocked(), head(HIDDEN, 4)).eval()
    scale = Scale(torch.randn(9, 1, FEATURES), torch.rand(9, 1, FEATURES) + 0.5)
    runtime = session(model, tmp_path / "model.onnx", scale=scale)
    x, lengths = samples(9, 4), torch.tensor([3, 9, 1, 6])
    for given in (None, lengths):
        want, state = reference(model, (x - scale.mean) / scale.spread, lengths=given)
        got = run(runtime, x, lengths=given)
        assert_close(got["output"], want)
        assert_close(got["h"], state.h)


@pytest.mark.parametrize("encoder", [OneHot(FEATURES), torch.nn.Embedding(FEATURES, FEATURES)])
def test_tokens(encoder, tmp_path):
    model = unfading.Model(encoder, clocked(), unfading.LastStep(HIDDEN, 4)).eval()
    tokens, lengths = torch.randint(0, FEATURES, (8, 3)), torch.tensor([8, 2, 5])
    runtime = session(model, tmp_path / "model.onnx")
    assert_close(run(runtime, tokens, lengths=lengths)["output"], reference(model, tokens, lengths=lengths)[0])


# -- users' cells -------------------------------------------------------------------------------------------------------------


class One(NamedTuple):
    x: torch.Tensor  # the name of the model's input


class Odd(Cell):
    """Functions and shapes that no cell of the library has, and a constant part of the new state."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.U = torch.nn.Parameter(0.5 * torch.randn(hidden_size, input_size))
        self.W = torch.nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))

    def project(self, x, start=0):
        return One(torch.sin(x @ self.U.T) + torch.cos(x.sum(-1, keepdim=True)))

    def weights(self):
        return One(self.W)

    def initial_state(self, batch):
        return One(torch.full((batch, self.output_size), 0.25))

    def step(self, inputs, state, weights):
        a = torch.nn.functional.gelu(inputs.x + unfading.linear(state.x, weights.x))
        b = torch.log1p(torch.exp(a)) / (1 + torch.sqrt(torch.abs(a) + 0.1)) + torch.expm1(-a * a) + torch.log(a * a + 0.5)
        b = b + torch.log1p(1e-6 * a) * 1e6 - torch.expm1(1e-6 * a) * 1e6
        grid = torch.relu(b[:, :4]).reshape(len(b), 2, 2).transpose(1, 2)
        grid = grid - grid.amax(1, keepdim=True) + torch.where(grid >= 0.1, grid, torch.minimum(grid, -grid)).detach()
        c = torch.where(b > 0.3, torch.erf(b), (a * a + 0.2) ** 0.3) ** 2 + torch.sign(a) * (a <= 0.2) - (b != 0).to(a.dtype)
        d = torch.maximum(c, torch.sigmoid(a)) + (a < -0.1) + (a == b)
        new = 0.5 * torch.softmax(b, dim=-1) + 0.1 * torch.tanh(d)
        wide = torch.cat([grid, 0.05 * torch.ones_like(grid)], 2).amax(2, keepdim=True) * grid
        some = (1 / (1 + grid * grid)).reshape(len(b), 4)[:, :-1].sum(-1, keepdim=True) + wide.reshape(len(b), 4)[:, 1:2]
        return One(torch.cat([new[:, :-4] + some * 0.1, new[:, -4:-1], torch.ones_like(new[:, :1])], 1))


def test_a_users_own_cell_with_every_operation(tmp_path):
    torch.manual_seed(0)
    layer = unfading.Recurrent(lambda n: Odd(n, 7), FEATURES).eval()
    used = {value.op for stage in exported(layer).stages for value in stage.program.values()}
    assert used >= {*ELEMENTWISE, *WITH_ATTRIBUTES, Op.DOT}
    runtime, x = session(layer, tmp_path / "layer.onnx"), samples(9, 4)
    output, state = reference(layer, x)
    got = run(runtime, x)
    assert_close(got["output"], output)
    assert_close(got["state_x"], state.x)


def test_every_operation_is_written():
    assert {*ELEMENTWISE, *WITH_ATTRIBUTES, *NUMBERS, *FOR_GRADIENTS, Op.LEAF, Op.DOT} == set(Op)


# -- files, and what cannot be exported ---------------------------------------------------------------------------------------


def refused(model, tmp_path, reason, error=ValueError, **options):
    with pytest.raises(error, match=reason):
        unfading.export.onnx(model, tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())


class WithMask(Odd):
    """A field that holds for all time."""

    constant = ("x",)

    def project(self, x, start=0):
        return One(super().project(x[:1]).x)


def test_bad_input_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    star = unfading.STAR(FEATURES, HIDDEN)
    refused(unfading.EquilibriumRNN(FEATURES, HIDDEN), tmp_path, "EquilibriumRNNCell cannot be exported")
    refused(unfading.ConvSTAR(FEATURES, HIDDEN), tmp_path, "frames")
    refused(torch.nn.LSTM(3, 4), tmp_path, "recurrent layer; got LSTM", TypeError)
    refused(unfading.Model(torch.nn.Linear(3, 3), star, unfading.LastStep(HIDDEN, 2)), tmp_path, "encoder Linear cannot")
    refused(unfading.Model(torch.nn.Identity(), star, torch.nn.Linear(HIDDEN, 2)), tmp_path, "head Linear cannot")
    refused(star, tmp_path, r"mean and spread \[1 or T, 1, 3\]", scale=Scale(torch.zeros(1, 1, 4), torch.ones(1, 1, 4)))
    refused(unfading.Recurrent(lambda n: WithMask(n, 7), FEATURES), tmp_path, "WithMask cannot be exported")
    with torch.no_grad():
        broken = unfading.Model(torch.nn.Identity(), star, unfading.LastStep(HIDDEN, 2))
        broken.head.answer.bias.fill_(float("nan"))
    refused(broken, tmp_path, "NaN or infinite")
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(star, tmp_path, "pip install 'unfading\\[onnx\\]'")


def test_a_file_is_replaced_only_on_request(tmp_path):
    layer, path = clocked(), tmp_path / "new" / "model.onnx"
    first = unfading.export.onnx(layer, path).SerializeToString()
    assert path.read_bytes() == first
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists"):
        unfading.export.onnx(layer, path)
    assert path.read_bytes() == b"mine"
    unfading.export.onnx(layer, path, overwrite=True)
    assert path.read_bytes() == first
    with pytest.raises(ValueError, match="is a folder"):
        unfading.export.onnx(layer, tmp_path, overwrite=True)


def test_a_model_in_float64_is_written_in_float32_and_unchanged(tmp_path):
    layer = layer_of("STAR").double().train()
    runtime = session(layer, tmp_path / "layer.onnx")
    assert layer.training
    assert all(parameter.dtype == torch.float64 for parameter in layer.parameters())
    assert_layer(runtime, layer.float().eval(), samples(5, 2))


def test_a_model_that_standardises_its_samples_is_exported_with_them(tmp_path):
    draw = np.random.default_rng(0)
    X = (7.0 + 3.0 * draw.standard_normal((20, 5, 2))).astype(np.float32)
    model = unfading.fit(X, draw.integers(2, size=20), "GRU", hidden=4, epochs=2)
    output = run(session(model, tmp_path / "m.onnx"), torch.from_numpy(X).transpose(0, 1))["output"]
    assert np.allclose(output, model.outputs(X), atol=1e-5)
    with pytest.raises(ValueError, match="the model standardises its samples itself"):
        exported(model, model.encoder.scale)
