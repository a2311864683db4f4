"""The verdict names planted faults and is clean for healthy models; a diagnosis prints, is JSON, and writes a page."""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unfading
from tests.helpers.command import run as command
from unfading.cells.elman import ElmanCell
from unfading.cli import diagnose_command as cli_diagnose
from unfading.diagnostics.verdict import findings
from unfading.papers.incremental.figures import theorem_cell
from unfading.report import diagnosis_page
from unfading.report.figures import gradient_figures
from unfading.tasks import Adding
from unfading.tasks.base import Batch, EveryStep

# Stands for a small NumPy file.
DATA = Path("x.npy")


class Fault(NamedTuple):
    model: nn.Module
    x: Tensor | Batch
    kinds: set[str]  # of all faults
    says: str  # in the first finding
    advice: str = ""  # in the first change worth trying


def scaled(rnn, factor):
    with torch.no_grad():
        for cell in rnn.cells:
            cell.W_h.mul_(factor)
    return rnn


def noise(T=60, B=4, size=8):
    return torch.randn(T, B, size)


class ForgetfulCell(ElmanCell):
    def step(self, inputs, state, weights):
        return super().step(inputs, type(state)(state.h.detach()), weights)


class Truncated(nn.Module):
    """Truncated backpropagation, ten steps at a time."""

    def __init__(self):
        super().__init__()
        self.rnn = unfading.STAR(8, 16, max_lag=60)

    def forward(self, x):
        outputs, state = [], None
        for chunk in x.split(10):
            output, state = self.rnn(chunk, None if state is None else unfading.detach(state))
            outputs.append(output)
        return torch.cat(outputs)


class Severed(nn.Module):
    """Two stacks with a detached tensor between them."""

    def __init__(self):
        super().__init__()
        self.low, self.high = unfading.STAR(8, 16, max_lag=60), unfading.STAR(16, 16, max_lag=60)

    def forward(self, x):
        return self.high(self.low(x)[0].detach())


def exploding_elman():
    rnn = scaled(unfading.Elman(8, 32, activation="relu"), 2.0)
    return Fault(rnn, noise(), {"explodes in time"}, "1,000 times its value at the loss from lag", "another cell")


def vanishing_elman():
    return Fault(
        scaled(unfading.Elman(8, 32), 0.5),
        noise(),
        {"vanishes in time"},
        "In layer 1, ||dL/dh_t|| is below 1e-3",
        "another cell",
    )


def deep_lstm():
    rnn = unfading.from_torch(nn.LSTM(8, 32, num_layers=12))
    return Fault(rnn, noise(12), {"fades with depth"}, "layer 1 gets", "STAR")


def exploding_depth():
    rnn = unfading.LinearRNN(8, 16, num_layers=8)
    with torch.no_grad():
        for cell in list(rnn.cells)[1:]:
            cell.from_input.weight.mul_(4.0)
    scaled(rnn, 0.3)
    return Fault(rnn, noise(5), {"explodes in time", "explodes with depth"}, "explodes", "")


def saturated_gates():
    rnn = unfading.GRU(8, 32)
    with torch.no_grad():
        rnn.cells[0].from_input.weight.mul_(60.0)
    return Fault(rnn, noise(5), {"saturated"}, "torch.", "")


def dead_relus():
    rnn = unfading.Elman(8, 32, activation="relu")
    with torch.no_grad():
        rnn.cells[0].from_input.bias[:24] = -100.0
    return Fault(rnn, noise(5), {"dead ReLUs"}, "of the ReLUs `phi(", "bias")


def all_dead():
    rnn = unfading.Elman(8, 32, activation="relu")
    with torch.no_grad():
        rnn.cells[0].from_input.bias.fill_(-100.0)
    return Fault(rnn, noise(5), {"dead ReLUs", "vanishes in time"}, "100% of the ReLUs", "")


def chrono_missing():
    task = Adding(T=300)
    rnn = unfading.LSTM(task.input_size, 32)
    model = unfading.Model(task.encoder(), rnn, task.head(32))
    batch = task.batch(0, 4, split="train", seed=0, device="cpu")
    return Fault(model, batch, {"vanishes in time"}, "of 300 steps", "LSTM with a chrono bias, max_lag=300")


def detached_state():
    rnn = unfading.Recurrent(lambda size: ForgetfulCell(size, 16), 8)
    return Fault(rnn, noise(20), {"cut"}, "further back than 0 steps", "without detach")


def truncated():
    return Fault(
        Truncated(), noise(60), {"cut"}, "rnn layer 1, no gradient of the last output goes further back than 9 steps", ""
    )


def severed():
    return Fault(Severed(), noise(20), {"cut"}, "reaches low layer 1", "without detach")


def nan_weights():
    rnn = unfading.LSTM(8, 16, num_layers=2)
    with torch.no_grad():
        rnn.cells[1].W_h[3, 4] = torch.nan
    return Fault(rnn, noise(10), {"not finite"}, "parameter cells.1.W_h", "smaller learning rate")


def nan_input():
    x = noise(10)
    x[3, 1, 2] = torch.inf
    return Fault(unfading.LSTM(8, 16), x, {"not finite"}, "the input", "")


def overflowing_state():
    rnn = scaled(unfading.LinearRNN(8, 16), 100.0)
    return Fault(rnn, noise(60), {"not finite"}, "the state of layer 1 from step", "")


def unused_feature():
    rnn = unfading.STAR(8, 16, max_lag=20)
    with torch.no_grad():
        rnn.cells[0].from_input.weight[:, [2, 5]] = 0.0
    return Fault(
        rnn,
        noise(20),
        {"unused input"},
        "2 of 8 input features of layer 1 have no effect: 2, 5",
        "Reinitialise the input matrix",
    )


def unused_input():
    rnn = unfading.LSTM(8, 16)
    with torch.no_grad():
        rnn.cells[0].from_input.weight.zero_()
    return Fault(rnn, noise(10), {"unused input"}, "dh_t/dx_t is 0", "")


FAULTS = [
    exploding_elman, vanishing_elman, deep_lstm, exploding_depth, saturated_gates, dead_relus, all_dead, chrono_missing,
    detached_state, truncated, severed, nan_weights, nan_input, overflowing_state, unused_feature, unused_input,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.sample(6)
def test_a_planted_fault_is_the_only_fault(plant):
    fault = plant()
    diagnosis = unfading.diagnose(fault.model, fault.x)
    assert {finding.kind for finding in diagnosis.findings if finding.fault} == fault.kinds, str(diagnosis)
    assert not diagnosis.clean
    assert fault.says in diagnosis.findings[0].sentence, str(diagnosis)
    assert fault.advice in diagnosis.advice[0].change, str(diagnosis)
    json.dumps(diagnosis.rows(), allow_nan=False)


@pytest.mark.parametrize(
    ("rnn", "T"),
    [
        (lambda: unfading.STAR(8, 32, num_layers=4, max_lag=100), 100),
        pytest.param(lambda: unfading.STAR(8, 32, num_layers=12), 8, marks=pytest.mark.long),
        (lambda: unfading.LSTM(8, 32, max_lag=200), 200),
        pytest.param(lambda: unfading.LinearRNN(8, 32), 200, marks=pytest.mark.long),
        (lambda: unfading.StableIncrementalRNN(8, 32), 200),
        (lambda: unfading.GRU(8, 32, num_layers=2, bidirectional=True), 12),
    ],
    ids=["STAR", "deep STAR", "chrono LSTM", "orthogonal", "stable", "bidirectional"],
)
@pytest.mark.sample(2)
def test_a_healthy_model_gets_a_clean_verdict(rnn, T):
    diagnosis = unfading.diagnose(rnn(), noise(T))
    assert diagnosis.clean, str(diagnosis)
    assert not diagnosis.findings, str(diagnosis)
    assert not diagnosis.advice
    assert diagnosis.verdict.startswith("Clean")


def test_a_short_memory_is_noted_under_a_loss_at_every_step():
    rnn = unfading.STAR(8, 16)
    model = unfading.Model(nn.Identity(), rnn, EveryStep(16, 3))
    diagnosis = unfading.diagnose(model, Batch(noise(40), torch.randint(3, (40, 4))))
    assert diagnosis.clean
    (note,) = diagnosis.findings
    assert (note.kind, note.fault) == ("short memory", False)
    assert "max_lag=40" in diagnosis.advice[0].change


def test_a_layer_that_forgets_is_a_note_if_another_remembers():
    """The gradient of a STAR layer halves per step, but lower layers also reach the past through those above."""
    diagnosis = unfading.diagnose(unfading.STAR(8, 32, num_layers=12), noise(14))
    assert diagnosis.clean
    (note,) = diagnosis.findings
    assert (note.kind, note.layer) == ("fades in some layers", "layer 12")
    assert 9 <= note.lag <= 12


def linear_stack(decays, input_gains):
    """Layers h_t = decay h_{t-1} + gain x_t, whose gradients are known."""
    rnn = unfading.LinearRNN(4, 4, num_layers=len(decays))
    with torch.no_grad():
        for cell, decay, gain in zip(rnn.cells, decays, input_gains, strict=True):
            cell.W_h.copy_(decay * torch.eye(4))
            cell.from_input.weight.copy_(gain * torch.eye(4))
            cell.from_input.bias.zero_()
    return rnn


@pytest.mark.parametrize(
    ("decays", "gains", "kinds"),
    [
        ((1.0, 1.0), (1.0, 1.0), set()),
        ((0.5, 1.0), (1.0, 1.0), set()),  # the layer above remembers: an early input still reaches the end
        ((0.5, 0.5), (1.0, 1.0), {"vanishes in time"}),
        ((0.3, 0.3, 1.0), (1.0, 1.0, 0.0), {"fades with depth"}),
        ((0.9, 0.9, 0.9), (1.0, 1e-3, 1e-3), {"fades with depth"}),
        ((0.9, 0.9, 0.9), (1.0, 30.0, 30.0), {"explodes in time", "explodes with depth"}),
    ],
    ids=["flat", "upper layer remembers", "time", "top alone", "depth", "exploding depth"],
)
@pytest.mark.sample(3)
def test_known_gradients_get_their_verdict(decays, gains, kinds):
    diagnosis = unfading.diagnose(linear_stack(decays, gains), noise(30, size=4))
    assert {finding.kind for finding in diagnosis.findings if finding.fault} == kinds, str(diagnosis)


@pytest.mark.parametrize(("share", "kinds"), [(6e-7, ["fades with depth"]), (0.5, []), (1e4, ["explodes with depth"])])
@pytest.mark.sample(1)
def test_the_verdict_agrees_with_the_parameter_gradients_that_are_printed(share, kinds):
    measures = unfading.diagnose(linear_stack((0.9, 0.9), (1.0, 1.0)), noise(30, size=4)).measures
    flat = {"end": measures.flat["end"]._replace(bottom_to_top=share)}
    found = findings(dataclasses.replace(measures, flat=flat))
    assert [finding.kind for finding in found if finding.fault] == kinds


def test_the_lag_of_a_known_decay_is_exact():
    """h_t = 0.5 h_{t-1} + ... halves exactly, and 0.5^10 is the first power below 1e-3."""
    rnn = unfading.LinearRNN(8, 16)
    with torch.no_grad():
        rnn.cells[0].W_h.copy_(0.5 * torch.eye(16))
    diagnosis = unfading.diagnose(rnn, noise(40))
    assert diagnosis.findings[0].lag == 10
    assert diagnosis.measures.ratios["layer 1"] == pytest.approx(0.5**38)
    with torch.no_grad():
        rnn.cells[0].W_h.copy_(2.0 * torch.eye(16))
    assert unfading.diagnose(rnn, noise(40)).findings[0].lag == 10


def test_the_measurement_behind_advice_can_be_repeated():
    x = noise(120)
    diagnosis = unfading.diagnose(unfading.LSTM(8, 32), x)
    reported = float(re.search(r"on your input: (\S+) of", diagnosis.advice[0].evidence)[1])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tried = unfading.LSTM(8, 32, max_lag=120)
    own = unfading.diagnose(tried, x).measures.curve("layer 1", loss=False)
    assert own[-1].norm / own[0].norm == pytest.approx(reported, rel=0.2)


def test_diagnosing_does_not_change_the_model():
    torch.manual_seed(1)
    model = unfading.LSTM(8, 16, num_layers=2, dropout=0.3, zoneout=0.1, checkpoint_every=5).train()
    model.cells[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = noise(30)
    random = torch.random.get_rng_state()
    first = unfading.diagnose(model, x)
    assert torch.equal(random, torch.random.get_rng_state())
    assert model.training
    assert not model.cells[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert unfading.diagnose(model, x) == first


def test_every_form_of_input_is_accepted():
    x = noise(12)
    whole = unfading.diagnose(unfading.GRU(8, 16), x)
    assert whole.measures.rows == 4
    torch.manual_seed(0)
    one = unfading.GRU(8, 16, batch_first=True)
    assert unfading.diagnose(one, x.transpose(0, 1)).measures.steps == 12
    assert unfading.diagnose(one, x[:, 0]).measures.rows == 1
    packed = nn.utils.rnn.pack_padded_sequence(x, [12, 9, 4, 2])
    assert unfading.diagnose(unfading.GRU(8, 16), packed).measures.steps == 12
    tokens = nn.Embedding(5, 8)
    model = unfading.Model(tokens, unfading.GRU(8, 16), unfading.LastStep(16, 3))
    batch = Batch(torch.randint(5, (12, 4)), torch.randint(3, (4,)), torch.tensor([3, 12, 5, 1]))
    diagnosis = unfading.diagnose(model, batch)
    assert diagnosis.measures.loss == "cross entropy"
    assert len(diagnosis.measures.curve("rnn layer 1", loss=True)) == 12
    numbers = Batch(x, torch.randn(12, 4, 16))
    assert unfading.diagnose(unfading.GRU(8, 16), numbers).measures.loss == "mean squared error"


def test_large_states_are_estimated_with_intervals():
    rnn, x = unfading.STAR(8, 32, max_lag=12), noise(12)
    exact = {each.lag: each for each in unfading.diagnose(rnn, x).measures.lags}
    for each in unfading.diagnose(rnn, x, exact_up_to=16).measures.lags:
        # The estimate uses one row and the exact value is a median of two, so it is close but need not be in the interval.
        assert each.spectral_low < each.spectral_high
        assert each.spectral == pytest.approx(exact[each.lag].spectral, rel=0.3)


def test_a_diagnosis_contains_the_lattice_of_the_model():
    task = Adding(T=40)
    model = unfading.Model(task.encoder(), unfading.LSTM(2, 8, num_layers=3, zoneout=0.2), task.head(8)).eval()
    batch = task.batch(0, 4, split="train", seed=0, device="cpu")
    diagnosis = unfading.diagnose(model, batch, loss=task.loss)
    assert diagnosis.measures.capped == ("The lattice is measured at 32 of 40 steps.",)
    rows = [row for row in diagnosis.rows()["lattice"] if row["of"] == "loss"]
    assert len(rows) == 3 * 32
    assert {row["layer"] for row in rows} == {"rnn layer 1", "rnn layer 2", "rnn layer 3"}
    # The gradients of all steps add up to the gradient of the parameters, so for a single step they are equal.
    short = unfading.diagnose(model, Batch(batch.x[-1:], batch.target), loss=task.loss)
    task.loss(model(batch.x[-1:])[0], batch).backward()
    for row in short.rows()["lattice"]:
        if row["of"] == "loss":
            gradients = [p.grad for p in model.rnn.cells[row["depth"] - 1].parameters()]
            assert row["value"] == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-4)
    flat = {row["of"]: row for row in diagnosis.rows()["flat"]}
    sums = [sum(row["value"] for row in rows if row["depth"] == depth) for depth in (1, 3)]
    assert flat["loss"]["bottom_to_top"] == pytest.approx(sums[0] / sums[1])
    assert "the bottom layer gets" in str(diagnosis)


def test_a_bidirectional_stack_has_points_but_no_flatness():
    both = unfading.diagnose(unfading.GRU(8, 8, num_layers=2, bidirectional=True), noise(6))
    assert len(both.measures.lattice) == 4 * 6
    assert not both.measures.flat
    other = unfading.diagnose(unfading.StatisticalRNN(8, 8), noise(6))
    assert not other.measures.lattice
    assert "its output depends directly on parameters" in other.measures.capped[0]


def test_a_diagnosis_of_inner_steps_checks_the_theorems():
    rnn = unfading.Recurrent(lambda size: theorem_cell(8, eta=0.5, inputs=size), 3, num_layers=2, dtype=torch.float64)
    diagnosis = unfading.diagnose(rnn, 0.1 * noise(20, size=3).double())
    first, second = diagnosis.rows()["equilibria"]
    assert (first["layer"], second["layer"]) == ("layer 1", "layer 2")
    assert first["steps"][0] == 1
    assert first["steps"][-1] == 20
    assert "The equilibrium is measured at 8 of 20 steps, for one row." in diagnosis.measures.capped
    for row in (first, second):
        assert row["hypotheses"]
        assert row["found"] == 1.0
        assert row["theorem_2"]["holds"] == row["corollary_1"]["holds"] == 1.0
        fit = row["convergence"]
        assert fit["fitted_rate"] == pytest.approx(fit["spectral_radius"], rel=0.02)
        assert fit["fitted_rate"] <= fit["bound"]
        assert row["pulls"][-1] < 1e-6
    assert "converge at a rate of" in str(diagnosis)
    drawn = gradient_figures.figures(diagnosis.rows())
    assert {"pull", "inner", "eigenvalues", "distance", "lattice"} <= set(drawn)
    assert drawn == gradient_figures.figures(diagnosis.rows())
    (table,) = diagnosis_page._equilibria(diagnosis.rows())
    assert ("Theorem 2's condition holds at", ["100%", "100%"]) in table.rows
    page = diagnosis_page._page(diagnosis.rows(), drawn)
    assert '<th scope="row">Theorem 2&#39;s condition holds at</th><td>100%</td><td>100%</td>' in page
    assert unfading.diagnose(unfading.STAR(3, 8), noise(20, size=3)).rows()["equilibria"] == []


def test_an_equilibrium_that_costs_too_much_is_left_out_and_reported():
    diagnosis = unfading.diagnose(unfading.IncrementalRNN(2, 257, inner_steps=1, rank=2), noise(2, 1, 2))
    assert not diagnosis.measures.equilibria
    assert "more than 256 entries" in diagnosis.measures.capped[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: unfading.diagnose(nn.Linear(3, 3), noise()), "Linear has no layer of unfading in it"),
        (lambda: unfading.diagnose(3, noise()), "diagnose takes a torch.nn.Module; got int"),
        (lambda: unfading.diagnose(unfading.GRU(8, 4), [1.0]), "a Tensor, a PackedSequence or a Batch; got list"),
        (lambda: unfading.diagnose(unfading.GRU(8, 4), noise(), loss=lambda p, b: p.sum()), "a loss needs targets"),
        (lambda: unfading.diagnose(unfading.GRU(8, 4), noise(size=3)), "was built with input_size=8; got 3 features"),
        (lambda: unfading.diagnose(unfading.GRU(8, 4), noise(), exact_up_to=0), "exact_up_to must be at least 1"),
        (lambda: unfading.diagnose(unfading.GRU(8, 4), Batch(noise(), noise())), "pass the loss that compares them"),
        (
            lambda: unfading.diagnose(unfading.GRU(8, 4), Batch(noise(), noise()), loss=lambda p, b: p),
            "the loss must be one number; got a tensor of shape [60, 4, 4]",
        ),
        (lambda: unfading.diagnose(nn.ModuleDict({"a": unfading.GRU(8, 4), "b": Idle()})["b"], noise()), "calls none of its"),
    ],
)
def test_wrong_arguments_raise_a_clear_error(call, sentence):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        call()


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = unfading.GRU(8, 4)

    def forward(self, x):
        return x


def test_a_page_works_offline_and_starts_with_the_verdict(tmp_path):
    diagnosis = unfading.diagnose(unfading.LSTM(8, 16, num_layers=2), noise(80))
    written = diagnosis.write(tmp_path / "page.html")
    text = written[0].read_text()
    assert re.search(r"<h1>(.*?)</h1>", text)[1] == diagnosis.verdict
    assert not re.findall(r"(?:src|href)=['\"]?https?:", text)
    assert "default-src 'none'" in text
    assert text.count("<figure>") == 8
    again = diagnosis.write(tmp_path / "again.html")
    assert again[0].read_bytes() == written[0].read_bytes()
    with pytest.raises(ValueError, match="is a folder"):
        diagnosis.write(tmp_path)


@pytest.mark.long
def test_every_figure_can_be_written_as_png(tmp_path):
    diagnosis = unfading.diagnose(unfading.LSTM(8, 16, num_layers=2), Batch(50 * noise(30), noise(30, size=16)))
    pictures = diagnosis.write(tmp_path / "page.html", png=True)[1:]
    names = ("gradient", "loss", "map", "lags", "spectra", "activations", "states", "written", "read", "lattice")
    assert {path.name for path in pictures} == {f"page-{name}.png" for name in names}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)


def test_the_printed_diagnosis_is_short():
    lines = str(unfading.diagnose(unfading.LSTM(8, 16), noise(150))).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 100


def verb(capsys, **flags):
    """The exit code and the printed text."""
    with pytest.raises(SystemExit) as ended:
        cli_diagnose.diagnose(**flags)
    return ended.value.code, capsys.readouterr().out


def test_the_command_diagnoses_cells_models_tasks_and_runs(tmp_path, capsys):
    code, printed = verb(capsys, cell="STAR,max_lag=30", steps=30, hidden=16, json=True)
    assert (code, json.loads(printed)["clean"]) == (0, True)
    (tmp_path / "my.py").write_text(
        "import unfading, torch\n"
        "def build():\n"
        "    rnn = unfading.Elman(3, 8, dtype=torch.float64)\n"
        "    with torch.no_grad():\n"
        "        rnn.cells[0].W_h.mul_(0.1)\n"
        "    return rnn\n"
    )
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(20, 4, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.zeros((20, 4, 8)))
    own = {"model": f"{tmp_path}/my.py:build", "data": tmp_path / "x.npy"}
    code, printed = verb(capsys, **own)
    assert code == 1
    assert "vanishes in time" in printed
    code, printed = verb(capsys, **own, target=tmp_path / "y.npy", json=True)
    assert json.loads(printed)["loss"] == "mean squared error"
    code, printed = verb(capsys, cell="LSTM", task="adding,T=30", hidden=8, json=True)
    assert json.loads(printed)["loss"] == "Adding.loss"
    run = unfading.Run(task="adding", task_options={"T": 10}, cell="STAR", hidden=8, batch=4, steps=4, rate=0.1)
    unfading.train(run, tmp_path)
    code, printed = verb(capsys, run=tmp_path / run.key, json=True)
    trained = json.loads(printed)
    fresh = unfading.diagnose(run.make_model(), run.make_task().batch(0, 8, split="valid", seed=0, device="cpu"))
    assert trained["steps"] == 10
    assert trained["features"] != list(fresh.measures.features)


@pytest.mark.long
def test_the_command_exits_with_1_on_a_fault():
    answer = command("diagnose", "--cell", "Elman", "--hidden", "8", "--steps", "60")
    assert answer.returncode == 1, answer.stderr
    assert answer.stdout.startswith("1 fault: vanishes in time.")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({}, "exactly one of --cell, --model and --run; got none of them"),
        ({"cell": "LSMT"}, "Did you mean 'LSTM'?"),
        ({"cell": "LSTM,max_lga=3"}, "unknown option of cell LSTM 'max_lga'. Did you mean 'max_lag'?"),
        ({"cell": "LSTM", "model": "my.py:build"}, "got --cell and --model"),
        ({"cell": "LSTM", "layers": 0}, "--layers must be at least 1; got 0"),
        ({"cell": "LSTM", "png": True}, "name the page with -o report.html"),
        ({"cell": "LSTM", "data": Path("nowhere.npy")}, "--data nowhere.npy: there is no such file"),
        ({"cell": "LSTM", "data": Path(__file__)}, "is not a NumPy file of numbers"),
        ({"model": "nowhere.py:build", "data": DATA}, "names a file that does not exist"),
        ({"model": f"{__file__}:biuld", "data": DATA}, "has no such name"),
        ({"model": f"{__file__}:nothing", "data": DATA}, "must give a torch.nn.Module; got NoneType"),
        ({"model": f"{__file__}:Idle"}, "give it with --data x.npy"),
        ({"model": "build", "data": DATA}, "expected the name of an object in a file, e.g. my.py:build; got 'build'"),
        ({"model": "my.py:build", "task": "adding"}, "--task goes with --cell"),
        ({"run": Path("nowhere")}, "does not exist"),
    ],
)
def test_a_wrong_command_raises_a_clear_error(flags, sentence, tmp_path):
    if "data" in flags and flags["data"] == DATA:
        np.save(tmp_path / "x.npy", np.zeros((3, 2, 1)))
        flags = {**flags, "data": tmp_path / "x.npy"}
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        cli_diagnose.diagnose(**flags)


def nothing():
    return None
