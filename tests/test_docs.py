"""The documentation keeps pace with the code: every public name is listed, every file of weights is described as it is."""

import re

import pytest

import unfading
from tests.helpers.paths import ROOT
from unfading import estimators, export, metrics, nn, tasks
from unfading.training import weights

DOCS = ROOT / "docs"


def test_the_reference_lists_every_public_name_once():
    listed = [name for page in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    packages = (unfading, tasks, export, nn, estimators, metrics)
    public = [f"{package.__name__}.{name}" for package in packages for name in package.__all__]
    assert sorted(listed) == sorted(public)


def test_the_navigation_lists_every_page_and_nothing_else():
    listed = re.findall(r"(?:- |: )([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_readme_is_short():
    assert 120 <= len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", sorted((ROOT / "weights").glob("*.safetensors")), ids=lambda path: path.stem)
def test_the_table_of_weights_says_what_the_cards_say(path):
    card = weights.card(path)
    row = next(line for line in (ROOT / "weights" / "README.md").read_text().splitlines() if f"`{path.name}`" in line)
    _, _, task, cell, score, parameters, size, _ = (field.strip() for field in row.split("|"))
    assert task.startswith(f"`{card['run']['task']}`")
    run, options = card["run"], card["run"]["cell_options"]
    if "inner_steps" in options:
        assert cell.startswith(f"`{run['cell']}`, K = {options['inner_steps']}, rank")
        assert int(cell.rpartition(" ")[2]) == options["rank"]
    else:
        assert cell == f"`{run['cell']}`, {run['layers']} layers of {run['hidden']}"
    assert int(parameters.replace(",", "")) == card["parameters"]["all"]
    assert int(size.replace(",", "")) == path.stat().st_size
    columns = {"mean squared error": "mse", "cross entropy": "cross_entropy", "accuracy": "accuracy"}
    for name, number, percent in re.findall(r"([a-z ]+?) ([\d.]+)( %)?(?:,|$)", score):
        wanted = card["test"][columns[name.strip()]] * (100 if percent else 1)
        assert float(number) == pytest.approx(wanted, abs=0.5 * 10 ** -len(number.partition(".")[2]))
