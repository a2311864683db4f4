"""Results as tables, and below them what could not be measured and why."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unfading.bench.results import Pass, PeerPass, Result

FAR = 0.1  # a control further from 1 is highlighted
OWN = {"GRU": "GRU", "Elman": "RNN"}  # torch.nn's name of a cell; its LSTM has a column of its own


def tables(results: Sequence[Result], about: dict[str, Any]) -> RenderableType:
    """All results by kind, with the machine below."""
    measured = [result for result in results if result.status == "measured"]
    parts: list[RenderableType] = []
    for kind, make in (("layer", _layers), ("lengths", _lengths), ("stream", _streams), ("last", _last), ("fleet", _fleets)):
        selected = [result for result in measured if result.kind == kind]
        if selected:
            parts += [*make(selected), ""]
    captured = _captured(measured)
    parts += [*captured, ""] if captured else []
    for result in results:
        if result.status != "measured":
            style = "bold red" if result.status in ("wrong", "failed") else "yellow"
            others = ", ".join(f"{peer.name} {milliseconds(peer.both.ms)} ms" for peer in result.peers if peer.both is not None)
            line = f"{result.title}: {result.reason}" + (f"; beside it, fwd+bwd: {others}" if others else "")
            parts.append(Text.assemble((f"{result.status}: ", style), line))
    # Mostly, one reason holds for all cases.
    for name, reason in dict.fromkeys((peer.name, peer.reason) for result in results for peer in result.peers if peer.reason):
        parts.append(Text.assemble(("not timed: ", "yellow"), f"{name}: {reason}"))
    machine, versions = about["machine"], about["versions"]
    threads = sorted({result.threads for result in results})
    facts = [
        f"torch threads: {', '.join(map(str, threads))}",
        f"{machine['cpu']}, {machine['cores']} cores",
        *([machine["gpu"], f"Triton {versions.get('triton')}"] if machine.get("gpu") else []),
        f"torch {versions['torch']}",
        f"unfading {versions['unfading']}",
        versions["compiler"] or "no C compiler",
    ]
    parts.append(Text("; ".join(facts) + ".", style="dim"))
    return Group(*parts)


def _layers(results: Sequence[Result]) -> list[RenderableType]:
    table = _table("forward\nms", "fwd+bwd\nms", "x\nreference", "x\ntorch.nn", "x own\nGEMMs", "control")
    for result in results:
        forward, both = result.forward, result.both
        assert forward is not None
        assert both is not None
        table.add_row(
            *_size(result),
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
            "x reference, x torch.nn: how many times faster than the reference loop and than torch.nn's equivalent, forward / "
            "forward + backward. x own GEMMs: time of forward + backward over that of the cell's own matrix products. "
            "control: ratio of two timings of the same call, of the two passes the one further from 1."
        ),
    ]


def _lengths(results: Sequence[Result]) -> list[RenderableType]:
    table = _table("fwd+bwd\nms", "of full", "control")
    for result in results:
        assert result.both is not None
        table.add_row(*_size(result), milliseconds(result.both.ms), f"{result.both.of_full:.2f}", _control(result.both))
    return [
        _title("Rows of unequal length, half of T on average"),
        table,
        _note("of full: time over that of the same batch with all rows at full length."),
    ]


def _streams(results: Sequence[Result]) -> list[RenderableType]:
    table = _table("us/step", "x nn.LSTM", "control")
    for result in results:
        assert result.forward is not None
        table.add_row(
            *_size(result), f"{1e3 * result.forward.ms:.1f}", f"{result.forward.x_torch:.1f}", _control(result.forward)
        )
    return [
        _title("stream(): one step at a time"),
        table,
        _note("x nn.LSTM: how many times faster than nn.LSTM called for one step at a time."),
    ]


def _last(results: Sequence[Result]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for dtype, features in dict.fromkeys((result.dtype, result.input_size) for result in results):
        table = _table("fwd\nus/step", "fwd+bwd\nms", "cuDNN\nLSTM", "cuDNN\nown", "x\neager", "x\ngraph", "error")
        for result in results:
            if (result.dtype, result.input_size) == (dtype, features):
                assert result.forward is not None
                assert result.both is not None
                table.add_row(
                    *_size(result),
                    f"{1e3 * result.forward.ms / result.T:.2f}",
                    milliseconds(result.both.ms),
                    _of(_both_of(result, "cuDNN LSTM")),
                    _of(_both_of(result, f"cuDNN {OWN.get(result.cell)}")),
                    _faster(_both_of(result, "eager loop")),
                    _faster(_both_of(result, "graphed loop")),
                    "" if result.error is None else f"{result.error:.0e}",
                )
        parts += [_title(f"On a GPU, input size {features}, loss on the last step, {dtype}"), table, ""]
    parts[-1] = _note(
        "cuDNN LSTM, cuDNN own: time of our forward + backward over that of nn.LSTM and of torch.nn's module for the same "
        "cell. x eager, x graph: how many times faster than the reference loop and than its CUDA graph. error: largest "
        "error of an output or gradient against the float64 reference, relative to its norm."
    )
    return parts


def _captured(results: Sequence[Result]) -> list[RenderableType]:
    """The time of the GPU alone: both passes replayed from a CUDA graph, as in training; empty if none was captured."""
    table = _table("dtype", "models", "fwd+bwd\nms", "cuDNN\nLSTM ms", "ratio")
    for result in results:
        ours, theirs = _both_of(result, "fused, captured"), _both_of(result, "cuDNN LSTM, captured")
        if ours is not None:
            beside = ("", "") if theirs is None else (milliseconds(theirs.ms), f"{ours.ms / theirs.ms:.2f}")
            table.add_row(*_size(result), result.dtype, str(result.models), milliseconds(ours.ms), *beside)
    return [_title("Replayed from a CUDA graph, as in training"), table] if table.row_count else []


def _fleets(results: Sequence[Result]) -> list[RenderableType]:
    table = _table("models", "fwd+bwd\nms", "of one\nby one", "error")
    for result in results:
        assert result.both is not None
        error = "" if result.error is None else f"{result.error:.0e}"
        table.add_row(
            *_size(result), str(result.models), milliseconds(result.both.ms), _of(_both_of(result, "one by one")), error
        )
    return [
        _title("Many models at once"),
        table,
        _note("of one by one: time over that of the same models run one after the other."),
    ]


def _both_of(result: Result, name: str) -> PeerPass | None:
    peer = result.peer(name)
    return None if peer is None else peer.both


def _of(beside: PeerPass | None) -> str:
    return "" if beside is None or beside.of is None else f"{beside.of:.2f}"


def _faster(beside: PeerPass | None) -> str:
    return "" if beside is None or beside.of is None else _times(1 / beside.of)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _note(text: str) -> Text:
    return Text(text, style="dim")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    table.add_column("cell", style="bold")  # the column that wraps on a narrow screen
    for heading in ("T", "B", "H", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _size(result: Result) -> list[str]:
    return [result.label, str(result.T), str(result.B), str(result.H)]


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _pair(forward: float | None, both: float | None) -> str:
    return "" if forward is None or both is None else f"{_times(forward)}/{_times(both)}"


def _control(*passes: Pass) -> Text:
    furthest = max((each.control for each in passes), key=lambda control: abs(control - 1))
    return Text(f"{furthest:.2f}", style="yellow" if abs(furthest - 1) > FAR else "")
