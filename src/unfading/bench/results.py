"""What came out of a case: a row, and its form as a JSON line."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from unfading.bench.cases import Case, Kind, title

# "refused": the cell does not run fused. "wrong": it does, and computes something else. "unsteady": the control says that
# times on several threads mean nothing here. "failed": something raised.
Status = Literal["measured", "refused", "wrong", "unsteady", "failed"]


@dataclass(frozen=True)
class Pass:
    """Times of one pass: forward without a graph, or forward and backward with all weight gradients."""

    ms: float  # of a whole call; of one step where a layer is pushed step by step
    rounds: int
    control: float  # time of the same call entered a second time, over its time
    x_reference: float | None = None  # how many times faster than the reference loop
    x_torch: float | None = None  # than torch.nn's nearest
    of_products: float | None = None  # time over that of the cell's own matrix products
    of_full: float | None = None  # time over that of the batch with all rows at full length


@dataclass(frozen=True)
class Beside:
    """Times of another on the same pass."""

    ms: float
    rounds: int
    of: float | None  # our time over its; None where we have none


@dataclass(frozen=True)
class Peer:
    """Another way to do the work of a case on a GPU, timed in turns with ours, or the reason why not."""

    name: str
    reason: str | None = None
    error: float | None = None  # as a row's
    first_s: float | None = None
    forward: Beside | None = None
    both: Beside | None = None


@dataclass(frozen=True)
class Row:
    """One case, measured or with the reason why not."""

    kind: Kind
    name: str  # of the variant
    cell: str
    options: dict[str, Any]
    scale: float  # of the weights, against the cell's own start
    T: int
    B: int
    H: int
    input_size: int
    dtype: str
    threads: int
    status: Status
    reason: str | None = None
    dense: bool | None = None  # no matrix of the step is kept in factors
    matrices: float | None = None  # products inside a step, in units of one H x H matrix; None where they are not such
    torch_name: str | None = None  # torch.nn's nearest
    forward: Pass | None = None
    both: Pass | None = None
    # On a GPU alone:
    models: int = 1  # trained together
    error: float | None = None  # distance of the furthest output or gradient from the float64 reference, of its norm
    error_contractive: float | None = None  # the same over at most 200 steps, with weights under which errors do not grow
    first_s: float | None = None  # seconds of the first calls, compiling included as far as no cache on disk saves it
    peers: tuple[Peer, ...] = ()

    @property
    def case(self) -> tuple[Any, ...]:
        """The `key` of its case."""
        return self.kind, self.name, self.T, self.B, self.H, self.dtype, self.models

    @property
    def title(self) -> str:
        return title(*self.case)

    def peer(self, name: str) -> Peer | None:
        return next((peer for peer in self.peers if peer.name == name), None)

    def record(self, about: dict[str, Any]) -> dict[str, Any]:
        """As JSON, with what was measured on what."""
        return asdict(self) | about


def of_case(case: Case, threads: int = 1) -> dict[str, Any]:
    """The fields of a row that its case decides."""
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
        "threads": threads,
    }


def from_record(record: dict[str, Any]) -> Row:
    fields = {name: record[name] for name in Row.__dataclass_fields__ if name in record}
    fields |= _passes(record, Pass)
    fields["peers"] = tuple(Peer(**peer | _passes(peer, Beside)) for peer in record.get("peers", ()))
    return Row(**fields)


def _passes(record: dict[str, Any], make: type[Pass] | type[Beside]) -> dict[str, Any]:
    return {name: None if record[name] is None else make(**record[name]) for name in ("forward", "both")}


def read(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows of a results file and the records they came from; of a case that was measured twice the later one counts."""
    found: dict[Any, tuple[Row, dict[str, Any]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            row = from_record(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no line that `unfading bench --json` writes: {error!r}.") from None
        key = (*row.case, row.threads)
        found.pop(key, None)
        found[key] = row, record
    return [row for row, _ in found.values()], [record for _, record in found.values()]
