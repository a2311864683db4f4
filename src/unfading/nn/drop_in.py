"""torch.nn's recurrent layers with their loop over time on the kernels of this library.

Each class is torch.nn's own class with another `forward`. Parameters, attributes, initial values, state_dict, constructor and
representation are therefore those of torch.nn. Before a run the layer's tensors are put into the cells of a `Recurrent`, which
does the work. They are read by their names, so that a parametrisation or a pruning mask takes part.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from unfading.cells.base import Activation
from unfading.layers.recurrent import Recurrent
from unfading.layers.scripting import NotScriptable
from unfading.nn.torch_cells import TorchGRUCell, TorchLSTMCell, TorchRNNCell, TorchTensors


class TorchLayer(NotScriptable, nn.RNNBase):
    """The common part of the three layers: the stack that runs, and the tensors in it."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._build()

    def make_cell(self, input_size: int) -> TorchTensors:
        """A cell of this layer for an input size."""
        raise NotImplementedError

    def _build(self) -> None:
        stack = Recurrent(
            self.make_cell, self.input_size, self.num_layers, bidirectional=bool(self.bidirectional), device="meta"
        )
        vars(self)["_stack"] = stack  # not a submodule, which would add names to the state_dict

    def forward(self, input: Any, hx: Any = None, *, resets: Tensor | None = None) -> Any:
        """Run over the input; return the output and the final state, as torch.nn does.

        Args:
            input: [T, B, I] ([B, T, I] with batch_first), [T, I] unbatched, or a PackedSequence.
            hx: the state before the first step, a pair (h, c) for an LSTM and a tensor h for the others; None for zeros.
            resets: bool [T, B] ([B, T] with batch_first, [T] unbatched): the state is set to zero before these steps.
        """
        data = input.data if isinstance(input, PackedSequence) else input
        if isinstance(data, Tensor) and 0 in data.shape:
            return super().forward(input, hx)
        pair, stack = self.mode == "LSTM", cast(Recurrent, vars(self)["_stack"])
        for cell, names in zip(cast(list[TorchTensors], stack.cells), self._all_weights, strict=True):
            cell.hold([getattr(self, name) for name in names])
        stack.training, stack.batch_first, stack.dropout = self.training, self.batch_first, self.dropout
        try:
            output, state = stack(input, None if hx is None else tuple(hx) if pair else (hx,), resets=resets)
        except (TypeError, ValueError):
            super().forward(input, hx)  # raises the error of torch.nn, if that refuses the arguments too
            raise
        return output, tuple(state) if pair else state[0]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_stack"]  # it holds the tensors of the last run
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica._build()
        return replica


class LSTM(TorchLayer, nn.LSTM):
    """torch.nn.LSTM on the kernels of this library.

    Arguments, attributes, names of parameters, initial values and the state, a pair (h, c), are those of torch.nn.
    """

    def make_cell(self, input_size: int) -> TorchLSTMCell:
        return TorchLSTMCell(input_size, self.hidden_size, 4, bias=self.bias, proj_size=self.proj_size)


class GRU(TorchLayer, nn.GRU):
    """torch.nn.GRU on the kernels of this library.

    Arguments, attributes, names of parameters, initial values and the state, a tensor h, are those of torch.nn.
    """

    def make_cell(self, input_size: int) -> TorchGRUCell:
        return TorchGRUCell(input_size, self.hidden_size, 3, bias=self.bias)


class RNN(TorchLayer, nn.RNN):
    """torch.nn.RNN on the kernels of this library.

    Arguments, attributes, names of parameters, initial values and the state, a tensor h, are those of torch.nn.
    """

    def make_cell(self, input_size: int) -> TorchRNNCell:
        return TorchRNNCell(input_size, self.hidden_size, 1, bias=self.bias, nonlinearity=cast(Activation, self.nonlinearity))
