"""Run the tests of a task inside its image, and print what each came to, sealed with a key that only the worker knows.

    python run_tests.py KEY_FILE pytest|unittest|django|sympy WORDS...

The code under test runs in this process and prints, too. So the results are taken from the framework, and the key is
read and its file removed before that code is loaded; a process that ends early prints no report. The key itself is
never printed: whoever reads this program's output cannot seal another report. Python of the image: 3.6 and later.
"""

# mypy: ignore-errors
import base64
import hmac
import json
import os
import sys
import zlib

MAX_RESULTS = 8000000  # characters of what the tests came to
MAX_REPORT = 500000  # characters of a report; a shell keeps no more of the end of what is printed


def with_pytest(words):
    """Return the status of pytest, and pairs of what it calls an outcome and the test's id."""
    import pytest  # of the image; before the workspace is on the path

    found = []

    class PytestOutcomes:
        config = None

        def pytest_configure(self, config):
            self.config = config

        def add(self, outcome, report):
            found.append((outcome, self.config.cwd_relative_nodeid(report.nodeid)))

        def pytest_collectreport(self, report):
            if report.failed:
                self.add("ERROR", report)

        def pytest_runtest_logreport(self, report):
            if hasattr(report, "wasxfail"):
                if report.when == "call" or report.skipped:
                    self.add("XFAIL" if report.skipped else "XPASS", report)
            elif report.failed:
                self.add("FAILED" if report.when == "call" else "ERROR", report)
            elif report.skipped:
                self.add("SKIPPED", report)
            elif report.when == "call":
                self.add("PASSED", report)

    enter_workspace()
    status = pytest.main(words, plugins=[PytestOutcomes()])
    return int(status), found


def unittest_outcomes(found):
    """Return a class of unittest's results that adds pairs of an outcome and what it prints of the test."""
    import unittest

    class UnittestOutcomes(unittest.TextTestResult):
        def startTest(self, test):  # noqa: N802
            super().startTest(test)
            self.outcome = "PASSED"

        def stopTest(self, test):  # noqa: N802
            super().stopTest(test)
            found.extend((self.outcome, line) for line in self.getDescription(test).split("\n"))

        def addSubTest(self, test, subtest, err):  # noqa: N802
            super().addSubTest(test, subtest, err)
            if err is not None:
                self.outcome = "FAILED"

    def noting(name, outcome):
        def add(self, *details):
            getattr(super(UnittestOutcomes, self), name)(*details)
            self.outcome = outcome
            if not isinstance(details[0], unittest.TestCase):  # a fixture of a class or a module
                found.append((outcome, str(details[0])))

        setattr(UnittestOutcomes, name, add)

    for name, outcome in (
        ("addError", "ERROR"),
        ("addFailure", "FAILED"),
        ("addSkip", "SKIPPED"),
        ("addExpectedFailure", "XFAIL"),
        ("addUnexpectedSuccess", "XPASS"),
    ):
        noting(name, outcome)
    return UnittestOutcomes


def with_unittest(words):
    """Return the status of unittest, and pairs of an outcome and what it prints of the test."""
    import unittest

    found = []
    enter_workspace()
    runner = unittest.TextTestRunner(verbosity=2, buffer=True, resultclass=unittest_outcomes(found))
    program = unittest.main(module=None, argv=["unittest", *words], testRunner=runner, exit=False)
    return int(not program.result.wasSuccessful()), found


def with_django(words):
    """Return the status of Django's own program of tests, and pairs as of unittest, by which it runs them."""
    import unittest

    found = []
    unittest.TextTestRunner.resultclass = unittest_outcomes(found)  # where a runner names no class of its own
    return run_script(words), found


def with_sympy(words):
    """Return the status of SymPy's own program of tests, and pairs of an outcome and a test's name."""
    import importlib

    found = {}  # of two tests of one name the later counts, as in what the program prints
    os.environ.setdefault("PYTHONHASHSEED", "0")  # else its tests run in a process of their own
    enter_workspace()
    try:
        runtests = importlib.import_module("sympy.testing.runtests")
    except ImportError:  # before 1.6
        runtests = importlib.import_module("sympy.utilities.runtests")

    class SympyOutcomes(runtests.PyTestReporter):
        test = None

        def entering_test(self, function):
            self.test = function.__name__
            super().entering_test(function)

    def noting(name, outcome):
        def add(self, *details):
            if self.test is not None:  # else a file could not be loaded
                found[self.test], self.test = outcome, None
            getattr(super(SympyOutcomes, self), name)(*details)

        setattr(SympyOutcomes, name, add)

    for name, outcome in (
        ("test_pass", "PASSED"),
        ("test_fail", "FAILED"),
        ("test_exception", "ERROR"),
        ("test_skip", "SKIPPED"),
        ("test_xfail", "SKIPPED"),  # no data set counts it as passed
        ("test_xpass", "XPASS"),
    ):
        noting(name, outcome)
    runtests.PyTestReporter = SympyOutcomes
    status = run_script(words)
    return status, [(outcome, name) for name, outcome in found.items()]


def run_script(words):
    """Run a program of the workspace as `python WORDS` does; return its status."""
    import runpy

    script = os.path.abspath(words[0])  # noqa: PTH100
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120
    sys.argv[:] = words
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code if isinstance(end.code, int) else end.code is not None)
    return 0


def enter_workspace():
    """Find modules in the directory of the tests, as `python -m` does, where this file's own was."""
    sys.path[0] = os.getcwd()  # noqa: PTH109


def report_of(status, found):
    """Return what the tests came to as text without spaces; their names are much alike, so it is short."""
    results = json.dumps({"status": status, "tests": found}).encode("ascii")
    report = packed(results)
    if len(results) > MAX_RESULTS or len(report) > MAX_REPORT:
        return packed(json.dumps({"too_long": len(results)}).encode("ascii"))
    return report


def packed(text):
    return base64.b64encode(zlib.compress(text, 9))


def main():
    """Run the tests, print the results."""
    path, framework, words = sys.argv[1], sys.argv[2], sys.argv[3:]
    with open(path, "rb") as file:  # noqa: PTH123  # as old as the image's Python
        seal = hmac.new(file.read(), digestmod="sha256")
    os.remove(path)  # noqa: PTH107
    del sys.argv[1:]
    run = {"pytest": with_pytest, "unittest": with_unittest, "django": with_django, "sympy": with_sympy}[framework]
    status, found = run(words)
    sys.stdout.flush()
    sys.stderr.flush()
    report = report_of(status, found)
    seal.update(report)
    line = b"\nreport " + seal.hexdigest().encode("ascii") + b" " + report + b"\n"
    while line:
        line = line[os.write(1, line) :]
    os._exit(status)  # nothing that the code under test left behind prints after it


if __name__ == "__main__":
    main()
