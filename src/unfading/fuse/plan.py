"""What is known of a cell's compiled step before any data comes: its program, or why there is none."""

import weakref
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from unfading.cells.base import Cell, LowRank
from unfading.fuse.frame import Names
from unfading.fuse.kernel import REAL, Kernel, compiled
from unfading.fuse.lines import defined, first_line
from unfading.fuse.place import place_of
from unfading.fuse.program import NotFusable, Program
from unfading.fuse.structure import Structure, flatten, is_low_rank, unflatten, weight_names, with_dense
from unfading.fuse.tiles import is_vector
from unfading.fuse.trace import Signature, trace, trace_with_project
from unfading.fuse.triton_kernel import TritonKernel
from unfading.fuse.triton_settings import DENSE
from unfading.scan import check_inputs, leaf_names
from unfading.traced import traced


class Plan(NamedTuple):
    """The program of a cell, and where the tensors that it reads come from."""

    key: str  # of the program, in PROGRAMS
    signature: Signature
    inputs: Structure  # of what project gives
    names: tuple[str, ...]  # of its leaves
    weights: Structure
    dense: tuple[bool, ...]  # of each LowRank among the weights: whether one product is cheaper than two
    parameters: tuple[str, ...]  # that project reads, where it is compiled with the step
    with_project: bool
    place: str  # c or triton


# Features of x up to which a GPU projects it inside the loop; else all of it at once, by the library's own product.
INSIDE = 1

# Every program traced in this process, by the hash of its text: what the operators are told by name.
PROGRAMS: dict[str, Program] = {}
NAMES: dict[str, Names] = {}  # what the first cell with a program calls the tensors in it
_kernels: dict[tuple[str, torch.dtype], Kernel] = {}
_triton_kernels: dict[str, TritonKernel | str] = {}  # or the reason why there is none
# Per cell the plan, or the reason why there is none, and the options it was made with; one for training and one for
# evaluation, since a training loop goes to and fro.
_plans: "weakref.WeakKeyDictionary[Cell, dict[bool, tuple[Options, Plan | str]]]" = weakref.WeakKeyDictionary()


def plan(cell: Cell) -> Plan | str:
    """The plan of a cell as it stands, or in words why its step cannot be compiled."""
    plans = _plans.setdefault(cell, {})
    known = plans.get(cell.training)
    if known is None or not known[0].still_holds():
        known = (Options(cell), _made(cell))
        # Under a transform of torch.func parameters are not themselves; a refusal then is none for later.
        if not (isinstance(known[1], str) and traced()):
            plans[cell.training] = known
    return known[1]


def plan_or_raise(cell: Cell) -> Plan:
    """The plan of a cell; NotFusable where there is none."""
    found = plan(cell)
    if isinstance(found, str):
        raise NotFusable(found)
    return found


def kernel(key: str, dtype: torch.dtype) -> Kernel:
    """The compiled program for the CPU; built when first asked for. NoCompiler where it cannot be."""
    found = _kernels.get((key, dtype))
    if found is None:
        (found,) = compiled([_program(key)], dtype)
        _kernels[key, dtype] = found
    return found


def triton_kernel(key: str) -> TritonKernel:
    """The program for a GPU; written when first asked for, and compiled by Triton when it first runs. NoTriton, NotFusable."""
    found = _triton_kernels.get(key)
    if found is None:
        try:
            found = TritonKernel(_program(key), NAMES[key])
        except NotFusable as error:
            found = str(error)
        _triton_kernels[key] = found
    if isinstance(found, str):
        raise NotFusable(found)
    return found


def _program(key: str) -> Program:
    if key not in PROGRAMS:
        raise RuntimeError(
            f"the fused program {key} is not known in this process; a layer with the same cell must be called once first."
        )
    return PROGRAMS[key]


def _made(cell: Cell) -> Plan | str:
    """Made on the side: no mode that is recording the caller sees it, and random numbers are left as they were."""
    aside = (_disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False))
    with aside[0], aside[1], aside[2], torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return _planned(cell)


def _planned(cell: Cell) -> Plan | str:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # masks are drawn in project
            return _example(cell)
    except Exception as error:  # a cell that breaks its contract, or takes no example; the reference says how
        return first_line(error)


def _example(cell: Cell) -> Plan | str:
    state = cell.initial_state(2)
    dtype, place = state[0].dtype, place_of(state[0].device)
    if place is None:
        return f"kernels are written for the CPU and for CUDA; the parameters are on {state[0].device}"
    if place == "c" and dtype not in REAL:
        return f"{dtype} is compiled for no CPU; float32 and float64 are"
    if place == "triton" and dtype != torch.float32:
        return f"kernels for a GPU compute in float32; the parameters are {dtype}"
    inputs = cell.project(state[0].new_zeros(2, 2, cell.input_size))
    weights = cell.weights()
    check_inputs(cell, inputs, batch=2)
    return _traced(cell, inputs, state, weights, dtype, place)


def _traced(cell: Cell, inputs: Any, state: Any, weights: Any, dtype: torch.dtype, place: str) -> Plan:
    low_rank = [w for w in _pytree.tree_leaves(weights, is_leaf=is_low_rank) if is_low_rank(w)]
    dense = tuple(_is_better_dense(w, place) for w in low_rank)
    weights = with_dense(weights, dense)
    input_leaves: list[Tensor] = []
    weight_leaves: list[Tensor] = []
    input_tree, weight_tree = flatten(inputs, input_leaves), flatten(weights, weight_leaves)
    for leaf in weight_leaves:
        if leaf.dtype != dtype:
            raise NotFusable(f"weights gives {leaf.dtype}; a fused step takes {dtype}, as the state is")
    for name, leaves, rank in (("project", input_leaves, 3), ("initial_state", list(state), 2)):
        for leaf in leaves:
            if leaf.dim() != rank or leaf.dtype != dtype:
                raise NotFusable(f"{name} gives {leaf.dtype} {list(leaf.shape)}; fused steps take {dtype} of {rank} axes")
    names = tuple(leaf_names(inputs))
    signature = Signature(
        tuple(leaf.shape[-1] for leaf in input_leaves),
        tuple("shared" if name in cell.shared else "constant" if name in cell.constant else "sequence" for name in names),
        tuple(part.shape[-1] for part in state),
        tuple(tuple(leaf.shape) for leaf in weight_leaves),
        dtype,
    )

    def step(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        made = cell.step(unflatten(input_tree, list(inputs)), type(state)(*states), unflatten(weight_tree, list(weights)))
        if not isinstance(made, tuple) or len(made) != len(states):
            got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
            raise NotFusable(f"step must return its state, a tuple of {len(states)} tensors; got {got}{defined(cell.step)}")
        return made

    step.__wrapped__ = cell.step  # type: ignore[attr-defined]
    parameters: tuple[str, ...] = ()
    try:
        if place == "triton" and cell.input_size > INSIDE:
            raise NotFusable("the projection stays outside")
        program, wide, parameters = _with_project(cell, step, signature)
        if place == "triton" and _matrices(program) > _matrices(trace(step, signature)):
            raise NotFusable("the projection has dots of its own, and stays outside")
    except NotFusable:
        program, wide, parameters = trace(step, signature), signature, ()
    key = sha256(f"{program}\n{sorted(program.widths.items())}\n{program.kinds}".encode()).hexdigest()[:16]
    PROGRAMS.setdefault(key, program)
    read = names if wide is signature else ("x", *(name for name in names if name in cell.shared))
    NAMES.setdefault(key, Names(read, list(type(state)._fields), [*weight_names(weights), *parameters]))
    return Plan(key, wide, input_tree, names, weight_tree, dense, parameters, wide is not signature, place)


def _matrices(program: Program) -> int:
    return sum(not is_vector(block) for block in program.blocks())


def _is_better_dense(matrix: LowRank, place: str) -> bool:
    """Whether one product costs less than two: on a GPU, where a second one costs its latency, as long as it fits on chip."""
    whole = matrix.left.shape[0] * matrix.right.shape[1]
    if place == "triton":
        return 4 * whole <= DENSE
    return matrix.left.numel() + matrix.right.numel() >= whole


def _with_project(cell: Cell, step: Any, signature: Signature) -> tuple[Program, Signature, tuple[str, ...]]:
    """The program of project and step together, what it is handed, and which parameters project reads."""
    if "constant" in signature.kinds:
        raise NotFusable("what holds for all time may be made of all of x, or drawn at random")
    kept = [i for i, kind in enumerate(signature.kinds) if kind != "sequence"]
    fields = [kept.index(i) + 1 if i in kept else None for i in range(len(signature.kinds))]
    tensors = {
        name: tensor for name, tensor in (*cell.named_parameters(), *cell.named_buffers()) if tensor.dtype == signature.dtype
    }

    def traced(names: Sequence[str]) -> tuple[Program, Signature]:
        wide = signature._replace(
            inputs=(cell.input_size, *(signature.inputs[i] for i in kept)),
            kinds=("sequence", *(signature.kinds[i] for i in kept)),
            weights=(*signature.weights, *(tuple(tensors[name].shape) for name in names)),
        )

        def project(x: Tensor, start: int, parameters: Sequence[Tensor]) -> list[Tensor]:
            given = {f"cell.{name}": tensor for name, tensor in zip(names, parameters, strict=True)}
            leaves: list[Tensor] = []
            flatten(torch.func.functional_call(_Project(cell), given, (x, start)), leaves)
            return leaves

        return trace_with_project(project, step, wide, fields, len(signature.weights)), wide

    program, _ = traced(list(tensors))
    own = len(signature.weights)
    read = program.reads("weight") | {block.weight for block in program.blocks()}
    names = [name for i, name in enumerate(tensors, start=own) if i in read]
    return *traced(names), tuple(names)


class _Project(nn.Module):
    """A cell's `project` as a module's forward, so that its parameters can be handed in."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, start: int) -> Any:
        return self.cell.project(x, start)


class Options:
    """All that a step may read beside its arguments: the attributes of a cell and of the modules in it.

    Plain ones are compared by value, and so are lists, sets and dictionaries, entry by entry; others, as functions, are
    compared by identity.
    """

    PLAIN = (bool, int, float, str, tuple, frozenset, type(None))
    TORCHS = frozenset(nn.Module().__dict__) - {"training"}

    def __init__(self, cell: Cell):
        self.seen = []
        for module in cell.modules():
            own = [(name, value) for name, value in module.__dict__.items() if name not in self.TORCHS]
            plain = [(name, value) for name, value in own if isinstance(value, self.PLAIN)]
            others = [(name, value, _entries(value)) for name, value in own if not isinstance(value, self.PLAIN)]
            # The dictionary itself, so that a look takes microseconds; a module does not change its own.
            self.seen.append((module.__dict__, len(module.__dict__), plain, others))
        self.absent = [(m._parameters, _absent(m._parameters)) for m in cell.modules() if m._parameters]
        self.parts = [(module._modules, tuple(module._modules.values())) for module in cell.modules() if module._modules]
        self.parameter = next(
            ((m._parameters, name) for m in cell.modules() for name, p in m._parameters.items() if p is not None), None
        )
        self.kind = self._kind()

    def _kind(self) -> Any:
        if self.parameter is None:
            return None
        parameter = self.parameter[0].get(self.parameter[1])
        return None if parameter is None else (parameter.dtype, parameter.device.type, place_of(parameter.device))

    def still_holds(self) -> bool:
        for now, size, plain, others in self.seen:
            if len(now) != size:
                return False
            for name, value in plain:
                if now.get(name) != value:
                    return False
            for name, value, entries in others:
                if now.get(name) is not value or not self._same(_entries(value), entries):
                    return False
        same_parts = all(tuple(now.values()) == then for now, then in self.parts)
        same_parameters = all(_absent(now) == then for now, then in self.absent)
        return same_parts and same_parameters and self._kind() == self.kind

    def _same(self, now: list[Any], then: list[Any]) -> bool:
        pairs = zip(now, then, strict=False)
        return len(now) == len(then) and all(a is b or (isinstance(b, self.PLAIN) and a == b) for a, b in pairs)


def _absent(parameters: dict[str, Any]) -> list[str]:
    return [name for name, parameter in parameters.items() if parameter is None]


def _entries(value: Any) -> list[Any]:
    """What is in a container; nothing for all else."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, list | set) else []
