"""Verdicts on synthetic records, and the fidelity page, which needs no torch."""

import json
import subprocess
import sys

import pytest

from tests.helpers.paper_lines import claim, line
from tests.helpers.paths import ROOT
from unfading.report import fidelity
from unfading.report.figures import charts as figures
from unfading.report.figures import curve_figures as curves
from unfading.report.figures import overview
from unfading.report.verdicts import judge, seeds_needed, sentence, setting, to_reach, trained


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        # Without a spread beaten begins at 95 + 2 sqrt(0.2^2 + 0.2^2) = 95.566.
        ((0.957, 0.957, 0.957), "beaten"),
        ((0.9556, 0.9556, 0.9556), "held"),
        # 95.8 with spread 0.5: 2 sqrt(0.25 / 3 + 0.08) = 0.808.
        ((0.953, 0.958, 0.963), "held"),
        ((0.954, 0.959, 0.964), "beaten"),
        ((0.950, 0.950, 0.999), "held"),  # one lucky seed
        ((0.9465, 0.947, 0.946), "held"),  # 94.65 is within 0.4 of 95
        ((0.945, 0.946, 0.9459), "missed"),
        ((0.999,), "held"),  # one seed beats nothing
        ((0.945,), "missed"),
    ],
)
def test_verdicts_follow_the_rule(scores, verdict):
    lines = [line(score, seed) for seed, score in enumerate(scores)]
    outcome = judge(claim(), lines)
    assert outcome.verdict == verdict
    assert outcome.seeds == len(scores)


def test_runs_at_the_current_setting_are_preferred_to_more_runs_at_another():
    old = [line(0.95, seed) for seed in range(3)]
    new = line(0.97)
    new["run"] = {**new["run"], "rate": 2e-3, "device": "cuda", "dtype": "tf32"}
    row = claim(settings=["0" * 12, setting({**new["run"], "seed": 7, "device": "cpu", "dtype": "float32"})])
    assert judge(row, [*old, new])[1:4] == (97.0, None, 1)
    assert not judge(row, [*old, new]).earlier
    outcome = judge(row, old)
    assert (outcome.earlier, outcome.seeds) == (True, 3)
    assert "measured at a setting that the row had before" in sentence(row, outcome)
    assert not judge(row, [{**each, "budget": "short"} for each in old]).earlier  # a short run has another budget


def test_a_run_answers_all_rows_with_its_settings():
    """A row of a table and a point of a figure may be the same runs; a row with other settings is not answered."""
    runs = [line(0.95), line(0.96, 1)]
    same = [setting(runs[0]["run"])]
    equal, other = claim(item="q/fig1", row="the same", settings=same), claim(item="q/fig1", row="other", settings=["0"])
    rows = [claim(settings=same), equal, other]
    assert [outcome.seeds for _, outcome in fidelity.answers([*rows, *runs])] == [2, 2, 0]
    own = {**line(0.97, 2), "item": "q/fig1", "row": "the same"}
    assert [outcome.seeds for _, outcome in fidelity.answers([*rows, *runs, own])] == [3, 3, 0]


@pytest.mark.parametrize("published", [11.0, 0.0])
@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((0.1135, 0.1135, 0.1135), "held"),  # above the published 11.0 and not better than a guess
        ((0.1135, 0.1135, 0.98), "held"),  # one lucky seed
        ((0.1135, 0.98), "held"),  # half of the seeds
        ((0.1135, 0.98, 0.98), "refuted"),
        ((0.1135, 0.15, 0.15), "held"),  # a tenth above a guess is 20.2
        ((None, None, None), "held"),
        ((None, 0.98, 0.98), "refuted"),
        ((0.98,), "refuted"),
    ],
)
def test_a_claim_that_a_model_does_not_train(published, scores, verdict):
    """The published number is one of chance, or 0 for NaN; a seed without a score diverged."""
    own = {"guess": 0.1135}
    lines = [line(score, seed, status="diverged" if score is None else "finished", **own) for seed, score in enumerate(scores)]
    row = claim(published=published, tolerance=0.6, fails=True)
    outcome = judge(row, lines)
    assert outcome.verdict == verdict
    assert outcome.diverged == scores.count(None)
    sentences = f"{outcome.trained} of {len(scores)} seeds trained" + f", {outcome.diverged} diverged" * (None in scores)
    assert sentence(row, outcome) == f"the claim is failure; {sentences}"
    shown = "11.00 %, does not train" if published else "NaN, does not train"
    assert f"| r | {shown} |" in fidelity.page([row, *lines])


@pytest.mark.parametrize(("solved", "verdict"), [(0, "held"), (1, "held"), (2, "refuted"), (3, "refuted")])
def test_a_claim_that_a_task_is_not_solved(solved, verdict):
    """Learning something is no refutation; solving it with the stated share of seeds is."""
    own = {"measure": "cross_entropy", "rising": False, "guess": 0.2}
    lines = [line(0, seed, **own, test={"cross_entropy": 0.01 if seed < solved else 0.1}) for seed in range(3)]
    row = claim(unit="error", published=0.0, tolerance=0.02, share=0.6, fails=True)
    assert judge(row, lines).verdict == verdict
    assert f"the claim is failure; {solved} of 3 seeds solved the task" in sentence(row, judge(row, lines))
    assert "under 60% of seeds at most 0.02" in fidelity.page([row, *lines])


def test_a_seed_that_diverged_is_not_within_a_tolerance_of_a_guess():
    """Random labels: every seed is to end at the level of a guess, and a run that diverged is scored as one."""
    own = {"measure": "cross_entropy", "rising": False, "guess": 0.2}
    row = claim(unit="error", published=0.2, tolerance=0.02, share=1.0)
    good = [line(0, seed, **own, test={"cross_entropy": 0.201}) for seed in range(2)]
    assert judge(row, [*good, line(0, 2, **own, test={"cross_entropy": 0.201})]).verdict == "held"
    assert judge(row, [*good, line(None, 2, **own, status="diverged")])[0] == "missed"


@pytest.mark.parametrize(("score", "verdict"), [(1.40, "beaten"), (1.48, "held"), (1.60, "missed")])
def test_verdicts_if_lower_is_better(score, verdict):
    own = {"measure": "bits", "rising": False, "guess": 5.0, "test": {"bits": score}}
    assert judge(claim(unit="bits", published=1.47, tolerance=0.02), [line(0, s, **own) for s in (0, 1)]).verdict == verdict


def test_perplexity_is_the_exponential_of_the_cross_entropy():
    own = {"measure": "cross_entropy", "rising": False, "guess": 9.0, "test": {"cross_entropy": 4.75}}
    outcome = judge(claim(unit="perplexity", published=115.71, tolerance=5.8), [line(0, **own)])
    assert outcome.mean == pytest.approx(115.58, abs=0.01)
    assert outcome.verdict == "held"


def test_a_seed_that_diverged_counts_as_a_guess():
    outcome = judge(claim(), [line(0.96, 0), line(None, 1, status="diverged")])
    assert outcome.mean == pytest.approx((96 + 10) / 2)
    assert (outcome.verdict, outcome.trained, outcome.seeds) == ("missed", 1, 2)
    assert "1 of 2 seeds did not train" in sentence(claim(), outcome)


def test_a_claim_about_a_share_of_seeds():
    own = {"measure": "mse", "rising": False, "guess": 1 / 6}
    curve = [{"step": 10, "loss": 0.1, "valid": {"mse": 0.02}}, {"step": 20, "loss": 0.1, "valid": {"mse": 0.005}}]
    good = [line(0, seed, **own, test={"mse": 0.003}, curve=curve) for seed in range(3)]
    bad = [line(0, seed, **own, test={"mse": 0.2}) for seed in (3, 4)]
    solved = claim(unit="error", published=0.0, tolerance=0.01, share=0.6)
    outcome = judge(solved, good + bad)
    assert (outcome.verdict, outcome.reached, outcome.steps) == ("held", 3, 20)
    outcome = judge(solved, good[:2] + bad)
    assert (outcome.verdict, outcome.reached) == ("missed", 2)
    assert "2 of 4 seeds came to 0.01" in sentence(solved, outcome)
    assert to_reach(solved, bad[0]) is None


def test_seeds_that_were_not_run_count_in_a_share_and_are_mentioned():
    """A run that solves its task may stop early, so finished seeds alone are a biased sample."""
    own = {"measure": "mse", "rising": False, "guess": 1 / 6, "test": {"mse": 0.003}}
    solved = claim(unit="error", published=0.0, tolerance=0.01, share=0.6, seeds=5)
    outcome = judge(solved, [line(0, seed, **own) for seed in (1, 3)])
    assert (outcome.verdict, outcome.reached, outcome.seeds, outcome.asked) == ("missed", 2, 2, 5)
    assert "2 of 5 seeds came to 0.01; 3 of 5 seeds were not run to their end" in sentence(solved, outcome)
    outcome = judge(solved, [line(0, seed, **own) for seed in (1, 3, 4)])
    assert outcome.verdict == "held"
    (cells,) = (
        row for row in fidelity.page([solved, *(line(0, seed, **own) for seed in (1, 3, 4))]).splitlines() if "| r |" in row
    )
    assert [cell.strip() for cell in cells.split("|")][3:5] == ["3 of 5 (mean 0.003 ± 0)", "3 of 5"]
    short = [line(0, 0, **own, budget="short")]
    assert judge(solved, short).asked == 1


def test_parameter_counts_have_a_tolerance_on_both_sides():
    row = claim(unit="thousand parameters", published=18.0, tolerance=0.5)
    for count, verdict in ((17_930, "held"), (18_600, "missed"), (17_300, "missed")):
        assert judge(row, [{"kind": "count", "parameters": {"all": count, "recurrent": 1}}]).verdict == verdict


def test_rows_that_were_not_run():
    assert judge(claim(), []).verdict == "not run"
    assert judge(claim(), [], here=False).verdict == "data not available"
    assert judge(claim(), [line(0.99, budget="smoke")]).verdict == "not run"
    assert judge(claim(published=None), [line(0.5)]).verdict == "measured"


def test_the_larger_budget_on_one_machine_is_judged():
    cpu = {"about": {"machine": {"cpu": "a CPU", "cores": 2, "gpu": None}, "commit": "0123456789"}}
    lines = [line(0.5, 0, budget="short"), line(0.96, 0), line(0.97, 1), line(0.1, 0, **cpu)]
    outcome = judge(claim(), lines)
    assert (outcome.budget, outcome.seeds, outcome.machine) == ("paper", 2, "NVIDIA H200")
    assert outcome.mean == pytest.approx(96.5)
    alone = judge(claim(), lines[:1])
    assert alone.budget == "short"
    assert "at a tenth of the paper's steps" in sentence(claim(), alone)
    assert judge(claim(), [line(0.5, 0), line(0.96, 0)]).seeds == 1


@pytest.mark.parametrize(
    ("fails", "score", "verdict"),
    [
        (False, 0.90, "open"),  # more steps may reach 95
        (False, 0.95, "held"),
        (True, 0.98, "refuted"),  # it trains, at whatever budget
        (True, 0.1135, "open"),  # it may train later
        (True, None, "held"),  # its loss is no longer finite
    ],
)
def test_a_short_run_decides_only_what_more_steps_would_not_change(fails, score, verdict):
    status = "diverged" if score is None else "finished"
    row, short = claim(fails=fails), line(score, budget="short", status=status, guess=0.1135)
    outcome = judge(row, [short])
    assert outcome.verdict == verdict
    if not fails and verdict == "open":
        assert sentence(row, outcome).startswith("-5 points from the published number; at a tenth")
    assert f"| {verdict} | short |" in fidelity.page([row, short])


def test_trained_is_a_tenth_better_than_a_guess():
    assert trained(line(0.2))
    assert not trained(line(0.18))
    assert not trained(line(0.9, status="diverged"))


def written(folder):
    rows = [claim(), claim(row="s", published=None), claim(row="u", here=False, dataset="yelp"), claim(item="q/fig1", row="v")]
    runs = [line(0.945, 0), line(0.946, 1), line(0.5, 0, row="s", budget="short")]
    figure = [{"kind": "figure", "item": "q/fig2", "title": "A figure."}]
    drawn = [
        {"kind": "drawn", "item": "q/fig2", "title": "A figure.", "budget": "paper", "findings": ["It is blue."], "about": {}}
    ]
    for name, lines in ((fidelity.ROWS, rows + figure), ("papers-x.jsonl", runs + drawn)):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_the_page_shows_every_row_from_the_records_alone(tmp_path):
    written(tmp_path)
    page = fidelity.page(fidelity.read(tmp_path))
    assert "| r | 95.00 % | 94.55 % ± 0.071 | 2 | 2/2 | 1,000 (900 recurrent) | 10.0 s | missed |  |" in page
    assert "| s | - | 50.00 % | 1 | 1/1 | 1,000 (900 recurrent) | 10.0 s | measured | short |" in page
    assert "| u | 95.00 % | - | - | - | - | - | data not available |  |" in page
    assert "| v | 95.00 % | - | - | - | - | - | not run |  |" in page
    assert (
        "- **r**: STAR, 8 units, on adding T=20, adam l2=0.01, rate 0.001 constant, clip 1, batch 4, 100 steps, trained on "
        "training and validation rows. " in page
    )
    assert "-0.45 points from the published number" in page
    assert "needs yelp" in page
    assert "- It is blue." in page
    assert ".png" not in page
    assert "A figure.\n\n![A figure.](q-fig2.png)\n" in fidelity.page(fidelity.read(tmp_path), ["q-fig2.png", "p-t2.png"])
    assert "on NVIDIA H200." in page
    assert "| p | 0 | 0 | 1 | 0 | 0 | 1 | 1 | 0 |" in page


def test_marks_say_how_a_row_was_measured():
    rows = [
        claim(row="clean"), claim(row="dirty"), claim(row="unknown"), claim(row="changed", changed_after_test="the rates"),
        claim(row="earlier", settings=["0" * 12]), claim(row="wide", seeds=3), claim(row="enough", seeds=3),
    ]  # fmt: skip
    about = line(0.5)["about"]
    scores = (0.950, 0.955, 0.961)
    runs = [
        line(0.95, row="clean"),
        line(0.95, row="dirty"),
        line(0.95, 1, row="dirty", about={**about, "commit": "0123456789-dirty"}),
        line(0.95, row="unknown", about={**about, "commit": None}),
        line(0.95, row="changed"),
        line(0.95, row="earlier"),
        *(line(score, seed, row="wide") for seed, score in enumerate(scores)),
        *(line(score, seed, row="enough") for seed, score in enumerate((*scores, 0.95, 0.95))),
    ]
    marks = {row["row"]: fidelity.marks(row, outcome) for row, outcome in fidelity.answers([*rows, *runs])}
    assert marks == {
        "clean": [], "dirty": ["no clean commit"], "unknown": ["no clean commit"], "changed": ["changed after test"],
        "earlier": ["earlier setting"], "wide": ["needs 5 seeds"], "enough": [],
    }  # fmt: skip
    page = fidelity.page([*rows, *runs])
    assert "Of 7 trained rows 2 come from a checkout with uncommitted changes." in page
    assert "changed after a test score was known: the rates." in page
    assert "| wide | 95.00 % | 95.53 % ± 0.55 | 3 of 5 |" in page


@pytest.mark.parametrize(
    ("seeds", "unit", "scores", "needed"),
    [
        (3, "%", (95.0, 95.5, 96.0), 3),  # a point
        (3, "%", (95.0, 95.5, 96.1), 5),
        (3, "%", (95.0, 95.5, 96.1, 95.0, 95.0), 5),
        (3, "%", (95.0, 96.1), 3),  # unknown until three are run
        (3, "%", (95.0, 95.0, 95.0, 97.0), 3),
        (3, "bits", (1.0, 2.0, 9.0), 3),
        (1, "%", (95.0, 97.0, 99.0), 1),
    ],
)
def test_three_seeds_that_differ_by_more_than_a_point_become_five(seeds, unit, scores, needed):
    assert seeds_needed(seeds, unit, scores) == needed


def test_failures_and_rows_without_a_claim_need_no_more_seeds():
    runs = [line(score, seed) for seed, score in enumerate((0.90, 0.92, 0.94))]
    for fields, asked in (({}, 5), ({"published": None}, 3), ({"fails": True}, 3)):
        assert judge(claim(**{"published": 90.0, "seeds": 3, **fields}), runs).asked == asked


def test_the_options_of_a_setting_are_listed_and_those_that_are_off_left_out():
    own = {"schedule": "cosine", "schedule_options": {"warmup": 0.05, "floor": 0.0}, "cell_options": {"zoneout": 0.1}}
    text = fidelity.describe({**line(0.95)["run"], **own})
    assert "STAR zoneout=0.1, " in text
    assert "rate 0.001 cosine warmup=0.05, " in text


def test_the_page_says_from_how_many_candidates_a_setting_was_chosen():
    run = line(0.95)
    chosen = setting(run["run"])
    about = {"kind": "candidate", "item": "p/t", "row": "r", "budget": "paper"}
    settings = (("a", 1e-3, chosen), ("b", 1e-2, chosen), ("c", 1e-2, chosen), ("d", 1e-1, "0" * 12))
    tried = [{**about, "key": key, "setting": {"rate": rate}, "chosen": hash} for key, rate, hash in settings]
    several = claim(settings=[chosen, "1" * 12])
    page = fidelity.page([several, run, *tried])
    assert "the setting was chosen by validation from 2." in page
    assert "Of 1 rows whose setting was chosen from several, the scores of the candidates are stored for 1." in page
    page = fidelity.page([several, run])
    assert "chosen by validation from" not in page
    assert "are stored for 0." in page


def test_the_overview_has_each_row_in_per_cent_once_with_its_gap():
    rows = [
        claim(),
        claim(item="p/u"),
        claim(row="b", unit="bits"),
        claim(row="g", fails=True),
        claim(row="n", published=None),
    ]
    lines = [*rows, *(line(score, seed, row=row) for row in "rbgn" for seed, score in enumerate((0.94, 0.95)))]
    (gap,) = overview.gaps(fidelity.answers(lines))
    assert gap == {
        "row": "r",
        "gap": pytest.approx(-0.5),
        "low": pytest.approx(-1.207, abs=1e-3),
        "high": pytest.approx(0.207, abs=1e-3),
        "tolerance": 0.4,
        "least": -0.4,
        "verdict": "missed",
    }
    assert b"<svg" in figures.svg(overview.overview([gap]))[:300]


def test_the_longest_name_fits_in_a_wide_font():
    row = {"gap": 0.0, "low": 0.0, "high": 0.0, "tolerance": 0.4, "least": -0.4, "verdict": "held"}
    spec = overview.overview([{**row, "row": "m" * count} for count in (5, 80)])
    axes = [layer["encoding"]["y"]["axis"] for layer in spec["layer"]]
    assert all(axis["minExtent"] >= 80 * 6.5 and axis["labelLimit"] == 0 for axis in axes)


def test_the_page_needs_no_torch(tmp_path):
    written(tmp_path)
    code = f"""if True:
        import importlib.util, pathlib, sys, types
        for name in ("torch", "altair"):
            sys.modules[name] = None
        root = pathlib.Path({str(ROOT / "src" / "unfading")!r})
        for name, folder in (("unfading", root), ("unfading.report", root / "report")):
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
        from unfading.report import fidelity
        print(len(fidelity.page(fidelity.read(pathlib.Path({str(tmp_path)!r})))))"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 1000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{\n", "line 1 is damaged: it is not JSON"),
        ('{"a": 1}\n', "has no 'kind' and 'item'"),
        ("", "papers-rows.jsonl is missing or"),
    ],
)
def test_damaged_records_are_named(tmp_path, content, sentence):
    (tmp_path / "papers-x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        fidelity.read(tmp_path)


def test_the_committed_page_is_up_to_date():
    pictures = [path.name for path in (ROOT / "docs" / "papers").iterdir()]
    page = fidelity.page(fidelity.read(ROOT / "benchmarks" / "results"), pictures)
    assert page == (ROOT / "docs" / "papers" / "fidelity.md").read_text()


def medians_of(spec):
    """The points of the thick lines in each panel, and the colours of its rows."""
    panels = []
    for panel in spec["concat"]:
        (layer,) = (each for each in panel["layer"] if each["mark"].get("strokeWidth") == 2.4)
        scale = layer["encoding"]["color"]["scale"]
        panels.append((layer["data"]["values"], dict(zip(scale["domain"], scale["range"], strict=True))))
    return panels


def test_a_seed_that_stopped_early_stays_in_the_median_and_labels_keep_their_colours():
    own = {"measure": "mse", "rising": False, "guess": 1 / 6}

    def curve(*values):
        return [{"step": 10 * (i + 1), "loss": 0.1, "valid": {"mse": value}} for i, value in enumerate(values)]

    scores = [(0.1, 0.01), (0.1, 0.02), (0.1, 0.15, 0.15)]  # two are done after 20 steps
    lines = [line(0, seed, row="adding 20 B", **own, curve=curve(*each)) for seed, each in enumerate(scores)]
    spec = curves.over_steps([
        *(line(0, 0, row=f"adding 30 {name}", **{**own, "place": "adding 30"}, curve=curve(0.1)) for name in "AB"), *lines,
    ])  # fmt: skip
    (_, there), (medians, here) = medians_of(spec)
    assert [point["value"] for point in medians] == [0.1, 0.02, 0.02]
    assert here["adding 20 B"] == there["adding 30 B"] != there["adding 30 A"]


def test_medians_count_diverged_runs_as_guesses_and_need_all_seeds():
    own = {"measure": "mse", "rising": False, "guess": 1 / 6}
    curve = [{"step": step, "loss": 0.1, "valid": {"mse": 0.1 / step}} for step in (1, 10, 100)]
    good = [line(0, seed, row="a", **own, curve=curve, asked=4) for seed in range(2)]
    bad = [
        line(None, 2, row="a", **own, curve=curve[:1], status="diverged", asked=4),
        line(None, 3, row="a", **own, curve=[], status="diverged", asked=4),
    ]
    ((medians, _),) = medians_of(curves.over_steps([*good, *bad]))
    assert [point["value"] for point in medians] == pytest.approx([0.1, (0.01 + 1 / 6) / 2, (0.001 + 1 / 6) / 2])
    ((medians, _),) = medians_of(curves.over_steps([*good, bad[0]]))
    assert medians == []


@pytest.mark.parametrize("draw", [curves.over_steps, curves.over_layers, curves.to_solve])
@pytest.mark.sample(1)
def test_curves_are_drawn_from_lines_alone(draw):
    curve = [{"step": step, "loss": 0.1, "valid": {"mse": 0.2 / step}} for step in (1, 10, 100)]
    own = {"measure": "mse", "rising": False, "guess": 1 / 6, "test": {"mse": 0.01}, "curve": curve}
    names = [f"adding 20 cell {i}" for i in range(10)]
    lines = [line(0, seed, row=name, **own) for name in names for seed in range(2)]
    spec = draw([*lines, line(0, 0, row="other", **{**own, "place": "adding 30"})])
    assert len(spec["concat"]) == 2
    assert json.dumps(spec)
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([])
