"""Convolutional layers: the forms of input and state, every option of a layer, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.testing import assert_close

import unfading
from tests.helpers.variants import name
from unfading import catalogue
from unfading.backends.cuda_graph.backend import unrecordable
from unfading.cells.convolution import Convolution, convolve
from unfading.cells.wrap import RecurrentDropoutCell, ZoneoutCell
from unfading.fuse.locality import locality

EXACT = {"rtol": 1e-12, "atol": 1e-12}
T, B, C, H, FRAME = 6, 3, 2, 4, (5, 6)
LENGTHS = torch.tensor([6, 2, 4])

each = pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)


def layer_of(cell, *arguments, **options):
    torch.manual_seed(0)
    return unfading.layer(cell)(C, H, *arguments, dtype=torch.float64, **options)


def frames(*shape):
    return torch.randn(*(shape or (T, B)), C, *FRAME, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def everything(layer, x, **keywords):
    """Outputs, final state, and the gradient of a random function of them."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output, state = layer(x, **keywords)
    generator = torch.Generator().manual_seed(5)
    sum((p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum() for p in (output, *state)).backward()
    return [output, *state, x.grad, *(p.grad for p in layer.parameters())]


@each
@pytest.mark.sample(2)
def test_shapes_of_output_and_state(cell):
    output, state = layer_of(cell, 3, 2, bidirectional=True)(frames())
    assert output.shape == (T, B, 2 * H, *FRAME)
    assert type(state) is type(cell(C, H).initial_state(1))
    assert all(part.shape == (4, B, H, *FRAME) for part in state)


def test_the_third_argument_is_the_kernel_size():
    layer = unfading.ConvLSTM(3, 8, 5)
    assert layer.num_layers == 1
    assert layer.cells[0].W_h.shape == (32, 8, 5, 5)


def test_batch_first_unbatched_and_packed_input_give_the_same():
    layer, x = layer_of(unfading.ConvGRUCell, 3, 2, bidirectional=True), frames()
    output, state = layer(x, lengths=LENGTHS)
    layer.batch_first = True
    assert_close(layer(x.transpose(0, 1), lengths=LENGTHS)[0].transpose(0, 1), output, **EXACT)
    rows = [x[:length, b] for b, length in enumerate(LENGTHS.tolist())]
    packed, packed_state = layer(pack_sequence(rows, enforce_sorted=False))
    assert_close(packed_state.h, state.h, **EXACT)
    for b, row in enumerate(unpack_sequence(packed)):
        assert_close(row, output[: len(row), b], **EXACT)
    alone, final = layer(rows[1])
    assert_close(alone, output[:2, 1], **EXACT)
    assert_close(final.h, state.h[:, 1], **EXACT)


@each
@pytest.mark.sample(2)
def test_halves_truncation_and_trajectory_agree_with_one_call(cell):
    layer, x = layer_of(cell, 3, 2), frames()
    output, state = layer(x)
    first, between = layer(x[:4])
    second, end = layer(x[4:], between, start=4)
    assert_close(torch.cat([first, second]), output, **EXACT)
    for a, b in zip(end, state, strict=True):
        assert_close(a, b, **EXACT)
    assert_close(torch.cat([chunk.output for chunk in unfading.truncated(layer, x, 4)]), output, **EXACT)
    layer.batch_first = True
    chunks = unfading.truncated(layer, x.transpose(0, 1), 4)
    assert_close(torch.cat([chunk.output for chunk in chunks], 1), output.transpose(0, 1), **EXACT)
    trajectory = layer.trajectory(x.transpose(0, 1))
    assert trajectory[0].shape == (T, 2, B, H, *FRAME)
    assert_close(trajectory[0][:, -1], output, **EXACT)


@each
@pytest.mark.sample(1)
def test_a_stream_gives_the_output_of_the_layer(cell):
    layer, x = layer_of(cell, 3, 2, stride=[2, 1], learn_initial_state=True).eval(), frames()
    with torch.no_grad():
        for parameter in layer.learned_state:
            parameter.normal_()
    stream = layer.stream(B, frame=FRAME)
    for _ in range(2):
        pushed = torch.stack([stream.push(x_t) for x_t in x])
        assert_close(pushed, layer(x)[0], **EXACT)
        assert stream.states[1][0].shape == (B, H, 2, 6)
        stream.reset()


@each
@pytest.mark.parametrize("form", [{}, {"bidirectional": True, "num_layers": 2}], ids=["one", "two-ways"])
@pytest.mark.sample(2)
def test_checkpointing_changes_no_gradient(cell, form):
    layer = layer_of(cell, **form)
    want = everything(layer, frames(), lengths=LENGTHS)
    for every in (1, 4):
        layer.checkpoint_every = every
        for a, b in zip(everything(layer, frames(), lengths=LENGTHS), want, strict=True):
            assert_close(a, b, **EXACT)


@each
@pytest.mark.sample(2)
def test_gradient_of_a_stack_with_lengths(cell):
    layer = unfading.layer(cell)(1, 2, num_layers=2, stride=2, learn_initial_state=True, dtype=torch.float64)
    x = torch.randn(3, 2, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *parameters):
        tensors = dict(zip(names, parameters, strict=True))
        output, states = torch.func.functional_call(layer, tensors, x, {"lengths": torch.tensor([3, 2])})
        return output, *(part for state in states for part in state)

    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


def test_a_learned_state_is_one_number_per_channel():
    layer, x = layer_of(unfading.ConvSTARCell, 3, 2, learn_initial_state=True), frames()
    assert [tuple(parameter.shape) for parameter in layer.learned_state] == [(H, 1, 1)] * 2
    plain, _ = layer(x)
    with torch.no_grad():
        layer.learned_state[0].copy_(torch.linspace(-0.5, 0.5, H).reshape(H, 1, 1))
    assert not torch.allclose(layer(x)[0], plain)
    given = torch.zeros(2, B, H, *FRAME, dtype=torch.float64)
    given[0] = layer.learned_state[0]
    assert_close(layer(x, (given,))[0], layer(x)[0], **EXACT)


@each
@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}], ids=str)
@pytest.mark.sample(2)
def test_noise_in_training_and_none_in_evaluation(cell, noise):
    layer, x = layer_of(cell, groups=2, stride=2, **noise), frames()
    assert any(not torch.equal(layer(x)[0], layer(x)[0]) for _ in range(5))
    layer(x)[0].sum().backward()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    if "recurrent_dropout" in noise:
        plain = layer_of(cell, groups=2, stride=2)
        plain.load_state_dict(layer.state_dict())
        assert_close(layer(x)[0], plain(x)[0], **EXACT)


def test_recurrent_dropout_drops_channels_of_the_state_and_zoneout_pixels():
    x = torch.randn(5, 40, C, *FRAME)
    (mask,) = RecurrentDropoutCell(unfading.ConvLSTMCell(C, H), 0.25).project(x).masks
    assert mask.shape == (1, 40, H, 1, 1)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    h, c = ZoneoutCell(unfading.ConvLSTMCell(C, H, stride=2), 0.25).project(x).masks
    assert h.shape == c.shape == (5, 40, H, 3, 3)
    assert abs(h.mean() - 0.25) < 0.02


def test_dropped_channels_do_not_reach_the_convolution():
    convolution = Convolution(torch.randn(3 * H, H, 3, 3))
    cell = RecurrentDropoutCell(unfading.ConvSTARCell(C, H).double(), 0.5)
    x = frames()
    inputs = cell.project(x)
    trajectory, _ = unfading.reference.scan(
        cell, inputs, unfading.ConvSTAR(C, H, dtype=torch.float64).initial_states(B, FRAME)[0], cell.weights()
    )
    h = torch.zeros(B, H, *FRAME, dtype=torch.float64)
    for t in range(T):
        k = torch.sigmoid(inputs.inner.a[t] + functional.conv2d(h * inputs.masks[0][0], cell.cell.W_h, padding=1))
        h = torch.tanh((1 - k) * h + k * inputs.inner.z[t])
        assert_close(trajectory.h[t], h, **EXACT)
    assert convolve(torch.randn(2, H, 5, 5), convolution).shape == (2, 3 * H, 5, 5)


@each
def test_layers_whose_strides_shrink_frames_have_a_tuple_of_states(cell):
    layer, x = layer_of(cell, 3, 2, stride=2), frames()
    output, state = layer(x)
    assert output.shape == (T, B, H, 2, 2)
    assert [part.shape for part in state[0]] == [(B, H, 3, 3)] * len(state[0])
    assert [part.shape for part in state[1]] == [(B, H, 2, 2)] * len(state[1])
    second, _ = layer(x[3:], layer(x[:3])[1])
    assert_close(second, output[3:], **EXACT)
    assert layer.frames(FRAME) == [(5, 6), (3, 3), (2, 2)]


@each
@pytest.mark.sample(2)
def test_autocast_keeps_the_precision_of_the_state(cell):
    layer, x = unfading.layer(cell)(C, H), frames().float()
    with torch.autocast("cpu", torch.bfloat16):
        output, state = layer(x)
    assert output.dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in state)
    assert not torch.equal(output, layer(x)[0])
    assert_close(output, layer(x)[0], rtol=0.0, atol=0.05)  # bfloat16 has 8 bits, in two convolutions of 36 terms a step


@each
@pytest.mark.sample(1)
def test_compiled_by_torch(cell):
    torch._dynamo.reset()
    layer, x = layer_of(cell), frames(3, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x)[0], layer(x)[0], **EXACT)


def test_exported_with_a_free_number_of_rows():
    layer, x = layer_of(unfading.ConvLSTMCell), frames(3, 2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    assert_close(program.module()(frames(3, 4))[0], layer(frames(3, 4))[0], **EXACT)


@each
@pytest.mark.sample(2)
def test_each_model_of_a_vmap_is_its_own(cell):
    layers, x = [layer_of(cell) for _ in range(2)], frames()
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(0.5)
    parameters, _ = torch.func.stack_module_state(layers)
    outputs = torch.func.vmap(lambda p: torch.func.functional_call(layers[0], p, (x,))[0])(parameters)
    for output, layer in zip(outputs, layers, strict=True):
        assert_close(output, layer(x)[0], **EXACT)


@each
@pytest.mark.sample(2)
def test_the_projection_can_be_cut_in_time_and_the_step_be_recorded(cell):
    for wrap in (lambda cell: cell, lambda cell: ZoneoutCell(RecurrentDropoutCell(cell, 0.5), 0.3)):
        for options in ({}, {"padding": 0, "kernel_size": 5, "dilation": 2}):
            runner = wrap(cell(C, H, **options))
            assert locality(runner, 6).refusal is None
            assert unrecordable(runner) is None


def test_an_own_convolutional_cell_runs():
    class Blur(unfading.ConvSTARCell):
        def step(self, inputs, state, weights):
            new = super().step(inputs, state, weights)
            return new._replace(h=0.5 * new.h)

    layer = unfading.layer(Blur)(C, H)
    assert type(layer).__name__ == "Blur"
    assert layer(frames().float())[0].abs().max() <= 0.5
    stack = unfading.Recurrent(lambda size: Blur(size, H), C, num_layers=2)
    assert stack(frames().float())[0].shape == (T, B, H, *FRAME)


star = unfading.ConvSTAR(C, H)
x = torch.zeros(T, B, C, *FRAME)

CASES = {
    "channels": (lambda: star(x[:, :, :1]), r"ConvSTAR was built for 2 channels; got 1 channels in input \[6, 3, 1, 5, 6\]"),
    "axes": (lambda: star(x[..., 0, 0]), r"\[T, B, 2, height, width\], or \[T, 2, height, width\] unbatched; got \[6, 3, 2\]"),
    "no rows": (lambda: star(x[:, :0]), "at least one row in the batch"),
    "empty frame": (lambda: star(x[..., :0]), "needs frames of at least 1 x 1; got 5 x 0"),
    "small frame": (lambda: unfading.ConvGRU(C, H, 7, padding=0)(x), "ConvGRU with .* needs frames of at least 7 x 7; got 5"),
    "small second": (lambda: unfading.ConvGRU(C, H, 3, 3, padding=0)(x), "at least 3 x 3; got 1 x 2"),
    "other frame": (
        lambda: star(x, star(x[..., :4])[1]),
        r"ConvSTAR's state h must have shape \[1, 3, 4, 5, 6\] for this input; got \[1, 3, 4, 5, 4\]",
    ),
    "even kernel": (lambda: unfading.ConvSTAR(C, H, 4), "kernel_size must be odd, .* got 4. Nearest valid: 3 and 5"),
    "even width": (lambda: unfading.ConvSTAR(C, H, (3, 2)), "kernel_size must be odd, .* got 2"),
    "kernel of three": (lambda: unfading.ConvSTAR(C, H, (3, 3, 3)), "kernel_size must be an int or a pair of ints"),
    "kernel 0": (lambda: unfading.ConvSTAR(C, H, 0), "kernel_size must be at least 1; got 0"),
    "stride 0": (lambda: unfading.ConvSTAR(C, H, stride=0), "stride must be at least 1; got 0"),
    "padding word": (lambda: unfading.ConvSTAR(C, H, padding="valid"), "must be 'same', an int or a pair of ints; got 'valid'"),
    "padding negative": (lambda: unfading.ConvSTAR(C, H, padding=-1), "padding must be at least 0; got -1"),
    "groups": (lambda: unfading.ConvSTAR(C, H, groups=3), "divisor of in_channels; got groups=3 for in_channels=2"),
    "groups of the state": (lambda: unfading.ConvSTAR(C, 3, groups=2), "got groups=2 for hidden_channels=3"),
    "no channels": (lambda: unfading.ConvSTAR(0, H), "in_channels must be at least 1; got 0"),
    "no hidden channels": (lambda: unfading.ConvSTAR(C, 0), "hidden_channels must be at least 1; got 0"),
    "no frame": (lambda: star.stream(), r"ConvSTAR needs the size of its frames: stream\(frame=\(height, width\)\)"),
    "a frame": (lambda: unfading.STAR(C, H).stream(frame=(5, 6)), r"a stream of STAR reads no frames; got frame=\(5, 6\)"),
    "pushed frame": (lambda: star.stream(2, frame=FRAME).push(x[0]), r"push takes torch.float32 \[2, 2, 5, 6\] on cpu"),
    "flat start": (
        lambda: unfading.flat_start(unfading.Model(nn.Identity(), star, unfading.EveryStep(H, 1)), x),
        "flat_start takes layers over feature vectors; ConvSTAR reads frames",
    ),
    "task": (
        lambda: unfading.train(unfading.Run(task="adding", task_options={"T": 5}, cell="ConvSTAR", hidden=4, steps=1)),
        r"the recurrent stack reads \[T, 32, 2, height, width\]",
    ),
    "mixed": (
        lambda: unfading.Recurrent(lambda size: (unfading.STARCell if size == H else unfading.ConvSTARCell)(size, H), C, 2),
        "all cells of a stack read frames, or none does; got ConvSTARCell, STARCell",
    ),
    "convolve": (
        lambda: convolve(torch.zeros(2, 3, 5, 5), Convolution(torch.zeros(4, 4, 3, 3))),
        r"got v \[2, 3, 5, 5\], weight \[4, 4, 3, 3\] and groups=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals_are_one_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()


def test_recurrent_dropout_names_convolutions_outside_convolve():
    class Direct(unfading.ConvSTARCell):
        def step(self, inputs, state, weights):
            return state._replace(h=torch.tanh(inputs.a + functional.conv2d(state.h, weights.W_h.weight, padding=1)))

    with pytest.raises(TypeError, match=r"acts where Direct.step calls unfading.convolve\(v, W\); it uses one of W_h"):
        unfading.layer(Direct)(C, H, recurrent_dropout=0.5)(x)


def test_a_step_with_a_stride_is_refused():
    class Strided(unfading.ConvSTARCell):
        def step(self, inputs, state, weights):
            return (
                super()
                .step(inputs, state, weights)
                ._replace(h=functional.conv2d(state.h, weights.W_h.weight, stride=2, padding=1))
            )

    with pytest.raises(
        ValueError, match=r"Strided.step must keep the shapes of its state, .* \[3, 4, 5, 6\]; got .* \[3, 4, 3, 3\]"
    ):
        unfading.layer(Strided)(C, H)(x)


def test_dropout_on_one_layer_warns_at_the_users_line():
    with pytest.warns(UserWarning, match="no effect") as caught:
        unfading.ConvSTAR(C, H, dropout=0.5)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("matrix", ["from_input.weight", "W_h"])
@each
def test_kernels_of_every_gate_start_orthogonal(cell, matrix):
    instance = cell(8, 4).double()
    instance.reset_parameters(torch.Generator().manual_seed(3))
    for kernels in instance.get_parameter(matrix).split(4):
        rows = kernels.flatten(1)
        assert_close(rows @ rows.T, torch.eye(4, dtype=torch.float64), **EXACT)
