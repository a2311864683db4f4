"""The project holds to its own rules: who may import whom, one version, true README and command line."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

import unfading
from tests.helpers.paths import ROOT
from unfading import catalogue

SOURCE = ROOT / "src" / "unfading"

# From the bottom up: a module imports only modules of an earlier line.
LAYERS = [
    ["allocation", "errors", "files", "torch_state", "source_lines"],
    ["data", "initialise", "lengths", "loop_options", "metrics", "report"],
    ["cells", "tasks"],
    ["own_data", "reference"],
    ["fuse"],
    ["backends", "catalogue", "machine"],
    ["layers"],
    ["darts", "nn"],
    ["training"],
    ["bench", "diagnostics", "doctor", "estimators", "export"],
    ["papers"],
    ["cli"],
    ["__init__", "__main__"],
]
# Module names that sibling folders share, because they hold the same part of each.
SAME_PART = {"base", "curves", "emit", "figures", "kernel", "orders", "runs", "tables"}
# The named tuples of a cell, which have the same names in every family.
CELL_PARTS = {"Inputs", "GatedInputs", "Weights", "GatedWeights", "State"}
PARTICIPLES = {"found", "made", "told", "said", "seen", "kept"}
# Keys of a JSON output, which keep their names.
JSON_KEYS = {("catalogue.py", "found"), ("diagnostics/equilibrium/analysis.py", "found")}
RANK = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}


def room(dotted):
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path):
    for node in nodes(path):
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
    assert ast.get_docstring(nodes(path)[0])


def repeated(names):
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_the_root_has_few_modules():
    # The entry point of `python -m unfading` is three lines that nobody opens to follow a call.
    assert len([path for path in SOURCE.glob("*.py") if path.stem != "__main__"]) <= 13


def test_module_names_are_unique():
    names = [path.stem for path in SOURCE.rglob("*.py") if path.stem not in {"__init__", *SAME_PART}]
    assert repeated(names) == []


def test_public_class_names_are_unique():
    trees = [nodes(path)[0] for path in SOURCE.rglob("*.py")]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert repeated(name for name in names if not name.startswith("_") and name not in CELL_PARTS) == []


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_variable_is_named_by_a_participle(path):
    for node in nodes(path):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else None
        if (str(path.relative_to(SOURCE)), name) not in JSON_KEYS:
            assert name not in PARTICIPLES, f"{path}:{node.lineno} names a variable {name}; name the thing"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_test_imports_from_a_test_module(path):
    for line, name in imports(path):
        assert not any(part.startswith("test_") or part == "conftest" for part in name.split(".")), f"{path}:{line}: {name}"


def test_no_public_name_loads_a_library_of_the_command_line_or_of_an_extra():
    code = """if True:
        import sys, unfading, unfading.cli.main
        from unfading import *
        print([m for m in ('tyro', 'rich', 'pooch', 'PIL', 'sklearn', 'altair', 'vl_convert') if m in sys.modules])"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(block, scope)


PAGES_WITH_EXAMPLES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python\n" in page.read_text()]


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.sample(12)
def test_docs_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
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


def test_every_public_name_is_documented():
    for name in unfading.__all__:
        assert inspect.getdoc(getattr(unfading, name)), name
