"""The page on the loop, the scan and Newton's method has the numbers of the results files."""

import re

import pytest
import torch

from tests.helpers.benchmarks import script


@pytest.fixture
def table():
    return script("lanes_table")


def test_the_tables_are_those_of_the_results(table):
    for page, text in table.pages().items():
        assert page.read_text() == text, "python benchmarks/lanes_table.py writes them; read the text around them again"


def test_the_figure_is_that_of_the_results(table):
    figure = script("lanes_figure")
    assert figure.FIGURE.read_text() == figure.svg()


def test_a_case_without_a_number_has_a_dash(table):
    line = {"fused ms": 2.0, "fused graph ms": 1.5, "scan ms": "not linear"}
    assert table.pair(line, "scan") == table.ratios(line, "fused", "scan") == "-"
    assert table.pair(line, "fused") == "2.00 / 1.50"
    assert table.corrections({"corrections": 40, "error": 0.5}, "") == "> 40"
    assert table.corrections({"corrections": 2, "error": None}, "") == "overflow"


def test_the_text_says_which_is_faster(table):
    text = re.sub(r"\s+", " ", table.GUIDE.read_text())
    linear = [line for line in table.lanes() if line["cell"] in table.LINEAR]

    def between(low, high, chosen, way=table.GRAPH):
        return all(low <= table.ratio(line, "fused", "scan", way) <= high for line in chosen)

    short = [line for line in linear if (line["T"], line["B"]) == (4_096, 1)]
    long = [line for line in linear if line["T"] > 4_096 and line["B"] == 1]
    assert "5 times as fast as the loop at T = 4,096, and 20 to 50 times from T = 16,384 on" in text
    assert between(4.5, 5.5, short)
    assert between(19.5, 50.5, long)
    assert "slower at 4,096, and 3 to 24 times as fast from 16,384 on" in text
    assert between(0, 0.99, short, table.PYTHON)
    assert between(2.5, 24.5, long, table.PYTHON)
    assert "1.5 to 1.6 times as fast" in text
    assert between(1.5, 1.65, [line for line in linear if line["B"] == 16])
    assert "the loop, by 3 to 14 %" in text
    assert between(0.86, 0.975, [line for line in linear if line["B"] >= 128])
    timed = [line for line in table.newton() if line["newton ms"] is not None]
    faster = {(line["T"], line["B"]): line for line in timed if line["newton ms"] < line["fused ms"]}
    assert list(faster) == [(65_536, 1)]
    gains = [table.ratio(line, "fused", "newton", table.PYTHON) for line in timed if (line["T"], line["B"]) in faster]
    assert f"{min(gains):.1f} to {max(gains):.1f} times as fast as the loop, if it needs at most 8 corrections" in text
    assert max(line["corrections"] for line in timed) == 8


@pytest.mark.parametrize(("u", "corrections"), [(0.5, 4), (1.2, 15)])
@torch.no_grad()
def test_newton_comes_to_the_states_of_the_loop(u, corrections):
    newton = script("newton")
    line = newton.counted(newton.loops("cpu", torch.float64), 64, u)
    assert line["corrections"] == corrections
    assert line["error"] < 1e-9
    assert line["lyapunov"] < 0
    assert (line["lyapunov guess"] > 0) == (u > 1)


@torch.no_grad()
def test_a_method_that_overflows_is_not_timed(monkeypatch):
    newton = script("newton")
    monkeypatch.setattr(newton, "milliseconds", lambda run: (run(), 1.0)[1])  # of events of a GPU
    loops = newton.loops("cpu", torch.float32)
    assert newton.timed(loops, 64, 2, 0.9)["newton ms"] == 1
    line = newton.timed(loops, 2048, 1, 1.2)
    assert line["fused ms"] == line["one correction ms"] == 1
    assert line["newton ms"] is line["error"] is None
    assert line["lyapunov"] < 0 < line["lyapunov guess"]


@torch.no_grad()
def test_newton_overflows_where_the_guess_expands():
    newton = script("newton")
    line = newton.counted(newton.loops("cpu", torch.float32), 1024, 1.2)
    assert line["error"] is line["largest"] is None
    assert line["error clipped"] < 1e-3
