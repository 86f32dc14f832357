"""docs/promises.md names tests: all of them exist.  (The files, links and targets of all pages: test_docs.py.)"""

from pathlib import Path

import promises

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_its_tests_and_they_exist():
    """By name: a test that is deleted or renamed is missed here."""
    rows = promises.rows()
    assert len(rows) > 35
    assert [promise for promise, named in rows if not any(test for _, test in named)] == []
    named = [pair for _, pairs in rows for pair in pairs]
    missing = [pair for pair in named if not (promises.functions_of(pair[0]) >= ({pair[1]} - {""}))]
    assert missing == [] and [file for file, _ in named if not promises.functions_of(file)] == []


def test_a_test_that_does_not_exist_would_be_missed():
    assert "test_threads" in promises.functions_of("test_determinism.py")
    assert "test_thread" not in promises.functions_of("test_determinism.py")
    assert promises.functions_of("test_nothing.py") == set() and "hidden_keys" in promises.functions_of("test_guards.c")


def test_the_smoke_test_has_a_test_of_most_promises():
    assert len(set(promises.smoke())) > 30
