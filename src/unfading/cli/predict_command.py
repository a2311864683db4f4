"""`unfading predict`: predictions of a trained model for a file of sequences, or forecasts for one of series."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

if TYPE_CHECKING:
    from unfading.own_data.forecast_task import ForecastTask
    from unfading.training.trained_model import TrainedModel


def predict(
    model: Annotated[str, arg(metavar="RUN")],
    /,
    data: Annotated[Path, arg(metavar="FILE")],
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    probabilities: bool = False,
    allow_code: bool = False,
) -> None:
    """Predict the targets of sequences with a trained model, or forecast the steps after the end of series.

    The file is read with the columns of training. A target that it has is not needed, and is not read by the model. Of series,
    columns that are known in advance must cover the steps that are forecast, in rows whose targets are empty.

    Args:
        model: Folder of a finished run, runs/NAME/KEY, or a file of weights.
        data: File of sequences: .csv, .parquet, .npy, .npz, .ts, .tsv or .arff.
        output: File to write: .npy, or .csv with a column per output. Without it, predictions are printed.
        probabilities: Write the probability of each class instead of the most probable one.
        allow_code: Execute the source of your own cell or task that is stored in the folder of the run.
    """
    import numpy as np

    from unfading.own_data.array_task import ArrayTask
    from unfading.own_data.file_source import columns_of
    from unfading.own_data.forecast_task import ForecastTask
    from unfading.own_data.table_files import Columns, read_file
    from unfading.training.weights import load, load_with_code

    if output is not None and output.suffix not in (".npy", ".csv"):
        raise ValueError(f"-o takes a .npy or .csv file; got {output}.")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"cannot write {output}: there is no folder {output.parent}. Create it first.")
    trained = load_with_code(Path(model)) if allow_code else load(model)
    task = trained.task
    if isinstance(task, ForecastTask):
        if probabilities:
            raise ValueError("--probabilities is for classes, and this model forecasts series. Leave it out.")
        _forecast(trained, task, data, output)
        return
    source = task.source if isinstance(task, ArrayTask) else {}
    columns = columns_of(source) if source else Columns()
    table = read_file(data, columns, targets=False)
    answers = trained.predict_proba(table.X) if probabilities else trained.predict(table.X)
    if output is not None and output.suffix == ".npy":
        np.save(output, answers, allow_pickle=False)
    else:
        names = [str(name) for name in getattr(task, "classes", ())] if probabilities else []
        rows = answers.reshape(len(answers), -1)
        width = rows.shape[1]
        header = names or (["prediction"] if width == 1 else [f"prediction_{i}" for i in range(width)])
        _write_csv(header, rows.tolist(), output)
    if output is not None:
        print(f"wrote {output}: {len(answers):,} predictions")


def _forecast(model: "TrainedModel", task: "ForecastTask", data: Path, output: Path | None) -> None:
    """Forecasts of the steps after the end of each series of a file: [series, horizon, targets], or a row per step."""
    import numpy as np

    from unfading.own_data.forecast_source import columns_of
    from unfading.own_data.forecasts import forecast_ahead
    from unfading.own_data.series_files import SeriesColumns, read_series_file

    columns = columns_of(task.source) if task.source else SeriesColumns()
    missing = task.source.get("missing", "refuse")
    table = read_series_file(data, columns, missing)
    forecasts = forecast_ahead(model, task, table.series, table.past, table.future, missing)
    if output is not None and output.suffix == ".npy":
        np.save(output, forecasts, allow_pickle=False)
    else:
        labels = [[name] for name in table.names] or [[]]
        rows = [
            [*label, step, *values]
            for label, steps in zip(labels, forecasts.tolist(), strict=True)
            for step, values in enumerate(steps, 1)
        ]
        header = [*([table.columns.series] if table.names else []), "step", *table.columns.targets]
        _write_csv(header, rows, output)
    if output is not None:
        print(f"wrote {output}: {task.horizon} steps of {len(forecasts):,} series")


def _write_csv(header: Sequence[Any], rows: Sequence[Sequence[Any]], output: Path | None) -> None:
    """Write a table to a file, or print it."""
    import csv
    from io import StringIO

    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    if output is None:
        print(text.getvalue(), end="")
    else:
        output.write_text(text.getvalue(), encoding="utf-8")
