"""`unfading doctor`: which loop a GPU runs, with the estimated time of every loop, or why it cannot run."""

import json

import pytest

import unfading
from unfading import doctor
from unfading.cli import listing
from unfading.doctor import GpuCall, OnGPU, explain_on_gpu, explanations_on_gpu
from unfading.fuse.triton.estimates import DIVIDED, GRAPHS, REFERENCE, WHOLE, LoopEstimate
from unfading.fuse.triton.launch_settings import Gpu

SMALL = Gpu(4, 48 * 1024)


def named(explanation):
    return {loop.loop: loop for loop in explanation.loops}


@pytest.mark.parametrize("cell", ["STAR", "GRU", pytest.param(None, marks=pytest.mark.long)])
def test_the_fastest_loop_is_the_first_and_is_chosen(cell):
    for hidden_size, batch in ((64, 128), (200, 128), (512, 1000)):
        for explanation in explanations_on_gpu(GpuCall(hidden_size, batch, tf32=True), cell):
            times = [loop.microseconds for loop in explanation.loops if loop.microseconds is not None]
            assert times == sorted(times)
            if times:
                graphs = explanation.loops[0].loop == GRAPHS
                assert explanation.backend == ("graph" if graphs else "fused"), explanation
                assert {GRAPHS, REFERENCE} <= set(named(explanation))


def test_a_layer_of_200_units_is_divided():
    explanation = explain_on_gpu(unfading.LSTMCell, GpuCall(200, 128, tf32=True))
    assert (explanation.backend, explanation.loops[0].loop) == ("fused", DIVIDED)
    assert "16 rows x 16 units in a program" in explanation.loops[0].detail


def test_what_cannot_run_says_why():
    small = named(explain_on_gpu(unfading.STARCell, GpuCall(64)))
    assert small[DIVIDED].microseconds is None
    assert "not divided below 65" in small[DIVIDED].detail
    large = explain_on_gpu(unfading.LSTMCell, GpuCall(600, gpu=SMALL))
    assert (large.backend, "KB" in large.reason) == ("graph", True)
    assert "the 4 multiprocessors do not take the matrices in tf32x3" in named(large)[DIVIDED].detail
    assert explain_on_gpu(unfading.EURNNCell, GpuCall(100)).backend == "none"


def test_the_doctor_prints_it(capsys, monkeypatch):
    fast = [LoopEstimate(WHOLE, 2.5, "forward 1 us"), LoopEstimate(DIVIDED, None, "too few units")]
    explanations = [
        OnGPU("STAR", "fused", "", fast),
        OnGPU("LSTM", "graph", "too large", []),
        OnGPU("Odd", "reference", "it looks", []),
    ]
    monkeypatch.setattr(doctor, "checks", list)
    monkeypatch.setattr(doctor, "explanations", list)
    monkeypatch.setattr(doctor, "explanations_on_gpu", lambda call, cell: explanations if call.hidden_size == 300 else [])
    listing.doctor(hidden_size=300)
    printed = capsys.readouterr().out
    assert "1 fused, 1 as CUDA graphs, 1 by the reference loop: 300 units, batch 128, dots in tf32x3, on " in printed
    assert "LSTM runs as CUDA graphs: too large" in printed
    assert "Odd runs by the reference loop: it looks" in printed
    assert f"{WHOLE:24} 2.5 us a step: forward 1 us" in printed
    assert f"{DIVIDED:24} cannot run: too few units" in printed


def test_one_cell_in_json(capsys):
    listing.doctor(cell="LSTM", batch_size=1, json=True)
    (line,) = json.loads(capsys.readouterr().out)["on_gpu"]
    assert (line["name"], line["backend"]) == ("LSTM", "fused")
    assert {loop["loop"] for loop in line["loops"]} >= {GRAPHS, REFERENCE}


def test_an_unknown_cell():
    with pytest.raises(ValueError, match=r"unknown cell 'LSTN'. Did you mean 'LSTM'\?"):
        listing.doctor(cell="LSTN")
