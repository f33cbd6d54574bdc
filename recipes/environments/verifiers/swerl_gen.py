"""Issues of repositories, answered in one turn. Reward 1.0 for a full solution, 0.2 for part of one, else 0.0.

In mode `eval` an answer edits files with SEARCH/REPLACE blocks (`checks/patches.py`). Its patch is applied in the
task's image after the hidden tests are in place, and the tests run: full when all of FAIL_TO_PASS and PASS_TO_PASS
pass, part when some of the first and all of the second do. In mode `repro-gen` it writes a script that reproduces the
issue: it must end with status 2 before the right patch, and with 0 after it.

An answer without a usable patch or script earns 0 and starts nothing; so does one that uses up its time. The image runs
under Apptainer. A machine without it, or without the image, gives no verdict; nor does a run that did not get to the
tests, or that ended before its own end for another reason than its time. The setting `sandbox_network` gives the
containers this machine's network, which some data sets' scripts need to install packages; without it they have none.

Decided otherwise than in the reference:

* A patch counts as applied by the status of `git apply`, and of a report by pytest only the summary is read: code
  under test can print, and a line that it prints is no result. What is reported before that code begins is believed
  once, and that the tests came to their end only by the status of the container. Code that forges the report of the
  tests is not kept out; that would need the tests to run where the patched code does not.
* The script runs in two containers. In both the right patch is applied; in one it is taken back. The shell that did so
  has ended, the history is gone, and the repository is a copy made in the order of its names, all files equally old:
  what the script could tell the containers apart by is the code.
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
COMPLETED, TIMEOUT = "completed", "timeout"  # ends of a container: with status 0, and by its time
# Makes the repository anew: no inode, time or place in a directory says which files a patch has written.
COPY = (
    "mkdir /tmp/copy && (set -o pipefail; tar --sort=name --mtime=@0 -cf - . | tar -C /tmp/copy -xpf -)"
    " && find . -mindepth 1 -delete && (shopt -s dotglob; mv -- /tmp/copy/* .) && rmdir /tmp/copy && touch -d @0 ."
)
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
    network: bool


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
        network=settings.get("sandbox_network") is True,
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
    if status == TIMEOUT:
        return Verdict(reward=0.0, reason="the tests did not end within their time", details=details)
    if parts.get("applied", 0) != 0:
        return Verdict(reward=0.0, reason="the patch does not apply", details=details)
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
        if "ended" not in parts and reply.get("process_status") != TIMEOUT:
            raise _failed("the container ended before the script did", reply)
        codes.append(parts.get("ended"))
    is_right = codes == [REPRODUCED, SOLVED]
    reason = f"the script ends with {codes[0]} before the right patch and with {codes[1]} after it; None is out of time"
    return Verdict(reward=float(is_right), reason=reason)


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
    settings=frozenset({"debug", "env", "num_processes", "relaxed_formatting", "sandbox_network", "sandbox_timeout"}),
    needs_sandbox=True,
)
