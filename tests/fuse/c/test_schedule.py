"""The loops of a step in C."""

import pytest

import unfading
from unfading.fuse.c.emit import emit_forward
from unfading.fuse.c.schedule import schedule
from unfading.fuse.plan import PROGRAMS, plan


@pytest.mark.long
def test_heads_are_loops_of_one_function():
    program = PROGRAMS[plan(unfading.LSTMCell(3, 64, heads=32)).key]
    # One head is 13 operations.
    assert all(len(values) < 20 for level in schedule(program).levels for _, values in level.loops)
    # One function for all heads, and one for the first, whose offsets are 0.
    assert emit_forward("forward", program).source.count("noinline") <= 4
