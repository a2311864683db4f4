"""Items, made: rows trained and kept as lines, curves drawn from lines, other figures drawn when they are called."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from unfading import machine
from unfading.papers import budget as budgets
from unfading.papers import ledger as kept
from unfading.papers import registry as shelf
from unfading.papers.item import Item
from unfading.papers.row import COUNTED, Curves, Row
from unfading.papers.train_rows import Shown, Wanted, Way, available, final_runs, lines, train_rows
from unfading.report import fidelity
from unfading.report.verdicts import Outcome, judge, measurement
from unfading.training import weights

Makers = Sequence[tuple[str, Callable[..., Any]]]


class Making(NamedTuple):
    """Some items at a budget.

    Args:
        budget: see `budget.py`.
        way: how rows are trained.
        output: folder of what is written.
        only: parts of rows' names, one of which a row must have; empty for all.
    """

    budget: budgets.Budget
    way: Way
    output: Path
    only: tuple[str, ...] = ()

    def wanted(self, makers: Makers) -> list[Wanted]:
        """The rows of the items, at the budget."""
        found = []
        for name, make in makers:
            all_rows = shelf.rows(make)
            rows = [row for row in all_rows if not self.only or any(part in row.name for part in self.only)]
            if all_rows and not rows:
                raise ValueError(
                    f"no row of {name} has {' or '.join(map(repr, self.only))} in its name, e.g. {all_rows[0].name!r}."
                )
            found += [Wanted(name, row) for row in budgets.within(rows, self.budget)]
        return found

    def train(self, makers: Makers, shown: Shown) -> None:
        """Train the rows whose data are here."""
        wanted = self.wanted(makers)
        shelf.make_folder(self.output)
        train_rows(wanted, self.way, shown)

    def keep(self, makers: Makers) -> None:
        """Write the lines of what is done."""
        shelf.make_folder(self.output)
        kept.add(self.file, lines(self.wanted(makers), self.budget, self.way))

    @property
    def file(self) -> Path:
        """Where this machine's lines are kept."""
        return kept.file(self.output, self.way.device)

    def tell(self, makers: Makers, *, trained: bool) -> list[str]:
        """For each item what it says, drawn where it is a figure."""
        told = []
        for name, make in makers:
            if shelf.kind(make) is Item:
                told.append(self._figure(name, make))
            else:
                told.append(self._rows(name, make, trained))
        return told

    def save_weights(self, makers: Makers, folder: Path, largest: int) -> list[str]:
        """Write the weights of each row's first seed; a file that is too large is taken away again."""
        said = []
        for name, row in self.wanted(makers):
            run = next(final_runs(row, self.way), None) if available(row) else None
            if run is None:
                continue
            stem = re.sub(r"[^a-z0-9]+", "-", f"{name} {row.name}".lower()).strip("-")
            try:
                path = weights.save(self.way.where / run.key, folder / f"{stem}.safetensors")
            except ValueError as error:  # a folder from another machine may have its record alone
                said.append(f"no weights of {row.name}: {error}")
                continue
            size = path.stat().st_size
            if size > largest:
                path.unlink()
                said.append(f"{path.name} would have {size / 1e6:.1f} MB, and is not kept")
            else:
                said.append(f"wrote {path} ({size / 1e3:.0f} kB)")
        return said or ["no row has been run: there are no weights yet"]

    def _figure(self, name: str, make: Callable[..., Item]) -> str:
        """A figure that is made here and now."""
        device = {"device": self.way.device} if "device" in signature(make).parameters else {}
        made = make(**budgets.numbers(make, self.budget), **device)
        written = shelf.save(name, made, self.output)
        about = {"kind": "drawn", "item": name, "title": made.title, "budget": self.budget, "findings": made.findings}
        kept.add(self.file, [{**about, "about": machine.about(self.way.command)}])
        return f"{shelf.told(made)}\n\nwrote {', '.join(str(path) for path in written)}"

    def _rows(self, name: str, make: Callable[..., Any], trained: bool) -> str:
        """The rows with what is published, what came out, and the verdict; for curves a picture too."""
        files = [self.file] if trained else sorted(self.output.glob("papers-*.jsonl"))
        known = [
            line for path in files for line in kept.read(path) if line["item"] == name and line.get("budget") == self.budget
        ]
        if self.budget == "smoke":  # it is judged by nobody; its lines are shown as what they are
            known = [{**line, "budget": "short"} for line in known]
        said, drawn = [f"{name}: {shelf.title(make)}"], []
        picked = {row.name for _, row in self.wanted([(name, make)])}
        for _, row in self._replace(only=()).wanted([(name, make)]):  # a picture has all rows, whatever was picked
            own = [line for line in known if line.get("row") == row.name]
            outcome = judge(shelf.claim(row), own)
            if row.name in picked:
                said.append(f"  {row.name}: {self._answer(row, outcome)}")
            if row.unit != COUNTED:
                drawn += [{**line, "asked": outcome.asked} for line in measurement(shelf.claim(row), own)]
        made = make()
        if isinstance(made, Curves):
            said.append(self._curves(name, made, drawn))
        return "\n".join(said)

    def _answer(self, row: Row, outcome: Outcome) -> str:
        """What a row came to, in a line."""
        if not available(row):
            return f"data not available: {row.dataset}"
        if outcome.mean is None:
            return outcome.verdict
        published = "-" if row.published is None else fidelity.number(row.published, row.unit)
        verdict = "ran" if self.budget == "smoke" else outcome.verdict
        return f"published {published}, ours {fidelity.number(outcome.mean, row.unit)} over {outcome.told_seeds}: {verdict}"

    def _curves(self, name: str, made: Curves, known: Sequence[Mapping[str, Any]]) -> str:
        if not known:
            return "nothing to draw: none of its rows has been run"
        try:
            item = Item(made.title, made.caption, made.draw(known), [], [])
            return f"wrote {', '.join(map(str, shelf.save(name, item, self.output)))}"
        except ValueError as error:
            # The records are kept: they can be drawn on another machine.
            return f"not drawn: {error}"
