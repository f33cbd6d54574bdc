"""Issues of repositories, answered in one turn. Reward 1.0 for a full solution, 0.2 for part of one, else 0.0.

In mode `eval` an answer edits files with SEARCH/REPLACE blocks. Its patch is applied in the
task's image after the hidden tests are in place, and the tests run: full when all of FAIL_TO_PASS and PASS_TO_PASS
pass, part when some of the first and all of the second do. In mode `repro-gen` it writes a script that reproduces the
issue: it must end with status 2 before the right patch, and with 0 after it.

An answer without a usable patch or script earns 0 and starts nothing; so does one whose tests or script use up their
time: they ran, or waited by themselves. The image runs under Apptainer. A machine without it, without the image, or
too busy to give a run its time, gives no verdict; nor does a run that did not get to the tests, or that ended before
its own end. The setting `sandbox_network` gives the containers this machine's network, which some data sets' scripts
need to install packages; without it they have none.

Decided otherwise than in the reference:

* A patch counts as applied by the status of `git apply`, and of a report by pytest only the summary is read: code
  under test can print, and a line that it prints is no result. What is reported before that code begins is believed
  once, and that the tests came to their end only by the status of the container. Code that forges the report of the
  tests is not kept out; that would need the tests to run where the patched code does not.
* The script runs in two containers. In both the right patch is applied; in one it is taken back. The shell that did so
  has ended, the history is gone, and the repository is a copy made in the order of its names, all files equally old:
  what the script could tell the containers apart by is the code.

Patches out of answers: SEARCH/REPLACE blocks applied to files and written as a git diff, and new test scripts.

A block is a fence, a line `### path`, and two texts between `<<<<<<< SEARCH`, `=======` and `>>>>>>> REPLACE`.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from recipes.environments.contract import (
    Agent,
    Execution,
    Response,
    Row,
    Scoring,
    Unit,
    Verdict,
    Verifier,
    message_texts,
    one_of,
    optional_object,
    require_str,
    wrong,
)
from recipes.environments.verifiers.checks.reports import FULL, NO, PARTIAL, resolution, statuses_in
from recipes.exact_json import loads

FENCE, THINK_START, THINK_END = "```", "<think>", "</think>"
SOLUTION, SOLUTION_END = "<solution>", "</solution>"
HEAD = re.compile(r"\n### ([^\n]*)\n\s*<<<<<<< SEARCH\n")
DIVIDER = "\n=======\n"
TAIL = re.compile(r"\n>>>>>>> REPLACE\n*```")
SCRIPT = "```python\n"
CONTEXT_LINES = 3


class PatchError(ValueError):
    """An answer that no patch can be made of; the message says why."""


def patch_in(answer: str, files: Mapping[str, str], *, drops_first_part: bool, is_relaxed: bool) -> str:
    """Return the diff that an answer's blocks make of some files, by path; raises `PatchError` for none.

    Only what `<solution>` encloses is read, after the last `</think>`; relaxed, all of it where there is no solution.
    The first part of each path is left out of the diff where it names the repository.
    """
    has_solution = SOLUTION in answer and SOLUTION_END in answer
    if not has_solution and not is_relaxed:
        raise PatchError("no <solution> that ends with </solution>")
    if THINK_START in answer and THINK_END in answer:
        answer = answer.rpartition(THINK_END)[2].strip()
    if has_solution and (SOLUTION in answer or not is_relaxed):
        if SOLUTION not in answer:
            raise PatchError("no <solution> after the last </think>")
        answer = answer.split(SOLUTION, 2)[1].split(SOLUTION_END, 1)[0].strip()
    diffs = []
    for path, edits in edits_in(answer).items():
        before = files.get(path, "")
        diffs.append(diff_of(before, edited(before, edits), path.split("/", 1)[-1] if drops_first_part else path))
    patch = "\n".join(diff for diff in diffs if diff)
    if not patch:
        raise PatchError("no block that changes a file")
    return patch


def edits_in(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of a text by path, as (search, replace); equal ones count once."""
    edits: dict[str, list[tuple[str, str]]] = {}
    for path, search, replace in _blocks(text):
        of_path = edits.setdefault(path, [])
        if (search, replace) not in of_path:
            of_path.append((search, replace))
    return edits


def _blocks(text: str) -> Iterator[tuple[str, str, str]]:
    place = 0
    while head := HEAD.search(text, place):
        place = head.end()
        line_start = text.rfind("\n", 0, head.start()) + 1
        if FENCE not in text[line_start : head.start()]:
            continue
        divider = text.find(DIVIDER, head.end())
        tail = TAIL.search(text, divider + len(DIVIDER)) if divider >= 0 else None
        if tail is None:
            return
        yield head.group(1), text[head.end() : divider], text[divider + len(DIVIDER) : tail.start()]
        place = tail.end()


def edited(content: str, edits: list[tuple[str, str]]) -> str:
    """Return a file after its edits, the last place first; raises `PatchError` for a search that finds nothing.

    A search matches from the start of a line. An empty one matches at the start of the file.
    """
    text, found = f"\n{content}", []
    for search, replace in edits:
        if search == replace:
            raise PatchError("a search block equals its replacement")
        place = text.find(f"\n{search}")
        if place < 0:
            raise PatchError(f"a search block is not in the file: {search[:80]!r}")
        found.append((place, search, replace))
    for place, search, replace in sorted(found, key=lambda edit: edit[0], reverse=True):
        text = f"{text[:place]}\n{replace}{text[place + 1 + len(search) :]}"
    return text[1:]


def diff_of(before: str, after: str, path: str) -> str:
    """Return a git diff of one file, empty when nothing changed.

    A last line without an end is written as one that has it: data sets cut that end off the files that they show.
    """
    lines = difflib.unified_diff(_lines(before), _lines(after), "old", "new", lineterm="", n=CONTEXT_LINES)
    body = "\n".join(lines)
    return f"diff --git a/{path} b/{path}\n{body}\n" if body else ""


def _lines(text: str) -> list[str]:
    """Return the lines of a text. Only "\\n" ends one, as in git: no form feed or line separator does."""
    return text.removesuffix("\n").split("\n") if text else []


def script_in(answer: str) -> tuple[str, str]:
    """Return name and text of the last Python block, named by how many there are; raises `PatchError` for none."""
    blocks, place = [], 0
    while (start := answer.find(SCRIPT, place)) >= 0:
        start += len(SCRIPT)
        end = answer.find("\n```", start)
        if end < 0:
            break
        blocks.append(answer[start:end])
        place = end + len("\n```")
    if not blocks:
        raise PatchError("no block of Python")
    return f"reproduce_bug_{len(blocks)}.py", blocks[-1]


EVAL, REPRODUCE = "eval", "repro-gen"
REWARDS = {FULL: 1.0, PARTIAL: 0.2, NO: 0.0}
MAX_CHARACTERS = 8_000_000  # of what a run prints
REPRODUCED, SOLVED = 2, 0  # statuses of a script before and after the right patch
COMPLETED, TIMEOUT = "completed", "timeout"  # ends of a container: with status 0, and by its time
# Makes the repository anew: no inode, time or place in a directory says which files a patch has written.
COPY = (
    "mkdir /tmp/copy && (set -o pipefail; tar --sort=name --mtime=@0 -cf - . | tar -C /tmp/copy -xpf -)"
    " && find . -mindepth 1 -delete && (shopt -s dotglob; mv -- /tmp/copy/* .) && rmdir /tmp/copy && touch -d @0 ."
)
ACTIVATE = "source /opt/miniconda3/bin/activate && conda activate testbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A patch or a reproducing test for a repository, run in its image."""

    env: Literal["singularity"] = "singularity"
    """what runs the tests"""
    num_processes: Annotated[int, Ge(1), Unit("processes")] = 1024
    """test runs at once"""
    sandbox_timeout: Annotated[float, Gt(0), Unit("seconds")] = 600.0
    """limit of one test run"""
    sandbox_network: bool = False
    """give the containers of tasks this machine's network, its loopback too; else they have none"""
    relaxed_formatting: bool = False
    """accept edits with small errors of form"""
    debug: bool = False
    """log every test run; the native engine does not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; the scripts are the data set's own."""

    mode: str
    image: str
    repository: str
    files: tuple[tuple[str, str], ...]  # path and content of those that the model was shown
    drops_first_part: bool  # of paths, which names the repository
    is_relaxed: bool
    before: str  # script that prepares the repository: with the hidden tests in mode eval, without them otherwise
    tests: str  # script that runs the tests
    gold: str  # the right patch
    to_pass: tuple[str, ...]
    to_keep: tuple[str, ...]
    seconds: float
    network: bool


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `mode`, `instance` and `metadata`."""
    mode = one_of("mode", row.get("mode"), (EVAL, REPRODUCE))
    instance, metadata = optional_object(row, "instance"), optional_object(row, "metadata")
    return Task(
        mode=mode,
        image=require_str(metadata, "image"),
        repository=require_str(instance, "repo"),
        files=_files(require_str(metadata, "relevant_file_contents")),
        drops_first_part=bool(metadata.get("remove_repo_name")),
        is_relaxed=settings.relaxed_formatting,
        before=require_str(instance, "setup_script" if mode == EVAL else "regression_script"),
        tests=require_str(instance, "test_script") if mode == EVAL else "",
        gold=require_str(instance, "patch") if mode == REPRODUCE else "",
        to_pass=_names(instance, "FAIL_TO_PASS") if mode == EVAL else (),
        to_keep=_names(instance, "PASS_TO_PASS") if mode == EVAL else (),
        seconds=settings.sandbox_timeout,
        network=settings.sandbox_network,
    )


def score(response: Response, task: Task) -> Verdict | Scoring:
    """Apply the answer's patch and run the tests, or run the script it wrote."""
    answer = "\n".join(message_texts(response)).strip()
    try:
        if task.mode == EVAL:
            files = dict(task.files)
            patch = patch_in(answer, files, drops_first_part=task.drops_first_part, is_relaxed=task.is_relaxed)
            return _score_patch(patch, task)
        return _score_script(*script_in(answer), task)
    except PatchError as error:
        return Verdict(reward=0.0, reason=str(error))


def _score_patch(patch: str, task: Task) -> Scoring:
    mark = _mark(task)
    lines = [_run(task.before), _say(mark, "ready"), "cd /testbed && " + _given(patch, "git apply -v -")]
    lines += [_say(mark, "applied"), "exit $status"]
    (reply,) = yield [_execution(lines, [_run(task.tests), "exit 0"], task)]
    parts, log = _parts(reply, mark)
    if "ready" not in parts:
        raise _failed("the repository could not be prepared", reply)
    details = {"model_patch": patch}
    status = reply.get("process_status")
    if parts.get("applied", 0) != 0:
        return Verdict(reward=0.0, reason="the patch does not apply", details=details)
    if "applied" in parts and _used_up(reply, task):
        return Verdict(reward=0.0, reason="the tests did not end within their time", details=details)
    if status == TIMEOUT:
        raise _failed("a busy machine: the tests did not get their time", reply)
    if "applied" not in parts or status != COMPLETED:
        raise _failed("the container ended before the tests did", reply)
    result = resolution(statuses_in(log, task.repository, has_summary="-rA" in task.tests), task.to_pass, task.to_keep)
    return Verdict(reward=REWARDS[result], reason=result, details=details)


def _score_script(name: str, script: str, task: Task) -> Scoring:
    mark = _mark(task)
    code = [ACTIVATE, "cd /testbed", _given(script, f"cat > {name}"), f"python {name} > /dev/null 2>&1"]
    code += [_say(mark, "ended"), "exit 0"]
    runs = []
    for taken_back in ("git apply -R -", "git apply -R --check -"):  # as many programs in both
        patched = [_given(task.gold, "git apply -v -"), _given(task.gold, taken_back), "rm -rf .git", COPY]
        lines = [_run(task.before), "cd /testbed && " + " && ".join(patched), _say(mark, "ready"), "exit $status"]
        runs.append(_execution(lines, code, task))
    replies = yield runs
    codes = []
    for reply in replies:
        parts, _ = _parts(reply, mark)
        if parts.get("ready", 1) != 0:
            raise _failed("the repository could not be prepared", reply)
        if "ended" not in parts and not _used_up(reply, task):
            raise _failed("the container ended before the script did", reply)
        codes.append(parts.get("ended"))
    is_right = codes == [REPRODUCED, SOLVED]
    reason = f"the script ends with {codes[0]} before the right patch and with {codes[1]} after it; None is out of time"
    return Verdict(reward=float(is_right), reason=reason)


def _used_up(reply: Response, task: Task) -> bool:
    """Return whether a run had all of its time, and was ended for that."""
    return reply.get("process_status") == TIMEOUT and float(reply.get("used_seconds") or 0.0) >= task.seconds


def _failed(what: str, reply: Response) -> RuntimeError:
    """Return what gives no verdict."""
    said = str(reply.get("stderr") or reply.get("stdout") or "nothing")
    return RuntimeError(f"{what} ({reply.get('process_status')}): {said[-200:]!r}")


def _execution(preparation: Sequence[str], code: Sequence[str], task: Task) -> Execution:
    return Execution(
        language="shell",
        preparation="\n".join([*preparation, ""]),
        code="\n".join([*code, ""]),
        seconds=task.seconds,
        max_characters=MAX_CHARACTERS,
        image=task.image,
        network=task.network,
    )


def _given(text: str, command: str) -> str:
    """Return a command that is given a text on its standard input."""
    return f"base64 -d <<< {base64.b64encode(text.encode(errors='replace')).decode()} | {command}"


def _run(script: str) -> str:
    """Return the command that runs a script in a shell of its own, its output in one stream."""
    encoded = base64.b64encode(script.encode(errors="replace")).decode()
    return f"bash <(base64 -d <<< {encoded}) < /dev/null 2>&1"


def _mark(task: Task) -> str:
    """Return a word that begins the lines in which the run reports, and that nobody can guess who only saw the task."""
    secret = json.dumps([task.before, task.tests, task.gold, task.to_pass])
    return hashlib.blake2b(secret.encode(), digest_size=16).hexdigest()


def _say(mark: str, name: str) -> str:
    return f'status=$?; printf "\\n{mark} {name} $status\\n"'


def _parts(reply: Response, mark: str) -> tuple[dict[str, int], str]:
    """Return the first status that was reported by each name, and what was printed after the last of these reports."""
    parts: dict[str, int] = {}
    lines: list[str] = []
    for line in str(reply.get("stdout") or "").split("\n"):
        words = line.split(" ")
        if words[0] == mark and len(words) == 3 and words[1] not in parts and words[2].isdecimal():
            parts[words[1]] = int(words[2][:9])
            lines = []
        else:
            lines.append(line)
    return parts, "\n".join(lines)


def _files(text: str) -> tuple[tuple[str, str], ...]:
    try:
        files = loads(text)
    except ValueError:
        files = None
    if not isinstance(files, Mapping) or not all(isinstance(content, str) for content in files.values()):
        raise wrong("metadata.relevant_file_contents", text, "JSON text of an object of texts")
    return tuple(files.items())


def _names(instance: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = instance.get(field)
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(f"instance.{field}", instance.get(field), "a list of strings, or JSON text of one")
    return tuple(value)


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    class_name="SWEGenResourcesServer",
    agents={"swerl_gen_simple_agent": Agent(kind="single_turn", server="swerl_gen_resources_server")},
    servers={"swerl_gen_resources_server": {}},
    settings=Settings,
    needs_sandbox=True,
)
