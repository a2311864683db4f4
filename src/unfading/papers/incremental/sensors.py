"""Kag, Zhang & Saligrama 2020: tables 3, 8, 9 and 11 - activities, spoken commands and reviews."""

from typing import Any

from unfading.papers.incremental.runs import baseline, incremental, stable
from unfading.papers.row import Row, two_sigma

SEEDS = 5
RATES = (1e-3, 3e-3, 1e-2)
# Chosen with the rate: how many epochs, and whether large weights are held against a cell.
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "har2": tuple({"epochs": epochs, "optimiser_options": {"l2": l2}} for epochs in (30, 100) for l2 in (0.0, 1e-3))
}
# "20 % of the training rows for validation", at random. As four people who are held out would choose (10 epochs, l2 = 1e-2,
# rate 3e-3) the incremental RNN comes to 88.6 % on those of the test; with 100 epochs to 93.4.
OPTIONS: dict[str, dict[str, Any]] = {"har2": {"validation": "fifth"}}
# Test rows, steps, and what the incremental RNN has there: units, rank, epochs.
TASKS: dict[str, dict[str, Any]] = {
    "har2": {"place": "HAR-2", "rows": 2_947, "T": 128, "hidden": 80, "rank": 20, "epochs": 100},
    "dsa19": {"place": "DSA-19", "rows": 4_560, "T": 125, "hidden": 64, "rank": 14, "epochs": 100},
    "google12": {"place": "Google-12", "rows": 3_081, "T": 99, "hidden": 80, "rank": 41, "epochs": 50},
    "google30": {"place": "Google-30", "rows": 6_835, "T": 99, "hidden": 80, "rank": 36, "epochs": 50},
    "yelp5": {"place": "Yelp-5", "rows": 500_000, "T": 300, "hidden": 128, "rank": 32, "epochs": 5},
}
# FastGRNN is the dense form ("LSQ") and the low-rank one; its sparse and quantised sizes have no counterpart here.
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "FastRNN": ("FastRNN", {}), "FastGRNN-LSQ": ("FastGRNN", {}), "FastGRNN": ("FastGRNN", {"rank": 40}), "RNN": ("Elman", {}),
    "SpectralRNN": ("SpectralRNN", {}), "EURNN": ("EURNN", {}), "LSTM": ("LSTM", {}), "GRU": ("GRU", {}),
    "Antisymmetric": ("AntisymmetricRNN", {}), "UGRNN": ("UGRNN", {}),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, tuple[float, str]]] = {
    "har2": {
        "FastRNN": (94.50, "29 KB, 0.063 h"), "FastGRNN-LSQ": (95.38, "29 KB, 0.081 h"), "FastGRNN": (95.59, "3 KB, 0.10 h"),
        "RNN": (91.31, "29 KB, 0.114 h"), "SpectralRNN": (95.48, "525 KB, 0.730 h"), "EURNN": (93.11, "12 KB, 0.740 h"),
        "LSTM": (93.65, "74 KB, 0.183 h"), "GRU": (93.62, "71 KB, 0.130 h"), "Antisymmetric": (93.15, "29 KB, 0.087 h"),
        "UGRNN": (94.53, "37 KB, 0.120 h"), "K=1": (95.32, "17 KB, 0.061 h"), "K=3": (95.52, "17 KB, 0.081 h"),
        "K=5": (96.30, "18 KB, 0.018 h"),
    },
    "dsa19": {
        "FastRNN": (84.14, "97 KB"), "FastGRNN-LSQ": (85.00, "208 KB"), "FastGRNN": (83.73, "3.25 KB"), "RNN": (71.68, "20 KB"),
        "SpectralRNN": (80.37, "50 KB"), "LSTM": (84.84, "526 KB"), "GRU": (84.84, "270 KB"), "Antisymmetric": (85.37, "32 KB"),
        "UGRNN": (84.74, "399 KB"), "K=1": (88.11, "19 KB"), "K=3": (85.20, "19 KB"), "K=5": (87.37, "20 KB"),
    },
    "google12": {
        "FastRNN": (92.21, "56 KB"), "FastGRNN-LSQ": (93.18, "57 KB"), "FastGRNN": (92.10, "5.5 KB"), "RNN": (73.25, "56 KB"),
        "SpectralRNN": (91.59, "228 KB"), "EURNN": (76.79, "210 KB"), "LSTM": (92.30, "212 KB"), "GRU": (93.15, "248 KB"),
        "Antisymmetric": (89.91, "57 KB"), "UGRNN": (92.63, "75 KB"), "K=1": (93.93, "36 KB"), "K=3": (94.16, "37 KB"),
        "K=5": (94.71, "38 KB"),
    },
    "google30": {
        "FastRNN": (91.60, "96 KB"), "FastGRNN-LSQ": (92.03, "45 KB"), "FastGRNN": (90.78, "6.25 KB"), "RNN": (80.05, "63 KB"),
        "SpectralRNN": (88.73, "128 KB"), "EURNN": (56.35, "135 KB"), "LSTM": (90.31, "219 KB"), "GRU": (91.41, "257 KB"),
        "Antisymmetric": (90.91, "64 KB"), "UGRNN": (90.54, "260 KB"), "K=1": (93.77, "44 KB"), "K=3": (91.30, "44 KB"),
        "K=5": (94.23, "45 KB"),
    },
    "yelp5": {
        "FastRNN": (55.38, "130 KB"), "FastGRNN-LSQ": (59.51, "130 KB"), "FastGRNN": (59.43, "8 KB"), "RNN": (47.59, "130 KB"),
        "SpectralRNN": (56.56, "89 KB"), "EURNN": (59.01, "122 KB"), "LSTM": (59.49, "516 KB"), "GRU": (59.02, "388 KB"),
        "Antisymmetric": (54.14, "130 KB"), "UGRNN": (58.67, "258 KB"), "K=1": (58.16, "97.67 KB"), "K=2": (59.01, "98.84 KB"),
        "K=3": (59.34, "100 KB"),
    },
}  # fmt: skip
SIGMOID = {1: (92.16, "17 KB, 0.065 h"), 3: (93.35, "17 KB, 0.078 h"), 5: (95.30, "18 KB, 0.020 h")}
# Parameters of the recurrent part, where the printed size tells the rank: 97.67, 98.84 and 100 KB, no classifier, no embedding.
COUNTS = {("yelp5", 1): 25_004, ("yelp5", 2): 25_304, ("yelp5", 3): 25_604, ("har2", 1): 4_128, ("google30", 1): 8_499}
NOTES = {"har2": "rank 20 fits the printed sizes of K = 3 and 5", "google30": 'rank 36 is the printed "8.5k"; 44 KB is not'}


def _rows(task: str, names: tuple[str, ...], **own: Any) -> list[Row]:
    about = TASKS[task]
    shared = {"hidden": about["hidden"], "epochs": about["epochs"]}
    options = OPTIONS.get(task, {})
    rows = []
    for name in names:
        published, printed = PUBLISHED[task][name]
        tolerance = two_sigma(published, about["rows"])
        if name.startswith("K="):
            K = int(name[2:])
            run = incremental(task, options, T=about["T"], K=K, rank=about["rank"], **shared)
            extra: dict[str, Any] = {"rates": RATES, "parameters": COUNTS.get((task, K))}
            label, note = f"iRNN {name}", NOTES.get(task, "")
        else:
            cell, cell_options = CELLS[name]
            hidden = {"EURNN": 64, "LSTM": 64 if task == "har2" else about["hidden"]}.get(name, about["hidden"])
            run = baseline(cell, task, options, cell_options, hidden=hidden, epochs=about["epochs"])
            extra = {"rates": RATES, "parameters": None}
            label = name
            note = "low rank alone; the paper's size is of a sparse, quantised net" if name == "FastGRNN" else ""
        fields = {"printed": printed, **_shared(task), **extra, **own}
        rows.append(Row(run, published, tolerance, note, name=f"{about['place']} {label}", **fields))
    return rows


def _shared(task: str) -> dict[str, Any]:
    """What all rows of a task have in common."""
    return {"seeds": SEEDS, "retrain": True, "choices": CHOICES.get(task, ({},))}


def _ours(task: str) -> list[Row]:
    about = TASKS[task]
    rows = []
    for K in (1, 3):
        published = PUBLISHED[task][f"K={K}"][0]
        run = stable(
            task, OPTIONS.get(task, {}), T=about["T"], K=K, rank=13, hidden=about["hidden"], epochs=about["epochs"], rate=3e-3
        )
        rows.append(
            Row(
                run, published, two_sigma(published, about["rows"]), "ours: the stable form, held against the paper's cell",
                name=f"{about['place']} ours K={K}", rates=(3e-3, 8e-3), **_shared(task),
            )
        )  # fmt: skip
    return rows


def table3() -> list[Row]:
    """HAR-2 and Google-30: accuracy, times and size."""
    names = ("FastRNN", "RNN", "LSTM", "Antisymmetric", "K=1", "K=5")
    return [*_rows("har2", names), *_ours("har2"), *_rows("google30", names)]


def table8() -> list[Row]:
    """Yelp reviews, one to five stars."""
    return _rows("yelp5", tuple(PUBLISHED["yelp5"]), seeds=1)


def table9() -> list[Row]:
    """HAR-2, DSA-19, Google-12 and Google-30 with all baselines."""
    return [row for task in ("har2", "dsa19", "google12", "google30") for row in _rows(task, tuple(PUBLISHED[task]))]


def table11() -> list[Row]:
    """HAR-2 with ReLU and with sigmoid."""
    about = TASKS["har2"]
    rows = _rows("har2", ("K=1", "K=3", "K=5"))
    for K, (published, printed) in SIGMOID.items():
        shared = {"hidden": about["hidden"], "epochs": about["epochs"], "activation": "sigmoid"}
        run = incremental("har2", OPTIONS["har2"], T=about["T"], K=K, rank=about["rank"], **shared)
        own: dict[str, Any] = {"printed": printed, "rates": RATES, **_shared("har2")}
        rows.append(Row(run, published, two_sigma(published, about["rows"]), name=f"HAR-2 iRNN K={K}, sigmoid", **own))
    return rows
