"""Issues of repositories, answered in one turn. Reward 1.0 for a full solution, 0.2 for part of one, else 0.0.

In mode `eval` an answer edits files with SEARCH/REPLACE blocks (`checks/patches.py`). Its patch is applied in the
task's image after the hidden tests are in place, and the tests run: full when all of FAIL_TO_PASS and PASS_TO_PASS
pass, part when some of the first and all of the second do. In mode `repro-gen` it writes a script that reproduces the
issue: it must end with status 2 before the right patch, and with 0 after it.

An answer without a usable patch or script earns 0 and starts nothing; so does one that uses up its time. The image runs
under Apptainer. A machine without it, or without the image, gives no verdict; nor does a run that did not get to the
tests.

Decided otherwise than in the reference:

* A patch counts as applied by the status of `git apply`, and of a report by pytest only the summary is read: code
  under test can print, and a line that it prints is no result. Code that forges the report after its end is not kept
  out; that would need the tests to run where the patched code does not.
* The script runs in two containers, one with the right patch. Neither has the repository's history, and all files are
  equally old: what the script could tell them apart by is the code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.checks.patches import PatchError, patch_in, script_in
from recipes.environments.checks.reports import FULL, NO, PARTIAL, resolution, statuses_in
from recipes.environments.contract.asking import Execution, Scoring
from recipes.environments.contract.responses import message_texts
from recipes.environments.contract.rows import one_of, optional_object, require_str, wrong
from recipes.environments.contract.verdict import Response, Verdict
from recipes.environments.contract.verifier import Agent, Verifier
from recipes.types import Row

EVAL, REPRODUCE = "eval", "repro-gen"
REWARDS = {FULL: 1.0, PARTIAL: 0.2, NO: 0.0}
MAX_CHARACTERS = 8_000_000  # of what a run prints
REPRODUCED, SOLVED = 2, 0  # statuses of a script before and after the right patch
ACTIVATE = "source /opt/miniconda3/bin/activate && conda activate testbed"


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


def parse_task(row: Row, settings: Mapping[str, Any]) -> Task:
    """Read `mode`, `instance` and `metadata`."""
    mode = one_of("mode", row.get("mode"), (EVAL, REPRODUCE))
    instance, metadata = optional_object(row, "instance"), optional_object(row, "metadata")
    return Task(
        mode=mode,
        image=require_str(metadata, "image"),
        repository=require_str(instance, "repo"),
        files=_files(require_str(metadata, "relevant_file_contents")),
        drops_first_part=bool(metadata.get("remove_repo_name")),
        is_relaxed=bool(settings.get("relaxed_formatting")),
        before=require_str(instance, "setup_script" if mode == EVAL else "regression_script"),
        tests=require_str(instance, "test_script") if mode == EVAL else "",
        gold=require_str(instance, "patch") if mode == REPRODUCE else "",
        to_pass=_names(instance, "FAIL_TO_PASS") if mode == EVAL else (),
        to_keep=_names(instance, "PASS_TO_PASS") if mode == EVAL else (),
        seconds=float(settings.get("sandbox_timeout", 600)),
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
    lines += [_say(mark, "applied"), _run(task.tests), _say(mark, "tested")]
    (reply,) = yield [_execution(lines, task)]
    parts = _parts(reply, mark)
    if "ready" not in parts:
        raise _unprepared(reply)
    details = {"model_patch": patch}
    if parts.get("applied", ("", 1))[1] != 0:
        return Verdict(reward=0.0, reason="the patch does not apply, or time was up", details=details)
    if "tested" not in parts:
        return Verdict(reward=0.0, reason="the tests did not end within their time", details=details)
    statuses = statuses_in(parts["tested"][0], task.repository, has_summary="-rA" in task.tests)
    result = resolution(statuses, task.to_pass, task.to_keep)
    return Verdict(reward=REWARDS[result], reason=result, details=details)


def _score_script(name: str, script: str, task: Task) -> Scoring:
    mark = _mark(task)
    runs = []
    for gold in ("", task.gold):
        lines = [_run(task.before), ACTIVATE, "cd /testbed"]
        lines += [_given(gold, "git apply -v -")] if gold else []
        lines += [_say(mark, "ready"), "rm -rf .git", _given(script, f"cat > {name}")]
        lines += ["find . -exec touch -h -d @0 {} +", f"python {name} > /dev/null 2>&1", _say(mark, "ended")]
        runs.append(_execution(lines, task))
    before, after = yield runs
    codes = []
    for reply in (before, after):
        parts = _parts(reply, mark)
        if parts.get("ready", ("", 1))[1] != 0:
            raise _unprepared(reply)
        codes.append(parts["ended"][1] if "ended" in parts else None)
    is_right = codes == [REPRODUCED, SOLVED]
    reason = f"the script ends with {codes[0]} before the right patch and with {codes[1]} after it; None is out of time"
    return Verdict(reward=float(is_right), reason=reason)


def _unprepared(reply: Response) -> RuntimeError:
    said = str(reply.get("stderr") or reply.get("stdout") or "nothing")
    return RuntimeError(f"the repository could not be prepared ({reply.get('process_status')}): {said[-200:]!r}")


def _execution(lines: Sequence[str], task: Task) -> Execution:
    return Execution(
        language="shell",
        code="\n".join([*lines, ""]),
        seconds=task.seconds,
        max_characters=MAX_CHARACTERS,
        image=task.image,
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
    return f'printf "\\n{mark} {name} $?\\n"'


def _parts(reply: Response, mark: str) -> dict[str, tuple[str, int]]:
    """Return what was printed before each report, and the status that it reports, by name."""
    parts: dict[str, tuple[str, int]] = {}
    lines: list[str] = []
    for line in str(reply.get("stdout") or "").split("\n"):
        words = line.split(" ")
        if words[0] == mark and len(words) == 3 and words[2].isdecimal():
            parts[words[1]] = ("\n".join(lines), int(words[2][:9]))
            lines = []
        else:
            lines.append(line)
    return parts


def _files(text: str) -> tuple[tuple[str, str], ...]:
    try:
        files = json.loads(text)
    except ValueError:
        files = None
    if not isinstance(files, Mapping) or not all(isinstance(content, str) for content in files.values()):
        raise wrong("metadata.relevant_file_contents", text, "JSON text of an object of texts")
    return tuple(files.items())


def _names(instance: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = instance.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
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
    rewards=(0.0, 1.0),
    agents={"swerl_gen_simple_agent": Agent(kind="single_turn", server="swerl_gen_resources_server")},
    servers={"swerl_gen_resources_server": {}},
    settings=frozenset({"debug", "env", "num_processes", "relaxed_formatting", "sandbox_timeout"}),
    needs_sandbox=True,
)
