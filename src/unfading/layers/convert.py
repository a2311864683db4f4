"""Convert layers from and to torch.nn: nn.RNN is Elman, nn.LSTM is LSTM, nn.GRU is GRU(reset_after=True)."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.elman import ElmanCell
from unfading.cells.gru import GRUCell
from unfading.cells.lstm import LSTMCell
from unfading.cells.matrix import BlockDiagonal
from unfading.layers.factory import Layer
from unfading.layers.library import GRU, LSTM, Elman
from unfading.layers.recurrent import Recurrent


@torch.no_grad()
def from_torch(module: nn.RNN | nn.LSTM | nn.GRU) -> Layer:
    """A layer that computes the same function as `module`, with copies of its weights.

    torch.nn stores two biases per gate although one is enough. The layer has their sum, except in the GRU's candidate.
    """
    kind: type[Layer]
    options: dict[str, Any]
    if isinstance(module, nn.LSTM):
        if module.proj_size:
            raise ValueError(f"nn.LSTM with proj_size={module.proj_size} has no counterpart here; only proj_size=0 has one.")
        kind, options = LSTM, {}
    elif isinstance(module, nn.GRU):
        kind, options = GRU, {"reset_after": True}
    elif isinstance(module, nn.RNN):
        kind, options = Elman, {"activation": module.nonlinearity}
    else:
        raise TypeError(f"from_torch takes nn.RNN, nn.LSTM or nn.GRU; got {type(module).__name__}.")
    converted = kind(
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
    for cell, suffix in zip(cast(list[Cell], converted.cells), _suffixes(module), strict=True):
        cell = cast(ElmanCell | LSTMCell | GRUCell, cell)
        cell.from_input.weight.copy_(getattr(module, f"weight_ih_{suffix}"))
        cell.W_h.copy_(getattr(module, f"weight_hh_{suffix}"))
        if module.bias:
            bias, second = getattr(module, f"bias_ih_{suffix}").clone(), getattr(module, f"bias_hh_{suffix}")
            if isinstance(cell, GRUCell):
                H = module.hidden_size
                bias[: 2 * H] += second[: 2 * H]
                cast(Tensor, cell.c_n).copy_(second[2 * H :])
            else:
                bias += second
            cell.from_input.bias.copy_(bias)
    return converted.train(module.training)


@torch.no_grad()
def to_torch(layer: Recurrent) -> nn.RNN | nn.LSTM | nn.GRU:
    """The torch.nn module that computes the same function as an Elman, LSTM or GRU(reset_after=True) layer.

    The weights are copied. With heads, the weights between groups of units, which torch.nn has too, are zero.
    """
    name = type(layer).__name__
    if not isinstance(layer, Layer) or layer.cell not in (ElmanCell, LSTMCell, GRUCell):
        raise TypeError(f"to_torch takes an Elman, LSTM or GRU layer, which torch.nn has too; got {name}.")
    first: Any = layer.cells[0]
    if isinstance(first, GRUCell) and not first.reset_after:
        raise ValueError("nn.GRU resets after the product; got a GRU with reset_after=False. torch.nn has no such form.")
    if isinstance(first, ElmanCell) and first.activation not in ("tanh", "relu"):
        raise ValueError(f"nn.RNN has the activations tanh and relu; got Elman with activation={first.activation!r}.")
    if layer.learned_state is not None:
        raise ValueError(f"torch.nn has no learned initial state; got {name} with learn_initial_state=True.")
    if layer.recurrent_dropout or layer.zoneout:
        raise ValueError(f"torch.nn has neither recurrent dropout nor zoneout; got {name} with one of them above 0.")
    if layer.options.get("normalise"):
        raise ValueError(f"torch.nn has no layer norm inside a step; got {name} with normalise=True.")
    modules: dict[type[Cell], Any] = {ElmanCell: nn.RNN, LSTMCell: nn.LSTM, GRUCell: nn.GRU}
    options = {"nonlinearity": first.activation} if isinstance(first, ElmanCell) else {}
    bias = first.from_input.bias is not None
    module = modules[layer.cell](
        layer.input_size,
        layer.hidden_size,
        layer.num_layers,
        bias=bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        device=first.W_h.device,
        dtype=first.W_h.dtype,
        **options,
    )
    for cell, suffix in zip(cast(list[Any], layer.cells), _suffixes(module), strict=True):
        getattr(module, f"weight_ih_{suffix}").copy_(cell.from_input.weight)
        getattr(module, f"weight_hh_{suffix}").copy_(BlockDiagonal(cell.W_h, layer.hidden_size // cell.W_h.shape[1]).dense())
        if bias:
            getattr(module, f"bias_ih_{suffix}").copy_(cell.from_input.bias)
            second = getattr(module, f"bias_hh_{suffix}").zero_()
            if isinstance(cell, GRUCell):
                second[2 * layer.hidden_size :] = cell.c_n
    return cast(nn.RNN | nn.LSTM | nn.GRU, module.train(layer.training))


def _suffixes(module: nn.RNNBase) -> list[str]:
    """The endings of torch.nn's parameter names for each layer and direction, in the order of `Recurrent.cells`."""
    directions = ["", "_reverse"] if module.bidirectional else [""]
    return [f"l{depth}{direction}" for depth in range(module.num_layers) for direction in directions]
