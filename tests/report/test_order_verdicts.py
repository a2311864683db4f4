"""Verdicts on claims of order, of steps and of time, and the ranking of cells, on synthetic records."""

import json
import math

import pytest

from tests.helpers.paper_lines import claim, line
from unfading.papers import registry
from unfading.papers.row import Order, Ranking
from unfading.report import fidelity
from unfading.report.order_verdicts import judge_order, judge_ranking
from unfading.report.verdicts import HIGHER_IS_BETTER

ITEMS = registry.items()
ERROR = {"measure": "mse", "rising": False, "guess": 1 / 6}


def order(first=("a",), then=("b",), **own):
    return {"kind": "order", "item": "p/t", "claim": "a is ahead", "first": first, "then": then, "by": "score", **own} | {
        name: own.get(name, default) for name, default in (("factor", 1.0), ("bound", None))
    }


def scored(name, *scores, **own):
    return [line(score, seed, row=name, **own) for seed, score in enumerate(scores)]


def solving(name, *steps, **own):
    """Runs that are solved at these steps; never if None."""

    def curve(step):
        return [{"step": 10, "loss": 0.1, "valid": {"mse": 0.1}}, *([{"step": step, "valid": {"mse": 0.005}}] if step else [])]

    return [
        line(0, seed, row=name, **ERROR, test={"mse": 0.005 if step else 0.1}, curve=curve(step), **own)
        for seed, step in enumerate(steps)
    ]


def judged(about, *groups, **own):
    """The outcome from the runs of each row; the rows are named by their runs."""
    runs = {group[0]["row"]: group for group in groups if group}
    names = {*about["first"], *about["then"]}
    return judge_order(about, {name: claim(row=name, **own) for name in names}, runs)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((0.96, 0.97, 0.98), (0.93, 0.94, 0.95), "held"),
        ((0.93, 0.94, 0.95), (0.96, 0.97, 0.98), "refuted"),
        ((0.95, 0.97, 0.99), (0.94, 0.96, 0.98), "undecided"),  # ahead in six of nine pairs
        ((0.970, 0.971, 0.972), (0.969, 0.970, 0.971), "undecided"),  # within the tolerance of 0.4 points
        ((0.97, 0.97, 0.90), (0.95, 0.95, 0.95), "undecided"),  # six of nine again
        ((0.97, 0.97, 0.97, 0.90), (0.95, 0.95, 0.95), "held"),  # three of four
        ((0.97,), (None,), "held"),  # one that diverged counts as a guess
    ],
)
def test_scores_are_compared_seed_by_seed(a, b, verdict):
    outcome = judged(order(), scored("a", *a), scored("b", *b))
    assert outcome.verdict == verdict
    assert f"a: {100 * sum(a) / len(a):.2f} % ({len(a)} seed" in outcome.numbers


def test_a_lower_score_is_ahead_where_lower_is_better():
    own = {"measure": "bits", "rising": False, "guess": 5.0}
    few, many = ([line(0, 0, row=name, **own, test={"bits": bits})] for name, bits in (("a", 1.4), ("b", 1.5)))
    assert judged(order(), few, many, unit="bits", tolerance=0.02).verdict == "held"
    assert judged(order(), few, many, unit="bits", tolerance=0.2).verdict == "undecided"
    assert judged(order(("b",), ("a",)), few, many, unit="bits", tolerance=0.02).verdict == "refuted"


@pytest.mark.parametrize(
    ("a", "b", "factor", "verdict"),
    [
        ((300, 320), (500, 600), 1.0, "held"),
        ((300, 320), (300, 320), 1.0, "undecided"),
        ((500, 600), (300, 320), 1.0, "refuted"),
        ((300, 300), (599, 599), 2.0, "refuted"),
        ((300, 300), (600, 600), 2.0, "held"),
        ((300, 320), (None, None), 2.0, "held"),  # never solved
        ((None, None), (300, 320), 1.0, "refuted"),
        ((None, None), (None, None), 1.0, "undecided"),
        ((None, None), (None, None), 2.0, "undecided"),
    ],
)
def test_steps_are_compared_with_a_factor(a, b, factor, verdict):
    own = {"unit": "error", "published": 0.0, "tolerance": 0.01}
    outcome = judged(order(by="steps", factor=factor), solving("a", *a), solving("b", *b), **own)
    assert outcome.verdict == verdict
    assert ("b: not solved" in outcome.numbers) == (b[0] is None)


def test_a_run_that_diverged_after_it_had_solved_its_task_does_not_count_as_solved():
    own = {"unit": "error", "published": 0.0, "tolerance": 0.01}
    late = solving("b", 900, 900)
    assert judged(order(by="steps"), solving("a", 300, 300), late, **own).verdict == "held"
    assert judged(order(by="steps"), solving("a", 300, 300, status="diverged"), late, **own).verdict == "refuted"


def test_times_are_compared_on_one_machine_only():
    fast, slow = scored("a", 0.9, 0.9, seconds=10.0), scored("b", 0.9, 0.9, seconds=25.0)
    assert judged(order(by="seconds", factor=2.0), fast, slow).verdict == "held"
    assert judged(order(by="seconds", factor=3.0), fast, slow).verdict == "refuted"
    assert judged(order(by="seconds"), fast, slow).verdict == "held"
    assert judged(order(by="seconds"), fast, scored("b", 0.9, seconds=11.0)).verdict == "undecided"  # the same within a tenth
    assert judged(order(by="seconds"), fast, scored("b", 0.9, seconds=11.2)).verdict == "held"
    cpu = {"machine": {"cpu": "a CPU", "cores": 2, "gpu": None}, "commit": "0123456789"}
    elsewhere = scored("b", 0.9, 0.9, seconds=25.0, about=cpu)
    assert judged(order(by="seconds", factor=2.0), fast, elsewhere).verdict == "not run"
    assert judged(order(), scored("a", 0.97, 0.97), scored("b", 0.9, 0.9, about=cpu)).verdict == "held"


def test_runs_of_two_budgets_are_not_compared():
    assert judged(order(), scored("a", 0.97), scored("b", 0.9, budget="short")).verdict == "not run"
    outcome = judged(order(), scored("a", 0.97, budget="short"), scored("b", 0.9, budget="short"))
    assert (outcome.verdict, outcome.budget) == ("held", "short")


def test_every_pair_of_rows_must_hold_and_one_refutes():
    good, middle, bad = scored("a", 0.97, 0.97), scored("b", 0.95, 0.95), scored("c", 0.90, 0.90)
    assert judged(order(("a",), ("b", "c")), good, middle, bad).verdict == "held"
    assert judged(order(("a", "b"), ("c",)), good, middle, bad).verdict == "held"
    assert judged(order(("b",), ("a", "c")), good, middle, bad).verdict == "refuted"
    assert judged(order(("a",), ("b", "c")), good, middle).verdict == "not run"
    assert judged(order(("b",), ("a", "c")), good, middle).verdict == "refuted"  # whatever the third row will be
    assert judged(order(), good).numbers == "a: 97.00 % (2 seeds)"
    assert judged(order())[:2] == ("not run", "")


@pytest.mark.parametrize(("steps", "verdict"), [((250, 300), "held"), ((250, 310), "undecided"), ((310, None), "refuted")])
def test_a_bound_on_steps(steps, verdict):
    own = {"unit": "error", "published": 0.0, "tolerance": 0.01}
    assert judged(order(then=(), by="steps", bound=300.0), solving("a", *steps), **own).verdict == verdict


@pytest.mark.parametrize(("scores", "verdict"), [((0.98, 0.21), "held"), ((0.2, 0.1), "refuted"), ((0.98, 0.1), "undecided")])
def test_a_bound_on_a_score(scores, verdict):
    assert judged(order(then=(), bound=20.2), scored("a", *scores)).verdict == verdict


def ranking(scores, published):
    """Cells A, B and C on two tasks with these scores (each for two seeds), as a line, rows and runs."""
    cells = sorted(published)
    about = {
        "kind": "ranking", "item": "p/t", "claim": "A leads", "leader": "A", "published": published,
        "tasks": {task: {cell: f"{task} {cell}" for cell in cells} for task in scores},
    }  # fmt: skip
    rows = {f"{task} {cell}": claim(row=f"{task} {cell}") for task in scores for cell in cells}
    runs = {
        f"{task} {cell}": scored(f"{task} {cell}", *([score] * 2)) for task in scores for cell, score in scores[task].items()
    }
    return about, rows, runs


PUBLISHED = {"A": [2, 2], "B": [0, 2], "C": [0, 0]}


@pytest.mark.parametrize(
    ("x", "y", "verdict", "numbers"),
    [
        (
            (0.97, 0.95, 0.90),
            (0.97, 0.95, 0.90),
            "held",
            "A 2 and 2 (published 2 and 2), B 0 and 2 (published 0 and 2), C 0 and 0",
        ),
        ((0.95, 0.97, 0.90), (0.95, 0.97, 0.90), "refuted", "A 0 and 2 (published 2 and 2), B 2 and 2"),
        ((0.97, 0.97, 0.90), (0.97, 0.95, 0.90), "held", "A 2 and 2 (published 2 and 2), B 1 and 2"),  # a tie for the best
        ((0.97, 0.95, 0.95), (0.97, 0.95, 0.90), "held", "B 0 and 2 (published 0 and 2), C 0 and 1"),  # and for the second
    ],
)
def test_a_ranking_counts_how_often_a_cell_is_best_with_ties_within_the_tolerance(x, y, verdict, numbers):
    about, rows, runs = ranking({"x": dict(zip("ABC", x, strict=True)), "y": dict(zip("ABC", y, strict=True))}, PUBLISHED)
    outcome = judge_ranking(about, rows, runs)
    assert outcome.verdict == verdict
    assert numbers in outcome.numbers
    assert outcome.numbers.startswith("2 of 2 tasks; ")


def test_a_ranking_counts_complete_tasks_only():
    about, rows, runs = ranking({"x": dict(zip("ABC", (0.97, 0.95, 0.9), strict=True)), "y": {"A": 0.97}}, PUBLISHED)
    outcome = judge_ranking(about, rows, runs)
    assert outcome.verdict == "not run"
    assert outcome.numbers.startswith("1 of 2 tasks; best and among the best two: A 1 and 1 (published 2 and 2), B 0 and 1")
    assert judge_ranking(about, rows, {})[:2] == ("not run", "")


def test_a_ranking_of_errors_is_by_steps_and_by_score_where_nothing_is_solved():
    about, rows, _ = ranking({"x": dict.fromkeys("ABC", 0.0)}, PUBLISHED)
    rows = {name: {**row, "unit": "error", "published": None, "tolerance": 0.01} for name, row in rows.items()}
    runs = {"x A": solving("x A", 300, 320), "x B": solving("x B", 900, 900), "x C": solving("x C", None, None)}
    assert "A 1 and 1 (published 2 and 2), B 0 and 1 (published 0 and 2), C 0 and 0" in judge_ranking(about, rows, runs).numbers
    stuck = {"x B": solving("x B", None, None), "x A": solving("x A", None, None), "x C": solving("x C", None, None)}
    stuck["x C"] = [{**each, "test": {"mse": 0.2}} for each in stuck["x C"]]
    assert (
        "A 1 and 1 (published 2 and 2), B 1 and 1 (published 0 and 2), C 0 and 0" in judge_ranking(about, rows, stuck).numbers
    )


def test_the_page_shows_claims_below_the_rows_and_counts_them():
    rows = [claim(row=name) for name in "ab"]
    runs = [*scored("a", 0.97, 0.97), *scored("b", 0.9, 0.9)]
    page = fidelity.page([*rows, order(), order(("b",), ("a",)), *runs])
    numbers = "a: 97.00 % (2 seeds), b: 90.00 % (2 seeds)"
    assert f"| claim | ours | verdict |\n| :--- | :--- | ---: |\n| a is ahead | {numbers} | held |\n" in page
    assert "| claims about several rows | held | refuted | undecided | not run |" in page
    assert "| p | 1 | 1 | 0 | 0 |" in page
    assert "claims about several rows |" not in fidelity.page([*rows, *runs])
    short = [{**each, "budget": "short"} for each in runs]
    assert "| held (short) |" in fidelity.page([*rows, order(), *short])


def test_claims_are_about_rows_of_their_item():
    checked = 0
    for name in ITEMS:
        names = {row.name for row in registry.rows(ITEMS[name])}
        for each in registry.claims(name):
            own = (
                {*each.first, *each.then}
                if isinstance(each, Order)
                else {r for task in each.tasks.values() for r in task.values()}
            )
            assert own <= names, f"{name}: {each.claim}: {own - names}"
            checked += 1
    assert checked > 80


def test_every_claim_belongs_to_an_item():
    assert set(registry._functions(registry.CLAIMS)) <= set(ITEMS)


def test_the_published_numbers_agree_with_the_published_claims_of_order():
    """A claim that contradicts its own table was transcribed wrongly."""
    checked = 0
    for name in ITEMS:
        rows = {row.name: row for row in registry.rows(ITEMS[name])}
        for each in registry.claims(name):
            if isinstance(each, Ranking) or each.by != "score" or each.claim.startswith("Ours"):
                continue
            for first, then in ((rows[a], rows[b]) for a in each.first for b in each.then):
                if first.published is None or then.published is None or first.share is not None:
                    continue
                sign = 1 if first.unit in HIGHER_IS_BETTER else -1
                assert sign * (first.published - then.published) >= 0, f"{name}: {each.claim}: {first.name}, {then.name}"
                checked += 1
    assert checked > 100


def test_the_ranking_of_nru_has_the_published_counts():
    (each,) = registry.claims("nru/table1")
    assert each.published["NRU"] == (4, 7)
    assert max(best for best, _ in each.published.values()) == 4
    assert len(each.tasks) == 7
    assert all(len(cells) == 10 for cells in each.tasks.values())


def test_claims_are_lines_of_json():
    lines = registry.published(["incremental/fig3", "nru/table1"])
    kinds = [each["kind"] for each in lines]
    assert kinds.count("order") == 7
    assert kinds.count("ranking") == 1
    assert all(math.isfinite(each["factor"]) for each in lines if each["kind"] == "order")
    assert json.loads(json.dumps(lines))[-1]["leader"] == "NRU"
