"""Weights from and to torch.nn: nn.RNN is Elman, nn.LSTM is LSTM, nn.GRU is GRU(reset_after=True)."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.gru import GRUCell
from unfading.cells.lstm import LSTMCell
from unfading.layers.factory import Layer, layer
from unfading.layers.recurrent import Recurrent


@torch.no_grad()
def from_torch(module: nn.RNN | nn.LSTM | nn.GRU) -> Layer:
    """A layer that computes what `module` computes, with copies of its weights.

    torch.nn stores two biases per gate where one does; the copy holds their sum, except in the GRU's candidate.
    """
    options: dict[str, Any]
    if isinstance(module, nn.LSTM):
        if module.proj_size:
            raise ValueError(f"nn.LSTM with proj_size={module.proj_size} has no counterpart here; wanted proj_size=0.")
        kind, options = layer(LSTMCell), {}
    elif isinstance(module, nn.GRU):
        kind, options = layer(GRUCell), {"reset_after": True}
    elif isinstance(module, nn.RNN):
        kind, options = layer(ElmanCell), {"activation": module.nonlinearity}
    else:
        raise TypeError(f"from_torch takes nn.RNN, nn.LSTM or nn.GRU; got {type(module).__name__}.")
    made = kind(
        module.input_size,
        module.hidden_size,
        module.num_layers,
        module.bias,
        module.batch_first,
        module.dropout,
        module.bidirectional,
        device=cast(Tensor, module.weight_ih_l0).device,
        dtype=cast(Tensor, module.weight_ih_l0).dtype,
        **options,
    )
    for cell, suffix in zip(cast(list[Cell], made.cells), _suffixes(module), strict=True):
        cell = cast(ElmanCell | LSTMCell | GRUCell, cell)
        cell.from_input.weight.copy_(getattr(module, f"weight_ih_{suffix}"))
        cell.W_h.copy_(getattr(module, f"weight_hh_{suffix}"))
        if module.bias:
            own, second = getattr(module, f"bias_ih_{suffix}").clone(), getattr(module, f"bias_hh_{suffix}")
            if isinstance(cell, GRUCell):
                H = module.hidden_size
                own[: 2 * H] += second[: 2 * H]
                cast(Tensor, cell.c_n).copy_(second[2 * H :])
            else:
                own += second
            cell.from_input.bias.copy_(own)
    return made.train(module.training)


@torch.no_grad()
def to_torch(made: Recurrent) -> nn.RNN | nn.LSTM | nn.GRU:
    """The torch.nn module that computes what an Elman, LSTM or GRU(reset_after=True) layer does, with copies of its weights."""
    name = type(made).__name__
    if not isinstance(made, Layer) or made.cell not in (ElmanCell, LSTMCell, GRUCell):
        raise TypeError(f"to_torch takes an Elman, LSTM or GRU layer, which torch.nn knows; got {name}.")
    first: Any = made.cells[0]
    if isinstance(first, GRUCell) and not first.reset_after:
        raise ValueError("nn.GRU resets after the product; got a GRU with reset_after=False, which torch.nn does not have.")
    if isinstance(first, ElmanCell) and first.activation not in ("tanh", "relu"):
        raise ValueError(f"nn.RNN knows tanh and relu; got Elman with activation={first.activation!r}.")
    if made.learned_state is not None:
        raise ValueError(f"torch.nn has no learnt initial state; got {name} with learn_initial_state=True.")
    if made.recurrent_dropout or made.zoneout:
        raise ValueError(f"torch.nn has neither recurrent dropout nor zoneout; got {name} with one of them above 0.")
    if made.options.get("normalise"):
        raise ValueError(f"torch.nn has no layer norm inside a step; got {name} with normalise=True.")
    modules: dict[type[Cell], Any] = {ElmanCell: nn.RNN, LSTMCell: nn.LSTM, GRUCell: nn.GRU}
    options = {"nonlinearity": first.activation} if isinstance(first, ElmanCell) else {}
    bias = first.from_input.bias is not None
    module = modules[made.cell](
        made.input_size,
        made.hidden_size,
        made.num_layers,
        bias=bias,
        batch_first=made.batch_first,
        dropout=made.dropout,
        bidirectional=made.bidirectional,
        device=first.W_h.device,
        dtype=first.W_h.dtype,
        **options,
    )
    for cell, suffix in zip(cast(list[Any], made.cells), _suffixes(module), strict=True):
        getattr(module, f"weight_ih_{suffix}").copy_(cell.from_input.weight)
        getattr(module, f"weight_hh_{suffix}").copy_(cell.W_h)
        if bias:
            getattr(module, f"bias_ih_{suffix}").copy_(cell.from_input.bias)
            second = getattr(module, f"bias_hh_{suffix}").zero_()
            if isinstance(cell, GRUCell):
                second[2 * made.hidden_size :] = cell.c_n
    return cast(nn.RNN | nn.LSTM | nn.GRU, module.train(made.training))


def _suffixes(module: nn.RNNBase) -> list[str]:
    """torch.nn's names for each layer and direction, in the order of `Recurrent.cells`."""
    directions = ["", "_reverse"] if module.bidirectional else [""]
    return [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]
