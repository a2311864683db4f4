"""Whether a GPU takes a kernel: found out once, on the smallest sequence, before any sequence is handed to it."""

from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unfading.fuse.lines import first_line
from unfading.fuse.trace import Signature
from unfading.fuse.triton_kernel import TritonKernel, Way

# Per kernel, device and precision the reason why it does not run, None where it does. What has failed is not tried again.
_found: "WeakKeyDictionary[TritonKernel, dict[tuple[torch.device, str], str | None]]" = WeakKeyDictionary()


def triton_trouble(kernel: TritonKernel, signature: Signature, device: torch.device) -> str | None:
    """In words why the kernel does not run on the device; None where it does. T and B change nothing about it."""
    if device.type != "cuda":
        return None  # interpreted, where every shape runs
    known = _found.setdefault(kernel, {})
    key = (device, torch.backends.cuda.matmul.fp32_precision)
    if key not in known:
        known[key] = _tried(kernel, signature, device)
    return known[key]


def _tried(kernel: TritonKernel, signature: Signature, device: torch.device) -> str | None:
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{name} is older than what the kernels are written for, compute capability 8.0"
    try:
        with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
            _run(kernel, signature, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the driver have many
        return f"the kernel does not run on {name}: {type(error).__name__}: {first_line(error)}"
    return None


def _run(kernel: TritonKernel, signature: Signature, device: torch.device) -> None:
    """One row for one step, forward and back."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    inputs = [zeros(1, 1, 1, n) for n in signature.inputs]
    states = [zeros(1, 1, n) for n in signature.states]
    weights = [zeros(1, *shape) for shape in signature.weights]
    way = Way(False, None)
    kernel.forward(inputs, states, weights, way, keep=False)
    trajectory, final, saved = kernel.forward(inputs, states, weights, way, keep=True)
    wanted = [True] * (len(inputs) + len(states) + len(weights))
    kernel.backward((trajectory, final), (inputs, states, weights), (trajectory, saved), way, wanted)
    torch.cuda.synchronize(device)
