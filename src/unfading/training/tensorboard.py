"""Events for TensorBoard in the folder of a run. TensorBoard is an optional dependency."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unfading.training.options import Listener, ProgressUpdate


class EventWriter:
    """A listener that writes losses and validation scores as events, and passes every update on.

    Args:
        folder: of the run.
        listen: another listener, or None.
        start: the step from which the run continues; later events in the folder are of steps that are trained again.
    """

    def __init__(self, folder: Path, listen: Listener | None, start: int):
        self.folder, self.listen, self.start = folder, listen, start
        self._writer: Any = None
        self._last = -1

    def __call__(self, update: ProgressUpdate) -> None:
        """Write the events of an update."""
        if self._writer is None:
            self._writer = self._open()
        if update.step != self._last and update.loss is not None:
            self._last = update.step
            self._writer.add_scalar("loss", update.loss, update.step)
        for name, score in (update.valid or {}).items():
            if score is not None:
                self._writer.add_scalar(f"valid/{name}", score, update.step)
        if update.valid is not None:
            self._writer.flush()
        if self.listen is not None:
            self.listen(update)

    def _open(self) -> Any:
        """Open the writer at the first update: a run that is finished, or in another process, keeps its events."""
        from torch.utils.tensorboard import SummaryWriter

        if not self.start:
            for old in self.folder.glob("events.out.tfevents.*"):
                old.unlink()
        return SummaryWriter(str(self.folder), purge_step=self.start + 1 if self.start else None)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


@contextmanager
def tensorboard_events(folder: Path, listen: Listener | None, start: int) -> Iterator[Listener]:
    """An `EventWriter`, closed at the end of the block."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install 'unfading[tensorboard]', or leave --tensorboard out."
        ) from None
    writer = EventWriter(folder, listen, start)
    try:
        yield writer
    finally:
        writer.close()
