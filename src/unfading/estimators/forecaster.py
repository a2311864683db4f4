"""A forecaster of time series with the interface of scikit-learn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from unfading.cells.base import Cell
from unfading.errors import check_count
from unfading.estimators.recurrent_estimators import TrainedEstimator
from unfading.own_data.backtest import Backtest, compare_forecasts
from unfading.own_data.forecast_preparation import ForecastPreparation
from unfading.own_data.forecast_task import ForecastScale, ForecastTask
from unfading.own_data.forecasts import forecast_ahead, forecast_windows, join_for
from unfading.own_data.time_series import Missing, Numbers, TimeSeries, read_time_series
from unfading.training.weights import load


class RecurrentForecaster(TrainedEstimator):
    """A recurrent network that forecasts the next steps of time series.

    A series is an array [T], or a table [T, C] with one row per step and one column per channel; several series are a list of
    such, of any lengths. They come from NumPy, pandas, polars or torch. `docs/guide/forecasting.md` has the equations.

    Args:
        cell: name of a layer (STAR, LSTM, ...), or a class of your own.
        horizon: steps that are forecast.
        context: steps that a forecast reads; None for twice the longer of horizon and season, at least 16.
        season: steps after which the series repeat, e.g. 24 for hours of a day, for the seasonal naive forecast and for MASE.
        scale: "series" standardises each series by mean and standard deviation of its training part; later calls then take the
            same series in the same order. "window" standardises each window by what it reads, also of other series. "none"
            leaves the values as they are.
        missing: "refuse" raises for NaN, with its row and column; "mask" reads NaN as a missing value, in series and in past
            covariates. Missing values do not count in loss and scores.
        cell_options: options of the cell and of the layer, e.g. {"max_lag": 100}.
        hidden: units per layer.
        layers: number of stacked layers.
        rate: learning rate.
        batch: windows in a batch; None for a twelfth of the training windows, at least 4 and at most 32.
        epochs: largest number of passes over the training windows; None for 100, or what 2,000 steps take if that is more.
        patience: evaluations without a better validation score after which training stops; None for no such limit. There is
            one per epoch, or one in 20 steps if an epoch has fewer.
        validation: share of the steps of each series, its last ones, that chooses the weights and ends training early; 0 trains
            on all steps.
        device: "cpu" or "cuda".
        random_state: seed of weights and order; None draws one.
        settings: further settings of the `Run`, e.g. {"schedule": "cosine"}.
    """

    def __init__(
        self,
        cell: Any = "STAR",
        *,
        horizon: int = 1,
        context: int | None = None,
        season: int = 1,
        scale: ForecastScale = "series",
        missing: Missing = "refuse",
        cell_options: Mapping[str, Any] | None = None,
        hidden: int = 64,
        layers: int = 1,
        rate: float = 5e-3,
        batch: int | None = None,
        epochs: int | None = None,
        patience: int | None = 20,
        validation: float = 0.2,
        device: str = "cpu",
        random_state: Any = 0,
        settings: Mapping[str, Any] | None = None,
    ):
        self.cell = cell
        self.horizon = horizon
        self.context = context
        self.season = season
        self.scale = scale
        self.missing = missing
        self.cell_options = cell_options
        self.hidden = hidden
        self.layers = layers
        self.rate = rate
        self.batch = batch
        self.epochs = epochs
        self.patience = patience
        self.validation = validation
        self.device = device
        self.random_state = random_state
        self.settings = settings

    def fit(
        self,
        series: Any,
        y: Any = None,
        *,
        past_covariates: Any = None,
        future_covariates: Any = None,
        where: Path | str | None = None,
    ) -> Self:
        """Train on all windows of the training part of each series.

        Args:
            series: one series, or a list of series.
            y: ignored; the targets are later steps of the series. It is there for pipelines and searches of scikit-learn.
            past_covariates: further channels, known up to the time of a forecast: as long as the series, in the same form.
            future_covariates: channels that are known in advance, as a calendar is. They begin with the series and are at least
                as long; `predict` needs them for the steps that it forecasts.
            where: parent of the run's folder, e.g. runs/mine, which `unfading report` reads. A run that was stopped is
                continued. None writes nothing.
        """
        preparation = self._preparation()
        read = read_time_series(series, "series", self.missing)
        task = preparation.make_task(read, past_covariates, future_covariates)
        self.n_features_in_ = task.targets
        self.training_series_ = read
        self._covariates = (past_covariates, future_covariates)
        self._parts = [preparation.parts(length, task.sizes) for length in read.lengths]
        return self._train(task, self._draw_seed(), where)

    @classmethod
    def load(cls, folder: Path | str, *, missing: Missing = "refuse", cell: type[Cell] | None = None) -> Self:
        """The forecaster of a finished run, for series that are given to `predict`: it does not hold the training series.

        Args:
            folder: the folder of the run, runs/NAME/KEY.
            missing: as the constructor takes it.
            cell: the class of your own cell, if the run is of one.
        """
        model = load(folder, cell=cell)
        task, run = model.task, model.run
        if not isinstance(task, ForecastTask):
            raise ValueError(f"{folder} is a run of the task {run.task}, not of forecasting. Load it with unfading.load.")
        of_task = {name: getattr(task, name) for name in ("horizon", "context", "season", "scale")}
        of_run = {
            name: getattr(run, name) for name in ("cell_options", "hidden", "layers", "rate", "batch", "epochs", "patience")
        }
        forecaster = cls(cell or run.cell, **of_task, **of_run, missing=missing, random_state=run.seed)
        forecaster.model_, forecaster.record_ = model, model.record or {}
        forecaster.n_features_in_ = task.targets
        forecaster.training_series_ = TimeSeries([], several=True, vectors=False)
        return forecaster

    def predict(self, series: Any = None, *, past_covariates: Any = None, future_covariates: Any = None) -> Any:
        """Forecast the steps after the end of each series, in its own units: [horizon] or [horizon, C], or a list of such.

        Args:
            series: one series or a list, of which the last `context` steps are read; None for the training series.
            past_covariates: covariates of the given series; those of the training series are known.
            future_covariates: covariates that begin with the series and cover the steps that are forecast; None takes those of
                `fit` for the training series.
        """
        check_is_fitted(self)
        read, past, future = self._given(series, past_covariates, future_covariates)
        return read.in_form(list(forecast_ahead(self.model_, self._task, read, past, future, self.missing)))

    def backtest(
        self,
        series: Any = None,
        *,
        past_covariates: Any = None,
        future_covariates: Any = None,
        start: int | None = None,
        stride: int | None = None,
    ) -> Backtest:
        """Forecast windows of known series, and score the model beside the naive and the seasonal naive forecast.

        Args:
            series: one series or a list; None for the validation part of the training series.
            past_covariates: as `predict` takes them.
            future_covariates: the same; they need not be longer than the series.
            start: first step that is forecast. None for the end of the training series where a series continues it, and else
                for the first step that has a whole context. A forecaster that was loaded does not know its training series.
            stride: steps from one window to the next; None for the horizon, so that windows do not overlap.
        """
        check_is_fitted(self)
        stride = self._task.horizon if stride is None else stride
        check_count("stride", stride)
        read, past, future = self._given(series, past_covariates, future_covariates)
        joined = join_for(self._task, read, past, future, self.missing, ahead=0)
        starts = self._starts(read, start, validation=series is None)
        sizes = self._task.sizes
        own = [sizes.origins(values, first, len(values), stride) for values, first in zip(read.arrays, starts, strict=True)]
        origins = np.concatenate([offset + each for offset, each in zip(joined.starts, own, strict=False)])
        if not len(origins):
            raise ValueError(
                f"the series have no window to forecast from step {min(starts)} on: a window takes {sizes.context} steps "
                f"before and {sizes.horizon} after it, and the longest series has {max(read.lengths)}. Give longer series, or "
                "start."
            )
        model = (self._model_name, forecast_windows(self.model_, self._task, joined, origins))
        return compare_forecasts(read.arrays, joined, origins, starts, sizes, self._task.season, model)

    def score(self, series: Any, y: Any = None, *, past_covariates: Any = None, future_covariates: Any = None) -> float:
        """Minus MASE of the windows of `backtest`: larger is better, as searches of scikit-learn expect, and -1 is naive."""
        result = self.backtest(series, past_covariates=past_covariates, future_covariates=future_covariates)
        score = result.scores[self._model_name]["mase"]
        if np.isnan(score):
            raise ValueError(
                f"MASE is not defined for these series: with season={self._task.season}, some channel has a naive error of 0 "
                "or too few steps before the first forecast. Use the MAE of backtest."
            )
        return -score

    # -- parts of the above ----------------------------------------------------------------------------------------------------

    @property
    def _task(self) -> ForecastTask:
        task = self.model_.task
        assert isinstance(task, ForecastTask)
        return task

    @property
    def _model_name(self) -> str:
        return self.model_.run.cell.rpartition(":")[2]  # my.py:MyCell is called MyCell

    def _preparation(self) -> ForecastPreparation:
        return ForecastPreparation(self.horizon, self.context, self.season, self.scale, self.missing, self.validation)

    def _given(self, series: Any, past: Any, future: Any) -> tuple[TimeSeries, Any, Any]:
        """The series and covariates of a call; those of `fit` where none are given."""
        if series is not None:
            return read_time_series(series, "series", self.missing), past, future
        if not self.training_series_.arrays:
            raise ValueError("a forecaster that was loaded does not hold its training series. Give a series.")
        if past is not None:
            raise ValueError("past_covariates belong to a series that is given, and none is. Those of fit are used without it.")
        return self.training_series_, self._covariates[0], self._covariates[1] if future is None else future

    def _starts(self, read: TimeSeries, start: int | None, *, validation: bool) -> list[int]:
        """The first step of each series that a backtest forecasts."""
        if start is not None:
            check_count("start", start, least=0)
            return [max(start, self._task.context)] * len(read.arrays)
        if validation:
            if all(part.training == part.test for part in self._parts):
                raise ValueError("the forecaster has no validation part (validation=0). Give a series, or start.")
            return [part.training for part in self._parts]
        earlier = self.training_series_.arrays
        matched = len(earlier) == len(read.arrays)
        return [
            len(earlier[i]) if matched and _continues(each, earlier[i]) else self._task.context
            for i, each in enumerate(read.arrays)
        ]


def _continues(series: Numbers, earlier: Numbers) -> bool:
    """Whether a series begins with an earlier one."""
    return np.array_equal(series[: len(earlier)], earlier, equal_nan=True)
