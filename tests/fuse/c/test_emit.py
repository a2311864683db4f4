"""The C source of kernels: what keeps it fast to run and to compile."""

import shutil
import subprocess

import pytest

import unfading
from tests.helpers.compiled import AppliedCell
from unfading.fuse.c import compiler, emit
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.program import Op
from unfading.fuse.plan import PROGRAMS, plan_or_raise


def test_a_reshaped_value_is_read_in_the_order_in_which_it_is_stored():
    """A division in an index keeps the compiler from whole vectors: a training step of NRU took 1.2 times as long."""
    both = differentiate(PROGRAMS[plan_or_raise(unfading.NRUCell(3, 5)).key])
    assert any(value.op is Op.RESHAPE for value in both.reverse.values())
    for function in (emit.emit_forward("train", both.forward), emit.emit_backward("back", both)):
        assert " % " not in function.source  # every index with a division has a remainder


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is absent")
@pytest.mark.parametrize(
    "cell",
    [unfading.MinLSTMCell(3, 5), unfading.SLSTMCell(3, 5), *[AppliedCell(name, 5) for name in ("expm1", "log1p", "erf")]],
    ids=lambda cell: getattr(cell, "function", type(cell).__name__),
)
def test_a_step_in_float_calls_nothing(cell, tmp_path):
    """A call keeps the compiler from whole vectors: with log of the C library MinLSTM took ten times as long."""
    both = differentiate(PROGRAMS[plan_or_raise(cell.float()).key])
    functions = [emit.emit_forward("train", both.forward), emit.emit_backward("back", both)]
    text, library = tmp_path / "kernel.c", tmp_path / "kernel.so"
    text.write_text(emit.source("float", functions))
    compiler.build(compiler.find(), text, library)
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    called = {line.split()[-1].partition("@")[0] for line in listing.splitlines()}
    assert "malloc" in called or "aligned_alloc" in called or "posix_memalign" in called
    assert not called & {"expf", "expm1f", "logf", "log1pf", "tanhf", "erff"}
