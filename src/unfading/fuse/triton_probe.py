"""Whether a GPU takes a kernel: found out once, on the smallest sequence, before any sequence is handed to it."""

from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unfading.cells.base import Cell
from unfading.fuse.lines import first_line
from unfading.fuse.place import halves
from unfading.fuse.plan import Plan, triton_kernel
from unfading.fuse.triton_kernel import TritonKernel, Way, precision

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
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} is older than what the kernels are written for, compute capability 8.0"
    reason = None
    for again in (False, True):
        if again:  # what else needs memory on chip may have it if no matrix stays there
            for name in kernel.about:
                cut = kernel.setting(name, precision(way, device))
                kernel.settings[name, precision(way, device)] = cut._replace(room=0)
        try:
            with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
                _run(kernel, found, device, way)
            return None
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton and the driver have many
            reason = f"the kernel does not run on {name}: {type(error).__name__}: {first_line(error)}"
    return reason


def _run(kernel: TritonKernel, found: Plan, device: torch.device, way: Way) -> None:
    """One row for one step, forward and back, with the gradients of a first layer that is read step by step."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    signature = found.signature
    inputs = [zeros(1, 1, 1, n) for n in signature.inputs]
    states = [zeros(1, 1, n) for n in signature.states]
    weights = [zeros(1, *shape) for shape in signature.weights]
    kernel.forward(inputs, states, weights, way, keep=False)
    trajectory, _, saved = kernel.forward(inputs, states, weights, way, keep=True)
    wanted = [True] * (len(inputs) + len(states) + len(weights))
    wanted[0] = not found.with_project
    nothing: list[torch.Tensor | None] = [None] * len(states)
    kernel.backward(([trajectory[0], *nothing[1:]], nothing), (inputs, states, weights), (trajectory, saved), way, wanted)
    torch.cuda.synchronize(device)
