"""Test once, on the shortest sequence, whether a kernel runs on a GPU, before any sequence of the user is passed to it."""

from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unfading.cells.base import Cell
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import Plan, autocast_precision, plan_or_raise, triton_kernel
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.kernel import TritonKernel, precision
from unfading.fuse.triton.search import Choice, remember, tuned
from unfading.loop_options import LoopOptions
from unfading.source_lines import first_line

# For each kernel, device and precision the reason why it does not run; None where it does. A failure is not tried again.
_reasons: "WeakKeyDictionary[TritonKernel, dict[tuple[torch.device, str], str | None]]" = WeakKeyDictionary()


def triton_trouble(cell_plan: Plan, cell: Cell) -> str | None:
    """The reason why the kernel of a plan does not run on the cell's device; None where it does, for every T and B."""
    kernel = triton_kernel(cell_plan.key)
    device = next((parameter.device for parameter in cell.parameters()), None) or cell.initial_state(1)[0].device
    options = LoopOptions(autocast=autocast_precision(device.type))
    key = (device, precision(options, device))
    if device.type != "cuda":  # Triton's interpreter runs every kernel
        return None if kernel.fits(key[1], device) else kernel.whole_refused
    reasons = _reasons.setdefault(kernel, {})
    if key not in reasons:
        reasons[key] = _try(kernel, cell_plan, device, options)
    return reasons[key]


def _try(kernel: TritonKernel, cell_plan: Plan, device: torch.device, options: LoopOptions) -> str | None:
    gpu, dots = torch.cuda.get_device_name(device), precision(options, device)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{gpu} is too old: the kernels need compute capability 8.0 or higher"
    remember(kernel, dots, device)
    if not kernel.fits(dots, device):
        return kernel.whole_refused or f"its matrices do not fit on the multiprocessors of {gpu}"
    reason = None
    for again in (False, True):
        if again:  # with no matrix on chip, the rest of the kernel may fit there
            kernel.without_room(dots)
        try:
            with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
                trial = Trial(kernel, cell_plan, device, options, T=1, B=1)
                for name in kernel.shapes:
                    trial.run(name)
                torch.cuda.synchronize(device)
            return None
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton and the driver have many types
            reason = f"the kernel does not run on {gpu}: {type(error).__name__}: {first_line(error)}"
    return reason


class Trial:
    """Runs the loops of a kernel over B rows of T zeros, with the gradients that a first layer needs."""

    def __init__(self, kernel: TritonKernel, cell_plan: Plan, device: torch.device, options: LoopOptions, *, T: int, B: int):
        signature, sizes = (
            cell_plan.signature,
            {InputKind.SEQUENCE: (T, B), InputKind.SHARED: (T, 1), InputKind.CONSTANT: (1, B)},
        )

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        inputs = [zeros(1, *sizes[kind], n) for kind, n in zip(signature.kinds, signature.inputs, strict=True)]
        states = [zeros(1, B, n) for n in signature.states]
        weights = [zeros(1, *shape) for shape in signature.weights]
        self.kernel, self.options, self.arguments = kernel, options, (inputs, states, weights)
        self.wanted = [True] * (len(inputs) + len(states) + len(weights))
        self.wanted[0] = not cell_plan.with_project

    def run(self, name: str) -> None:
        """Run a loop by name; `back` needs `train` to have run."""
        if name == "infer":
            self.kernel.forward(*self.arguments, self.options, keep=False)
        elif name == "train":
            self.trajectory, _, self.saved = self.kernel.forward(*self.arguments, self.options, keep=True)
        else:
            nothing: list[torch.Tensor | None] = [None] * len(self.arguments[1])
            arriving = ([self.trajectory[0], *nothing[1:]], nothing)
            self.kernel.backward(arriving, self.arguments, (self.trajectory, self.saved), self.options, self.wanted)


def tune_cell(cell: Cell, *, T: int, B: int) -> list[Choice]:
    """Search for the fastest settings of a cell's loops, in the present precision, and store them."""
    cell_plan = plan_or_raise(cell)
    reason = triton_trouble(cell_plan, cell)
    if reason is not None:
        raise NotFusable(reason)
    kernel, device = triton_kernel(cell_plan.key), next(cell.parameters()).device
    options = LoopOptions(autocast=autocast_precision(device.type))
    trial = Trial(kernel, cell_plan, device, options, T=T, B=B)
    with torch.no_grad():
        return tuned(kernel, precision(options, device), trial.run, (1, B), device)
