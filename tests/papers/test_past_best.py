"""Our settings against published results: the sizes and terms of the published networks, training, and the leaderboard."""

import re
from dataclasses import replace

import pytest
import torch

from unfading.papers import registry
from unfading.papers.oscillators.tables import SOLVED, cornn, lem, unicornn
from unfading.papers.past_best.tables import targets
from unfading.report import leaderboard_page
from unfading.training.train import train

ITEM = "past_best/targets"
ROWS = {row.name: row for row in targets()}
PUBLISHED = (*cornn(), *unicornn(), *lem())
GROWTH = {"warmup_T", "warmup_batches", "growth_batches"}  # of the training sequences
DISTORTIONS = {"shift", "rotate", "zoom", "flip", "stretch"}
READOUT = {"readout"}
VARIANT = "noisy CIFAR GRU, images undistorted"
every_row = pytest.mark.parametrize("name", ROWS)


def holder(row):
    """The row of the published network that a note names."""
    cell, layers, units, parameters = re.search(
        r"(\w+), (?:(\d+) layers of )?(\d+) units, ([\d,]+) parameters", row.note
    ).groups()
    (found,) = (each for each in PUBLISHED if each.place == row.place and each.run.cell.lower() == cell.lower())
    size = (int(layers or 1), int(units), int(parameters.replace(",", "")))
    assert (found.run.layers, found.run.hidden, found.parameters) == size
    return found


def adding():
    (run,) = (row.run for row in ROWS.values() if row.run.task == "adding")
    return run


@every_row
def test_a_row_has_no_more_parameters_than_the_published_network(name):
    row = ROWS[name]
    with torch.device("meta"):  # counting needs no values
        stack = row.run.make_model().rnn
    assert sum(parameter.numel() for parameter in stack.parameters()) <= holder(row).parameters


@every_row
def test_a_row_has_the_number_and_the_terms_of_the_published_network(name):
    row, published = ROWS[name], holder(ROWS[name])
    assert (row.published, row.tolerance, row.unit, row.share) == (
        *(published.published, published.tolerance, published.unit),
        published.share,
    )
    own = {option: value for option, value in row.run.task_options.items() if option not in DISTORTIONS | READOUT | GROWTH}
    if row.retrain:  # on all training rows: there are no validation rows, and folds of people judged the settings
        assert row.place == "har2"
        assert own == {}
    else:
        assert own == published.run.task_options
    assert row.run.select_by == "metric"
    # Nothing is left to choose. A target asks for three seeds, and a variant of it for one.
    assert (row.rates, row.choices, row.seeds) == ((), ({},), 1 if name == VARIANT else 3)


def test_a_variant_differs_from_its_target_in_what_its_name_says():
    target, variant = ROWS["noisy CIFAR GRU"].run, ROWS[VARIANT].run
    without = {option: value for option, value in target.task_options.items() if option not in DISTORTIONS}
    assert without != target.task_options
    assert variant == replace(target, task_options=without)


def test_a_row_has_the_best_published_number_of_its_task_or_says_who_has_it():
    for row in ROWS.values():
        best = max((each for each in PUBLISHED if each.place == row.place), key=lambda each: each.published)
        if best.published != row.published:
            assert f"{best.run.cell} has {best.published} % with {best.parameters:,}" in row.note


def test_training_on_the_adding_problem_stops_below_what_counts_as_solved():
    run = adding()
    assert 0 < run.stop_at <= SOLVED / 2


def shortened(run, **own):
    """The run on a few rows and, but for MNIST, 40 time steps."""
    few = {"T": 40, "validation": 5}
    large = {name: value for name, value in run.task_options.items() if name in few and isinstance(value, int)}
    task_options = {**run.task_options, **{name: min(value, few[name]) for name, value in large.items()}}
    if run.task == "noisy_cifar":  # whose length is the default
        task_options["T"] = few["T"]
    if "warmup_T" in task_options:
        task_options |= {"warmup_T": 36, "warmup_batches": 1, "growth_batches": 1}
    # Options of the cell that are the length of a sequence.
    length = run.task_options.get("T")
    cell_options = {name: few["T"] if value == length else value for name, value in run.cell_options.items()}
    changes = {"task_options": task_options, "cell_options": cell_options, "epochs": None, "valid_every": None, "batch": 4}
    return replace(run, **{**changes, "valid_batches": 1, **own})


@pytest.mark.usefixtures("made")
@every_row
def test_a_row_trains(name, tmp_path):
    record = train(shortened(ROWS[name].run, steps=2), tmp_path)
    assert (record["status"], record["steps"]) == ("finished", 2)
    assert record["test"] is not None


def test_the_settings_of_the_adding_problem_learn_it_at_a_shorter_length():
    record = train(shortened(adding(), steps=200, batch=32, valid_batches=4))
    assert record["test"]["mse"] < 0.9 * record["guess"]  # what `report/verdicts.py` calls trained


def test_the_rows_stand_in_their_own_section_of_the_leaderboard():
    assert ITEM in registry.items()
    page = leaderboard_page.page(registry.published((ITEM,)))
    section = page[page.index("## Past the best published") : page.index("## Equal parameters")]
    rows = [line.split(" | ")[:3] for line in section.splitlines() if line.startswith(f"| {ITEM} |")]
    assert [(name, published) for _, name, published in rows] == [
        (row.name, f"{row.published:.2f} %" if row.share is None else f"60% of seeds at most {SOLVED:.3g}")
        for row in ROWS.values()
    ]
    assert page.count(f"| {ITEM} |") == len(ROWS)
