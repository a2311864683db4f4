"""The Triton kernels under Triton's interpreter: what a GPU would compute, on the CPU."""

import os
import subprocess
import sys

import pytest

from tests.triton_laws import *  # noqa: F403
from unfading.fuse.place import interpreted
from unfading.fuse.triton_source import triton_missing

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
    # What lies in the padding may be anything, and NumPy tells of it.
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
        "from unfading.fuse.place import interpreted\n"
        "with interpreted():\n"
        "    print(unfading.STAR(2, 3)(torch.ones(4, 1, 2))[0].shape)\n"
        "    try:\n"
        "        unfading.STAR(2, 3, backend='fused')(torch.ones(4, 1, 2))\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "torch.Size([4, 1, 3])" in done.stdout
    assert "STARCell cannot run fused: Triton does not load: made to fail" in done.stdout
