"""`UserCode`: the files of a user's class are read once, with the modules beside them, and versions do not mix."""

import json
import linecache
import sys
import textwrap

import pytest
import torch

from tests.helpers.trained import small
from unfading import train
from unfading.training.names import layer_class
from unfading.training.user_code import UserCode, read_code

MAIN = """
import dataclasses, json

import package.deep as deep
import side
from package import inner
from package.inner import VALUE as direct
from side import value


@dataclasses.dataclass
class Own:
    number: "int" = 1


def values():
    import late
    return [side.value(), value(), inner.VALUE, direct, deep.twice(), late.VALUE]
"""
FILES = {
    "my.py": MAIN,
    "side.py": "import my\nNUMBER = 1\ndef value(): return NUMBER\n",
    "late.py": "VALUE = 2\n",
    "package/__init__.py": "",
    "package/inner.py": "VALUE = 3\n",
    "package/deep.py": "from . import inner\nfrom .inner import VALUE\ndef twice(): return inner.VALUE + VALUE\n",
    "unused.py": "raise RuntimeError('never imported')\n",
    "json.py": "raise RuntimeError('the standard library comes first')\n",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a file of a user and modules beside it."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_modules_beside_a_file_that_it_imports_belong_to_its_source(files):
    code = read_code("my.py:Own")
    assert set(code.files) == set(FILES) - {"unused.py", "json.py"}
    assert next(iter(code.files)) == "my.py"
    assert code.module().values() == [1, 1, 3, 3, 6, 2]
    assert code.module().__file__ == str(files / "my.py")
    assert not {"my", "side", "late", "package"} & set(sys.modules)


@pytest.mark.parametrize("name", [*FILES, "unused.py"])
def test_a_change_of_any_of_these_modules_changes_the_hash_and_no_other_does(name, files):
    before = read_code("my.py:Own")
    (files / name).write_text(FILES[name] + "\n# a comment\n")
    assert (read_code("my.py:Own").digest != before.digest) == (name in before.files)


def test_two_versions_live_in_one_process_and_do_not_mix(files):
    first = read_code("my.py:Own")
    values = first.module().values
    for name, old, new in (("side.py", "NUMBER = 1", "NUMBER = 10"), ("late.py", "2", "20"), ("package/inner.py", "3", "30")):
        (files / name).write_text(FILES[name].replace(old, new))
    second = read_code("my.py:Own")
    assert second.module().values() == [10, 10, 30, 30, 60, 20]
    assert values() == first.module().values() == [1, 1, 3, 3, 6, 2]
    assert first.module() is first.module() is not second.module()


def test_a_module_that_was_not_yet_imported_is_that_of_its_version(files):
    """`late` is imported inside a function, after the file has been edited."""
    values = read_code("my.py:Own").module().values
    (files / "late.py").write_text("VALUE = 20\n")
    assert values()[-1] == 2


def test_source_survives_a_folder_and_json(files):
    code = read_code("my.py:Own")
    code.write(files / "stored")
    assert read_code("my.py:Own", files / "stored") == code == UserCode.from_json(json.loads(json.dumps(code.to_json())))
    for name in FILES:
        (files / name).unlink()
    stored = read_code("my.py:Own", files / "stored")
    assert stored.digest == code.digest
    assert stored.module().values() == [1, 1, 3, 3, 6, 2]


def test_a_module_and_a_folder_without_init_have_the_same_source(files, monkeypatch):
    (files / "loose").mkdir()
    (files / "loose" / "cells.py").write_text("from .other import VALUE\nimport late\nclass Own: value = VALUE + late.VALUE\n")
    (files / "loose" / "other.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(files)
    code = read_code("loose.cells:Own")
    assert set(code.files) == {"loose/cells.py", "loose/other.py", "late.py"}
    assert code.module().Own.value == 7


def test_an_installed_module_is_imported_as_it_is():
    code = read_code("unfading.cells.star:STARCell")
    assert code.installed
    assert code.module() is sys.modules["unfading.cells.star"]


def test_a_file_among_installed_packages_takes_none_of_them(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "my.py").write_text("import side\n")
    (folder / "side.py").write_text("")
    assert list(read_code(f"{folder}/my.py:Own").files) == ["my.py"]


def test_lines_are_those_that_run_and_not_those_of_an_edited_file(files):
    (files / "my.py").write_text("def fail():\n    raise KeyError('first')\n")
    module = read_code("my.py:fail").module()
    (files / "my.py").write_text("\n\n\n")
    linecache.checkcache()
    with pytest.raises(KeyError) as caught:
        module.fail()
    assert str(caught.traceback[-1].statement).strip() == "raise KeyError('first')"


BROKEN = {
    "syntax": ("x = (\n", "my.py cannot be imported: '(' was never closed in line 1."),
    "syntax beside": ("import side", "side.py cannot be imported: invalid syntax in line 1."),
    "null": ("x = '\0'", "my.py cannot be imported: "),
    "error": (
        "import torch\ntorch.nothing_at_all",
        "my.py, line 2, cannot be imported: AttributeError: module 'torch' has no",
    ),
    "missing": ("import not_there", "my.py, line 1, cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
    "encoding": (b"x = '\xff'", "my.py cannot be imported: "),
}


@pytest.mark.parametrize(("text", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_imported_gives_one_sentence(text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "side.py").write_text("1 +\n")
    (tmp_path / "my.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        layer_class("my.py:Own")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


CELL = """
from typing import NamedTuple

import torch
import unfading
from size import SLOPE

Inputs = NamedTuple("Inputs", [("a", torch.Tensor)])
State = NamedTuple("State", [("h", torch.Tensor)])
Weights = NamedTuple("Weights", [("U", torch.Tensor)])


class OwnCell(unfading.Cell):
    def __init__(self, input_size, hidden_size, *, bias=True):
        super().__init__(input_size, hidden_size)
        self.W = torch.nn.Linear(input_size, hidden_size, bias=bias)
        self.U = torch.nn.Parameter(torch.eye(hidden_size) / 2)

    def project(self, x, start=0):
        return Inputs(self.W(x))

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs, state, weights):
        parts = [inputs.a, unfading.linear(state.h, weights.U)]
        return State(torch.tanh(SLOPE * sum(parts[i] for i in range(len(parts)))))
"""


def test_a_cell_with_a_module_beside_it_is_compiled_and_runs_under_torch_compile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(CELL)
    (tmp_path / "size.py").write_text("SLOPE = 0.5\n")
    kind = layer_class("my.py:OwnCell")
    torch.manual_seed(0)
    net, x = kind(3, 4), torch.randn(6, 2, 3)
    fused = kind(3, 4, backend="fused")
    fused.load_state_dict(net.state_dict())
    expected = net(x)[0]
    torch.testing.assert_close(fused(x)[0], expected)
    torch.testing.assert_close(torch.compile(net, backend="eager")(x)[0], expected)


def test_an_edit_between_two_runs_of_one_session_trains_the_new_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(CELL)
    (tmp_path / "size.py").write_text("SLOPE = 0.5\n")
    first = small(cell="my.py:OwnCell", steps=3)
    before = train(first, "runs")
    (tmp_path / "size.py").write_text("SLOPE = 1.5\n")
    second = small(cell="my.py:OwnCell", steps=3)
    assert second.key != first.key
    assert second != first
    after = train(second, "runs", say=lambda text: None)
    assert after["test"] != before["test"]
    assert [record["about"]["sources"] for record in (before, after)] == [first.sources, second.sources]
    # What ran is what the record names: the same source gives the same numbers.
    (tmp_path / "size.py").write_text("SLOPE = 0.5\n")
    assert train(small(cell="my.py:OwnCell", steps=3))["test"] == before["test"]
    assert textwrap.dedent((tmp_path / "runs" / first.key / "source" / "cell" / "size.py").read_text()) == "SLOPE = 0.5\n"
