"""A classifier and a regressor of sequences with the interface of scikit-learn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from unfading.own_data.own_task import OwnTask
from unfading.own_data.preparation import Preparation
from unfading.own_data.sequences import check_finite, column_names, read_sequences
from unfading.own_data.targets import read_labels, read_numbers
from unfading.tasks.base import Readout
from unfading.training.callbacks import Callback
from unfading.training.fit import fit_run, make_run
from unfading.training.options import TrainOptions
from unfading.training.trained_model import TrainedModel
from unfading.training.user_metrics import Metric


class TrainedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What all estimators share: a run of a task over the user's data, which is trained."""

    def _draw_seed(self) -> int:
        seed = self.random_state
        return int(seed) if isinstance(seed, int | np.integer) else int(check_random_state(seed).randint(2**31))

    def _train(self, task: OwnTask, seed: int, where: Path | str | None = None, options: TrainOptions | None = None) -> Self:
        settings = {
            **{name: getattr(self, name) for name in ("hidden", "layers", "rate", "patience", "device")},
            **{name: value for name in ("batch", "epochs") if (value := getattr(self, name)) is not None},
            "cell_options": dict(self.cell_options or {}),
            "seed": seed,
            **(self.settings or {}),
        }
        if not len(task.data.held_out):
            del settings["patience"]
        self.model_: TrainedModel = fit_run(make_run(task, self.cell, settings), where, options or TrainOptions())
        self.record_: dict[str, Any] = self.model_.record or {}
        return self


class _RecurrentEstimator(TrainedEstimator):
    """What the classifier and the regressor share."""

    def __init__(
        self,
        cell: Any = "GRU",
        *,
        cell_options: Mapping[str, Any] | None = None,
        hidden: int = 64,
        layers: int = 1,
        rate: float = 5e-3,
        batch: int | None = None,
        epochs: int | None = None,
        patience: int | None = 20,
        validation: float = 0.2,
        scale: bool = True,
        readout: Readout = "pooled",
        device: str = "cpu",
        random_state: Any = 0,
        settings: Mapping[str, Any] | None = None,
        metrics: Sequence[str | Metric] = (),
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ):
        self.cell = cell
        self.cell_options = cell_options
        self.hidden = hidden
        self.layers = layers
        self.rate = rate
        self.batch = batch
        self.epochs = epochs
        self.patience = patience
        self.validation = validation
        self.scale = scale
        self.readout = readout
        self.device = device
        self.random_state = random_state
        self.settings = settings
        self.metrics = metrics
        self.callbacks = callbacks
        self.progress = progress

    def _fit(self, X: Any, y: Any, preparation: Preparation) -> Self:
        seed = self._draw_seed()
        options = TrainOptions(metrics=self.metrics, callbacks=self.callbacks, progress=self.progress)
        return self._train(preparation.make_task(X, y, seed), seed, None, options)

    def _sequences(self, X: Any, *, reset: bool) -> Any:
        """The sequences; tables are checked by scikit-learn too, which remembers the number and the names of their columns."""
        if not _is_table(X):
            sequences = read_sequences(X)
            if reset:
                self.n_features_in_ = sequences.channels
            return X
        names = column_names(X)
        table = validate_data(self, X, reset=reset, ensure_all_finite=False, dtype="numeric")
        check_finite(table, "X", ("row", "column"), names)
        return table

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class RecurrentClassifier(ClassifierMixin, _RecurrentEstimator):  # type: ignore[misc]
    """A recurrent network that assigns a class to each sequence.

    X may be [sequences, steps, channels], a table [sequences, steps] with one channel, or a list of arrays of any lengths, from
    NumPy, pandas, polars or torch. Values must be finite.

    Args:
        cell: name of a layer (STAR, LSTM, ...), or a class of your own.
        cell_options: options of the cell and of the layer, e.g. {"max_lag": 100}.
        hidden: units per layer.
        layers: number of stacked layers.
        rate: learning rate.
        batch: sequences in a batch; None for a twelfth of the training rows, at least 4 and at most 32.
        epochs: largest number of passes over the training rows; None for 100, or as many as 2,000 steps take if that is more.
        patience: evaluations without a better validation score after which training stops; None for no such limit. There is
            one per epoch, or one in 20 steps if an epoch has fewer.
        validation: share of the rows that chooses the weights and ends training early; 0 trains on all rows.
        class_weight: "balanced", a dict of weights by label, or None.
        scale: standardise channels by mean and standard deviation of the training rows.
        readout: what the head reads: the "last" step of each sequence, the "mean" over time, or "pooled", which is both and
            the maximum over time.
        device: "cpu" or "cuda".
        random_state: seed of weights, split and order; None draws one.
        settings: further settings of the `Run`, e.g. {"schedule": "cosine"}.
        metrics: further metrics of the validation rows, as `unfading.fit` takes them; `record_["best"]["valid"]` has them.
        callbacks: called with a `TrainingEvent`, as `unfading.fit` takes them.
        progress: show a progress bar, on a terminal or in a notebook.
    """

    def __init__(
        self,
        cell: Any = "GRU",
        *,
        cell_options: Mapping[str, Any] | None = None,
        hidden: int = 64,
        layers: int = 1,
        rate: float = 5e-3,
        batch: int | None = None,
        epochs: int | None = None,
        patience: int | None = 20,
        validation: float = 0.2,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        scale: bool = True,
        readout: Readout = "pooled",
        device: str = "cpu",
        random_state: Any = 0,
        settings: Mapping[str, Any] | None = None,
        metrics: Sequence[str | Metric] = (),
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ):
        super().__init__(
            cell,
            cell_options=cell_options,
            hidden=hidden,
            layers=layers,
            rate=rate,
            batch=batch,
            epochs=epochs,
            patience=patience,
            validation=validation,
            scale=scale,
            readout=readout,
            device=device,
            random_state=random_state,
            settings=settings,
            metrics=metrics,
            callbacks=callbacks,
            progress=progress,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any) -> Self:
        """Train on sequences and their labels."""
        X = self._sequences(X, reset=True)
        y = _column(y)
        check_classification_targets(y)
        self.classes_ = np.array(read_labels(y).classes)
        return self._fit(X, y, Preparation("classification", self.validation, 0.0, self.scale, self.class_weight, self.readout))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable label of each sequence."""
        check_is_fitted(self)
        labels: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return labels

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Probabilities of the classes, in the order of `classes_`."""
        check_is_fitted(self)
        return self.model_.predict_proba(self._sequences(X, reset=False))


class RecurrentRegressor(RegressorMixin, _RecurrentEstimator):  # type: ignore[misc]
    """A recurrent network that assigns one number, or several, to each sequence.

    X may be [sequences, steps, channels], a table [sequences, steps] with one channel, or a list of arrays of any lengths, from
    NumPy, pandas, polars or torch. Values must be finite.

    Args:
        cell: name of a layer (STAR, LSTM, ...), or a class of your own.
        cell_options: options of the cell and of the layer, e.g. {"max_lag": 100}.
        hidden: units per layer.
        layers: number of stacked layers.
        rate: learning rate.
        batch: sequences in a batch; None for a twelfth of the training rows, at least 4 and at most 32.
        epochs: largest number of passes over the training rows; None for 100, or as many as 2,000 steps take if that is more.
        patience: evaluations without a better validation score after which training stops; None for no such limit. There is
            one per epoch, or one in 20 steps if an epoch has fewer.
        validation: share of the rows that chooses the weights and ends training early; 0 trains on all rows.
        scale: standardise channels and targets by mean and standard deviation of the training rows.
        readout: what the head reads: the "last" step of each sequence, the "mean" over time, or "pooled", which is both and
            the maximum over time.
        device: "cpu" or "cuda".
        random_state: seed of weights, split and order; None draws one.
        settings: further settings of the `Run`, e.g. {"schedule": "cosine"}.
        metrics: further metrics of the validation rows, as `unfading.fit` takes them; `record_["best"]["valid"]` has them.
        callbacks: called with a `TrainingEvent`, as `unfading.fit` takes them.
        progress: show a progress bar, on a terminal or in a notebook.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on sequences and their targets, [rows] or [rows, outputs]."""
        X = self._sequences(X, reset=True)
        y = read_numbers(_targets(y))
        return self._fit(X, y, Preparation("regression", self.validation, 0.0, self.scale, None, self.readout))

    def predict(self, X: Any) -> NDArray[Any]:
        """The targets of each sequence, in their own units."""
        check_is_fitted(self)
        return self.model_.predict(self._sequences(X, reset=False))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _is_table(X: Any) -> bool:
    """Whether X is one array or table that is not of three axes, which scikit-learn itself can check."""
    if isinstance(X, list | tuple) and len(X) and (hasattr(X[0], "shape") or np.ndim(X[0]) > 1):
        return False
    if isinstance(X, list | tuple):
        return len({len(each) for each in X if isinstance(each, list | tuple)}) <= 1
    return getattr(X, "ndim", None) != 3


def _column(y: Any) -> Any:
    from sklearn.utils.validation import column_or_1d

    return column_or_1d(_targets(y), warn=True)


def _targets(y: Any) -> Any:
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None.")
    return y.detach().cpu().numpy() if hasattr(y, "detach") else y
