"""The layers of a stack side by side on a GPU, each on another chunk of time: whether and when a stack runs in this way.

One layer with a few hundred rows occupies a small part of a GPU. Chunk c of layer l reads chunk c of layer l - 1 and the state
after chunk c - 1 of layer l, so the chunks with the same l + c, a diagonal, can run at the same time, and backward likewise:

    layer 2                  (2, 0)  (2, 1)  (2, 2)
    layer 1          (1, 0)  (1, 1)  (1, 2)
    layer 0  (0, 0)  (0, 1)  (0, 2)

The host needs longer to launch twelve layers in sixteen chunks than a GPU needs to run the layers one after the other. So a
stack runs in this way while a CUDA graph is captured, whose replay needs no host. Kernels cannot be compiled during a capture:
a stack is rehearsed in the warm-up before it, which torch asks to have on a stream other than the default one.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional

from unfading.cells.base import Cell
from unfading.cells.wrap import outputs_first_part
from unfading.fuse.contents import HOOKS
from unfading.fuse.fused import any_wrapped, bind_weights
from unfading.fuse.ir.program import InputKind
from unfading.fuse.locality import locality
from unfading.fuse.plan import Plan, autocast_precision, float32_dots, triton_kernel
from unfading.fuse.triton.kernel import TritonKernel, gpu
from unfading.fuse.triton.launch_settings import LaunchSettings
from unfading.fuse.wavefront_run import ForeignTensor, Stack, WavefrontLoop, WavefrontRun, WaveLayer
from unfading.loop_options import LoopOptions

CHUNKS = 16  # of a long sequence
LEAST_STEPS = 16  # of a chunk
GAIN = 2  # at least, of the estimated time of a step: chunks are projected one by one, and the last layers begin later
REHEARSALS = 64  # at most; batches whose size never repeats are not captured


def wavefront(
    cells: Sequence[Cell],
    plans: Sequence[Plan],
    x: Tensor,
    states: Sequence[Any],
    dropout: float,
    options: LoopOptions,
    resets: Tensor | None = None,
) -> tuple[Tensor, list[Any]] | None:
    """The output of the last layer and the final states of all layers; None where the layers run one after the other.

    Args:
        cells: one for each layer.
        plans: the present plans of the cells.
        states: before the first step, one for each layer.
        dropout: the probability of dropping an entry between two layers, 0 outside training.
        resets: [T, B], of cells that read them.
    """
    T, B = x.shape[:2]
    if T < 2 * LEAST_STEPS or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    dots = autocast_precision(kind) or float32_dots(x.device)
    layers = _layers(cells, plans, (T, B), x.device, dots)
    if layers is None:
        return None
    tensors, sizes = _tensors(layers, states, casting=autocast is not None)
    if any_wrapped((x, *tensors)) or any(map(is_functorch_wrapped_tensor, (x, *tensors))):
        return None
    # The hook of a parameter that no step reads would be called with None.
    if any(tensor._backward_hooks for tensor in tensors):
        return None
    steps = max(LEAST_STEPS, -(-T // CHUNKS))
    bounds = list(pairwise([*range(0, T, steps), T]))
    nothing: list[Tensor | None] = [None] * len(cells)
    stack = Stack(layers, sizes, bounds, B, options.start, options.lengths, nothing, autocast, dots, resets)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors))
    if x.is_cuda and not _rehearsed(stack, x, tensors, keep):
        return None
    if dropout:
        widths = [None, *(cell.output_size for cell in cells[:-1])]
        masks = [None if width is None else _mask(states[0][0], (T, B, width), dropout) for width in widths]
        stack = stack._replace(masks=masks)
    try:
        run = WavefrontLoop.apply(stack, x, *tensors) if keep else WavefrontRun(stack, x, tensors).forward(keep=False)
    except ForeignTensor:
        return None
    output, *finals = run
    parts = iter(finals)
    return output, [type(state)(*(next(parts) for _ in state)) for state in states]


def is_worth_asking(device: torch.device) -> bool:
    """Whether a CUDA graph is captured now, or may be captured next: work is on another stream than the default one."""
    if device.type != "cuda":
        return True
    return torch.cuda.is_current_stream_capturing() or torch.cuda.current_stream(device) != torch.cuda.default_stream(device)


def _layers(
    cells: Sequence[Cell], plans: Sequence[Plan], extent: tuple[int, int], device: torch.device, dots: str
) -> list[WaveLayer] | None:
    """The layers of a stack; None where they run one after the other."""
    layers = []
    for cell, cell_plan in zip(cells, plans, strict=True):
        kernel = triton_kernel(cell_plan.key)
        if kernel.lanes is not None:  # units that are independent occupy the GPU without a second layer
            return None
        settings = _settings(kernel, (len(cells), extent[1]), device, dots)
        if settings is None or not _can_be_cut(cell, cell_plan, extent[0]):
            return None
        layers.append(WaveLayer(cell, cell_plan, kernel, settings))
    return layers


def _settings(kernel: TritonKernel, rows: tuple[int, int], device: torch.device, dots: str) -> dict[str, LaunchSettings] | None:
    """The settings of the loops of a layer beside others; None where that does not pay.

    It pays if the estimated time of a step of all layers at once is less than half of the time of one layer after the other.
    It is not if one layer occupies most of the GPU: with many rows, or with its units divided among multiprocessors.

    Args:
        rows: the number of layers, and of rows of the batch.
    """
    settings = {}
    for name in kernel.shapes:
        alone = kernel.candidates(name, dots, (1, rows[1]), gpu(device))
        beside = [each for each in kernel.candidates(name, dots, rows, gpu(device)) if each.setting.units is None]
        if not beside or GAIN * beside[0].microseconds > rows[0] * alone[0].microseconds:
            return None
        settings[name] = beside[0].setting
    return settings


# For each way to run a stack, whether it has run.
_rehearsals: dict[tuple[Any, ...], bool] = {}


def _rehearsed(stack: Stack, x: Tensor, tensors: Sequence[Tensor], keep: bool) -> bool:
    """Whether to run side by side now: during a capture, if the stack was rehearsed. Before a capture, rehearse it."""
    kernels = tuple((layer.plan.key, *layer.settings.values()) for layer in stack.layers)
    wanted = tuple(tensor.requires_grad for tensor in (x, *tensors))
    key = (kernels, x.device, stack.steps, stack.rows, stack.lengths is None, stack.dots, keep, wanted)
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing and key not in _rehearsals and len(_rehearsals) < REHEARSALS:
        _rehearsals[key] = _rehearse(stack, x, tensors, keep)
    return capturing and _rehearsals.get(key, False)


def _rehearse(stack: Stack, x: Tensor, tensors: Sequence[Tensor], keep: bool) -> bool:
    """Run a stack, with its kernels compiled, and forget the results; return whether that succeeded."""
    x, *own = (tensor.detach().requires_grad_(tensor.requires_grad and keep) for tensor in (x, *tensors))
    try:
        with torch.no_grad():
            run = WavefrontRun(stack, x, own)
            outputs = run.forward(keep=keep)
            if keep:
                wanted = [tensor.requires_grad for tensor in (x, *own)]
                # Without a gradient of the output, as for a loss of the final states, another kernel is compiled.
                run.backward((None, *outputs[1:]), wanted, again=True)
                run.backward(outputs, wanted, again=False)
    except Exception:  # a kernel does not fit, or the memory is full: the layers run one after the other
        return False
    return True


# For each cell the plan and the number of steps that `_can_be_cut` was last asked for, and its answer.
_answers: "WeakKeyDictionary[Cell, tuple[Plan, int, bool]]" = WeakKeyDictionary()


def _can_be_cut(cell: Cell, cell_plan: Plan, steps: int) -> bool:
    """Whether a layer can run in chunks of time, with the same result as at once."""
    own_plan, covered, answer = _answers.get(cell, (None, 0, False))
    if own_plan is not cell_plan or covered < steps:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # the test needs the host
        answer = _is_plain(cell, cell_plan) and (cell_plan.local or _is_local(cell, steps))
        _answers[cell] = (cell_plan, steps, answer)
    return answer


def _is_plain(cell: Cell, cell_plan: Plan) -> bool:
    """Whether the output of a cell is the first part of its state, no input is constant in time, and no module has a hook,
    which would be called for every chunk."""
    direct = outputs_first_part(cell) and cell.output_size == cell_plan.signature.states[0]
    hooked = any(vars(module)[kind] for module in cell.modules() for kind in HOOKS)
    return direct and not hooked and InputKind.CONSTANT not in cell_plan.signature.kinds


def _is_local(cell: Cell, steps: int) -> bool:
    shown = locality(cell, steps)
    return shown.refusal is None and not shown.random and not shown.writes


def _tensors(
    layers: Sequence[WaveLayer], states: Sequence[Any], *, casting: bool
) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
    """The states, the weights and the parameters of every layer, and how many there are of each."""
    tensors: list[Tensor] = []
    sizes = []
    for layer, state in zip(layers, states, strict=True):
        with torch.autocast(state[0].device.type, enabled=False) if casting else nullcontext():
            weights = bind_weights(layer.plan, layer.cell, layer.cell.weights())
        reads = layer.kernel.has_gradient[len(layer.plan.signature.inputs) + len(state) :]
        weights = [weight if has else weight.detach() for weight, has in zip(weights, reads, strict=True)]
        parameters = list(layer.cell.parameters())
        tensors += (*state, *weights, *parameters)
        sizes.append((len(state), len(weights), len(parameters)))
    return tensors, sizes


def _mask(like: Tensor, extent: tuple[int, int, int], dropout: float) -> Tensor:
    """What dropout multiplies the input of a layer with: drawn for all steps, as where layers run one after the other.

    Args:
        like: of the precision of the outputs, which x may not have under autocast.
        extent: steps, rows and features.
    """
    return functional.dropout(like.new_ones(extent), dropout, True)
