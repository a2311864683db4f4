"""Curves for TensorBoard, beside the run's own: an optional extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unfading.training.active_run import Moment
from unfading.training.loop import Listener


@contextmanager
def also_written(folder: Path, listen: Listener | None, begun: int) -> Iterator[Listener]:
    """A listener that writes losses and validation scores as events into `folder`, and passes every moment on.

    Args:
        folder: of the run.
        listen: who else listens.
        begun: the step from which the run goes on; events of later steps are of steps that are trained again.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install 'unfading[tensorboard]', or leave --tensorboard out."
        ) from None
    writer: Any = None
    last = -1

    def heard(moment: Moment) -> None:
        nonlocal writer, last
        if writer is None:
            # Not earlier: a run that is done, or that another process trains, keeps the events that it has.
            if not begun:
                for old in folder.glob("events.out.tfevents.*"):
                    old.unlink()
            writer = SummaryWriter(str(folder), purge_step=begun + 1 if begun else None)
        if moment.step != last and moment.loss is not None:
            last = moment.step
            writer.add_scalar("loss", moment.loss, moment.step)
        for name, score in (moment.valid or {}).items():
            if score is not None:
                writer.add_scalar(f"valid/{name}", score, moment.step)
        if moment.valid is not None:
            writer.flush()
        if listen is not None:
            listen(moment)

    try:
        yield heard
    finally:
        if writer is not None:
            writer.close()
