"""The benchmark of a GPU: its cases, timing, checks and tables, as far as they can be tested without one.

Layers run through Triton's interpreter on the CPU, timed by a clock that only pretends.
"""

import io
import json
import os
import random
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.helpers.benchmarks import plant, script, written
from tests.helpers.paths import ROOT
from unfading import machine
from unfading.backends.choose import IMPLEMENTATIONS
from unfading.bench import cases, gpu, gpu_cases, session
from unfading.bench.agreement import largest_error
from unfading.bench.cases import Case, variants
from unfading.bench.display import tables
from unfading.bench.gpu import measure
from unfading.bench.precision import TOLERANCES, float32_precision
from unfading.bench.results import Pass, Peer, PeerPass, Result, case_fields, read
from unfading.bench.timing import EVENTS, Timer, Timings, time_in_turns
from unfading.cli import main as cli
from unfading.fuse.plan import interpreted
from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.source import triton_missing

PRETENDED = Timer(lambda contender, calls: 0.01, shortest=0.005, warm_ups=1)
GPU = {
    "machine": {"cpu": "Some CPU", "cores": 2, "gpu": "NVIDIA H200"},
    "versions": {"unfading": "0", "torch": "2.11", "compiler": "cc", "cuda": "13.0", "cudnn": 91000, "triton": "3.6.0"},
    "command": "unfading bench --device cuda",
}


def case(name, kind="last", dtype="tf32", models=1):
    return Case(kind, variants()[name], 4, 2, 8, dtype, models, input_size=1)


@pytest.fixture
def measured():
    """Rows of small cases, through Triton's interpreter."""
    if os.environ["TRITON_INTERPRET"] != "1" or triton_missing() is not None:
        pytest.skip("Triton does not interpret here")

    def run(one, **options):
        with interpreted():
            return measure(one, device=torch.device("cpu"), timer=PRETENDED, **options)

    return run


# -- timing ---------------------------------------------------------------------------------------------------------------


class FakeGPU:
    """Work is queued at once and takes its time; events take the time at which the queue gets to them."""

    def __init__(self):
        self.queued, self.events = 0.0, []

    def work(self, seconds):
        self.queued += seconds

    def event(self, enable_timing):
        assert enable_timing
        event = FakeEvent(self)
        self.events.append(event)
        return event


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at, self.waited = gpu, None, False

    def record(self):
        self.at = self.gpu.queued

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, other):
        assert other.waited
        return 1e3 * (other.at - self.at)


def test_events_stand_around_queued_calls_with_one_ahead(monkeypatch):
    fake, calls = FakeGPU(), []
    monkeypatch.setattr(torch.cuda, "Event", fake.event)

    def contender():
        calls.append(fake.queued)
        fake.work(1.0 if not calls[1:] else 0.25)  # the first is dear, as after another contender

    assert EVENTS.seconds(contender, 4) == pytest.approx(0.25)
    assert len(calls) == 5
    assert EVENTS.seconds(contender, 1) == pytest.approx(0.25)
    assert len(calls) == 6  # a slow one needs none ahead


def test_short_calls_are_queued_until_they_fill_a_timing(monkeypatch):
    fake, calls = FakeGPU(), []
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    contender = lambda: (calls.append(0), fake.work(0.001))  # noqa: E731
    timings = time_in_turns({"a": contender}, EVENTS, rounds=50, seconds={"a": 2.0}, order=random.Random(0))
    assert timings.rounds("a") == 50
    assert timings.median("a") == pytest.approx(0.001)
    assert len(calls) == 20 + 50 * 6


# -- precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_precision_is_set_and_set_back(dtype):
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    with float32_precision(dtype):
        assert {place.fp32_precision for place in places} == {"ieee" if dtype == "float32" else "tf32"}
    assert [place.fp32_precision for place in places] == before
    with pytest.raises(RuntimeError, match="stop"), float32_precision(dtype):
        raise RuntimeError("stop")
    assert [place.fp32_precision for place in places] == before


# -- measuring ------------------------------------------------------------------------------------------------------------


def test_a_row_has_our_time_and_error_and_those_of_the_peers(measured, monkeypatch):
    monkeypatch.delitem(IMPLEMENTATIONS, "graph", raising=False)
    before = torch.random.get_rng_state()
    result = measured(case("GRU reset after"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert result.status == "measured"
    assert result.case == case("GRU reset after").key
    assert result.forward.ms == result.both.ms == 10.0
    assert 0 < result.error < 2e-6
    assert 0 < result.error_contractive < 2e-6
    assert result.first_s > 0
    timed = {peer.name: peer for peer in result.peers if peer.reason is None}
    assert set(timed) == {"eager loop", "cuDNN LSTM", "cuDNN GRU"}
    for peer in timed.values():
        assert peer.both == PeerPass(ms=10.0, rounds=50, of=1.0)
        assert 0 < peer.error < 2e-6
        assert peer.first_s > 0
    reasons = {peer.name: peer.reason for peer in result.peers if peer.reason is not None}
    captured = dict.fromkeys(["fused, captured", "cuDNN LSTM, captured", "cuDNN GRU, captured"], "graphs are captured on a GPU")
    assert reasons == {"graphed loop": "this version has no backend 'graph'", "TorchRL": "not installed", **captured}


def test_the_loops_can_be_left_out(measured):
    names = {peer.name for peer in measured(case("STAR"), loops=False).peers}
    assert "cuDNN LSTM" in names
    assert not names & {"eager loop", "graphed loop"}


def test_a_peers_ratio_is_our_time_over_its():
    timings = Timings({"fused": [1.0, 1.1, 0.9], "control": [1.0, 1.1, 0.9], "other": [4.0, None, 3.6]})
    assert gpu._peer_pass(timings, "other") == PeerPass(ms=3800.0, rounds=2, of=0.25)
    assert gpu._pass(timings) == Pass(ms=1000.0, rounds=3, control=1.0)
    assert gpu._peer_pass(Timings({"other": [4.0]}), "other").of is None


def test_a_fleet_is_checked_and_timed_beside_its_members(measured):
    result = measured(case("STAR", "fleet", "float32", models=2))
    assert result.status == "measured"
    assert 0 < result.error < TOLERANCES["float32"]
    assert result.both.ms == 10.0
    assert [peer.name for peer in result.peers] == ["fused, captured", "one by one"]
    assert result.peers[1].both.of == 1.0


def half_trajectory(result):
    trajectory, final, saved = result
    return [0.5 * part for part in trajectory], final, saved


def last_weight_without_gradient(result):
    d_inputs, d_states, d_weights = result
    return d_inputs, d_states, [*d_weights[:-1], torch.zeros_like(d_weights[-1])]


@pytest.mark.parametrize(
    ("kind", "method", "change", "word"),
    [
        ("last", "forward", half_trajectory, "output"),
        ("last", "backward", last_weight_without_gradient, "gradient"),
        ("fleet", "backward", last_weight_without_gradient, "gradient"),
    ],
)
@pytest.mark.sample(1)
def test_a_wrong_result_is_refused_and_nothing_timed(measured, monkeypatch, kind, method, change, word):
    plant(monkeypatch, (TritonKernel, method), change)
    monkeypatch.setattr(gpu, "time_in_turns", lambda *_, **__: pytest.fail("a wrong result was timed"))
    result = measured(case("STAR", kind, models=2 if kind == "fleet" else 1))
    assert result.status == "wrong"
    assert word in result.reason
    assert result.error_contractive > TOLERANCES["tf32"]
    assert result.both is None


def test_a_cell_of_which_the_precision_tells_nothing_is_checked_in_float32(measured, monkeypatch):
    monkeypatch.setattr(gpu, "YARDSTICK", 0.0)
    precisions = []
    plant(
        monkeypatch,
        (gpu, "_fused_and_reference"),
        lambda pair: precisions.append(torch.backends.cuda.matmul.fp32_precision) or pair,
    )
    assert measured(case("STAR")).status == "measured"
    assert precisions == ["tf32", "tf32", "ieee"]
    plant(monkeypatch, (TritonKernel, "forward"), half_trajectory)
    assert measured(case("STAR")).status == "wrong"


def test_where_we_are_refused_the_peers_are_timed_all_the_same(measured, monkeypatch):
    monkeypatch.setattr(gpu, "refusal", lambda cell: "it is shy")
    result = measured(case("STAR"))
    assert (result.status, result.reason, result.both) == ("refused", "it is shy", None)
    assert result.peer("eager loop").both == PeerPass(ms=10.0, rounds=50, of=None)


def test_half_precision_is_autocast_for_us_and_the_modules_own_for_cudnn(measured, monkeypatch):
    monkeypatch.setattr(gpu, "refusal", lambda cell: "autocast" if torch.is_autocast_enabled("cpu") else None)
    result = measured(case("STAR", dtype="bf16"))
    assert result.reason == "autocast"
    for name in ("eager loop", "cuDNN LSTM"):
        assert 1e-4 < result.peer(name).error < TOLERANCES["bf16"]


def test_half_precision_runs_fused_and_is_held_to_its_own_tolerance(measured):
    result = measured(case("STAR", dtype="fp16"))
    assert result.status == "measured"
    assert 1e-5 < result.error_contractive < TOLERANCES["fp16"]


# -- other people's kernels, as they are documented -----------------------------------------------------------------------


def stand_in(monkeypatch, name, **names):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in names.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def flashrnn(Wx, R, b, states=None, function="lstm", config=None, backend="cuda_fused", dtype="bfloat16"):
    """Wx [B, T, gates, heads, D], R [gates, heads, D, D], b [gates, heads, D] -> states [2, B, T, heads, D], the last."""
    assert (function, dtype) == ("lstm", str(Wx.dtype).removeprefix("torch."))
    if backend == "triton_fused":
        raise RuntimeError("out of shared memory")
    h = c = Wx.new_zeros(Wx.shape[0], *Wx.shape[3:])
    states = []
    for step in Wx.unbind(1):
        i, f, z, o = (step + torch.einsum("bnp,gndp->bgnd", h, R) + b).unbind(1)
        c = f.sigmoid() * c + i.sigmoid() * z.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(torch.stack([h, c]))
    return torch.stack(states, 2), states[-1].unsqueeze(2)


def rnn_triton(kind):
    """Rows first, states to begin with and to reset to at every step, and where to."""

    def run(x, *arguments, input_precision):
        starts = arguments[: 2 if kind is nn.LSTM else 1]
        weights, resets = arguments[len(starts) : -1], arguments[-1]
        assert not resets.any()
        assert not any(start.any() for start in starts)
        assert all(start.shape[:2] == x.shape[:2] for start in starts)
        assert input_precision == "tf32"
        rnn = kind(x.shape[-1], weights[1].shape[-1], batch_first=True)
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        output, state = torch.func.functional_call(rnn, dict(zip(names, weights, strict=True)), (x,))
        if kind is nn.GRU:
            return output, state[0]
        return output, output.detach(), *(part[0] for part in state)

    return run


def test_peers_that_are_installed_run_with_the_same_weights(measured, monkeypatch):
    stand_in(monkeypatch, "flashrnn", flashrnn=flashrnn)
    stand_in(monkeypatch, "torchrl")
    stand_in(monkeypatch, "torchrl.modules")
    kernels = ModuleType("_rnn_triton")
    kernels.lstm_triton, kernels.gru_triton = rnn_triton(nn.LSTM), rnn_triton(nn.GRU)
    stand_in(monkeypatch, "torchrl.modules.tensordict_module", _rnn_triton=kernels)
    result = measured(case("LSTM"))
    assert result.peer("FlashRNN Triton").reason == "RuntimeError: out of shared memory"
    for name in ("FlashRNN CUDA", "TorchRL"):
        assert result.peer(name).reason is None
        assert 0 < result.peer(name).error < 2e-6
        assert result.peer(name).both.of == 1.0
    assert measured(case("GRU reset after")).peer("TorchRL").error < 2e-6


def test_an_error_that_cannot_be_told_is_none():
    one = torch.ones(3, dtype=torch.float64)
    assert largest_error({"a": 1.5 * one, "b": one}, {"a": one, "b": one}) == pytest.approx(0.5)
    assert largest_error({"a": one / 0}, {"a": one}) is None
    assert largest_error({"a": one}, {"a": 0 * one}) is None


# -- plans and the command ------------------------------------------------------------------------------------------------


def test_plans_name_every_line_once_and_every_cell():
    for plan in (gpu_cases.headline(), gpu_cases.everything()):
        keys = [one.key for one in plan]
        assert len(set(keys)) == len(keys)
    assert {one.variant.cell for one in gpu_cases.everything()} == set(cases.cell_classes())
    assert {one.variant.cell for one in gpu_cases.headline(["JANET", "NRU"])} == {"JANET", "NRU"}
    assert len(gpu_cases.headline()) <= 36  # twelve minutes
    with pytest.raises(ValueError, match="Did you mean 'LSTM'"):
        gpu_cases.everything(["Lstm"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["unfading", "bench", "--device", "cuda"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    text = capsys.readouterr().err.strip()
    assert "--device cuda needs an NVIDIA GPU" in text
    assert len(text.splitlines()) == 1


def test_every_line_is_in_the_file_when_it_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(machine, "gpu_slug", lambda: "some-gpu")
    path = tmp_path / "cuda-some-gpu.jsonl"
    calls = []

    def one(case, rounds, loops):
        assert not loops
        calls.append((rounds, len(path.read_text().splitlines())))
        if case.kind == "fleet":
            raise torch.OutOfMemoryError("too large")
        return make_result(case)

    monkeypatch.setattr(gpu, "measure", one)
    assert session.on_gpu(["STAR"], False, None, loops=False, json=False, save=tmp_path, command="unfading bench") == 1
    planned = gpu_cases.headline(["STAR"])
    assert calls == [(50, i) for i in range(len(planned))]
    assert {result.kind for result in read(path)[0] if result.status == "failed"} == {"fleet"}
    answer = capsys.readouterr()
    assert "OutOfMemoryError: too large" in " ".join(answer.out.split())
    assert f"[{len(planned)}/{len(planned)}, " in answer.err


# -- results, tables, bars ---------------------------------------------------------------------------------------------------


def make_result(one, of=0.1, loops=0.001, **changes):
    """A result that holds every bar."""
    peers = [Peer("cuDNN LSTM", error=1e-3, both=PeerPass(30.0, 50, of))]
    if one.variant.cell == "GRU":
        peers.append(Peer("cuDNN GRU", both=PeerPass(40.0, 50, of)))
    peers += [Peer(name, both=PeerPass(900.0, 3, loops)) for name in ("eager loop", "graphed loop")]
    replayed = {"fused, captured": 2.5, "cuDNN LSTM, captured": 28.0, "cuDNN GRU, captured": 38.0}
    peers += [Peer(name, forward=PeerPass(0.5, 50, None), both=PeerPass(ms, 50, None)) for name, ms in replayed.items()]
    peers.append(Peer("TorchRL", reason="not installed"))
    passes = {"forward": Pass(0.5, 50, 1.0), "both": Pass(3.0, 50, 1.0)}
    fields = {"status": "measured", "error": 1e-3, "error_contractive": 1e-6, "first_s": 2.0, "peers": tuple(peers)}
    return Result(**{**case_fields(one), **passes, **fields, **changes})


def every_result():
    return [make_result(one) for one in gpu_cases.everything()]


def test_a_row_is_the_same_after_a_file(tmp_path):
    results = every_result()
    assert read(written(tmp_path / "results.jsonl", results))[0] == results


def test_tables_fit_eighty_columns_and_say_what_was_not_timed():
    results = [make_result(one) for one in gpu_cases.headline()]
    results[-1] = replace(results[-1], status="refused", reason="it is shy", forward=None, both=None)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tables(results, GPU))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for word in (
        "IncrementalRNN K=1",
        "tf32",
        "bf16",
        "fp16",
        "0.64",
        "0.10",
        "1000",
        "8",
        "16",
        "NVIDIA H200",
        "Triton 3.6.0",
    ):
        assert word in words
    assert "refused: LSTM T=784 B=128 H=128 fp16 input size 128: it is shy; beside it, fwd+bwd: cuDNN LSTM 30.0 ms" in words
    assert words.count("not timed: TorchRL: not installed") == 1


def test_bars_are_held_by_rows_that_hold_them_and_each_asks_for_something(judging):
    code, text = judging(every_result())
    assert code == 0, text
    assert text.count("held") == len(script("bars").gpu_bars())
    for bar in script("bars").gpu_bars():
        assert any(map(bar.asks, gpu_cases.everything())), bar.setting


def but(change, **wanted):
    """All results, those that have the wanted fields changed."""
    results = every_result()
    chosen = [result for result in results if all(getattr(result, name) == value for name, value in wanted.items())]
    assert chosen
    return [change(result) if result in chosen else result for result in results]


def slower(name, of):
    def change(result):
        peers = [replace(peer, both=replace(peer.both, of=of)) if peer.name == name else peer for peer in result.peers]
        return replace(result, peers=tuple(peers))

    return change


def slow(ms):
    return lambda result: replace(result, both=replace(result.both, ms=ms), forward=replace(result.forward, ms=ms))


def slowly(ms):
    """As `slow`, of what is replayed."""

    def change(result):
        peers = [replace(p, both=replace(p.both, ms=ms)) if p.name == "fused, captured" else p for p in result.peers]
        return replace(result, peers=tuple(peers))

    return change


REFUSED = {"status": "refused", "reason": "it is shy", "forward": None, "both": None, "error_contractive": None}
AT_128, AT_64 = {"T": 784, "B": 128, "H": 128}, {"T": 1000, "H": 64}
SHORT = {
    "STAR captured": (slowly(17.0), {"name": "STAR", "dtype": "tf32", **AT_64}),
    "GRU captured": (slowly(31.0), {"name": "GRU reset after", "dtype": "tf32", **AT_128}),
    "eight captured": (slowly(5.1), {"models": 8}),
    "200 units captured": (slowly(14.1), {"name": "LSTM", "H": 200}),
    "twelve layers captured": (slowly(13.1), {"name": "STAR", "num_layers": 12}),
    "STAR": (slower("cuDNN LSTM", 0.61), {"name": "STAR", "dtype": "tf32", **AT_64}),
    "incremental": (slower("cuDNN LSTM", 0.66), {"name": "IncrementalRNN K=1", "dtype": "tf32", **AT_128}),
    "GRU at 128": (slower("cuDNN GRU", 0.81), {"name": "GRU reset after", "dtype": "tf32", **AT_128}),
    "GRU at 64": (slower("cuDNN GRU", 0.51), {"name": "GRU reset after", **AT_64}),
    "LSTM at 64": (slower("cuDNN LSTM", 1.21), {"name": "LSTM", **AT_64}),
    "LSTM at 128": (slower("cuDNN LSTM", 1.51), {"name": "LSTM", "dtype": "tf32", **AT_128}),
    "eager": (slower("eager loop", 1 / 59), {"name": "UGRNN"}),
    "graph": (slower("graphed loop", 1 / 3.9), {"name": "JANET"}),
    "step bf16": (slow(784 * 0.91e-3), {"name": "STAR", "dtype": "bf16", **AT_128}),
    "step at 64": (slow(0.76), {"name": "STAR", **AT_64}),
    "STAR wide": (slower("cuDNN LSTM", 0.21), {"name": "STAR", "B": 1024}),
    "LSTM wide": (slower("cuDNN LSTM", 0.51), {"name": "LSTM", "B": 1024}),
    "bf16 at 128": (slower("cuDNN LSTM", 0.13), {"name": "STAR", "dtype": "bf16", **AT_128}),
    "bf16 at 256": (slower("cuDNN LSTM", 0.21), {"name": "IncrementalRNN K=1", "H": 256}),
    "eight": (slow(5.1), {"models": 8}),
    "sixteen": (slow(7.6), {"models": 16}),
    "strict": (lambda result: replace(result, error_contractive=2.1e-6), {"dtype": "float32", "name": "LSTM"}),
    "tf32": (lambda result: replace(result, error_contractive=2.1e-3), {"dtype": "tf32", "name": "STAR", "B": 1024}),
    "bf16": (lambda result: replace(result, error_contractive=2.1e-2), {"dtype": "bf16", "H": 256, "name": "STAR"}),
}


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.sample(8)
def test_a_bar_is_missed_by_one_line_that_is_short_of_it(judging, short):
    change, wanted = SHORT[short]
    code, text = judging(but(change, **wanted))
    assert code == 1
    assert text.count("missed") == 2, text  # in the table and above its list


def test_a_step_and_the_nru_have_bars_of_their_own(judging):
    code, text = judging(but(slow(784 * 1.31e-3), name="STAR", dtype="tf32", models=1, **AT_128))
    assert code == 1
    assert "STAR T=784 B=128 H=128 tf32 forward: 1.31" in text
    code, text = judging(but(slowly(40.1), name="NRU psMNIST"))
    assert code == 1
    assert "NRU psMNIST T=785 B=100 H=212 tf32 fwd+bwd: 40.10" in text


def test_lines_without_a_number_leave_a_bar_open_or_miss_it(judging):
    refused = {**REFUSED, "peers": ()}
    code, text = judging(but(lambda result: replace(result, **refused), dtype="bf16", H=256))
    assert code == 1
    assert "missed: cuDNN LSTM, <= 0.2" in text
    assert "STAR T=1000 B=128 H=256 bf16: refused: it is shy" in text
    # Of cells that do not run fused nothing is asked against the loops.
    assert judging(but(lambda result: replace(result, **refused), name="UGRNN"))[0] == 0

    def without_graph(result):
        peers = [replace(peer, both=None, reason="not here") if peer.name == "graphed loop" else peer for peer in result.peers]
        return replace(result, peers=tuple(peers))

    code, text = judging([without_graph(result) for result in every_result()])
    assert code == 1
    assert "incomplete: graphed loop, >= 4" in text
    assert "no number against graphed loop: not here" in text
    # Without --all some lines are missing, and only what asks for them is open.
    code, text = judging([make_result(one) for one in gpu_cases.headline()])
    missing = [one for one in gpu_cases.everything() if one not in gpu_cases.headline()]
    assert text.count("incomplete") == 2 * sum(any(map(bar.asks, missing)) for bar in script("bars").gpu_bars())
    assert "missed" not in text


def test_the_table_of_the_docs_is_made_from_records(tmp_path, monkeypatch):
    table = script("gpu_table")
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    path = tmp_path / "results.jsonl"
    results = [make_result(one) for one in gpu_cases.everything()]
    path.write_text("".join(json.dumps(result.record(GPU)) + "\n" for result in results))
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", str(path), "--into", str(page)])
    for _ in range(2):  # the second replaces the first
        table.main()
    text = page.read_text()
    assert text.count("| STAR | 784, 128, 128 | tf32 | 0.64 | 3.00 | 2.50 | 30.0 | 28.0 | - | 900 | 900 | 1e-03 |") == 1
    assert (
        text.count("| GRU reset after | 784, 128, 128 | tf32 | 0.64 | 3.00 | 2.50 | 30.0 | 28.0 | 40.0 | 900 | 900 | 1e-03 |")
        == 1
    )
    assert text.count("| 16 STAR together |") == 1
    assert "UGRNN | 200" not in text
    assert "NVIDIA H200, torch 2.11, Triton 3.6.0" in text
    assert "`unfading bench --device cuda`" in text
