"""Forecast two series a day ahead, beside naive forecasts: `python examples/forecast.py`. Needs the extra `sklearn`.

The series are hourly, with a season of a day and a lower level at weekends, which are known in advance; some hours are missing.
"""

import numpy as np

from unfading.estimators import RecurrentForecaster

HOURS, TRAINING = 24 * 7 * 5, 24 * 7 * 4


def main() -> None:
    draw = np.random.default_rng(0)
    hours = np.arange(HOURS)
    weekend = (hours // 24 % 7 >= 5).astype(float)
    day = np.sin(2 * np.pi * hours / 24)
    loads = [level * (4 + day - weekend + 0.2 * draw.standard_normal(HOURS)) for level in (100.0, 3.0)]
    for load in loads:
        load[draw.random(HOURS) < 0.05] = np.nan

    model = RecurrentForecaster("GRU", horizon=24, context=48, season=24, missing="mask", hidden=16, epochs=8, rate=0.02)
    model.fit([load[:TRAINING] for load in loads], future_covariates=[weekend] * 2)
    tomorrow = model.predict()  # the weekends of `fit` reach past the end of the training series
    print(f"the next day of the first series: {tomorrow[0].mean():.0f} on average")
    print(model.backtest(loads, future_covariates=[weekend] * 2))


if __name__ == "__main__":
    main()
