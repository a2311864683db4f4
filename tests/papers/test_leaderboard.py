"""Entries of the leaderboard: equal numbers of parameters, equal terms, and their selection by the command."""

import re
from dataclasses import replace

import pytest
import torch

from unfading import catalogue, machine
from unfading.cli import leaderboard_command
from unfading.papers import ledger, registry
from unfading.papers.leaderboard import tables
from unfading.papers.leaderboard.tables import CELLS, SEEDS, SIZES
from unfading.report.leaderboard_page import TASKS
from unfading.training.train import train

ITEMS = ("adding", "copying", "har2", "noisy_cifar", "permuted_mnist", "pixel_mnist")
ROWS = {name: getattr(tables, name)() for name in ITEMS}


def count(run):
    with torch.device("meta"):  # counting needs no values
        return sum(parameter.numel() for parameter in run.make_model().rnn.parameters())


def test_every_cell_of_the_leaderboard_is_one_of_the_catalogue():
    assert set(CELLS) <= {cell.__name__.removesuffix("Cell") for cell in catalogue.cells()}


@pytest.mark.parametrize("task", [name for name in ITEMS if name != "pixel_mnist"])  # which has the sizes of permuted MNIST
@pytest.mark.sample(2)
def test_no_other_number_of_units_comes_nearer_to_the_number_of_parameters(task):
    for row in ROWS[task]:
        wanted, hidden = SIZES[row.name.rpartition(", ")[2]], row.run.hidden
        gaps = {units: abs(count(replace(row.run, hidden=units)) - wanted) for units in (hidden - 1, hidden, hidden + 1)}
        assert min(gaps.values()) == gaps[hidden], row.name
        assert gaps[hidden] < 0.03 * wanted


@pytest.mark.parametrize("task", ITEMS)
def test_all_cells_of_a_task_have_the_same_terms(task):
    rows = ROWS[task]
    assert [row.run.cell for row in rows] == len(SIZES) * list(CELLS)
    assert {row.place for row in rows} <= set(TASKS)
    for row in rows:
        fixed = replace(row.run, cell="Elman", cell_options={}, hidden=1, layers=1, rates={})
        assert fixed == replace(rows[0].run, hidden=1)
        assert (row.published, row.seeds, row.rates, row.retrain) == (None, SEEDS, rows[0].rates, False)


@pytest.mark.long
@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_takes_two_steps(cell, tmp_path):
    (row,) = (row for row in ROWS["har2"] if row.name == f"HAR-2 {cell}, 10k")
    run = replace(row.run, epochs=None, steps=2, batch=4, valid_batches=1)
    assert train(run, tmp_path)["status"] == "finished"


def test_entries_are_selected_by_task_cell_and_text():
    select = leaderboard_command.select_entries
    assert select(("har2",), ("LSTM", "LEM"), ()) == {
        "leaderboard/har2": [f"HAR-2 {cell}, {size}" for size in SIZES for cell in ("LSTM", "LEM")]
    }
    assert select((), ("LSTM",), ("copying",)) == {"leaderboard/copying": ["copying 200 LSTM, 10k", "copying 200 LSTM, 70k"]}
    assert list(select((), (), ())) == [name for name in registry.items() if name.startswith("leaderboard/")]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((("har",), (), ()), "unknown task of the leaderboard 'har'. Did you mean 'har2'?"),
        (((), ("LSTMs",), ()), "unknown cell of the leaderboard 'LSTMs'. Did you mean 'LSTM'?"),
        (((), (), ("moon",)), "no row has 'moon' in its name. `unfading leaderboard list` names all."),
    ],
)
def test_a_wrong_selection_is_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        leaderboard_command.select_entries(*given)


@pytest.mark.usefixtures("made")
def test_the_command_trains_the_selected_entries_and_records_them(tmp_path, capsys):
    leaderboard_command.run_entries(
        tasks=("har2",), cells=("LSTM",), rows=("10k",), output=tmp_path, budget="smoke", runs=tmp_path / "runs"
    )
    assert "HAR-2 LSTM, 10k: published -, ours" in capsys.readouterr().out
    (line,) = ledger.read(tmp_path / f"papers-{machine.slug()}.jsonl")
    assert (line["item"], line["row"], line["run"]["hidden"]) == ("leaderboard/har2", "HAR-2 LSTM, 10k", 45)


@pytest.mark.usefixtures("made")
def test_the_list_has_the_units_of_every_cell_on_every_task(capsys):
    leaderboard_command.list_entries()
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for cell in CELLS:
        for rows in ROWS.values():
            units = [row.run.hidden for row in rows if row.run.cell == cell]
            assert f"{units[0]},{units[1]}" in lines[cell]
    assert "3x 68,185" in lines["UnICORNN"]


def test_the_page_is_written_only_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run it in the root of a checkout"):
        leaderboard_command.write_page()


@pytest.mark.parametrize(("task", "T"), [("har2", 128), ("adding", 1000), ("copying", 220), ("pixel_mnist", 784)])
def test_options_that_depend_on_the_length_have_that_of_the_task(task, T):
    options = {row.run.cell: row.run.cell_options for row in ROWS[task]}
    for cell, name in (("LSTM", "max_lag"), ("STAR", "max_lag"), ("LMU", "theta"), ("IncrementalRNN", "steps")):
        assert options[cell][name] == T
    assert options["StableIncrementalRNN"]["eta"] == 2 / T
