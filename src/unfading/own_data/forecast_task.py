"""Forecasting: the next `horizon` steps of a series from its last `context` steps and from covariates.

A window of a series y with past covariates p and covariates f that are known in advance, which begins to forecast at step o:

    v_t = [y_t, p_t],  m_t = 1 where v_t is known          o - context <= t < o
    v_t = 0,           m_t = 0                             o <= t < o + horizon
    x_t = [m_t v_t, m_t, f_t]
    h_t = cell(x_t, h_(t-1))
    forecast of y_t = W h_t + b                            o <= t < o + horizon

The steps ahead are to the network what missing values are: steps whose mask is 0. All of them are forecast in one pass. No
forecast is fed back, and the covariates of a step reach its forecast through the cell. y, p and f are standardised:

    scale="series"   y and p by mean and standard deviation of the training part of each series
    scale="window"   y and p by mean and standard deviation of the context of each window
    scale="none"     as they are

and f, except with "none", by the training parts of all series together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from unfading.errors import check_count, unknown
from unfading.metrics import mae
from unfading.own_data.joined_series import JoinedSeries, Positions, WindowSizes
from unfading.own_data.own_task import OwnTask
from unfading.own_data.sequences import content_hash
from unfading.own_data.time_series import Numbers
from unfading.tasks.base import Batch, Head
from unfading.tasks.resident import CPU, Examples, Part

ForecastScale = Literal["series", "window", "none"]


class ForecastData(NamedTuple):
    """The series of a task, and the origins of the windows that train, validate and test."""

    series: JoinedSeries
    origins: Positions  # of the windows for training and validation
    held_out: Positions  # those of `origins` that are used for validation
    test: Positions  # origins of the windows for the test

    @property
    def content(self) -> str:
        """The SHA-256 of the series and of the split."""
        return content_hash([*self.series, self.origins, self.held_out, self.test])


class ScaledSeries(NamedTuple):
    """Standardised series as tensors on a device."""

    values: Tensor  # [sum of T_n, V]
    future: Tensor  # [sum of T_n, F]


class WindowBatch(NamedTuple):
    """The inputs and targets of windows, and the scale of each: 0 and 1, except with scale="window"."""

    x: Tensor  # [context + horizon, B, 2 V + F]
    target: Tensor  # [horizon, B, targets]
    mask: Tensor  # which of them are known
    mean: Tensor  # [B, targets]
    spread: Tensor


class HorizonSteps(Head):
    """A forecast at each of the last steps, those ahead: [horizon, B, answers].

    Args:
        size: number of features of the recurrent output.
        answers: numbers that are forecast at a step.
        horizon: number of steps ahead.
    """

    def __init__(self, size: int, answers: int, horizon: int):
        super().__init__(size, answers)
        check_count("horizon", horizon)
        self.horizon = horizon

    def predict(self, output: Tensor) -> Tensor:
        return self.read(output[-self.horizon :])

    def predict_rows(self, output: Tensor, lengths: Tensor) -> Tensor:
        steps = lengths - self.horizon + torch.arange(self.horizon, device=output.device).unsqueeze(1)
        return self.read(output[steps, torch.arange(output.shape[1], device=output.device)])


@dataclass(frozen=True, kw_only=True)
class ForecastTask(OwnTask):
    """Forecasts of series: squared error of standardised values over known targets; the first metric is their absolute error.

    Args:
        context: steps that a forecast reads.
        horizon: steps that are forecast.
        targets: channels that are forecast.
        past: number of covariates that are known up to the origin of a forecast.
        future: number of covariates that are known in advance.
        season: steps after which the series repeat, for the naive forecast that is the guess.
        scale: "series", "window" or "none"; see above.
        mean: mean of each channel and past covariate of each series, over its training part; empty unless scale is "series".
        spread: their standard deviation.
        future_mean: mean of each covariate that is known in advance; empty if they are not scaled.
        future_spread: their standard deviation.
    """

    metric = "mae"

    context: int
    horizon: int
    targets: int
    past: int = 0
    future: int = 0
    season: int = 1
    scale: ForecastScale = "series"
    mean: tuple[tuple[float, ...], ...] = ()
    spread: tuple[tuple[float, ...], ...] = ()
    future_mean: tuple[float, ...] = ()
    future_spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context", "horizon", "targets", "season"):
            check_count(name, getattr(self, name))
        if self.scale not in get_args(ForecastScale):
            raise ValueError(unknown("scale", self.scale, get_args(ForecastScale)))

    @property
    def sizes(self) -> WindowSizes:
        """The sizes of a window."""
        return WindowSizes(self.context, self.horizon, self.targets)

    @property
    def input_size(self) -> int:
        return 2 * (self.targets + self.past) + self.future

    def read_source(self) -> ForecastData:
        from unfading.own_data.forecast_source import read_source  # imports this module

        return read_source(self)

    @property
    def has_test(self) -> bool:
        return len(self.data.test) > 0

    @property
    def guess(self) -> float:
        """Mean absolute error of the seasonal naive forecast, on the windows that are scored at the end."""
        data: ForecastData = self.data
        origins = data.test if self.has_test else data.origins[data.held_out] if len(data.held_out) else data.origins
        error = data.series.naive(origins, self.sizes, self.season) - data.series.targets(origins, self.sizes)
        window = self.window(self.scaled(data.series), torch.from_numpy(origins))
        spread = self.spread_of(data.series.series_of(origins), window)[:, None, :]
        return float(np.nanmean(np.abs(error / spread)))

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        assert batch.mask is not None
        return (prediction - batch.target).mul(batch.mask).square().sum() / batch.mask.sum()

    def metrics(self, prediction: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"mae": mae(prediction, batch.target, batch.mask), "mse": self.loss(prediction, batch)}

    def weight(self, batch: Batch) -> int:
        """Number of known targets, over which the metrics are means."""
        assert batch.mask is not None
        return int(batch.mask.sum())

    def head(self, size: int) -> nn.Module:
        return HorizonSteps(size, self.targets, self.horizon)

    def examples(self, part: Part) -> Examples:
        """Rows are origins of windows; `present` reads the windows themselves, so that no step is held twice."""
        origins = torch.from_numpy(self.data.origins if part == "train" else self.data.test)
        return Examples(origins, origins)

    def present(self, rows: Examples, draw: Callable[[], Generator]) -> Batch:
        device = rows.x.device
        if ("series", device) not in self._parts:
            self._parts["series", device] = Examples(*self.scaled(self.data.series, device))
        held = self._parts["series", device]
        x, target, mask, *_ = self.window(ScaledSeries(held.x, held.target), rows.x)
        return Batch(x, target, None, mask)

    # -- windows ---------------------------------------------------------------------------------------------------------------

    def scaled(self, series: JoinedSeries, device: torch.device = CPU) -> ScaledSeries:
        """The series, standardised as far as their own scale goes, in float64."""
        values, future = series.values, series.future
        if self.scale == "series":
            own = np.repeat(np.arange(len(series.starts) - 1), np.diff(series.starts))
            values = (values - np.array(self.mean)[own]) / np.array(self.spread)[own]
        if self.future_mean:
            future = (future - np.array(self.future_mean)) / np.array(self.future_spread)
        return ScaledSeries(torch.from_numpy(values).to(device), torch.from_numpy(future).to(device))

    def window(self, series: ScaledSeries, origins: Tensor) -> WindowBatch:
        """The windows with these origins. What a series has from its origin on is in the target alone."""
        steps = origins + torch.arange(-self.context, self.horizon, device=origins.device).unsqueeze(1)
        values = series.values[steps]
        known = ~values.isnan()
        target, mask = values[self.context :, :, : self.targets], known[self.context :, :, : self.targets]
        known = torch.cat([known[: self.context], torch.zeros_like(known[self.context :])])
        mean, spread = _context_scale(values, known) if self.scale == "window" else (values.new_zeros(()), values.new_ones(()))
        inputs = torch.where(known, (values - mean) / spread, 0.0)
        x = torch.cat([inputs, known.to(values.dtype), series.future[steps]], dim=-1)
        mean, spread = (part.expand(values.shape[1:])[:, : self.targets] for part in (mean, spread))
        return WindowBatch(x, torch.where(mask, (target - mean) / spread, 0.0), mask, mean, spread)

    def spread_of(self, series: Positions, window: WindowBatch) -> Numbers:
        """The factor between units of the model and of the user, [B, targets], for windows of these series."""
        spread: Numbers = window.spread.cpu().numpy()
        return spread * np.array(self.spread)[series, : self.targets] if self.scale == "series" else spread

    def unscaled(self, prediction: Tensor, series: Positions, window: WindowBatch) -> Numbers:
        """Forecasts of a model [horizon, B, targets] in the units of the series, [B, horizon, targets] in float64.

        Args:
            prediction: forecasts, in the scale of the windows.
            series: the series in which each window lies.
            window: the windows.
        """
        values = prediction.detach().cpu().double().transpose(0, 1).numpy()
        values = values * window.spread.cpu().numpy()[:, None] + window.mean.cpu().numpy()[:, None]
        if self.scale != "series":
            return values
        mean, spread = (np.array(part)[series, None, : self.targets] for part in (self.mean, self.spread))
        unscaled: NDArray[Any] = values * spread + mean
        return unscaled


def _context_scale(values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [B, V] of the known values of each window; a constant has spread 1."""
    count = known.sum(dim=0).clamp(min=1)
    mean = torch.where(known, values, 0.0).sum(dim=0) / count
    spread = (torch.where(known, values - mean, 0.0).square().sum(dim=0) / count).sqrt()
    return mean, torch.where(spread <= torch.finfo(torch.float32).eps * mean.abs(), 1.0, spread)
