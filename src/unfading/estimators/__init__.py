"""Estimators for scikit-learn: a classifier, a regressor and a forecaster. They need the extra `sklearn`."""

try:
    import sklearn  # noqa: F401
except ImportError:
    raise ImportError("unfading.estimators needs scikit-learn: pip install 'unfading[sklearn]'.") from None

from unfading.estimators.forecaster import RecurrentForecaster
from unfading.estimators.recurrent_estimators import RecurrentClassifier, RecurrentRegressor
from unfading.own_data.backtest import Backtest

__all__ = ["Backtest", "RecurrentClassifier", "RecurrentForecaster", "RecurrentRegressor"]
