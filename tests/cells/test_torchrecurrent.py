"""Every cell that torchrecurrent has too gives its numbers and gradients, with copied weights.

Where its equation is another one than the paper's, its cell is called so that it computes the paper's; the docstring of our
cell names the difference.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from unfading import catalogue
from unfading.cells.base import Cell

torchrecurrent = pytest.importorskip("torchrecurrent")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
H = 5


def rows(matrix, count, *order):
    """The blocks of rows of a stacked matrix, or the parts of a bias, in another order."""
    blocks = matrix.chunk(count)
    return torch.cat([blocks[i] for i in order])


def zeros_below(tensor, count):
    """The tensor with `count` further rows of zeros."""
    return torch.cat([tensor, tensor.new_zeros(count, *tensor.shape[1:])])


def each_step(cell, x):
    """The outputs of a cell of theirs, step by step."""
    state, outputs = None, []
    for x_t in x:
        state = cell(x_t, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs)


def new_z_first(cell, x):
    """LEM: their y reads the z of the step before, the paper's the new one. A second call with the new z gives the latter."""
    y = z = x.new_zeros(x.shape[1], H)
    outputs = []
    for x_t in x:
        _, z = cell(x_t, (y, z))
        y, _ = cell(x_t, (y, z))
        outputs.append(y)
    return torch.stack(outputs)


def hidden_units_back(cell, x):
    """SCRN: the state that they read is tanh of the output, the paper's the hidden units, here the arguments of that tanh."""
    h = s = x.new_zeros(x.shape[1], H)
    outputs = []
    for x_t in x:
        y, s = cell(x_t, (h, s))
        h = torch.atanh(y)
        outputs.append(h)
    return torch.stack(outputs)


def gates(cell):
    return {"weight_ih": cell.from_input.weight, "bias_ih": cell.from_input.bias, "weight_hh": cell.W_h}


def peephole_lstm(cell):
    return gates(cell) | {"weight_ph": cell.peepholes.flatten()}


def janet(cell):
    return gates(cell) | {"beta": torch.tensor(cell.beta)}


def ugrnn(cell):
    return {name: rows(tensor, 2, 1, 0) for name, tensor in gates(cell).items()}


def minimal_rnn(cell):
    return gates(cell) | {"weight_mm": cell.from_candidate.weight, "bias_hh": cell.from_candidate.bias}


def cfn(cell):
    return {
        "weight_ih": torch.cat([cell.gates.from_input.weight, cell.gates.to_candidate.weight]),
        "bias_ih": zeros_below(cell.gates.from_input.bias, H),
        "weight_hh": cell.gates.W_h,
    }


def ran(cell):
    return {
        "weight_ih": torch.cat([cell.gates.to_candidate.weight, rows(cell.gates.from_input.weight, 2, 1, 0)]),
        "bias_ih": rows(cell.gates.from_input.bias, 2, 1, 0),
        "weight_hh": rows(cell.gates.W_h, 2, 1, 0),
    }


def from_input(cell, **others):
    return {"weight_ih": cell.from_input.weight, "bias_ih": cell.from_input.bias, **others}


def cornn(cell):
    return from_input(cell, weight_hh=cell.W, weight_ch=cell.V)


def unicornn(cell):
    return from_input(cell, weight_hh=cell.w, weight_ch=cell.c)


def lem(cell):
    return {
        "weight_ih": rows(cell.from_input.weight, 4, 1, 0, 2, 3),
        "bias_ih": rows(cell.from_input.bias, 4, 1, 0, 2, 3),
        "weight_hh": rows(cell.W, 3, 1, 0, 2),
        "weight_ch": cell.W_y,
    }


def ind_rnn(cell):
    return from_input(cell, vector_u=cell.u)


def fast_rnn(cell):
    return from_input(cell, weight_hh=cell.U, alpha=cell.logits[:1], beta=cell.logits[1:])


def fast_grnn(cell):
    return {
        "weight_ih": cell.W.factors[0],
        "weight_hh": cell.U.factors[0],
        "bias_ih": cell.b.flatten(),
        "zeta": cell.logits[:1],
        "nu": cell.logits[1:],
    }


def upper(cell):
    return cell.weights().A.triu(1)


def antisymmetric(cell):
    return from_input(cell, weight_hh=upper(cell))


def gated_antisymmetric(cell):
    weight, bias = (rows(tensor, 2, 1, 0) for tensor in (cell.from_input.weight, cell.from_input.bias))
    return {"weight_ih": weight, "bias_ih": bias, "weight_hh": upper(cell)}


def scrn(cell):
    eye = torch.eye(H, dtype=torch.float64)
    cell.to_output.weight.copy_(torch.cat([eye, 0 * eye], dim=1))
    cell.to_output.bias.zero_()
    return {
        "weight_ih": torch.cat([cell.to_context.weight, cell.from_input.weight]),
        "bias_ih": torch.cat([0 * cell.from_input.bias, cell.from_input.bias]),
        "weight_hh": torch.cat([cell.R, eye]),
        "weight_ch": torch.cat([cell.P, 0 * eye]),
        "alpha": torch.tensor(cell.alpha, dtype=torch.float64),
    }


def atr(cell):
    return {"weight_ih": cell.from_input.weight, "weight_hh": cell.W_h, "bias_hh": cell.b}


def bistable(cell):
    return {
        "weight_ih": torch.cat([cell.from_input.weight, cell.to_candidate.weight]),
        "bias_ih": zeros_below(cell.from_input.bias, H),
        "weight_hh": cell.weights().w,
    }


def multiplicative_lstm(cell):
    return {
        "weight_ih": torch.cat([cell.to_m.weight, cell.from_input.weight]),
        "bias_ih": torch.cat([cell.W_h.new_zeros(H), cell.from_input.bias]),
        "weight_hh": cell.W_h,
        "weight_mh": cell.W_m,
    }


def nas(cell):
    """Without the fourth row of blocks, which they add and the paper multiplies."""
    for tensor in (cell.from_input.weight, cell.W_h, cell.b):
        tensor.chunk(8)[3].zero_()
    return {"weight_ih": cell.from_input.weight, "weight_hh": cell.W_h, "bias_hh": cell.b}


class Pair(NamedTuple):
    """How a cell of ours becomes one of theirs."""

    copied: Callable[[Cell], dict]  # their parameters, from our cell; all others are zero
    options: dict = {}
    their_options: dict = {}
    run: Callable = each_step


ODE = {"dt": 0.3, "gamma": 1.5, "epsilon": 0.7}
SKEW = {"epsilon": 0.3, "gamma": 0.1}
PAIRS = {
    "AntisymmetricRNN": Pair(antisymmetric, SKEW, SKEW),
    "ATR": Pair(atr),
    "BR": Pair(bistable),
    "CFN": Pair(cfn),
    "CoRNN": Pair(cornn, ODE, ODE),
    "FastGRNN": Pair(fast_grnn, their_options={"nonlinearity": "sigmoid"}),
    "FastRNN": Pair(fast_rnn),
    "GatedAntisymmetricRNN": Pair(gated_antisymmetric, SKEW, SKEW),
    "IndRNN": Pair(ind_rnn, their_options={"nonlinearity": "relu"}),
    "JANET": Pair(janet),
    "LEM": Pair(lem, {"dt": 0.6}, {"dt": 0.6}, new_z_first),
    "LiGRU": Pair(gates),
    "MGU": Pair(gates),
    "MinimalRNN": Pair(minimal_rnn),
    "MultiplicativeLSTM": Pair(multiplicative_lstm),
    "NAS": Pair(nas),
    "NBR": Pair(bistable),
    "PeepholeLSTM": Pair(peephole_lstm),
    "RAN": Pair(ran),
    "SCRN": Pair(scrn, {"context_size": H, "alpha": 0.7}, run=hidden_units_back),
    "SGRN": Pair(gates),
    "STAR": Pair(gates),
    "UGRNN": Pair(ugrnn),
    "UnICORNN": Pair(unicornn, {"dt": 0.4, "alpha": 0.8}, {"dt": 0.4, "alpha": 0.8}),
}


def their_names():
    return {name.lower(): name for name in torchrecurrent.cells.__all__ if name.endswith("Cell")}


def test_every_cell_that_both_have_is_compared():
    ours = {cell.__name__.removesuffix("Cell") for cell in catalogue.cells()}
    assert {name for name in ours if f"{name}Cell".lower() in their_names()} == PAIRS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_outputs_and_gradients_agree(name):
    pair = PAIRS[name]
    ours = laws.make(getattr(unfading, f"{name}Cell"), pair.options)
    theirs = getattr(torchrecurrent, their_names()[f"{name}Cell".lower()])(ours.input_size, H, **pair.their_options).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
        for key, tensor in pair.copied(ours).items():
            theirs.get_parameter(key).copy_(tensor)
    x = laws.random_input()
    results = []
    for run in (lambda x: ours.output(laws.run(ours, x)[0]), lambda x: pair.run(theirs, x)):
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        output.square().sum().backward()
        results += [(output.detach(), leaf.grad)]
    (output, gradient), (their_output, their_gradient) = results
    assert output.abs().max() > 0.01
    assert_close(output, their_output, **CLOSE)
    assert_close(gradient, their_gradient, **CLOSE)
