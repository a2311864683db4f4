"""Whether a GPU takes a kernel: found out once, on the smallest sequence, before any sequence is handed to it."""

from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unfading.cells.base import Cell
from unfading.fuse.devices import halves
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import Plan, plan_or_raise, triton_kernel
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.kernel import TritonKernel, Way, precision
from unfading.fuse.triton.search import Choice, remember, tuned
from unfading.source_lines import first_line

# Per kernel, device and precision the reason why it does not run, None where it does. What has failed is not tried again.
_found: "WeakKeyDictionary[TritonKernel, dict[tuple[torch.device, str], str | None]]" = WeakKeyDictionary()


def triton_trouble(found: Plan, cell: Cell) -> str | None:
    """In words why the kernel of a plan does not run where the cell is; None where it does. T and B change nothing about it."""
    kernel = triton_kernel(found.key)
    device = next((parameter.device for parameter in cell.parameters()), None) or cell.initial_state(1)[0].device
    if device.type != "cuda":
        return None  # interpreted, where every shape runs
    known = _found.setdefault(kernel, {})
    way = Way(False, None, halves(device.type))
    key = (device, precision(way, device))
    if key not in known:
        known[key] = _tried(kernel, found, device, way)
    return known[key]


def _tried(kernel: TritonKernel, found: Plan, device: torch.device, way: Way) -> str | None:
    gpu, dots = torch.cuda.get_device_name(device), precision(way, device)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{gpu} is older than what the kernels are written for, compute capability 8.0"
    remember(kernel, dots, device)
    reason = None
    for again in (False, True):
        if again:  # what else needs memory on chip may have it if no matrix stays there
            for name in kernel.about:
                kernel.settings[name, dots] = kernel.setting(name, dots)._replace(room=0)
        try:
            with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
                trial = Trial(kernel, found, device, way, T=1, B=1)
                for name in kernel.about:
                    trial.run(name)
                torch.cuda.synchronize(device)
            return None
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton and the driver have many
            reason = f"the kernel does not run on {gpu}: {type(error).__name__}: {first_line(error)}"
    return reason


class Trial:
    """Loops over B rows of T zeros, with the gradients of a first layer that is read step by step."""

    def __init__(self, kernel: TritonKernel, found: Plan, device: torch.device, way: Way, *, T: int, B: int):
        signature, sizes = found.signature, {InputKind.SEQUENCE: (T, B), InputKind.SHARED: (T, 1), InputKind.CONSTANT: (1, B)}

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        inputs = [zeros(1, *sizes[kind], n) for kind, n in zip(signature.kinds, signature.inputs, strict=True)]
        states = [zeros(1, B, n) for n in signature.states]
        weights = [zeros(1, *shape) for shape in signature.weights]
        self.kernel, self.way, self.given = kernel, way, (inputs, states, weights)
        self.wanted = [True] * (len(inputs) + len(states) + len(weights))
        self.wanted[0] = not found.with_project

    def run(self, name: str) -> None:
        """The loop of a name; that back runs once train has."""
        if name == "infer":
            self.kernel.forward(*self.given, self.way, keep=False)
        elif name == "train":
            self.trajectory, _, self.saved = self.kernel.forward(*self.given, self.way, keep=True)
        else:
            nothing: list[torch.Tensor | None] = [None] * len(self.given[1])
            arriving = ([self.trajectory[0], *nothing[1:]], nothing)
            self.kernel.backward(arriving, self.given, (self.trajectory, self.saved), self.way, self.wanted)


def tune_cell(cell: Cell, *, T: int, B: int) -> list[Choice]:
    """Search for the fastest settings of a cell's loops, at the precision that holds now, and remember them."""
    found = plan_or_raise(cell)
    reason = triton_trouble(found, cell)
    if reason is not None:
        raise NotFusable(reason)
    kernel, device = triton_kernel(found.key), next(cell.parameters()).device
    way = Way(False, None, halves(device.type))
    trial = Trial(kernel, found, device, way, T=T, B=B)
    with torch.no_grad():
        return tuned(kernel, precision(way, device), trial.run, device)
