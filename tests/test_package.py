"""The package loads what is used, names on demand and the compiler with the first layer that runs; its stub is up to date."""

import copy
import importlib.util
import os
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import unfading
from tests.helpers.paths import ROOT

SOURCE = Path(unfading.__file__).parent


def answer(code):
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_other_module_of_it_and_no_torch():
    code = "import sys, unfading; print([m for m in sys.modules if m == 'torch' or m.startswith('unfading.')])"
    assert answer(code) == "[]"


def test_a_layer_class_loads_at_most_70_modules():
    code = "import sys, unfading; unfading.STAR; print(sum(m.startswith('unfading.') for m in sys.modules))"
    assert int(answer(code)) <= 70


def test_the_reference_loop_runs_without_the_compiler():
    code = """if True:
        import sys, torch, unfading
        with torch.no_grad():
            unfading.LSTM(2, 3, backend="reference")(torch.ones(4, 1, 2))
        print([m for m in sys.modules if m.startswith(("unfading.fuse.", "unfading.backends.cuda_graph."))])"""
    assert answer(code) == "[]"


def test_a_compiled_layer_may_be_the_first_that_runs():
    code = """if True:
        import torch, unfading
        layer, x = unfading.STAR(2, 3), torch.ones(4, 1, 2)
        torch._dynamo.config.error_on_recompile = True  # the second call finds the compiler imported
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x)[0], layer(x)[0])
        print("same")"""
    assert answer(code) == "same"


@pytest.mark.parametrize("name", unfading.__all__)
def test_every_public_name_comes_from_its_module(name):
    assert getattr(unfading, name) is getattr(sys.modules[f"unfading.{unfading._MODULES[name]}"], name)


def test_no_public_name_is_also_a_module_or_a_package():
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not modules & set(unfading.__all__)


def test_the_package_lists_its_names_before_any_is_used():
    code = "import unfading; print(set(unfading.__all__) <= set(dir(unfading)), 'torch' in __import__('sys').modules)"
    assert answer(code) == "True False"


def test_star_import_gives_every_public_name():
    scope = {}
    exec("from unfading import *", scope)
    assert set(scope) - {"__builtins__"} == set(unfading.__all__)


def test_submodules_are_attributes():
    assert answer("import unfading; print(unfading.tasks.Adding.__name__)") == "Adding"


def test_a_wrong_name_is_an_attribute_error_with_the_nearest_name():
    done = subprocess.run([sys.executable, "-c", "import unfading; unfading.Recurent"], capture_output=True, text=True)
    assert "AttributeError: module 'unfading' has no attribute 'Recurent'. Did you mean: 'Recurrent'?" in done.stderr
    assert not hasattr(unfading, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from unfading import no_such_name")


def test_help_shows_the_public_names():
    text = pydoc.plain(pydoc.render_doc(unfading))
    assert all(f"class {name}(" in text for name in ("Cell", "STAR", "STARCell", "Run"))
    assert all(f"{name}(" in text for name in ("diagnose", "flat_start", "scan", "train"))


def test_a_layer_pickled_elsewhere_is_the_same_class(tmp_path):
    path = tmp_path / "layer.pickle"
    path.write_bytes(pickle.dumps(copy.deepcopy(unfading.STAR(2, 3))))
    code = f"""if True:
        import pickle, pathlib
        layer = pickle.loads(pathlib.Path({str(path)!r}).read_bytes())
        import unfading
        print(type(layer) is unfading.STAR, type(layer).__module__)"""
    assert answer(code) == "True unfading"


def test_the_stub_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_stub", ROOT / "tools" / "make_stub.py")
    make_stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_stub)
    assert make_stub.PATH.read_text() == make_stub.stub(), "run: python tools/make_stub.py"


def type_errors(path, text):
    """What mypy says of a user's file."""
    path.write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    environment = {**os.environ, "MYPYPATH": str(SOURCE.parent)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout.splitlines()


def test_a_type_checker_knows_the_options_and_the_state_of_a_layer(tmp_path):
    lines = type_errors(
        tmp_path / "user.py",
        """\
import torch
import unfading
from unfading.cells.star import State

layer = unfading.STAR(3, 5, num_layers=2, bidirectional=True, max_lag=100)
unfading.Elman(3, 5, activation="relu", device="cpu", dtype=torch.float64)
unfading.STAR(3, 5, max_leg=100)
unfading.STAR(3, "5")
unfading.Elman(3, 5, activation="softplus")
unfading.STRA
x = torch.ones(7, 2, 3)
output, state = layer(x, lengths=torch.tensor([7, 4]))
state = layer.trajectory(x, state)
same: State = state
other: torch.Tensor = state
layer(x, lenghts=torch.tensor([7, 4]))
layer.stream(batch=2).push(x[0]).sum()
layer.stream(rows=2)
""",
    )
    assert [(line.split(":")[1], line.split("[")[-1]) for line in lines if " error: " in line] == [
        ("7", "call-arg]"),
        ("8", "arg-type]"),
        ("9", "arg-type]"),
        ("10", "attr-defined]"),
        ("15", "assignment]"),
        ("16", "call-arg]"),
        ("18", "call-arg]"),
    ], lines


def test_a_type_checker_knows_what_a_cell_is_made_of(tmp_path):
    lines = type_errors(
        tmp_path / "cells.py",
        """\
from typing import Any, NamedTuple

from torch import Tensor

import unfading


class Inputs(NamedTuple):
    a: Tensor


class State(NamedTuple):
    h: Tensor


class Weights(NamedTuple):
    W: Tensor


class Checked(unfading.Cell[Inputs, State, Weights]):
    def step(self, inputs: Inputs, state: State, weights: Weights) -> Tensor:
        return state.h + inputs.b


class Plain(unfading.Cell):
    def step(self, inputs: Any, state: Any, weights: Any) -> Any:
        return state


def first(cell: Checked) -> Tensor:
    return cell.initial_state(1).c
""",
    )
    assert [(line.split(":")[1], line.split("[")[-1]) for line in lines if " error: " in line] == [
        ("21", "override]"),
        ("22", "attr-defined]"),
        ("31", "attr-defined]"),
    ], lines
