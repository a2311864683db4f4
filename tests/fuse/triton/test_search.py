"""The search for the fastest launch settings of a loop, with simulated times, and how its result is stored."""

import json

import pytest
import torch

import unfading
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton import kernel as module
from unfading.fuse.triton import search as triton_tune
from unfading.fuse.triton.launch_settings import CHUNKS, Candidate, LaunchSettings, LoopShape, resident_blocks, usual
from unfading.fuse.triton.search import best, remember, store, tuned

CUT = LoopShape("train", 128, 4 * 128 * 128, 4 * 128 * 128, 1, True, 10)
USUAL = usual(CUT, "tf32")
OTHER = USUAL._replace(rows=32, units=16)
ROWS = (2, 20)  # models, and rows of each


@pytest.mark.parametrize(
    "fastest", [USUAL, USUAL._replace(warps=16), USUAL._replace(warps=4, width=None), OTHER, OTHER._replace(warps=16)], ids=str
)
def test_the_fastest_is_found(fastest):
    def time(setting):
        return 1.0 + sum(a != b for a, b in zip(setting, fastest, strict=True))

    chosen, least, first = best(CUT, [USUAL, OTHER], time)
    assert (chosen, least, first) == (fastest, 1.0, time(USUAL))


def test_what_does_not_run_is_not_chosen():
    chosen, least, _ = best(CUT, [USUAL, OTHER], lambda setting: 2.0 if setting == USUAL else float("inf"))
    assert (chosen, least) == (USUAL, 2.0)


def test_vectors_are_cut_only_where_they_may_be():
    asked = []
    best(CUT._replace(flat=False), [USUAL], lambda setting: asked.append(setting) or 1.0)
    assert {setting.width for setting in asked} == {USUAL.width}


@pytest.mark.parametrize("width", [32, 64, 128])
def test_chunks_of_a_matrix_may_be_longer_or_shorter(width):
    for before in CHUNKS:
        start = LaunchSettings(64, 8, before, 0, 16)
        assert best(CUT, [start], lambda setting: 1.0 + (setting.width != width))[0] == start._replace(width=width)


def test_no_chunk_is_longer_than_those_that_are_masked():
    """A vector whose size is a multiple of the longest chunk is read without a mask, also after several searches."""
    start = LaunchSettings(64, 8, max(CHUNKS), 0, 16)
    assert best(CUT, [start], lambda setting: 1.0 / setting.width)[0] == start


def forget(kernel):
    kernel.settings.clear()
    kernel._settings.clear()


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFADING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with interpreted():
        cell_plan = plan(unfading.STARCell(1, 100))
        yield triton_kernel(cell_plan.key)
    forget(triton_kernel(cell_plan.key))


def test_what_was_found_is_remembered_by_another_process(kernel, monkeypatch):
    device = torch.device("cpu")
    wanted = kernel.setting("train", "tf32", ROWS, device)._replace(warps=16)

    def milliseconds(run, device):
        run()
        return 0.5 if kernel.setting("train", "tf32", ROWS, device) == wanted else 1.0

    monkeypatch.setattr(triton_tune, "milliseconds_of", milliseconds)
    ran = []
    choices = {choice.loop: choice for choice in tuned(kernel, "tf32", ran.append, ROWS, device)}
    assert set(ran) == set(choices) == {"infer", "train", "back"}
    assert choices["train"].setting == wanted
    assert choices["train"].milliseconds == 0.5
    forget(kernel)
    assert kernel.setting("train", "tf32", ROWS, device) != wanted  # also where the usual settings were asked for before
    remember(kernel, "tf32", device)
    assert kernel.setting("train", "tf32", ROWS, device) == kernel.setting("train", "tf32", (1, 60), device) == wanted
    assert kernel.setting("train", "tf32", (1, 8), device).warps == 8  # nothing is stored for fewer rows
    remember(kernel, "bf16", device)  # nor for another precision
    assert kernel.setting("train", "bf16", ROWS, device).warps == 8


def test_that_graphs_are_faster_is_remembered_too(kernel):
    device = torch.device("cpu")
    kernel.set_graphs("tf32", ROWS, device, keep=True, faster=True)
    kernel.set_graphs("tf32", ROWS, device, keep=False, faster=False)
    store(kernel, "tf32", device)
    kernel.graphs_win.clear()
    kernel._slower.clear()
    assert kernel.slower_than_graphs("tf32", ROWS, device, keep=True) is None
    remember(kernel, "tf32", device)
    assert kernel.graphs_win == {("tf32", 64, device, True): True, ("tf32", 64, device, False): False}
    assert "measured" in kernel.slower_than_graphs("tf32", ROWS, device, keep=True)
    kernel.graphs_win.clear()


def test_rows_units_and_the_loop_itself_are_searched(kernel, monkeypatch):
    asked = []
    other = LaunchSettings(32, 4, None, 0, 16)
    usual = kernel.setting("train", "tf32", ROWS, torch.device("cpu"))
    every = [Candidate(2.0, usual), Candidate(3.0, other), Candidate(9.0, OTHER)]
    monkeypatch.setattr(module, "candidates", lambda *_, **__: every)

    def milliseconds(run, device):
        asked.append(kernel.setting("train", "tf32", ROWS, device))
        return 1.0

    monkeypatch.setattr(triton_tune, "milliseconds_of", milliseconds)
    tuned(kernel, "tf32", lambda name: None, ROWS, torch.device("cpu"))
    assert other in asked
    assert OTHER not in asked  # four times slower by its estimate


def test_the_time_of_other_settings_does_not_count(kernel, monkeypatch):
    """Where a GPU does not accept settings, the loop runs with the next ones."""
    device, refused = torch.device("cpu"), LaunchSettings(32, 4, None, 0, 16)
    usual = kernel.setting("train", "tf32", ROWS, device)
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [Candidate(2.0, usual), Candidate(3.0, refused)])
    monkeypatch.setattr(kernel, "_excluded", set())
    times = iter([1.0, 0.5] + [2.0] * 100)

    def run(name):
        if kernel.setting(name, "tf32", ROWS, device) == refused:
            kernel.exclude(name, "tf32", device, refused, RuntimeError())

    monkeypatch.setattr(triton_tune, "milliseconds_of", lambda run, device: (run(), next(times))[1])
    forget(kernel)
    choices = tuned(kernel, "tf32", run, ROWS, device)
    forget(kernel)
    assert kernel._excluded
    assert all(choice.setting != refused for choice in choices)


@pytest.mark.parametrize("damage", ["", "{", "[]", json.dumps({"train": {"rows": 16}})])
def test_a_damaged_file_is_as_none(damage, kernel, monkeypatch):
    before = kernel.setting("train", "tf32", ROWS, torch.device("cpu"))
    forget(kernel)
    monkeypatch.setattr(triton_tune, "read_file", lambda name: damage.encode())
    remember(kernel, "tf32", torch.device("cpu"))
    assert kernel.setting("train", "tf32", ROWS, torch.device("cpu")) == before


def test_a_layer_that_is_not_on_a_gpu():
    with pytest.raises(
        ValueError, match=r"tune times kernels on a GPU; the layer is on cpu\. Move it there first: layer\.cuda\(\)\."
    ):
        unfading.tune(unfading.STAR(1, 8))


@pytest.mark.parametrize(("room", "stay"), [(0, 0), (99, 0), (100, 1), (150, 2), (299, 4), (300, 6), (10_000, 6)])
def test_blocks_that_stay_leave_room_for_the_largest_of_the_others(room, stay):
    assert resident_blocks([50] * 6, room) == stay


def test_a_matrix_too_large_for_the_chip_is_cut():
    assert usual(LoopShape("train", 128, 128 * 128, 128 * 128, 1, True, 10), "tf32") == LaunchSettings(16, 8, None, 192 * 1024)
    assert usual(CUT, "tf32").width == 64
    assert usual(CUT, "bf16").width is None
    assert usual(CUT._replace(flat=False), "tf32").width is None


def test_vectors_that_would_be_padded_by_a_third_are_cut():
    for units, width in ((64, None), (80, None), (81, 64), (96, 64), (97, None), (128, None)):
        loop = LoopShape("train", units, 128 * 128, 128 * 128, 1, True, 10)
        assert usual(loop, "tf32").width == width
        assert usual(loop._replace(flat=False), "tf32").width is None
        assert usual(loop._replace(name="back", sums=True), "tf32").width is None
