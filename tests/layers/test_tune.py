"""`unfading.tune` compares the kernels of a cell with CUDA graphs of the reference loop."""

import pytest

import unfading
from unfading.layers import tune


@pytest.fixture
def times(monkeypatch):
    """The times of both backends; what is remembered of them."""
    remembered = {}

    def remember(cell, batch, *, keep, faster):
        remembered[batch, keep] = faster

    monkeypatch.setattr(tune, "graph_refusal", lambda cell: None)
    monkeypatch.setattr(tune, "remember_graphs", remember)
    return remembered


def test_the_faster_one_is_remembered(times, monkeypatch):
    milliseconds = {("fused", False): 1.0, ("graph", False): 2.0, ("fused", True): 4.0, ("graph", True): 3.0}
    monkeypatch.setattr(tune, "_milliseconds", lambda cell, backend, steps, batch, gradient: milliseconds[backend, gradient])
    assert tune._against_graphs(unfading.STARCell(1, 8), 10, 5) == [(False, 1.0, 2.0), (True, 4.0, 3.0)]
    assert times == {(5, False): False, (5, True): True}


def test_a_step_that_cannot_be_recorded_is_not_compared(times, monkeypatch):
    def refused(*arguments):
        raise RuntimeError("STARCell cannot run as CUDA graphs: it draws random numbers")

    monkeypatch.setattr(tune, "_milliseconds", refused)
    assert tune._against_graphs(unfading.STARCell(1, 8), 10, 5) == []
    assert times == {}


@pytest.mark.parametrize("gradient", [False, True])
def test_both_backends_run_the_same_call(gradient, monkeypatch):
    monkeypatch.setattr(tune, "milliseconds_of", lambda call, device: call() or 1.0)
    for backend in ("fused", "reference"):
        assert tune._milliseconds(unfading.GRUCell(3, 8), backend, 4, 2, gradient) == 1.0
