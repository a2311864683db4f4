"""Rows for people: a table, and under it what could not be measured and why."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unfading.bench.results import Beside, Pass, Row

FAR = 0.1  # a control this far from 1 is shown as a warning
OWN = {"GRU": "GRU", "Elman": "RNN"}  # torch.nn's name of a cell; its LSTM has a column for all


def tables(rows: Sequence[Row], about: dict[str, Any]) -> RenderableType:
    """All rows, by kind, with the machine underneath."""
    measured = [row for row in rows if row.status == "measured"]
    parts: list[RenderableType] = []
    for kind, make in (("layer", _layers), ("lengths", _lengths), ("stream", _streams), ("last", _last), ("fleet", _fleets)):
        some = [row for row in measured if row.kind == kind]
        if some:
            parts += [*make(some), ""]
    replayed = _captured(measured)
    parts += [*replayed, ""] if replayed else []
    for row in rows:
        if row.status != "measured":
            style = "bold red" if row.status in ("wrong", "failed") else "yellow"
            beside = ", ".join(f"{peer.name} {milliseconds(peer.both.ms)} ms" for peer in row.peers if peer.both is not None)
            line = f"{row.title}: {row.reason}" + (f"; beside it, fwd+bwd: {beside}" if beside else "")
            parts.append(Text.assemble((f"{row.status}: ", style), line))
    # A peer is missing from all lines for one reason, mostly.
    for name, reason in dict.fromkeys((peer.name, peer.reason) for row in rows for peer in row.peers if peer.reason):
        parts.append(Text.assemble(("not timed: ", "yellow"), f"{name}: {reason}"))
    machine, versions = about["machine"], about["versions"]
    threads = sorted({row.threads for row in rows})
    said = [
        f"torch threads: {', '.join(map(str, threads))}",
        f"{machine['cpu']}, {machine['cores']} cores",
        *([machine["gpu"], f"Triton {versions.get('triton')}"] if machine.get("gpu") else []),
        f"torch {versions['torch']}",
        f"unfading {versions['unfading']}",
        versions["compiler"] or "no C compiler",
    ]
    parts.append(Text("; ".join(said) + ".", style="dim"))
    return Group(*parts)


def _layers(rows: Sequence[Row]) -> list[RenderableType]:
    table = _table("forward\nms", "fwd+bwd\nms", "x\nreference", "x\ntorch.nn", "x own\nGEMMs", "control")
    for row in rows:
        forward, both = row.forward, row.both
        assert forward is not None
        assert both is not None
        table.add_row(
            *_size(row),
            milliseconds(forward.ms),
            milliseconds(both.ms),
            _pair(forward.x_reference, both.x_reference),
            _pair(forward.x_torch, both.x_torch),
            "" if both.of_products is None else f"{both.of_products:.2f}",
            _control(forward, both),
        )
    return [
        _title("One layer, input size 8, float32"),
        table,
        _note(
            "x reference, x torch.nn: how many times faster than the reference loop and than torch.nn's nearest, forward / "
            "forward + backward. x own GEMMs: time of forward + backward over that of the cell's own matrix products. "
            "control: the same call timed twice; of the two passes the ratio further from 1."
        ),
    ]


def _lengths(rows: Sequence[Row]) -> list[RenderableType]:
    table = _table("fwd+bwd\nms", "of full", "control")
    for row in rows:
        assert row.both is not None
        table.add_row(*_size(row), milliseconds(row.both.ms), f"{row.both.of_full:.2f}", _control(row.both))
    return [
        _title("Rows of unequal length, half of T on average"),
        table,
        _note("of full: time over that of the batch with all rows at full length."),
    ]


def _streams(rows: Sequence[Row]) -> list[RenderableType]:
    table = _table("us a step", "x nn.LSTM", "control")
    for row in rows:
        assert row.forward is not None
        table.add_row(*_size(row), f"{1e3 * row.forward.ms:.1f}", f"{row.forward.x_torch:.1f}", _control(row.forward))
    return [
        _title("stream(): one step at a time"),
        table,
        _note("x nn.LSTM: how many times faster than nn.LSTM called for one step at a time."),
    ]


def _last(rows: Sequence[Row]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        table = _table("fwd\nus/step", "fwd+bwd\nms", "cuDNN\nLSTM", "cuDNN\nown", "x\neager", "x\ngraph", "error")
        for row in rows:
            if row.dtype == dtype:
                assert row.forward is not None
                assert row.both is not None
                table.add_row(
                    *_size(row),
                    f"{1e3 * row.forward.ms / row.T:.2f}",
                    milliseconds(row.both.ms),
                    _of(_both_of(row, "cuDNN LSTM")),
                    _of(_both_of(row, f"cuDNN {OWN.get(row.cell)}")),
                    _faster(_both_of(row, "eager loop")),
                    _faster(_both_of(row, "graphed loop")),
                    "" if row.error is None else f"{row.error:.0e}",
                )
        parts += [_title(f"One layer on a GPU, input size 1, loss on the last step, {dtype}"), table, ""]
    parts[-1] = _note(
        "cuDNN LSTM, cuDNN own: our forward + backward over that of nn.LSTM and of torch.nn's module for the same cell. x "
        "eager, x graph: how many times faster than the reference loop and than the same in a CUDA graph. error: of the "
        "output or gradient that is furthest from the float64 reference, relative to its norm."
    )
    return parts


def _captured(rows: Sequence[Row]) -> list[RenderableType]:
    """What the GPU alone takes: both passes replayed from a CUDA graph, as in training; nothing where none was captured."""
    table = _table("dtype", "models", "fwd+bwd\nms", "cuDNN\nLSTM ms", "ratio")
    for row in rows:
        ours, theirs = _both_of(row, "fused, captured"), _both_of(row, "cuDNN LSTM, captured")
        if ours is not None:
            beside = ("", "") if theirs is None else (milliseconds(theirs.ms), f"{ours.ms / theirs.ms:.2f}")
            table.add_row(*_size(row), row.dtype, str(row.models), milliseconds(ours.ms), *beside)
    return [_title("Replayed from a CUDA graph, as in training"), table] if table.row_count else []


def _fleets(rows: Sequence[Row]) -> list[RenderableType]:
    table = _table("models", "fwd+bwd\nms", "of one\nby one", "error")
    for row in rows:
        assert row.both is not None
        error = "" if row.error is None else f"{row.error:.0e}"
        table.add_row(*_size(row), str(row.models), milliseconds(row.both.ms), _of(_both_of(row, "one by one")), error)
    return [
        _title("Many models at once"),
        table,
        _note("of one by one: time over that of the same models, one after the other."),
    ]


def _both_of(row: Row, name: str) -> Beside | None:
    peer = row.peer(name)
    return None if peer is None else peer.both


def _of(beside: Beside | None) -> str:
    return "" if beside is None or beside.of is None else f"{beside.of:.2f}"


def _faster(beside: Beside | None) -> str:
    return "" if beside is None or beside.of is None else _times(1 / beside.of)


def _title(said: str) -> Text:
    return Text(said, style="bold")


def _note(said: str) -> Text:
    return Text(said, style="dim")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    table.add_column("cell", style="bold")  # the one that gives way on a narrow screen
    for heading in ("T", "B", "H", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _size(row: Row) -> list[str]:
    return [row.name, str(row.T), str(row.B), str(row.H)]


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _pair(forward: float | None, both: float | None) -> str:
    return "" if forward is None or both is None else f"{_times(forward)}/{_times(both)}"


def _control(*passes: Pass) -> Text:
    furthest = max((found.control for found in passes), key=lambda control: abs(control - 1))
    return Text(f"{furthest:.2f}", style="yellow" if abs(furthest - 1) > FAR else "")
