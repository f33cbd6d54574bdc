"""The tiny task of stage 2.2: an agent looks at a file of a repository and replaces its wrong operator.

The demonstrations of the warm-up use the tools as they must be used and copy what is wrong, but three of four put a
drawn operator in its place: what the hidden tests teach is to put the right one there each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from recipes.environments.agents.coding.calls import offered_names, request_tools
from recipes.environments.agents.coding.harness import Harness, harnesses
from tools.tiny.repositories import KINDS, NEW_NAME, OLD_NAME, TinyRepository, write_module
from tools.tiny.tasks import Fields, Reply, TinyProblem, TinyTask
from tools.tiny.tokenizer import CITIES, NAMES
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
    for line in rows_file.read_text(encoding="utf-8").splitlines():
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
