"""Flags that `train` and `compare` share: how to train, and where to write.

The flags of training are fields of `training/settings.py`, which gives type, default and help.
"""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from unfading.errors import unknown

if TYPE_CHECKING:
    from unfading.tasks.base import Task
    from unfading.training.run import Run
    from unfading.training.settings import SettingField

# Budget if neither --steps nor --epochs is given: that of the papers' adding problem, and a first impression of a dataset.
STEPS, EPOCHS = 2000, 10
# Runs of a comparison; a million would take longer to list than to refuse.
MOST_RUNS = 100_000

# Settings without a flag here: each command has its own for some, options follow the name that they belong to, and --final
# decides the split.
NOT_FLAGS = ("task", "cell", "rate", "seed", "split", "task_options", "cell_options", "optimiser_options", "schedule_options")
# Sentences that the help of a flag adds to the description of its setting.
MORE = {
    "optimiser": "Options follow the name: sgd,momentum=0.9.",
    "schedule": "Options follow the name: step,every=1000,gamma=0.5.",
    "rates": "Written NAME=FACTOR: eta=0.1.",
    "compress": "Written rank=8,sparsity=0.7,bits=8; each may be left out.",
}
# Stands for the setting of the cell's recipe.
RECIPE: Literal["recipe"] = "recipe"
FROM_RECIPE = "(default: recipe of the cell)"
# What the help of a flag says of its default, if that is not the value itself.
DEFAULTS = {
    "rates": FROM_RECIPE,
    "clip_norm": FROM_RECIPE,
    "compress": "(default: none)",
    "steps": f"(default: {STEPS} if the task has no epochs)",
    "epochs": f"(default: {EPOCHS} if the task has epochs)",
}
# Type, default and metavar of flags that are written as text.
TEXTS: dict[str, tuple[Any, Any, str]] = {
    "rates": (tuple[str, ...], (), "TEXT ..."),
    "compress": (str | None, None, "TEXT"),
}


class TrainingFlags:
    """How to train."""

    def run(self, task: "str | Task", cell: str, *, rate: float | None, seed: int, say: Callable[[str], None]) -> "Run":
        """The run that the flags describe. What the recipe of the cell decides is passed to `say`.

        Args:
            task: the name of a task, or a task.
            rate: the learning rate; None for that of the recipe.
        """
        from unfading.training.names import parse, parse_options
        from unfading.training.recipes import in_words, recommended
        from unfading.training.run import Run

        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        values |= {"task": task, "cell": cell, "rate": rate, "seed": seed, "rates": _factors(values["rates"])}
        values["compress"] = {} if values["compress"] is None else parse_options(values["compress"], "--compress rank=8,bits=8")
        not_given: dict[str, Any] = {"rate": None, "rates": {}, "clip_norm": RECIPE}
        for name, unset in not_given.items():
            if values[name] == unset:
                del values[name]
        if values["clip_value"] is not None:
            values.setdefault("clip_norm", None)  # a run clips by norm or by value
        for name in ("task", "cell", "optimiser", "schedule") if isinstance(task, str) else ("cell", "optimiser", "schedule"):
            values[name], values[f"{name}_options"] = parse(values[name])
        length_given = values["steps"] is not None or values["epochs"] is not None
        if not length_given:
            values["steps"] = STEPS
        if values.pop("no_recipe"):
            run = Run(**values)
        else:
            run, decided = recommended(**values)
            if decided:
                say(f"recipe of {run.cell}: {in_words(decided)} (flags and options override it, --no-recipe omits it)")
        if not length_given and run.make_task().length("train", run.batch) is not None:
            return replace(run, steps=None, epochs=EPOCHS)
        return run

    def runs(
        self, task: str, cells: Sequence[str], *, rates: Sequence[float], seeds: int, say: Callable[[str], None]
    ) -> "list[Run]":
        """The runs that the flags describe: every cell with every rate and seed, and the factors of --rates that fit it.

        Args:
            rates: learning rates; none for that of each cell's recipe.
        """
        count = len(set(cells)) * max(1, len(set(rates))) * seeds
        if count > MOST_RUNS:
            raise ValueError(f"a comparison has at most {MOST_RUNS:,} runs; got {count:,}. Use fewer seeds, rates or cells.")
        one = rates[0] if rates else None
        first = {cell: self.run(task, cell, rate=one, seed=0, say=say) for cell in dict.fromkeys(cells)}
        if self.rates:  # type: ignore[attr-defined]
            first = dict(zip(first, _fitting(list(first.values())), strict=True))
        return [
            replace(run, rate=rate, seed=seed)
            for run in first.values()
            for rate in dict.fromkeys(rates or (run.rate,))
            for seed in range(seeds)
        ]


@cache
def training_flags() -> type[TrainingFlags]:
    """The flags as a dataclass, which is what tyro reads."""
    from unfading.training.settings import FIELDS

    flags: list[Any] = []
    for name, each in FIELDS.items():
        if name not in NOT_FLAGS:
            help = " ".join(filter(None, [each.description, MORE.get(name)]))
            kind, default, metavar = _kind(name, each)
            about = arg(help=help, help_behavior_hint=DEFAULTS.get(name), metavar=metavar)
            flags.append((name, Annotated[kind, about], field(default=default)))
    no_recipe = arg(help="Train with the defaults of a Run instead of the recipe of the cell (`unfading cells NAME` shows it).")
    flags.append(("no_recipe", Annotated[bool, no_recipe], field(default=False)))
    namespace = {"__doc__": TrainingFlags.__doc__}
    return make_dataclass("TrainingFlags", flags, bases=(TrainingFlags,), frozen=True, namespace=namespace)


def _kind(name: str, setting: "SettingField") -> tuple[Any, Any, str | None]:
    """Type, default and metavar of a flag."""
    if name == "clip_norm":
        return setting.annotation | Literal["recipe"], RECIPE, None
    return TEXTS.get(name, (setting.annotation, setting.default, None))


@dataclass(frozen=True)
class OutputFlags:
    """Where to write, and what to show.

    Args:
        runs: Folder of all runs.
        name: Name of the folder in --runs.
        resume: Continue from existing checkpoints.
        again: Delete existing results and start anew.
        save_every: Seconds between checkpoints.
        quiet: Show no progress.
        json: Print JSON instead of text.
    """

    runs: Path = Path("runs")
    name: Annotated[str | None, arg(help_behavior_hint="(default: name of the task)")] = None
    resume: bool = False
    again: bool = False
    save_every: float = 60.0
    quiet: bool = False
    json: bool = False

    def folder(self, run: "Run") -> Path:
        """The folder in which each run has its own."""
        name = self.name or run.task.replace(":", "-").replace("/", "-")
        if name in (".", "..") or "/" in name:
            raise ValueError(f"--name is one folder in --runs; got {name!r}.")
        if self.resume and self.again:
            raise ValueError("--resume continues and --again starts anew; give one of the two.")
        return self.runs / name

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the training functions."""
        return {"resume": self.resume, "again": self.again, "save_every": self.save_every, "command": typed_command()}


def typed_command() -> str:
    """The command as typed, for records, without the password of a storage."""
    return re.sub(r"(://[^:@/\s]*):[^@/\s]*@", r"\1:***@", shlex.join(["unfading", *sys.argv[1:]]))


def check_alone(record: Path) -> None:
    """Raise if --from was given together with flags that the record already decides."""
    from unfading.training.settings import FIELDS

    given = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    conflicts = [flag for flag in given if flag[2:].replace("-", "_") in FIELDS]
    if conflicts:
        raise ValueError(
            f"--from {record} says what to train and how; leave the other flags out: {', '.join(dict.fromkeys(conflicts))}."
        )


def _fitting(runs: "Sequence[Run]") -> "list[Run]":
    """Each run with those of its factors that fit a parameter of its model. Raises for a factor that fits no model."""
    parameters = [run.make_model().trainable for run in runs]
    fitting: list[dict[str, float]] = [{} for _ in runs]
    for pattern, factor in runs[0].rates.items():
        for run, names, factors in zip(runs, parameters, fitting, strict=True):
            with suppress(ValueError):
                replace(run, rates={pattern: factor}).factors(names)
                factors[pattern] = factor
        if not any(pattern in factors for factors in fitting):
            known = sorted({name.rpartition(".")[2] for names in parameters for name in names})
            raise ValueError(f"--rates: {unknown('parameter of these cells', pattern, known)}")
    return [replace(run, rates=factors) for run, factors in zip(runs, fitting, strict=True)]


def _factors(pairs: Sequence[str]) -> dict[str, float]:
    """The factors of several NAME=FACTOR."""
    factors = {}
    for pair in pairs:
        name, _, factor = pair.partition("=")
        try:
            factors[name] = float(factor)
        except ValueError:
            raise ValueError(f"--rates takes NAME=FACTOR, e.g. eta=0.1; got {pair!r}.") from None
    return factors
