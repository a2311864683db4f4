"""Block-diagonal recurrence: a cell with heads is the dense cell whose recurrent matrices are zero outside of their blocks."""

import inspect
import io

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built
from tests.helpers.exported import exported
from tests.helpers.variants import name
from unfading import BlockDiagonal, catalogue

EXACT = {"rtol": 1e-12, "atol": 1e-12}
H = 6


def has_heads(cell):
    """NRU's heads are another thing: they write to its memory."""
    return "heads" in inspect.signature(cell).parameters and name(cell) != "NRU"


CELLS = [cell for cell in catalogue.cells() if has_heads(cell)]
# Several matrices, a product of a computed value; in the long tests also a layer norm across heads, and every cell.
SAMPLE = [
    (unfading.LSTMCell, 2, {}),
    (unfading.GRUCell, 2, {}),
    pytest.param(unfading.GRUCell, 3, {"reset_after": True}, marks=pytest.mark.long),
    pytest.param(unfading.ElmanCell, 3, {"normalise": True}, marks=pytest.mark.long),
    *(pytest.param(cell, heads, {"bidirectional": True}, marks=pytest.mark.long) for cell in CELLS for heads in (2, 3, H)),
]
each = pytest.mark.parametrize("cell", CELLS, ids=name)


def results(run, parameters, lengths):
    """Output, state and all gradients of a layer with these parameters, by name."""
    torch.manual_seed(4)
    x = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    output, state = run(x, lengths)
    parts = {"output": output, **{f"state {i}": part for i, part in enumerate(torch.utils._pytree.tree_leaves(state))}}
    loss = sum((part * torch.randn_like(part)).sum() for part in parts.values())
    gradients = torch.autograd.grad(loss, [x, *parameters.values()])
    return {**parts, **dict(zip(["x", *parameters], gradients, strict=True))}


def agrees_with_the_dense_cell(cell, heads, backend, **options):
    layer, dense = built(cell, H, heads=heads, **options), built(cell, H, **options)
    own = {key: value.detach().requires_grad_() for key, value in layer.named_parameters()}
    shapes = {key: value.shape for key, value in dense.named_parameters()}
    assert any(own[key].shape != shapes[key] for key in own)

    def run(x, lengths):
        return functional_call(layer, own, (x,), {"lengths": lengths})

    def run_dense(x, lengths):
        """The blocks in matrices of zeros; gradients flow back to the blocks."""
        full = {key: p if p.shape == shapes[key] else BlockDiagonal(p, heads).dense() for key, p in own.items()}
        return functional_call(dense, full, (x,), {"lengths": lengths})

    for lengths in (None, torch.tensor([5, 2, 4, 1])):
        with unfading.use_backend(backend):
            got = results(run, own, lengths)
        with unfading.use_backend("reference"):
            want = results(run_dense, own, lengths)
        for key in want:
            assert_close(got[key], want[key], **EXACT, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("heads", [2, H])
@each
@pytest.mark.sample(7)
def test_a_cell_with_heads_is_the_dense_cell_with_zeros_between_heads(cell, heads):
    agrees_with_the_dense_cell(cell, heads, "reference", bidirectional=True)


@pytest.mark.parametrize(("cell", "heads", "options"), SAMPLE)
def test_it_is_compiled(cell, heads, options):
    agrees_with_the_dense_cell(cell, heads, "fused", **options)


def test_dense_cells_have_heads():
    gated = {"LSTM", "PeepholeLSTM", "GRU", "STAR", "JANET", "ForgetLSTM", "UGRNN", "FastRNN", "FastGRNN", "SLSTM"}
    assert {name(cell) for cell in CELLS} == gated | {"Elman", "IdentityRNN", "LinearRNN", "OrthogonalRNN"}


@each
def test_one_head_is_the_default(cell):
    torch.manual_seed(0)
    plain = cell(3, H)
    torch.manual_seed(0)
    one = cell(3, H, heads=1)
    assert plain.state_dict().keys() == one.state_dict().keys()
    assert all(torch.equal(value, one.state_dict()[key]) for key, value in plain.state_dict().items())
    assert not any(isinstance(part, BlockDiagonal) for part in one.weights())


@each
def test_the_parameter_holds_the_blocks_alone(cell):
    counts = [sum(p.numel() for p in cell(3, 12, heads=heads).parameters()) for heads in (1, 2, 3, 12)]
    matrices = [
        sum(W.blocks.numel() for W in cell(3, 12, heads=n).weights() if isinstance(W, BlockDiagonal)) for n in (2, 3, 12)
    ]
    gates = matrices[0] * 2 // 144
    assert gates >= 1
    assert matrices == [gates * 144 // heads for heads in (2, 3, 12)]
    assert [counts[0] - count for count in counts[1:]] == [gates * 144 - entries for entries in matrices]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if "Fast" not in name(cell)], ids=name)
def test_every_block_starts_orthogonal(cell):
    for matrix in cell(3, 12, heads=3).double().weights():
        if isinstance(matrix, BlockDiagonal):
            for W in matrix.dense().split(12):
                eye = torch.eye(12, dtype=W.dtype)
                assert_close(W @ W.T, eye, rtol=0, atol=1e-5)
                assert name(cell) != "IdentityRNN" or torch.equal(W, eye)


def test_blocks_lie_on_the_diagonal_of_each_matrix():
    blocks = torch.randn(2 * 6, 3)
    want = torch.zeros(2 * 6, 6)
    for row in range(12):
        group = 0 if row % 6 < 3 else 3
        want[row, group : group + 3] = blocks[row]
    matrix = BlockDiagonal(blocks, 2)
    assert matrix.shape == want.shape
    assert torch.equal(matrix.dense(), want)
    v = torch.randn(5, 4, 6)
    assert_close(unfading.linear(v, matrix), v @ want.T)


def test_bad_heads_are_refused_in_one_sentence():
    for heads, message in (
        (4, r"heads must be a divisor of hidden_size; got heads=4 for hidden_size=6\."),
        (0, r"heads must be at least 1; got 0\."),
        (-2, r"heads must be at least 1; got -2\."),
        (12, r"heads must be a divisor of hidden_size; got heads=12 for hidden_size=6\."),
    ):
        for cell in CELLS:
            with pytest.raises(ValueError, match=message):
                cell(3, H, heads=heads)
    with pytest.raises(TypeError, match=r"heads must be an int of at least 1; got 2\.0 \(float\)\."):
        unfading.LSTM(3, H, heads=2.0)
    with pytest.raises(
        ValueError, match=r"heads=2 makes U block-diagonal and rank=3 makes it low-rank\. Drop one of the two\."
    ):
        unfading.FastGRNN(3, H, heads=2, rank=3)
    with pytest.raises(ValueError, match=r"linear takes v \[\.\.\., m\] and W \[n, m\]; got v \[4, 5\] and W \[6, 6\]\."):
        unfading.linear(torch.ones(4, 5), BlockDiagonal(torch.ones(6, 3), 2))
    with pytest.raises(
        ValueError, match=r"a BlockDiagonal of 4 heads takes blocks \[n, D\], with n a multiple of 4 D; got \[6, 3\]\."
    ):
        unfading.linear(torch.ones(4, 12), BlockDiagonal(torch.ones(6, 3), 4))


def test_weights_of_another_number_of_heads_are_refused():
    layer = unfading.STAR(3, H, heads=2)
    unfading.STAR(3, H, heads=2).load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        unfading.STAR(3, H).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("layer", [unfading.LSTM, unfading.GRU, unfading.Elman], ids=lambda layer: layer.__name__)
def test_torch_has_the_zeros_between_heads(layer):
    options = {"reset_after": True} if layer is unfading.GRU else {}
    own = layer(3, H, 2, heads=3, dtype=torch.float64, backend="reference", **options)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    assert_close(unfading.to_torch(own)(x)[0], own(x)[0], **EXACT)


@pytest.mark.long
def test_a_layer_with_heads_is_exported():
    layer, x = unfading.GRU(3, H, heads=2), torch.randn(9, 4, 3)
    file = io.BytesIO()
    torch.export.save(exported(layer), file)
    file.seek(0)
    assert_close(torch.export.load(file).module()(x)[0], layer(x)[0])
