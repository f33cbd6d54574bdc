"""The verdict on a patch: the hidden tests of its task, run in a fresh container in which no agent was.

The patch is applied by `git apply`, or else by `patch`, which finds places that have moved. Then every test file that
the row names or that the patch touched is what it was at the base commit, the row's test patch is applied, and the
tests run in a shell of their own. Each step's status is that of the container's shell, not a line that was printed. So
are files that configure tests, unless the row's own solution changes them.

What remains: the tests run in one process with the code under test. Code that seeks out the framework's objects there
can forge their report. So can code that runs earlier, in the commands before the tests, by changing the framework; and
code under a command that is not made of calls of a framework, by printing or by ending with status 0. Nothing but
running the tests where that code does not run would prevent it.

Calls of test frameworks in a container, each by `run_tests.py`, with a report that is sealed with a key of its own.

A call's key is written when the commands before it have ended, and read before code under test is loaded.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from recipes.environments.swe.calls import FrameworkCall
from recipes.environments.swe.contract import (
    KEPT_CHARACTERS,
    CommandResult,
    Container,
    ContainerEnd,
    ContainerEndedError,
    ContainerFailedError,
    ContainerLimits,
    Evaluation,
    Evaluator,
    Runtime,
    Shell,
    SweTask,
)
from recipes.environments.swe.hidden_tests import (
    ENTER,
    EXIT_STATUS,
    PATCHED_FILE,
    LongReportError,
    command_of,
    deciding_calls,
    expected_tests,
    files_of_tests,
    framework_of,
    is_r2e,
    results,
    sealed_report,
    wrong_tests,
)

RUN_TESTS = Path(__file__).with_name("run_tests.py").read_bytes()
MAX_CHARACTERS = 2 * KEPT_CHARACTERS  # of what the tests print
MAX_SHOWN = 300  # characters of an output in a reason


class NotStartedError(Exception):
    """The program that runs the tests could not start: Python of the image lacks what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What the calls of one command reported."""

    tests: dict[str, bool] = field(default_factory=dict)  # test -> whether it passed, in every call that ran it
    is_good: bool = True  # whether the last list of the command ended well, and a test of each of its calls passed
    wrong: str = ""  # why not all calls reported
    said: str = ""  # the end of what the last call printed
    is_late: bool = False


async def run_calls(container: Container, calls: Sequence[FrameworkCall], seconds: float) -> Reported:
    """Make calls one after the other, in a shell of their own; `seconds` is the time of all together.

    Raises `ContainerEndedError`, `LongReportError`, `NotStartedError`, `OSError` where the container refuses a file.
    """
    shell = await container.open_shell()
    end = time.monotonic() + seconds
    found = Reported()
    for number, call in enumerate(calls):
        if call.needs_last and not found.is_good:
            continue
        before = f"{{\n{call.before or ':'}\n}} </dev/null 2>&1"
        done = await shell.run(
            f"{{ {ENTER}; }} && {before}" if number == 0 else before,
            seconds=max(end - time.monotonic(), 0.0),
            max_characters=MAX_CHARACTERS,
        )
        if done.status is None:
            return replace(found, is_late=True)
        if done.status != 0:
            wrong = f"the commands before the tests ended with status {done.status}: {shown(done.output)}"
            return replace(found, is_good=False, wrong=wrong)
        reported = await _run(container, shell, call, end)
        tests = {name: passed and found.tests.get(name, True) for name, passed in reported.tests.items()}
        is_good = reported.is_good and (found.is_good or not call.needs_last)
        wrong = found.wrong or reported.wrong
        found = replace(reported, tests={**found.tests, **tests}, is_good=is_good, wrong=wrong)
        if found.is_late:
            break
    return found


async def _run(container: Container, shell: Shell, call: FrameworkCall, end: float) -> Reported:
    place, key = f"/tmp/{secrets.token_hex(8)}", secrets.token_hex(32)
    await container.write_file(f"{place}/run_tests.py", RUN_TESTS)
    await container.write_file(f"{place}/key", key.encode())
    command = f"{call.program} {place}/run_tests.py {place}/key {call.framework} {call.words} </dev/null 2>&1"
    done = await shell.run(command, seconds=max(end - time.monotonic(), 0.0), max_characters=MAX_CHARACTERS)
    if done.status is None:
        return Reported(is_late=True)
    report = sealed_report(key, done.output)
    if report is None:
        await _require_started(container, f"{place}/key", done.output)
        wrong = f"the tests did not come to their end (status {done.status}): {shown(done.output)}"
        return Reported(is_good=False, wrong=wrong)
    said = f"status {done.status}: {shown(report.said)}"
    return Reported(tests=dict(report.tests), is_good=report.is_good, said=said)


async def _require_started(container: Container, key_file: str, output: str) -> None:
    """Raise `NotStartedError` where the key is still there: no code under test had been loaded yet."""
    try:
        await container.read_file(key_file, max_bytes=1)
    except FileNotFoundError:
        return
    raise NotStartedError(f"the program that runs the tests could not start in the image: {shown(output)}")


def shown(output: str) -> str:
    """Return the end of an output on one line."""
    return " ".join(output[-MAX_SHOWN:].split())


PREPARE = Path(__file__).with_name("prepare.sh").read_bytes()
R2E_NAMES = ("r2e_tests", "run_tests.sh")
R2E_PLACES = ("/", "/root")  # and the workspace
STEP_SECONDS = 300.0  # of any step but the tests: a large repository is packed anew
MAX_SCRIPT = 100_000  # bytes of R2E-Gym's script
MAX_NAMES = 16_000_000  # bytes of the names of changed files
MAX_NAMED = 3  # tests in a reason
GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false"
# What is written after this has a later time of change than the stamp.
NOTE_BEFORE = (
    f"{GIT} ls-files -d -z >{{place}}/gone_before; touch {{place}}/stamp; "
    "until touch {place}/later; [ {place}/later -nt {place}/stamp ]; do :; done"
)
# Git is not asked of a repository whose own files have changed: they can name programs that it runs.
NOTE_AFTER = (
    "find . \\( -type f -o -type l \\) -cnewer {place}/stamp -print0 >{place}/written && : >{place}/gone && "
    f"{{{{ grep -qzF /.git/ {{place}}/written || {GIT} ls-files -d -z >{{place}}/gone; }}}}"
)
APPLY = f"{GIT} apply --verbose --whitespace=nowarn"
TOUCHED = re.compile(r'^(?:diff --git "?a/(.+?)"? "?b/(.+?)"?|(?:---|\+\+\+) "?[ab]/(.+?)"?\t?)$', re.MULTILINE)
TEST_NAME = re.compile(r"test_.*\.py|.*_test\.py|(?:run)?tests\.py|conftest\.py")
CONFIGURATION = frozenset(
    (
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        "unittest.cfg",
        *("sitecustomize.py", "usercustomize.py"),
    )
)
LINK = re.compile(r"^(?:new file|new|deleted file) mode 120000$|^index \S+ 120000$", re.MULTILINE)
INSTALLED = frozenset((".venv", "site-packages", "dist-packages"))  # of what an image has installed, the framework too
TEST_DIRECTORIES = frozenset(("test", "tests", "testing", "r2e_tests"))


class PreparationError(Exception):
    """A container could not be made fit for its task: the image has no repository at the task's commit."""


async def prepare(container: Container, task: SweTask, *, hides_tests: bool = True) -> None:
    """Take out of a container what an agent must not see: its repository's future, remotes, and tests in the image.

    Raises `PreparationError`, and `ContainerEndedError` with a container that has ended.
    """
    hidden = hidden_paths(task) if hides_tests else []
    script = f"/tmp/{secrets.token_hex(8)}.sh"
    await _write(container, script, PREPARE)
    words = shlex.join([script, task.workspace, task.base_commit, *hidden])
    shell = await container.open_shell()
    done = await _step(shell, f"bash {words}; status=$?; rm -f {script}; (exit $status)")
    if done.status != 0:
        raise PreparationError(f"{task.id}: {_shown(done) or 'the history could not be removed'}")


def hidden_paths(task: SweTask) -> list[str]:
    """Return where an image may hold the hidden tests of a task."""
    if not is_r2e(task.facts):
        return []
    return [str(PurePosixPath(place) / name) for place in (task.workspace, *R2E_PLACES) for name in R2E_NAMES]


def touched_files(patch: str) -> list[str]:
    """Return the paths that a patch names, each once."""
    return list(dict.fromkeys(path for found in TOUCHED.findall(patch) for path in found if path))


def is_of_tests(path: str) -> bool:
    """Whether a path is one of tests. Data sets put what changes there into the test patch, never into the solution."""
    *directories, name = PurePosixPath(path).parts or ("",)
    return bool(TEST_NAME.fullmatch(name) or TEST_DIRECTORIES & set(directories))


def configures_tests(path: str) -> bool:
    """Whether a file may change how tests run, without being one."""
    return PurePosixPath(path).name in CONFIGURATION


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """How the tests of a task are run."""

    __test__ = False  # for pytest: not a class of tests

    runtime: Runtime
    limits: ContainerLimits
    seconds: float  # that the tests may take

    async def __call__(self, task: SweTask, patch: str) -> Evaluation:
        """Return what the hidden tests say of a patch. A container or image that fails gives no verdict."""
        if not patch.strip():
            return Evaluation(resolved=False, reason="the patch is empty")
        return await self._evaluate(task, patch)

    async def without_patch(self, task: SweTask) -> Evaluation:
        """Return what the hidden tests say of the repository as it is: an instance is sound only if they fail."""
        return await self._evaluate(task, "")

    async def _evaluate(self, task: SweTask, patch: str) -> Evaluation:
        try:
            container = await self.runtime.start(task.image, self.limits)
        except ContainerFailedError as error:
            return Evaluation(resolved=False, reason="", failed=str(error))
        try:
            found = await self._run(container, task, patch)
        except (PreparationError, LongReportError, NotStartedError, TimeoutError) as error:
            found = Evaluation(resolved=False, reason="", failed=str(error))
        except ContainerEndedError as error:
            found = _of_end(error)
        finally:
            await container.close()
        return replace(found, peak_memory_mib=container.peak_memory_mib)

    async def _run(self, container: Container, task: SweTask, patch: str) -> Evaluation:
        await prepare(container, task, hides_tests=False)
        shell = await container.open_shell()
        place = f"/tmp/{secrets.token_hex(8)}"
        await _prepare_tests(container, shell, task, place)
        try:
            wrong = await _apply(container, shell, task, patch, place)
        except PreparationError as error:
            if not patch.strip():
                raise
            wrong = str(error)  # the container was fit before: the patch has left no room
        if wrong:
            return Evaluation(resolved=False, reason=wrong)
        calls = deciding_calls(task.facts, await _r2e_script(container, task))
        if calls:
            try:
                reported = await run_calls(container, calls, self.seconds)
            except TimeoutError:
                raise
            except OSError as error:  # the patch, or the code that it changes, has left no room
                return Evaluation(resolved=False, reason=f"the tests could not be started: {error}")
            return self._late() if reported.is_late else verdict_of_calls(task, reported)
        tests = await container.open_shell()  # nothing that a patch made git do has a hand in it
        command = f"{{ {ENTER}; }} && {{ {command_of(task.facts)}; }} </dev/null 2>&1"
        done = await tests.run(command, seconds=self.seconds, max_characters=MAX_CHARACTERS)
        return self._late() if done.status is None else verdict_of(task, done)

    def _late(self) -> Evaluation:
        reason = f"the tests did not end within {self.seconds:g} s"
        return Evaluation(resolved=False, reason=reason, is_late=True)


async def evaluate_gold(evaluate: Evaluator, task: SweTask) -> Evaluation:
    """Return what the hidden tests say of the row's own solution; raises `ValueError` for a row without one."""
    if not task.gold_patch.strip():
        raise ValueError(f"{task.id}: the row holds no golden patch")
    return await evaluate(task, task.gold_patch)


def verdict_of_calls(task: SweTask, reported: Reported) -> Evaluation:
    """Return the verdict on what calls of a framework reported under their seals."""
    if reported.wrong or not reported.tests:
        return Evaluation(resolved=False, reason=reported.wrong or f"no test ran ({reported.said})")
    expected = expected_tests(task.facts)
    is_status = framework_of(task.facts).name == EXIT_STATUS
    return _verdict(expected, dict.fromkeys(expected, reported.is_good) if is_status else reported.tests)


def verdict_of(task: SweTask, done: CommandResult) -> Evaluation:
    """Return the verdict on what a command printed, and with which status it ended: both are believed."""
    framework = framework_of(task.facts)
    expected = expected_tests(task.facts)
    is_status = framework.name == EXIT_STATUS
    found = dict.fromkeys(expected, done.status == 0) if is_status else results(framework, done.output)
    if not found:
        reason = f"no test ran (status {done.status}): {shown(done.output)}"
        return Evaluation(resolved=False, reason=reason)
    return _verdict(expected, found)


def _verdict(expected: Mapping[str, bool], found: Mapping[str, bool]) -> Evaluation:
    wrong = wrong_tests(expected, found)
    if not wrong:
        return Evaluation(resolved=True, reason=f"all {len(expected)} tests did what they do in a solved instance")
    names = ", ".join(wrong[:MAX_NAMED]) + (", ..." if len(wrong) > MAX_NAMED else "")
    return Evaluation(resolved=False, reason=f"{len(wrong)} of {len(expected)} tests failed or did not run: {names}")


async def _r2e_script(container: Container, task: SweTask) -> str:
    """Return the script by which an image of R2E-Gym runs its tests; empty for other tasks, and where there is none."""
    for place in (task.workspace, "") if is_r2e(task.facts) else ():
        try:
            return (await container.read_file(f"{place}/run_tests.sh", max_bytes=MAX_SCRIPT)).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return ""


async def _prepare_tests(container: Container, shell: Shell, task: SweTask, place: str) -> None:
    """Put the test patch into a directory, and hidden tests of the image where no patch can write them.

    Raises `PreparationError` where the test patch does not fit the image: then no patch could be judged.
    """
    await _write(container, f"{place}/tests.patch", _encoded(task.test_patch))
    lines = [f"cd {shlex.quote(task.workspace)}", f"mkdir -p {place}/hidden"]
    if is_r2e(task.facts):
        lines += [f"{{ [ ! -e {name} ] || mv -- {name} {place}/hidden/; }}" for name in R2E_NAMES]
    if task.test_patch.strip():
        lines.append(f"{APPLY} --check {place}/tests.patch")
    done = await _step(shell, " && ".join(lines))
    if done.status != 0:
        raise PreparationError(f"{task.id}: the test patch does not fit the image: {_shown(done)}")


async def _apply(container: Container, shell: Shell, task: SweTask, patch: str, place: str) -> str:
    """Apply a patch, then the row's tests over it; return why that cannot be done, empty where it was."""
    changed: list[str] = []
    if patch.strip():
        if wrong := _refusal(touched_files(patch)) or await _apply_solution(container, shell, patch, place):
            return wrong
        changed = await _changed(container, shell, place)
        if wrong := _refusal(changed):
            return wrong
    ours = [*PATCHED_FILE.findall(task.test_patch), *files_of_tests(task.facts)]
    kept = set(touched_files(task.gold_patch))
    settings = [path for path in changed if configures_tests(path) and path not in kept]
    restored = dict.fromkeys([*ours, *settings, *(path for path in changed if is_of_tests(path))])
    names = "".join(f"{path}\0" for path in restored).encode(errors="surrogateescape")
    await _write(container, f"{place}/restored", names)
    lines = [f"xargs -0 -r rm -rf -- <{place}/restored"]
    tree, checkout = "ls-tree -r -z --name-only", "--literal-pathspecs checkout --quiet"
    lines.append(f"xargs -0 -r {GIT} {tree} {task.base_commit} -- <{place}/restored >{place}/base")
    lines.append(f"xargs -0 -r {GIT} {checkout} {task.base_commit} -- <{place}/base")
    if is_r2e(task.facts):
        lines += [f"rm -rf -- {' '.join(R2E_NAMES)}", f"cp -a -- {place}/hidden/. ."]
    if task.test_patch.strip():
        lines.append(f"{APPLY} {place}/tests.patch")
    done = await _step(shell, " && ".join([*lines, f"rm -rf -- {place}"]))
    return "" if done.status == 0 else f"the hidden tests cannot be put in place over the patch: {_shown(done)}"


def _refusal(paths: Sequence[str]) -> str:
    """Return why a patch that changes these files is refused, empty where it is not."""
    parts = {part for path in paths for part in PurePosixPath(path).parts}
    if ".git" in parts:
        return "the patch changes git's own files"
    return "the patch changes installed packages" if parts & INSTALLED else ""


async def _apply_solution(container: Container, shell: Shell, patch: str, place: str) -> str:
    await _write(container, f"{place}/solution.patch", _encoded(patch))
    moved = f"patch --batch --unified --fuzz=5 -p1 --input={place}/solution.patch"
    apply = f"{APPLY} {place}/solution.patch"
    if not LINK.search(patch):  # git alone refuses to write behind a link
        apply += f" || {{ {moved} --dry-run && {moved}; }}"
    done = await _step(shell, f"{NOTE_BEFORE.format(place=place)}; {apply}")
    if done.status == 0:
        return ""
    what = "the patch changes a binary file without its content" if "binary patch" in done.output else ""
    return f"{what or 'the patch does not apply'}: {_shown(done)}"


async def _changed(container: Container, shell: Shell, place: str) -> list[str]:
    """Return the files that were written or removed since `NOTE_BEFORE`.

    They are asked of the file system: a patch can name them in ways that only the program that applies it understands.
    """
    done = await _step(shell, NOTE_AFTER.format(place=place))
    if done.status != 0:
        raise PreparationError(f"what a patch has changed could not be found: {_shown(done)}")
    written, gone, gone_before = [
        (await container.read_file(f"{place}/{name}", max_bytes=MAX_NAMES)).decode(errors="surrogateescape").split("\0")
        for name in ("written", "gone", "gone_before")
    ]
    removed = set(gone) - set(gone_before)
    return [path for path in dict.fromkeys([*(name.removeprefix("./") for name in written), *sorted(removed)]) if path]


def _of_end(error: ContainerEndedError) -> Evaluation:
    if error.end is ContainerEnd.MEMORY:
        return Evaluation(resolved=False, reason="the tests used more than their memory", out_of_memory=True)
    if error.end is ContainerEnd.DISK:
        return Evaluation(resolved=False, reason="the tests used more than their disk space")
    return Evaluation(resolved=False, reason="", failed=str(error))


async def _step(shell: Shell, command: str) -> CommandResult:
    return await shell.run(f"{{ {command}; }} </dev/null 2>&1", seconds=STEP_SECONDS, max_characters=MAX_CHARACTERS)


async def _write(container: Container, path: str, content: bytes) -> None:
    try:
        await container.write_file(path, content)
    except TimeoutError:  # the machine is slow
        raise
    except OSError as error:
        raise PreparationError(f"{path} could not be written into the container: {error}") from error


def _encoded(text: str) -> bytes:
    return (text if text.endswith("\n") else f"{text}\n").encode(errors="replace")


def _shown(done: CommandResult) -> str:
    if done.status is None:
        return f"it did not end within {STEP_SECONDS:g} s"
    return shown(done.output)
