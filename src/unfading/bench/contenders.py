"""What is timed: one pass, or both passes, of a module over one batch, ours or another's; or of many models at once.

    forward    without a graph
    both       forward and backward, with all weight gradients

On a GPU the loss is the mean square of the last step's output, and a contender also tells what it computes under a random
cotangent of all steps, so that it can be held against its own form in float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from unfading.backends.choose import use_backend
from unfading.bench.agreement import everything, furthest, random_like
from unfading.bench.cases import Case, Dtype, cell_classes
from unfading.bench.precision import casting
from unfading.fuse.fused import refusal
from unfading.layers.convert import to_torch
from unfading.layers.factory import Layer, layer
from unfading.layers.recurrent import Recurrent

Call = Callable[[], object]
Around = Callable[[], AbstractContextManager[object]]


def built(case: Case) -> Layer:
    """The layer of a case, with weights from torch's own generator."""
    variant = case.variant
    make = layer(cell_classes()[variant.cell])
    made = make(case.input_size, case.H, backend="fused", **variant.options(case.T, case.H))
    return scaled(made, variant.scale(case.T))


@torch.no_grad()
def scaled(made: Layer, scale: float) -> Layer:
    """The layer, its parameters multiplied in place."""
    for parameter in made.parameters():
        parameter.mul_(scale)
    return made


def forward(module: nn.Module, x: Tensor) -> Call:
    @torch.no_grad()
    def run() -> None:
        module(x)

    return run


def both(module: nn.Module, x: Tensor, pull: Callable[[Tensor], object], **arguments: object) -> Call:
    """`pull` takes the output and runs the backward pass."""
    parameters = list(module.parameters())

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        output, _ = module(x, **arguments)
        pull(output)

    return run


def nearest(made: Recurrent) -> nn.RNNBase | None:
    """torch.nn's module with the same weights, where there is one that computes the same."""
    try:
        return to_torch(made)
    except (TypeError, ValueError):
        return None


def loss(output: Tensor) -> Tensor:
    return output[-1].square().mean()


def by(backend: str, dtype: Dtype, device: torch.device) -> Around:
    """Where layers of ours run: by this backend, under autocast if the case asks for it."""

    @contextmanager
    def around() -> Iterator[None]:
        with use_backend(backend), casting(dtype, device):
            yield

    return around


class Contender(ABC):
    """One way to do the work of a case on a GPU; `exact` is the same in float64, where there is such."""

    exact: "Contender | None" = None

    @abstractmethod
    def forward(self) -> None: ...

    @abstractmethod
    def both(self) -> None: ...

    @abstractmethod
    def computed(self) -> dict[str, Tensor]:
        """Outputs and gradients, by name."""

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """What is computed, once for all who are held against it."""
        return self.computed()

    def error(self) -> float | None:
        """How far from what is right the furthest result is; None where nothing tells."""
        return None if self.exact is None else furthest(self.computed(), self.exact.truth)


class Inside(nn.Module):
    """A module whose forward pass runs inside of a context."""

    def __init__(self, module: nn.Module, around: Around):
        super().__init__()
        self.module, self.around = module, around

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        with self.around():
            return self.module(x)


class Single(Contender):
    """A module over one batch [T, B, I]."""

    def __init__(self, module: nn.Module, x: Tensor, around: Around = nullcontext, exact: Contender | None = None):
        self.inside, self.x, self.exact = Inside(module, around), x, exact
        self._forward = forward(self.inside, x)
        self._both = both(self.inside, x, lambda output: loss(output).backward())

    def forward(self) -> None:
        self._forward()

    def both(self) -> None:
        self._both()

    def computed(self) -> dict[str, Tensor]:
        return everything(self.inside, self.x)


class Together(Contender):
    """Models of one shape in one pass, by `torch.func`: x is [E, T, B, I]."""

    def __init__(self, models: Sequence[Layer], x: Tensor, around: Around, exact: Contender | None = None):
        self.inside, self.x, self.exact = Inside(models[0], around), x, exact
        with around():
            for cell in models[0].runners:
                refusal(cell)  # compiles it now: inside of `vmap` its parameters are not themselves
        trained, held = stack_module_state(list(models))
        # Cut from their graph: `grad` makes one of its own, and would keep another around it.
        self.trained = {f"module.{name}": part.detach() for name, part in trained.items()}
        self.held = {f"module.{name}": part for name, part in held.items()}

    def _output(self, trained: dict[str, Tensor], held: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.inside, trained | held, (x,))[0]

    def _outputs(self) -> Tensor:
        with torch.no_grad():
            return vmap(self._output)(self.trained, self.held, self.x)

    def _gradients(self, objective: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return vmap(grad(lambda *arguments: objective(self._output(*arguments))))(self.trained, self.held, self.x)

    def forward(self) -> None:
        self._outputs()

    def both(self) -> None:
        self._gradients(loss)

    def computed(self) -> dict[str, Tensor]:
        output = self._outputs()
        cotangent = random_like(output[0], torch.Generator().manual_seed(0))
        gradients = self._gradients(lambda output: (output * cotangent).sum())
        return {"the output": output} | {f"the gradient of {name}": part for name, part in gradients.items()}


class Replayed(Contender):
    """Another contender's work, captured as a CUDA graph and replayed: what `train` does, and what the GPU alone takes."""

    def __init__(self, inner: Contender):
        self.inner, self.exact = inner, inner.exact
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def forward(self) -> None:
        self._play("forward", self.inner.forward)

    def both(self) -> None:
        self._play("both", self.inner.both)

    def computed(self) -> dict[str, Tensor]:
        return self.inner.computed()

    def _play(self, name: str, call: Call) -> None:
        if name not in self.graphs:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # until all that is made once is made
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            self.graphs[name] = graph
        self.graphs[name].replay()


class OneByOne(Contender):
    """Several, one after the other."""

    def __init__(self, members: Sequence[Contender]):
        self.members = members

    def forward(self) -> None:
        for member in self.members:
            member.forward()

    def both(self) -> None:
        for member in self.members:
            member.both()

    def computed(self) -> dict[str, Tensor]:
        made = [member.computed() for member in self.members]
        return {name: torch.stack([one[name] for one in made]) for name in made[0]}
