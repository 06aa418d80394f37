"""Mistakes of the graders on right and wrong forms of MATH's and GSM8K's answers, compared with math-verify alone.

The forms are graded in a process of their own, because math-verify's time limit and pytest's use the same signal.
"""

import json
import subprocess
import sys

import pytest

from rl.config.schema import ROOT
from tests.answer_forms import (
    EQUIVALENT,
    GSM8K_EQUIVALENT,
    GSM8K_FILE,
    GSM8K_WRONG,
    MATH_FILE,
    WRONG,
    Row,
    read_lines,
    table,
    totals,
)

MOST_FALSE_NEGATIVES, MOST_FALSE_POSITIVES = 0.01, 0.005


def grade(most: int, timeout_s: int) -> dict[str, list[Row]]:
    command = [sys.executable, "-m", "tests.answer_forms", "--json", "--most", str(most)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=timeout_s).stdout
    return {title: [Row(*row) for row in rows] for title, rows in json.loads(output).items()}


def check(tables: dict[str, list[Row]]) -> None:
    for title, rows in tables.items():
        print(table(title, rows))
        cases, mistakes, _ = totals(rows, is_right=True)
        assert mistakes <= MOST_FALSE_NEGATIVES * cases, f"{title}: {mistakes} false negatives in {cases} cases"
        cases, mistakes, _ = totals(rows, is_right=False)
        assert mistakes <= MOST_FALSE_POSITIVES * cases, f"{title}: {mistakes} false positives in {cases} cases"
        assert [row for row in rows if row.ours > row.reference] == [], "worse than math-verify alone"


def test_the_graders_on_a_sample_of_every_form() -> None:
    tables = grade(most=3, timeout_s=110)
    check(tables)
    assert {row.form for row in tables["MATH"]} == EQUIVALENT.keys() | WRONG.keys(), "a form applies to no answer"
    assert {row.form for row in tables["GSM8K"]} == GSM8K_EQUIVALENT.keys() | GSM8K_WRONG.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_graders_on_all_forms_of_the_committed_answers() -> None:
    check(grade(most=0, timeout_s=590))


def test_a_form_says_something_new() -> None:
    """A right form may repeat the answer; a wrong one may not be a right one too."""
    for golds, right, wrong in (
        (read_lines(MATH_FILE), EQUIVALENT, WRONG),
        (read_lines(GSM8K_FILE), GSM8K_EQUIVALENT, GSM8K_WRONG),
    ):
        for gold in golds:
            accepted = {rewrite(gold) for rewrite in right.values()} - {None}
            rejected = {rewrite(gold) for rewrite in wrong.values()} - {None}
            assert not accepted & rejected, gold
