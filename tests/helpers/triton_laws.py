"""Tests of the Triton kernels, under Triton's interpreter (`fuse/triton/test_triton.py`) and on a GPU (`gpu/test_triton.py`).

Each module that imports these tests has a fixture `device`, on which the kernels run.
"""

import copy

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import AppliedCell, built
from tests.helpers.variants import hidden_size, name, sampled
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.fuse import plan as plans
from unfading.fuse.fused import refusal
from unfading.fuse.plan import plan, triton_kernel
from unfading.fuse.triton import kernel as module
from unfading.fuse.triton import launch_settings as settings

# Relative to the largest entry of each tensor: float32 against float64, over these few steps; NRU's fifth roots amplify it.
TOLERANCE = 2e-4
CELLS = [*catalogue.cells(), QuietCell]
SOME = [unfading.STARCell, unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell]


def everything(layer, x, lengths, backend, resets=None):
    """Output, final state and all gradients, through output and final state, in float64 on the CPU."""
    x = x.to(next(layer.parameters())).requires_grad_()
    with unfading.use_backend(backend):
        output, state = layer(x, lengths=None if lengths is None else lengths.to(x.device), resets=resets)
    parts = [output, *torch.utils._pytree.tree_leaves(state)]
    generator = torch.Generator().manual_seed(5)
    loss = sum((part * torch.randn(part.shape, generator=generator).to(part)).sum() for part in parts)
    named = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    results = {f"output {i}": part for i, part in enumerate(parts)}
    results |= {f"gradient of {n}": g for n, g in zip(named, gradients, strict=True)}
    return {what: None if value is None else value.detach().double().cpu() for what, value in results.items()}


def agree(got, want, tolerance=TOLERANCE):
    assert got.keys() == want.keys()
    assert any(value is not None and value.any() for value in want.values())
    for what, value in want.items():
        if value is None:
            assert got[what] is None or not got[what].any(), what
            continue
        assert value.isfinite().all(), f"{what} of the reference"
        error, scale = (got[what] - value).abs().max().item(), value.abs().max().item()
        assert error <= tolerance * max(scale, 1e-30), f"{what}: off by {error} at a scale of {scale}"


def agrees_with_float64(cell, T, B, H, device, tolerance=TOLERANCE, **keywords):
    layer = built(cell, H, torch.float32, **keywords).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(T, B, 3)
    for lengths in (None, torch.randint(1, T + 1, (B,))):
        agree(everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference"), tolerance)


@pytest.mark.parametrize("cell", sampled(CELLS, ["STAR", "GRU", "IncrementalRNN", "UnitaryRNN", "Quiet"]))
@pytest.mark.sample(3)
def test_every_cell_agrees_with_the_reference_in_float64(cell, device):
    layer = built(cell, hidden_size(cell), torch.float32, bidirectional=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x, lengths = torch.randn(3, 5, 3), torch.tensor([2, 3, 1, 3, 1])
    agree(everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference"))


@pytest.mark.parametrize("cell", sampled(CELLS, SOME), ids=name)
def test_resets_agree_with_the_reference_in_float64(cell, device):
    layer = built(cell, hidden_size(cell), torch.float32, bidirectional=True, learn_initial_state=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x, resets = torch.randn(4, 5, 3), torch.rand(4, 5) < 0.4
    for lengths in (None, torch.tensor([2, 4, 1, 3, 1])):
        agree(everything(layer, x, lengths, "fused", resets), everything(exact, x, lengths, "reference", resets))


@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.IncrementalRNNCell], ids=name)
@pytest.mark.sample(1)
def test_an_input_of_one_feature_is_projected_in_the_kernel_with_resets(cell, device):
    layer = unfading.Recurrent(lambda size: cell(size, 5), 1).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x, resets = torch.randn(3, 5, 1), torch.rand(3, 5) < 0.4
    agree(everything(layer, x, None, "fused", resets), everything(exact, x, None, "reference", resets))
    assert plan(layer._runners[0].resetting).with_project


@pytest.mark.parametrize("lengths", [torch.tensor([3, 1, 1, 3, 2, 1])[::2], torch.tensor(2).expand(3)], ids=["apart", "one"])
def test_lengths_lie_anywhere_in_memory(lengths, device):
    layer, x = unfading.STAR(3, 4).to(device), torch.randn(3, 3, 3, device=device)
    own = lengths.to(device) if device == "cpu" else lengths.repeat_interleave(2).to(device)[::2]
    outputs = []
    for backend in ("fused", "reference"):
        with unfading.use_backend(backend):
            outputs.append(layer(x, lengths=own)[0])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", sampled(SOME, ["LSTM", "IncrementalRNN"]))
@pytest.mark.sample(1)
def test_without_lengths_in_both_directions(cell, device):
    layer = built(cell, 5, torch.float32, bidirectional=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(3, 19, 3)
    agree(everything(layer, x, None, "fused"), everything(exact, x, None, "reference"))


ONE_FEATURE = [unfading.STARCell, unfading.LSTMCell, unfading.GRUCell, unfading.IncrementalRNNCell, unfading.NRUCell]


@pytest.mark.parametrize("cell", sampled(ONE_FEATURE, ["IncrementalRNN"]))
def test_an_input_of_one_feature_is_projected_in_the_kernel(cell, device):
    affine = cell is unfading.IncrementalRNNCell  # its P W x + P b has matrices that the step does not have
    layer = unfading.Recurrent(lambda size: cell(size, 20 if affine else hidden_size(cell)), 1, bidirectional=True).to(device)
    exact = copy.deepcopy(layer).double().cpu()
    x = torch.randn(3, 5, 1)
    for lengths in (None, torch.tensor([2, 3, 1, 3, 1])):
        agree(everything(layer, x, lengths, "fused"), everything(exact, x, lengths, "reference"))
    cell_plan = plan(layer.runners[0])
    assert cell_plan.with_project
    assert cell_plan.affine == affine
    assert "input 0 is x" in triton_kernel(cell_plan.key).at(None).source


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 17, 33), (3, 5, 16), (2, 3, 65)], ids=str)
@pytest.mark.parametrize("cell", sampled([unfading.STARCell, unfading.LSTMCell], ["STAR"]))
@pytest.mark.sample(2)
def test_sizes_that_divide_nothing(cell, sizes, device):
    T, B, H = sizes
    agrees_with_float64(cell, T, B, H, device)


@pytest.mark.parametrize(
    ("cell", "H", "heads"),
    [
        (unfading.GRUCell, 6, 2),
        pytest.param(unfading.LSTMCell, 6, 3, marks=pytest.mark.long),
        pytest.param(unfading.STARCell, 34, 2, marks=pytest.mark.long),
        pytest.param(unfading.ElmanCell, 5, 5, marks=pytest.mark.long),
    ],
)
def test_block_diagonal_recurrence(cell, H, heads, device):
    agrees_with_float64(cell, 2, 5, H, device, heads=heads)


def test_memory_that_was_not_written_is_not_read(device):
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty with NaN
    try:
        assert torch.empty(3, device=device).isnan().all()
        for cell in (unfading.LSTMCell, QuietCell):
            agrees_with_float64(cell, 2, 17, 5, device, bidirectional=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def cut(monkeypatch):
    """Kernels with other settings than the usual ones."""

    def change(**changes):
        usual = settings.usual
        only = lambda loop, *_, **__: [settings.Candidate(1.0, usual(loop, "tf32x3")._replace(**changes))]  # noqa: E731
        monkeypatch.setattr(module, "candidates", only)
        monkeypatch.setattr(plans, "_triton_kernels", {})

    return change


@pytest.mark.parametrize("cell", sampled(CELLS, ["STAR", "IncrementalRNN"]))
@pytest.mark.sample(1)
def test_narrow_tiles(cell, cut, device):
    """Vectors divided into tiles, the last of them short; some blocks of matrices stay on chip, and others do not."""
    cut(width=16, room=3 * 16 * 16 * 8)
    agrees_with_float64(cell, 2, 17, 32 if name(cell) in ("EURNN", "GORU") else 20, device)  # powers of two


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.sample(1)
def test_more_rows_in_a_block(rows, cut, device):
    cut(rows=rows)
    agrees_with_float64(unfading.IncrementalRNNCell, 3, 37, 5, device)


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", sampled(SOME, ["LSTM", "Quiet"]))
@pytest.mark.sample(2)
def test_short_numbers_under_autocast(cell, short, device):
    """Dots in half precision, summed in float32; all else in float32. The error is at most that of the reference loop."""
    if device == "cpu" and short is torch.bfloat16:
        pytest.skip("Triton's interpreter takes the bits of bfloat16 for whole numbers")
    layer = built(cell, 12, torch.float32).to(device)
    x = torch.randn(5, 17, 3)
    exact = everything(copy.deepcopy(layer).double().cpu(), x, None, "reference")
    with torch.autocast(device, short):
        assert refusal(layer.runners[0]) is None
        output, state = layer(x.float().to(device))
        rounded = everything(layer, x, None, "fused")
        plain = everything(layer, x, None, "reference")
    assert {output.dtype, *(part.dtype for part in state)} == {torch.float32}
    least = 4 * torch.finfo(short).eps
    for what, want in exact.items():
        scale = want.abs().max()
        lost, usual = ((results[what] - want).abs().max() / scale for results in (rounded, plain))
        assert lost <= 2 * usual + least, f"{what}: {lost:.1e} is lost, and {usual:.1e} by the reference loop"
    assert not torch.equal(everything(layer, x, None, "fused")["output 0"], rounded["output 0"])


def test_matrices_that_do_not_stay_on_chip(device, cut):
    cut(room=0)
    agrees_with_float64(unfading.LSTMCell, 2, 17, 5, device)


# -- many models --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched, by name, with the number of models."""
    launches = []
    launch = module.TritonKernel._launch

    def counted(self, name, tensors, weights, way, extent, *setting):
        launches.append((name, extent[0]))
        return launch(self, name, tensors, weights, way, extent, *setting)

    monkeypatch.setattr(module.TritonKernel, "_launch", counted)
    return launches


@pytest.mark.parametrize("cell", sampled(SOME, ["LSTM", "Quiet"]))
@pytest.mark.sample(1)
def test_models_of_one_launch_are_the_models_alone(cell, device, launches):
    layers = [built(cell, 5, torch.float32).to(device) for _ in range(3)]
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.data += 0.02 * i
    x, lengths = torch.randn(2, 5, 3, device=device), torch.randint(1, 3, (3, 5), device=device)
    parameters, buffers = stack_module_state(layers)

    def loss(parameters, buffers, lengths, x):
        output, _ = functional_call(layers[0], (parameters, buffers), (x,), {"lengths": lengths})
        return output.square().sum()

    for layer in layers:  # build the kernels before launches are counted
        refusal(layer.runners[0])
    launches.clear()
    together = vmap(grad(loss, argnums=(0, 3)), in_dims=(0, 0, 0, None))(parameters, buffers, lengths, x)
    assert launches == [("train", 3), ("back", 3)]
    launches.clear()
    total = sum(vmap(loss, in_dims=(0, 0, 0, None))(parameters, buffers, lengths, x))
    outside = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()), allow_unused=True), strict=True))
    assert launches == [("train", 3), ("back", 3)]
    for i, layer in enumerate(layers):
        own = dict(layer.named_parameters())
        alone, to_x = grad(loss, argnums=(0, 3))(own, dict(layer.named_buffers()), lengths[i], x)
        assert_close(together[1][i], to_x, rtol=1e-5, atol=1e-5)
        for key in own:
            assert_close(together[0][key][i], alone[key], rtol=1e-5, atol=1e-5)
            assert_close(outside[key][i], alone[key], rtol=1e-5, atol=1e-5)


def test_a_vmap_of_a_vmap(device):
    layer = built(unfading.STARCell, 5, torch.float32).to(device)
    x = torch.randn(2, 2, 3, 4, 3, device=device)
    together = vmap(vmap(lambda x: layer(x)[0]))(x)
    for i in range(2):
        for j in range(2):
            assert_close(together[i, j], layer(x[i, j])[0])


def test_second_derivatives_alone_and_of_many_models(device):
    layer = built(unfading.STARCell, 5, torch.float32).to(device)
    x = torch.randn(2, 3, 4, 3, device=device)

    def slope(x):
        return grad(lambda x: layer(x)[0].square().sum())(x).square().sum()

    refusal(layer.runners[0])  # a step is traced outside of transforms
    results = []
    for backend in ("fused", "reference"):
        with unfading.use_backend(backend):
            results.append((grad(slope)(x[0]), vmap(grad(slope))(x), grad(lambda x: vmap(slope)(x).sum())(x)))
    assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


# -- NaN and infinity ---------------------------------------------------------------------------------------------------------

FUNCTIONS = ["exp", "expm1", "log", "log1p", "tanh", "sigmoid", "relu", "abs", "sqrt", "sign", "sin", "cos", "erf", "neg"]
SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1e-7, -1e-7, 5.0, -5.0, 80.0, -80.0, 1e30, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("function", [*FUNCTIONS, "reciprocal"])
@pytest.mark.sample(4)
def test_functions_are_as_in_torch(function, device):
    special = [number for number in SPECIAL if function not in ("sin", "cos") or abs(number) < 1e3]
    x = torch.cat([torch.tensor(special), torch.linspace(-20, 20, 77), torch.linspace(-1, 1, 33)]).to(device)
    layer = unfading.Recurrent(lambda size: AppliedCell(function, size), len(x), backend="fused", device=device)
    with torch.no_grad():
        got = layer(x.reshape(1, 1, -1))[0].reshape(-1)
    assert_close(got, getattr(torch, function)(x), rtol=2e-5, atol=2e-7, equal_nan=True)


# -- torch around it ----------------------------------------------------------------------------------------------------------


def test_repeated_runs_give_the_same_bits(device):
    for cell in (unfading.LSTMCell, unfading.IncrementalRNNCell):
        layer, x = built(cell, 5, torch.float32).to(device), torch.randn(3, 35, 3)
        one, two = (everything(layer, x, None, "fused") for _ in range(2))
        for what, value in one.items():
            assert torch.equal(value, two[what]), what


@pytest.mark.parametrize("features", [1, 3])
def test_other_sequences_take_the_same_kernel(features, device):
    layer = unfading.STAR(features, 7).to(device)  # a size that no other test uses
    for T, B in ((1, 1), (16, 16), (3, 17), (1, 2), (2, 1)):
        layer(torch.randn(T, B, features, device=device))[0].sum().backward()
    kernel = triton_kernel(plan(layer.runners[0]).key)
    launcher = kernel.at(None).launcher
    forms = [form[0] for form in launcher.compiled]
    for loop in ("train", "back"):
        assert 1 <= forms.count(loop) <= 2, forms  # one of them from the trial of the kernel, whose inputs are no slices
        caches = getattr(getattr(launcher.module, loop), "device_caches", {})  # none under the interpreter
        assert all(len(cache[0]) <= 2 for cache in caches.values())


def test_torch_compile_takes_it_into_one_graph(device):
    torch._dynamo.reset()
    layer, x = built(unfading.STARCell, 5, torch.float32).to(device), torch.randn(3, 4, 3, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([3, 1, 2, 3], device=device)
    for own in (None, lengths):
        got, want = compiled(x, lengths=own)[0], layer(x, lengths=own)[0]
        assert_close(got, want, rtol=0, atol=0)
        parameters = list(layer.parameters())
        both = [torch.autograd.grad(output.square().sum(), parameters) for output in (got, want)]
        assert_close(both[0], both[1], rtol=0, atol=0)


def test_a_kernel_says_what_the_equation_says(device):
    layer = built(unfading.STARCell, 5, torch.float32).to(device)
    source = triton_kernel(plan(layer.runners[0]).key).at(None).source
    assert "state 0 is h" in source
    assert "weight 0 is W_h" in source
    assert "h_before" in source
    assert "tl.dot(" in source
    assert "make_block_ptr" not in source


def test_refusals_are_sentences(device, monkeypatch):
    monkeypatch.setattr(module, "gpu", lambda device: settings.Gpu(8, module.ON_CHIP))  # more units than these have room for
    wide = unfading.STARCell(3, 2200).to(device)  # a size that no other test uses
    assert "the recurrent matrices take 65536 KB" in refusal(wide)
    assert "kernels for a GPU compute in float32" in refusal(unfading.STARCell(3, 5).double().to(device))
    layer = unfading.STAR(3, 2200, device=device)
    assert layer(torch.ones(2, 1, 3, device=device))[0].shape == (2, 1, 2200)
    with unfading.use_backend("fused"), pytest.raises(RuntimeError, match="cannot run fused: the recurrent matrices"):
        layer(torch.ones(2, 1, 3, device=device))


def test_a_stream_takes_the_plain_step(device):
    layer = built(unfading.STARCell, 5, torch.float32).to(device).eval()
    x = torch.randn(3, 2, 3, device=device)
    stream = layer.stream(batch=2)
    with torch.no_grad():
        assert_close(torch.stack([stream.push(step) for step in x]), layer(x)[0], rtol=1e-5, atol=1e-6)


def test_a_cell_with_noise_stays_fused_between_training_and_evaluation_of_many_models(device):
    """Inside vmap no plan can be made, so the earlier plans for training and evaluation must still be used."""
    nets = [unfading.STAR(3, 5, zoneout=0.2, backend="fused").to(device) for _ in range(2)]
    parameters, buffers = stack_module_state(nets)
    x = torch.randn(3, 4, 3, device=device)
    for training in (True, False):
        nets[0].train(training)
        assert refusal(nets[0].runners[0]) is None

    def loss(parameters, buffers):
        return functional_call(nets[0], (parameters, buffers), (x,))[0].sum()

    for training in (True, False, True, False):
        nets[0].train(training)
        results = vmap(grad(loss), randomness="different")(parameters, buffers)  # raises if it does not run fused
        assert all(part.isfinite().all() for part in results.values())
