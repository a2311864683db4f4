"""The trained HAR-2 model on an emulated Cortex-M4: the same classes as in Python, in little code."""

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.cortex_m import needs_cortex_m
from tests.helpers.paths import ROOT
from unfading.export.cortex_m import compiled, run

WEIGHTS = ROOT / "weights" / "incremental-table3-har-2-irnn-k-1.safetensors"


def windows(count):
    """Random movements of nine normalised signals, [128, count, 9]."""
    generator = torch.Generator().manual_seed(0)
    level = torch.randn(1, count, 9, generator=generator)
    return level + 0.2 * torch.randn(128, count, 9, generator=generator).cumsum(0)


@needs_cortex_m
@pytest.mark.parametrize("precision", ["float32", "int8", "integer"])
@pytest.mark.sample(1)
def test_the_har_model_gives_the_same_classes_on_a_cortex_m4(precision, tmp_path):
    model, x = unfading.load(WEIGHTS), windows(16)
    with torch.no_grad():
        want = model(x)[0].numpy()
    assert 0 < want.argmax(axis=1).sum() < len(want)  # both classes
    twin = unfading.export.quantised(model, [x]) if precision == "integer" else None
    options = {"precision": precision} if twin is None else {}
    source = unfading.export.c(twin or model, tmp_path / "c", **options)
    given = x.numpy() if twin is None else twin.samples(x)
    got, instructions = run(tmp_path / "c", given.transpose(1, 0, 2), integer=precision == "integer")
    if twin is not None:
        assert np.array_equal(got, twin.run(given)[-1])
    if precision == "float32":
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    clear = np.abs(want[:, 0] - want[:, 1]) > 0.1 * np.abs(want).max()  # of the others rounding may decide
    assert clear.sum() > 8
    assert np.array_equal(got.argmax(axis=1)[clear], want.argmax(axis=1)[clear])
    assert 1000 < instructions < 60000  # 4,080 multiply-adds
    sizes = compiled(tmp_path / "c")
    assert sizes.code < (3 << 10 if precision == "integer" else 4 << 10)
    assert 0 < sum(sizes.functions.values()) <= sizes.code
    assert source.scratch <= sizes.stack < source.scratch + 400
