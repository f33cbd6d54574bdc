"""What a task's tests are called, how they are run, and when a task counts as solved."""

from __future__ import annotations

import json
import subprocess

import pytest

from tools.sif.instances import Instance, instance_from
from tools.sif.swe_tests import (
    CONDA,
    ENTER,
    FRAMEWORKS,
    command_of,
    expected_tests,
    framework_of,
    is_solved,
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


def swe_instance(dataset: str = "SWE-bench_Verified", instance: str = "a__b-1", **facts: object) -> Instance:
    return instance_from({"instance_id": instance, "dataset_name": dataset, **facts})


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


def test_a_test_that_did_not_run_has_failed():
    assert not is_solved({"a": True}, {})
    assert is_solved({"a": True, "b": False}, {"a": True})  # R2E-Gym names tests that fail in a solved instance too
    assert wrong_tests({"a": True, "b": False}, {"a": False, "b": True}) == ["a", "b"]


def test_expected_tests_come_from_the_row():
    both = swe_instance(FAIL_TO_PASS='["x"]', PASS_TO_PASS=["y"])
    assert expected_tests(both) == {"x": True, "y": True}
    r2e = swe_instance("R2E-Gym", "a__b-1", expected_output_json=json.dumps({"T.x": "PASSED", "T.y": "FAILED"}))
    assert expected_tests(r2e) == {"T.x": True, "T.y": False}
    with pytest.raises(ValueError, match="no tests"):
        expected_tests(swe_instance())


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
    assert framework_of(swe_instance(dataset, instance, **facts)).name == framework


def test_commands_name_the_files_of_the_test_patch():
    patch = "--- a/tests/model/tests.py\n+++ b/tests/model/tests.py\n+++ b/tests/model/data.json\n"
    facts = {"test_patch": patch, "FAIL_TO_PASS": '["test_one (model.tests.FirstTests)"]'}
    assert command_of(swe_instance(instance="django__django-1", **facts)).endswith("--parallel 1 model.tests")
    other = swe_instance(test_patch=patch, FAIL_TO_PASS='["tests/b c.py::test_one"]')
    assert command_of(other).endswith("no:cacheprovider 'tests/b c.py' tests/model/tests.py")
    r2e = command_of(swe_instance("R2E-Gym", "a__b-1", expected_output_json='{"T.x": "PASSED"}'))
    assert r2e.startswith("{ [ -e r2e_tests ]") and r2e.endswith("bash $script")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_environment_is_named_in_every_shell(tmp_path, shell):
    (tmp_path / "activate").write_text('echo "activated $@"\n')
    script = ENTER.replace(CONDA, str(tmp_path / "activate")).replace("/testbed", str(tmp_path))
    said = subprocess.run([shell, "-c", f"{{ {script}; }} && pwd"], capture_output=True, text=True, check=True)
    assert said.stdout == f"activated testbed\n{tmp_path}\n"
