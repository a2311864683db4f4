"""Every law for every cell of the library, over vectors and over frames, with its defaults and with its options, in float64."""

import inspect

import pytest
import torch

import unfading
from tests.helpers import laws
from tests.helpers.twins import TWINS
from tests.helpers.variants import OPTIONS, defaults_of, every_cell, every_convolutional_cell, name, sampled
from unfading import catalogue
from unfading.layers import library

VARIANTS = [*every_cell(), *every_convolutional_cell()]
each = pytest.mark.parametrize(("cell", "options"), VARIANTS)
# Of laws that seldom depend on options, `make test` runs the defaults of every cell.
each_default = pytest.mark.parametrize(("cell", "options"), defaults_of(VARIANTS))
ALL = [*catalogue.cells(), *catalogue.convolutional_cells()]


@each_default
def test_two_halves_give_the_result_of_the_whole(cell, options):
    laws.two_halves_make_the_whole(laws.make(cell, options))


@each_default
def test_outputs_do_not_depend_on_later_inputs(cell, options):
    laws.the_future_does_not_reach_back(laws.make(cell, options))


@each_default
def test_batch_rows_do_not_mix(cell, options):
    laws.batch_rows_do_not_mix(laws.make(cell, options))


@each
def test_step_has_the_right_gradient(cell, options):
    laws.step_has_the_right_gradient(laws.make(cell, options))


@pytest.mark.long
@each
def test_step_has_the_right_gradient_in_every_entry(cell, options):
    laws.step_has_the_right_gradient(laws.make(cell, options), entry_by_entry=True)


@each
def test_every_parameter_gets_a_gradient(cell, options):
    laws.every_parameter_gets_a_gradient(laws.make(cell, options))


@each_default
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_padding_changes_no_result(cell, options, reverse):
    laws.padding_changes_nothing(laws.make(cell, options), reverse)


@pytest.mark.parametrize(("cell", "options"), sampled(VARIANTS))
@pytest.mark.sample(5)
def test_padding_changes_no_result_of_the_compiled_loop(cell, options):
    laws.padding_changes_nothing(laws.make(cell, options), backend="fused")


@each_default
def test_a_call_moves_no_numbers_to_or_from_the_host(cell, options):
    if cell is unfading.EquilibriumRNNCell:
        pytest.skip("EquilibriumRNN iterates until the host sees that it has converged")
    laws.a_call_can_be_captured(laws.make(cell, options))


@each_default
def test_same_seed_same_weights(cell, options):
    laws.same_seed_same_weights(lambda seed: laws.make(cell, options, seed))


@each_default
def test_copies_compute_the_same(cell, options):
    laws.survives_copying(laws.make(cell, options))


@each
def test_cell_agrees_with_its_numpy_twin(cell, options):
    laws.equation_is_the_papers(laws.make(cell, options), name(cell), options)


@each_default
def test_nan_stays_in_its_row(cell, options):
    laws.nan_stays_in_its_row(laws.make(cell, options))


@each_default
def test_generator_decides_the_initial_values(cell, options):
    instance = laws.make(cell, options)
    starts = []
    for seed in (1, 1, 2):
        instance.reset_parameters(torch.Generator().manual_seed(seed))
        starts.append({key: value.clone() for key, value in instance.state_dict().items()})
        torch.randn(3)  # the global generator must not matter
    assert all(torch.equal(starts[0][key], starts[1][key]) for key in starts[0])
    assert any(not torch.equal(starts[0][key], starts[2][key]) for key in starts[0])


# Another valid value for an option, where no rule by type gives one.
OTHER = {
    "std": 0.5,
    "max_lag": 20,
    "rank": 3,
    "input_rank": 1,
    "projection_rank": 1,
    "erase_heads": 1,
    "activation": "sigmoid",
    "capacity": 2,
    "reflectors": 3,
    "network": [3],
    "scales": [0.5, 0.9],
    "tolerance": 1e15,
    "iterations": 1,
    "gate_activation": "tanh",
    "memory_size": 16,
    "heads": 5,
    "kernel_size": 5,
    "padding": 0,
    "r_max": 0.95,
}


def test_every_variant_names_a_cell_that_exists():
    assert set(OPTIONS) <= {name(cell) for cell in ALL}


def options_of(cell):
    parameters = inspect.signature(cell).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("cell", ALL, ids=name)
def test_every_option_changes_parameters_or_output(cell):
    for option in options_of(cell):
        if option.name == "heads" and name(cell) == "NRU":  # which are not groups of units
            other = 1
        elif option.name in OTHER:
            other = OTHER[option.name]
        elif isinstance(option.default, bool):
            other = not option.default
        elif isinstance(option.default, int):
            other = option.default + 1
        elif isinstance(option.default, float):
            other = option.default * 0.5 + (0.25 if option.default < 2 else 1.0)
        else:
            pytest.fail(f"no other value known for {name(cell)}'s option {option.name}")
        before, after = laws.make(cell, {}), laws.make(cell, {option.name: other})
        x = laws.random_input(before)
        sizes = [[p.shape for p in instance.parameters()] for instance in (before, after)]
        if sizes[0] == sizes[1]:
            a, b = (laws.run(instance, x)[0][0] for instance in (before, after))
            penalties = before.penalty(), after.penalty()
            differ = a.shape != b.shape or not torch.equal(a, b) or penalties[0] != penalties[1]
            assert differ, f"{name(cell)}({option.name}={other!r}) does what {option.default!r} does"


@pytest.mark.parametrize("cell", ALL, ids=name)
def test_every_cell_has_its_public_names_its_twin_and_its_paper(cell):
    line = f"{name(cell)} = layer({cell.__name__})"
    assert getattr(library, name(cell), None) is unfading.layer(cell), f"layers/library.py lacks the line: {line}"
    for public, value in ((cell.__name__, cell), (name(cell), unfading.layer(cell))):
        assert getattr(unfading, public, None) is value, f"the table of public names in __init__.py lacks {public}"
        assert public in unfading.__all__
    assert name(cell) in TWINS, f"tests/helpers/twins.py lacks the equation of {name(cell)}"
    assert cell.paper


@pytest.mark.parametrize("cell", ALL, ids=name)
def test_every_cell_has_the_common_signature_and_documents_its_options(cell):
    parameters = list(inspect.signature(cell).parameters)
    sizes = ["in_channels", "hidden_channels"] if cell in catalogue.convolutional_cells() else ["input_size", "hidden_size"]
    assert parameters[:3] == [*sizes, "bias"]
    for option in options_of(cell)[1:]:
        assert f"    {option.name}: " in cell.__doc__, f"{name(cell)} does not document {option.name}"
        assert option.default is not inspect.Parameter.empty
