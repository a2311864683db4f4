"""The schema of every JSON object that is read: run files, log rows, records, headers of checkpoints, cards of weights.

`check` compares an object with its schema. Further fields are allowed, so that a later version can add some. The fields of a
run itself are checked by `training.check_settings`.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from unfading.files.checked_json import brief

# Version of the fields of a run and of the files written for it; a file of another version is refused.
VERSION = 1

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = float | None
Scores = dict[str, Number]
_CONFIG = ConfigDict(strict=True, extra="allow")


@with_config(_CONFIG)
class RunFields(TypedDict):
    """The fields of a run that a report needs."""

    task: str
    task_options: dict[str, Any]
    cell: str
    cell_options: dict[str, Any]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]


@with_config(_CONFIG)
class RunFile(TypedDict):
    """run.json. The run is checked when it is built."""

    version: int
    run: dict[str, Any]
    sources: NotRequired[dict[str, str]]  # the hash of the source of each class of a user


@with_config(_CONFIG)
class LogLine(TypedDict):
    """A line of curve.jsonl: an interval of training, or what a watch returned."""

    step: Count
    loss: NotRequired[Number]
    rate: NotRequired[Number]
    seconds: NotRequired[Number]
    valid: NotRequired[Scores]


@with_config(_CONFIG)
class Evaluation(TypedDict):
    """The step and the scores of an evaluation."""

    step: NotRequired[Count]
    valid: Scores


@with_config(_CONFIG)
class Parameters(TypedDict):
    """Numbers of parameters."""

    all: Count
    recurrent: Count


@with_config(_CONFIG)
class Compressed(TypedDict):
    """The size of a compressed model."""

    entries: Count  # of its matrices
    nonzeros: Count  # of them
    bytes: Count  # of all parameters, each matrix in the smaller of its dense and its sparse form


@with_config(_CONFIG)
class MatrixOfClasses(TypedDict):
    """A confusion matrix."""

    split: str
    classes: list[str | int | float | bool]
    counts: list[list[Count]]  # [true, predicted]


@with_config(_CONFIG)
class About(TypedDict):
    """The machine and the sources of a record."""

    sources: NotRequired[dict[str, str]]


@with_config(_CONFIG)
class RecordFile(TypedDict):
    """record.json."""

    version: int
    key: str
    run: RunFields
    status: Literal["finished", "diverged"]
    reason: str | None
    steps: Count
    returns: Count
    measure: str
    rising: bool
    guess: Number
    best: Evaluation | None
    test: Scores | None
    seconds: Number
    milliseconds_per_sequence: Number
    parameters: Parameters
    kilobytes: Number
    compressed: NotRequired[Compressed]
    stopped_by: NotRequired[str]  # the callback that has ended the run
    metrics: NotRequired[list[str]]  # names of the scores that the user asked for
    confusion_matrix: NotRequired[MatrixOfClasses]
    about: About | None
    curve: list[LogLine]


@with_config(_CONFIG)
class CheckpointHeader(TypedDict):
    """The header of best.safetensors, and the part that all checkpoints share."""

    version: int
    run: dict[str, Any]
    step: Count


@with_config(_CONFIG)
class BackendEntry(TypedDict):
    """A backend that ran a cell from some step on."""

    cell: str
    backend: str | None


@with_config(_CONFIG)
class LastHeader(CheckpointHeader):
    """The header of last.safetensors."""

    seconds: float
    time: Count
    best: Evaluation | None
    least: Number
    loss: Number
    reached: bool
    backends: NotRequired[list[BackendEntry]]


@with_config(_CONFIG)
class Card(TypedDict):
    """The card of a file of weights."""

    version: int
    kind: str
    run: RunFields
    sha256: str
    chosen: NotRequired[Evaluation | None]
    measure: NotRequired[str]
    test: NotRequired[Scores | None]
    steps: NotRequired[Count]
    parameters: NotRequired[Parameters]
    compressed: NotRequired[Compressed]


# Each kind of object, with its name in errors.
NAMES: dict[Any, str] = {
    RunFields: "a run of unfading",
    RunFile: "a run of unfading",
    LogLine: "a log row of a run",
    RecordFile: "a record of an unfading run",
    CheckpointHeader: "a checkpoint of a run",
    LastHeader: "a checkpoint of a run",
    Card: "a card of weights",
}
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
# What a value must be where pydantic refuses its type.
_TYPES = {
    "string_type": "str",
    "dict_type": "an object",
    "list_type": "a list",
    "int_type": "int",
    "float_type": "int or float or null",
    "bool_type": "true or false",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
}


def fields(kind: Any) -> frozenset[str]:
    """The names of the fields of a kind of object."""
    return frozenset(kind.__annotations__)


def check_version(value: dict[str, Any], where: str, way_out: str) -> None:
    """Raise unless the object is of the version that is read."""
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"{where} is of version {brief(version)}; this unfading reads version {VERSION}. {way_out}")


def check(kind: Any, value: Any, where: str, way_out: str) -> None:
    """Raise a ValueError of one sentence, with the name of the field, unless the object has the fields of its kind."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        _ADAPTERS[kind].validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, name = _place(where, first["loc"][:-1]), first["loc"][-1] if first["loc"] else None
        if first["type"] == "missing":
            raise ValueError(f"{place} is not {NAMES[kind]}: it has no {name!r}. {way_out}") from None
        expected = _TYPES[first["type"]].format(**first.get("ctx", {})) if first["type"] in _TYPES else first["msg"]
        thing = _place(where, first["loc"]) if not isinstance(name, str) else f"{place}: {name!r}"
        raise ValueError(f"{thing} must be {expected}; got {brief(first['input'])}. {way_out}") from None


def _place(where: str, steps: tuple[int | str, ...]) -> str:
    """The name of an object inside another, e.g. "record.json, log row 3"."""
    for before, step in zip((None, *steps), steps, strict=False):
        if isinstance(step, int):
            where = f"{where}, log row {step + 1}" if before == "curve" else f"{where}, item {step + 1}"
        elif step != "curve":
            where = f"{where}, {brief(step)}"
    return where
