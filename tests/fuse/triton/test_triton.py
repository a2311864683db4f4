"""The Triton kernels under Triton's interpreter, which computes on the CPU what a GPU would."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

import unfading
from tests.helpers.triton_laws import *  # noqa: F403
from unfading.fuse.plan import interpreted, plan, triton_kernel
from unfading.fuse.triton.source import triton_missing

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
    # The contents of the padding are undefined, and NumPy warns about them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture
def device():
    with interpreted():
        yield "cpu"


def test_without_triton_auto_takes_the_reference(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('made to fail')")
    script = (
        "import torch, unfading\n"
        "from unfading.fuse.plan import interpreted\n"
        "with interpreted():\n"
        "    print(unfading.STAR(2, 3)(torch.ones(4, 1, 2))[0].shape)\n"
        "    try:\n"
        "        unfading.STAR(2, 3, backend='fused')(torch.ones(4, 1, 2))\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "torch.Size([4, 1, 3])" in done.stdout
    assert "STARCell cannot run fused: Triton does not load: made to fail" in done.stdout


class Recorded:
    """In place of a kernel or of its compiled variant: records the arguments of its calls."""

    def __init__(self, calls, compiled=None):
        self.calls, self.compiled = calls, compiled

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.calls.append((grid, arguments))
            return self.compiled

        return call


def test_a_compiled_form_takes_what_the_kernel_took_with_tensors_as_addresses(device, monkeypatch):
    layer, x = unfading.STAR(1, 6), torch.randn(3, 20, 1)
    with torch.no_grad():
        layer(x)
        launcher = triton_kernel(plan(layer.runners[0]).key).at(None).launcher
        parameters = len(inspect.signature(launcher.module.infer.fn).parameters)
        first, later = [], []
        monkeypatch.setattr(launcher, "compiled", {})
        monkeypatch.setattr(launcher.module, "infer", Recorded(first, Recorded(later)))
        for T in (3, 2, 3):
            layer(x[:T])
    assert [len(first), len(later)] == [1, 2]
    for grid, arguments in (*first, *later):
        assert grid == (2, 1, 1)
        assert len(arguments) == parameters
    for one, again in zip(first[0][1], later[1][1], strict=True):
        if isinstance(one, torch.Tensor):
            assert isinstance(again, int)
        else:
            assert one == again
