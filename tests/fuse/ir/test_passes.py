"""Rewrites of a whole program have its results."""

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers.random_steps import some
from tests.helpers.variants import hidden_size, name
from unfading import catalogue
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.passes import dots_of_pieces, dots_side_by_side, narrow, states_as_stored
from unfading.fuse.ir.program import Op, TensorKind
from unfading.fuse.plan import PROGRAMS, plan
from unfading.fuse.trace.recorder import trace

PASSES = {
    "narrow": lambda program: narrow(program, 3),
    "dots_side_by_side": lambda program: dots_side_by_side(program, lambda dots: True),
    "states_as_stored": states_as_stored,
    "dots_of_pieces": lambda program: dots_of_pieces(states_as_stored(program)),
}


def same_results(program, signature, rewrite):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, n) for n in (*signature.inputs, *signature.states)] + [*signature.weights]
    numbers = [0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    n, m = len(signature.inputs), len(signature.inputs) + len(signature.states)
    arguments = (numbers[:n], numbers[n:m], numbers[m:])
    assert_close(next_states(rewrite(program), *arguments), next_states(program, *arguments), equal_nan=True)


@pytest.mark.parametrize("rewrite", PASSES.values(), ids=PASSES)
@pytest.mark.sample(2)
def test_programs_of_cells_have_the_same_results(rewrite):
    for cell in catalogue.cells():
        if name(cell) in ("LSTM", "NRU", "StatisticalRNN", "UnitaryRNN", "GRU"):
            cell_plan = plan(cell(3, hidden_size(cell)))
            same_results(PROGRAMS[cell_plan.key], cell_plan.signature, rewrite)


@pytest.mark.long
@pytest.mark.parametrize("rewrite", PASSES.values(), ids=PASSES)
def test_so_have_random_steps(rewrite):
    for step in some(100, 12):
        signature = step.signature()
        same_results(trace(step.function(), signature), signature, rewrite)


def test_the_heads_of_an_nru_are_slices_of_one_dot():
    program = PROGRAMS[plan(unfading.NRUCell(3, 8, memory_size=16)).key]
    dots = [value for value in dots_side_by_side(program, lambda dots: True).values() if value.op is Op.DOT]
    assert sorted(dot.size for dot in dots) == [8, 4 + 4 + 4 * 8]  # h; alpha, beta and four vectors of directions


def test_states_are_read_in_the_pieces_that_are_stored():
    program = states_as_stored(PROGRAMS[plan(unfading.UnitaryRNNCell(3, 8)).key])
    stored = {(s.index, s.start, s.start + s.value.size) for s in program.stores if s.kind == TensorKind.NEXT}
    read = [v.leaf[1:] for v in program.values() if v.op is Op.LEAF and v.leaf.kind == TensorKind.STATE]
    assert read
    assert set(read) <= stored


def test_a_dot_of_a_state_in_pieces_is_a_sum_over_them():
    """Joined on a GPU, the five averages of an SRU fill the registers of a thread many times over."""
    program = PROGRAMS[plan(unfading.StatisticalRNNCell(3, 4)).key]
    before, after = ([v for v in p.values() if v.op is Op.DOT] for p in (program, dots_of_pieces(states_as_stored(program))))
    assert not any(arg.op is Op.CAT for dot in after for arg in dot.args)
    assert max(len(dot.args) for dot in after) == 5
    assert sorted(sum(b.length for b in dot.blocks) for dot in after) == sorted(sum(b.length for b in d.blocks) for d in before)
