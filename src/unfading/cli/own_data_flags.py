"""Flags of `unfading train --data`: a file of sequences in the place of a task."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from unfading.cli.flags import OutputFlags, TrainingFlags
from unfading.cli.forecast_flags import ForecastFlags

if TYPE_CHECKING:
    from unfading.own_data.array_task import ArrayTask
    from unfading.own_data.own_task import OwnTask
    from unfading.training.run import Run


@dataclass(frozen=True)
class OwnDataFlags:
    """Your own data in place of a task of the library.

    Args:
        data: File of sequences: .csv, .parquet, .npy, .npz, .ts, .tsv or .arff. --task is then classification or regression;
            without it, the targets decide.
        target: Column of the target; for .npy the file of the targets, for .npz the name of their array. With --forecast, the
            columns to forecast.
        series: Column that says to which series a row belongs, for a table with one row per step.
        drop: Columns that are not read.
        validation: Share of the rows that chooses the weights and ends training early; of a series, steps.
        test: Share of the rows that is scored at the end; of a series, its last steps.
        unscaled: Do not standardise channels and targets.
        class_weight: Weight classes in the loss inversely to their number of rows.
        readout: What the head reads: the last step of each sequence, the mean over time, or both and the maximum over time.
    """

    data: Annotated[Path | None, arg(metavar="FILE")] = None
    target: Annotated[
        tuple[str, ...], arg(metavar="COLUMN ...", help_behavior_hint="(default: label, target, class or y; --forecast: all)")
    ] = ()
    series: Annotated[str | None, arg(help_behavior_hint="(default: series, sequence or id, if its values repeat)")] = None
    drop: Annotated[tuple[str, ...], arg(metavar="COLUMN ...")] = ()
    validation: float = 0.2
    test: float = 0.2
    unscaled: bool = False
    class_weight: Literal["balanced"] | None = None
    readout: Literal["last", "mean", "pooled"] = "pooled"
    forecasting: ForecastFlags = ForecastFlags()  # noqa: RUF009, frozen

    def run(
        self, training: TrainingFlags, task: str, cell: str, *, rate: float | None, seed: int, say: Callable[[str], None]
    ) -> "Run":
        """The run on the file. What was inferred is printed on stderr, and what a recipe decides is passed to `say`."""
        from unfading.training.fit import default_settings

        own, lines = self._forecasting(task) if self.forecasting.forecast else self._labelled(task, seed)
        print("\n".join(lines), file=sys.stderr)
        rate = default_settings(own)["rate"] if rate is None else rate
        usual = "STAR" if self.forecasting.forecast else "GRU"  # as RecurrentForecaster and fit have it
        run = training.run(own, cell or usual, rate=rate, seed=seed, say=say)
        given = {word.partition("=")[0][2:].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
        batch = run.batch if "batch" in given else None
        defaults = {name: value for name, value in default_settings(own, batch).items() if name not in given}
        if "steps" in given:
            del defaults["epochs"]
        return replace(run, **defaults)

    def check_used(self) -> None:
        """Raise if flags of a file were given without the file."""
        self.forecasting.check_unused()
        if self.forecasting.forecast and self.data is None:
            raise ValueError("--forecast needs the file of the series: --data FILE.")

    def _forecasting(self, task: str) -> "tuple[OwnTask, list[str]]":
        """The task of the series of the file, and what was read."""
        assert self.data is not None
        other = {"--task": task, "--unscaled": self.unscaled, "--class-weight": self.class_weight}
        other["--readout"] = self.readout != OwnDataFlags.readout
        for flag, value in other.items():
            if value:
                advice = " Use --scale none." if flag == "--unscaled" else ""
                raise ValueError(f"{flag} is for sequences with a target, and --forecast has none. Leave it out.{advice}")
        return self.forecasting.task(self.data, self.target, self.series, self.drop, self.validation, self.test)

    def _labelled(self, task: str, seed: int) -> "tuple[OwnTask, list[str]]":
        """The task of the sequences of the file, and what was read and inferred."""
        from unfading.own_data.array_task import ARRAY_TASKS
        from unfading.own_data.file_source import task_of
        from unfading.own_data.preparation import Preparation
        from unfading.own_data.table_files import Columns

        assert self.data is not None
        if task and task not in ARRAY_TASKS:
            raise ValueError(f"with --data, --task is {' or '.join(ARRAY_TASKS)}, or is left out; got {task!r}.")
        if len(self.target) > 1:
            raise ValueError(f"--target is one column, unless --forecast is given; got {' '.join(self.target)}.")
        preparation = Preparation(
            task or None,  # type: ignore[arg-type]  # checked above
            self.validation,
            self.test,
            not self.unscaled,
            self.class_weight,
            self.readout,
        )
        columns = Columns(self.target[0] if self.target else None, self.series, self.drop)
        own, table = task_of(self.data, columns, preparation, seed)
        return own, _described(self, own, table.layout, inferred=not task)

    def output(self, output: OutputFlags) -> OutputFlags:
        """The flags of the output, with the name of the file for the folder of its runs."""
        return output if self.data is None or output.name is not None else replace(output, name=self.data.stem)


def _described(flags: OwnDataFlags, task: "ArrayTask", layout: str, *, inferred: bool) -> list[str]:
    """What was read and inferred, and how to change it."""
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
    return [
        f"{flags.data}: {layout}",
        kind + (f"; inferred from the target, --task {other} changes it" if inferred else ""),
        f"{rows - len(data.held_out):,} rows train, {len(data.held_out):,} validate (--validation {flags.validation:g}), "
        f"{test:,} test (--test {flags.test:g})",
        f"channels {scale}; data SHA-256 {task.content[:12]}...",
    ]
