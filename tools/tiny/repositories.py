"""Tiny repositories with a planted bug: a module of one function, tests, and a history whose later commit is the fix.

Git objects are made here, with fixed dates, so that a row knows its commits without a repository on disk. The image
that is built of one has the later commit too, as published images do: what an agent works in must be rid of it.

The tiny task of stage 2.2: an agent looks at a file of a repository and replaces its wrong operator.

The demonstrations of the warm-up use the tools as they must be used and copy what is wrong, but three of four put a
drawn operator in its place: what the hidden tests teach is to put the right one there each time.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

from recipes.environments.agents.coding.calls import offered_names, request_tools
from recipes.environments.agents.coding.harness import Harness, harnesses
from tools.tiny.model import CITIES, NAMES
from tools.tiny.tasks import Fields, Reply, TinyProblem, TinyTask
from tools.tiny.tool_tasks import write_call

HARNESS = "tiny"  # as the configuration of the tiny stage 2.2 names it
AGENT = "swe_agents_train"
DATASET = "tiny-SWE-bench"
DONE = "</think>Done"


@cache
def _harness() -> Harness:
    return harnesses()[HARNESS]


@cache
def _tools() -> tuple[Fields, ...]:
    """Return the tools as the agent's requests declare them."""
    offered = offered_names(_harness(), seed="", is_diverse=False, is_camel=False)
    return tuple(request_tools(offered))


def draw_repository(rng: Random) -> TinyProblem:
    """Return the problem of a repository: its prompt is what the agent's first request says."""
    kind = rng.choice(list(KINDS))
    planted = rng.choice([operator for operator in KINDS.values() if operator != KINDS[kind]])
    repository = TinyRepository(module=rng.choice(NAMES) + rng.choice(CITIES), kind=kind, planted=planted)
    harness = _harness()
    return TinyProblem(
        prompt=harness.task.format(workspace="", problem=repository.problem).strip(),
        fields={},
        facts={"repository": repository},
        history=({"role": "system", "content": harness.system.strip()},),
        tools=_tools(),
        params={"input": [], "metadata": metadata_of(repository)},
    )


def metadata_of(repository: TinyRepository) -> dict[str, str]:
    """Return the metadata of a row, all strings, as the published blend has them."""
    instance = {
        "repo": f"tiny/{repository.module}",
        "version": "1",
        "patch": repository.patch,
        "test_patch": repository.test_patch,
        "FAIL_TO_PASS": json.dumps([NEW_NAME]),
        "PASS_TO_PASS": json.dumps([OLD_NAME]),
        "log_parser": "unittest",
    }
    return {
        "instance_id": repository.id,
        "dataset_name": DATASET,
        "split": "train",
        "problem_statement": repository.problem,
        "base_commit": repository.history.commits[0],
        "golden_patch": repository.patch,
        "instance_dict": json.dumps(instance),
    }


def repository_of(metadata: dict[str, str]) -> TinyRepository:
    """Return the repository of a row, from its metadata."""
    module, _, number = metadata["instance_id"].removeprefix("tiny__").rpartition("-")
    kind = list(KINDS)[int(number) - 1]
    for planted in KINDS.values():
        repository = TinyRepository(module=module, kind=kind, planted=planted)
        if repository.patch == metadata["golden_patch"]:
            return repository
    raise ValueError(f"instance_id {metadata['instance_id']!r}: got another golden_patch, expected one made here")


def repositories_in(rows_file: Path) -> Iterator[TinyRepository]:
    """Yield the repository of every row of a file."""
    for line in rows_file.read_bytes().splitlines():
        yield repository_of(json.loads(line)["responses_create_params"]["metadata"])


def _fix(repository: TinyRepository, operator: str) -> Reply:
    """Return the turns of an agent that puts this operator in place of the wrong one, and the tools' answers."""
    path, answers = f"{repository.module}.py", _harness().answers
    lines = write_module(repository.planted).rstrip("\n").split("\n")
    shown = "\n".join(answers["line"].format(number=number, text=text) for number, text in enumerate(lines, start=1))
    replace = {"path": path, "old": f"a {repository.planted} b", "new": f"a {operator} b"}
    return (
        write_call("view", {"path": path}),
        answers["view"].format(path=path, text=shown),
        write_call("replace", replace),
        answers["edited"].format(path=path, text=""),
        DONE,
    )


def _right(problem: TinyProblem) -> Reply:
    return _fix(problem.facts["repository"], problem.facts["repository"].right)


def _drawn(problem: TinyProblem, rng: Random) -> Reply:
    repository = problem.facts["repository"]
    return _fix(repository, rng.choice([operator for operator in KINDS.values() if operator != repository.planted]))


REPOSITORIES = TinyTask(agent=AGENT, draw=draw_repository, right=_right, wrong=_drawn, wrong_share=0.75)


def words() -> tuple[str, ...]:
    """Return the pieces of the tokenizer that make these conversations short: prompts, tools and calls."""
    tools: list[Any] = [{key: value for key, value in tool.items() if key != "type"} for tool in _tools()]
    written = [f"\n{json.dumps(tool)}" for tool in tools]
    calls = ("<tool_call><function=view><parameter=path>", "<tool_call><function=replace><parameter=path>")
    between = ("</parameter><parameter=old>", "</parameter><parameter=new>", "</parameter></function></tool_call>")
    texts = (".py must return the ", "def f(a, b):\n    return a ", "a ", " b", ".py", "Done.", "Done", "tool\n")
    inner = ("<function=view><parameter=path>", "<function=replace><parameter=path>", "</parameter></function>")
    system = f"system\n{_harness().system.strip()}\n# Tools"
    return tuple(dict.fromkeys((*written, *calls, *between, *texts, *inner, *KINDS, system)))


KINDS = {"sum": "+", "difference": "-", "product": "*", "remainder": "%"}
OTHER = 'def name():\n    return "other"\n'
OLD_TEST = """import unittest

import other


class OtherTest(unittest.TestCase):
    def test_name(self):
        self.assertEqual(other.name(), "other")
"""
NEW_TEST = """

class FunctionTest(unittest.TestCase):
    def test_result(self):
        self.assertEqual([{module}.f(a, b) for a, b in {inputs}], {results})
"""
OLD_NAME = "test_name (tests.test_module.OtherTest.test_name)"
NEW_NAME = "test_result (tests.test_module.FunctionTest.test_result)"
INPUTS = ((7, 3), (9, 4), (5, 2))
SIGNATURE = "Tiny <tiny@example.com> 1700000000 +0000"


def write_module(operator: str) -> str:
    """Return the module, with the operator that its function uses."""
    return f"def f(a, b):\n    return a {operator} b\n"


def apply_operator(operator: str, a: int, b: int) -> int:
    """Return what a module with this operator computes."""
    return {"+": a + b, "-": a - b, "*": a * b, "%": a % b}[operator]


@dataclass(frozen=True, kw_only=True)
class TinyRepository:
    """One repository: `module`.py must return the `kind` of two numbers, and uses the operator of another one."""

    module: str
    kind: str
    planted: str  # the wrong operator

    @property
    def id(self) -> str:
        return f"tiny__{self.module}-{list(KINDS).index(self.kind) + 1}"

    @property
    def right(self) -> str:
        """The operator of the solution."""
        return KINDS[self.kind]

    @property
    def problem(self) -> str:
        return f"{self.module}.py must return the {self.kind}"

    @property
    def new_test(self) -> str:
        """The file of the hidden tests: the one that the repository has, and one that the bug fails."""
        results = [apply_operator(self.right, a, b) for a, b in INPUTS]
        test = NEW_TEST.format(module=self.module, inputs=INPUTS, results=results)
        return OLD_TEST.replace("import other\n", f"import other\nimport {self.module}\n", 1) + test

    @property
    def patch(self) -> str:
        """The solution."""
        path = f"{self.module}.py"
        lines = ["def f(a, b):", f"-    return a {self.planted} b", f"+    return a {self.right} b"]
        return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,2 +1,2 @@\n {chr(10).join(lines)}\n"

    @property
    def test_patch(self) -> str:
        """What makes of the repository's test file the hidden one."""
        path, before, after = "tests/test_module.py", OLD_TEST.splitlines(), self.new_test.splitlines()
        changed = [f"-{line}" for line in before] + [f"+{line}" for line in after]
        head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
        return head + f"@@ -1,{len(before)} +1,{len(after)} @@\n" + "\n".join(changed) + "\n"

    def files(self, operator: str) -> dict[str, str]:
        """Return the files at a commit, by path."""
        module = {f"{self.module}.py": write_module(operator)}
        return {**module, "other.py": OTHER, "tests/__init__.py": "", "tests/test_module.py": OLD_TEST}

    @cached_property
    def history(self) -> History:
        """The two commits: the bug, then the fix with its test."""
        history = History()
        base = history.commit(self.files(self.planted), None, "Begin")
        fixed = {**self.files(self.right), "tests/test_module.py": self.new_test}
        history.commit(fixed, base, f"Fix {self.module}: use {self.right}")
        return history


class History:
    """Git objects of commits in a line."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}  # id -> content with its header
        self.commits: list[str] = []  # ids, the oldest first

    def commit(self, files: Mapping[str, str], parent: str | None, message: str) -> str:
        """Add a commit of some files and return its id."""
        lines = [f"tree {self._tree(files)}", *([f"parent {parent}"] if parent else [])]
        lines += [f"author {SIGNATURE}", f"committer {SIGNATURE}", "", message, ""]
        self.commits.append(self._add("commit", "\n".join(lines).encode()))
        return self.commits[-1]

    def _tree(self, files: Mapping[str, str]) -> str:
        entries: dict[bytes, bytes] = {}
        for name in sorted({path.split("/")[0] for path in files}):
            if name in files:
                mode, child = b"100644", self._add("blob", files[name].encode())
            else:
                inner = {
                    path.removeprefix(f"{name}/"): text for path, text in files.items() if path.startswith(f"{name}/")
                }
                mode, child = b"40000", self._tree(inner)
            # Git sorts a directory as if its name ended with a slash.
            key = name.encode() + (b"/" if mode == b"40000" else b"")
            entries[key] = mode + b" " + name.encode() + b"\0" + bytes.fromhex(child)
        return self._add("tree", b"".join(entries[key] for key in sorted(entries)))

    def _add(self, kind: str, content: bytes) -> str:
        data = f"{kind} {len(content)}\0".encode() + content
        name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        self.objects[name] = data
        return name

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files of a .git directory whose branch is at the first commit; `future` is at the last."""
        for name, data in self.objects.items():
            yield f"objects/{name[:2]}/{name[2:]}", zlib.compress(data, 1)
        yield "HEAD", b"ref: refs/heads/main\n"
        yield "refs/heads/main", f"{self.commits[0]}\n".encode()
        yield "refs/heads/future", f"{self.commits[-1]}\n".encode()
        yield "config", b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"


def write_repository(repository: TinyRepository, directory: Path) -> None:
    """Write the work tree at the first commit, and the .git directory without an index."""
    texts = {path: text.encode() for path, text in repository.files(repository.planted).items()}
    for path, content in (*texts.items(), *((f".git/{path}", data) for path, data in repository.history.files())):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
