"""`unfading predict`: predictions of a trained model for a file of sequences."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg


def predict(
    model: Annotated[str, arg(metavar="RUN")],
    /,
    data: Annotated[Path, arg(metavar="FILE")],
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    probabilities: bool = False,
    allow_code: bool = False,
) -> None:
    """Predict the targets of sequences with a trained model.

    The file is read with the columns of training. A target that it has is not needed, and is not read by the model.

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
    from unfading.own_data.table_files import Columns, read_file
    from unfading.training.weights import load, load_with_code

    if output is not None and output.suffix not in (".npy", ".csv"):
        raise ValueError(f"-o takes a .npy or .csv file; got {output}.")
    trained = load_with_code(Path(model)) if allow_code else load(model)
    task = trained.task
    source = task.source if isinstance(task, ArrayTask) else {}
    columns = columns_of(source) if source else Columns()
    table = read_file(data, columns, targets=False)
    answers = trained.predict_proba(table.X) if probabilities else trained.predict(table.X)
    if output is not None and output.suffix == ".npy":
        np.save(output, answers, allow_pickle=False)
    else:
        names = [str(name) for name in getattr(task, "classes", ())] if probabilities else []
        text = _csv(answers.reshape(len(answers), -1), names)
        if output is None:
            print(text, end="")
        else:
            output.write_text(text, encoding="utf-8")
    if output is not None:
        print(f"wrote {output}: {len(answers):,} predictions")


def _csv(answers: "object", names: list[str]) -> str:
    import csv
    from io import StringIO

    import numpy as np

    rows = np.asarray(answers)
    width = rows.shape[1]
    header = names or (["prediction"] if width == 1 else [f"prediction_{i}" for i in range(width)])
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows.tolist())
    return text.getvalue()
