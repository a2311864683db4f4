"""`backend="auto"` says, once for each class of cells, that a cell runs on the slow loop, and why."""

import warnings

import pytest
import torch

import unfading
from unfading.errors import SlowLoopWarning


def bessel_layer():
    """A layer of a cell that the compiler refuses, of a class of its own."""

    class BesselCell(unfading.ElmanCell):
        def step(self, inputs, state, weights):
            return type(state)(torch.special.bessel_j0(inputs.a + state.h))

    return unfading.Recurrent(lambda size: BesselCell(size, 4), 3)


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [each for each in caught if each.category is SlowLoopWarning]


def test_a_cell_that_is_not_compiled_is_named_once_with_the_reason():
    layer, x = bessel_layer(), torch.randn(5, 2, 3)
    (first,) = warnings_of(lambda: layer(x))
    assert "BesselCell runs on the plain loop in PyTorch, which is slow: " in str(first.message)
    assert "bessel_j0" in str(first.message)
    assert not warnings_of(lambda: layer(x))


def test_each_step_function_of_a_scan_is_named():
    def first(h, x):
        h = torch.special.bessel_j0(h + x)
        return h, h

    def second(h, x):
        h = torch.special.bessel_j1(h + x)
        return h, h

    x = torch.randn(5, 2, 3)
    for step, operation in ((first, "bessel_j0"), (second, "bessel_j1")):
        (said,) = warnings_of(lambda step=step: unfading.scan(step, torch.zeros(2, 3), x))
        assert operation in str(said.message)
        assert not warnings_of(lambda step=step: unfading.scan(step, torch.zeros(2, 3), x))


def test_nothing_is_said_of_a_cell_that_is_compiled_or_of_a_loop_that_was_asked_for():
    x = torch.randn(5, 2, 3)
    assert not warnings_of(lambda: unfading.LSTM(3, 4)(x))
    with unfading.use_backend("reference"):
        assert not warnings_of(lambda: bessel_layer()(x))


def test_nothing_is_said_where_only_the_present_call_is_not_compiled():
    layer, x = unfading.STAR(3, 4), torch.randn(5, 2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not warnings_of(lambda: layer(x))


@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_the_reason_of_a_named_backend_is_an_error(backend):
    layer, x = bessel_layer(), torch.randn(5, 2, 3)
    with unfading.use_backend(backend):
        if backend == "auto":
            assert len(warnings_of(lambda: layer(x))) == 1
        else:
            with pytest.raises(RuntimeError, match="bessel_j0"):
                layer(x)
