"""The transforms of torch work on every cell: compile, vmap, jvp, double backward, autocast, float32."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

import unfading
from tests.helpers.variants import few_iterations, hidden_size, name, sampled
from tests.user.quiet import QuietCell
from unfading import catalogue

EXACT = {"rtol": 1e-11, "atol": 1e-11}
T, B, I = 4, 3, 2
CELLS = [*catalogue.cells(), QuietCell]
each = pytest.mark.parametrize("cell", CELLS, ids=name)
rest_is_long = pytest.mark.parametrize("cell", sampled(CELLS))


def layer_of(cell, *arguments, **keywords):
    layer = unfading.layer(cell)(I, hidden_size(cell), *arguments, **keywords)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer


def given(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (T, B, I)), dtype=dtype)


@rest_is_long
@pytest.mark.sample(2)
def test_vmap_of_grad_and_jvp(cell):
    layer, x = layer_of(cell, dtype=torch.float64), given()
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,))[0].square().sum()

    per_row = vmap(grad(loss), (None, 1))(parameters, x.unsqueeze(2))
    whole = grad(loss)(parameters, x)
    for key in whole:
        assert_close(per_row[key].sum(0), whole[key], **EXACT)
    if cell is unfading.EquilibriumRNNCell:
        return  # its derivative is implicit, and written for reverse mode alone
    tangent = torch.randn_like(x)
    _, slope = jvp(lambda x: loss(parameters, x), (x,), (tangent,))
    assert_close(slope, (grad(loss, 1)(parameters, x) * tangent).sum(), **EXACT)


@rest_is_long
@pytest.mark.sample(3)
def test_many_models_at_once(cell):
    """torch.func.stack_module_state and vmap: each result agrees with the model alone."""
    layers = [layer_of(cell, dtype=torch.float64) for _ in range(3)]
    x = given()
    stacked = torch.func.stack_module_state(layers)
    together = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,))[0])(*stacked)
    for alone, member in zip(layers, together, strict=True):
        assert_close(member, alone(x)[0], **EXACT)


@each
@pytest.mark.sample(8)
def test_double_backward(cell):
    layer = layer_of(cell, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0].square().sum(), given(2, 1, I).requires_grad_())


@rest_is_long
@pytest.mark.sample(2)
def test_lengths_under_vmap(cell):
    layer, x = layer_of(cell, dtype=torch.float64), given(2, T, B, I)
    lengths = torch.tensor([[4, 2, 3], [1, 4, 2]])
    together = vmap(lambda x, n: layer(x, lengths=n)[0])(x, lengths)
    for i in range(2):
        assert_close(together[i], layer(x[i], lengths=lengths[i])[0], **EXACT)


@pytest.fixture
def fresh_dynamo():
    """Dynamo counts recompilations per line of code, over all tests; each test starts at none."""
    torch._dynamo.reset()


@rest_is_long
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.sample(3)
def test_compiles_to_one_graph(cell):
    layer, x = layer_of(cell, bidirectional=True, dtype=torch.float64, **few_iterations(cell)), given(2, B, I)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    lengths = torch.tensor([2, 1, 2])
    assert_close(compiled(x, lengths=lengths)[0], layer(x, lengths=lengths)[0], **EXACT)


@each
@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiles_to_one_graph_with_its_backward(cell):
    layer, x = layer_of(cell, 2, dtype=torch.float64, **few_iterations(cell)), given()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (layer, compiled):
        layer.zero_grad()
        run(x)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, **EXACT)


def test_autocast_changes_the_precision_of_products():
    layer, x = layer_of(unfading.STARCell), given(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x)[0]
    assert not torch.equal(cast, layer(x)[0])


@pytest.mark.parametrize(
    ("cell", "layers"),
    [*((cell, 1) for cell in CELLS), (unfading.LSTMCell, 2)],
    ids=lambda value: value if isinstance(value, int) else name(value),
)
@pytest.mark.sample(7)
def test_autocast_keeps_the_state_in_float32(cell, layers):
    layer, x = layer_of(cell, layers), given(dtype=torch.float32)
    want, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = layer(x)
        output.sum().backward()
        half, _ = layer(x.bfloat16())
    assert output.dtype == half.dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in state)
    # bfloat16 keeps eight bits; four steps, at most two layers.
    assert_close(output, want, rtol=0.1, atol=0.1)


def float32_agrees_with_float64(cell, scale, backend):
    """Forward and gradient, over a length at which powers and products would leave the range of float32."""
    layer = unfading.layer(cell)(I, hidden_size(cell), dtype=torch.float64, backend=backend)
    x = scale * given(40, B, I)
    results = []
    for dtype in (torch.float64, torch.float32):
        converted = layer.to(dtype)
        inputs = x.to(dtype).requires_grad_()
        output, _ = converted(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs)
        results.append((output.double(), gradient.double()))
    for wide, narrow in zip(*results, strict=True):
        assert torch.isfinite(narrow).all()
        # Rounding of 1e-7 a step, amplified by at most a few thousand over 40 steps.
        assert (narrow - wide).abs().max() <= 1e-3 * wide.abs().max() + 1e-30


scales = pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])


@each
@scales
@pytest.mark.sample(31)
def test_float32_agrees_with_float64_to_rounding(cell, scale):
    float32_agrees_with_float64(cell, scale, "reference")


@rest_is_long
@scales
@pytest.mark.sample(6)
def test_float32_of_the_compiled_loop_agrees_with_float64_to_rounding(cell, scale):
    float32_agrees_with_float64(cell, scale, "fused")
