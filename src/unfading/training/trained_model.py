"""A trained model with its task: what `fit` and `load` return."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.layers.model import Model
from unfading.own_data.array_task import ArrayTask
from unfading.own_data.forecast_task import ForecastTask
from unfading.own_data.sequences import PaddedSequences, read_sequences
from unfading.tasks.base import OneHot, Task
from unfading.tasks.resident import Labelled
from unfading.tasks.scaling import Normalised
from unfading.training.run import Run

# Sequences that are read in one pass.
ROWS = 256


class TrainedModel(Model):
    """A trained `Model`, in evaluation mode. It is called as any model, with tensors [T, B, ...]; `predict` takes arrays.

    Args:
        model: the model, whose modules are taken.
        run: the run that trained it.
        record: the record of the run, with its scores; None if it is not known.
    """

    def __init__(self, model: Model, run: Run, record: dict[str, Any] | None = None):
        super().__init__(model.encoder, model.rnn, model.head)
        self.run = run
        self.record = record
        self.card: dict[str, Any] | None = None  # of the file of weights that it was loaded from
        self.eval()

    @property
    def task(self) -> Task:
        """The task of the run. Its data may not be there any more."""
        return self.run.make_task()

    def save_pretrained(self, folder: Path | str, **options: Any) -> None:
        """Write the model into a folder, as huggingface_hub does: weights with their card, config.json and README.md.

        Needs the extra `hub`, and no network. `from_pretrained` and, for its model.safetensors, `load` read it.

        Args:
            folder: the folder to write.
            options: further options of huggingface_hub's `save_pretrained`.
        """
        from unfading.training.hub import HubModel

        HubModel(self).save_pretrained(folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to the Hugging Face Hub and return the address of the commit. Needs the extra `hub`.

        Args:
            repo_id: name of the repository, e.g. me/my-model.
            options: further options of huggingface_hub's `push_to_hub`, e.g. private=True.
        """
        from unfading.training.hub import HubModel

        return str(HubModel(self).push_to_hub(repo_id, **options))

    @classmethod
    def from_pretrained(cls, folder_or_repo: Path | str, **options: Any) -> "TrainedModel":
        """The model of a folder of `save_pretrained`, or of a repository of the Hugging Face Hub. Needs the extra `hub`.

        Args:
            folder_or_repo: a folder, or the name of a repository, e.g. me/my-model.
            options: `cell=` and `task=` for classes of your own, as `load` takes them; and the options of huggingface_hub's
                `from_pretrained`, e.g. revision.
        """
        from unfading.training.hub import HubModel

        model: TrainedModel = HubModel.from_pretrained(folder_or_repo, **options)
        return model

    def predict(self, X: Any) -> NDArray[Any]:
        """Predictions for sequences, one row each: labels of a classification, numbers of a regression.

        Args:
            X: [N, T, I], [N, T] or a list of arrays [T_n, I], as `fit` takes them; tokens [N, T] if the model reads tokens.
        """
        task = self.task
        if isinstance(task, ForecastTask):
            raise ValueError(
                "predict takes sequences, and this model reads windows of series. Load it with RecurrentForecaster.load, whose "
                "predict takes series."
            )
        outputs = torch.from_numpy(self.outputs(X))
        if isinstance(task, ArrayTask):
            return task.answers(outputs)
        answers: NDArray[Any] = (outputs.argmax(dim=-1) if isinstance(task, Labelled) else outputs).numpy()
        return answers

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Probabilities of the classes, [N, classes]; their order is that of `run.task_options["classes"]`."""
        task = self.task
        if not isinstance(task, Labelled) and not hasattr(task, "classes"):
            raise ValueError(f"task {self.run.task} has no classes, so predict_proba is not defined. Use predict.")
        probabilities: NDArray[Any] = torch.from_numpy(self.outputs(X)).double().softmax(dim=-1).numpy()
        return probabilities

    def outputs(self, X: Any) -> NDArray[Any]:
        """The outputs of the head for each sequence, before they become labels: [N, ...]."""
        sequences = self._sequences(X)
        where = next(self.parameters())
        outputs = []
        with torch.no_grad():
            for x, lengths in _batches(sequences, ROWS):
                prediction, _ = self(self._prepared(x.to(where.device, where.dtype)), lengths=lengths)
                outputs.append(self._rows_first(prediction, x.shape[1]).cpu())
        result: NDArray[Any] = torch.cat(outputs).numpy()
        return result

    def _sequences(self, X: Any) -> PaddedSequences:
        sequences = read_sequences(X)
        if sequences.channels != self.rnn.input_size and self._reads_vectors:
            raise ValueError(
                f"the model reads sequences with {self.rnn.input_size} channels; got {sequences.channels}. Give X as "
                f"[sequences, steps, {self.rnn.input_size}]."
            )
        return sequences

    @property
    def _reads_vectors(self) -> bool:
        return not isinstance(self.encoder, torch.nn.Embedding | OneHot)

    def _prepared(self, x: Tensor) -> Tensor:
        """The input of the model: normalised as the task does, or as tokens."""
        if not self._reads_vectors:
            return x.squeeze(-1).long()
        task = self.task
        scale = task.scale(x.device) if isinstance(task, Normalised) else None
        return x if scale is None else (x - scale.mean) / scale.spread

    @staticmethod
    def _rows_first(prediction: Tensor, rows: int) -> Tensor:
        """A prediction per step [T, B, ...] as [B, T, ...]; one per row as it is."""
        per_step = prediction.dim() > 2 or prediction.shape[0] != rows
        return prediction.transpose(0, 1) if per_step else prediction


def _batches(sequences: PaddedSequences, rows: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """[T, B, I] and lengths."""
    x, lengths = sequences
    for i in range(0, len(x), rows):
        own = None if lengths is None else torch.from_numpy(lengths[i : i + rows])
        yield torch.from_numpy(np.ascontiguousarray(x[i : i + rows].swapaxes(0, 1))), own
