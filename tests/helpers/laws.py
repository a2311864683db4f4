"""The laws of a cell, each a function that raises where the cell breaks it. `test_laws` runs them over every cell;
`test_laws_can_fail` runs them over cells that are broken on purpose."""

import copy
import pickle

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.testing import assert_close
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.twins import TWINS
from tests.helpers.variants import hidden_size
from unfading import use_backend
from unfading.cells.base import in_frame
from unfading.layers.recurrent import Recurrent
from unfading.lengths import zero_past
from unfading.reference import scan

# float64; two orders of summation of the same few dozen terms.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

T, B, I = 7, 3, 2
FRAME = (6, 5)  # height and width of the input of convolutional cells


def make(cell, options, seed=0):
    torch.manual_seed(seed)
    made = Recurrent(lambda size: cell(size, hidden_size(cell, options), **options), I, dtype=torch.float64).cells[0]
    # A bias at zero and a step size all equal would hide what a law looks for.
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def run(cell, x, state=None, start=0, **kw):
    state = in_frame(cell.initial_state(x.shape[1]), cell.state_frame(tuple(x.shape[3:]))) if state is None else state
    return scan(cell, cell.project(x, start), state, cell.weights(), **kw)


def random_input(cell=None, *, T=T, B=B):
    frame = FRAME if cell is not None and cell.example_frame else ()
    return torch.randn(T, B, I, *frame, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def two_halves_make_the_whole(cell):
    x = random_input(cell)
    whole, final = run(cell, x, start=2)
    first, state = run(cell, x[:3], start=2)
    second, end = run(cell, x[3:], state, start=5)
    for part, a, b in zip(whole, first, second, strict=True):
        assert_close(torch.cat([a, b]), part, **EXACT)
    for a, b in zip(end, final, strict=True):
        assert_close(a, b, **EXACT)


def the_future_does_not_reach_back(cell):
    x = random_input(cell)
    changed = x.clone()
    changed[4:] += 1.0
    for before, after in zip(run(cell, x)[0], run(cell, changed)[0], strict=True):
        assert_close(before[:4], after[:4], **EXACT)
        assert not torch.allclose(before[4:], after[4:])


def batch_rows_do_not_mix(cell):
    x = random_input(cell)
    for row in range(B):
        changed = x.clone()
        changed[:, row] += 1.0
        others = [b for b in range(B) if b != row]
        for before, after in zip(run(cell, x)[0], run(cell, changed)[0], strict=True):
            assert_close(before[:, others], after[:, others], **EXACT)
            assert not torch.allclose(before[:, row], after[:, row])


def step_has_the_right_gradient(cell, *, entry_by_entry=False):
    inputs = cell.project(random_input(cell)[:1])
    state = run(cell, random_input(cell))[1]
    pieces, tree = _pytree.tree_flatten((type(inputs)(*(f[0] for f in inputs)), state, cell.weights()))
    leaves = [piece.detach().clone().requires_grad_() for piece in pieces]

    def step(*tensors):
        return tuple(cell.step(*_pytree.tree_unflatten(tensors, tree)))

    # Else the product of the Jacobian with random vectors, which every entry changes.
    assert torch.autograd.gradcheck(step, leaves, fast_mode=not entry_by_entry)


def every_parameter_gets_a_gradient(cell):
    states, _ = run(cell, random_input(cell))
    weighted = sum((part * torch.randn_like(part)).sum() for part in (*states, cell.output(states)))
    weighted.backward()
    for name, parameter in cell.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def padding_changes_nothing(cell, reverse=False, backend="reference"):
    """Row b of a padded batch is that row alone, whatever stands in the padding, in every gradient too.

    Args:
        cell: to run.
        reverse: from the last step to the first; otherwise a layer of the cell runs, too.
        backend: of the layer.
    """
    layer = Recurrent(lambda size: cell, I)
    lengths = torch.tensor([7, 2, 4])
    x = random_input(cell)
    for b, length in enumerate(lengths.tolist()):
        x[length:, b] = float("nan")
    x.requires_grad_()
    inputs = torch.where(torch.isnan(x), 0.0, x)
    states, final = run(cell, inputs, lengths=lengths, reverse=reverse)
    for b, length in enumerate(lengths.tolist()):
        alone, end = run(cell, x[:length, b : b + 1], reverse=reverse)
        for padded, single in zip(states, alone, strict=True):
            assert_close(padded[:length, b : b + 1], single, **EXACT)
            assert (padded[length:, b] == 0).all()
        for padded, single in zip(final, end, strict=True):
            assert_close(padded[b : b + 1], single, **EXACT)
    if not reverse:
        with use_backend(backend):
            output, state = layer(x, lengths=lengths)
        assert_close(output, zero_past(cell.output(states), lengths), **EXACT)
        (output.sum() + sum(part.sum() for part in state)).backward()
        assert torch.isfinite(x.grad).all()
        for parameter in cell.parameters():
            assert torch.isfinite(parameter.grad).all()


def same_seed_same_weights(make_it):
    for (name, a), (_, b) in zip(make_it(3).state_dict().items(), make_it(3).state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    differ = [not torch.equal(a, b) for a, b in zip(make_it(3).parameters(), make_it(4).parameters(), strict=True)]
    assert any(differ)


def survives_copying(cell):
    """deepcopy, pickle, state_dict and a change of dtype after a first call."""
    x = random_input(cell)
    want, _ = run(cell, x)
    clone = copy.deepcopy(cell)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    clone.load_state_dict(cell.state_dict())
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell)), clone):
        for a, b in zip(run(other, x)[0], want, strict=True):
            assert torch.equal(a, b)
    single, _ = run(copy.deepcopy(cell).float(), x.float())
    for a, b in zip(single, want, strict=True):
        # float32 over seven steps of a cell that may grow.
        assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def equation_is_the_papers(cell, name, options):
    x = random_input(cell)
    got, _ = run(cell, x)
    parameters = {key: value.numpy() for key, value in cell.state_dict().items()}
    for b in range(B):
        want = TWINS[name](parameters, options, x[:, b].numpy())
        for part, twin in zip(got, want, strict=True):
            assert_close(part[:, b].detach(), torch.from_numpy(twin), **EXACT)


def nan_stays_in_its_row(cell):
    x = random_input(cell)
    x[3, 1] = float("nan")
    for part in run(cell, x)[0]:
        assert torch.isfinite(part[:, ::2]).all()
        assert torch.isfinite(part[:3, 1]).all()
    output = cell.output(run(cell, x)[0])
    assert torch.isnan(output[3:, 1]).all()


class HostCopies(TorchDispatchMode):
    """Collects operations that move numbers between the host and a GPU, which a CUDA graph cannot capture."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def a_call_can_be_captured(cell):
    x = random_input(cell)
    with HostCopies() as copies:
        cell.output(run(cell, x)[0])
    assert not copies.found


def fails(law, *arguments):
    with pytest.raises((AssertionError, GradcheckError)):
        law(*arguments)
