"""What is timed: the forward pass, or both passes, of a module over one batch, ours or another one, or of many models at once.

    forward    without a graph
    both       forward and backward, with all weight gradients

On a GPU the loss is the mean square of the last step's output. A contender also gives its results under a random cotangent of
all steps, so that they can be compared with those of the same module in float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from unfading.backends.choose import use_backend
from unfading.bench.agreement import all_results, largest_error, random_like
from unfading.bench.cases import Case, Dtype, cell_classes
from unfading.bench.precision import autocast
from unfading.fuse.fused import refusal
from unfading.layers.convert import to_torch
from unfading.layers.factory import Layer, layer
from unfading.layers.recurrent import Recurrent

Call = Callable[[], object]
Context = Callable[[], AbstractContextManager[object]]


def build_layer(case: Case) -> Layer:
    """The layer of a case, with weights from torch's global generator."""
    variant = case.variant
    layer_class = layer(cell_classes()[variant.cell])
    options = variant.options(case.T, case.H)
    built = layer_class(case.input_size, case.H, case.num_layers, backend="fused", **options)
    return scale_parameters(built, variant.scale(case.T))


@torch.no_grad()
def scale_parameters(layer: Layer, scale: float) -> Layer:
    """Multiply the parameters in place; returns the layer."""
    for parameter in layer.parameters():
        parameter.mul_(scale)
    return layer


def forward_pass(module: nn.Module, x: Tensor) -> Call:
    """A call that runs the forward pass without a graph."""

    @torch.no_grad()
    def run() -> None:
        module(x)

    return run


def both_passes(module: nn.Module, x: Tensor, backward: Callable[[Tensor], object], **arguments: object) -> Call:
    """A call that runs both passes. `backward` takes the output and runs the backward pass."""
    parameters = list(module.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        output, _ = module(x, **arguments)
        backward(output)

    return run


def torch_equivalent(layer: Recurrent) -> nn.RNNBase | None:
    """torch.nn's module with the same weights, if there is one that computes the same."""
    try:
        return to_torch(layer)
    except (TypeError, ValueError):
        return None


def loss(output: Tensor) -> Tensor:
    return output[-1].square().mean()


def running_on(backend: str, dtype: Dtype, device: torch.device) -> Context:
    """A context in which our layers use this backend, under autocast for half precision."""

    @contextmanager
    def context() -> Iterator[None]:
        with use_backend(backend), autocast(dtype, device):
            yield

    return context


class Contender(ABC):
    """One implementation of a case on a GPU; `exact` is the same in float64, if there is one."""

    exact: "Contender | None" = None

    @abstractmethod
    def forward(self) -> None: ...

    @abstractmethod
    def both(self) -> None: ...

    @abstractmethod
    def results(self) -> dict[str, Tensor]:
        """Outputs and gradients, by name."""

    @cached_property
    def known_results(self) -> dict[str, Tensor]:
        """The results, computed once for all contenders that are compared with them."""
        return self.results()

    def error(self) -> float | None:
        """The largest relative error of a result; None if it cannot be computed."""
        return None if self.exact is None else largest_error(self.results(), self.exact.known_results)


class InContext(nn.Module):
    """A module whose forward pass runs inside a context."""

    def __init__(self, module: nn.Module, context: Context):
        super().__init__()
        self.module, self.context = module, context

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        with self.context():
            return self.module(x)


class Single(Contender):
    """A module over one batch [T, B, I]."""

    def __init__(self, module: nn.Module, x: Tensor, context: Context = nullcontext, exact: Contender | None = None):
        self.module, self.x, self.exact = InContext(module, context), x, exact
        self._forward = forward_pass(self.module, x)
        self._both = both_passes(self.module, x, lambda output: loss(output).backward())

    def forward(self) -> None:
        self._forward()

    def both(self) -> None:
        self._both()

    def results(self) -> dict[str, Tensor]:
        return all_results(self.module, self.x)


class StackedModels(Contender):
    """Models of one shape in one pass, with `torch.func`: x is [E, T, B, I]."""

    def __init__(self, models: Sequence[Layer], x: Tensor, context: Context, exact: Contender | None = None):
        self.module, self.x, self.exact = InContext(models[0], context), x, exact
        with context():
            for cell in models[0].runners:
                refusal(cell)  # compiles it now, since inside `vmap` its parameters are wrapped
        parameters, buffers = stack_module_state(list(models))
        # Detached: `grad` builds a graph of its own, which would otherwise keep another one alive.
        self.parameters = {f"module.{name}": part.detach() for name, part in parameters.items()}
        self.buffers = {f"module.{name}": part for name, part in buffers.items()}

    def _output(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.module, parameters | buffers, (x,))[0]

    def _outputs(self) -> Tensor:
        with torch.no_grad():
            return vmap(self._output)(self.parameters, self.buffers, self.x)

    def _gradients(self, objective: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return vmap(grad(lambda *arguments: objective(self._output(*arguments))))(self.parameters, self.buffers, self.x)

    def forward(self) -> None:
        self._outputs()

    def both(self) -> None:
        self._gradients(loss)

    def results(self) -> dict[str, Tensor]:
        output = self._outputs()
        cotangent = random_like(output[0], torch.Generator().manual_seed(0))
        gradients = self._gradients(lambda output: (output * cotangent).sum())
        return {"the output": output} | {f"the gradient of {name}": part for name, part in gradients.items()}


class GraphReplay(Contender):
    """Another contender, captured as a CUDA graph and replayed as in `train`: the time of the GPU alone."""

    def __init__(self, inner: Contender):
        self.inner, self.exact = inner, inner.exact
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def forward(self) -> None:
        self._replay("forward", self.inner.forward)

    def both(self) -> None:
        self._replay("both", self.inner.both)

    def results(self) -> dict[str, Tensor]:
        return self.inner.results()

    def _replay(self, name: str, call: Call) -> None:
        if name not in self.graphs:
            side_stream = torch.cuda.Stream()
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):  # warm up: buffers and kernels are created in the first calls
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(side_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            self.graphs[name] = graph
        self.graphs[name].replay()


class OneByOne(Contender):
    """Several contenders, one after the other."""

    def __init__(self, contenders: Sequence[Contender]):
        self.contenders = contenders

    def forward(self) -> None:
        for contender in self.contenders:
            contender.forward()

    def both(self) -> None:
        for contender in self.contenders:
            contender.both()

    def results(self) -> dict[str, Tensor]:
        results = [contender.results() for contender in self.contenders]
        return {name: torch.stack([each[name] for each in results]) for name in results[0]}
