"""The coding agent in real containers: every family solves a task, hidden tests decide, nothing gives the fix away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_root import require, write_root
from swe_containers_case import wait_until
from swe_image import write_sif
from swe_project import CANARY, Project, write_project

from recipes.environments.agents.coding.harness import HARNESSES
from recipes.environments.agents.coding.programs import PROGRAMS as PROGRAMS_OF_OTHERS
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.environments.swe.containers.places import home
from recipes.environments.swe.containers.runtime import BWRAP_PROGRAMS as PROGRAMS
from recipes.types import Completion, Rollout, RolloutStatus, VersionSpan
from tests.configuration import environments as env_block
from tests.scripted import written_call
from tools.tiny.model import build_tokenizer

pytestmark = pytest.mark.functional
FAULT, FIX = "return a - b", "return a + b"
SED = f"sed -i 's/{FAULT}/{FIX}/' calc.py && git log --all -p | cat"
END = "<|im_end|>"


def called(name: str, **arguments: Any) -> str:
    return f"so</think>\n{written_call(name, arguments)}{END}"


MESSAGE = f"done</think>It adds now.{END}"
SUBMIT = called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SOLVES: dict[str, list[str]] = {
    "codeact": [
        called("execute_bash", command=SED),
        called("str_replace_editor", command="create", path="/testbed/new.py", file_text="x = 1\n"),
        called("finish"),
    ],
    "opencode": [
        called("glob", pattern="*.py"),
        called("edit", file_path="calc.py", old_string=FAULT, new_string=FIX),
        MESSAGE,
    ],
    "codex": [
        called("shell", command=["bash", "-lc", SED]),
        called(
            "apply_patch", patch="--- a/calc.py\n+++ b/calc.py\n@@ -2,1 +2,2 @@\n     return a + b\n+    # it adds\n"
        ),
        MESSAGE,
    ],
    "terminus": [called("run_command", keystrokes=SED), called("mark_task_complete")],
    "tiny": [called("view", path="calc.py"), called("replace", path="calc.py", old=FAULT, new=FIX), MESSAGE],
}


@dataclass
class Scripted:
    """A policy that says one given text per call."""

    codec: ChatCodec
    says: list[str]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    max_model_len: int = 1_000_000

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        if len(prompt_token_ids) >= self.max_model_len:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        self.prompts.append(tuple(prompt_token_ids))
        sampled = self.codec.token_ids(self.says[min(len(self.prompts), len(self.says)) - 1])
        spans = (VersionSpan(version=0, start=0, end=len(sampled)),)
        return Completion(token_ids=sampled, logprobs=(-0.5,) * len(sampled), versions=spans, finish_reason="stop")


@dataclass(frozen=True)
class Made:
    """An image of a project, and the codec of the tiny model."""

    images: Path
    project: Project
    codec: ChatCodec
    problem = "add must add"

    def row(self) -> dict[str, Any]:
        facts = {
            "repo": "some/calc",
            "base_commit": self.project.base,
            "problem_statement": self.problem,
            "patch": self.project.patch,
            "test_patch": self.project.test_patch,
            "test_cmd": "python3 -c 'import test_calc as t; t.test_zero(); t.test_sum()'",
            "log_parser": "exit_status",
        }
        metadata = {"instance_id": "some__calc-1", "dataset_name": "tiny", "instance_dict": json.dumps(facts)}
        return {"responses_create_params": {"input": [], "metadata": metadata}, "agent_ref": {"name": "swe_agents_val"}}

    async def run(self, says: list[str], max_model_len: int = 1_000_000, **settings: Any) -> Rollout:
        own = {
            "container_formatter": f"{self.images}/swe_{{instance_id}}.sif",
            "command_exec_timeout": 60,
            "apptainer_memory_limit_mb": 400,
            **settings,
        }
        instances = {"swe_agents_val": {"responses_api_agents": {"swe_agents": own}}}
        patterns = {"invalid_tool_call_patterns": ("<tool_call>",), "thinking_tags": ("<think>",)}
        config = env_block(instances=instances, **patterns)
        environments = Environments.from_config(config, self.codec)
        try:
            assert environments.check_row(self.row()) == []
            policy = Scripted(self.codec, says, max_model_len=max_model_len)
            return await environments.run(self.row(), policy, max_tokens=4096)
        finally:
            environments.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    require(*PROGRAMS, "busybox", "git", "mksquashfs", "siftool")
    place = tmp_path_factory.mktemp("coding")
    root = write_root(place / "root", programs=["bash", "comm", "find", "git", "patch"], python=True)
    (root / "bin/bash").unlink(missing_ok=True)
    (root / "bin/bash").symlink_to("/usr/bin/bash")
    project = write_project(root / "testbed")
    images = place / "images"
    images.mkdir()
    write_sif(root, images / "swe_some__calc-1.sif")
    build_tokenizer().save_pretrained(place / "tokenizer")
    return Made(images, project, ChatCodec(place / "tokenizer"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert list(home().iterdir()) == []


@pytest.mark.parametrize("family", sorted(path.stem for path in HARNESSES.glob("*.yaml")))
async def test_every_family_solves_a_task(made: Made, family: str) -> None:
    rollout = await made.run(SOLVES[family], agent_prompt_overrides=[{"harness": family}])
    assert (rollout.status, rollout.reward, rollout.is_flagged) == (RolloutStatus.COMPLETED, 1.0, False), rollout.reason
    seen = "".join(made.codec.text(turn.prompt_token_ids) for turn in rollout.turns)
    assert "add must add" in seen
    assert CANARY not in seen  # neither the history nor the row
    assert rollout.metrics["ended/finished"] == rollout.metrics["resolved"] == 1.0
    noted = rollout.trajectory
    assert noted is not None
    assert (noted["instance"], noted["end"], noted["tests"]["resolved"]) == ("some__calc-1", "finished", True)
    assert f"+    {FIX}" in noted["patch"]
    assert CANARY not in json.dumps(noted)
    assert {"system", "user", "call", "tool"} <= {item["role"] for item in noted["items"]}


async def test_wrong_work_is_told_from_right(made: Made) -> None:
    rollout = await made.run([called("execute_bash", command="echo '# nothing' >> calc.py"), called("finish")])
    assert (rollout.status, rollout.reward, rollout.is_flagged) == (RolloutStatus.COMPLETED, 0.0, False)
    assert rollout.metrics["has_patch"] == 1.0
    cheat = "printf 'def test_zero(): pass\\ndef test_sum(): pass\\n' > test_calc.py"
    rollout = await made.run([called("execute_bash", command=cheat), called("finish")])
    assert rollout.reward == 0.0


async def test_a_command_that_takes_the_memory_ends_the_agent(made: Made) -> None:
    eat = "python3 -c 'x = bytearray(900 << 20); import time; time.sleep(30)'"
    rollout = await made.run([called("execute_bash", command=eat)], agent_max_turns=1)
    assert (rollout.reward, rollout.is_flagged) == (0.0, True), rollout.reason
    assert rollout.metrics["ended/oom"] == 1.0


@pytest.mark.parametrize("place", ["/", "/testbed"])
async def test_an_agent_that_ruins_its_container_earns_nothing(made: Made, place: str) -> None:
    command = f"rm -rf --no-preserve-root {place} 2>/dev/null"
    rollout = await made.run([called("execute_bash", command=command), called("finish")])
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.0), rollout.reason


async def test_an_image_that_is_none_gives_no_verdict(made: Made) -> None:
    (made.images / "bad_some__calc-1.sif").write_text("not an image", encoding="utf-8")
    rollout = await made.run([MESSAGE], container_formatter=f"{made.images}/bad_{{instance_id}}.sif")
    assert (rollout.status, rollout.reward, rollout.turns) == (RolloutStatus.ENV_FAILED, None, ())


# A program with the habits of mini-swe-agent: a turn without a call disappears from what it sends next.
PROGRAM = """#!{python}
import json, os, socket, subprocess, sys, urllib.error, urllib.request
task = json.load(sys.stdin)
container = socket.socket(fileno=task["container"]).makefile("rw")
if task["problem"].startswith("hang"):
    subprocess.Popen(["sleep", "559.5"], start_new_session=True)
    subprocess.run(["sleep", "559.5"])
if task["problem"].startswith("fail"):
    sys.exit("no such model")
parameters = {{"type": "object", "properties": {{"command": {{"type": "string"}}}}, "required": ["command"]}}
tools = [{{"type": "function", "function": {{"name": "bash", "parameters": parameters}}}}]
messages = [{{"role": "system", "content": "Work."}}, {{"role": "user", "content": task["problem"]}}]
end = ""
while not end:
    body = json.dumps({{"model": "policy", "messages": messages, "tools": tools}}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    try:
        message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        end = "max_iteration" if error.code == 404 else "context_window"
        break
    calls = message.get("tool_calls") or []
    if not calls:
        messages.append({{"role": "user", "content": "No tool call was found."}})
        continue
    messages.append(message)
    for call in calls:
        container.write(json.dumps(json.loads(call["function"]["arguments"])) + "\\n")
        container.flush()
        done = json.loads(container.readline())
        if "ended" in done:
            sys.exit(3)
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": json.dumps(done)}})
        if done["output"].startswith("COMPLETE_TASK"):
            end = "finished"
print(json.dumps({{"end": end}}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the program in the place of mini-swe-agent; return the name."""
    python = tmp_path / "mini-swe-agent/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("AGENT_PROGRAMS_DIR", str(tmp_path))
    return "mini-swe-agent"


async def test_a_program_beside_the_container_solves_a_task(made: Made, program: str) -> None:
    look = called("bash", command=f"{SED}; cd /; export x=1")
    says = [f"hm</think>I would look around.{END}", look, called("bash", command="pwd; echo $x"), SUBMIT]
    rollout = await made.run(says, agent_framework=program)
    assert (rollout.status, rollout.reward, rollout.is_flagged) == (RolloutStatus.COMPLETED, 1.0, False), rollout.reason
    assert (rollout.metrics["model_calls"], rollout.metrics["lost_share"]) == (4.0, 0.0)
    assert rollout.metrics["program/num_commands"] == 3.0 and rollout.metrics["num_sequences"] == 2.0
    trained = [turn.token_ids for path in (rollout.turns, *rollout.branches) for turn in path]
    assert sorted(trained) == sorted(made.codec.token_ids(text) for text in says)
    seen = "".join(made.codec.text(turn.prompt_token_ids) for turn in rollout.turns)
    assert "add must add" in seen and CANARY not in seen
    assert "/testbed" in made.codec.text(rollout.turns[-1].prompt_token_ids)  # each command begins there


async def test_how_a_programs_work_ends_is_seen_from_outside(made: Made, program: str) -> None:
    rollout = await made.run([called("bash", command=SED)], agent_framework=program, agent_max_turns=2)
    assert (rollout.reward, rollout.is_flagged, rollout.metrics["ended/max_iteration"]) == (1.0, True, 1.0)
    eat = "python3 -c 'x = bytearray(900 << 20); import time; time.sleep(30)'"
    rollout = await made.run([called("bash", command=eat)], agent_framework=program)
    assert (rollout.reward, rollout.is_flagged, rollout.metrics["ended/oom"]) == (0.0, True, 1.0)


async def test_a_program_that_fails_hangs_or_is_missing(
    made: Made, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Made, "problem", "fail")
    rollout = await made.run([SUBMIT], agent_framework=program)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ENV_FAILED, None)
    assert "mini-swe-agent ended with status 1 without a result: no such model" in rollout.reason
    monkeypatch.setattr(Made, "problem", "hang")
    rollout = await made.run([SUBMIT], agent_framework=program, swebench_agent_timeout=3)
    assert (rollout.status, rollout.reward) == (RolloutStatus.ABORTED, None)
    assert rollout.reason == "the agent program made no model call"
    # The kernel kills what is left in the container, a moment after its first process.
    assert wait_until(lambda: subprocess.run(["pgrep", "-f", "sleep 559[.]5"], check=False).returncode == 1)
    monkeypatch.setenv("AGENT_PROGRAMS_DIR", "/nowhere")
    with pytest.raises(AssertionError, match=r"agent program mini-swe-agent is not installed: there is no /nowhere"):
        await made.run([SUBMIT], agent_framework=program)


@pytest.mark.slow
async def test_mini_swe_agent_solves_a_task(made: Made) -> None:
    """The real one, which `make swe-agent` installs."""
    assert not (missing := PROGRAMS_OF_OTHERS["mini-swe-agent"].missing()), missing
    says = [f"hm</think>I would look around.{END}", called("bash", command=SED), SUBMIT]
    rollout = await made.run(says, agent_framework="mini-swe-agent")
    assert (rollout.status, rollout.reward, rollout.is_flagged) == (RolloutStatus.COMPLETED, 1.0, False), rollout.reason
    trained = [turn.token_ids for path in (rollout.turns, *rollout.branches) for turn in path]
    assert sorted(trained) == sorted(made.codec.token_ids(text) for text in says)
    assert rollout.metrics["model_calls/assistant_missing"] == 1.0
    endless = await made.run([called("bash", command=SED)], agent_framework="mini-swe-agent", agent_max_turns=3)
    assert (endless.reward, endless.is_flagged, endless.metrics["ended/max_iteration"]) == (1.0, True, 1.0)
    full = await made.run([called("bash", command=SED)], agent_framework="mini-swe-agent", max_model_len=4000)
    assert full.metrics["ended/context_window"] == 1.0 and full.is_flagged
