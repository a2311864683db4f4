"""`unfading.export.report`: a page from which to decide whether a trained model fits on a device."""

from pathlib import Path

from unfading.errors import check_count
from unfading.report import export_page, html


def report(model: str, page: Path | str, *, batches: int = 8, rows: int = 1024, normalised_samples: bool = False) -> Path:
    """Write an HTML page about a trained model as C: memory, speed, the scores of each precision, and where errors arise.

    The sizes of code and stack need `arm-none-eabi-gcc`, and the instructions of a sample `qemu-system-arm`; what is not
    installed is named on the page. The page needs the extra `report`.

    Args:
        model: file of weights, or an https address of one, as `unfading.load` takes it.
        page: the HTML file to write.
        batches: batches of 128 training rows for the calibration of integers.
        rows: test rows for the scores, rounded up to batches of 128.
        normalised_samples: leave the normalisation of the task out of the exported model.
    """
    from unfading.export.measure import measure
    from unfading.export.trained import read
    from unfading.report.figures.charts import needed

    check_count("batches", batches)
    check_count("rows", rows)
    page = Path(page)
    html.check(page)
    for package in ("altair", "jinja2", "vl_convert"):
        needed(package)
    return export_page.write(measure(read(model, normalised_samples=normalised_samples), batches=batches, rows=rows), page)
