"""The peers of a fused layer on a GPU: the same cell by other loops, cuDNN, and other kernels that are installed.

A peer runs in the precision of the case. For half precision cuDNN holds its weights in half precision, its fastest form, while
our layers keep float32 weights and run under autocast, as in training.
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
from unfading.bench.contenders import Contender, GraphReplay, OneByOne, Single, StackedModels, running_on, torch_equivalent
from unfading.bench.precision import HALVES
from unfading.layers.factory import Layer


class PeerUnavailable(Exception):
    """A peer that cannot run here; the message says why."""


LOOPS = {"eager loop": "reference", "graphed loop": "graph"}  # the same cell by other backends

# By name, a function that builds the peer. If it raises, the exception is the reason why the peer is not timed.
Peers = dict[str, Callable[[], Contender]]


def peers_of_layer(case: Case, layer: Layer, x: Tensor, exact: Contender) -> Peers:
    """The peers of a layer over x [T, B, I]; `exact` is the layer in float64."""
    context = running_on("fused", case.dtype, x.device)
    peers: Peers = {
        "fused, captured": partial(_captured, lambda: Single(layer, x, context, exact), x.device),
        **{name: partial(_loop, backend, case, layer, x, exact) for name, backend in LOOPS.items()},
    }
    equivalent = torch_equivalent(layer)
    lstm = equivalent if isinstance(equivalent, nn.LSTM) else nn.LSTM(case.input_size, case.H, case.num_layers).to(x.device)
    modules = [lstm] if equivalent is None or equivalent is lstm else [lstm, equivalent]
    for module in modules:
        name = f"cuDNN {type(module).__name__}"
        peers[name] = partial(_torch_module, module, type(module), case, x)
        peers[f"{name}, captured"] = partial(_captured, peers[name], x.device)
    if equivalent is lstm:
        peers["FlashRNN Triton"] = partial(_torch_module, lstm, FlashRNNTriton, case, x)
        peers["FlashRNN CUDA"] = partial(_torch_module, lstm, FlashRNN, case, x)
        peers["TorchRL"] = partial(_torch_module, lstm, TorchRLLSTM, case, x)
    if isinstance(equivalent, nn.GRU):
        peers["TorchRL"] = partial(_torch_module, equivalent, TorchRLGRU, case, x)
    return peers


def peers_of_fleet(case: Case, models: Sequence[Layer], x: Tensor) -> Peers:
    """The peers of a fleet over x [E, T, B, I]: the same captured, and its models one by one, with the same kernels."""
    context = running_on("fused", case.dtype, x.device)
    return {
        "fused, captured": partial(_captured, lambda: StackedModels(models, x, context), x.device),
        "one by one": lambda: OneByOne([Single(model, each, context) for model, each in zip(models, x, strict=True)]),
    }


def _captured(make: Callable[[], Contender], device: torch.device) -> Contender:
    if device.type != "cuda":
        raise PeerUnavailable("graphs are captured on a GPU")
    return GraphReplay(make())


def _loop(backend: str, case: Case, layer: Layer, x: Tensor, exact: Contender) -> Contender:
    if backend not in IMPLEMENTATIONS:
        raise PeerUnavailable(f"this version has no backend {backend!r}")
    return Single(layer, x, running_on(backend, case.dtype, x.device), exact)


def _torch_module(module: nn.RNNBase, subclass: type[nn.RNNBase], case: Case, x: Tensor) -> Contender:
    """A module of torch, or a subclass with other kernels, with the same weights in the precision of the case."""
    if issubclass(subclass, ExternalKernel):
        subclass.check(case)
    options = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    make: Any = subclass  # the base class takes other arguments
    peer = make(module.input_size, module.hidden_size, module.num_layers, **options)
    peer.load_state_dict(module.state_dict())
    dtype = HALVES.get(case.dtype, torch.float32)
    exact = Single(copy.deepcopy(module).double(), x.double())
    return Single(peer.to(x.device, dtype), x.to(dtype), exact=exact)


class ExternalKernel:
    """A module of torch that runs with the kernel of another package, which is imported when it runs."""

    package: str

    @classmethod
    def check(cls, case: Case) -> None:
        """Raise PeerUnavailable if it cannot run."""
        if find_spec(cls.package) is None:
            raise PeerUnavailable("not installed")
        if case.num_layers > 1:
            raise PeerUnavailable("has one layer")


class FlashRNN(ExternalKernel, nn.LSTM):
    """FlashRNN: torch's order of gates; the product with the input is computed by the caller."""

    package = "flashrnn"
    backend = "cuda_fused"

    def forward(self, x: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        from flashrnn import flashrnn

        own: Any = self  # torch declares no types for its weights
        gates = (4, 1, self.hidden_size)  # gates, heads, units
        Wx = linear(x.transpose(0, 1), own.weight_ih_l0, own.bias_ih_l0).unflatten(-1, gates)
        R, b = own.weight_hh_l0.reshape(*gates, self.hidden_size), own.bias_hh_l0.reshape(gates)
        dtype = str(x.dtype).removeprefix("torch.")
        states, last = flashrnn(Wx, R, b, function="lstm", backend=self.backend, dtype=dtype)
        return states[0, :, :, 0].transpose(0, 1), tuple(last[:, :, 0, 0].unsqueeze(1))


class FlashRNNTriton(FlashRNN):
    """FlashRNN with its Triton kernels."""

    backend = "triton_fused"


class TorchRL(ExternalKernel):
    """TorchRL: batch first, float32, a state to reset to at every step, and a mask of the resets."""

    package = "torchrl"

    @classmethod
    def check(cls, case: Case) -> None:
        super().check(case)
        if case.dtype in HALVES:
            raise PeerUnavailable("takes float32 tensors")

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
    """The LSTM of TorchRL."""


class TorchRLGRU(TorchRL, nn.GRU):  # type: ignore[misc]
    """The GRU of TorchRL."""
