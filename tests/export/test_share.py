"""Each parameter is stored once: a matrix that consists of another one, transposed, is multiplied in place."""

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.c_models import CModel, distance, needs_compiler, samples
from tests.helpers.contractive import contractive
from unfading.export.model_stages import exported

UNITS, RANK, STEPS = 64, 4, 60


def stable(**options):
    layer = contractive(unfading.StableIncrementalRNNCell, UNITS, rank=RANK, eta=0.2, **options).eval()
    with torch.no_grad():
        for cell in layer.cells:
            cell.eta.uniform_(0.05, 0.3)
    return layer


def reference(layer, x):
    with torch.no_grad(), unfading.use_backend("reference"):
        return layer(x)[0][:, 0].numpy()


@needs_compiler
@pytest.mark.parametrize("precision", ["float32", "int8", "integer"])
@pytest.mark.sample(1)
def test_the_factors_of_a_stable_network_are_stored_once(precision, tmp_path):
    layer, x = stable(steps=STEPS), samples(STEPS)
    integer = precision == "integer"
    model = unfading.export.quantised(layer, [x]) if integer else layer
    source = unfading.export.c(model, tmp_path / "c", **({} if integer else {"precision": precision}))
    entry = 4 if precision == "float32" else 1
    step_sizes = STEPS * entry
    vectors = UNITS * (2 if integer else 4)
    assert source.constants == 3 * UNITS * RANK * entry + 3 * UNITS * entry + vectors + step_sizes
    given = model.samples(x)[:, 0] if integer else x[:, 0].numpy()
    got = CModel(tmp_path / "c", source, integer=integer).run(given, UNITS)
    if integer:
        assert np.array_equal(got, model.run(model.samples(x))[:, 0])
        got = got * 2.0**-model.output_bits
    assert distance(got, reference(layer, x)) < (1e-5 if precision == "float32" else 0.1)


def test_a_matrix_of_its_own_is_left_alone():
    for layer in (unfading.IncrementalRNN(3, 24, rank=4), unfading.LSTM(3, 24)):
        blocks = [block for stage in exported(layer.eval()).stages for block in stage.program.blocks()]
        assert not any(block.transposed for block in blocks)


@needs_compiler
def test_a_table_with_few_large_entries_keeps_its_precision(tmp_path):
    """A clock: step sizes that are large in a few steps, and small but not zero in the others."""
    layer = stable(steps=STEPS)
    with torch.no_grad():
        for cell in layer.cells:
            cell.eta.uniform_(0.0004, 0.0008)
            cell.eta[:2] = 0.3
    source = unfading.export.c(layer, tmp_path / "c", precision="int8")
    assert f"static const float layer0_table1[{STEPS}]" in source.source
