"""The C source of kernels: what keeps it fast to run and to compile."""

import unfading
from unfading.fuse.c import emit
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.program import Op
from unfading.fuse.plan import PROGRAMS, plan_or_raise


def test_a_reshaped_value_is_read_in_the_order_in_which_it_is_stored():
    """A division in an index keeps the compiler from whole vectors: a training step of NRU took 1.2 times as long."""
    both = differentiate(PROGRAMS[plan_or_raise(unfading.NRUCell(3, 5)).key])
    assert any(value.op is Op.RESHAPE for value in both.reverse.values())
    for function in (emit.emit_forward("train", both.forward), emit.emit_backward("back", both)):
        assert " % " not in function.source  # every index with a division has a remainder
