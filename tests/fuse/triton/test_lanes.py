"""The laws of lanes under Triton's interpreter, and the choice of the number of chunks."""

import os

import pytest

import unfading
from tests.helpers.lane_laws import *  # noqa: F403
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton.estimates import estimates
from unfading.fuse.triton.launch_settings import H200
from unfading.fuse.triton.source import triton_missing

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
    # The contents of the padding are undefined, and NumPy warns about them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def device(monkeypatch):
    """Fewer steps are loaded at a time than on a GPU: the interpreter takes as long for each as for one of a loop."""
    monkeypatch.setattr("unfading.fuse.plan._triton_kernels", {})
    monkeypatch.setattr("unfading.fuse.triton.lane_loops.MOST_STEPS", 2)
    with interpreted():
        yield "cpu"


@pytest.fixture
def lanes(device):
    return triton_kernel(plan(unfading.MinGRUCell(3, 256)).key).lanes


def test_long_sequences_of_few_rows_run_in_chunks(lanes):
    assert lanes.chunks("train", (0, 65_536, 1), H200, None) >= 64
    assert lanes.chunks("train", (0, 784, 512), H200, None) == 1


def test_one_chunk_where_a_scan_is_not_wanted_and_several_where_it_is(lanes):
    assert lanes.chunks("train", (0, 65_536, 1), H200, False) == 1
    assert lanes.chunks("train", (0, 784, 512), H200, True) > 1
    assert lanes.chunks("train", (0, 1, 512), H200, True) == 1


def test_no_chunk_is_empty(lanes):
    for T in (1, 2, 3, 17, 100, 784, 1000, 65_537):
        chunks = lanes.chunks("back", (0, T, 1), H200, True)
        steps = -(-T // chunks)
        assert (chunks - 1) * steps < T <= chunks * steps


def test_a_long_step_is_written_out_fewer_times():
    """Triton took 37 s for 16 steps of BR."""
    steps = {}
    with interpreted():
        for cell in (unfading.MinGRUCell, unfading.UnICORNNCell, unfading.BRCell):
            lanes = triton_kernel(plan(cell(3, 256)).key).lanes
            steps[cell] = lanes.functions["train"].source.count("step = start")
    assert list(steps.values()) == [16, 16, 8]


def test_the_doctor_names_the_loop_of_independent_units(device):
    loops = [way.loop for way in estimates(triton_kernel(plan(unfading.MinGRUCell(3, 256)).key), "tf32", 128, H200)]
    assert loops == ["a thread for each unit", "CUDA graphs", "reference loop"]
