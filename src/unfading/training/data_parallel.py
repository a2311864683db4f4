"""Data-parallel training: the processes that torchrun starts share each batch, and sum their gradients.

Every process draws the whole batch, which is pure in its arguments, and takes its own rows. Gradients and losses are weighted
by the share of each process in the loss of the whole batch and summed in one all-reduce of one flat buffer. All processes then
take the same optimiser step, so that weights, log rows and decisions are the same everywhere. The first process alone reads and
writes files.

Why not `torch.nn.parallel.DistributedDataParallel`? It wraps one module and averages its gradients over processes as they
appear in the backward pass. The gradients of a fleet are already one flat buffer, which `torch.func.vmap` or a captured CUDA
graph fills without autograd hooks; and the mean over processes is not the loss of the batch where processes have different
numbers of rows or of counted targets.
"""

import atexit
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree

from unfading.errors import TaskError
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training.fleet import Fleet

# Of the first batch so many rows are checked: their loss must be the mean over them, to this accuracy in float64.
CHECKED_ROWS = 8
TOLERANCE = 1e-6


def world_size() -> int:
    """How many processes train together; 1 without torchrun."""
    return dist.get_world_size() if _initialised() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among those that train together; 0 writes files and prints."""
    if world_size() == 1:
        return 0
    return dist.get_rank() if _initialised() else int(os.environ["RANK"])


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def restarted() -> bool:
    """Whether torchrun has started this training again, because a process had ended."""
    return world_size() > 1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def refuse(command: str) -> None:
    """Raise if several processes were started with a command that trains many runs."""
    if world_size() > 1:
        raise ValueError(
            f"{command} trains many runs, and torchrun divides the batches of one. Start {command} without torchrun; "
            "`unfading sweep` is the queue that gives runs to several GPUs and machines."
        )


def join(device: str) -> "Processes":
    """The processes that train together on this kind of device, which is that of a `Run`."""
    if world_size() == 1:
        return ALONE
    if device == "cuda" and torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"each process needs its own GPU; got process {local} of this machine, which has {gpus}.")
        torch.cuda.set_device(local)
    return _joined()


@cache
def _joined() -> "Processes":
    # A torch without distributed training lacks these.
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # Once in the life of a process: the address of a group that has ended cannot be used again.
    if not _initialised():
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # torchrun keeps its store after a restart, with the addresses of the processes before. Over several machines the
            # number of restarts differs between them, and torchrun must be told to start another store.
            store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(dist.destroy_process_group)
    return Processes(dist.get_rank(), dist.get_world_size())


class LostProcess(ValueError):
    """Another process that trained with this one has ended."""


class Processes:
    """The processes that train together, as one of them sees them. A process alone exchanges nothing.

    Args:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        # Decisions and files go through the host: a GPU would have to be waited for.
        self._host = None if size == 1 else dist.new_group(backend="gloo")
        self._proposal: tuple[Any, Tensor] | None = None

    # -- a training step ------------------------------------------------------------------------------------------------------

    def bounds(self, rows: int, rank: int | None = None) -> tuple[int, int]:
        """The first row of a process, of this one by default, and the one after its last."""
        if rows < self.size:
            raise ValueError(f"each process needs a row of each batch; got {rows} rows for {self.size} processes.")
        rank = self.rank if rank is None else rank
        return rows * rank // self.size, rows * (rank + 1) // self.size

    def rows(self, batch: Batch) -> Batch:
        """The rows of a batch that this process takes."""
        return batch if self.size == 1 else batch.rows(*self.bounds(batch.x.shape[1]))

    def share(self, task: Task, batch: Batch, own: Batch) -> float:
        """The weight of the own rows in the loss of a batch."""
        whole = task.loss_weight(batch)
        return task.loss_weight(own) / whole if whole else float("nan")

    def weigh(self, fleet: Fleet, losses: Tensor, shares: Tensor) -> None:
        """Multiply gradients and losses by the shares [E, 1], so that their sums are those of the whole batches."""
        fleet.losses.copy_(losses)
        for part, share in ((fleet.g, shares.to(fleet.g.dtype)), (fleet.losses, shares.squeeze(1).to(fleet.g.dtype))):
            # Rows without a counted target have no mean; they count nothing.
            part.mul_(share).masked_fill_(share == 0, 0.0)

    def sum_gradients(self, fleet: Fleet) -> Tensor:
        """Sum weighted gradients over the processes; the losses [E] of the whole batches."""
        self.sum(fleet.sums)
        return fleet.losses

    def sum(self, part: Tensor) -> None:
        """Sum a tensor over the processes, in place."""
        if self.size > 1:
            self._exchange(lambda: dist.all_reduce(part))

    # -- decisions ------------------------------------------------------------------------------------------------------------

    def agree(self, signal: int | None, save: bool) -> tuple[int | None, bool]:
        """The signal that some process has received, and whether the first one wants a checkpoint.

        With several processes the answer is that to the call before, so that none of them waits.
        """
        if self.size == 1:
            return signal, save
        decided = self.settle()
        flags = torch.tensor([signal or 0, int(save and self.rank == 0 and not decided[1])])
        self._proposal = dist.all_reduce(flags, dist.ReduceOp.MAX, self._host, async_op=True), flags
        return decided

    def agree_now(self, signal: int | None) -> int | None:
        """The signal that some process has received until now."""
        earlier, _ = self.settle()
        self.agree(signal, save=False)
        return earlier or (signal if self.size == 1 else self.settle()[0])

    def settle(self) -> tuple[int | None, bool]:
        """The answer to the last call of `agree`."""
        if self._proposal is None:
            return None, False
        (work, flags), self._proposal = self._proposal, None
        self._exchange(work.wait)
        signal, save = flags.tolist()
        return signal or None, bool(save)

    def check_same(self, what: str, values: Sequence[str]) -> None:
        """Raise in all processes unless all of them have the same values."""
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(json.dumps(list(values)).encode()).digest()[:7], "big")
        extremes = torch.tensor([digest, -digest])
        self._exchange(lambda: dist.all_reduce(extremes, dist.ReduceOp.MAX, self._host))
        if extremes[0] != -extremes[1]:
            raise ValueError(
                f"the {self.size} processes were given different {what}, and they train one batch together. Give all of them "
                "the same; `unfading sweep` trains different runs."
            )

    # -- files, which the first process reads ---------------------------------------------------------------------------------

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Call `action` in the first process. Its result, which must be JSON, or its error reaches all processes."""
        if self.size == 1:
            return action()
        if self.rank > 0:
            answer = json.loads(self._send(None))
            if "error" in answer:
                raise ValueError(answer["error"])
            return answer["value"]
        try:
            value = action()
        except (ValueError, OSError) as error:
            self._send(json.dumps({"error": str(error)}).encode())
            raise
        self._send(json.dumps({"value": value}).encode())
        return value

    def tensors_from_first(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the first process, on the CPU."""
        if self.size == 1:
            return tensors
        return safetensors.torch.load(self._send(safetensors.torch.save(tensors) if self.rank == 0 else None))

    def _send(self, content: bytes | None) -> bytes:
        """The bytes of the first process."""
        length = torch.tensor(0 if content is None else len(content))
        self._exchange(lambda: dist.broadcast(length, 0, self._host))
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if content is not None:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._exchange(lambda: dist.broadcast(buffer, 0, self._host))
        return content if content is not None else buffer.numpy().tobytes()

    # -- a carried state ------------------------------------------------------------------------------------------------------

    def whole_state(self, fleet: Fleet, batch: Batch, state: Any) -> Any:
        """The state of all rows of a batch, from that of each process's own rows."""
        rows = batch.x.shape[1]
        start, stop = self.bounds(rows)

        def whole(part: Tensor, axis: int) -> Tensor:
            shape = list(part.shape)
            shape[axis] = rows
            full = part.new_zeros(shape)
            full.narrow(axis, start, stop - start).copy_(part)
            self.sum(full)
            return full

        return _on_rows(whole, state, _state_axes(fleet, batch))

    def own_state(self, fleet: Fleet, batch: Batch, state: Any) -> Any:
        """The state of the rows of this process, from that of all rows of a batch."""
        start, stop = self.bounds(batch.x.shape[1])
        return _on_rows(lambda part, axis: part.narrow(axis, start, stop - start).clone(), state, _state_axes(fleet, batch))

    def _exchange(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except RuntimeError as error:
            raise LostProcess(
                f"process {self.rank} of {self.size} cannot reach the others; one of them has ended. `torchrun --max-restarts "
                "3` starts all again, and they continue from the last checkpoint."
            ) from error


ALONE = Processes(0, 1)


def check_divisible(task: Task, model: Model, batch: Batch) -> None:
    """Raise unless the loss of some rows of a batch is the mean over them, weighted by `loss_weight`.

    The predictions are random. Those of an untrained model are much the same in all rows, so that wrong weights would pass.
    """
    name, rows = type(task).__name__, min(CHECKED_ROWS, batch.x.shape[1])
    target = batch.target.double() if batch.target.is_floating_point() else batch.target
    batch = batch._replace(target=target).rows(0, rows)
    model.eval()
    with torch.no_grad():
        one, two = (_predict(model, batch.rows(0, n)) for n in (1, 2))
    axis = _row_axis(one, two)
    if axis is None:
        raise TaskError(f"the predictions of {name} have no axis for rows, which several processes could share.")
    shape = [*one.shape[:axis], rows, *one.shape[axis + 1 :]]
    generator = torch.Generator().manual_seed(0)
    prediction = torch.randn(shape, generator=generator, dtype=torch.float64).to(batch.x.device)
    whole, total = float(task.loss(prediction, batch)), 0.0
    for row in range(rows):
        own = batch.rows(row, row + 1)
        if weight := task.loss_weight(own) / task.loss_weight(batch):
            total += weight * float(task.loss(prediction.narrow(axis, row, 1), own))
    if not math.isclose(total, whole, rel_tol=TOLERANCE, abs_tol=TOLERANCE) and not math.isnan(whole):
        raise TaskError(
            f"{name}.loss of {rows} rows is {whole:.6g}, and the mean over the rows, with the weights {name}.loss_weight, is "
            f"{total:.6g}; several processes need them to be equal. Let loss_weight return the number by which loss divides, "
            "e.g. that of unmasked targets, or train in one process."
        )


def _predict(model: Model, batch: Batch) -> Tensor:
    x = batch.x.to(next(model.parameters()).dtype) if batch.x.is_floating_point() else batch.x
    prediction: Tensor = model(x, lengths=batch.lengths)[0]
    return prediction


def _row_axis(one: Tensor, two: Tensor) -> int | None:
    """The axis along which a tensor of one row and one of two rows differ."""
    return next((axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b), None)


def _state_axes(fleet: Fleet, batch: Batch) -> list[int | None]:
    """For each tensor of a fleet's state, the axis of its rows; None if it has none."""
    fleet.eval()
    states = [_pytree.tree_leaves(fleet.scores(batch.rows(0, n), None, 0)[1]) for n in (1, 2)]
    fleet.train()
    return [_row_axis(one, two) for one, two in zip(*states, strict=True)]


def _on_rows(change: Callable[[Tensor, int], Tensor], state: Any, axes: Sequence[int | None]) -> Any:
    """The state, with the tensors changed that have an axis for rows."""
    leaves, form = _pytree.tree_flatten(state)
    parts = [part if axis is None else change(part, axis) for part, axis in zip(leaves, axes, strict=True)]
    return _pytree.tree_unflatten(parts, form)
