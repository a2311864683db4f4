"""Every cell has a recipe that fits it; settings that are given win over it; `Run` does not know it."""

import inspect

import pytest

from unfading import Run, catalogue, train
from unfading.cells.recipe import Recipe
from unfading.cli.flags import training_flags
from unfading.training.recipes import in_words, recommended

SMALL = {"task": "adding", "task_options": {"T": 12}, "hidden": 8, "batch": 4, "steps": 3}
every_cell = pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)


@pytest.mark.parametrize("cell", [*catalogue.cells(), *catalogue.convolutional_cells()], ids=lambda cell: cell.__name__)
def test_a_recipe_names_options_of_its_cell_and_all_that_depend_on_the_length(cell):
    options = inspect.signature(cell).parameters
    assert {*cell.recipe.options, *cell.recipe.length_options} <= set(options)
    assert {"max_lag", "steps"} & set(options) <= set(cell.recipe.length_options)


@every_cell
@pytest.mark.sample(6)
def test_a_cell_trains_by_its_recipe(cell):
    run, decided = recommended(**SMALL, cell=cell.__name__.removesuffix("Cell"))
    recipe = cell.recipe
    assert (run.rate, run.rates, run.clip_norm) == (recipe.rate, dict(recipe.rates), recipe.clip_norm)
    assert run.cell_options == recipe.cell_options(12)
    assert set(decided) >= set(run.cell_options)
    assert train(run)["status"] == "finished"


@every_cell
def test_what_is_given_wins_over_the_recipe(cell):
    name = cell.__name__.removesuffix("Cell")
    settings = {"rate": 1e-3, "clip_norm": None, "rates": {"*": 0.5}}
    options = {name: inspect.signature(cell).parameters[name].default for name in cell.recipe.cell_options(12)}
    run, decided = recommended(**SMALL, **settings, cell=name, cell_options=options)
    assert run == Run(**SMALL, **settings, cell=name, cell_options=options)
    assert decided == {}


@pytest.mark.parametrize(("cell", "lost"), [("IncrementalRNN,learn_eta=False", "rates"), ("LSTM,bias=False", "max_lag")])
def test_a_recipe_leaves_out_what_an_option_takes_away(cell, lost):
    said = []
    run = training_flags()(steps=3).run("adding,T=12", cell, rate=None, seed=0, say=said.append)
    assert not run.rates
    assert "max_lag" not in run.cell_options
    assert f"recipe of {run.cell}: rate " in said[0]
    assert lost not in said[0]


def test_without_a_recipe_the_command_line_trains_a_plain_run():
    said = []
    run = training_flags()(steps=3, no_recipe=True).run("adding,T=12", "IncrementalRNN", rate=None, seed=0, say=said.append)
    assert run == Run(task="adding", task_options={"T": 12}, cell="IncrementalRNN", steps=3)
    assert said == []


def test_clipping_by_value_needs_no_second_flag():
    run = training_flags()(steps=3, clip_value=2.0).run("adding,T=12", "STAR", rate=None, seed=0, say=print)
    assert (run.clip_norm, run.clip_value) == (None, 2.0)


def test_a_comparison_takes_the_rate_of_each_recipe_unless_it_is_given_some():
    flags = training_flags()(steps=3)
    cells = ["IncrementalRNN", "NRU"]
    own = flags.runs("adding,T=12", cells, rates=(), seeds=1, say=print)
    assert [run.rate for run in own] == [cell.recipe.rate for cell in catalogue.cells() if cell.__name__[:-4] in cells]
    given = flags.runs("adding,T=12", cells, rates=(0.1, 0.2), seeds=1, say=print)
    assert [run.rate for run in given] == [0.1, 0.2, 0.1, 0.2]
    assert [run.rates for run in given] == [{"eta": 0.1}] * 2 + [{}] * 2


def test_a_recipe_in_words():
    decided = {"rate": 6e-3, "rates": {"eta": 0.1}, "inner_steps": 1, "steps": 200}
    assert in_words(decided) == "rate 0.006, rate of eta x 0.1, inner_steps=1, steps=200"
    assert in_words({}) == ""
    assert Recipe().cell_options(9) == {}


@pytest.mark.long
@pytest.mark.parametrize("cell", ["STAR", "IncrementalRNN", "StableIncrementalRNN", "NRU", "LSTM", "GRU"])
def test_a_cell_of_the_readme_learns_the_adding_problem_by_its_recipe(cell):
    run, _ = recommended(task="adding", task_options={"T": 100}, cell=cell, steps=1500, valid_every=50, stop_at=0.02)
    record = train(run)
    assert record["test"]["mse"] < 0.03 < record["guess"]
