"""The structure of a recurrence, as the compiler finds it in the program of a step."""

import pytest
import torch

import unfading
from tests.helpers.variants import name
from tests.user.oscillator import RotatingCell
from unfading import catalogue
from unfading.fuse.ir.program import Op, TensorKind
from unfading.fuse.ir.recurrence import AffineMap, affine_map, recurrence
from unfading.fuse.plan import PROGRAMS, plan

LINEAR = {"EquilibriumRNNCell", "GatedLRUCell", "LRUCell", "MinGRUCell", "MinLSTMCell"}
DIAGONAL = {"BRCell", "IndRNNCell", "UnICORNNCell"}


def program(cell):
    return PROGRAMS[plan(cell).key]


@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
@pytest.mark.sample(12)
def test_every_cell_of_the_library_has_the_structure_of_its_equation(cell):
    expected = "linear" if cell.__name__ in LINEAR else "diagonal" if cell.__name__ in DIAGONAL else "dense"
    assert recurrence(program(cell(3, 8))) == expected


@pytest.mark.parametrize("cell", [unfading.MinGRUCell, unfading.UnICORNNCell, unfading.IndRNNCell], ids=name)
def test_cells_without_a_recurrent_matrix_have_independent_units(cell):
    assert recurrence(program(cell(3, 8))) in ("linear", "diagonal")


@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.SLSTMCell], ids=name)
def test_heads_form_groups(cell):
    assert recurrence(program(cell(3, 8, heads=2))) == "block"
    assert recurrence(program(cell(3, 8))) == "dense"


def test_pairs_in_one_state_are_lanes():
    step = program(RotatingCell(3, 4))
    assert recurrence(step) == "linear"
    lane_map = affine_map(step, TensorKind.NEXT)
    assert lane_map.lanes == ((0, 0), (0, 4))
    assert set(lane_map.slopes) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_step_that_moves_units_is_not_diagonal():
    class Rolled(RotatingCell):
        def step(self, inputs, state, weights):
            moved = torch.cat([state.s[:, 1:], state.s[:, :1]], dim=-1)
            return type(state)(0.5 * moved + inputs.a)

    assert recurrence(program(Rolled(3, 4))) == "dense"


def test_the_operation_that_makes_a_step_nonlinear_is_named():
    assert affine_map(program(unfading.IndRNNCell(3, 4)), TensorKind.NEXT) is Op.RELU
    assert affine_map(program(unfading.UnICORNNCell(3, 4)), TensorKind.NEXT) is Op.TANH
    assert isinstance(affine_map(program(unfading.MinGRUCell(3, 4)), TensorKind.NEXT), AffineMap)
