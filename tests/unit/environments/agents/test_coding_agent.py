"""The coding agent with a scripted policy: every family solves a task, every way to end, what is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents.coding.agent import Backend, SetUpError, coding
from recipes.environments.agents.coding.harness import HARNESSES
from recipes.environments.agents.coding.settings import CodingSettings, coding_settings
from recipes.environments.agents.conversation import Episode
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.swe.contract import (
    CommandResult,
    Container,
    ContainerEnd,
    ContainerEndedError,
    ContainerLimits,
    Evaluation,
    SweTask,
)
from recipes.errors import EngineError
from recipes.tokens import pack_rollouts
from recipes.types import Completion, Rollout, RolloutStatus, VersionSpan
from tests.directory_container import DirectoryContainer, DirectoryRuntime
from tests.scripted import written_call
from tests.unit.environments.agents.test_patches import git

LIMITS = ContainerLimits(memory_mib=1024)
PATTERNS = FlagPatterns(invalid_tool_call=("<tool_call>",), thinking_tags=("<think>", "</think>"))
FAULT, FIX = "return a - b", "return a + b"


def called(name: str, **arguments: Any) -> str:
    return f"so</think>\n{written_call(name, arguments)}<|im_end|>"


MESSAGE = "done</think>It adds now.<|im_end|>"
SED = f"sed -i 's/{FAULT}/{FIX}/' calc.py"
SOLVES: dict[str, list[str]] = {  # what the policy says, by family
    "codeact": [
        called("execute_bash", command="cat calc.py"),
        called("str_replace_editor", command="str_replace", path="calc.py", old_str=FAULT, new_str=FIX),
        called("finish", message="done"),
    ],
    "opencode": [
        called("read", file_path="calc.py"),
        called("edit", file_path="calc.py", old_string=FAULT, new_string=FIX),
        MESSAGE,
    ],
    "codex": [
        called("shell", command=["cat", "calc.py"]),
        called("shell", command=["bash", "-lc", SED]),
        MESSAGE,
    ],
    "terminus": [
        called("run_command", keystrokes="cat calc.py"),
        called("run_command", keystrokes=SED, duration=5),
        called("mark_task_complete"),
    ],
    "tiny": [
        called("view", path="calc.py"),
        called("replace", path="calc.py", old=FAULT, new=FIX),
        MESSAGE,
    ],
}


@dataclass
class Scripted:
    """A policy that says one given text per call; a call after the last repeats it."""

    codec: ChatCodec
    says: Sequence[str]
    room: int = 1_000_000
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    max_model_len: int = 1_000_000

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        self.prompts.append(tuple(prompt_token_ids))
        sampled = self.codec.token_ids(self.says[min(len(self.prompts), len(self.says)) - 1])
        if len(prompt_token_ids) >= self.room:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        spans = (VersionSpan(version=len(self.prompts), start=0, end=len(sampled)),)
        return Completion(token_ids=sampled, logprobs=(-0.5,) * len(sampled), versions=spans, finish_reason="stop")


@dataclass
class Tests:
    """Applies a patch in a fresh container and runs the hidden test there, or says what it is told to."""

    __test__ = False
    runtime: DirectoryRuntime
    says: Evaluation | None = None
    patches: list[str] = field(default_factory=list)

    async def __call__(self, task: SweTask, patch: str) -> Evaluation:
        self.patches.append(patch)
        if self.says is not None:
            return self.says
        container = await self.runtime.start(task.image, LIMITS)
        try:
            await container.write_file(f"{task.workspace}/.patch", patch.encode())
            shell = await container.open_shell()
            test = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"
            command = f"cd {task.workspace} && git apply .patch && {test}"
            done = await shell.run(command, seconds=30, max_characters=1000)
        finally:
            await container.close()
        return Evaluation(resolved=done.status == 0, reason=done.output.strip())


@dataclass
class Case:
    """A task with everything that a rollout of it works with."""

    codec: ChatCodec
    runtime: DirectoryRuntime
    tests: Tests
    task: SweTask
    prepares: Callable[[Container, SweTask], Any]

    async def run(self, says: Sequence[str], model: Any = None, **settings: Any) -> Rollout:
        episode = Episode(
            row={"responses_create_params": {"input": [], "metadata": {"golden_patch": "SECRET"}}},
            codec=self.codec,
            model=model or Scripted(self.codec, says),
            verifier=None,  # type: ignore[arg-type]  # hidden tests decide
            patterns=PATTERNS,
            max_tokens=4096,
        )
        backend = Backend(
            runtime=self.runtime, limits=LIMITS, prepare=self.prepares, enter="export ENTERED=1", evaluator=self.tests
        )
        rollout = await coding(episode, self.task, settings_of(**settings), backend)
        assert all(container.is_closed for container in self.runtime.started)
        return rollout


def settings_of(**settings: Any) -> CodingSettings:
    return coding_settings("here", {"command_exec_timeout": 20, "agent_max_turns": 20, **settings})


async def no_preparation(_container: Container, _task: SweTask) -> None:
    pass


@pytest.fixture
def case(codec: ChatCodec, tmp_path: Path) -> Case:
    image = tmp_path / "image"
    image.mkdir()
    (image / "calc.py").write_text(f"def add(a, b):\n    {FAULT}\n", encoding="utf-8")
    git(image, "init", "-q")
    git(image, "add", "-A")
    git(image, "commit", "-qm", "base")
    runtime = DirectoryRuntime(tmp_path)
    task = SweTask(
        id="calc__calc-1",
        dataset="tiny",
        repository="calc/calc",
        base_commit=git(image, "rev-parse", "HEAD").strip(),
        problem="add subtracts {its} arguments",
        gold_patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        image=str(image),
        workspace=runtime.workspace,
    )
    return Case(codec, runtime, Tests(runtime), task, no_preparation)


def families() -> list[str]:
    return sorted(path.stem for path in HARNESSES.glob("*.yaml"))


def shares(rollout: Rollout) -> set[str]:
    return {name.removeprefix("ended/") for name, value in rollout.metrics.items() if "ended/" in name and value}


@pytest.mark.parametrize("family", families())
async def test_every_family_solves_a_task_and_trains_what_it_sampled(case: Case, family: str) -> None:
    model = Scripted(case.codec, SOLVES[family])
    rollout = await case.run(SOLVES[family], model, agent_prompt_overrides=[{"harness": family}])
    assert (rollout.status, rollout.reward, rollout.reason) == (RolloutStatus.COMPLETED, 1.0, "resolved")
    assert not rollout.is_flagged
    assert shares(rollout) == {"finished"}
    (patch,) = case.tests.patches
    assert f"-    {FAULT}\n+    {FIX}\n" in patch
    # only what the policy sampled is trained: prompts, problem and the tools' answers are masked
    _, tokens = pack_rollouts([rollout])
    row = tokens.row(0)
    mask = row.token_mask() > 0
    assert case.codec.text(row.token_ids[mask].tolist()) == "".join(SOLVES[family])
    untrained = case.codec.text(row.token_ids[~mask].tolist())
    assert "add subtracts {its} arguments" in untrained
    assert f"    {FAULT}" in untrained.partition("add subtracts")[2]
    assert "SECRET" not in untrained
    # each prompt continues the ids that were seen
    seen: tuple[int, ...] = ()
    for turn, prompt in zip(rollout.turns, model.prompts, strict=True):
        assert prompt == seen + turn.prompt_token_ids
        seen = prompt + turn.token_ids
    assert [turn.versions[0].version for turn in rollout.turns] == [1, 2, 3]


async def test_tool_names_are_those_that_were_offered(case: Case) -> None:
    override = {"harness": "terminus", "camel_case_tool_names": True}
    says = [called("runCommand", keystrokes=SED), called("markTaskComplete")]
    rollout = await case.run(says, agent_prompt_overrides=[override])
    assert rollout.reward == 1.0
    assert "runCommand" in case.codec.text(rollout.turns[0].prompt_token_ids)


async def test_wrong_work_and_no_work_earn_nothing(case: Case) -> None:
    wrong = [called("execute_bash", command="echo 1 >> calc.py"), called("finish")]
    rollout = await case.run(wrong)
    assert (rollout.reward, rollout.is_flagged) == (0.0, False)
    assert "AssertionError" in rollout.reason
    rollout = await case.run([called("finish")])
    assert (rollout.reward, rollout.is_flagged) == (0.0, False)
    assert rollout.reason == "no patch: the agent changed nothing"
    rollout = await case.run([called("execute_bash", command="rm -rf .git"), called("finish")])
    assert (rollout.reward, rollout.is_flagged) == (0.0, False)
    assert "git could not read the repository" in rollout.reason


async def test_the_ends_of_the_work(case: Case) -> None:
    look = [called("execute_bash", command=f"echo {number}") for number in range(6)]
    fixed = called("execute_bash", command=SED)
    turns = await case.run([fixed, *look], agent_max_turns=3)
    assert (turns.status, turns.reward, turns.is_flagged) == (RolloutStatus.COMPLETED, 1.0, True)
    assert (len(turns.turns), shares(turns)) == (3, {"max_iteration"})
    model = Scripted(case.codec, [fixed, *look])
    model.room = len((await case.run([fixed, called("finish")])).turns[0].prompt_token_ids) + 1
    full = await case.run([], model)
    assert (full.status, full.reward, full.is_flagged) == (RolloutStatus.TRUNCATED, 1.0, True)
    assert shares(full) == {"context_window"}
    stuck = await case.run([fixed, called("execute_bash", command="echo same")])
    assert (stuck.reward, stuck.is_flagged, shares(stuck)) == (1.0, False, {"stuck_in_loop"})
    assert len(stuck.turns) == 5
    idle = await case.run([MESSAGE])
    assert (idle.reward, shares(idle), len(idle.turns)) == (0.0, {"stuck_in_loop"}, 4)
    assert "Go on with the task" in case.codec.text(idle.turns[1].prompt_token_ids)


async def test_two_turns_in_alternation_are_a_loop(case: Case) -> None:
    one, two = (called("execute_bash", command=f"echo {word}") for word in ("one", "two"))
    rollout = await case.run([one, two] * 10)
    assert (len(rollout.turns), shares(rollout)) == (6, {"stuck_in_loop"})


async def test_an_agent_out_of_time_is_kept_out_of_the_loss(case: Case) -> None:
    rollout = await case.run([called("execute_bash", command="sleep 60")], swebench_agent_timeout=1)
    assert (rollout.reward, rollout.is_flagged, shares(rollout)) == (0.0, True, {"timeout"})
    assert case.tests.patches == []


class Ending:
    """A container that ends when a command of the agent says so."""

    def __init__(self, inner: DirectoryContainer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def open_shell(self) -> Any:
        return EndingShell(await self.inner.open_shell(), self.inner)


class EndingShell:
    """A shell of `Ending`."""

    def __init__(self, shell: Any, container: DirectoryContainer) -> None:
        self.shell, self.container = shell, container

    async def run(self, command: str, **limits: Any) -> CommandResult:
        for end in ContainerEnd:
            if command == f"end by {end}":
                self.container.ended = ContainerEndedError(end)
                raise self.container.ended
        return await self.shell.run(command, **limits)

    async def enter(self, command: str, **limits: Any) -> CommandResult:
        return await self.shell.enter(command, **limits)


@pytest.mark.parametrize(
    ("end", "reward", "is_flagged", "kind"),
    [("memory", 0.0, True, {"oom"}), ("disk", 0.0, False, {"other"}), ("died", None, False, set())],
)
async def test_a_container_that_ends(
    case: Case, end: str, reward: float | None, is_flagged: bool, kind: set[str]
) -> None:
    case.runtime.wrap = Ending
    rollout = await case.run([called("execute_bash", command=f"end by {end}")])
    assert (rollout.reward, rollout.is_flagged) == (reward, is_flagged)
    assert shares(rollout) == kind
    assert (rollout.status is RolloutStatus.ENV_FAILED) == (reward is None)


async def test_what_fails_before_the_agent_begins_is_no_verdict(case: Case, tmp_path: Path) -> None:
    async def refuses(_container: Container, _task: SweTask) -> None:
        raise SetUpError("no commit")

    case.prepares = refuses
    says = [called("finish")]
    rollout = await case.run(says)
    assert (rollout.status, rollout.reward, rollout.reason) == (RolloutStatus.ENV_FAILED, None, "no commit")
    case.prepares = no_preparation
    case.task = replace(case.task, image=str(tmp_path / "none"))
    rollout = await case.run(says)
    assert (rollout.status, rollout.turns) == (RolloutStatus.ENV_FAILED, ())
    assert "is no image" in rollout.reason
    empty = tmp_path / "empty"
    empty.mkdir()
    case.task = replace(case.task, image=str(empty))
    rollout = await case.run(says)
    assert (rollout.status, rollout.turns) == (RolloutStatus.ENV_FAILED, ())
    assert "calc__calc-1: git could not read the repository" in rollout.reason


async def test_an_evaluation_that_fails_is_no_verdict(case: Case) -> None:
    case.tests.says = Evaluation(resolved=False, reason="", failed="the report is gone")
    rollout = await case.run(SOLVES["codeact"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
    assert "the report is gone" in rollout.reason


async def test_an_engine_that_dies_closes_the_container(case: Case) -> None:
    class Dying(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            raise EngineError("engine 0 died")

    asked = asyncio.Event()

    class Hanging(Scripted):
        async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
            asked.set()
            await asyncio.sleep(3600)
            raise AssertionError

    with pytest.raises(EngineError):
        await case.run([], Dying(case.codec, []))
    running = asyncio.create_task(case.run([], Hanging(case.codec, [])))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [container.is_closed for container in case.runtime.started] == [True, True]


async def test_a_prompt_without_room_is_no_reward(case: Case) -> None:
    rollout = await case.run([], Scripted(case.codec, ["x"], room=1))
    assert (rollout.status, rollout.reward) == (RolloutStatus.ABORTED, None)


async def test_the_reference_patch_can_be_tested_without_an_agent(case: Case) -> None:
    patch = f"--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    {FAULT}\n+    {FIX}\n"
    case.task = replace(case.task, gold_patch=patch)
    rollout = await case.run([], verify_golden_patch=True)
    assert (rollout.reward, rollout.turns) == (1.0, ())


async def test_the_shell_enters_the_environment_of_the_image(case: Case) -> None:
    says = [called("execute_bash", command="echo entered $ENTERED; pwd"), called("finish")]
    rollout = await case.run(says)
    answer = case.codec.text(rollout.turns[1].prompt_token_ids)
    assert f"entered 1\n{case.task.workspace}\n" in answer
    assert rollout.metrics["num_commands"] == 1.0
