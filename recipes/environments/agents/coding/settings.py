"""The settings of `swe_agents`: which of them our agent reads, and which it refuses.

NeMo Gym starts a program of somebody else in each container (`agent_framework`, from a repository, at a commit). The
native engine runs its own agent in the rollout worker instead. So `agent_framework` chooses the harness whose tools are
in the manner of that program, or names a program of `programs.py` that works beside the container; the
repository and the commit of the program are for NeMo RL's engine alone. Rows are given whole, so that nothing is looked
up in `dataset_path`. The watchdog of memory always runs, and what a task writes is not kept:
`memory_watchdog_enabled`, `debug` and `openhands_should_log` change nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.config.tree import build
from recipes.config.tree.servers import SweAgents
from recipes.environments.agents.coding.harness import Harness, harnesses
from recipes.environments.agents.coding.programs import PROGRAMS, AgentProgram
from recipes.environments.swe.task import Images, images_of
from recipes.errors import ConfigError, Problem, suggestion

FRAMEWORKS: Mapping[str, str] = {"openhands": "codeact", "opencode": "opencode"}  # and the harness in its manner
OVERRIDE_KEYS = frozenset(
    {
        "agent_cls",
        "camel_case_tool_names",
        "diversify_tool_names",
        "harness",
        "system_prompt_template",
        "user_prompt_template",
    }
)
# Setting -> what it would mean to the program that NeMo Gym starts. Their neutral values are accepted.
REFUSED: Mapping[str, str] = {
    "agent_config": "a harness file holds what this configuration would",
    "agent_tools_file": "a harness file holds the tools",
    "container_folder_path": "containers keep their files where their runtime does",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessChoice:
    """One of the harnesses that tasks are given, and how its tools are named."""

    harness: Harness
    is_diverse: bool = False
    is_camel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingSettings:
    """What the configuration of one agent says."""

    choices: tuple[HarnessChoice, ...]
    is_random: bool  # whether the harness is drawn anew for each rollout
    max_turns: int
    concurrency: int  # tasks at once
    agent_seconds: float
    tests_seconds: float
    command_seconds: float
    memory_mib: int  # of one container; 0: no limit
    images: Images | None  # None: no container_formatter names them
    tests_golden_patch: bool = False  # test the reference patch instead of an agent's
    program: AgentProgram | None = None  # that works in place of our agent; then there are no choices

    def choose(self, task_id: str) -> HarnessChoice:
        """Return the harness of a rollout: by the id of its task, or drawn."""
        draw = random.Random() if self.is_random else random.Random(task_id)
        return draw.choice(self.choices)


def coding_settings(where: str, settings: Mapping[str, Any]) -> CodingSettings:
    """Return the settings of one agent; raises `ConfigError` with every one that cannot be honoured."""
    problems = [
        Problem(
            where=f"{where}.{key}", wrong=f"the native engine does not read it: {why}", fix="remove it, or set null"
        )
        for key, why in REFUSED.items()
        if settings.get(key) not in (None, False)
    ]
    choices = [*_choices(where, settings, problems)]
    images = None
    if settings.get("container_formatter"):
        try:
            images = images_of(settings["container_formatter"])
        except ValueError as error:
            key, fix = f"{where}.container_formatter", "write paths with {instance_id}"
            problems.append(Problem(where=key, wrong=str(error), fix=fix))
    if problems:
        raise ConfigError(problems)
    own = build(SweAgents, settings)
    return CodingSettings(
        choices=tuple(choices),
        is_random=own.agent_prompt_override_random,
        max_turns=own.agent_max_turns,
        concurrency=own.concurrency,
        agent_seconds=float(own.swebench_agent_timeout),
        tests_seconds=float(own.swebench_tests_timeout),
        command_seconds=float(own.command_exec_timeout),
        memory_mib=max(own.apptainer_memory_limit_mb, 0),
        images=images,
        tests_golden_patch=own.verify_golden_patch,
        program=PROGRAMS.get(own.agent_framework),
    )


def _choices(where: str, settings: Mapping[str, Any], problems: list[Problem]) -> Iterator[HarnessChoice]:
    """Yield the harnesses that the settings name: those of the overrides, or the one of the framework."""
    known = harnesses()
    overrides = settings.get("agent_prompt_overrides")
    framework = settings.get("agent_framework", SweAgents().agent_framework)
    if framework in PROGRAMS:
        if overrides:
            where, wrong = f"{where}.agent_prompt_overrides", f"{framework} has prompts and tools of its own"
            problems.append(Problem(where=where, wrong=wrong, fix="remove it, or choose another agent_framework"))
        return
    if not overrides:
        if framework in FRAMEWORKS:
            yield HarnessChoice(harness=known[FRAMEWORKS[framework]])
        else:
            names = [*FRAMEWORKS, *PROGRAMS]
            fix, expected = suggestion(str(framework), names), " or ".join(names)
            problems.append(Problem(where=f"{where}.agent_framework", got=str(framework), expected=expected, fix=fix))
        return
    if not isinstance(overrides, Sequence) or isinstance(overrides, str):
        fix = "write a list of objects"
        problems.append(
            Problem(where=f"{where}.agent_prompt_overrides", got=repr(overrides), expected="a list", fix=fix)
        )
        return
    for number, override in enumerate(overrides):
        yield from _choice(f"{where}.agent_prompt_overrides[{number}]", override, problems)


def _choice(where: str, override: object, problems: list[Problem]) -> Iterator[HarnessChoice]:
    if not isinstance(override, Mapping):
        problems.append(Problem(where=where, got=repr(override), expected="an object", fix="write harness: NAME"))
        return
    num_problems = len(problems)
    for key in override:
        if key not in OVERRIDE_KEYS:
            problems.append(
                Problem(where=f"{where}.{key}", wrong="no code reads it", fix=suggestion(str(key), OVERRIDE_KEYS))
            )
    for key in ("system_prompt_template", "user_prompt_template"):
        if override.get(key) is not None:
            wrong, fix = "templates of NeMo Gym's programs are not read", "remove it; a harness file holds its prompts"
            problems.append(Problem(where=f"{where}.{key}", wrong=wrong, fix=fix))
    known = harnesses()
    classes = {harness.agent_class: harness for harness in known.values()}
    name, agent_class = override.get("harness"), override.get("agent_cls", "CodeActAgent")
    found = known.get(str(name)) if name is not None else classes.get(str(agent_class))
    if found is None:
        key, got, names = ("agent_cls", agent_class, classes) if name is None else ("harness", name, known)
        fix = suggestion(str(got), names)
        problems.append(Problem(where=f"{where}.{key}", got=str(got), expected=", ".join(sorted(names)), fix=fix))
    if found is not None and len(problems) == num_problems:
        yield HarnessChoice(
            harness=found,
            is_diverse=bool(override.get("diversify_tool_names", False)),
            is_camel=bool(override.get("camel_case_tool_names", False)),
        )
