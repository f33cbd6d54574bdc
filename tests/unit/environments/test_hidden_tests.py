"""What a task's tests are called, how they are run, and when a task counts as solved."""

from __future__ import annotations

import json
import subprocess

import pytest

from recipes.environments.swe.hidden_tests import (
    CONDA,
    ENTER,
    FRAMEWORKS,
    command_of,
    expected_tests,
    framework_of,
    results,
    wrong_tests,
)

PYTEST = """
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::TestB::test_two[x y]
\x1b[31mFAILED\x1b[0m tests/test_a.py::test_three - assert 1 == 2
ERROR tests/test_b.py::test_four - NameError
XFAIL tests/test_a.py::test_five
SKIPPED [1] tests/test_a.py:9: no network
"""
DJANGO = """
test_one (model.tests.FirstTests) ... ok
test_two (model.tests.FirstTests)
Says something. ... FAIL
test_three (model.tests.FirstTests) ... ERROR
"""
SYMPY = """
sympy/core/tests/test_basic.py[3]
test_one ok
test_two F
test_three E                                                    [FAIL]
"""


def swe_facts(dataset: str = "SWE-bench_Verified", instance: str = "a__b-1", **facts: object) -> dict[str, object]:
    return {"instance_id": instance, "dataset_name": dataset, **facts}


@pytest.mark.parametrize(
    ("runner", "output", "passed", "not_passed"),
    [
        (
            "pytest",
            PYTEST,
            ["tests/test_a.py::test_one", "tests/test_a.py::TestB::test_two[x", "TestB.test_two[x y]", "test_five"],
            ["tests/test_a.py::test_three", "tests/test_b.py::test_four"],
        ),
        (
            "django",
            DJANGO,
            ["test_one (model.tests.FirstTests)"],
            ["Says something.", "test_three (model.tests.FirstTests)"],
        ),
        ("sympy", SYMPY, ["test_one"], ["test_two", "test_three"]),
    ],
)
def test_output_is_read(runner, output, passed, not_passed):
    found = results(FRAMEWORKS[runner], output)
    assert all(found[name] for name in passed)
    assert not any(found[name] for name in not_passed)


def test_what_code_under_test_prints_takes_no_failure_back():
    forged = "PASSED tests/test_a.py::test_three\n" + PYTEST
    assert not results(FRAMEWORKS["pytest"], forged)["tests/test_a.py::test_three"]
    after = PYTEST + "===== 1 failed, 2 passed in 0.1s =====\nPASSED tests/test_a.py::test_three\n"
    assert not results(FRAMEWORKS["pytest"], after)["tests/test_a.py::test_three"]
    assert results(FRAMEWORKS["pytest"], "PASSED tests/test_a.py::test_three\n") == {}  # it did not come to a summary
    twice = "test_one (a.T.test_one) ... FAIL\ntest_one (a.T.test_one) ... ok\n"
    assert results(FRAMEWORKS["unittest"], twice) == {"test_one (a.T.test_one)": False}
    assert results(FRAMEWORKS["unittest"], "test_one (a.T) ... skipped 'why'\n") == {"test_one (a.T)": False}


@pytest.mark.parametrize("runner", ["django", "unittest", "sympy"])
def test_a_test_passes_only_where_its_status_says_so(runner):
    """Other words end in "ok", a test has two lines, a failure prints "ok", a status is not there or unknown."""
    test = "test_a" if runner == "sympy" else "test_a (m.A)"
    begin = f"{test} " if runner == "sympy" else f"{test} ... "
    fails = ("F", "E", "f", "X", "s", "x") if runner == "sympy" else ("FAIL", "ERROR", "skipped 'ok'", "", "no")
    bad = [
        *fails,
        "expected failure",
        "not ok",
        "unok",
        "book",
        "ok?",
        "okay",
        "ok F" if runner == "sympy" else "ok FAIL",
    ]
    for word in [*bad, "unexpected success"]:
        if word == "not ok" and runner == "sympy":
            continue  # what a test printed stands before its status
        for log in (f"{begin}{word}\n", f"{begin}{word}\n{begin}ok\n", f"{begin}ok\n{begin}{word}\n"):
            assert not results(FRAMEWORKS[runner], log).get(test), log
    assert results(FRAMEWORKS[runner], f"{begin}ok\n") == {test: True}
    if runner != "sympy":
        assert results(FRAMEWORKS[runner], f"{begin}printed\nok\n")[test]
        for end in ("FAIL", "ERROR"):
            assert not results(FRAMEWORKS[runner], f"{begin}\nok\n{end}\n")[test]
            assert not results(FRAMEWORKS[runner], f"{begin}\nok\n{end}: {test} (x=1)\n")[test]


def test_an_instance_may_name_its_own_tests():
    facts = swe_facts(test_cmd="make test", log_parser="exit_status", FAIL_TO_PASS=["x"])
    assert (command_of(facts), expected_tests(facts)) == ("make test", {"make test": True})
    facts = swe_facts(test_cmd="python -m unittest -v", log_parser="unittest", FAIL_TO_PASS=["x"])
    assert (command_of(facts), expected_tests(facts)) == ("python -m unittest -v", {"x": True})
    facts = swe_facts(log_parser="unittest", test_patch="+++ b/tests/test_x.py\n", FAIL_TO_PASS=["x"])
    assert command_of(facts) == "python -m unittest -v -b tests/test_x.py"


def test_a_test_that_did_not_run_has_failed():
    assert wrong_tests({"a": True}, {}) == ["a"]
    assert not wrong_tests({"a": True, "b": False}, {"a": True})  # R2E-Gym names tests that fail when solved, too
    assert wrong_tests({"a": True, "b": False}, {"a": False, "b": True}) == ["a", "b"]


def test_expected_tests_come_from_the_row():
    both = swe_facts(FAIL_TO_PASS='["x"]', PASS_TO_PASS=["y"])
    assert expected_tests(both) == {"x": True, "y": True}
    r2e = swe_facts("R2E-Gym", "a__b-1", expected_output_json=json.dumps({"T.x": "PASSED", "T.y": "FAILED"}))
    assert expected_tests(r2e) == {"T.x": True, "T.y": False}
    with pytest.raises(ValueError, match="no tests"):
        expected_tests(swe_facts())


@pytest.mark.parametrize(
    ("dataset", "instance", "facts", "framework"),
    [
        ("SWE-bench_Verified", "django__django-11099", {"repo": "django/django"}, "django"),
        ("SWE-bench_Verified", "sympy__sympy-1", {}, "sympy"),
        ("SWE-Gym/SWE-Gym", "pandas-dev__pandas-1", {"repo": "pandas-dev/pandas"}, "pytest"),
        ("R2E-Gym/R2E-Gym-Subset", "sympy__sympy-0a1b", {}, "r2egym"),
    ],
)
def test_each_project_has_its_framework(dataset, instance, facts, framework):
    assert framework_of(swe_facts(dataset, instance, **facts)).name == framework


def test_commands_name_the_files_of_the_test_patch():
    patch = "--- a/tests/model/tests.py\n+++ b/tests/model/tests.py\n+++ b/tests/model/data.json\n"
    facts = {"test_patch": patch, "FAIL_TO_PASS": '["test_one (model.tests.FirstTests)"]'}
    assert command_of(swe_facts(instance="django__django-1", **facts)).endswith("--parallel 1 model.tests")
    other = swe_facts(test_patch=patch, FAIL_TO_PASS='["tests/b c.py::test_one"]')
    assert command_of(other).endswith("no:cacheprovider 'tests/b c.py' tests/model/tests.py")
    r2e = command_of(swe_facts("R2E-Gym", "a__b-1", expected_output_json='{"T.x": "PASSED"}'))
    assert r2e.startswith("{ [ -e r2e_tests ]") and r2e.endswith("bash $script")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_environment_is_named_in_every_shell(tmp_path, shell):
    (tmp_path / "activate").write_text('echo "activated $@"\n', encoding="utf-8")
    script = ENTER.replace(CONDA, str(tmp_path / "activate")).replace("/testbed", str(tmp_path))
    said = subprocess.run([shell, "-c", f"{{ {script}; }} && pwd"], capture_output=True, text=True, check=True)
    assert said.stdout == f"activated testbed\n{tmp_path}\n"
