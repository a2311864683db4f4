"""The loops of a kernel for a GPU as plain loops in torch: a hundred times faster than Triton's interpreter.

For tests of the code around the kernels, which decides on which tensors they run.
"""

from typing import Any

import torch
from torch import Tensor

from unfading.fuse.ir.interpret import evaluate
from unfading.fuse.ir.program import NUMBERS, InputKind, Op, TensorKind

PROGRAMS = {"infer": 0, "train": 1, "back": 2}


class PlainLoop:
    """In place of `ReadyLoop`."""

    def __init__(self, kernel: Any, name: str, weights: Any, options: Any, setting: Any, where: Any):
        self.program, self.weights, self.reverse = kernel.programs[PROGRAMS[name]], weights, options.reverse
        self.backward = name == "back"

    def run(self, tensors: dict[Any, Any], lengths: Tensor | None, extent: tuple[int, int, int]) -> None:
        models, T, B = extent
        for model in range(models) if models else (...,):
            # Like a kernel, without counting as a change of the tensors.
            own = {key: None if tensor is None else tensor.data[model] for key, tensor in tensors.items()}
            left = torch.full((B,), T) if lengths is None else lengths[model].clamp(0, T)
            OneLoop(self, own, [weight[model] for weight in self.weights], left).run(T)


class OneLoop:
    def __init__(self, loop: PlainLoop, tensors: dict[Any, Any], weights: list[Tensor], left: Tensor):
        self.program, self.reverse, self.backward = loop.program, loop.reverse, loop.backward
        self.tensors, self.weights, self.left = tensors, weights, left
        self.flat = [weight.reshape(-1) for weight in weights]
        self.rows = torch.arange(len(left))
        parts = sorted(i for kind, i in tensors if kind == TensorKind.NEXT)
        finals = [tensors.get((TensorKind.D_FINAL, i)) for i in parts]
        initial = [tensors[TensorKind.INITIAL, i] for i in parts]
        self.state = (
            [torch.zeros_like(x) if d is None else d for d, x in zip(finals, initial, strict=True)]
            if self.backward
            else list(initial)
        )

    def run(self, T: int) -> None:
        for step in reversed(range(T)) if self.backward else range(T):
            self._step(step)
        kind = TensorKind.D_INITIAL if self.backward else TensorKind.FINAL
        for i, state in enumerate(self.state):
            self.tensors[kind, i].copy_(state)

    def _at(self, step: int) -> Tensor:
        """The place of a step in time, for each row; rows without it read any."""
        place = self.left - 1 - step if self.reverse else torch.full_like(self.left, step)
        return place.clamp(min=0)

    def _read(self, kind: TensorKind, index: int, step: int) -> Tensor:
        if kind == TensorKind.WEIGHT:
            return self.flat[index]
        if kind == TensorKind.CARRY:
            arriving = self.tensors[TensorKind.D_NEXT, index]
            return self.state[index] if arriving is None else self.state[index] + arriving[self._at(step), self.rows]
        if kind == TensorKind.STATE:
            if not self.backward:
                return self.state[index]
            initial = self.tensors[TensorKind.INITIAL, index]
            return initial if step == 0 else self.tensors[TensorKind.NEXT, index][self._at(step - 1), self.rows]
        if kind == TensorKind.INPUT and self.program.kinds[index] != InputKind.SEQUENCE:
            return self.tensors[kind, index][step if self.program.kinds[index] == InputKind.SHARED else 0]
        return self.tensors[kind, index][self._at(step), self.rows]

    def _step(self, step: int) -> None:
        on, values = step < self.left, {}
        for value in self.program.values():
            if value.op is Op.LEAF:
                leaf = value.leaf
                values[value.id] = self._read(leaf.kind, leaf.index, step)[..., leaf.start : leaf.stop]
            elif value.op in NUMBERS:
                values[value.id] = torch.tensor(value.number if value.op is Op.CONST else 0.0)
            else:
                values[value.id] = evaluate(value, [values[arg.id] for arg in value.args], self.weights)
        new = [state.clone() for state in self.state]
        for store in self.program.stores:
            result = values[store.value.id].expand((len(on), *store.value.shape)).flatten(1)
            self._store(store, result, on, step, new)
        self.state = [torch.where(on[:, None], after, before) for after, before in zip(new, self.state, strict=True)]

    def _store(self, store: Any, result: Tensor, on: Tensor, step: int, new: list[Tensor]) -> None:
        here = slice(store.start, store.start + store.value.size)
        if store.kind in (TensorKind.NEXT, TensorKind.D_STATE):
            new[store.index][:, here] = result
        target = self.tensors.get((store.kind, store.index))
        if target is None:
            return
        kind = self.program.kinds[store.index] if store.kind == TensorKind.D_INPUT else InputKind.SEQUENCE
        if store.kind == TensorKind.D_WEIGHT:
            target[0, here] += result[on].sum(0)
        elif kind == InputKind.CONSTANT:
            target[0, :, here] = target[0, :, here] * (step + 1 < self.left.max()) + result * on[:, None]
        elif kind == InputKind.SHARED:
            target[step, :, here] = 0.0
            target[step, 0, here] = result[on].sum(0)
        else:
            target[self._at(step)[on], self.rows[on], here] = result[on]
