"""Curves for TensorBoard, beside the run's own: an optional extra."""

from pathlib import Path

from unfading.member import Moment
from unfading.training import Listener


def also_written(folder: Path, listen: Listener | None) -> Listener:
    """A listener that writes losses and validation scores as events into `folder`, and passes every moment on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install 'unfading[tensorboard]', or leave --tensorboard out."
        ) from None
    writer = SummaryWriter(str(folder))
    last = -1

    def heard(moment: Moment) -> None:
        nonlocal last
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

    return heard
