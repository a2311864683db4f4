"""Diagnosis and lattice of convolutional layers: every pixel of every channel is an entry of the state."""

import json

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.testing import assert_close

import unfading
from tests.helpers.command import run as command
from unfading.cells.conv_star import ConvSTARCell
from unfading.diagnostics.measure import random_probes
from unfading.diagnostics.measure.draws import StackSizes, lattice_statistics
from unfading.diagnostics.measure.jacobian import features, input_jacobians, state_jacobians
from unfading.diagnostics.measure.lattice import lattice
from unfading.diagnostics.measure.observe import observe
from unfading.diagnostics.watch import gradients
from unfading.tasks.moving_digits import MovingMNISTDirection

T, B, I, H, FRAME = 4, 2, 2, 3, (3, 4)


def frames(*, dtype=torch.float64, frame=FRAME, steps=T):
    return torch.randn(steps, B, I, *frame, dtype=dtype)


def chain_of(stack, x):
    return observe(stack, unfading.Batch(x, x)).chains[-1]


@pytest.mark.parametrize("kind", [unfading.ConvSTAR, unfading.ConvLSTM])
def test_step_jacobians_are_those_of_autograd_over_all_pixels(kind):
    stack, x = kind(I, H, stride=2, dtype=torch.float64), frames()
    chain, cell, weights = chain_of(stack, x), stack.cells[0], stack.cells[0].weights()
    before, shapes = chain.states[2], [part[1:2].shape for part in chain.states[2]]
    flat = torch.cat([part[1].detach().flatten() for part in before])
    sizes = [shape.numel() for shape in shapes]
    assert chain.size == sum(sizes) == len(before) * H * 2 * 2

    def step(flat, x):
        inputs = cell.project(x.reshape(1, 1, I, *FRAME))
        parts = (part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
        new = cell.step(type(inputs)(*(field[0] for field in inputs)), type(before)(*parts), weights)
        return torch.cat([part.flatten() for part in new])

    J, K = jacobian(step, (flat, x[2, 1].flatten()))
    assert_close(state_jacobians(chain, [2], [1])[0, 0], J)
    assert_close(input_jacobians(chain, [2], [1])[0, 0], K[: sizes[0]])


def test_one_pixel_is_the_dense_cell():
    """On frames of one pixel a convolution of one pixel is a matrix, and all measures are those of STAR."""
    dense, frame = unfading.STAR(I, H, num_layers=3), unfading.ConvSTAR(I, H, num_layers=3, kernel_size=1)
    with torch.no_grad():
        for (_, one), (_, other) in zip(sorted(dense.named_parameters()), sorted(frame.named_parameters()), strict=True):
            other.copy_(one.reshape(other.shape))
    x = frames(dtype=torch.float32, frame=(1, 1))
    got, wanted = unfading.diagnose(frame, x).rows(), unfading.diagnose(dense, x[..., 0, 0]).rows()
    for name in ("spectra", "lags", "end", "sizes", "memory", "lattice", "flat"):
        assert len(got[name]) == len(wanted[name]) > 0
        for row, other in zip(got[name], wanted[name], strict=True):
            assert row == {key: pytest.approx(v, rel=1e-3, abs=1e-6) if isinstance(v, float) else v for key, v in other.items()}
    assert got["verdict"] == wanted["verdict"]


def test_probes_contain_the_exact_norms():
    stack, x = unfading.ConvLSTM(I, H, num_layers=2, dtype=torch.float64), frames()
    exact, probed = (unfading.diagnose(stack, x, exact_up_to=limit).measures for limit in (1000, 10))
    true = {(each.layer, each.part, each.step): each for each in exact.spectra}
    assert len(probed.spectra) > 4
    for each in probed.spectra:
        own = true[each.layer, each.part, each.step]
        assert each.largest_low <= own.largest * (1 + 1e-9)
        assert own.largest <= each.largest_high * (1 + 1e-9)
        assert own.input_largest / 1.2 < each.input_largest <= own.input_largest * (1 + 1e-9)
        assert each.input_smallest is None
    norms = {(each.layer, each.part, each.lag): each for each in exact.lags}
    for each in probed.lags:
        own = norms[each.layer, each.part, each.lag]
        assert each.frobenius_low <= own.frobenius <= each.frobenius_high
        assert each.spectral_low <= own.spectral * (1 + 1e-9) <= each.spectral_high * (1 + 1e-6)


def test_the_effect_of_a_channel_is_that_of_its_pixels():
    stack, x = unfading.ConvSTAR(I, H, dtype=torch.float64), frames()
    with torch.no_grad():
        stack.cells[0].from_input.weight[:, 1] *= 0.1
    chain = chain_of(stack, x)
    exact = features(chain, [0, 2], [0, 1]).reshape(I, -1).square().sum(dim=1).sqrt()
    estimate = random_probes.channels(chain, [0, 2], [0, 1], probes=400, generator=torch.Generator().manual_seed(0))
    assert_close(estimate, exact, rtol=0.1, atol=0.0)


def test_a_channel_without_effect_is_found():
    stack = unfading.ConvSTAR(I, H)
    with torch.no_grad():
        stack.cells[0].from_input.weight[:, 1] = 0
    diagnosis = unfading.diagnose(stack, frames(dtype=torch.float32))
    assert "unused input" in {finding.kind for finding in diagnosis.findings}


def test_the_lattice_has_the_gradients_of_the_parameters():
    """With one step the copies of the parameters are the parameters themselves; diagnose measures the same points."""
    stack = unfading.ConvLSTM(I, H, num_layers=3, dtype=torch.float64)
    model = unfading.Model(torch.nn.Identity(), stack, unfading.MeanFrame(H, 4).double())
    batch = unfading.Batch(frames(steps=1), torch.tensor([1, 3]))

    def loss(prediction, batch):
        return torch.nn.functional.cross_entropy(prediction, batch.target)

    loss(model(batch.x)[0], batch).backward()
    norms = [torch.cat([p.grad.flatten() for p in cell.parameters()]).norm() for cell in stack.cells]
    assert_close(lattice(model, batch, loss)[:, 0], torch.stack(norms))
    longer = unfading.Batch(frames(), torch.tensor([1, 3]), torch.tensor([T, 2]))
    G = lattice(model, longer, loss)
    points = [point for point in unfading.diagnose(model, longer, loss=loss).measures.lattice if point.of == "loss"]
    assert_close(G, torch.tensor([point.value for point in points], dtype=torch.float64).reshape(3, T))
    assert (G[:, 0] > 0).all()


def test_a_deep_stack_whose_gradient_fades_is_advised_another_convolutional_cell():
    deep = unfading.ConvLSTM(I, H, num_layers=8)
    diagnosis = unfading.diagnose(deep, frames(dtype=torch.float32))
    assert not diagnosis.clean
    assert any("ConvSTAR" in change.change for change in diagnosis.advice)
    assert "layer 8" in json.dumps(diagnosis.rows())


def test_gradients_of_frames_are_watched_during_training(made):
    task = MovingMNISTDirection(T=3, size=5, digit_size=4)
    rnn = unfading.ConvSTAR(1, 2, num_layers=2)
    model = unfading.Model(task.encoder(), rnn, task.head(2))
    watched = gradients(model, task, task.batch(0, 2, split="train", seed=0, device="cpu"))
    assert (len(watched["layers"]), watched["times"]) == (2, [1, 2, 3])
    assert all(value > 0 for row in watched["states"] for value in row)


def test_draws_of_stacks_are_over_vectors():
    with pytest.raises(ValueError, match=r"draws are stacks over feature vectors; ConvSTARCell reads frames. Measure a model"):
        lattice_statistics(lambda size: ConvSTARCell(size, 4), 1, StackSizes(2, 2, 4))


def test_the_command_diagnoses_convolutional_cells():
    sizes = ("--layers", "2", "--hidden", "2", "--input-size", "1", "--frame-size", "4", "--steps", "4", "--batch", "2")
    answer = command("diagnose", "--cell", "ConvSTAR", *sizes, "--json")
    assert answer.returncode in (0, 1), answer.stderr
    rows = json.loads(answer.stdout)
    assert rows["model"].startswith("ConvSTAR(1, 2")
    assert (len(rows["layers"]), len(rows["features"]), len(rows["lattice"])) == (2, 1, 2 * 4)
