"""LRU and GatedLRU: their output, which the laws of all cells leave out, and their initial values."""

import math

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.twins import TWINS
from tests.helpers.twins_later import linear_unit_output
from tests.helpers.variants import OPTIONS, name
from unfading.cells import linear_unit
from unfading.cells.linear_unit import GatedLRUCell, LRUCell

both = pytest.mark.parametrize("cell", [LRUCell, GatedLRUCell], ids=name)


@both
@pytest.mark.parametrize("features", [3, 5], ids=["projected", "as wide as the layer"])
@pytest.mark.parametrize("options", [{}, {"bias": False}, *OPTIONS["LRU"]], ids=str)
def test_a_layer_agrees_with_the_numpy_twin_of_the_whole_block(cell, features, options):
    torch.manual_seed(0)
    layer = unfading.layer(cell)(features, 5, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x = torch.randn(laws.T, laws.B, features, dtype=torch.float64)
    output, state = layer(x)
    parameters = {key: value.numpy() for key, value in layer.cells[0].state_dict().items()}
    assert ("enter.weight" in parameters) == (features != 5)
    for b in range(laws.B):
        hs, entered = TWINS[name(cell)](parameters, options, x[:, b].numpy())
        assert_close(output[:, b].detach(), torch.from_numpy(linear_unit_output(parameters, hs, entered)), **laws.EXACT)
        assert_close(state.h[0, b].detach(), torch.from_numpy(hs[-1]), **laws.EXACT)


def draws(cell, times, dtype=torch.float32, **options):
    """nu and theta of so many initialisations: those of one large cell take longer to draw."""
    instance = cell(1, 64, **options).to(dtype)
    torch.manual_seed(0)
    for _ in range(times):
        instance.reset_parameters()
        yield instance.nu.detach().clone(), instance.theta.detach().clone()


@both
def test_eigenvalues_start_on_the_ring(cell):
    r_min, r_max, max_phase = 0.4, 0.9, 2.0
    found = draws(cell, 64, r_min=r_min, r_max=r_max, max_phase=max_phase)
    nu, theta = (torch.cat(each).double() for each in zip(*found, strict=True))
    modulus, phase = torch.exp(-torch.exp(nu)), torch.exp(theta)
    assert r_min - 1e-6 <= modulus.min()
    assert modulus.max() <= r_max + 1e-6
    assert phase.max() <= max_phase + 1e-6
    for uniform in ((modulus**2 - r_min**2) / (r_max**2 - r_min**2), phase / max_phase):
        # Within five standard deviations of the mean.
        assert abs(uniform.mean() - 1 / 2) < 5 * math.sqrt(1 / (12 * len(nu)))
        assert abs(uniform.square().mean() - 1 / 3) < 5 * math.sqrt(4 / (45 * len(nu)))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_starts_with_finite_parameters(cell, dtype):
    """In bfloat16 0.2 % of uniform numbers are 0, and 0.9999 is 1."""
    for nu, theta in draws(cell, 40, r_min=0.0, r_max=0.9999, dtype=dtype):
        assert torch.isfinite(nu).all()
        assert torch.isfinite(theta).all()


@both
def test_the_least_random_number_gives_finite_parameters(cell, monkeypatch):
    monkeypatch.setattr(linear_unit, "uniform_", lambda tensor, bound, generator: tensor.fill_(-bound))
    instance = cell(3, 5, r_min=0.0)
    assert torch.isfinite(instance.nu).all()
    assert torch.isfinite(instance.theta).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r_min": 0.9, "r_max": 0.9}, "r_min=0.9 and r_max=0.9"),
        ({"r_min": -0.1}, "r_min=-0.1"),
        ({"r_max": 1.0}, "r_max=1.0"),
        ({"r_max": math.nan}, "r_max must be finite; got nan"),
        ({"max_phase": 0.0}, "max_phase"),
    ],
    ids=str,
)
@both
def test_options_out_of_range_are_refused(cell, options, message):
    with pytest.raises(ValueError, match=message):
        cell(3, 5, **options)
