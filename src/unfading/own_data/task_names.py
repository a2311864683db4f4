"""The tasks over a user's data, by their name in runs."""

from unfading.own_data.array_task import ARRAY_TASKS
from unfading.own_data.forecast_task import ForecastTask
from unfading.own_data.own_task import OwnTask

OWN_TASKS: dict[str, type[OwnTask]] = {**ARRAY_TASKS, "forecasting": ForecastTask}
