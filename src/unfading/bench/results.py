"""The result of a case, and its form as a JSON line."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unfading.bench.cases import Case, Kind, title
from unfading.files.checked_json import read_objects, sentence

# "refused": the cell does not run fused. "wrong": its fused loop gives other results than the reference. "unsteady": times on
# several threads vary too much, as the control shows. "failed": an exception.
Status = Literal["measured", "refused", "wrong", "unsteady", "failed"]


@dataclass(frozen=True)
class Pass:
    """Times of one pass: forward without a graph, or forward and backward with all weight gradients."""

    ms: float  # of a whole call; of one step for a layer that gets one step at a time
    rounds: int
    control: float  # time of the same call, entered a second time, over its time
    x_reference: float | None = None  # how many times faster than the reference loop
    x_torch: float | None = None  # how many times faster than torch.nn's equivalent
    of_products: float | None = None  # time over that of the cell's own matrix products
    of_full: float | None = None  # time over that of the same batch with all rows at full length


@dataclass(frozen=True)
class PeerPass:
    """Times of a peer for one pass."""

    ms: float
    rounds: int
    of: float | None  # our time over the peer's; None if ours was not measured


@dataclass(frozen=True)
class Peer:
    """Another implementation of a case on a GPU, timed in turns with ours, or the reason why it was not timed."""

    name: str
    reason: str | None = None
    error: float | None = None  # as in `Result`
    first_s: float | None = None
    forward: PeerPass | None = None
    both: PeerPass | None = None


@dataclass(frozen=True)
class Result:
    """One case: its times, or the reason why it was not timed."""

    kind: Kind
    name: str  # of the variant
    cell: str
    options: dict[str, Any]
    scale: float  # factor on the initial weights of the cell
    T: int
    B: int
    H: int
    input_size: int
    dtype: str
    threads: int
    status: Status
    reason: str | None = None
    dense: bool | None = None  # no matrix of the step is stored as a product of factors
    matrices: float | None = None  # products inside a step, in units of one H x H matrix; None for other shapes
    torch_name: str | None = None  # torch.nn's equivalent
    forward: Pass | None = None
    both: Pass | None = None
    # On a GPU only:
    models: int = 1  # trained together
    num_layers: int = 1
    error: float | None = None  # largest relative error of an output or gradient against the float64 reference
    error_contractive: float | None = None  # the same over at most 200 steps, with weights under which errors do not grow
    first_s: float | None = None  # seconds of the first calls, including compilation that no cache on disk saves
    peers: tuple[Peer, ...] = ()

    @property
    def case(self) -> tuple[Any, ...]:
        """The `key` of the case."""
        case = self.kind, self.name, self.T, self.B, self.H, self.dtype, self.models
        return *case, self.input_size, self.num_layers

    @property
    def title(self) -> str:
        return title(*self.case)

    @property
    def label(self) -> str:
        """The variant, with the number of its layers."""
        return self.name if self.num_layers == 1 else f"{self.num_layers} layers of {self.name}"

    def peer(self, name: str) -> Peer | None:
        return next((peer for peer in self.peers if peer.name == name), None)

    def record(self, about: dict[str, Any]) -> dict[str, Any]:
        """As JSON, with machine, versions and command."""
        return asdict(self) | about


def case_fields(case: Case, threads: int = 1) -> dict[str, Any]:
    """The fields of a result that its case decides."""
    variant = case.variant
    return {
        "kind": case.kind,
        "name": variant.name,
        "cell": variant.cell,
        "options": variant.options(case.T, case.H),
        "scale": variant.scale(case.T),
        "T": case.T,
        "B": case.B,
        "H": case.H,
        "input_size": case.input_size,
        "dtype": case.dtype,
        "models": case.models,
        "num_layers": case.num_layers,
        "threads": threads,
    }


def from_record(record: dict[str, Any]) -> Result:
    """The result of a JSON line."""
    fields = {name: record[name] for name in Result.__dataclass_fields__ if name in record}
    fields |= _passes(record, Pass)
    fields["peers"] = tuple(Peer(**peer | _passes(peer, PeerPass)) for peer in record.get("peers", ()))
    return Result(**fields)


def _passes(record: dict[str, Any], make: type[Pass] | type[PeerPass]) -> dict[str, Any]:
    return {name: None if record[name] is None else make(**record[name]) for name in ("forward", "both")}


def read(path: Path) -> tuple[list[Result], list[dict[str, Any]]]:
    """The results of a file and their records. Of a case that was measured twice, the later result counts."""
    latest: dict[Any, tuple[Result, dict[str, Any]]] = {}
    for number, record in enumerate(read_objects(path, "Remove it."), 1):
        try:
            result = from_record(record)
            key = (*result.case, result.threads)
            latest.pop(key, None)
            latest[key] = result, record
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}, was not written by `unfading bench`: {sentence(error)}.") from None
    return [result for result, _ in latest.values()], [record for _, record in latest.values()]
