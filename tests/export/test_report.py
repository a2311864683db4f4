"""The report of an exported model: its numbers are those of the export, and the page says what is absent."""

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.c_models import samples
from unfading.export import cortex_m
from unfading.export.error_by_value import ErrorByValue
from unfading.export.int8 import with_int8
from unfading.export.measure import measure
from unfading.export.model_stages import exported
from unfading.export.stage import StageRunner
from unfading.export.trained import Trained
from unfading.report import export_page
from unfading.tasks.synthetic import Adding

UNITS, STEPS = 12, 20


def subject(head=unfading.LastStep):
    torch.manual_seed(0)
    model = unfading.Model(torch.nn.Identity(), unfading.STAR(2, UNITS, num_layers=2), head(UNITS, 1)).eval()
    return Trained("a model", model, Adding(T=STEPS), None)


@pytest.fixture(scope="module")
def rows():
    return measure(subject(), batches=1, rows=128)


def test_sizes_and_scores_are_those_of_the_export(rows, tmp_path):
    trained = subject()
    (batch,) = trained.batches("test", 1)
    with torch.no_grad():
        want = float(trained.task.metrics(trained.model(batch.x)[0], batch)[trained.task.metric])
    twin = trained.quantised(1)
    got = float(trained.task.metrics(twin(batch.x), batch)[trained.task.metric])
    by_name = {row["precision"]: row for row in rows["precisions"]}
    assert list(by_name) == ["float32", "int8", "integer"]
    assert by_name["float32"]["score"] == pytest.approx(want, rel=1e-5)
    assert by_name["integer"]["score"] == pytest.approx(got, rel=1e-6)
    for precision in ("float32", "int8"):
        source = unfading.export.c(trained.model, tmp_path / precision, precision=precision)
        row = by_name[precision]
        assert (row["constants"], row["state"], row["multiply_adds"]) == (source.constants, source.state, source.multiply_adds)
        assert sum(row["parts"].values()) == source.constants
    assert sum(stage["multiply_adds"] for stage in rows["stages"]) == by_name["int8"]["multiply_adds"]


def test_errors_are_small_where_nothing_is_rounded_and_larger_where_it_is(rows):
    last = {}
    for row in rows["over_steps"]:
        last[row["precision"], row["stage"]] = row["error"]
    for stage in ("layer0", "layer1", "head"):
        assert last["float32", stage] < 1e-5 < 1e-4 < last["int8", stage] < 0.2
        assert 1e-4 < last["integer", stage] < 0.2


def test_an_operation_that_is_cut_is_found():
    """Samples twice as large as those of the calibration saturate the samples first, then what reads them."""
    layer = unfading.Elman(2, UNITS, activation="relu").eval()
    x = samples(STEPS, features=2, rows=4)
    twin = unfading.export.quantised(layer, [x])
    calm, wild = ErrorByValue(twin, x).rows(), ErrorByValue(twin, 4 * x).rows()
    assert sum(row["cut"] for row in calm) == 0 < sum(row["cut"] for row in wild)
    assert max(row["error"] for row in calm) < 0.1 < max(row["error"] for row in wild)
    assert all(row["own"] <= row["error"] + 0.05 for row in calm)


def test_int8_in_python_is_the_stage_with_rounded_matrices():
    stage = exported(unfading.STAR(2, UNITS).eval()).stages[0]
    rounded = with_int8(stage)
    assert {block.transposed for block in rounded.program.blocks()} == {True}
    x = samples(1, features=2, rows=3)[0].double()
    exact, near = (StageRunner(each, 3, torch.float64).push(x) for each in (stage, rounded))
    assert 1e-5 < float((exact - near).abs().max()) < 0.05
    for block in rounded.program.blocks():
        entries = np.unique(np.abs(rounded.weights[block.weight]))
        assert len(entries) <= 128


def test_the_page_names_the_numbers_and_what_is_absent(rows):
    page = export_page.page(rows)
    for row in rows["precisions"]:
        assert f"{row['constants']:,}" in page
        assert f"{row['multiply_adds']:,}" in page
    assert "STAR on Adding" in page
    assert "Saturation" in page
    without = {**rows, "missing": ["arm-none-eabi-gcc", "qemu-system-arm"]}
    without["precisions"] = [
        {name: value for name, value in row.items() if name not in ("code", "functions", "stack", "instructions")}
        for row in rows["precisions"]
    ]
    assert "arm-none-eabi-gcc and qemu-system-arm are not installed here" in export_page.page(without)


def test_a_model_without_integers_says_why(monkeypatch):
    monkeypatch.setattr(cortex_m, "missing", lambda *tools: list(tools))
    rows = measure(subject(unfading.MeanOverTime), batches=1, rows=128)
    assert [row["precision"] for row in rows["precisions"]] == ["float32", "int8"]
    assert "MeanOverTime" in rows["not_in_integers"]
    assert not rows["operations"]
    assert "There is no all-integer form" in export_page.page(rows)


def test_bad_arguments_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        unfading.export.report("absent.safetensors", tmp_path / "absent" / "page.html")
    with pytest.raises(ValueError, match="rows"):
        unfading.export.report("absent.safetensors", tmp_path / "page.html", rows=0)
    assert not list(tmp_path.iterdir())
