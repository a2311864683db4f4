"""The benchmark measures what it says, refuses what is wrong, and writes down on what it ran."""

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.helpers.benchmarks import ABOUT, plant, script, written
from unfading import machine
from unfading.bench import cases, session, timing
from unfading.bench.agreement import FLOOR, LARGEST, difference, disagreement
from unfading.bench.cases import Case, variants
from unfading.bench.cpu import half_lengths, measure
from unfading.bench.results import Pass, Result, read
from unfading.bench.speed_figure import svg
from unfading.bench.timing import Timer, time_in_turns, torch_threads
from unfading.cli import main as cli
from unfading.fuse.c.backward import Backward
from unfading.fuse.c.kernel import Kernel
from unfading.fuse.fused import refusal
from unfading.layers.factory import layer
from unfading.layers.recurrent import Recurrent

SMALL = {"T": 5, "B": 2, "H": 16}


def case(name, kind="layer", **sizes):
    return Case(kind, variants()[name], **{**SMALL, **sizes})


def fused_layer(name, T=5, H=16):
    """A layer that runs fused; without one the test is skipped."""
    variant = variants()[name]
    built = layer(cases.cell_classes()[variant.cell])(cases.INPUT, H, **variant.options(T, H))
    if (reason := refusal(built.cells[0])) is not None:
        pytest.skip(reason)
    return built


def half_final_state(result):
    trajectory, final, saved = result
    return trajectory, [0.5 * part for part in final], saved


def shifted_output(result):
    result[0][0][-1] += 1e-2
    return result


def gradient_without_last_weight(result):
    d_inputs, d_states, d_weights = result
    return d_inputs, d_states, [*d_weights[:-1], torch.zeros_like(d_weights[-1])]


FAULTS = {
    "output": ((Kernel, "forward"), shifted_output, "output"),
    "final state": ((Kernel, "forward"), half_final_state, "final h"),
    "gradient": ((Backward, "gradients"), gradient_without_last_weight, "gradient of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_refused_and_not_timed(monkeypatch, fault):
    fused_layer("Elman")
    where, change, word = FAULTS[fault]
    plant(monkeypatch, where, change)
    monkeypatch.setattr("unfading.bench.cpu.time_in_turns", lambda *_, **__: pytest.fail("a wrong result was timed"))
    result = measure(case("Elman"))
    assert result.status == "wrong"
    assert word in result.reason
    assert result.forward is None
    assert result.both is None


def test_wrong_lengths_are_refused(monkeypatch):
    fused_layer("Elman")
    plant(monkeypatch, (Kernel, "forward"), half_final_state)
    assert measure(case("Elman", "lengths")).status == "wrong"


def test_weights_and_references_that_can_tell_nothing_are_refused():
    elman, x = fused_layer("Elman"), torch.randn(5, 2, cases.INPUT)
    assert disagreement(elman, x) is None
    with torch.no_grad():
        elman.cells[0].W_h[0, 0] = float("nan")
    assert "W_h is not finite" in disagreement(elman, x)
    with torch.no_grad():
        for parameter in elman.parameters():
            parameter.zero_()
    assert "of the reference is zero" in disagreement(elman, x)


def test_the_tolerance_grows_with_the_references_own_rounding_and_not_for_ever():
    want = torch.ones(10, dtype=torch.float64)
    assert difference(want * (1 + 0.5 * FLOOR), want, want) is None
    assert "away from the reference" in difference(want * (1 + 5 * FLOOR), want, want)
    assert difference(want * (1 + 5 * FLOOR), want * (1 + 5 * FLOOR), want) is None
    assert "rounding alone" in difference(want, want * (1 + LARGEST), want)
    assert "not finite" in difference(want, want / 0, want)
    assert "nan away" in difference(want * float("nan"), want, want)


@pytest.mark.parametrize("name", ["LSTM", "GRU reset after", "NRU", "IncrementalRNN", "IncrementalRNN K=1"])
@pytest.mark.sample(2)
def test_a_row_has_every_comparison_there_is(name):
    fused_layer(name)
    result = measure(case(name), rounds=3)
    assert result.status == "measured"
    for one in (result.forward, result.both):
        assert one.ms > 0
        assert one.control > 0
        assert one.x_reference > 0
        assert (one.x_torch is not None) == (name in ("LSTM", "GRU reset after"))
    assert result.torch_name == {"LSTM": "nn.LSTM", "GRU reset after": "nn.GRU"}.get(name)
    assert result.matrices == {"LSTM": 4, "GRU reset after": 3, "IncrementalRNN K=1": 1}.get(name)
    assert (result.both.of_products is None) == (result.matrices is None)
    assert result.dense == (name != "IncrementalRNN")


def test_the_reference_loop_can_be_left_out():
    fused_layer("LSTM")
    result = measure(case("LSTM"), rounds=3, loops=False)
    for one in (result.forward, result.both):
        assert one.x_reference is None
        assert one.x_torch > 0


def test_lengths_are_half_of_full_on_average():
    lengths = half_lengths(case("STAR", "lengths", T=200, B=32))
    assert lengths.min() >= 1
    assert lengths.max() < 200
    assert abs(lengths.float().mean() - 100) < 1
    fused_layer("STAR")
    result = measure(case("STAR", "lengths"), rounds=3)
    assert result.both.of_full > 0
    assert result.forward is None


class Pushed:
    """What stream() does, slowly; `fault` is added to what it returns."""

    def __init__(self, layer, batch, fault=0.0):
        self.layer, self.state, self.fault = layer, None, fault

    @torch.no_grad()
    def push(self, x):
        output, self.state = self.layer(x[None], self.state)
        return output[0] + self.fault


@pytest.mark.parametrize(("fault", "status"), [(0.0, "measured"), (0.01, "wrong")])
def test_a_stream_is_timed_by_the_step_and_refused_where_wrong(monkeypatch, fault, status):
    fused_layer("STAR")
    monkeypatch.setattr(Recurrent, "stream", lambda layer, batch: Pushed(layer, batch, fault), raising=False)
    assert [one.variant.name for one in cases.headline(["STAR"]) if one.kind == "stream"] == ["STAR"]
    result = measure(case("STAR", "stream", B=1), rounds=3)
    assert result.status == status
    if fault:
        assert "the output of stream() is" in result.reason
    else:
        assert 0 < result.forward.ms < 100
        assert result.forward.x_torch > 0


def test_a_cell_that_does_not_run_fused_shows_its_reason(monkeypatch):
    monkeypatch.setattr("unfading.bench.cpu.refusal", lambda cell: "it is shy")
    result = measure(case("Elman"))
    assert (result.status, result.reason) == ("refused", "it is shy")


def fake(order, warm_ups=2, shortest=2e-3):
    """A clock: every timing is written down, and takes as many seconds as its contender says."""
    return Timer(lambda contender, calls: order.append(contender) or contender(), shortest, warm_ups)


def test_every_round_has_all_contenders_in_an_order_of_its_own():
    contenders = {name: lambda name=name: 0.01 for name in "abcdef"}
    order = []
    time_in_turns(contenders, fake(order), rounds=4, seconds=dict.fromkeys(contenders, 1.0), order=random.Random(0))
    names = {contender: name for name, contender in contenders.items()}
    ran = [names[contender] for contender in order[12:]]  # after two calls each to warm up
    rounds = ["".join(ran[i : i + 6]) for i in range(0, 24, 6)]
    assert len(ran) == 24
    assert all(sorted(one) == sorted(contenders) for one in rounds)
    assert len(set(rounds)) == 4


def test_a_slow_contender_runs_in_fewer_rounds_spread_over_all():
    contenders = {"quick": lambda: 0.01, "slow": lambda: 0.5}
    timings = time_in_turns(contenders, fake([]), rounds=12, seconds={"quick": 1.0, "slow": 2.0}, order=random.Random(0))
    ran = [i for i, taken in enumerate(timings.seconds["slow"]) if taken is not None]
    assert ran == [2, 5, 8, 11]
    assert timings.rounds("quick") == 12
    assert timings.ratio("slow", "quick") == pytest.approx(50)
    assert timings.median("slow") == 0.5


@pytest.mark.parametrize(("taken", "calls"), [(0.001, 20), (0.03, 7), (0.3, 1)])
def test_what_is_slow_warms_up_in_fewer_calls(taken, calls):
    order = []
    time_in_turns({"a": lambda: taken}, fake(order, warm_ups=20), rounds=3, seconds={"a": 1.0}, order=random.Random(0))
    assert len(order) == calls + 3


def test_ratios_are_of_one_round_each():
    timings = timing.Timings({"a": [1.0, 30.0, 3.0, None], "b": [2.0, 10.0, 6.0, 1.0]})
    assert timings.ratio("a", "b") == 0.5  # of 1/2, 3, 1/2; the ratio of the medians is 3 / 4


def test_threads_are_as_before_after_a_measurement_and_after_an_error(monkeypatch):
    before = torch.get_num_threads()
    threads = []
    monkeypatch.setattr("unfading.bench.cpu.refusal", lambda cell: threads.append(torch.get_num_threads()) or "no")
    measure(case("Elman"), threads=2)
    assert threads == [2]
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="stop"), torch_threads(2):
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before


def test_random_numbers_are_as_before_after_a_measurement():
    fused_layer("Elman")
    before = torch.random.get_rng_state()
    measure(case("Elman"), rounds=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_unsteady_control_is_left_out_on_several_threads_only(monkeypatch):
    fused_layer("Elman")
    monkeypatch.setattr("unfading.bench.cpu._pass", lambda timings: Pass(ms=1.0, rounds=3, control=1.3))
    assert measure(case("Elman"), rounds=3).status == "measured"
    result = measure(case("Elman"), rounds=3, threads=2)
    assert result.status == "unsteady"
    assert "1.30" in result.reason
    assert result.both is None


def test_plans_name_real_cells_once_and_ask_for_every_size():
    for plan in (cases.headline(), cases.everything()):
        assert len(set(plan)) == len(plan)
    asked = {(one.variant.name, one.T, one.B, one.H) for one in cases.everything() if one.kind == "layer"}
    for name in variants():
        assert {(name, T, 1, H) for T in (200, 784) for H in (64, 128)} <= asked
    assert ("LSTM", 784, 128, 64) in asked
    assert {one.variant.cell for one in cases.headline(["GRU", "NRU"])} == {"GRU", "NRU"}
    assert {one.variant.cell for one in cases.everything(["STAR"])} == {"STAR"}
    with pytest.raises(ValueError, match=r"unknown cell 'Lstm'\. Did you mean 'LSTM'\?"):
        cases.headline(["Lstm"])


def few(monkeypatch):
    """The command runs over two small cases."""
    monkeypatch.setattr(cases, "headline", lambda cells: [case("Elman"), case("LSTM")])


def start(**options):
    given = {"loops": True, "json": False, "save": None, "figure": None, "command": "unfading bench"}
    return session.on_cpu((), False, (1,), 3, **{**given, **options})


def test_json_lines_tell_machine_and_versions_and_can_be_read_again(monkeypatch, capsys, tmp_path):
    few(monkeypatch)
    fused_layer("Elman")
    figure = tmp_path / "speed.svg"
    assert start(json=True, save=tmp_path, figure=figure) == 0
    printed = capsys.readouterr().out
    (saved,) = tmp_path.glob("*.jsonl")
    assert saved.name == f"cpu-{machine.slug()}.jsonl"
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+core\.jsonl", saved.name)
    assert saved.read_text() == printed
    for line in printed.splitlines():
        record = json.loads(line)
        assert record["machine"]["cpu"]
        assert record["machine"]["cores"] >= 1
        assert record["versions"]["torch"] == torch.__version__
        assert record["versions"]["unfading"]
        assert "compiler" in record["versions"]
        assert record["command"] == "unfading bench"
        assert re.match(r"20\d\d-\d\d-\d\dT", record["date"])
    results, records = read(saved)
    assert [result.name for result in results] == ["Elman", "LSTM"]
    assert records == [json.loads(line) for line in printed.splitlines()]
    ElementTree.fromstring(figure.read_text())
    # Measured again, the later line counts.
    assert start(json=True, save=saved) == 0
    assert len(saved.read_text().splitlines()) == 4
    assert len(read(saved)[0]) == 2


def test_numbers_of_threads_are_measured_one_after_the_other(monkeypatch, capsys):
    few(monkeypatch)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr("unfading.bench.cpu.refusal", lambda cell: "it is not measured here")
    arguments = {"loops": True, "json": True, "save": None, "command": "unfading bench"}
    session.on_cpu((), False, (1, 2), 3, figure=None, **arguments)
    assert [json.loads(line)["threads"] for line in capsys.readouterr().out.splitlines()] == [1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"got --threads 1 2\. Name one"):
        session.on_cpu((), False, (1, 2), 3, figure=Path("speed.svg"), **arguments)


def test_a_table_is_printed_and_nothing_written_unless_asked(monkeypatch, capsys, tmp_path):
    few(monkeypatch)
    fused_layer("Elman")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert start() == 0
    shown = capsys.readouterr().out
    for word in ("Elman", "LSTM", "forward", "fwd+bwd", "reference", "torch.nn", "GEMMs", "control", torch.__version__):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_a_mismatch_is_told_and_the_exit_code_is_1(monkeypatch, capsys):
    few(monkeypatch)
    fused_layer("Elman")
    plant(monkeypatch, (Kernel, "forward"), half_final_state)
    assert start() == 1
    shown = capsys.readouterr().out
    assert "wrong: Elman" in shown
    assert "away from the reference" in " ".join(shown.split())


def test_a_case_that_raises_is_a_line_with_its_reason_and_the_others_go_on(monkeypatch, capsys, tmp_path):
    few(monkeypatch)
    fused_layer("Elman")

    def measured(one, **options):
        if one.variant.name == "Elman":
            raise RuntimeError("no room\nand much more")
        return measure(one, **options)

    monkeypatch.setattr(session, "measure", measured)
    assert start(save=tmp_path / "results.jsonl") == 1
    answer = capsys.readouterr()
    assert "failed: Elman T=5 B=2 H=16: RuntimeError: no room\n" in answer.out
    assert "[1/2, 0 s] Elman T=5 B=2 H=16: failed" in answer.err
    assert [result.status for result in read(tmp_path / "results.jsonl")[0]] == ["failed", "measured"]


def test_a_run_that_is_stopped_keeps_what_it_has(monkeypatch, capsys, tmp_path):
    few(monkeypatch)
    fused_layer("Elman")

    def measured(one, **options):
        if one.variant.name == "LSTM":
            raise KeyboardInterrupt
        return measure(one, **options)

    monkeypatch.setattr(session, "measure", measured)
    assert start(save=tmp_path / "results.jsonl") == 130
    answer = capsys.readouterr()
    assert "Elman" in answer.out
    assert "stopped after 1 of 2 cases" in answer.err
    assert [result.name for result in read(tmp_path / "results.jsonl")[0]] == ["Elman"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cells", "LSTN"], "unknown cell 'LSTN'. Did you mean 'LSTM'?"),
        (["--threads", "0"], "--threads must be at least 1; got 0"),
        (["--threads", "100000"], "got 100000"),
        (["--save", "nowhere/results.jsonl"], "there is no folder nowhere"),
        (["--device", "cuda", "--threads", "2"], "--threads and --figure are for --device cpu"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["unfading", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert sentence in text
    assert len(text.strip().splitlines()) == 1


def test_the_verb_hands_its_flags_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(session, "on_cpu", lambda *arguments, **options: calls.append((arguments, options)) or 1)
    flags = ["--cells", "LSTM", "STAR", "--all", "--threads", "2", "--rounds", "4", "--json", "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["unfading", "bench", *flags, "--no-loops", "--figure", "speed.svg"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    ((positional, named),) = calls
    assert positional == (("LSTM", "STAR"), True, (2,), 4)
    assert named.pop("command").startswith("unfading bench --cells LSTM")
    assert named == {"loops": False, "json": True, "save": tmp_path, "figure": Path("speed.svg")}


def make_result(kind, name, T, B, H, **numbers):
    one = Pass(ms=1.0, rounds=5, control=1.0, x_reference=10.0, x_torch=5.0, of_products=1.4, of_full=0.5)
    whole = replace(one, **numbers)
    passes = {"forward": whole, "both": whole}
    fields = {"options": {}, "scale": 1.0, "input_size": 8, "dtype": "float32", "threads": 1, "dense": True}
    return Result(kind, name, name.split()[0], T=T, B=B, H=H, status="measured", **fields, **passes)


def every_result():
    planned = [(one.kind, one.variant.name, one.T, one.B, one.H) for one in cases.everything()]
    # Whether or not this version has stream(), so that the bars can be judged.
    streams = [("stream", name, 200, 1, 128) for name in cases.STREAMED]
    return [make_result(*size) for size in dict.fromkeys([*planned, *streams])]


def test_the_figure_is_xml_and_names_the_cells():
    results = [result for result in every_result() if result.name in cases.HEADLINE]
    results.append(make_result("layer", "a < b & c", 200, 32, 128))
    root = ElementTree.fromstring(svg(results, ABOUT))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in (*cases.HEADLINE, "a < b & c", "batch 1", "batch 32", "batch 128"):
        assert name in texts
    assert any("Some & Co <CPU>" in text for text in texts)
    with pytest.raises(ValueError, match="at least one measured layer"):
        svg([], ABOUT)


@pytest.fixture
def judged(judging, monkeypatch):
    """As `judging`, with stream() taken for granted."""
    streams = [Case("stream", variants()[name], 200, 1, 128) for name in cases.STREAMED]
    monkeypatch.setattr(cases, "_streams", lambda T: streams)
    return judging


def test_bars_are_held_missed_and_incomplete_as_the_file_says(judged):
    results = every_result()
    code, text = judged(results)
    assert code == 0, text
    assert (text.count("held"), text.count("missed"), text.count("incomplete")) == (9, 0, 0)

    def but(name, kind="layer", B=1, **changes):
        return [
            replace(each, both=replace(each.both, **changes)) if (each.name, each.kind, each.B) == (name, kind, B) else each
            for each in results
        ]

    code, text = judged(but("LSTM", B=128, x_torch=0.9))
    assert code == 1
    assert text.count("held") == 7
    assert "LSTM T=784 B=128 H=64 fwd+bwd: 0.90" in text
    assert "missed" in judged(but("STAR", B=32, of_products=2.1))[1]
    assert "missed" in judged(but("Elman", "lengths", B=32, of_full=0.7))[1]
    assert "missed" in judged(but("UGRNN", x_reference=5.0))[1]
    # A cell whose matrices are stored as factors is in no bar, and a missing cell leaves a bar incomplete.
    low_rank = [replace(result, dense=False) if result.name == "SiRNN" else result for result in but("SiRNN", x_reference=5.0)]
    assert judged(low_rank)[0] == 0
    code, text = judged([result for result in results if result.name != "NRU"])
    assert code == 1
    assert text.count("incomplete") == 4  # two bars, each in the table and above its list
    assert "NRU T=200 B=32 H=64: not measured" in text
    # Only EquilibriumRNN may be refused, and nothing may be wrong.
    for name, status, code in [("EquilibriumRNN", "refused", 0), ("UGRNN", "refused", 1), ("EquilibriumRNN", "wrong", 1)]:
        some = [
            replace(result, status=status, forward=None, both=None) if result.name == name else result for result in results
        ]
        assert judged(some)[0] == code


def test_a_damaged_results_file_is_told_by_line(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(every_result()[0].record(ABOUT)) + "\n{broken\n")
    with pytest.raises(ValueError, match="line 2"):
        read(path)


def test_the_figure_of_a_results_file(tmp_path, monkeypatch):
    path, to = written(tmp_path / "results.jsonl", every_result()), tmp_path / "speed.svg"
    monkeypatch.setattr(sys, "argv", ["figure.py", str(path), str(to), "--cells", "LSTM", "STAR"])
    script("figure").main()
    assert "STAR" in to.read_text()
    assert "UGRNN" not in to.read_text()
