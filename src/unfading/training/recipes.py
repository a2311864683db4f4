"""Runs with the recommended settings of their cell, where the user gives none.

    run, from_recipe = recommended(task="adding", cell="IncrementalRNN", task_options={"T": 200}, steps=1500)

Settings that are given always win: a recipe fills in the learning rate, factors on it, clipping, and options of the cell.
`Run(...)` itself knows no recipes: it has the defaults of its fields.
"""

from dataclasses import replace
from typing import Any

from unfading.cells.recipe import Recipe
from unfading.training import check_task
from unfading.training.names import layer_class, place_of
from unfading.training.run import Run


def recommended(**given: Any) -> tuple[Run, dict[str, Any]]:
    """The run with these fields and, where they are not given, those of the cell's recipe; and what the recipe decided."""
    run = Run(**given)
    recipe = recipe_of(run)
    decided = {name: getattr(recipe, name) for name in ("rate", "rates", "clip_norm") if name not in given}
    options = _cell_options(run, recipe)
    run = replace(run, **decided, cell_options={**options, **run.cell_options})
    if decided.get("rates"):
        # An option may take a parameter away: learn_eta=False leaves no eta to learn.
        names = [name.rpartition(".")[2] for name in run.make_model().trainable]
        decided["rates"] = {name: factor for name, factor in recipe.rates.items() if name in names}
        run = replace(run, rates=decided["rates"])
    plain = Recipe()
    return run, {**{name: value for name, value in decided.items() if value != getattr(plain, name)}, **options}


def recipe_of(run: Run) -> Recipe:
    """The recipe of the run's cell."""
    return layer_class(run.cell, run.code.get(place_of(run.cell))).cell.recipe


def in_words(decided: dict[str, Any]) -> str:
    """What a recipe decided, e.g. "rate 0.006, rate of eta x 0.1, steps=200"."""
    words = [f"{name} {decided[name]:g}" for name in ("rate", "clip_norm") if name in decided]
    words += [f"rate of {name} x {factor:g}" for name, factor in decided.get("rates", {}).items()]
    words += [f"{name}={value}" for name, value in decided.items() if name not in ("rate", "rates", "clip_norm")]
    return ", ".join(words)


def _cell_options(run: Run, recipe: Recipe) -> dict[str, Any]:
    """The options of the recipe that the run does not give."""
    # A chrono bias needs a bias.
    skipped = {"max_lag"} if run.cell_options.get("bias") is False else set()
    wanted = {*recipe.options, *recipe.length_options} - set(run.cell_options) - skipped
    # The length is read from the data only if it is needed.
    uses_length = not wanted.isdisjoint(recipe.length_options)
    length = check_task.sequence_length(run.make_task(), run.batch, run.seed) if uses_length else 0
    return {name: value for name, value in recipe.cell_options(length).items() if name in wanted}
