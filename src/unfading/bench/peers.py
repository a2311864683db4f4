"""Who runs beside a fused layer on a GPU: the same cell by other loops, cuDNN, and other people's kernels where installed.

A peer's own precision is that of the case. cuDNN holds its weights in half precision where the case is: that is its fastest
form; our layers keep float32 weights and run under autocast, as in training.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from unfading.backends.choose import IMPLEMENTATIONS
from unfading.bench.cases import Case
from unfading.bench.contenders import Contender, OneByOne, Replayed, Single, Together, by, nearest
from unfading.bench.precision import HALVES
from unfading.layers.factory import Layer


class Absent(Exception):
    """A peer that cannot run here; the text says why."""


# By name what makes it; what is raised, Absent or another, is the reason why it is not timed.
Peers = dict[str, Callable[[], Contender]]


def peers_of_layer(case: Case, made: Layer, x: Tensor, exact: Contender) -> Peers:
    """Who runs beside a layer over x [T, B, I]; `exact` is the layer in float64."""
    around = by("fused", case.dtype, x.device)
    found: Peers = {
        "fused, captured": partial(_captured, lambda: Single(made, x, around, exact), x.device),
        "eager loop": partial(_loop, "reference", case, made, x, exact),
        "graphed loop": partial(_loop, "graph", case, made, x, exact),
    }
    same = nearest(made)
    lstm = same if isinstance(same, nn.LSTM) else nn.LSTM(case.input_size, case.H).to(x.device)
    rivals = [lstm] if same is None or same is lstm else [lstm, same]
    for rival in rivals:
        name = f"cuDNN {type(rival).__name__}"
        found[name] = partial(_other, rival, type(rival), case, x)
        found[f"{name}, captured"] = partial(_captured, found[name], x.device)
    if same is lstm:
        found["FlashRNN Triton"] = partial(_other, lstm, FlashRNNTriton, case, x)
        found["FlashRNN CUDA"] = partial(_other, lstm, FlashRNN, case, x)
        found["TorchRL"] = partial(_other, lstm, TorchRLLSTM, case, x)
    if isinstance(same, nn.GRU):
        found["TorchRL"] = partial(_other, same, TorchRLGRU, case, x)
    return found


def peers_of_fleet(case: Case, models: Sequence[Layer], x: Tensor) -> Peers:
    """Who runs beside a fleet over x [E, T, B, I]: the same captured, and the same models by the same kernels, one by one."""
    around = by("fused", case.dtype, x.device)
    return {
        "fused, captured": partial(_captured, lambda: Together(models, x, around), x.device),
        "one by one": lambda: OneByOne([Single(model, one, around) for model, one in zip(models, x, strict=True)]),
    }


def _captured(make: Callable[[], Contender], device: torch.device) -> Contender:
    if device.type != "cuda":
        raise Absent("graphs are captured on a GPU")
    return Replayed(make())


def _loop(backend: str, case: Case, made: Layer, x: Tensor, exact: Contender) -> Contender:
    if backend not in IMPLEMENTATIONS:
        raise Absent(f"this version has no backend {backend!r}")
    return Single(made, x, by(backend, case.dtype, x.device), exact)


def _other(same: nn.RNNBase, form: type[nn.RNNBase], case: Case, x: Tensor) -> Contender:
    """A form of torch's module with its weights, in the precision of the case, beside that module in float64."""
    if issubclass(form, Foreign):
        form.check(case)
    options = {"nonlinearity": same.nonlinearity} if isinstance(same, nn.RNN) else {}
    make: Any = form  # the base class takes other arguments
    made = make(same.input_size, same.hidden_size, **options)
    made.load_state_dict(same.state_dict())
    dtype = HALVES.get(case.dtype, torch.float32)
    exact = Single(copy.deepcopy(same).double(), x.double())
    return Single(made.to(x.device, dtype), x.to(dtype), exact=exact)


class Foreign:
    """Someone else's kernel in the place of torch's own; whatever is imported is imported where it runs."""

    package: str

    @classmethod
    def check(cls, case: Case) -> None:
        """Raise Absent where it cannot run."""
        if find_spec(cls.package) is None:
            raise Absent("not installed")


class FlashRNN(Foreign, nn.LSTM):
    """FlashRNN has torch's order of gates, and leaves the input's product to its user."""

    package = "flashrnn"
    backend = "cuda_fused"

    def forward(self, x: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        from flashrnn import flashrnn

        own: Any = self  # torch gives no types to its weights
        gates = (4, 1, self.hidden_size)  # gates, heads, units
        Wx = linear(x.transpose(0, 1), own.weight_ih_l0, own.bias_ih_l0).unflatten(-1, gates)
        R, b = own.weight_hh_l0.reshape(*gates, self.hidden_size), own.bias_hh_l0.reshape(gates)
        dtype = str(x.dtype).removeprefix("torch.")
        states, last = flashrnn(Wx, R, b, function="lstm", backend=self.backend, dtype=dtype)
        return states[0, :, :, 0].transpose(0, 1), tuple(last[:, :, 0, 0].unsqueeze(1))


class FlashRNNTriton(FlashRNN):
    """The same by its kernels in Triton."""

    backend = "triton_fused"


class TorchRL(Foreign):
    """TorchRL's kernels take rows first, float32 tensors, the state to reset to at every step, and where to."""

    package = "torchrl"

    @classmethod
    def check(cls, case: Case) -> None:
        super().check(case)
        if case.dtype in HALVES:
            raise Absent("takes float32 tensors")

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        from torchrl.modules.tensordict_module import _rnn_triton

        own: Any = self
        T, B, _ = x.shape
        start, resets = x.new_zeros(B, T, own.hidden_size), x.new_zeros(B, T, dtype=torch.bool)
        weights = (own.weight_ih_l0, own.weight_hh_l0, own.bias_ih_l0, own.bias_hh_l0)
        precision = torch.backends.cuda.matmul.fp32_precision
        rows = x.transpose(0, 1).contiguous()
        if isinstance(self, nn.LSTM):
            output, _, *final = _rnn_triton.lstm_triton(rows, start, start, *weights, resets, input_precision=precision)
        else:
            output, *final = _rnn_triton.gru_triton(rows, start, *weights, resets, input_precision=precision)
        return output.transpose(0, 1), tuple(part.unsqueeze(0) for part in final)


class TorchRLLSTM(TorchRL, nn.LSTM):  # type: ignore[misc]
    """Its LSTM."""


class TorchRLGRU(TorchRL, nn.GRU):  # type: ignore[misc]
    """Its GRU."""
