"""Reports: numbers and order agree with the records, and the page works offline."""

import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.command import run_apart
from unfading.cli import report_command as cli_report
from unfading.report import groups, page, records, summary
from unfading.report.figures import charts

NASTY = "</script><script>alert(1)</script><b>&'\""
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def synthetic_run(cell, seed, **fields):
    run = {
        "task": "adding", "task_options": {"T": 200}, "cell": cell, "cell_options": {}, "hidden": 128, "layers": 1,
        "optimiser": "adam", "optimiser_options": {}, "rate": 0.003, "rates": {}, "schedule": "constant",
        "schedule_options": {}, "clip_norm": 1.0, "clip_value": None, "batch": 128, "steps": 200, "epochs": None, "seed": seed,
    }  # fmt: skip
    return run | fields


def synthetic_record(run, valid, test, *, measure="mse", rising=False, guess=1 / 6, curve=None, **fields):
    """A record with eight log rows from the score of a guess to `valid`; every other one has a validation score."""
    key = f"{crc32(json.dumps(run).encode()):012x}"
    if curve is None:
        curve = []
        for k in range(1, 9):
            value = guess + (valid - guess) * k / 8
            line = {"step": 25 * k, "loss": 2 * value, "rate": 0.003, "seconds": 0.5 * k}
            curve.append(line | ({"valid": {"loss": value, measure: value}} if k % 2 == 0 else {}))
    return {
        "version": 1, "key": key, "run": run, "status": "finished", "reason": None, "steps": 200, "returns": 0,
        "measure": measure, "rising": rising, "guess": guess, "best": {"step": 200, "valid": {"loss": valid, measure: valid}},
        "test": None if test is None else {"loss": test, measure: test}, "seconds": 10.0 + run["seed"],
        "milliseconds_per_sequence": 0.4, "parameters": {"all": 4500, "recurrent": 4371}, "kilobytes": 17.6,
        "about": {
            "machine": {"cpu": "A CPU", "cores": 2, "system": "Linux"}, "versions": {"unfading": "0.1.0", "torch": "2.13.0"},
            "commit": "abcdef0123", "date": "2026-11-15T15:00:00+00:00", "command": "unfading compare --task adding",
        }, "curve": curve,
    } | fields  # fmt: skip


def write(folder, record):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"version": 1, "run": record["run"]}))
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record["curve"]))
    if record["status"] != "unfinished":
        (folder / "record.json").write_text(json.dumps(record))


# The second best setting by validation has the best test score; it must still come second.
SCORES = {
    ("IncrementalRNN", 5): ([0.001, 0.002, 0.0015], [0.004, 0.005, 0.003]),
    ("IncrementalRNN", 1): ([0.003, 0.004, 0.005], [0.001, 0.002, 0.0012]),
    ("LSTM", None): ([0.16, 0.01, 0.17], [0.165, 0.011, None]),
}


def synthetic_records():
    all_records = []
    for (cell, inner), (valids, tests) in SCORES.items():
        options = {} if inner is None else {"cell_options": {"inner_steps": inner}}
        for seed, (valid, test) in enumerate(zip(valids, tests, strict=True)):
            all_records.append(synthetic_record(synthetic_run(cell, seed, **options), valid, test))
    reason = f"loss or gradient not finite at step 112 {NASTY}"
    all_records[-1] |= {"status": "diverged", "reason": reason, "steps": 112, "curve": all_records[-1]["curve"][:4]}
    all_records.append(synthetic_record(synthetic_run("LSTM", 3), 0.1, None, status="unfinished"))
    for cell, layers in (("STAR", 8), (NASTY, 1)):
        for seed in (0, 1):
            run = synthetic_run(cell, seed, task="pixel_mnist", task_options={}, layers=layers)
            all_records.append(synthetic_record(run, 0.9 + seed / 100, 0.91, measure="accuracy", rising=True, guess=0.1135))
    return all_records


@pytest.fixture
def runs(tmp_path):
    for i, record in enumerate(synthetic_records()):
        write(tmp_path / "runs" / "name" / f"{i:012x}", record)
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for i, record in enumerate(synthetic_records()):
        write(folder / "runs" / f"{i:012x}", record)
    cli_report.report((folder / "runs",), output=folder / "page.html", json=True)
    return folder / "page.html"


def test_a_summary_agrees_with_numpy(runs):
    adding, mnist = groups.group_by_task(records.load([runs]))
    assert (adding.name, mnist.name) == ("adding T=200", "pixel_mnist")
    rows = {setting.label: setting.summary for setting in adding.settings}
    for (cell, inner), (valids, tests) in SCORES.items():
        row = rows[cell if inner is None else f"{cell} inner_steps={inner}"]
        known = [test for test in tests if test is not None]
        assert row.valid == pytest.approx(np.mean(valids))
        assert row.mean == pytest.approx(np.mean(known))
        assert row.spread == pytest.approx(np.std(known, ddof=1))
        assert row.best == min(known)
        assert row.trained == sum(test <= 0.9 / 6 for test in known)
        assert row.share == pytest.approx(row.trained / 3)
        assert row.seconds == 11.0
    lstm = rows["LSTM"]
    assert (lstm.seeds, lstm.ended, lstm.diverged, lstm.unfinished, lstm.steps) == ((0, 1, 2, 3), 3, 1, 1, 200)
    assert (lstm.milliseconds, lstm.parameters, lstm.recurrent, lstm.kilobytes) == (0.4, 4500, 4371, 17.6)
    assert mnist.settings[0].summary.best == 0.91
    assert mnist.settings[0].summary.trained == 2


@pytest.mark.parametrize(
    ("rising", "guess", "test", "status", "trained"),
    [
        (False, 1.0, 0.9, "finished", True),
        (False, 1.0, 0.91, "finished", False),
        (False, 1.0, 0.1, "diverged", False),
        (True, 0.5, 0.55, "finished", True),
        (True, 0.5, 0.54, "finished", False),
        (True, 0.5, None, "diverged", False),
        (True, None, 0.9, "finished", None),
        (False, 1.0, float("nan"), "finished", False),
    ],
)
def test_trained_is_a_tenth_better_than_a_guess(rising, guess, test, status, trained):
    record = synthetic_record(synthetic_run("LSTM", 0), 0.5, test, curve=[], status=status, rising=rising)
    assert records.read([record | {"guess": guess}])[0].trained is trained


def test_settings_are_sorted_by_validation_score(runs):
    adding, _ = groups.group_by_task(records.load([runs]))
    assert [setting.label for setting in adding.settings] == [
        "IncrementalRNN inner_steps=5",
        "IncrementalRNN inner_steps=1",
        "LSTM",
    ]
    better = [
        synthetic_record(synthetic_run("A", 0), 0.9, 0.1, rising=True),
        synthetic_record(synthetic_run("B", 0), 0.8, 0.99, rising=True),
    ]
    (task,) = groups.group_by_task(records.read(better))
    assert [setting.label for setting in task.settings] == ["A", "B"]
    (task,) = groups.group_by_task(records.read([record | {"best": None} for record in better]))
    assert [setting.label for setting in task.settings] == ["B", "A"]


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        ([synthetic_run("LSTM", 0), synthetic_run("LSTM", 1)], {"LSTM"}),
        ([synthetic_run("LSTM", 0, rate=0.01), synthetic_run("LSTM", 0, rate=0.1)], {"LSTM rate=0.01", "LSTM rate=0.1"}),
        ([synthetic_run("LSTM", 0), synthetic_run("STAR", 0)], {"LSTM", "STAR"}),
        ([synthetic_run("NRU", 0, cell_options={"x": 1}), synthetic_run("NRU", 0)], {"NRU x=1", "NRU"}),
        (
            [synthetic_run("NRU", 0, cell_options={"x": 1}), synthetic_run("NRU", 0, cell_options={"x": "1"})],
            {"NRU x=1", 'NRU x="1"'},
        ),
        ([synthetic_run("NRU", 0, cell_options={"rate": 1}), synthetic_run("NRU", 0)], {"NRU cell_options.rate=1", "NRU"}),
        # The rate of a parameter that only one of the cells has is not a difference between them.
        ([synthetic_run("A", 0, rates={"eta": 0.1}), synthetic_run("B", 0)], {"A", "B"}),
        ([synthetic_run("A", 0, rates={"eta": 0.1}), synthetic_run("A", 0)], {"A rates.eta=0.1", "A"}),
        ([synthetic_run("A", 0, clip_norm=None), synthetic_run("A", 0)], {"A clip_norm=none", "A clip_norm=1.0"}),
    ],
)
def test_a_label_names_the_differences(runs, labels):
    (task,) = groups.group_by_task(records.read([synthetic_record(run, 0.1, 0.1) for run in runs]))
    assert {setting.label for setting in task.settings} == labels


def test_an_unfinished_run_shows_the_log_rows_it_has(runs):
    folder = runs / "name" / "going"
    write(folder, synthetic_record(synthetic_run("LSTM", 9), 0.1, None, status="unfinished"))
    with (folder / "curve.jsonl").open("a") as file:
        file.write('{"step": 225, "lo')
    unfinished = next(record for record in records.load([folder]) if record.seed == 9)
    assert (unfinished.status, unfinished.steps, unfinished.metric, unfinished.trained, len(unfinished.curve)) == (
        "unfinished",
        200,
        "mse",
        None,
        8,
    )
    (folder / "curve.jsonl").unlink()
    assert records.load([folder])[0].curve == ()
    assert "None has a score yet." in page.build(records.load([folder]))


def test_a_run_counts_once(runs):
    everything = records.load([runs])
    assert len(everything) == len(synthetic_records())
    assert records.load([runs, runs / "name", next(runs.rglob("record.json"))]) == everything
    shutil.copytree(runs / "name", runs / "copy")
    assert len(records.load([runs])) == len(synthetic_records())


def damaged(runs, name, change):
    file = runs / "name" / f"{0:012x}" / name
    file.write_text(change(file.read_text()))
    return [runs]


def without(field):
    def change(text):
        record = json.loads(text)
        del record[field]
        return json.dumps(record)

    return change


def altered(field, value):
    return lambda text: json.dumps(json.loads(text) | {field: value})


REFUSALS = {
    "needs at least one folder": lambda runs: [],
    "no such file or folder": lambda runs: [runs / "nowhere"],
    "no runs in": lambda runs: [Path(__file__).parent.parent / "user"],
    "is not a record: a run's record is its record.json": lambda runs: [next(runs.rglob("curve.jsonl"))],
    "is of version 2; this unfading reads version 1": lambda runs: damaged(runs, "record.json", altered("version", 2)),
    "is damaged: it is not JSON": lambda runs: damaged(runs, "record.json", lambda text: text[:-20]),
    "must be a JSON object; got [1, 2]": lambda runs: damaged(runs, "record.json", lambda text: "[1, 2]"),
    "it has no 'measure'": lambda runs: damaged(runs, "record.json", without("measure")),
    "'steps' must be int; got 'many'": lambda runs: damaged(runs, "record.json", altered("steps", "many")),
    "'steps' must be int; got True": lambda runs: damaged(runs, "record.json", altered("steps", True)),
    "'test' is not a record of an unfading run: it has no 'mse'": lambda runs: damaged(
        runs, "record.json", altered("test", {})
    ),
    "'status' must be 'finished' or 'diverged'": lambda runs: damaged(runs, "record.json", altered("status", "odd")),
    "log row 1 must be an object": lambda runs: damaged(runs, "record.json", altered("curve", [3])),
    "cannot be in one table": lambda runs: damaged(
        runs, "record.json", lambda text: text.replace('"mse"', '"error"')
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSALS)
def test_unreadable_records_are_named(runs, sentence):
    paths = REFUSALS[sentence](runs)
    with pytest.raises((ValueError, OSError)) as refusal:
        groups.group_by_task(records.load(paths))
    assert sentence in str(refusal.value)


def test_two_outcomes_of_one_run_are_refused(runs):
    shutil.copytree(runs / "name", runs / "again")
    file = runs / "again" / f"{0:012x}" / "record.json"
    file.write_text(altered("seconds", 99.0)(file.read_text()))
    with pytest.raises(ValueError, match="two outcomes of the same run"):
        records.load([runs])


def test_a_page_needs_a_file_name_in_an_existing_folder(runs, tmp_path):
    loaded = records.load([runs])
    with pytest.raises(ValueError, match="is a folder"):
        page.write(loaded, tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        page.write(loaded, tmp_path / "no" / "page.html")


@pytest.mark.parametrize("name", ["altair", "jinja2", "vl_convert"])
@pytest.mark.sample(1)
def test_a_missing_package_is_named_with_its_extra(runs, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'unfading\[report\]'"):
        page.write(records.load([runs]), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_table_fits_80_columns():
    finished = [record for record in synthetic_records() if record["status"] != "unfinished"]
    finished += [
        synthetic_record(synthetic_run("StableIncrementalRNN", s, cell_options={"a": 0.125}), 1.2345e-5, 1.2345e-5 * (1 + s))
        for s in (0, 1)
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary.summary(finished))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for words in ("IncrementalRNN", "0.0015", "1/3", "diverged: loss or gradient", "did not train: test mse 0.1650"):
        assert words in text


def test_a_run_without_test_rows_is_judged_by_its_validation_score():
    kinds = {"solved": 0.01, "poor": 0.16, "unvalidated": None}
    made = [synthetic_record(synthetic_run("STAR", seed), valid or 0.01, 0.0) for seed, valid in enumerate(kinds.values())]
    made = [{**record, "test": None} for record in made]
    made[2]["best"] = None
    read = records.read(made)
    assert [record.trained for record in read] == [True, False, None]
    assert [summary.failure(record) for record in read] == [None, "did not train", None]
    ((label, reason),) = summary.failures(*groups.group_by_task(read))
    assert label == "STAR, seed 1"
    assert reason.startswith("did not train: valid mse 0.1600, guess 0.1667. Try more --steps")


def test_equal_records_give_equal_bytes(built):
    loaded = records.load([built.with_name("runs")])
    assert page.build(loaded) == page.build(list(reversed(loaded))) == built.read_text()
    # Again with the command, in another process.
    again = built.with_name("again.html")
    command = [sys.executable, "-c", "from unfading.cli.main import main; main()", "report", str(built.with_name("runs"))]
    answer = subprocess.run([*command, "-o", str(again), "--json"], capture_output=True, text=True, check=True)
    assert again.read_bytes() == built.read_bytes()
    assert not [path for path in built.parent.iterdir() if path.name.startswith(".")]
    printed = json.loads(answer.stdout)
    assert printed["files"] == [str(again)]
    first = printed["tasks"][0]["settings"][0]
    assert (first["setting"], first["seeds"]) == ("IncrementalRNN inner_steps=5", [0, 1, 2])


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.data = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.data.append((self.tags[-1][0] if self.tags else "", data))


def test_the_page_fetches_nothing_and_escapes_all_text(built):
    text = built.read_text()
    tags = Tags()
    tags.feed(text)
    kinds = [tag for tag, _ in tags.tags]
    assert not {"link", "img", "iframe", "object", "base"} & set(kinds)
    assert not [name for _, attrs in tags.tags for name in attrs if name in ("src", "href") or name.startswith("on")]
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import", text[text.index("<style>") : text.index("</style>")])
    # Eight figures, Vega once and the drawing code; none from the name of a cell.
    assert kinds.count("script") == 8 + 2
    assert "alert(1)" not in "".join(data for tag, data in tags.data if tag == "script" and "vegaEmbed" in data)
    shown = "".join(data for tag, data in tags.data if tag not in ("script", "style"))
    assert NASTY in shown
    for words in ("A CPU", "torch 2.13.0", "abcdef0123", "2026-11-15", "unfading compare --task adding", "did not train"):
        assert words in shown
    assert "IncrementalRNN inner_steps=5 has the best mean validation mse, 0.00150" in shown


def test_a_figure_holds_the_points_of_the_curves(runs):
    adding, mnist = groups.group_by_task(records.load([runs]))
    specs = charts.figures(adding)
    assert list(specs) == ["curves", "loss", "test", "seconds"]
    rows = specs["curves"]["datasets"]["seeds"]
    assert [row["value"] for row in rows if (row["setting"], row["seed"]) == ("LSTM", "0")] == pytest.approx(
        [line["valid"]["mse"] for line in synthetic_records()[6]["curve"] if "valid" in line]
    )
    # The run that diverged has two of the four evaluations; the median goes on with the others.
    last = [row for row in specs["curves"]["datasets"]["middle"] if row["setting"] == "LSTM"][-1]
    assert last["step"] == 200
    assert last["value"] == pytest.approx(np.median([0.16, 0.01, 0.1]))
    means = {row["setting"]: row["value"] for row in specs["test"]["datasets"]["middle"]}
    assert means["LSTM"] == pytest.approx(np.mean([0.165, 0.011]))
    scales = [layer["encoding"]["y"]["scale"] for layer in specs["curves"]["layer"] if layer["name"] == "seeds"]
    assert scales[0]["type"] == "log"
    assert "type" not in charts.figures(mnist)["curves"]["layer"][2]["encoding"]["y"]["scale"]


def test_a_long_curve_is_thinned_and_keeps_its_mean_and_its_end():
    curve = [{"step": k, "loss": float(k), "valid": {"mse": float(k)}} for k in range(1, 5001)]
    (task,) = groups.group_by_task(records.read([synthetic_record(synthetic_run("LSTM", 0), 0.1, 0.1, curve=curve)]))
    specs = charts.figures(task)
    loss, valid = (specs[name]["datasets"]["seeds"] for name in ("loss", "curves"))
    assert max(len(loss), len(valid)) <= charts.MOST
    assert loss[-1]["step"] == valid[-1]["step"] == valid[-1]["value"] == 5000
    assert loss[0]["value"] == pytest.approx(np.mean(range(1, 1 + loss[0]["step"])))


def test_many_settings_have_distinct_colours_and_dashes():
    (task,) = groups.group_by_task(
        records.read([synthetic_record(synthetic_run("LSTM", 0, hidden=h), 0.1, 0.1) for h in range(1, 20)])
    )
    encoding = charts.figures(task)["loss"]["layer"][0]["encoding"]
    colours, dashes = encoding["color"]["scale"]["range"], encoding["strokeDash"]["scale"]["range"]
    assert len({(colour, tuple(dash)) for colour, dash in zip(colours, dashes, strict=True)}) == 19


def test_pictures_are_written_beside_the_page(tmp_path, capsys):
    write(tmp_path / "runs" / "one", synthetic_record(synthetic_run("LSTM", 0), 0.1, 0.1))
    cli_report.report((tmp_path / "runs",), output=tmp_path / "mine.html", png=True)
    names = {"mine-curves.png", "mine-loss.png", "mine-test.png", "mine-seconds.png"}
    assert names | {"mine.html", "runs"} == {path.name for path in tmp_path.iterdir()}
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20]) > 1000
    assert "mine-loss.png" in capsys.readouterr().out


# Quotes, backslashes, line breaks and separators, control characters, half a surrogate pair, and what XML does not allow.
UNDRAWABLE = "a'b\"c\\d\ne\u2028f\x07g\x00h\ud800i\ufffej\x7f\\"


def hostile_runs(folder):
    for seed in (0, 1):
        record = synthetic_record(synthetic_run("LSTM", seed, cell_options={"note": UNDRAWABLE}), 0.1, 0.1, measure=UNDRAWABLE)
        write(folder / str(seed), record)
    write(folder / "other", synthetic_record(synthetic_run("LSTM", 0), 0.1, 0.1, measure=UNDRAWABLE))
    return folder


def test_no_text_of_a_figure_is_undrawable(tmp_path):
    (task,) = groups.group_by_task(records.load([hostile_runs(tmp_path / "runs")]))
    specs = json.dumps(charts.figures(task), ensure_ascii=False)
    assert "validation a'b" in specs
    for character in UNDRAWABLE:
        if charts.UNDRAWABLE.match(character):
            assert character not in specs.replace('\\\\"', "").replace('\\"', "")
            assert f"U+{ord(character):04X}" in specs


@pytest.mark.long
def test_figures_are_drawn_whatever_the_names(tmp_path):
    hostile_runs(tmp_path / "runs")
    # In a process of its own: what this is about ends the process.
    (answer,) = run_apart(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--png"])
    assert answer.returncode == 0, answer.stderr
    # A figure that was not drawn is a blank picture of a few kilobytes.
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert sizes.keys() == {"page-curves.png", "page-loss.png", "page-test.png", "page-seconds.png"}
    assert min(sizes.values()) > 10_000


def browse(path, folder):
    """The DOM of the page in a browser without network, and the messages of its console."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    flags += ["--host-resolver-rules=MAP * 127.0.0.1:1", "--proxy-server=127.0.0.1:1", f"--user-data-dir={folder}"]
    flags += ["--window-size=1250,1500", "--virtual-time-budget=5000", "--dump-dom"]
    answer = subprocess.run([CHROMIUM, *flags, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return answer.stdout, [line for line in answer.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_without_network_draws_the_curves(built, tmp_path):
    """Also with interaction: a copy of the page points at a curve, turns the wheel and clicks in the legend."""
    act = """<script>setTimeout(() => {
      const plot = document.querySelector("[data-figure=figure-1]"), result = document.createElement("pre");
      const at = (node, type, Event, more) => {
        const box = node.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
        node.dispatchEvent(new Event(type, { bubbles: true, cancelable: true, view: window, clientX: x, clientY: y, ...more }));
      };
      const ticks = () => [...plot.querySelectorAll(".role-axis-label text")].map((text) => text.textContent).join(" ");
      const before = ticks(), dot = plot.querySelector(".dots_marks path");
      at(dot, "pointerover", PointerEvent); at(dot, "pointermove", PointerEvent);
      setTimeout(() => {
        const tip = document.getElementById("vg-tooltip-element").innerText;
        at(plot.querySelector(".middle_marks path"), "wheel", WheelEvent, { deltaY: -400 });
        const label = plot.querySelector(".role-legend-label text");
        for (const type of ["pointerdown", "pointerup", "click"]) at(label, type, PointerEvent);
        setTimeout(() => {
          const faint = [...plot.querySelectorAll(".middle_marks path")].map((path) => path.getAttribute("opacity"));
          result.id = "result";
          result.textContent = JSON.stringify({ tip, zoomed: ticks() !== before, faint });
          document.body.append(result);
        }, 300);
      }, 300);
    }, 1500);</script></body>"""
    acted = tmp_path / "acted.html"
    acted.write_text(act.join(built.read_text().rsplit("</body>", 1)))
    dom, console = browse(acted, tmp_path / "profile")
    assert console == []
    plots = dom.split('data-figure="')[1:]
    assert len(plots) == 8
    for plot in plots:
        width, height = map(int, re.search(r'<svg [^>]*class="marks" width="(\d+)" height="(\d+)"', plot).groups())
        assert 400 < width < 1250
        assert 100 < height < 600
    lines = re.findall(r'class="mark-line role-mark (seeds|middle)_marks"[^>]*><path[^>]* d="([^"]*)"', plots[0])
    assert [kind for kind, _ in lines].count("seeds") == 10
    assert [kind for kind, _ in lines].count("middle") == 3
    # Four evaluations are four points of a line; the run that diverged has two.
    assert sorted(path.count("L") + 1 for kind, path in lines if kind == "seeds") == [2] + 9 * [4]
    assert "guess 0.1667" in plots[0]
    result = json.loads(re.search(r'<pre id="result">(.*?)</pre>', dom)[1])
    assert "IncrementalRNN inner_steps=5" in result["tip"]
    assert "undefined" not in result["tip"]
    assert result["zoomed"]
    assert result["faint"] == ["1", "0.1", "0.1"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_browser_check_can_fail(tmp_path):
    (tmp_path / "bad.html").write_text("<!doctype html><img src='http://example.com/a.png'><script>nothing()</script>")
    _, console = browse(tmp_path / "bad.html", tmp_path / "profile")
    assert "nothing is not defined" in console[0]
