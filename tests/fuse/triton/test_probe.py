"""Settings that a GPU does not accept, under Triton's interpreter: the next ones are used, or one clear sentence says why."""

import os
import threading

import pytest
import torch

import unfading
from tests.helpers.triton_laws import agree, everything
from unfading.backends.choose import choose, observe_backends, runs_compiled
from unfading.errors import FasterAsGraphs, NoKernel
from unfading.fuse import plan as plans
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton import kernel as module
from unfading.fuse.triton import probe, split_kernel
from unfading.fuse.triton.launch import Launcher
from unfading.fuse.triton.launch_settings import Candidate, Gpu, LaunchSettings
from unfading.fuse.triton.source import triton_missing
from unfading.loop_options import LoopOptions

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
]

DEVICE = torch.device("cpu")
SIXTEEN, THIRTY_TWO = LaunchSettings(16, 4, None, 1 << 17), LaunchSettings(32, 4, None, 1 << 17)
REFUSALS = ["OutOfResources", "RuntimeError"]


@pytest.fixture(autouse=True)
def two_settings(monkeypatch):
    """The kernels of this test are its own, and have two settings: 32 rows, and 16 if these do not fit."""
    monkeypatch.setattr(plans, "_triton_kernels", {})
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [Candidate(1.0, THIRTY_TWO), Candidate(2.0, SIXTEEN)])
    with interpreted():
        yield


def error(kind):
    from triton.runtime.errors import OutOfResources

    too_many = "Triton Error [CUDA]: too many blocks in cooperative launch"
    return OutOfResources(262144, 232448, "shared memory") if kind == "OutOfResources" else RuntimeError(too_many)


@pytest.fixture
def refuse(monkeypatch):
    """Let the GPU refuse loops with some settings."""
    launch = Launcher.launch

    def start(refused, kind):
        def tried(self, function, tensors, grid, further, constants, *rest, **options):
            if (function.name, constants[0]) in refused:
                raise error(kind)
            return launch(self, function, tensors, grid, further, constants, *rest, **options)

        monkeypatch.setattr(Launcher, "launch", tried)

    return start


def settings_of(layer, rows=(1, 5)):
    kernel = triton_kernel(plan(layer.runners[0]).key)
    return {name: kernel.setting(name, "tf32x3", rows, DEVICE) for name in kernel.shapes}


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.sample(1)
def test_the_next_settings_run_where_the_first_do_not_fit(kind, refuse):
    refuse({("train", 32), ("back", 32)}, kind)
    layer, x = unfading.LSTM(3, 5), torch.randn(4, 40, 3)
    agree(everything(layer, x, None, "fused"), everything(layer.double(), x, None, "reference"))
    layer.float()
    assert settings_of(layer) == {"infer": THIRTY_TWO, "train": SIXTEEN, "back": SIXTEEN}
    assert set(settings_of(layer, (1, 1000)).values()) == {THIRTY_TWO, SIXTEEN}  # for any number of rows


def test_without_cooperative_launches_no_divided_loop_is_tried_again(monkeypatch, refuse):
    monkeypatch.setattr(module, "SPLIT_FROM", 0)
    monkeypatch.setattr(module, "gpu", lambda device: Gpu(16, 1 << 20))
    divided = [Candidate(1.0, LaunchSettings(rows, 4, None, 0, 16)) for rows in (16, 32, 64)]
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [*divided, Candidate(9.0, SIXTEEN)])
    tried = []

    def launch(self, name, *arguments):
        tried.append(name)
        raise RuntimeError("Triton Error [CUDA]: operation not supported")

    monkeypatch.setattr(split_kernel.SplitLoops, "launch", launch)
    layer, x = unfading.LSTM(3, 35), torch.randn(4, 5, 3)
    agree(everything(layer, x, None, "fused"), everything(layer.double(), x, None, "reference"))
    assert len(tried) == 1
    assert set(settings_of(layer.float()).values()) == {SIXTEEN}


def test_an_error_of_another_kind_is_not_hidden(refuse, monkeypatch):
    monkeypatch.setattr(module, "does_not_fit", lambda error: False)
    refuse({("train", 32)}, "RuntimeError")
    with unfading.use_backend("fused"), pytest.raises(RuntimeError, match="too many blocks"):
        unfading.LSTM(3, 5)(torch.randn(4, 2, 3))


def test_loops_are_compiled_side_by_side():
    both = threading.Barrier(2)

    def test(name):
        both.wait(timeout=30)
        return f"no {name}" if name == "back" else None

    assert probe.side_by_side(test, ["train", "back"]) == "no back"


def test_a_backward_loop_is_tested_without_a_forward_loop(monkeypatch):
    cell_plan = plan(unfading.LSTM(3, 5).runners[0])
    kernel = triton_kernel(cell_plan.key)
    launched = []
    launch = Launcher.launch

    def noted(self, function, *rest, **options):
        launched.append(function.name)
        return launch(self, function, *rest, **options)

    monkeypatch.setattr(Launcher, "launch", noted)
    trial = probe.Trial(kernel, cell_plan, DEVICE, LoopOptions(dots="tf32x3"), T=1, B=5)
    trial.set_blank()
    trial.run("back")
    assert launched == ["back"]


def test_without_settings_that_fit_the_reason_is_one_sentence(refuse):
    layer = unfading.LSTM(3, 5)
    refuse({("train", 32), ("train", 16)}, "OutOfResources")
    cell_plan = plan(layer.runners[0])
    kernel = triton_kernel(cell_plan.key)
    reason = probe._trouble(kernel, cell_plan, DEVICE, LoopOptions(dots="tf32x3"), 5, set(), ["infer", "train"])
    assert reason == (
        "one multiprocessor of cpu does not take all units in tf32x3; the units are not divided below 65 of them, where that "
        "is never faster"
    )
    assert probe.triton_trouble(cell_plan, layer.runners[0], 5) == reason
    x = torch.randn(4, 5, 3)
    with (
        unfading.use_backend("fused"),
        pytest.raises(RuntimeError, match="LSTMCell cannot run fused: one multiprocessor"),
    ):
        layer(x)
    agree(everything(layer, x, None, "auto"), everything(layer.double(), x, None, "reference"))


def test_settings_are_tested_before_a_sequence_of_the_user_comes(refuse):
    """A loop that does not even compile, at T = 1, leaves the next settings to the call."""
    layer = unfading.GRU(3, 5)
    cell_plan = plan(layer.runners[0])
    kernel, passed = triton_kernel(cell_plan.key), set()
    refuse({("back", 32)}, "OutOfResources")
    assert probe._trouble(kernel, cell_plan, DEVICE, LoopOptions(dots="tf32x3"), 5, passed, ["train", "back"]) is None
    assert {("train", THIRTY_TWO), ("back", SIXTEEN)} <= passed
    assert {name for name, _ in passed} == {"train", "back"}  # no others are compiled


def test_a_batch_of_no_rows_launches_nothing(monkeypatch):
    """A layer refuses it; a loaded program may come with one."""
    cell_plan = plan(unfading.LSTM(3, 5).runners[0])
    kernel = triton_kernel(cell_plan.key)
    monkeypatch.setattr(Launcher, "launch", None)
    trial = probe.Trial(kernel, cell_plan, DEVICE, LoopOptions(), T=3, B=0)
    trial.run("infer")
    trial.run("back")
    assert trial.trajectory[0].shape == (1, 3, 0, 5)


def test_no_memory_for_the_exchange(monkeypatch):
    monkeypatch.setattr(module, "SPLIT_FROM", 0)
    monkeypatch.setattr(module, "gpu", lambda device: Gpu(16, 1 << 20))
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [Candidate(1.0, LaunchSettings(16, 4, None, 0, 16))])

    class Full(torch.Tensor):
        def new_empty(self, *size, **options):
            raise torch.cuda.OutOfMemoryError("no memory")

    layer = unfading.LSTM(3, 40)
    kernel = triton_kernel(plan(layer.runners[0]).key)
    full = torch.randn(5, 3).as_subclass(Full)
    constants = split_kernel.LaunchConstants(16, False, 0, "tf32x3", False)
    with pytest.raises(NoKernel, match=r"cpu has no memory left for the 0\.0\d+ MB through which multiprocessors"):
        kernel.split.launch("infer", [full], (1, 2, 5), constants, (16, 3, 5, 0), 4)


def test_the_backward_pass_has_the_precision_of_the_forward_pass(monkeypatch):
    layer, used = unfading.LSTM(3, 5), []
    setting = module.TritonKernel.setting

    def asked(self, name, precision, rows, device):
        used.append((name, precision))
        return setting(self, name, precision, rows, device)

    from unfading.fuse import fused

    monkeypatch.setattr(fused, "float32_dots", lambda device: "tf32")  # as on a GPU where it is switched on
    with unfading.use_backend("fused"):
        output, _ = layer(torch.randn(4, 2, 3))
    monkeypatch.setattr(module.TritonKernel, "setting", asked)
    monkeypatch.setattr(fused, "float32_dots", lambda device: "tf32x3")
    output.sum().backward()
    assert used == [("back", "tf32")]


def test_a_call_for_which_there_is_no_room_runs_by_the_next_backend(monkeypatch):
    def full(self, *arguments, **options):
        raise NoKernel("cpu has no memory left")

    monkeypatch.setattr(module.TritonKernel, "forward", full)
    layer, x = unfading.LSTM(3, 5), torch.randn(4, 5, 3)
    with unfading.use_backend("fused"), pytest.raises(RuntimeError, match="LSTMCell cannot run fused: cpu has no memory left"):
        layer(x)
    with unfading.use_backend("reference"):
        wanted, _ = layer(x)
    assert torch.equal(layer(x)[0], wanted)


def test_graphs_run_where_they_are_estimated_or_measured_to_be_faster(monkeypatch):
    kernel = triton_kernel(plan(unfading.LSTM(3, 5).runners[0]).key)
    ask = {"precision": "tf32x3", "rows": (1, 5), "device": DEVICE, "keep": True}
    assert kernel.slower_than_graphs(**ask) is None
    kernel.graphs_win["tf32x3", 8, DEVICE, True] = True
    kernel.add_settings({})
    assert "measured to be faster" in kernel.slower_than_graphs(**ask)
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [Candidate(1000.0, SIXTEEN)])
    assert "estimated to be faster" in kernel.slower_than_graphs(**ask | {"rows": (1, 50)})


def test_settings_that_a_gpu_refused_are_not_in_the_estimate(monkeypatch):
    kernel = triton_kernel(plan(unfading.LSTM(3, 6).runners[0]).key)  # a size that no other test uses
    ask = {"precision": "tf32x3", "rows": (1, 5), "device": DEVICE, "keep": False}
    slow = SIXTEEN._replace(warps=8)
    monkeypatch.setattr(module, "candidates", lambda *_, **__: [Candidate(1.0, SIXTEEN), Candidate(1000.0, slow)])
    assert kernel.slower_than_graphs(**ask) is None
    kernel.exclude("infer", "tf32x3", DEVICE, SIXTEEN, RuntimeError("out of shared memory"))
    assert "estimated to be faster" in kernel.slower_than_graphs(**ask)


def test_auto_takes_the_graphs_that_are_faster_and_fused_takes_the_kernel(monkeypatch):
    from unfading.backends.cuda_graph import backend
    from unfading.fuse import fused

    cell, reason = unfading.LSTMCell(3, 5), FasterAsGraphs("graphs are faster")
    runnable = fused.runnable
    monkeypatch.setattr(fused, "runnable", lambda *given, or_graphs=False: reason if or_graphs else runnable(*given))
    assert runs_compiled(choose(cell, "fused", 2))
    assert runs_compiled(choose(cell, "auto", 2))  # since nothing can be recorded on this device
    monkeypatch.setattr(backend, "graph_refusal", lambda cell: None)
    chosen = choose(cell, "auto", 2)
    assert (chosen.func, chosen.keywords) == (backend.graph_if_possible, {"otherwise": fused.fused})
    with observe_backends() as observed, unfading.use_backend("auto"):
        monkeypatch.setattr(backend, "_graphed", lambda *_, **__: (_ for _ in ()).throw(backend.NotGraphable("no")))
        output, _ = unfading.LSTM(3, 5)(torch.randn(4, 2, 3))
    assert observed == {"LSTMCell": {"backend": "graph", "reason": "graphs are faster"}}
    assert output.shape == (4, 2, 5)
