"""The project holds to its own rules: who may import whom, one version, true README and command line."""

import ast
import inspect
import json
import re
import subprocess
import sys

import pytest

import unfading
from tests.helpers.command import run
from tests.helpers.paths import ROOT
from unfading import catalogue
from unfading.cli import data_command as cli_data
from unfading.cli import main as cli
from unfading.cli import report_command as cli_report
from unfading.cli import reproduce_command as cli_reproduce
from unfading.data import store
from unfading.data.datasets import DATASETS

SOURCE = ROOT / "src" / "unfading"

# From the bottom up: a module imports only modules of an earlier line.
LAYERS = [
    ["errors", "files", "torch_state", "source_lines"],
    ["data", "initialise", "lengths", "report"],
    ["cells", "tasks"],
    ["reference"],
    ["fuse"],
    ["backends", "catalogue", "machine"],
    ["layers"],
    ["training"],
    ["bench", "diagnostics", "doctor"],
    ["papers"],
    ["cli"],
    ["__init__"],
]
RANK = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}


def room(dotted):
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "unfading":
            yield from ((node.lineno, f"unfading.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_module_imports_upward(path):
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    for line, name in imports(path):
        if name.split(".")[0] == "unfading":
            other = room(name)
            assert RANK[other] < RANK[own] or other == own, f"{path}:{line} imports {name}, which stands above it"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_test_imports_from_a_test_module(path):
    for line, name in imports(path):
        assert not any(part.startswith("test_") or part == "conftest" for part in name.split(".")), f"{path}:{line}: {name}"


def test_only_torch_is_imported_with_the_package():
    code = """if True:
        import sys, unfading, unfading.cli
        print([m for m in ('tyro', 'rich', 'pooch', 'sklearn', 'altair', 'vl_convert') if m in sys.modules])"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(block, scope)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: str(p.relative_to(ROOT)))
def test_docs_examples_run(page):
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, scope)


def test_every_link_in_the_docs_leads_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_choosing_a_cell_names_every_cell():
    page = (ROOT / "docs" / "guide" / "choosing-a-cell.md").read_text()
    for cell in catalogue.cells():
        assert f"`{cell.__name__.removesuffix('Cell')}`" in page, cell.__name__


def test_the_pages_on_tasks_name_every_task():
    pages = "".join((ROOT / "docs" / "tasks" / page).read_text() for page in ("index.md", "real-data.md"))
    for name, task in catalogue.tasks().items():
        assert f"`{name}`" in pages, name
        assert f"`{task.__name__}`" in pages, name


def test_changelog_and_citation_know_the_version():
    assert f"## {unfading.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {unfading.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_cells_as_a_table_and_as_json():
    table = run("cells")
    assert table.returncode == 0
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    answer = run("cells", "--json", "--hidden-size", "16", "--input-size", "3", "--length", "100")
    entries = {entry["name"]: entry for entry in json.loads(answer.stdout)}
    assert set(entries) == {cell.__name__.removesuffix("Cell") for cell in catalogue.cells()}
    for name in entries:
        assert name in table.stdout
    lstm = entries["LSTM"]
    assert lstm["state"] == {"h": 16, "c": 16}
    assert lstm["recurrent_matrices"] == 4
    assert lstm["parameters"] == 4 * 16 * (16 + 3 + 1)
    assert lstm["multiply_adds_per_step"] == 4 * 16 * (16 + 3)
    assert lstm["multiply_adds_per_sequence"] == 100 * 4 * 16 * (16 + 3)
    # K = 5 inner steps of two thin dots at rank 2, and P (W x + b).
    assert entries["IncrementalRNN"]["multiply_adds_per_step"] == 5 * 2 * 16 * 2 + 16 * 3 + 2 * 16 * 2
    # Five scales of 64 statistics: r, phi, and the output, which is no part of the recurrence.
    assert entries["StatisticalRNN"]["multiply_adds_per_step"] == 320 * 16 + 64 * (16 + 3) + 320 * 16


def test_tasks_as_a_table_and_as_json(made):
    table = run("tasks")
    assert table.returncode == 0
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    entries = {entry["name"]: entry for entry in json.loads(run("tasks", "--json").stdout)}
    assert set(entries) == set(catalogue.tasks())
    for name in entries:
        assert name in table.stdout
    assert entries["adding"]["options"] == {"T": 200}
    assert entries["adding"]["guess"] == pytest.approx(1 / 6)
    assert entries["adding"]["found"] is None
    assert entries["pixel_mnist"]["dataset"] == "mnist"
    assert entries["pixel_mnist"]["found"] is True


def test_datasets_are_listed_and_verified(made, tmp_path):
    table = run("data", "list")
    assert table.returncode == 0
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    entries = {entry["name"]: entry for entry in json.loads(run("data", "list", "--json").stdout)}
    assert set(entries) == set(DATASETS)
    for name, dataset in DATASETS.items():
        assert name in table.stdout
        assert entries[name]["home"] == dataset.home
        assert entries[name]["licence"] == dataset.licence
        assert entries[name]["found"] is store.present(name)
    elsewhere = json.loads(run("data", "list", "--json", "--data", str(tmp_path)).stdout)
    assert not any(entry["found"] for entry in elsewhere if entry["name"] != "digits")
    # The made files are no published ones: this process was told so, the command was not.
    verified = run("data", "verify")
    assert verified.returncode == 2
    assert "mnist: 4 altered" in verified.stdout
    assert "not as published: mnist: train-images-idx3-ubyte.gz (altered)" in verified.stderr
    assert run("data", "verify", "--data", str(tmp_path)).returncode == 0
    refused = run("data", "fetch", "mnist", "--quiet")
    assert refused.returncode == 2
    assert "train-images-idx3-ubyte.gz is altered or cut short" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data", "fetch", "nmist"], "unknown dataset 'nmist'. Did you mean 'mnist'?"),
        (["data", "fetch", "yelp"], "dataset 'yelp' has to be got by hand"),
        (["data", "verify", "yelp"], "dataset 'yelp' is not in"),
        (["data", "fech"], "fetch"),
        (["cells", "--hidden-size", "0"], "--hidden-size must be at least 1; got 0"),
        (["cells", "--hiden-size", "3"], "--hidden-size"),
        (["cels"], "cells"),
        (["report"], "a report needs at least one folder of runs"),
        (["report", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, sentence):
    answer = run(*arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "tyro" not in answer.stderr


def test_every_public_name_is_documented():
    for name in unfading.__all__:
        assert inspect.getdoc(getattr(unfading, name)), name
    for verb in (
        cli.cells,
        cli.tasks,
        cli_data.list_datasets,
        cli_data.fetch,
        cli_data.verify,
        cli_report.report,
        cli_reproduce.reproduce,
    ):
        assert verb.__doc__
