"""STAR's figures hold the numbers of the lattices that were drawn, and can be rendered."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import vl_convert

from unfading.cells.janet import ForgetLSTMCell
from unfading.cells.lstm import LSTMCell
from unfading.diagnostics.measure.draws import SIZES, lattice_statistics
from unfading.papers.star import figures as star
from unfading.papers.star.without_output_gate import WithoutOutputGateCell
from unfading.report.figures.charts import vega_lite_version


@pytest.fixture
def small(monkeypatch):
    """The figures with two layers, three steps and four units, computed in this process."""
    setup = SIZES._replace(layers=2, steps=3, width=4)
    monkeypatch.setattr(star, "SIZES", setup)
    monkeypatch.setattr(star, "worker_pool", lambda processes: ThreadPoolExecutor(1))
    monkeypatch.setattr(
        star, "measured", lambda cell, draws, pool: lattice_statistics(lambda size: cell(size, 4), draws, setup)
    )
    star._drawn_lattices.cache_clear()
    yield setup
    star._drawn_lattices.cache_clear()


@pytest.mark.parametrize("figure", [star.fig2, star.fig6, star.fig7], ids=lambda figure: figure.__name__)
@pytest.mark.sample(1)
def test_a_figure_holds_the_measured_lattices(figure, small):
    item = figure(5)
    cells = list(dict.fromkeys(row["cell"] for row in item.rows))
    assert cells[-1] == "STAR"
    assert len(item.rows) == 3 * 2 * small.layers * small.steps
    again = {cell: lattice_statistics(lambda size, cell=cell: star.CELLS[cell](size, 4), 5, small) for cell in cells}
    for row in item.rows:
        loss = {words: name for name, words in star.LOSSES.items()}[row["loss"]]
        expected = again[row["cell"]][loss]
        assert row["mean"] == pytest.approx(float(expected.mean[row["layer"] - 1, row["step"] - 1]))
        assert row["deviation"] == pytest.approx(float(expected.deviation[row["layer"] - 1, row["step"] - 1]))
        assert row["ratio"] == pytest.approx(row["mean"] / float(expected.mean[-1, -1]))
        assert row["decades"] == pytest.approx(math.log10(row["ratio"]))
    assert len(item.findings) == 6
    assert "5 draws" in item.caption
    assert vl_convert.vegalite_to_svg(item.chart, vl_version=vega_lite_version()).count(">STAR<") == 1


def test_each_cell_from_lstm_to_star_changes_one_thing():
    """Without output gate: the LSTM with o = 1, c in place of h and tanh of the state; with i = 1 - f it is ForgetLSTM."""
    torch.manual_seed(0)
    cell, other = WithoutOutputGateCell(3, 4).double(), ForgetLSTMCell(3, 4).double()
    x, h = torch.randn(1, 2, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    (a,), state = cell.project(x), cell.initial_state(2)._replace(h=h)
    i, f, z = (a[0] + h @ cell.W_h.T).chunk(3, dim=-1)
    got = cell.step(type(cell.project(x))(a[0]), state, cell.weights()).h
    torch.testing.assert_close(got, torch.tanh(torch.sigmoid(f) * h + torch.sigmoid(i) * torch.tanh(z)))
    # The input gate's weights as minus the forget gate's: sigmoid(-f) = 1 - sigmoid(f).
    with torch.no_grad():
        for mine, theirs in (
            (cell.from_input.weight, other.from_input.weight),
            (cell.from_input.bias, other.from_input.bias),
            (cell.W_h, other.W_h),
        ):
            forget, candidate = theirs.chunk(2)
            mine.copy_(torch.cat([-forget, forget, candidate]))
    for each in (cell, other):
        inputs = each.project(x)
        each.after = each.step(type(inputs)(inputs.a[0]), each.initial_state(2)._replace(h=h), each.weights()).h
    torch.testing.assert_close(cell.after, other.after)
    assert next(iter(star.PATH.values())) is LSTMCell
    assert list(star.PATH.values())[2] is ForgetLSTMCell
