"""The leaderboard's page on synthetic records: which rows are shown, what is best, what is missing, and empty places."""

import subprocess
import sys

import pytest

from tests.helpers.paper_lines import claim, line
from tests.helpers.paths import ROOT
from unfading.report import fidelity, leaderboard_page
from unfading.report.verdicts import setting


def entry(cell, size="10k", **own):
    """A row at an equal number of parameters."""
    fields = {"item": "leaderboard/har2", "place": "har2", "row": f"HAR-2 {cell}, {size}", "published": None, "seeds": 5}
    return claim(**{**fields, "cell": cell, "log": {}, **own})


def own(**fields):
    """A row at its authors' settings."""
    base = {"item": "oscillators/cornn", "place": "har2", "row": "HAR-2 CoRNN", "published": 97.2, "cell": "CoRNN", "log": {}}
    return claim(**{**base, **fields})


def runs(row, *scores, **fields):
    return [line(score, seed, item=row["item"], row=row["row"], **fields) for seed, score in enumerate(scores)]


def cells(page, start):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if row.startswith(f"| {start} |")]


def test_a_place_that_was_not_trained_is_empty_and_the_best_is_bold():
    star, lem, large = entry("STAR"), entry("LEM"), entry("STAR", "70k")
    elsewhere = entry("STAR", item="leaderboard/adding", place="adding 1000", row="adding 1,000 STAR, 10k", unit="error")
    other = {**elsewhere, "cell": "LEM", "row": "adding 1,000 LEM, 10k"}
    error = {"measure": "mse", "rising": False, "guess": 0.17}
    lines = [*runs(star, *[0.93] * 5), *runs(lem, *[0.95] * 5)]
    lines += [{**each, "test": {"mse": each["test"]["accuracy"]}} for each in runs(elsewhere, *[0.001] * 5, **error)]
    lines += [{**each, "test": {"mse": each["test"]["accuracy"]}} for each in runs(other, *[0.002] * 5, **error)]
    page = leaderboard_page.page([star, lem, large, elsewhere, other, *lines])
    small, empty = cells(page, "STAR")
    assert small == ["STAR", "93.00 % ± 0", "**0.001 ± 0**"]
    assert cells(page, "LEM") == [["LEM", "**95.00 % ± 0**", "0.002 ± 0"]]
    assert empty == ["STAR", ""]
    assert page.index("About 10k parameters") < page.index("About 70k parameters")


def test_short_runs_and_missing_seeds_are_marked():
    row = entry("STAR")
    assert "| 93.00 % (short, 1 seed)" in leaderboard_page.page([row, *runs(row, 0.93, budget="short")]).replace("**", "")
    assert "| 93.00 % ± 0 (2 seeds)" in leaderboard_page.page([row, *runs(row, 0.93, 0.93)]).replace("**", "")


@pytest.mark.parametrize(("score", "missing"), [(0.95, "2.20 points"), (0.98, "")])
def test_what_our_best_lacks_to_the_best_published_number_is_shown(score, missing):
    best, worse, equal = own(), own(item="incremental/table3", row="iRNN", cell="IncrementalRNN", published=96.3), entry("STAR")
    page = leaderboard_page.page([best, worse, equal, *runs(worse, 0.9), *runs(equal, score)])
    (summary,) = cells(page, "HAR-2")
    assert summary[1:] == ["97.20 %", "CoRNN (oscillators/cornn)", f"{100 * score:.2f} % (1 seed)", "HAR-2 STAR, 10k", missing]
    assert cells(leaderboard_page.page([best]), "HAR-2")[0][-1] == "not run"


def test_a_solved_task_is_missing_nothing():
    row = own(place="adding 10000", row="adding", published=0.0, tolerance=0.01, unit="error", share=0.6)
    for error, missing in ((0.001, ""), (0.02, "not solved")):
        line = {**runs(row, error, measure="mse", rising=False)[0], "test": {"mse": error}}
        (summary,) = cells(leaderboard_page.page([row, line]), "adding 10,000")
        assert (summary[1], summary[-1]) == ("solved", missing)


def test_rows_at_own_settings_are_those_of_a_paper_about_its_own_cells_once():
    same = [setting(line(0.9)["run"])]
    rows = [
        own(item="incremental/table3", row="mine", cell="IncrementalRNN", settings=same),
        own(item="incremental/table9", row="mine again", cell="IncrementalRNN", settings=same),
        own(item="incremental/table3", row="a baseline", cell="LSTM"),
        own(item="incremental/causes", row="a study", cell="IncrementalRNN"),
        own(item="oscillators/first_epochs", row="no number", published=None),
        own(item="star/table3", row="fails", cell="STAR", fails=True),
        own(item="star/table3", row="counted", cell="STAR", unit="thousand parameters"),
        own(item="star/table3", row="another task", cell="STAR", place="digits"),
    ]
    page = leaderboard_page.page(rows)
    assert [row for row in (row["row"] for row in rows) if f"| {row} |" in page] == ["mine"]


def test_better_rows_come_first_and_rows_that_were_not_run_last():
    rows = [own(row=name, settings=[name]) for name in ("none", "worse", "better")]
    page = leaderboard_page.page([*rows, *runs(rows[1], 0.9), *runs(rows[2], 0.95)])
    assert page.index("| better |") < page.index("| worse |") < page.index("| none |")


def test_validation_scores_stand_beside_the_authors_at_equal_epochs():
    row = own(log={"1": 10.0, "3": 30.0, "50": 99.0})
    curve = [{"step": 5, "loss": 1.0}]
    for epoch in (1, 2, 3):
        curve += [{"step": 10 * epoch, "valid": {"accuracy": epoch / 10}}, {"step": 10 * epoch + 5, "loss": 1.0}]
    page = leaderboard_page.page([row, *runs(row, 0.9, 0.9, curve=curve)])
    assert cells(page, "epoch") == [["epoch", "1", "3"]]
    assert cells(page, "authors") == [["authors", "10.00", "30.00"]]
    assert cells(page, "ours, 2 seeds") == [["ours, 2 seeds", "10.00", "30.00"]]
    assert "At equal epochs" not in leaderboard_page.page([row])
    assert leaderboard_page._spread([str(i) for i in range(1, 101)]) == [str(i) for i in range(1, 101, 11)]


def test_own_settings_against_published_results_have_their_section_and_count_as_ours():
    published, equal = own(), entry("STAR")
    past = own(item="past_best/targets", row="HAR-2 LRU", cell="LRU")
    results = [*runs(equal, 0.9), *runs(past, *[0.96] * 3)]
    page = leaderboard_page.page([published, equal, past, *results])
    section = page[page.index("## Past the best published") : page.index("## Equal parameters")]
    assert [row[:4] for row in cells(section, "past_best/targets")] == [
        ["past_best/targets", "HAR-2 LRU", "97.20 %", "96.00 % ± 0"]
    ]
    assert page.count("| past_best/targets |") == 1
    (summary,) = cells(page, "HAR-2")
    # The published number stays that of the authors' row; ours is the best of all sections.
    assert summary[1:] == ["97.20 %", "CoRNN (oscillators/cornn)", "96.00 % ± 0", "HAR-2 LRU", "1.20 points"]
    assert "Past the best published" not in leaderboard_page.page([published, equal])


def test_our_best_says_whether_its_settings_changed_after_a_test_score_was_known():
    row = entry("STAR", changed_after_test="another rate")
    (summary,) = cells(leaderboard_page.page([row, *runs(row, *[0.9] * 5)]), "HAR-2")
    assert summary[3] == "90.00 % ± 0 (changed after test)"


def test_the_page_of_results_leaves_the_leaderboard_out():
    row = entry("STAR")
    assert "leaderboard/har2" not in fidelity.page([own(), row, *runs(row, 0.9)])


def test_the_committed_page_is_made_from_the_committed_records():
    """`unfading leaderboard page` brings it up to date. It needs no torch."""
    code = f"""
import pathlib, sys
from unfading.report import fidelity, leaderboard_page
page = leaderboard_page.page(fidelity.read(pathlib.Path({str(ROOT)!r}) / "benchmarks" / "results"))
print("torch" in sys.modules, page == (pathlib.Path({str(ROOT)!r}) / "docs" / "leaderboard.md").read_text())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
