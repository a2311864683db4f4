"""A sweep: the run to improve, the settings to search, and how they are drawn and pruned."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from unfading.own_data.own_task import OwnTask
from unfading.training.active_run import ActiveRun
from unfading.training.run import Run
from unfading.training.sweep.search_space import Space, check_space, parse_space
from unfading.training.sweep.storage import needed
from unfading.training.user_code import UserCode

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

Pruning = Literal["median", "hyperband", "none"]
Sampling = Literal["tpe", "random"]

# The median pruner stops nothing before so many trials are complete, and no trial in this part of its evaluations.
FIRST_TRIALS, FIRST_PART = 5, 1 / 5


class Objective(NamedTuple):
    """The validation score that a sweep improves. The test rows have no part in it."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Sweep:
    """What the trials of a sweep are.

    Args:
        run: the run, with the settings that are not searched.
        search: the settings to search, as in `search_space.py`.
        prune: how trials are stopped early by their validation curves.
        sampler: how settings are drawn: by a tree-structured Parzen estimator (TPE), or at random.
    """

    run: Run
    search: tuple[str, ...]
    prune: Pruning = "median"
    sampler: Sampling = "tpe"

    @property
    def space(self) -> Space:
        """The distribution of each setting."""
        return parse_space(self.search)

    @property
    def objective(self) -> Objective:
        """The score by which the run chooses its weights."""
        return objective(self.run)

    def check(self) -> None:
        """Raise for a sweep that cannot be trained."""
        if self.run.split != "train":
            raise ValueError(
                "a sweep needs validation rows; this run is trained on all rows (split='full'). With --data, set --validation."
            )
        check_space(self.run, self.space)

    def make_pruner(self) -> "BasePruner":
        """The pruner of a trial."""
        pruners = needed("optuna").pruners
        if self.prune == "none":
            return pruners.NopPruner()
        count = -(-self.run.total() // evaluation_interval(self.run))
        # Scores do not tell trials apart while training sequences are shorter than those of validation.
        short = self.run.make_task().full_length_from // evaluation_interval(self.run)
        if self.prune == "hyperband":
            least, most = max(1, min(short, count)), max(1, count)
            return pruners.HyperbandPruner(min_resource=least, max_resource=most, reduction_factor=3)
        return pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=max(int(count * FIRST_PART), short))

    def make_sampler(self, number: int) -> "BaseSampler":
        """The sampler of a trial, whose numbers depend on the trial and not on the worker."""
        samplers = needed("optuna").samplers
        kind = samplers.TPESampler if self.sampler == "tpe" else samplers.RandomSampler
        return kind(seed=(self.run.seed + number) % 2**32)

    def to_json(self) -> dict[str, Any]:
        """The sweep as JSON values, with the source of a user's own task and cell."""
        about = {"search": list(self.search), "prune": self.prune, "sampler": self.sampler}
        return {"kind": "search", **runs_to_json([self.run]), **about}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sweep":
        """The sweep of `to_json`."""
        [run] = runs_from_json(values)
        return cls(run, tuple(values["search"]), values["prune"], values["sampler"])


def objective(run: Run) -> Objective:
    """The score by which a run chooses its weights."""
    task = run.make_task()
    return Objective(task.metric, task.higher_is_better) if run.select_by == "metric" else Objective("loss", False)


def evaluation_interval(run: Run) -> int:
    """Steps between the evaluations of a run."""
    return ActiveRun(run, run.make_task()).valid_every


def runs_to_json(runs: "list[Run]") -> dict[str, Any]:
    """Runs that share their source, as JSON values."""
    for run in runs:
        # The data of a file are read again by each worker.
        if any(not isinstance(each.value, OwnTask) or not each.value.source for each in run.objects.values()):
            raise ValueError(
                f"{run.cell} on {run.task}: a run with objects of this process cannot be given to workers. Name the task and "
                "the cell instead: my.py:MyTask."
            )
    code = {place: each.to_json() for place, each in runs[0].code.items()}
    return {"runs": [run.to_json() for run in runs], "code": code}


def runs_from_json(values: Mapping[str, Any]) -> list[Run]:
    """The runs of `runs_to_json`. A user's source is executed."""
    code = {place: UserCode.from_json(each) for place, each in values["code"].items()}
    return [_with_one_task(Run.from_json(run, code)) for run in values["runs"]]


def _with_one_task(run: Run) -> Run:
    """The run with the task over a user's file as an object, so that the file is read once."""
    task = run.make_task()
    return replace(run, task=task, task_options={}) if isinstance(task, OwnTask) else run  # type: ignore[arg-type]
