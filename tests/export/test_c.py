"""Exported C computes what the reference loop computes, and the all-integer twin what the C computes, bit for bit."""

import re
import subprocess
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.c_models import COMPILER, FEATURES, HIDDEN, STRICT, CModel, distance, needs_compiler, samples
from tests.helpers.contractive import contractive
from tests.helpers.variants import OPTIONS
from unfading import catalogue
from unfading.cells.base import Cell
from unfading.export.int8 import int8_of
from unfading.tasks.scaling import Scale

pytestmark = needs_compiler

WITHOUT_PROGRAM = {"EquilibriumRNN"}  # its projection iterates to a fixed point
NAMES = [cell.__name__.removesuffix("Cell") for cell in catalogue.cells()]
STEPS = 200


def reference(layer, x):
    with torch.no_grad(), unfading.use_backend("reference"):
        return layer(x)[0]


def cell_of(name):
    return getattr(unfading, f"{name}Cell")


def calm(name, **keywords):
    """A layer in which rounding errors do not grow over the steps of a test."""
    layer = contractive(cell_of(name), 4 if name in ("EURNN", "GORU") else HIDDEN, **keywords).eval()
    if name == "NRU":  # what it adds to its memory grows with the memory
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.05)
    return layer


def variants(name):
    # Heads must divide the units. A highway of depth 1 has an empty matrix, which the compiler refuses.
    return [each for each in OPTIONS.get(name, []) if each.get("heads", 1) in (1, HIDDEN) and each != {"depth": 1}]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_PROGRAM])
@pytest.mark.sample(9)
def test_c_agrees_with_the_reference_and_integers_with_their_twin(name, tmp_path):
    layer = calm(name)
    x = samples(STEPS)
    source = unfading.export.c(layer, tmp_path / "float")
    got = CModel(tmp_path / "float", source).run(x[:, 0].numpy(), layer.output_size)
    assert distance(got, reference(layer, x)[:, 0].numpy()) < 1e-5
    twin = unfading.export.quantised(layer, [samples(20, rows=4)])
    source = unfading.export.c(twin, tmp_path / "integer")
    given = twin.samples(x[:60])
    got = CModel(tmp_path / "integer", source, integer=True).run(given[:, 0], layer.output_size)
    assert np.array_equal(got, twin.run(given)[:, 0])
    assert np.abs(got).max() > 0


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_PROGRAM])
def test_every_option_and_depth(name, tmp_path):
    for i, options in enumerate([{}, *variants(name)]):
        # A second NRU grows with the first, and gaps in time, which are inputs of the first layer, are not negative.
        single = name == "NRU" or "gaps_in_input" in options
        layer = calm(name, num_layers=1 if single else 2, zoneout=0.3, **options)
        x, calibration = samples(STEPS), samples(40, rows=4)
        if "gaps_in_input" in options:
            x, calibration = x.abs(), calibration.abs()
        source = unfading.export.c(layer, tmp_path / f"float{i}")
        got = CModel(tmp_path / f"float{i}", source).run(x[:, 0].numpy(), layer.output_size)
        assert distance(got, reference(layer, x)[:, 0].numpy()) < 1e-5, options
        twin = unfading.export.quantised(layer, [calibration])
        source = unfading.export.c(twin, tmp_path / f"integer{i}")
        given = twin.samples(x)
        got = CModel(tmp_path / f"integer{i}", source, integer=True).run(given[:, 0], layer.output_size)
        assert np.array_equal(got, twin.run(given)[:, 0]), options


@pytest.mark.parametrize("options", [{}, {"projection_rank": HIDDEN, "steps": 6, "inner_steps": 2}])
def test_an_incremental_network_of_full_rank(options, tmp_path):
    """Its projection computes a matrix, which no compiled step does; the exported one is P W x + P b, tied or dense."""
    layer = contractive(unfading.IncrementalRNNCell, HIDDEN, rank=HIDDEN, eta=0.2, **options).eval()
    x = samples(STEPS)
    source = unfading.export.c(layer, tmp_path / "float")
    got = CModel(tmp_path / "float", source).run(x[:, 0].numpy(), HIDDEN)
    assert distance(got, reference(layer, x)[:, 0].numpy()) < 1e-5


def test_int8_is_the_model_with_rounded_matrices(tmp_path):
    layer = calm("STAR")
    x = samples(STEPS)
    source = unfading.export.c(layer, tmp_path / "int8", precision="int8")
    got = CModel(tmp_path / "int8", source).run(x[:, 0].numpy(), HIDDEN)
    with torch.no_grad():  # the blocks of a matrix that products use have scales of their own
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                for rows in parameter.split(HIDDEN):
                    rounded, scale = int8_of(rows.double().numpy())
                    rows.copy_(torch.from_numpy(rounded * scale))
    assert distance(got, reference(layer, x)[:, 0].numpy()) < 1e-5
    assert source.constants < unfading.export.c(layer, tmp_path / "float").constants


# -- whole models -------------------------------------------------------------------------------------------------------------


@cache  # planning the cells takes most of the time
def stack():
    torch.manual_seed(0)
    rnn = unfading.IncrementalRNN(FEATURES, 6, steps=20, inner_steps=1, num_layers=2)
    with torch.no_grad():
        for cell in rnn.cells:
            cell.eta.copy_(0.1 * torch.rand_like(cell.eta))
    return rnn.eval()


def model_of(head, encoder=None):
    return unfading.Model(encoder or torch.nn.Identity(), stack(), head(6, 4)).eval()


def run_program(folder, text, *flags):
    sources = [folder / "main.c", folder / "model.c"]
    strict = [flag for flag in STRICT if flag != "-ffreestanding"]
    subprocess.run([COMPILER, *strict, *flags, "-o", folder / "model", *sources], check=True, capture_output=True)
    answer = subprocess.run([folder / "model"], input=text, capture_output=True, text=True, check=True)
    assert not answer.stderr
    return np.array([[float(number) for number in line.split()] for line in answer.stdout.splitlines()])


def lines_of(rows):
    return "".join(" ".join(f"{number:.9g}" for number in row) + "\n" for row in np.atleast_2d(rows).tolist())


@pytest.mark.parametrize("head", [unfading.LastStep, unfading.EveryStep, unfading.MeanOverTime, unfading.PooledOverTime])
@pytest.mark.parametrize("precision", ["float32", "integer"])
@pytest.mark.sample(2)
def test_whole_model_with_normalisation_past_the_end_of_its_table(head, precision, tmp_path):
    model = model_of(head)
    x = samples(50, rows=2) * 3 + 1
    scale = Scale(torch.tensor([[[1.0, 0.5, 1.5]]]), torch.tensor([[[3.0, 2.0, 4.0]]]))
    with torch.no_grad():
        want = model((x - scale.mean) / scale.spread)[0]
    if head in (unfading.MeanOverTime, unfading.PooledOverTime) and precision == "integer":
        with pytest.raises(ValueError, match=head.__name__):
            unfading.export.quantised(model, [x], scale=scale)
        return
    batches = {"batches": [x]} if precision == "integer" else {}
    unfading.export.c(model, tmp_path / "c", precision=precision, scale=scale, **batches)
    text = lines_of(x[:, 0].numpy()) + "\n" + lines_of(x[:, 1].numpy())
    got = run_program(tmp_path / "c", text, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    got = got.reshape(2, 50, 4).transpose(1, 0, 2)
    want = want.numpy() if head is unfading.EveryStep else want.numpy()[None]
    got = got if head is unfading.EveryStep else got[-1:]
    assert distance(got, want) < (1e-5 if precision == "float32" else 0.05)


def test_the_program_in_integers_is_the_twin(tmp_path):
    model, x = model_of(unfading.EveryStep), samples(30)
    twin = unfading.export.quantised(model, [x])
    unfading.export.c(twin, tmp_path / "c")
    got = run_program(tmp_path / "c", lines_of(x[:, 0].numpy()))
    assert np.array_equal(got.astype(np.float32), twin(x)[:, 0].numpy())


@pytest.mark.parametrize("encoder", [unfading.tasks.base.OneHot(FEATURES), torch.nn.Embedding(7, FEATURES)])
@pytest.mark.parametrize("precision", ["float32", "integer"])
@pytest.mark.sample(2)
def test_tokens(encoder, precision, tmp_path):
    model = model_of(unfading.EveryStep, encoder)
    tokens = torch.randint(0, FEATURES, (30, 2))
    with torch.no_grad():
        want = model(tokens)[0][:, 0].numpy()
    batches = {"batches": [tokens]} if precision == "integer" else {}
    unfading.export.c(model, tmp_path / "c", precision=precision, **batches)
    got = run_program(tmp_path / "c", lines_of(tokens[:, :1].numpy()))
    assert distance(got, want) < (1e-5 if precision == "float32" else 0.05)


class Odd(Cell):
    """A user's cell with functions that no cell of the library has, and a learned initial state."""

    class Inputs(NamedTuple):
        u: torch.Tensor

    class Weights(NamedTuple):
        W: torch.Tensor

    class State(NamedTuple):
        h: torch.Tensor

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.U = torch.nn.Parameter(0.5 * torch.randn(hidden_size, input_size))
        self.W = torch.nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))

    def project(self, x, start=0):
        return Odd.Inputs(torch.sin(x @ self.U.T) + torch.cos(x.sum(-1, keepdim=True)))

    def weights(self):
        return Odd.Weights(self.W)

    def initial_state(self, batch):
        return Odd.State(torch.full((batch, self.output_size), 0.25))

    def step(self, inputs, state, weights):
        a = torch.nn.functional.gelu(inputs.u + unfading.linear(state.h, weights.W))
        b = torch.log1p(torch.exp(a)) / (1 + torch.sqrt(torch.abs(a) + 0.1)) + torch.expm1(-a * a) + torch.log(a * a + 0.5)
        return Odd.State(0.5 * torch.softmax(b, dim=-1) + 0.5 * torch.where(b > 0.3, torch.erf(b), (a * a + 0.2) ** 0.3) ** 2)


def test_a_users_own_cell(tmp_path):
    torch.manual_seed(0)
    layer = unfading.Recurrent(lambda n: Odd(n, HIDDEN), FEATURES, learn_initial_state=True).eval()
    x = samples(STEPS)
    source = unfading.export.c(layer, tmp_path / "float")
    got = CModel(tmp_path / "float", source).run(x[:, 0].numpy(), HIDDEN)
    assert distance(got, reference(layer, x)[:, 0].numpy()) < 1e-5
    twin = unfading.export.quantised(layer, [x])
    source = unfading.export.c(twin, tmp_path / "integer")
    given = twin.samples(x)
    got = CModel(tmp_path / "integer", source, integer=True).run(given[:, 0], HIDDEN)
    assert np.array_equal(got, twin.run(given)[:, 0])
    assert distance(got * 2.0**-twin.output_bits, reference(layer, x)[:, 0].numpy()) < 0.05


def test_only_memcpy_is_needed(tmp_path):
    for name in ("LSTM", "NRU"):
        for precision in ("float32", "int8"):
            folder = tmp_path / f"{name}-{precision}"
            unfading.export.c(calm(name), folder, precision=precision)
            subprocess.run([COMPILER, *STRICT, "-O2", "-c", "-o", folder / "model.o", folder / "model.c"], check=True)
            symbols = subprocess.run(["nm", "-u", folder / "model.o"], capture_output=True, text=True, check=True).stdout
            assert set(re.findall(r"U (\w+)", symbols)) <= {"memcpy", "memset"}


# -- what cannot be exported --------------------------------------------------------------------------------------------------


def refused(model, tmp_path, reason, error=ValueError, **options):
    with pytest.raises(error, match=reason):
        unfading.export.c(model, tmp_path / "c", **options)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_refused_and_nothing_is_written(tmp_path):
    star = unfading.STAR(FEATURES, HIDDEN)
    refused(unfading.STAR(FEATURES, HIDDEN, bidirectional=True), tmp_path, "bidirectional")
    refused(unfading.EquilibriumRNN(FEATURES, HIDDEN), tmp_path, "EquilibriumRNNCell cannot be exported")
    refused(unfading.ConvSTAR(FEATURES, HIDDEN), tmp_path, "frames")
    refused(torch.nn.LSTM(3, 4), tmp_path, "Recurrent|recurrent", TypeError)
    refused(star, tmp_path, "unknown precision", precision="int4")
    refused(star, tmp_path, "needs batches", precision="integer")
    refused(star, tmp_path, "takes no batches", batches=[samples(3)])
    refused(star, tmp_path, "NaN", precision="integer", batches=[samples(3) * float("nan")])
    refused(star, tmp_path, "empty", precision="integer", batches=[])
    refused(star, tmp_path, r"\[T, B, 3\]", precision="integer", batches=[torch.zeros(3, 2, 4)])
    growing = unfading.LinearRNN(FEATURES, HIDDEN)
    with torch.no_grad():
        for parameter in growing.parameters():
            parameter.copy_(parameter * 3)
    refused(growing, tmp_path, "overflows on the calibration data", precision="integer", batches=[samples(200)])
    with torch.no_grad():
        next(star.parameters()).fill_(float("inf"))
    refused(star, tmp_path, "NaN or infinite")
    model = unfading.Model(torch.nn.Linear(3, 3), unfading.STAR(FEATURES, HIDDEN), unfading.LastStep(HIDDEN, 2))
    refused(model, tmp_path, "encoder Linear")
    model = unfading.Model(torch.nn.Identity(), unfading.STAR(FEATURES, HIDDEN), torch.nn.Identity())
    refused(model, tmp_path, "head Identity")


def test_an_existing_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        unfading.export.c(unfading.STAR(FEATURES, HIDDEN), tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["mine.txt"]


class Counting(Odd):
    """A cell whose inputs depend on the index of the step for ever."""

    shared = ("t",)

    class Inputs(NamedTuple):
        u: torch.Tensor
        t: torch.Tensor

    def project(self, x, start=0):
        t = torch.arange(start, start + x.shape[0], dtype=x.dtype)
        return Counting.Inputs(x @ self.U.T, (1 / (1 + t)).reshape(-1, 1, 1))

    def step(self, inputs, state, weights):
        return Odd.State(torch.tanh(inputs.u + inputs.t * unfading.linear(state.h, weights.W)))


def test_a_table_that_does_not_end_is_refused(tmp_path):
    refused(unfading.Recurrent(lambda n: Counting(n, HIDDEN), FEATURES), tmp_path, "index of the step")
