"""A cell whose projection needs the whole sequence is not measured at single steps."""

import pytest
import torch

import unfading
from tests.helpers.variants import name
from tests.user import along_time
from unfading.cells.incremental import IncrementalRNNCell
from unfading.diagnostics.equilibrium.inner_path import observed_path
from unfading.diagnostics.measure.noise import after_noise
from unfading.diagnostics.measure.observe import observe
from unfading.tasks.base import Batch

REFUSED = "cannot be measured at single steps: "


def model_of(cell, **options):
    torch.manual_seed(0)
    return unfading.Model(torch.nn.Identity(), unfading.Recurrent(cell, 3, **options), unfading.LastStep(along_time.H, 1))


# In evaluation, the statistics are those of training: local.
ALONG_TIME = [cell for cell in along_time.ALONG_TIME if cell is not along_time.Statistics]


@pytest.mark.parametrize("cell", ALONG_TIME, ids=name)
@pytest.mark.sample(4)
def test_what_needs_the_whole_sequence_is_refused(cell):
    model, x = model_of(cell), torch.randn(200, 2, 3)
    with pytest.raises(ValueError, match=f"{cell.__name__} {REFUSED}"):
        unfading.diagnose(model, x)
    with pytest.raises(ValueError, match=f"{cell.__name__} {REFUSED}"):
        unfading.flat_start(model, x)
    with pytest.raises(ValueError, match=f"{cell.__name__} {REFUSED}"):
        after_noise(model.rnn.cells[0], x, steps=5)


@pytest.mark.parametrize("cell", [along_time.Deep, along_time.Position], ids=name)
def test_what_sees_one_step_at_a_time_is_measured(cell):
    model, x = model_of(cell), torch.randn(20, 2, 3)
    assert unfading.diagnose(model, x).measures.steps == 20
    assert after_noise(model.rnn.cells[0], x, steps=5)
    assert unfading.flat_start(model, x, rounds=1).rounds <= 1


def test_in_reverse_the_index_of_a_step_counts():
    torch.manual_seed(0)
    stack = unfading.Recurrent(along_time.Position, 3, bidirectional=True)
    with pytest.raises(ValueError, match=f"Position {REFUSED}in reverse"):
        unfading.diagnose(stack, torch.randn(20, 2, 3))


def test_inner_steps_are_those_of_the_whole_sequence():
    class Shifted(IncrementalRNNCell):
        def project(self, x, start=0):
            return super().project(x + x.roll(1, 0), start)

    stack = unfading.Recurrent(lambda size: Shifted(size, 4), 3)
    (chain,) = observe(stack, Batch(torch.randn(20, 2, 3), torch.empty(0))).chains
    with pytest.raises(ValueError, match=f"Shifted {REFUSED}"):
        observed_path(chain, [3], [0])
