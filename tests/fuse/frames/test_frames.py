"""Compiled steps with convolutions equal the reference loop: outputs, final state, all gradients, every option of a layer."""

import copy
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import unfading
from tests.helpers.variants import name
from unfading import catalogue
from unfading.backends.choose import observe_backends
from unfading.cells.convolution import Convolution, ConvolutionalCell, convolve
from unfading.fuse.frames import frame_loop
from unfading.fuse.frames.convolver import Frames, TorchConvolver
from unfading.fuse.frames.frame_program import ConvolutionSource, FrameConvolution
from unfading.fuse.fused import refusal
from unfading.fuse.ir.program import TensorKind
from unfading.fuse.plan import FramePlan, interpreted, plan
from unfading.fuse.triton.source import triton_missing

EXACT = {"rtol": 1e-11, "atol": 1e-11}
T, B, C, H, FRAME = 5, 3, 2, 6, (5, 7)
LENGTHS = torch.tensor([5, 2, 4])

each = pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)


def layer_of(cell, dtype=torch.float64, **options):
    torch.manual_seed(0)
    if issubclass(cell, OwnCell):
        return unfading.Recurrent(lambda size: cell(size, H), C, **options).to(dtype)
    return unfading.layer(cell)(C, H, dtype=dtype, **options)


def frames(steps=T, batch=B, channels=C, frame=FRAME, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, batch, channels, *frame, dtype=dtype, generator=generator)


def everything(layer, x, backend, *, of_x=True, **keywords):
    """Outputs, final state, and the gradients of a random function of them."""
    x = x.clone().requires_grad_(of_x)
    layer.zero_grad()
    torch.manual_seed(3)  # of noise
    with unfading.use_backend(backend):
        output, state = layer(x, **keywords)
    parts = [output, *torch.utils._pytree.tree_leaves(state)]
    generator = torch.Generator().manual_seed(5)
    sum((p * torch.randn(p.shape, generator=generator).to(p)).sum() for p in parts).backward()
    return [*parts, x.grad, *(p.grad for p in layer.parameters())]


def agrees(layer, x, tolerance=EXACT, **keywords):
    want, got = everything(layer, x, "reference", **keywords), everything(layer, x, "fused", **keywords)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, **tolerance)


VARIANTS = {
    "default": {},
    "lengths": {"lengths": LENGTHS},
    "without bias": {"bias": False},
    "one pixel": {"kernel_size": 1},
    "kernel 5": {"kernel_size": 5},
    "kernel 3 x 5": {"kernel_size": (3, 5)},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": 0},
    "dilation": {"dilation": (2, 1)},
    "groups": {"groups": 2},
    "groups and stride": {"groups": 2, "stride": 2, "kernel_size": 5},
    "stack": {"num_layers": 2, "bidirectional": True, "learn_initial_state": True, "lengths": LENGTHS},
    "checkpoints": {"checkpoint_every": 2, "bidirectional": True, "lengths": LENGTHS},
    "noise": {"recurrent_dropout": 0.3, "zoneout": 0.2, "lengths": LENGTHS},
}


def kinds():
    """Every variant of every cell. `make test` runs those of ConvLSTM, and of the other cells the two most different ones."""
    for cell in catalogue.convolutional_cells():
        for variant in VARIANTS:
            short = name(cell) == "ConvLSTM" or variant in ("lengths", "groups and stride")
            yield pytest.param(cell, variant, id=f"{name(cell)}-{variant}", marks=[] if short else pytest.mark.long)


@pytest.mark.parametrize(("cell", "variant"), [*kinds()])
@pytest.mark.sample(8)
def test_every_cell_agrees_with_the_reference(cell, variant):
    options = dict(VARIANTS[variant])
    lengths = options.pop("lengths", None)
    agrees(layer_of(cell, **options), frames(), lengths=lengths)


@each
@pytest.mark.sample(1)
def test_noise_is_off_in_evaluation(cell):
    agrees(layer_of(cell, recurrent_dropout=0.3, zoneout=0.2).eval(), frames())


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, (1, 1)), (3, 2, 1, 9, (2, 3)), (2, 3, 5, 17, (9, 4)), (2, 1, 3, 33, (33, 3))], ids=str
)
@pytest.mark.parametrize("cell", [unfading.ConvLSTMCell, unfading.ConvGRUCell], ids=name)
@pytest.mark.sample(3)
def test_sizes_that_divide_nothing(cell, sizes):
    steps, batch, channels, hidden, frame = sizes
    torch.manual_seed(0)
    layer = unfading.layer(cell)(channels, hidden, dtype=torch.float64)
    agrees(layer, frames(steps, batch, channels, frame))


@each
@pytest.mark.sample(2)
def test_float32(cell):
    agrees(layer_of(cell, torch.float32), frames(dtype=torch.float32), {"rtol": 1e-4, "atol": 1e-5})


@each
def test_an_input_without_a_gradient(cell):
    agrees(layer_of(cell), frames(), of_x=False)


@each
@pytest.mark.sample(2)
def test_without_gradients(cell):
    layer, x = layer_of(cell, bidirectional=True, backend="fused"), frames()
    with torch.no_grad():
        output, state = layer(x, lengths=LENGTHS)
    with unfading.use_backend("reference"):
        expected, expected_state = layer(x, lengths=LENGTHS)
    assert_close(output, expected, **EXACT)
    assert_close(tuple(state), tuple(expected_state), **EXACT)
    assert not output.requires_grad


def test_memory_that_was_not_written_is_not_read():
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty with NaN
    try:
        for cell in catalogue.convolutional_cells():
            agrees(layer_of(cell), frames(), lengths=LENGTHS)
            agrees(layer_of(cell, stride=2), frames())
    finally:
        torch.use_deterministic_algorithms(False)


@each
@pytest.mark.sample(1)
def test_the_result_does_not_depend_on_the_number_of_threads(cell):
    torch.manual_seed(0)
    layer, x = unfading.layer(cell)(3, 40), frames(2, 3, 3, (17, 16), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything(layer, x, "fused")
        torch.set_num_threads(3)
        for a, b in zip(everything(layer, x, "fused"), one, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


@each
def test_second_derivatives_are_those_of_the_reference(cell):
    layer, x = layer_of(cell), frames(2, 2, frame=(3, 4)).requires_grad_()
    results = []
    for backend in ("reference", "fused"):
        with unfading.use_backend(backend):
            output, _ = layer(x, lengths=torch.tensor([2, 1]))
        (first,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()]))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, **EXACT)


@each
@pytest.mark.sample(2)
def test_auto_compiles_every_cell_and_the_projection_with_it(cell):
    torch.manual_seed(0)
    with observe_backends() as observed:
        unfading.layer(cell)(8, 64)(frames(2, 8, 8, (32, 32), torch.float32))
    assert observed == {cell.__name__: {"backend": "fused", "reason": None}}
    for options, with_project in (({}, True), ({"stride": 2}, False), ({"padding": 0}, False)):
        cell_plan = plan(cell(C, H, **options))
        assert isinstance(cell_plan, FramePlan)
        assert cell_plan.with_project == with_project


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (2, 1, 8, 8, 8)), ({"kernel_size": 5}, (2, 8, 8, 32, 32)), ({"groups": 4}, (2, 8, 8, 32, 32))],
    ids=["few pixels", "kernel 5", "groups"],
)
@pytest.mark.sample(1)
def test_auto_takes_the_reference_where_that_is_faster(options, shape):
    layer, x = unfading.ConvSTAR(8, 64, **options), torch.randn(shape)
    with observe_backends() as observed:
        output, _ = layer(x)
    assert observed["ConvSTARCell"] == {
        "backend": "reference",
        "reason": "the reference loop is estimated to be faster for frames of this size",
    }
    with unfading.use_backend("reference"):
        assert torch.equal(output, layer(x)[0])


def test_a_changed_output_is_noticed_by_the_gradient():
    layer = layer_of(unfading.ConvLSTMCell, backend="fused")
    output, _ = layer(frames())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.relu_().sum().backward()


# -- cells of a user ----------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor


class Weights(NamedTuple):
    W: Convolution
    V: Convolution
    scale: Tensor
    unread: Tensor


class State(NamedTuple):
    h: Tensor
    m: Tensor


class OwnCell(ConvolutionalCell):
    """The convolution of [x, h] in the step, another one of its result, a number and a vector of weights."""

    def __init__(self, in_channels, hidden_channels):
        super().__init__(
            in_channels, hidden_channels, input_gates=1, state_gates=1, bias=True, kernel_size=3, stride=1, padding="same",
            dilation=1, groups=1,
        )  # fmt: skip
        self.U = nn.Parameter(0.2 * torch.randn(2 * hidden_channels, in_channels + hidden_channels, 3, 3))
        self.scale = nn.Parameter(torch.rand(hidden_channels, 1, 1))
        self.reset_parameters()

    def project(self, x, start=0):
        return Inputs(x)

    def weights(self):
        return Weights(Convolution(self.U), Convolution(self.W_h), self.scale, self.from_input.bias)

    def initial_state(self, batch):
        return State(self.zeros(batch), self.zeros(batch))

    def step(self, inputs, state, weights):
        a, b = convolve(torch.cat([inputs.x, state.h], 1), weights.W).chunk(2, dim=1)
        inner = torch.where(a > 0, a, 0.1 * a) * state.m
        h = torch.tanh(convolve(inner, weights.V) * weights.scale + b)
        return State(h, 0.9 * state.m + torch.relu(a) + 0.5 * (h > 0.2).to(h.dtype))


def test_a_cell_of_a_user_with_two_convolutions_in_a_row():
    agrees(layer_of(OwnCell), frames(), lengths=LENGTHS)
    assert refusal(layer_of(OwnCell).cells[0]) is None


class Pooling(OwnCell):
    def step(self, inputs, state, weights):
        new = super().step(inputs, state, weights)
        return new._replace(h=new.h - new.h.mean((2, 3), keepdim=True))


class Mixing(OwnCell):
    def step(self, inputs, state, weights):
        new = super().step(inputs, state, weights)
        return new._replace(h=new.h - new.h.mean(0, keepdim=True))


class Changing(OwnCell):
    def step(self, inputs, state, weights):
        return State(convolve(state.h, Convolution(2 * weights.V.weight)), state.m)


class Softmax(OwnCell):
    def step(self, inputs, state, weights):
        return State(torch.softmax(convolve(state.h, weights.V), 1), state.m)


class Shrinking(OwnCell):
    def step(self, inputs, state, weights):
        small = functional.conv2d(state.h, weights.V.weight, padding=1, stride=2)
        return State(functional.interpolate(small, size=state.h.shape[2:]), state.m)


class Writing(OwnCell):
    def step(self, inputs, state, weights):
        return State(convolve(state.h, weights.V).tanh_(), state.m)


class Turning(OwnCell):
    def step(self, inputs, state, weights):
        return State(convolve(state.h, weights.V).transpose(2, 3), state.m)


REFUSED = {
    Pooling: "beside its convolutions a compiled step computes each pixel alone .*test_frames.py",
    Mixing: "aten.mean .*test_frames.py",
    Changing: "the kernels of a convolution are changed inside the step; do it in weights.* .*test_frames.py",
    Softmax: "over channels is not compiled in a step with convolutions .*test_frames.py",
    Shrinking: "has stride 1 and a border that keeps the size of its frames .*test_frames.py",
    Writing: "writes into a tensor; a step must be pure .*test_frames.py",
    Turning: "permute computes with the axes of a frame; .* each pixel alone .*test_frames.py",
}


@pytest.mark.parametrize("cell", REFUSED, ids=name)
def test_what_is_no_function_of_single_pixels_is_refused_and_runs_on_the_reference(cell):
    layer, x = layer_of(cell), frames(frame=(6, 6))
    with unfading.use_backend("fused"), pytest.raises(RuntimeError, match=REFUSED[cell]):
        layer(x)
    with observe_backends() as observed:
        output, _ = layer(x)
    assert observed[cell.__name__]["backend"] == "reference"
    with unfading.use_backend("reference"):
        assert torch.equal(output, layer(x)[0])


def test_transforms_of_torch_run_on_the_reference():
    layer = layer_of(unfading.ConvSTARCell)
    reasons = []

    def of_transform(x):
        reasons.append(refusal(layer.cells[0]))
        return layer(x)[0].sum()

    gradient = torch.func.grad(of_transform)(frames())
    assert "a transform of torch.func is active" in reasons[0]
    x = frames().requires_grad_()
    layer(x)[0].sum().backward()
    assert_close(gradient, x.grad, **EXACT)


# -- what runs on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_torch(monkeypatch):
    """Convolutions by torch, with the gradients of kernels from three steps at a time, as on a GPU."""

    def convolver(convolution, weight, frames, precision=None):
        own = TorchConvolver(convolution, weight[convolution.r0 : convolution.r1], frames, precision or weight.dtype)
        own.steps = 3
        return own

    monkeypatch.setattr(frame_loop, "convolver", convolver)


@pytest.mark.usefixtures("by_torch")
@each
@pytest.mark.sample(2)
def test_convolutions_by_torch(cell):
    agrees(layer_of(cell, bidirectional=True), frames(), lengths=LENGTHS)


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1" or triton_missing() is not None, reason="no interpreter of Triton")
@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("cell", [*catalogue.convolutional_cells(), OwnCell], ids=name)
@pytest.mark.sample(2)
def test_kernels_in_triton(cell):
    layer = layer_of(cell, torch.float32)
    exact = copy.deepcopy(layer).double()
    want = everything(exact, frames(frame=(3, 4)), "reference", lengths=LENGTHS)
    with interpreted():
        assert plan(layer.cells[0]).target == "triton"
        got = everything(layer, frames(frame=(3, 4)).float(), "fused", lengths=LENGTHS)
    for a, b in zip(got, want, strict=True):
        if b is not None:
            assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_convolutions_by_torch_in_bfloat16():
    """As under autocast on a GPU: factors have 8 bits, and sums are float32."""
    generator = torch.Generator().manual_seed(0)
    v, d = (torch.randn(6 * 20, n, generator=generator) for n in (3, 8))
    kernels = torch.randn(8, 3, 3, 3, generator=generator)
    convolution = FrameConvolution(ConvolutionSource(TensorKind.INPUT, 0), 0, 0, 8, (3, 3), (1, 1), 1, 3)
    results = []
    for precision in (torch.float32, torch.bfloat16):
        own = TorchConvolver(convolution, kernels, Frames(6, 4, 5), precision)
        total = torch.zeros_like(v)
        own.add_input_gradient(d, total)
        own.add_kernel_gradient(v, d)
        results.append([own.forward(v).float(), total, own.kernel_gradient()])
        assert all(part.dtype == torch.float32 for part in results[-1])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=0.0, atol=0.02 * b.abs().max().item())
