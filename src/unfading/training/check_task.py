"""Check a user's task where it meets a model, and name the method to blame.

The first batches of training and validation are examined before the first step: what `batch` returns, what the model makes of
it, the loss and its gradient, the metrics. Later batches are not checked, which costs nothing; where a step or an evaluation
fails, or its loss is not finite, the batch is drawn again, which gives the same data, and is examined in the same way.
"""

import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from unfading import allocation
from unfading.errors import TaskError, check_count
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.source_lines import first_line
from unfading.tasks.base import Batch, OneHot, Split, Task

PACKAGE = __file__.rpartition("/training/")[0]
TORCH = torch.__file__.rpartition("/")[0]


class Place(NamedTuple):
    """Which batch is examined: the arguments of `batch`."""

    split: Split
    number: int  # the index that `batch` gets
    size: int
    seed: int
    device: torch.device

    def __str__(self) -> str:
        return f"split {self.split!r}, batch {self.number}"


# -- what a task declares -----------------------------------------------------------------------------------------------------


def input_size(task: Task) -> int:
    """The task's number of input features."""
    size = _declared(task, "input_size")
    try:
        check_count("input_size", size)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{_name(task)}.{error}") from None
    return int(size)


def module(task: Task, name: str, *arguments: Any) -> nn.Module:
    """The task's encoder or head."""
    part = called(task, name, getattr(task, name), *arguments)
    if not isinstance(part, nn.Module):
        raise TaskError(f"{_name(task)}.{name} must return a torch.nn.Module; got {_kind(part)}.")
    return part


def length(task: Task, split: Split, size: int) -> int | None:
    """The task's number of batches in one pass over a split; None if it is endless."""
    batches = called(task, "length", task.length, split, size)
    if batches is not None and (type(batches) is not int or batches < 1):
        raise TaskError(
            f"{_name(task)}.length({split!r}, {size}) must return the number of batches, at least 1, or None for an endless "
            f"task; got {batches!r}."
        )
    return batches


def check_declared(task: Task) -> None:
    """Raise unless `metric`, `guess`, `higher_is_better` and `full_length_from` are of the right kind."""
    name = _name(task)
    metric, guess = _declared(task, "metric"), _declared(task, "guess")
    if not isinstance(metric, str) or not metric:
        raise TaskError(f"{name}.metric must be the name of the first metric, a str; got {metric!r}.")
    if isinstance(guess, bool) or not isinstance(guess, int | float) or not math.isfinite(guess):
        raise TaskError(f"{name}.guess must be a finite number, the score of a guess in {metric}; got {_shown(guess)}.")
    if not isinstance(task.higher_is_better, bool):
        raise TaskError(f"{name}.higher_is_better must be True or False; got {task.higher_is_better!r}.")
    full_length_from(task)


def full_length_from(task: Task) -> int:
    """Index of a training batch: its sequences and those of all later ones have their full length."""
    index = _declared(task, "full_length_from")
    try:
        check_count("full_length_from", index, least=0)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{_name(task)}.{error} It is a class attribute or a property.") from None
    return int(index)


def _declared(task: Task, name: str) -> Any:
    if not hasattr(type(task), name):
        raise TaskError(f"{_name(task)} has no {name}. Set it as a class attribute or a property.")
    return called(task, name, getattr, task, name)


# -- calls of a user's methods ------------------------------------------------------------------------------------------------


def called(
    task: Task, method: str, function: Callable[..., Any], *arguments: Any, place: Place | None = None, **options: Any
) -> Any:
    """`function(*arguments, **options)`; an error in a user's code becomes a sentence with the method, file and line."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        blame(error, f"{_name(task)}.{method}", place)


def blame(error: Exception, method: str | None = None, place: Place | None = None) -> NoReturn:
    """Raise a `TaskError` that says which line of a user's file failed. A sentence of the library is raised as it is, unless a
    line of the user called what raised it.

    Args:
        error: the error.
        method: the method that was called; None for that of the line.
        place: the batch, if there was one.
    """
    line = _user_line(error)
    method = method or (line and line.method)
    own = line is None and _is_a_sentence(error)
    if isinstance(error, TaskError) or method is None or allocation.out_of_memory(error) or own:
        raise error
    details = [*([] if line is None else [f"{line.filename}, line {line.number}"]), *([] if place is None else [str(place)])]
    where = f" ({'; '.join(details)})" if details else ""
    raise TaskError(f"{method} raised {type(error).__name__}: {first_line(error).rstrip('.')}{where}.") from error


class _UserLine(NamedTuple):
    """A line of a user's file."""

    filename: str
    number: int
    method: str


def _user_line(error: Exception) -> _UserLine | None:
    """The innermost line that belongs neither to torch nor to the library; None if there is none."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith((PACKAGE, TORCH, "<")):
            line = _UserLine(code.co_filename, number, code.co_qualname)
    return line


def _is_a_sentence(error: Exception) -> bool:
    """Whether a line of the library raised the error, as a sentence for the user."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | TypeError | OSError) and frames[-1].filename.startswith(PACKAGE)


# -- a batch ------------------------------------------------------------------------------------------------------------------


def examine(task: Task, model: Model, place: Place) -> float | None:
    """Draw a batch and take it through model, loss and metrics, without a step; raise a `TaskError` at the first fault.

    Returns the loss of a prediction of zeros, which is about that of a guess; None where it is not finite.
    """
    batch = _cast(draw(task, place), next(model.parameters()).dtype)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            encoded = _encode(task, model, batch, place)
            prediction = _predict(task, model, encoded, batch, place)
    finally:
        model.train(training)
    loss = _check_loss(task, prediction, batch, place)
    _check_input(task, batch, encoded, place)
    if not math.isfinite(loss) and torch.isfinite(prediction).all():
        _check_target(task, batch, place)
    _check_metrics(task, prediction, batch, place)
    try:
        zeros = float(task.loss(torch.zeros_like(prediction), batch))
    except Exception:  # a loss may refuse zeros
        return None
    return zeros if math.isfinite(zeros) else None


def sequence_length(task: Task, size: int, seed: int) -> int:
    """Number of time steps of a training batch of `size` rows that has its full length."""
    return int(draw(task, Place("train", full_length_from(task), size, seed, torch.device("cpu"))).x.shape[0])


def explain(error: Exception, task: Task, model: Model, places: Sequence[Place]) -> NoReturn:
    """Raise the reason why a step or an evaluation of these batches failed: the fault of a batch, or else the error."""
    if isinstance(error, torch.AcceleratorError):
        # Nothing runs on the GPU any more: the batches are drawn again on the CPU, and the model is not run.
        linear = [part for part in model.head.modules() if isinstance(part, nn.Linear)]
        for place in places:
            batch = draw(task, place._replace(device=torch.device("cpu")))
            _check_tokens(task, model, batch, place)
            if linear and batch.target.dtype == torch.int64:
                _check_labels(task, batch, linear[-1].out_features, place)
        raise error
    if not allocation.out_of_memory(error):
        for place in places:
            examine(task, model, place)
        blame(error, place=places[-1])
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    needed = f"a step with a batch of {places[-1].size} rows of {_name(task)}"
    with allocation.one_sentence(needed, "batch, hidden size or sequence length"):
        raise error


def draw(task: Task, place: Place) -> Batch:
    """The batch of that place, with fields of the right kinds and shapes."""
    keywords: dict[str, Any] = {"split": place.split, "seed": place.seed, "device": place.device}
    with allocation.refuse_large(f"a batch of {place.size} rows of {_name(task)}", "batch or sequence length"):
        batch = called(task, "batch", task.batch, place.number, place.size, place=place, **keywords)
    returned = f"{_name(task)}.batch returned"
    if not isinstance(batch, Batch):
        raise TaskError(f"{_name(task)}.batch must return an unfading.Batch; got {_kind(batch)} ({place}).")
    for name, value in batch._asdict().items():
        if value is None and name in ("lengths", "mask"):
            continue
        if not isinstance(value, Tensor):
            raise TaskError(f"{returned} {name} of a wrong type, {_kind(value)}: it must be a tensor ({place}).")
        if value.device.type != place.device.type and name != "lengths":
            raise TaskError(
                f"{returned} {name} on {value.device}; it must be on the device that batch is given, {place.device} ({place})."
            )
    _check_shapes(returned, batch, place)
    return batch


def _check_shapes(returned: str, batch: Batch, place: Place) -> None:
    x, target, lengths, mask = batch
    shape = list(x.shape)
    if x.dim() < 2 or 0 in shape or x.is_complex():
        wanted = "[T, B, I] of real numbers, integer tokens [T, B], or frames [T, B, I, height, width], none of them empty"
        raise TaskError(f"{returned} x of shape {shape} and {x.dtype}; it must be {wanted} ({place}).")
    T, B = shape[:2]
    if B not in target.shape[:2]:
        hint = " x has time on its first axis and the rows of the batch on its second." if T in target.shape[:1] else ""
        raise TaskError(
            f"{returned} a target of shape {list(target.shape)} for x of shape {shape}; it must have {B} rows: [B], [B, n], "
            f"[T, B] or [T, B, ...] ({place}).{hint}"
        )
    if lengths is not None:
        _check_lengths(returned, lengths, T, B, place)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != target.shape or not mask.any()):
        raise TaskError(
            f"{returned} a mask of shape {list(mask.shape)} and {mask.dtype}; it must be bool, of the target's shape "
            f"{list(target.shape)}, and True somewhere ({place})."
        )


def _check_lengths(returned: str, lengths: Tensor, T: int, B: int, place: Place) -> None:
    if lengths.dtype != torch.int64 or lengths.shape != (B,):
        got = f"{list(lengths.shape)} and {lengths.dtype}"
        raise TaskError(f"{returned} lengths of shape {got}; they must be int64, one for each of {B} rows ({place}).")
    wrong = (lengths < 1) | (lengths > T)
    if wrong.any():
        row = int(wrong.nonzero()[0, 0])
        raise TaskError(f"{returned} the length {int(lengths[row])} for row {row}; lengths must lie in 1..{T} ({place}).")


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    x, target = (part.to(dtype) if part.is_floating_point() else part for part in (batch.x, batch.target))
    return batch._replace(x=x, target=target)


# -- the model ----------------------------------------------------------------------------------------------------------------


def _encode(task: Task, model: Model, batch: Batch, place: Place) -> Tensor:
    """The input of the recurrent stack."""
    x, encoder = batch.x, model.encoder
    _check_tokens(task, model, batch, place)
    encoded = called(task, "encoder", encoder, x, place=place)
    B, features = x.shape[1], model.rnn.input_size
    plain = isinstance(encoder, nn.Identity)
    what = f"{_name(task)}.batch returned x" if plain else f"the module of {_name(task)}.encoder returned a tensor"
    if not isinstance(encoded, Tensor) or not encoded.is_floating_point():
        hint = " For tokens, return an nn.Embedding from encoder." if plain else ""
        got = encoded.dtype if isinstance(encoded, Tensor) else _kind(encoded)
        raise TaskError(f"{what} of {got}, and the recurrent stack reads floating-point numbers ({place}).{hint}")
    if encoded.dim() != 3 + model.rnn.frame_axes or encoded.shape[1] != B or encoded.shape[2] != features:
        frames = ", height, width" if model.rnn.frame_axes else ""
        raise TaskError(
            f"{what} of shape {list(encoded.shape)}, and the recurrent stack reads [T, {B}, {features}{frames}]: input_size is "
            f"{features} ({place}).{_hint_of_frames(model, encoded)}"
        )
    return encoded


def _hint_of_frames(model: Model, encoded: Tensor) -> str:
    """What to do where a cell over vectors meets frames, or a convolutional cell vectors; else nothing."""
    if encoded.dim() == 5 and not model.rnn.frame_axes:
        return " Frames are read by convolutional cells, e.g. ConvSTAR."
    if encoded.dim() == 3 and model.rnn.frame_axes:
        return f" {type(model.rnn).__name__} reads frames; cells over vectors are e.g. STAR and LSTM."
    return ""


def _predict(task: Task, model: Model, encoded: Tensor, batch: Batch, place: Place) -> Tensor:
    T, B, rnn = encoded.shape[0], encoded.shape[1], model.rnn
    what = f"a batch of {B} rows with {T} steps"
    try:
        entries = T * B * _output_entries(rnn, tuple(encoded.shape[3:]))
        allocation.check_fits(what, entries * encoded.element_size(), "batch, hidden size or sequence length", encoded.device)
        output, _ = rnn(encoded, lengths=batch.lengths)
    except Exception as error:
        blame(error, place=place)
    try:
        prediction = model.head(output, batch.lengths)
    except (TypeError, ValueError) as error:  # a head of the library that was built for another output says so itself
        raise TaskError(f"the module of {_name(task)}.head failed: {first_line(error).rstrip('.')} ({place}).") from error
    except Exception as error:
        blame(error, f"{_name(task)}.head", place)
    if not isinstance(prediction, Tensor) or not prediction.is_floating_point():
        got = prediction.dtype if isinstance(prediction, Tensor) else _kind(prediction)
        raise TaskError(
            f"the module of {_name(task)}.head must return a tensor of floating-point numbers; got {got} ({place})."
        )
    return prediction


def _output_entries(rnn: Recurrent, frame: tuple[int, ...]) -> int:
    """The number of entries of the outputs of all layers, for one row and one step."""
    entries = 0
    for i, cell in enumerate(rnn.runners):
        if i % rnn.directions == 0:  # the two directions of a layer read the same frames
            frame = cell.state_frame(frame)
        entries += cell.output_size * math.prod(frame)
    return entries


# -- loss and metrics ---------------------------------------------------------------------------------------------------------


def _check_loss(task: Task, prediction: Tensor, batch: Batch, place: Place) -> float:
    """The loss, after a check that it is a scalar with a gradient."""
    method = f"{_name(task)}.loss"
    if prediction.is_cuda:
        _check_loss_on_cpu(task, prediction, batch, place)
    prediction = prediction.detach().requires_grad_()
    try:
        # Broadcasting a target of another shape, which torch only warns of, computes another loss than the one that is meant.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.filterwarnings("error", message="Using a target size")
            loss = task.loss(prediction, batch)
    except Exception as error:
        _blame_labels(task, prediction, batch, place)
        blame(error, method, place)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = f"a tensor of shape {list(loss.shape)} and {loss.dtype}" if isinstance(loss, Tensor) else _kind(loss)
        raise TaskError(f"{method} must return a scalar tensor; got {got} ({place}). Take the mean over the batch.")
    if place.split not in ("train", "full"):
        return float(loss.detach())
    gradient = None
    if loss.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(loss, prediction, allow_unused=True)
        except Exception as error:
            blame(error, method, place)
    if gradient is None:
        raise TaskError(
            f"{method} returned a loss without a gradient for the prediction ({place}). Operations such as argmax, detach, "
            "item and no_grad cut it."
        )
    return float(loss.detach())


def _check_loss_on_cpu(task: Task, prediction: Tensor, batch: Batch, place: Place) -> None:
    """Find labels out of range before the GPU meets them, which would end all work on it."""
    parts = Batch(*(None if part is None else part.cpu() for part in batch))  # type: ignore[arg-type]
    try:
        task.loss(prediction.cpu(), parts)
    except IndexError as error:
        _blame_labels(task, prediction.cpu(), parts, place)
        blame(error, f"{_name(task)}.loss", place)
    except Exception:  # a task may hold tensors on the GPU; its loss is checked there
        return


def _blame_labels(task: Task, prediction: Tensor, batch: Batch, place: Place) -> None:
    """Raise if labels do not fit the prediction, which a failed loss is mostly about."""
    target, classes = batch.target, prediction.shape[-1] if prediction.dim() else 0
    if not classes or prediction.numel() != classes * target.numel():
        return
    if target.dtype != torch.int64 and prediction.dim() == target.dim() + 1:
        raise TaskError(
            f"{_name(task)}.batch returned a target of {target.dtype}, and labels of classes must be int64 ({place}). Use "
            "target.long()."
        )
    if not target.is_floating_point():
        _check_labels(task, batch, classes, place)


def _check_labels(task: Task, batch: Batch, classes: int, place: Place) -> None:
    target = batch.target
    wrong = (target < 0) | (target >= classes)
    wrong = wrong if batch.mask is None else wrong & batch.mask
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise TaskError(
            f"{_name(task)}.batch returned the label {int(target[tuple(at)])} at {_position(at, _axes(batch))}, and the head "
            f"has {classes} outputs: labels must lie in 0..{classes - 1} ({place})."
        )


def _check_tokens(task: Task, model: Model, batch: Batch, place: Place) -> None:
    """Raise for tokens that the encoder does not know."""
    x, symbols = batch.x, _symbols(model.encoder)
    if symbols is None:
        return
    if x.is_floating_point():
        raise TaskError(f"{_name(task)}.batch returned x of {x.dtype}, and the encoder reads integer tokens ({place}).")
    wrong = (x < 0) | (x >= symbols)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise TaskError(
            f"{_name(task)}.batch returned the token {int(x[tuple(at)])} at {_position(at, INPUT_AXES)}, and the encoder has "
            f"{symbols} symbols: tokens must lie in 0..{symbols - 1} ({place})."
        )


def _symbols(encoder: nn.Module) -> int | None:
    """The number of tokens that an encoder knows; None for an encoder that does not read tokens, or in its own way."""
    if isinstance(encoder, OneHot):
        return len(encoder.eye)
    return encoder.num_embeddings if isinstance(encoder, nn.Embedding) else None


def _check_metrics(task: Task, prediction: Tensor, batch: Batch, place: Place) -> None:
    method = f"{_name(task)}.metrics"
    with torch.no_grad():
        metrics = called(task, "metrics", task.metrics, prediction, batch, place=place)
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise TaskError(f"{method} must return a dict of scalar tensors by name; got {_kind(metrics)} ({place}).")
    if task.metric not in metrics:
        names = ", ".join(map(repr, metrics)) or "none"
        raise TaskError(f"{method} must return {task.metric!r}, the task's metric; it returned {names} ({place}).")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
            got = f"a tensor of shape {list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else _kind(value)
            raise TaskError(f"{method} must return scalar tensors; got {got} for {name!r} ({place}).")
    weight = called(task, "weight", task.weight, batch, place=place)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise TaskError(f"{_name(task)}.weight must return a number above 0; got {_shown(weight)} ({place}).")
    carried = called(task, "carried", task.carried, place.number, place.size, place=place, split=place.split)
    if not isinstance(carried, bool):
        raise TaskError(f"{_name(task)}.carried must return True or False; got {_shown(carried)} ({place}).")


# -- numbers that are not finite ----------------------------------------------------------------------------------------------


def _check_input(task: Task, batch: Batch, encoded: Tensor, place: Place) -> None:
    """Raise for a number in x that is not finite and that the recurrent stack reads. Padding does not count."""
    within, x = _within(batch), batch.x
    if x.is_floating_point() and not torch.isfinite(encoded).all():
        wrong = ~torch.isfinite(x) & within.reshape(*within.shape, *[1] * (x.dim() - 2))
        _blame_number(task, "x", INPUT_AXES, x, wrong, place)


def _check_target(task: Task, batch: Batch, place: Place) -> None:
    """Raise for a target that is not finite. Masked targets do not count."""
    target, mask = batch.target, batch.mask
    if target.is_floating_point():
        wrong = ~torch.isfinite(target)
        _blame_number(task, "a target", _axes(batch), target, wrong if mask is None else wrong & mask, place)


def _within(batch: Batch) -> Tensor:
    """[T, B]: True up to the end of each row."""
    T, B = batch.x.shape[:2]
    time = torch.arange(T, device=batch.x.device).unsqueeze(1)
    return (time < (T if batch.lengths is None else batch.lengths.to(time.device))).expand(T, B)


def _blame_number(task: Task, what: str, axes: Sequence[str], values: Tensor, wrong: Tensor, place: Place) -> None:
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise TaskError(
            f"the data are not finite: {_name(task)}.batch returned {what} with {float(values[tuple(at)])} at "
            f"{_position(at, axes)} ({place}). Remove or replace such values."
        )


INPUT_AXES = ("step", "row", "feature", "pixel row", "pixel column")


def _axes(batch: Batch) -> tuple[str, ...]:
    """The axes of the target: rows and columns, or steps and rows."""
    T, B = batch.x.shape[:2]
    return INPUT_AXES if batch.target.shape[:2] == (T, B) else ("row", "column")


def _position(at: Sequence[int], axes: Sequence[str]) -> str:
    """An index in words."""
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))


# -- words --------------------------------------------------------------------------------------------------------------------


def _name(task: Task) -> str:
    return type(task).__name__


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
