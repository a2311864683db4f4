"""Tables and curves of the papers: their rows, model sizes, budgets, the choice of settings, and the results ledger."""

import json
import math
import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import unfading
from tests.helpers.paths import ROOT
from unfading import machine
from unfading.cli import reproduce_command as cli_reproduce
from unfading.data import store
from unfading.papers import budget, ledger, registry, reproduce
from unfading.papers.item import Item
from unfading.papers.reproduce import ReproduceOptions, draw_items, results, select_rows, train_rows
from unfading.papers.row import COUNTED, Curves, Row, two_sigma
from unfading.report.verdicts import setting
from unfading.training.run import Run
from unfading.training.stopping import Stopped, time_limit
from unfading.training.train import train

INCREMENTAL = [
    "table1",
    "table2",
    "table3",
    "table7",
    "table8",
    "table9",
    "table10",
    "table11",
    *(f"fig{i}" for i in range(2, 10)),
]
STAR = [*(f"table{i}" for i in range(1, 6)), *(f"fig{i}" for i in range(2, 8))]
NRU = [
    *("table1", "table2", "table3", *(f"fig{i}" for i in range(1, 9)), "random_labels", "memory_reset", "memory_64_144"),
    *("linear_relu_heads", "tmax_50_150", "copying_2000"),
]
EXPECTED = [
    f"{paper}/{name}" for paper, names in (("incremental", INCREMENTAL), ("star", STAR), ("nru", NRU)) for name in names
]
ALL = registry.items()
TABLES = [name for name, make in ALL.items() if registry.kind(make) is not Item]


def small(**own):
    fields = {
        "task": "adding",
        "task_options": {"T": 6},
        "cell": "Elman",
        "hidden": 4,
        "batch": 4,
        "steps": 4,
        "valid_batches": 1,
    }
    return Run(**{**fields, **own})


def options(folder, **own):
    return ReproduceOptions(**{"output": folder, "runs": folder, "processes": 1, "together": 4, **own})


def lines(item, rows, options):
    return [line for row in rows for line in results(item, row, options) if line["kind"] != "candidate"]


class Progress:
    """Records which runs were trained together, in order."""

    def __init__(self):
        self.passes = []

    def __call__(self, runs):
        from contextlib import nullcontext

        self.passes.append(list(runs))
        return nullcontext((None, lambda sentence: None))


def test_every_table_and_figure_of_the_papers_is_an_item():
    assert set(EXPECTED) <= set(ALL)


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_complete_and_have_unique_names(name):
    rows = registry.rows(ALL[name])
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.tolerance >= 0
        assert row.unit in ("%", "perplexity", "bits", "error", COUNTED)
        assert row.published is None or row.tolerance > 0 or row.published in (0.0, 100.0)
        assert row.share is None or 0 < row.share <= 1
        assert (row.run.device, row.run.seed, row.run.split) == ("cpu", 0, "train")


def test_every_model_has_the_published_number_of_parameters():
    """Except on TUM and UCR crops, whose number of classes is only known from their files."""
    counts = {}
    checked = 0
    for name in TABLES:
        for row in registry.rows(ALL[name]):
            if row.run.task in ("tum_crops", "ucr"):
                continue
            if row.run.key not in counts:
                with torch.device("meta"):
                    model = row.run.make_model()
                counts[row.run.key] = [sum(p.numel() for p in part.parameters()) for part in (model.rnn, model)]
            if row.parameters is not None:
                assert counts[row.run.key][row.whole] == row.parameters, f"{name}: {row.name}"
                checked += 1
    assert checked > 150


def test_training_on_a_recall_task_stops_well_within_what_counts_as_solved():
    """Validation stops it at half of the level at which the test score counts as solved, so that the row is held too."""
    solved = stuck = unsolved = 0
    for name in [name for name in TABLES if name.startswith("nru/")]:
        for row in registry.rows(ALL[name]):
            if row.unit != "error":
                assert row.run.stop_at is None, row.name
                continue
            guess = row.run.make_task().guess  # of generated data: the other tasks would read theirs
            assert row.tolerance == pytest.approx(0.1 * guess)
            assert row.run.steps <= 100_000
            assert row.run.valid_every <= 500  # the steps to converge are known to within so many
            assert f"{row.run.steps:,}" in row.note
            if row.run.task == "random_labels":
                assert row.run.stop_at is None
            else:
                assert row.run.stop_at == pytest.approx(row.tolerance / 2, rel=1e-3)
            solved += row.published == 0.0 and not row.fails
            unsolved += row.published == 0.0 and row.fails
            stuck += row.published == pytest.approx(guess)
    assert (solved, unsolved, stuck) == (38, 3, 7)


def test_items_share_the_runs_of_the_recall_tasks():
    """Table 1, figures 1 to 4 and both studies of the memory and heads of NRU have one run of each cell on each task."""
    keys = {
        item: {row.name: row.run.key for row in registry.rows(ALL[f"nru/{item}"])}
        for item in ("table1", "fig1", "fig3", "memory_64_144", "linear_relu_heads")
    }
    assert keys["fig1"].items() <= keys["table1"].items()
    assert keys["fig3"].items() <= keys["table1"].items()
    assert keys["memory_64_144"]["copying 100, memory 64"] == keys["fig1"]["copying 100 NRU"]
    assert keys["linear_relu_heads"]["copying 100, linear heads"] == keys["fig1"]["copying 100 NRU"]
    assert keys["linear_relu_heads"]["psMNIST, linear heads"] == keys["table1"]["psMNIST NRU"]
    assert keys["linear_relu_heads"]["characters, ReLU heads"] == keys["table1"]["characters NRU"]
    assert len(set(keys["linear_relu_heads"].values())) == 8


def test_whether_networks_train_is_asked_of_every_cell_at_every_depth():
    rows = {row.name: row for row in registry.rows(ALL["star/does_it_train"])}
    table = {row.name: row for row in registry.rows(ALL["star/table3"])}
    assert len(rows) == 5 * 8 * 2
    assert table.keys() <= rows.keys()
    for name, row in rows.items():
        assert (row.published, row.seeds, row.run.epochs, row.run.select_by) == (None, 3, 5, "loss")
        if name in table:
            assert replace(row.run, epochs=100) == table[name].run
            assert ("does not train" in row.note) == table[name].fails
    depths = [max(row.run.layers, row.run.cell_options.get("depth", 1)) for row in rows.values()]
    assert depths == 2 * [depth for depth in (20, 16, 14, 12, 8, 4, 2, 1) for _ in range(5)]  # the longest first


def test_a_substitute_claims_no_published_number():
    rows = registry.rows(ALL["star/crops_substitute"])
    assert len(rows) == 5 * 6
    assert all(row.published is None and "substitute" in row.note and row.run.task == "ucr" for row in rows)
    assert {row.dataset for row in rows} == {"ucr"}


def test_gesture_rows_are_the_network_and_the_training_of_the_paper():
    rows = {row.name: row for row in registry.rows(ALL["star/table5"])}
    assert len(rows) == 3 * 6
    run = rows["convSTAR, 12 layers"].run
    assert (run.task, run.cell, run.hidden, run.layers, run.batch, run.epochs) == ("jester", "ConvSTAR", 64, 12, 8, 30)
    schedule = run.make_schedule()
    assert [run.rate * schedule.factor(step, 10) for step in (0, 10)] == pytest.approx([1e-3, 1e-6])
    assert (run.optimiser, run.optimiser_options) == ("sgd", {"momentum": 0.9, "l2": 5e-5})
    with torch.device("meta"):
        model = run.make_model()
    assert isinstance(model.head, unfading.GestureHead)
    assert all(cell.kernel_size == (3, 3) for cell in model.rnn.cells)
    assert {name for name, row in rows.items() if row.fails} == {
        *("convLSTM, 12 layers", "convLSTM, 16 layers", "convLSTM w/f, 16 layers")
    }


def test_moving_digits_ask_for_the_order_of_the_cells_at_every_depth():
    rows = registry.rows(ALL["star/moving_mnist"])
    assert [(row.run.cell, row.run.layers) for row in rows] == [
        (cell, depth) for depth in (12, 8, 4, 2, 1) for cell in ("ConvLSTM", "ConvForgetLSTM", "ConvSTAR")
    ]
    assert all((row.published, row.seeds, row.dataset) == (None, 3, "mnist") for row in rows)
    assert all("substitute" in row.note for row in rows)
    assert len({(row.run.task, row.run.hidden, row.run.batch, row.rates) for row in rows}) == 1


def test_passes_that_share_a_gpu_choose_all_rates_at_once_and_survive_a_row_that_fails(tmp_path, monkeypatch):
    rows = [Row(small(hidden=hidden), 0.1, 0.1, name=f"{hidden}", unit="error", rates=(0.1, 0.2), seeds=2) for hidden in (4, 5)]
    asked, done = [], {}

    def compare(runs, where, **options):
        asked.append([(run.hidden, run.rate, run.seed) for run in runs])
        for run in runs:
            if run.hidden == 4:
                best = {"step": 1, "valid": {"mse": run.rate}}
                about = {"run": run.to_json(), "status": "finished", "measure": "mse", "rising": False}
                done[run.key] = {**about, "best": best, "test": best["valid"], "guess": 0.5}
        if any(run.hidden == 5 for run in runs):
            raise ValueError("2 of 4 runs failed: Elman")

    monkeypatch.setattr(reproduce, "compare", compare)
    monkeypatch.setattr(reproduce, "finished", lambda where, run: done.get(run.key))
    with pytest.raises(ValueError, match="2 of 4 runs failed"):
        train_rows(rows, options(tmp_path, device="cuda", processes=3), Progress())
    assert asked == [[(4, 0.1, 0), (4, 0.2, 0), (5, 0.1, 0), (5, 0.2, 0)], [(4, 0.1, 1)]]


def test_a_setting_is_judged_by_the_mean_over_its_judges(tmp_path, monkeypatch):
    """The first judge alone would choose rate 0.1."""
    judges = ({"seed": 0, "task_options": {"T": 6}}, {"seed": 3, "task_options": {"T": 7}})
    row = Row(small(), 0.1, 0.1, name="r", unit="error", rates=(0.1, 0.2), judges=judges, seeds=2)
    scores = {(0.1, 6): 0.1, (0.1, 7): 0.9, (0.2, 6): 0.2, (0.2, 7): 0.3}
    runs = reproduce.choice_runs(row, options(tmp_path))
    assert [(run.rate, run.seed, run.task_options) for run in runs] == [
        (rate, judge["seed"], judge["task_options"]) for rate in (0.1, 0.2) for judge in judges
    ]
    done = {run.key: {"valid": {"mse": scores[run.rate, run.task_options["T"]]}} for run in runs}
    line = {"status": "finished", "measure": "mse", "rising": False, "curve": []}
    monkeypatch.setattr(reproduce, "finished", lambda where, run: {**line, "best": done[run.key]} if run.key in done else None)
    assert reproduce.chosen_setting(row, options(tmp_path)) == {"rate": 0.2}
    del done[runs[-1].key]
    assert reproduce.chosen_setting(row, options(tmp_path)) is None


def test_the_clock_is_taken_away_by_options_alone():
    """Each row differs from the row with a table only in what its name says."""
    rows = {row.name: row.run for row in registry.rows(ALL["incremental/clock"])}
    for form in ("iRNN", "ours"):
        plain = rows[f"{form}, a table of eta"]
        one = {**plain.cell_options, "steps": 1}
        assert rows[f"{form}, one eta"] == replace(plain, cell_options=one)
        assert rows[f"{form}, eta >= 0"] == replace(plain, cell_options={**plain.cell_options, "bounded_eta": True}, rates={})
        assert rows[f"{form}, a table of eta, random position"] == replace(plain, task_options={"start": "random"})
        assert rows[f"{form}, one eta, random position"] == replace(plain, cell_options=one, task_options={"start": "random"})


def test_tolerances_are_those_of_the_test_sets():
    """Standard errors: 0.15 pixel, 0.20 permuted, 0.5 CIFAR, 0.39 HAR-2, 0.09 at 99.1 %, 0.21 psMNIST."""
    for score, rows, sigma in (
        *((97.73, 10_000, 0.15), (95.62, 10_000, 0.20), (54.5, 10_000, 0.50), (95.32, 2_947, 0.39), (99.1, 10_000, 0.09)),
        (95.38, 10_000, 0.21),
    ):
        assert two_sigma(score, rows) / 2 == pytest.approx(sigma, abs=0.006)


def test_star_claims_failure_where_the_paper_shows_it():
    failing = [row.name for row in registry.rows(ALL["star/table3"]) if row.fails]
    depths = {
        "MNIST": {"vRNN": (2, 4, 8, 12, 16), "LSTM": (8, 12, 16), "LSTM w/f": (12, 16), "RHN": (4, 8, 12, 16), "STAR": ()},
        "pMNIST": {"vRNN": (4, 8, 12, 16), "LSTM": (12, 16), "LSTM w/f": (16,), "RHN": (4, 8, 12, 16), "STAR": ()},
    }
    assert set(failing) == {
        f"{place} {cell}, {depth} layers" for place, cells in depths.items() for cell in cells for depth in cells[cell]
    }
    assert len(failing) == 25
    assert not any(row.fails for row in registry.rows(ALL["star/table1"]))
    crops = [row.name for row in registry.rows(ALL["star/table4"]) if row.fails and "STAR" in row.name]
    assert crops == ["per season STAR, 16 layers", "per season STAR, 14 layers"]


def test_nru_claims_failure_where_the_paper_shows_it():
    failing = {name: [row for row in registry.rows(ALL[f"nru/{name}"]) if row.fails] for name in ("fig1", "fig2", "fig4")}
    assert [row.name for row in failing["fig1"]] == [
        f"copying {T} {cell}" for T in (100, 200) for cell in ("RNN-orth", "RNN-id")
    ]
    assert all(row.share is None for row in failing["fig1"])  # at a guess: nothing is learnt
    unsolved = [*failing["fig2"], *failing["fig4"]]
    assert [row.name for row in unsolved] == ["variable copying 100 EURNN", "variable copying 200 EURNN", "denoising 100 EURNN"]
    assert all((row.share, row.published) == (0.6, 0.0) for row in unsolved)


def test_rows_changed_after_their_test_are_marked():
    """Those that docs/papers/findings.md lists: HAR-2, copying, our adding rows, six baselines, 104 epochs, characters."""
    changed = {
        name: {row.name for row in registry.rows(ALL[name]) if row.changed_after_test} for name in TABLES if "star" not in name
    }
    six = {"pixel RNN", "pixel LSTM", "pixel Antisymmetric", "permuted FastRNN", "permuted LSTM", "permuted Antisymmetric"}
    assert changed["incremental/table1"] == changed["incremental/table7"] == six | {"pixel iRNN K=1, rank 12, 104 epochs"}
    assert changed["incremental/table3"] == {
        row.name for row in registry.rows(ALL["incremental/table3"]) if "HAR-2" in row.name
    }
    assert changed["incremental/fig5"] == {f"adding {T} ours K={K}" for T in (100, 400) for K in (1, 3)}
    assert {name for name in changed["incremental/fig4"] if "copying" in name} == {
        row.name for row in registry.rows(ALL["incremental/fig4"]) if "copying" in row.name
    }
    assert not changed["incremental/table2"]
    vectors = {f"characters {name}" for name in ("JANET, N(0, 1) vectors", "GORU, N(0, 1) vectors", "NRU, multiplicative")}
    assert changed["nru/table2"] == vectors | {"characters NRU, N(0, 1) vectors, reset every 1,500"}
    assert not any(changed[name] for name in changed if name.startswith("nru/") and name != "nru/table2")


def test_rows_of_equal_terms_differ_in_their_cell_alone():
    rows = [row for name in ("table1", "table2") for row in registry.rows(ALL[f"incremental/{name}"]) if "equal" in row.name]
    assert len(rows) == 8
    for paper, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (paper.rates, paper.seeds, paper.choices, paper.published) == (
            ours.rates,
            ours.seeds,
            ours.choices,
            ours.published,
        )
        fields = [row.run.to_json() for row in (paper, ours)]
        differ = {name for name in fields[0] if fields[0][name] != fields[1][name]}
        assert differ - {"rates"} == {"cell", "cell_options", "rate"}  # of these rates one is chosen
        assert "iRNN" in paper.name
        assert "ours" in ours.name


def test_a_row_is_frozen():
    row = Row(small(), 1.0, 0.1, "a note", name="r")
    with pytest.raises(FrozenInstanceError):
        row.published = 2.0


def test_budgets_change_steps_seeds_and_rows_and_nothing_else():
    rows = [Row(small(seed=0, steps=50, rate=r), None, 0.0, name=str(r), rates=(1e-3, 1e-2)) for r in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert budget.within(rows, "paper") == rows
    short = budget.within(rows, "short")
    assert [row.run.steps for row in short] == [5] * 5
    assert all((row.seeds, row.rates) == (1, ()) for row in short)
    assert replace(short[0], run=rows[0].run, seeds=3, rates=(1e-3, 1e-2)) == rows[0]
    smoke = budget.within(rows, "smoke")
    assert [row.name for row in smoke] == ["0.1", "0.3", "0.5"]
    assert all((row.run.steps, row.run.epochs, row.run.valid_batches) == (2, None, 1) for row in smoke)
    assert budget.within([Row(small(steps=None, epochs=3), None, 0.0, name="r")], "short")[0].run.epochs == 1
    growing = {"warmup_T": 40, "warmup_batches": 200, "growth_batches": 51}
    run = small(task="noisy_cifar", task_options={"flip": True, **growing}, steps=None, epochs=30)
    short = budget.within([Row(run, None, 0.0, name="r")], "short")[0].run
    assert short.task_options == {"flip": True, "warmup_T": 40, "warmup_batches": 20, "growth_batches": 6}
    assert budget.within([], "smoke") == []


def test_arguments_of_a_figure_follow_the_budget():
    def figure(steps=1000, seeds=20, kind="x"): ...

    assert budget.arguments(figure, "paper") == {}
    assert budget.arguments(figure, "short") == {"steps": 100, "seeds": 2}
    assert budget.arguments(figure, "smoke") == {"steps": 6, "seeds": 1}


def test_the_rate_is_chosen_by_validation_and_then_all_seeds_are_trained(tmp_path):
    row = Row(small(), None, 0.0, name="r", rates=(1e-9, 3e-2), seeds=2)
    progress = Progress()
    train_rows([row], options(tmp_path), progress)
    assert [[(r.rate, r.seed) for r in each] for each in progress.passes] == [[(1e-9, 0), (3e-2, 0)], [(3e-2, 1)]]
    stored = lines("p/t", [row], options(tmp_path))
    assert [(line["run"]["rate"], line["run"]["seed"], line["row"]) for line in stored] == [(3e-2, 0, "r"), (3e-2, 1, "r")]
    again = Progress()
    train_rows([row], options(tmp_path), again)
    assert again.passes == []


def test_candidates_are_stored_without_their_curves(tmp_path):
    row = Row(small(), None, 0.0, name="r", rates=(1e-9, 3e-2), seeds=2)
    train_rows([row], options(tmp_path), Progress())
    first, second, *runs = results("p/t", row, options(tmp_path))
    assert [line["kind"] for line in (first, second, *runs)] == ["candidate", "candidate", "run", "run"]
    assert [line["setting"] for line in (first, second)] == [{"rate": 1e-9}, {"rate": 3e-2}]
    assert first["valid"]["mse"] > second["valid"]["mse"]
    assert {line["chosen"] for line in (first, second)} == {setting(runs[0]["run"])}
    for line in (first, second):
        assert {"key", "seed", "seconds", "commit", "status", "steps", "measure", "item", "row", "budget"} < set(line)
        assert line["seed"] == 0
        assert "curve" not in line
    ledger.add(tmp_path / "papers-x.jsonl", [first, second])
    ledger.add(tmp_path / "papers-x.jsonl", [first, second])
    assert len(ledger.read(tmp_path / "papers-x.jsonl")) == 2
    alone = Row(small(), None, 0.0, name="r", seeds=1)
    train_rows([alone], options(tmp_path), Progress())
    assert [line["kind"] for line in results("p/t", alone, options(tmp_path))] == ["run"]


def test_a_candidate_is_stored_with_the_score_by_which_it_was_chosen(monkeypatch, tmp_path):
    """The last one, where the last weights are tested; and before all are finished no setting is chosen."""
    row = Row(small(task="har2", task_options={}, steps=2), None, 0.0, name="r", retrain=True, seeds=1, rates=(0.1, 0.2))

    def done(where, run):
        if run.rate == 0.2 or run.split == "full":
            return None
        curve = [{"step": i, "valid": {"accuracy": score}} for i, score in enumerate((0.9, 0.5))]
        about = {"run": run.to_json(), "key": run.key, "status": "finished", "measure": "accuracy", "rising": True}
        about |= {"steps": 2, "seconds": 1.0, "about": {"commit": "abc"}}
        return {**about, "curve": curve, "best": {"step": 0, "valid": {"accuracy": 0.9}}}

    monkeypatch.setattr(reproduce, "finished", done)
    monkeypatch.setattr(Row, "available", True)
    (line,) = results("p/t", row, options(tmp_path))
    assert (line["kind"], line["valid"], line["chosen"], line["commit"]) == ("candidate", {"accuracy": 0.5}, None, "abc")


@pytest.mark.parametrize(("last", "count"), [(0.905, 3), (0.92, 5)])
def test_two_seeds_are_added_where_three_differ_by_more_than_a_point(tmp_path, monkeypatch, last, count):
    row = Row(small(task="har2", task_options={}), 90.0, 0.1, name="r", seeds=3)
    passes, done = [], {}

    def compare(runs, where, **options):
        passes.append([run.seed for run in runs])
        for run in runs:
            score = {"accuracy": last if run.seed == 2 else 0.90}
            done[run.key] = {"run": run.to_json(), "measure": "accuracy", "guess": 0.5, "test": score}

    monkeypatch.setattr(reproduce, "compare", compare)
    monkeypatch.setattr(reproduce, "finished", lambda where, run: done.get(run.key))
    monkeypatch.setattr(Row, "available", True)
    train_rows([row], options(tmp_path), Progress())
    assert passes == [[0, 1, 2], [3, 4]][: 1 + (count == 5)]
    assert [run.seed for run, _ in reproduce.finished_runs(row, options(tmp_path))] == list(range(count))
    # More seeds make a mean surer. They do not change a score in another unit, a failure, or a row without a claim.
    for other in ({"unit": "error"}, {"fails": True}, {"published": None}):
        assert len(reproduce.final_runs(replace(row, **other), options(tmp_path))) == 3


def test_retraining_uses_the_validation_rows_too(tmp_path, made):
    row = Row(small(task="har2", task_options={}, steps=2), None, 0.0, name="r", retrain=True, seeds=1)
    train_rows([row], options(tmp_path), Progress())
    (line,) = lines("p/t", [row], options(tmp_path))
    assert line["run"]["split"] == "full"
    assert line["best"] is None
    assert line["test"] is not None


def test_with_retraining_a_rate_is_chosen_on_a_third_of_the_epochs(tmp_path, made):
    run = small(task="har2", task_options={}, steps=None, epochs=30, batch=64)
    progress = Progress()
    train_rows([Row(run, None, 0.0, name="r", retrain=True, seeds=1, rates=(1e-3, 1e-2))], options(tmp_path), progress)
    assert [[(r.epochs, r.split) for r in each] for each in progress.passes] == [[(10, "train"), (10, "train")], [(30, "full")]]


def test_with_retraining_the_last_validation_score_chooses(monkeypatch, tmp_path):
    """One rate is better during training, the other at the end."""
    row = Row(small(task="har2", task_options={}, steps=2), None, 0.0, name="r", retrain=True, seeds=1, rates=(0.1, 0.2))

    def done(where, run):
        scores = {0.1: (0.9, 0.5), 0.2: (0.6, 0.6)}[run.rate]
        curve = [{"step": i, "valid": {"accuracy": score}} for i, score in enumerate(scores)]
        best = {"step": 0, "valid": {"accuracy": max(scores)}}
        about = {"run": run.to_json(), "key": run.key, "status": "finished", "measure": "accuracy", "rising": True}
        about |= {"test": None, "guess": 0.5, "steps": 2, "seconds": 1.0, "about": {"commit": "abc"}}
        return {**about, "curve": [*curve, {"step": 9, "loss": 1.0}], "best": best}

    monkeypatch.setattr(reproduce, "finished", done)
    monkeypatch.setattr(Row, "available", True)
    assert [line["run"]["rate"] for line in lines("p/t", [row], options(tmp_path))] == [0.2]
    row = replace(row, retrain=False)
    assert [line["run"]["rate"] for line in lines("p/t", [row], options(tmp_path))] == [0.1]


def test_few_epochs_are_not_shortened_for_the_choice(tmp_path, made):
    run = small(task="har2", task_options={}, steps=None, epochs=2, batch=64)
    progress = Progress()
    train_rows([Row(run, None, 0.0, name="r", retrain=True, seeds=1, rates=(1e-3, 1e-2))], options(tmp_path), progress)
    assert [[r.epochs for r in each] for each in progress.passes] == [[2, 2], [2]]


def test_other_fields_are_chosen_with_the_rates(tmp_path):
    row = Row(small(), None, 0.0, name="r", rates=(1e-9, 3e-2), choices=({"rates": {"*": 0.0}}, {}), seeds=2)
    progress = Progress()
    train_rows([row], options(tmp_path), progress)
    held = {"*": 0.0}
    assert [(r.rates, r.rate) for r in progress.passes[0]] == [(held, 1e-9), (held, 3e-2), ({}, 1e-9), ({}, 3e-2)]
    assert [(r.rates, r.rate, r.seed) for r in progress.passes[1]] == [({}, 3e-2, 1)]


def test_rows_of_one_shape_are_trained_together_and_a_shared_run_once(tmp_path):
    one, two = Row(small(), None, 0.0, name="one", seeds=2), Row(small(rate=0.1), None, 0.0, name="two", seeds=1)
    other = Row(small(hidden=5), None, 0.0, name="other", seeds=1)
    progress = Progress()
    train_rows([one, other, two, one], options(tmp_path), progress)
    assert [[(r.hidden, r.rate, r.seed) for r in each] for each in progress.passes] == [
        [(4, 1e-3, 0), (4, 1e-3, 1), (4, 0.1, 0)],
        [(5, 1e-3, 0)],
    ]
    stored = [line for item in ("p/a", "p/d") for line in lines(item, [one], options(tmp_path))]
    assert [(line["item"], line["run"]["seed"]) for line in stored] == [("p/a", 0), ("p/a", 1), ("p/d", 0), ("p/d", 1)]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_time_limit_stops_training_with_checkpoints(tmp_path, processes):
    row = Row(small(steps=100_000, task_options={"T": 50}), None, 0.0, name="r", seeds=2)
    with pytest.raises(Stopped), time_limit(30.0 if processes == 2 else 1.0):
        train_rows([row], options(tmp_path, processes=processes), Progress())
    assert list(tmp_path.glob("*/last.safetensors"))
    assert lines("p/t", [row], options(tmp_path)) == []
    with pytest.raises(Stopped), time_limit(0.0):
        train_rows([replace(row, run=small())], options(tmp_path), Progress())


def test_a_run_resumed_after_a_time_limit_ends_as_one_that_was_not_stopped(tmp_path):
    long = small(steps=800)
    with pytest.raises(Stopped), time_limit(0.1):
        train(long, tmp_path / "b")
    assert train(long, tmp_path / "b", resume=True)["test"] == train(long, tmp_path / "a")["test"]


def test_a_new_ledger_line_replaces_the_earlier_one_with_the_same_key(tmp_path):
    path = tmp_path / "papers-x.jsonl"
    first = {"kind": "run", "item": "p/t", "row": "r", "budget": "paper", "key": "k", "test": 1}
    other = {**first, "row": "s"}
    ledger.add(path, [first, other])
    ledger.add(path, [{**first, "test": 2}])
    assert ledger.read(path) == [other, {**first, "test": 2}]  # later results come later
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1 is damaged: it is not JSON"):
        ledger.add(path, [first])


def test_missing_datasets_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    assert not store.present("mnist")
    cli_reproduce.run_items(
        ("incremental/table1", "star/table5"), output=tmp_path / "out", budget="smoke", runs=tmp_path / "runs"
    )
    output = capsys.readouterr().out
    assert output.count("data not available: mnist") == 3
    assert output.count("data not available: jester") == 3
    assert not (tmp_path / "runs").exists()


def test_data_with_other_checksums_than_the_published_ones_are_refused(tmp_path, made_folder, monkeypatch):
    """The checksums are those of the published files."""
    monkeypatch.setenv("UNFADING_DATA", str(made_folder))
    with pytest.raises(ValueError, match="is altered or cut short"):
        cli_reproduce.run_items(("incremental/table1",), output=tmp_path, budget="smoke", runs=tmp_path / "runs")


@pytest.mark.parametrize("name", ["incremental/fig5", "nru/memory_reset"])
@pytest.mark.sample(1)
def test_an_item_runs_at_budget_smoke(name, tmp_path, capsys):
    cli_reproduce.run_items((name,), output=tmp_path, budget="smoke", runs=tmp_path / "runs", weights=tmp_path / "weights")
    output = capsys.readouterr().out
    assert output.count(": ran") == 3
    assert output.count("wrote") == 3 + name.startswith("incremental")
    stored = ledger.read(tmp_path / f"papers-{machine.slug()}.jsonl")
    assert [line["budget"] for line in stored] == ["smoke"] * 3
    assert all(line["item"] == name and math.isfinite(line["seconds"]) for line in stored)
    if isinstance(ALL[name](), Curves):
        assert (tmp_path / "incremental-fig5.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "incremental-fig5.png").unlink()
        cli_reproduce.draw_items((name,), output=tmp_path, budget="smoke")
        assert (tmp_path / "incremental-fig5.png").exists()
        assert not (tmp_path / "nowhere").exists()


def test_a_figure_has_every_row_once_whichever_rows_are_selected(tmp_path, monkeypatch):
    cli_reproduce.run_items(("incremental/fig5",), output=tmp_path, budget="smoke", runs=tmp_path / "runs")
    path = tmp_path / f"papers-{machine.slug()}.jsonl"
    lines = ledger.read(path)
    other = {**lines[0], "key": "other", "run": {**lines[0]["run"], "rate": 0.5}}  # another setting, measured later
    ledger.add(path, [other])
    drawn = []
    monkeypatch.setattr(reproduce, "_draw_curves", lambda name, curves, lines, output: drawn.extend(lines) or "drawn")
    selected = options(tmp_path, budget="smoke", rows=(lines[1]["row"],))
    (text,) = draw_items(["incremental/fig5"], selected, trained=True)
    assert [line["row"] for line in drawn] == [line["row"] for line in lines]
    assert drawn[0]["run"]["rate"] == lines[0]["run"]["rate"]  # the row's own
    assert text.count("published") == 1


def test_parameters_are_counted_without_training(tmp_path, capsys):
    cli_reproduce.run_items(("star/table2",), output=tmp_path, runs=tmp_path / "runs", rows=("vRNN", "STAR, 1 "))
    output = capsys.readouterr().out
    assert "STAR, 1 layers: published 18.0k, ours 18.2k over 1: held" in output
    assert "vRNN, 16 layers: published 514.0k, ours 511.4k over 1: missed" in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("incremental/fig5", "nru/memory_reset")])
def test_every_item_runs_at_budget_smoke(name, tmp_path, capsys, real):
    real("mnist" if name != "incremental/fig7" and name != "incremental/fig8" else "har")
    cli_reproduce.run_items((name,), output=tmp_path, budget="smoke", runs=tmp_path / "runs")
    output = capsys.readouterr().out
    rows = budget.within(registry.rows(ALL[name]), "smoke")
    assert output.count(": ran") + output.count("data not available") == len(rows)


def test_rows_are_selected_by_name(tmp_path):
    names = ["pixel iRNN K=1, rank 12", "pixel iRNN K=1, rank 16", "pixel iRNN K=1, rank 12, 104 epochs"]
    names.append("pixel iRNN K=1, rank 12, equal terms")
    assert [row.name for row in select_rows("incremental/table1", options(tmp_path, rows=("pixel iRNN K=1",)))] == names
    with pytest.raises(
        ValueError, match=re.escape("no row of incremental/table1 has 'moon' in its name, e.g. 'pixel iRNN K=1")
    ):
        select_rows("incremental/table1", options(tmp_path, rows=("moon",)))


def test_the_list_names_the_datasets_of_an_item(capsys, made, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")  # one line per item
    cli_reproduce.list_items()
    listing = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert [name for name in listing if name in ALL] == list(ALL)
    assert listing["incremental/table1"].endswith("  mnist present")
    assert " yelp " in listing["incremental/table8"]
    assert listing["star/table5"].endswith("  jester present")
    assert listing["star/moving_mnist"].endswith("  mnist present")
    assert listing["incremental/fig4"].endswith("  none needed")
    assert listing["incremental/fig8"].endswith("  har present")


def test_the_committed_table_of_rows_is_up_to_date(capsys):
    """`unfading reproduce page` brings it up to date."""
    committed = ledger.read(ROOT / "benchmarks" / "results" / "papers-rows.jsonl")
    cli_reproduce.list_items(json=True)
    current = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{**line, "here": None} for line in committed] == [{**line, "here": None} for line in current]


@pytest.mark.parametrize(
    ("item", "options", "sentence"),
    [
        ("incremental/table1", {"minutes": 0.0}, "--minutes must be above 0; got 0"),
        ("incremental/table1", {"processes": 0}, "--processes must be at least 1; got 0"),
        ("incremental/table99", {}, "unknown item 'incremental/table99'. Did you mean 'incremental/table9'?"),
        ("incremental/table1", {"rows": ("moon",)}, "no row of incremental/table1 has 'moon' in its name"),
    ],
)
def test_a_wrong_argument_is_one_sentence(item, options, sentence, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cli_reproduce.run_items((item,), output=tmp_path / "out", runs=tmp_path / "runs", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("commit", "budget", "warns"), [("ab-dirty", "paper", 1), ("ab", "paper", 0), (None, "paper", 0), ("ab-dirty", "smoke", 0)]
)
@pytest.mark.sample(1)
def test_uncommitted_changes_are_mentioned_before_rows_are_trained(tmp_path, monkeypatch, capsys, commit, budget, warns):
    monkeypatch.setattr(machine, "commit", lambda: commit)
    cli_reproduce.run_items(("star/table2",), output=tmp_path, runs=tmp_path / "runs", rows=("STAR, 1 ",), budget=budget)
    assert capsys.readouterr().err.count("the package has uncommitted changes") == warns


def test_the_page_is_written_only_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run it in the root of a checkout"):
        cli_reproduce.write_page()


def test_results_are_stored_even_if_a_row_fails(tmp_path, monkeypatch):
    stored = []

    def fails(rows, options, progress):
        raise ValueError("1 of 2 runs failed")

    monkeypatch.setattr(reproduce, "train_rows", fails)
    monkeypatch.setattr(reproduce, "store_results", lambda items, options: stored.append(list(items)))
    with pytest.raises(ValueError, match="1 of 2 runs failed"):
        cli_reproduce.run_items(("incremental/fig5",), output=tmp_path, budget="smoke", runs=tmp_path / "runs")
    assert stored == [["incremental/fig5"]]
