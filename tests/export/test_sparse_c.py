"""Sparse matrices in exported C: stored sparse where that is smaller, and the same results."""

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.c_models import HIDDEN, CModel, distance, needs_compiler, samples
from tests.helpers.contractive import contractive
from unfading.export.arrays_of_c import Arrays
from unfading.export.matrix_storage import store

pytestmark = needs_compiler

CELLS = {
    "Elman": {},
    "FastGRNN": {"rank": 4, "input_rank": 2},
    "GRU": {},
    "IncrementalRNN": {},
    "LSTM": {"num_layers": 2},
}


STEPS = 200


def dense_layer(name, options):
    """A layer in which rounding errors do not grow over the steps of a test."""
    return contractive(getattr(unfading, f"{name}Cell"), HIDDEN, **options).eval()


def sparse_layer(name, options, zeros):
    layer = dense_layer(name, options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2 and min(parameter.shape) > 1:
                parameter.mul_(torch.rand(parameter.shape, generator=generator) >= zeros)
    return layer


@pytest.mark.parametrize(("name", "options"), CELLS.items(), ids=CELLS)
@pytest.mark.sample(2)
def test_sparse_models_agree_with_the_reference_and_with_their_twin(name, options, tmp_path):
    layer, x = sparse_layer(name, options, 0.75), samples(STEPS)
    with torch.no_grad(), unfading.use_backend("reference"):
        expected = layer(x)[0][:, 0].numpy()
    dense = unfading.export.c(dense_layer(name, options), tmp_path / "dense")
    for precision, tolerance in (("float32", 1e-5), ("int8", 0.05)):
        source = unfading.export.c(layer, tmp_path / precision, precision=precision)
        assert "sparse_product(" in source.source
        assert source.constants < dense.constants
        assert source.multiply_adds < dense.multiply_adds
        got = CModel(tmp_path / precision, source).run(x[:, 0].numpy(), layer.output_size)
        assert distance(got, expected) < tolerance
    twin = unfading.export.quantised(layer, [samples(20, rows=4)])
    source = unfading.export.c(twin, tmp_path / "integer")
    assert "sparse_product(" in source.source
    given = twin.samples(x)
    got = CModel(tmp_path / "integer", source, integer=True).run(given[:, 0], layer.output_size)
    assert np.array_equal(got, twin.run(given)[:, 0])
    assert np.abs(got).max() > 0


def test_the_smaller_form_is_stored():
    random = np.random.default_rng(0)
    for zeros in (0.0, 0.2, 0.3, 0.4, 0.8, 1.0):
        for kind, entry in (("int8_t", 1), ("float", 4)):
            matrix = random.integers(1, 100, (30, 20)) * (random.random((30, 20)) >= zeros)
            arrays = Arrays()
            stored = store(arrays, "m", matrix, kind, by_column=False)
            least = 0.5 if kind == "int8_t" else 0.125
            worth = (1 + least) * (1 - zeros) < 0.98
            assert (stored.codes is not None) == worth
            assert arrays.bytes <= entry * matrix.size


def test_sparse_factors_are_not_multiplied_out(tmp_path):
    """W_1 W_2 with sparse factors takes fewer bytes than their dense product."""
    layer = unfading.FastGRNN(8, 12, rank=3, input_rank=7).eval()
    with torch.no_grad():
        for factor in layer.cells[0].W.factors:
            factor.mul_(torch.rand(factor.shape, generator=torch.Generator().manual_seed(0)) >= 0.8)
    names = [stage.weights for stage in unfading.export.quantised(layer, [torch.randn(9, 2, 8)]).model.stages]
    assert {(12, 7), (7, 8)} <= {weight.shape for weights in names for weight in weights}
