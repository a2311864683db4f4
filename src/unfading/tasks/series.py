"""Readers of the UCR and UEA archives: labelled series in `.ts` (any number of channels, any lengths) and `.tsv` (one channel).

`.tsv`: one series per line, first its label, then its values, separated by tabs; a shorter series is padded with NaN.
`.ts`: comments start with `#` and header fields with `@`; after `@data` comes one series per line, `channel:channel:...:label`,
each channel a comma-separated list of values. `?` and NaN mark missing values. Missing values inside a series are interpolated
linearly, as in the archive's own adjusted files.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float32).max)
Values = NDArray[np.float32]  # [steps, channels]


class Series(NamedTuple):
    """The content of a file, in file order."""

    values: list[Values]
    labels: list[str]
    classes: list[str]  # as the header lists them, or else the labels that occur, sorted


def read_series(path: Path) -> Series:
    """Read a `.ts` or `.tsv` file. An invalid line is named in the error."""
    if path.suffix not in (".ts", ".tsv"):
        raise ValueError(f"{path} is neither .ts nor .tsv, the archives' formats for series. Fetch the set in one of the two.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not text: byte {error.start} is {byte:#04x}. Fetch the file again.") from None
    facts, start = _header(path, lines) if path.suffix == ".ts" else ({}, 0)
    values: list[Values] = []
    labels: list[str] = []
    for number, line in enumerate(lines[start:], start=start + 1):
        if line.strip():
            try:
                channels, label = _ts_line(line, facts) if path.suffix == ".ts" else _tsv_line(line, lines[0])
                values.append(_steps(channels))
            except ValueError as error:
                # Most often this is the last line of a truncated file.
                raise ValueError(f"{path}, line {number}: {error}. Fetch the file again.") from None
            labels.append(label)
    if not values:
        raise ValueError(f"{path} holds no series. Fetch the file again.")
    named = facts.get("classlabel", [])[1:]
    return Series(values, labels, named or sorted(set(labels), key=float if path.suffix == ".tsv" else str))


def _header(path: Path, lines: list[str]) -> tuple[dict[str, list[str]], int]:
    """The header fields of a `.ts` file, and the number of lines before its series."""
    start = next((number for number, line in enumerate(lines, start=1) if line.strip().lower() == "@data"), None)
    if start is None:
        raise ValueError(f"{path} has no @data line, after which the series stand. Fetch the file again.")
    facts: dict[str, list[str]] = {}
    for line in lines[: start - 1]:
        if line.startswith("@"):
            name, *words = line[1:].split()
            facts[name.lower()] = words
    if _true(facts, "timestamps"):
        raise ValueError(f"{path} has a time stamp with each value, and only evenly spaced series are read. Resample it first.")
    if not _true(facts, "classlabel"):
        raise ValueError(f"{path} does not say `@classLabel true`, so it is not a classification task. Take another set.")
    return facts, start


def _true(facts: dict[str, list[str]], name: str) -> bool:
    return [word.lower() for word in facts.get(name, [])[:1]] == ["true"]


def _ts_line(line: str, facts: dict[str, list[str]]) -> tuple[list[str], str]:
    """Channels, as text, and label, checked against the header."""
    *channels, label = line.strip().split(":")
    promised = facts.get("dimensions", ["1"])
    if [str(len(channels))] != promised:
        raise ValueError(f"{len(channels)} channels and a label where {' '.join(promised)} and a label are promised")
    steps, promised = str(channels[0].count(",") + 1), facts.get("serieslength", [])
    if promised and [steps] != promised:
        raise ValueError(f"{steps} steps where {' '.join(promised)} are promised")
    known = facts["classlabel"][1:]
    if known and label.strip() not in known:
        raise ValueError(f"label {label.strip()!r} is not one of {', '.join(known)}")
    return channels, label.strip()


def _tsv_line(line: str, first: str) -> tuple[list[str], str]:
    """The one channel, as text with commas, and the label."""
    label, *row = line.split("\t")
    width = first.count("\t")
    if len(row) != width:
        raise ValueError(f"{len(row)} values where line 1 has {width}")
    number = _number(label)
    if np.isnan(number):
        raise ValueError("the label is missing")
    # Labels are written 1, 1.0 or 1.0000e+00 in different files of the archive.
    return [",".join(row)], f"{number:g}"


def _number(text: str) -> float:
    try:
        number = float("nan") if text.strip() == "?" else float(text)
    except ValueError:
        raise ValueError(f"{text.strip()[:20]!r} is not a number") from None
    if abs(number) > LARGEST:
        raise ValueError(f"{text.strip()[:20]!r} is not a number in float32")
    return number


def _steps(channels: list[str]) -> Values:
    """[steps, channels], without the NaN padding at the end, and with missing values interpolated."""
    rows = [[_number(text) for text in channel.split(",")] for channel in channels]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("channels of different lengths")
    whole = np.array(rows, dtype=np.float32).T
    measured = ~np.isnan(whole)
    if not measured.any(axis=0).all():
        raise ValueError("a channel without a single value")
    last = int(np.flatnonzero(measured.any(axis=1))[-1])
    whole, measured = whole[: last + 1], measured[: last + 1]
    time = np.arange(last + 1)
    for channel, valid in zip(whole.T, measured.T, strict=True):
        channel[~valid] = np.interp(time[~valid], time[valid], channel[valid])
    return np.ascontiguousarray(whole)
