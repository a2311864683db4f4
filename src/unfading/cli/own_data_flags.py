"""Flags of `unfading train --data`: a file of sequences in the place of a task."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from unfading.cli.flags import OutputFlags, TrainingFlags

if TYPE_CHECKING:
    from unfading.own_data.array_task import ArrayTask
    from unfading.training.run import Run


@dataclass(frozen=True)
class OwnDataFlags:
    """Your own data in place of a task of the library.

    Args:
        data: File of sequences: .csv, .parquet, .npy, .npz, .ts, .tsv or .arff. --task is then classification or regression;
            without it, the targets decide.
        target: Column of the target; for .npy the file of the targets, for .npz the name of their array.
        series: Column that says to which series a row belongs, for a table with one row per step.
        drop: Columns that are not read.
        validation: Share of the rows that chooses the weights and ends training early.
        test: Share of the rows that is scored at the end.
        unscaled: Do not standardise channels and targets.
        class_weight: Weight classes in the loss inversely to their number of rows.
        readout: What the head reads: the last step of each sequence, or the mean over time.
    """

    data: Annotated[Path | None, arg(metavar="FILE")] = None
    target: Annotated[str | None, arg(help_behavior_hint="(default: label, target, class or y)")] = None
    series: Annotated[str | None, arg(help_behavior_hint="(default: series, sequence or id, if its values repeat)")] = None
    drop: Annotated[tuple[str, ...], arg(metavar="COLUMN ...")] = ()
    validation: float = 0.2
    test: float = 0.2
    unscaled: bool = False
    class_weight: Literal["balanced"] | None = None
    readout: Literal["last", "mean"] = "mean"

    def run(
        self, training: TrainingFlags, task: str, cell: str, *, rate: float | None, seed: int, say: Callable[[str], None]
    ) -> "Run":
        """The run on the file. What was inferred is printed on stderr, and what a recipe decides is passed to `say`."""
        from unfading.own_data.array_task import ARRAY_TASKS
        from unfading.own_data.file_source import task_of
        from unfading.own_data.preparation import Preparation
        from unfading.own_data.table_files import Columns
        from unfading.training.fit import default_settings

        assert self.data is not None
        if task and task not in ARRAY_TASKS:
            raise ValueError(f"with --data, --task is {' or '.join(ARRAY_TASKS)}, or is left out; got {task!r}.")
        preparation = Preparation(
            task or None,  # type: ignore[arg-type]  # checked above
            self.validation,
            self.test,
            not self.unscaled,
            self.class_weight,
            self.readout,
        )
        columns = Columns(self.target, self.series, self.drop)
        own, table = task_of(self.data, columns, preparation, seed)
        _tell(self, own, table.layout, inferred=not task)
        rate = default_settings(own)["rate"] if rate is None else rate
        run = training.run(own, cell or "STAR", rate=rate, seed=seed, say=say)
        given = {word.partition("=")[0][2:].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
        batch = run.batch if "batch" in given else None
        defaults = {name: value for name, value in default_settings(own, batch).items() if name not in given}
        if "steps" in given:
            del defaults["epochs"]
        return replace(run, **defaults)

    def output(self, output: OutputFlags) -> OutputFlags:
        """The flags of the output, with the name of the file for the folder of its runs."""
        return output if self.data is None or output.name is not None else replace(output, name=self.data.stem)


def _tell(flags: OwnDataFlags, task: "ArrayTask", layout: str, *, inferred: bool) -> None:
    """Print what was read and inferred, and how to change it."""
    from unfading.own_data.array_task import ArrayClassification

    data = task.data
    rows = len(data.train.target)
    if isinstance(task, ArrayClassification):
        names = ", ".join(map(str, task.classes[:6])) + (", ..." if len(task.classes) > 6 else "")
        kind, other = f"classification, {len(task.classes)} classes ({names})", "regression"
    else:
        kind, other = "regression", "classification"
    test = 0 if data.test is None else len(data.test.target)
    scale = "as they are" if flags.unscaled else "standardised by the training rows (--unscaled leaves them)"
    lines = [
        f"{flags.data}: {layout}",
        kind + (f"; inferred from the target, --task {other} changes it" if inferred else ""),
        f"{rows - len(data.held_out):,} rows train, {len(data.held_out):,} validate (--validation {flags.validation:g}), "
        f"{test:,} test (--test {flags.test:g})",
        f"channels {scale}; data SHA-256 {task.content[:12]}...",
    ]
    print("\n".join(lines), file=sys.stderr)
