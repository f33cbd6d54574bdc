"""Programs of others on a task: their shell lasts where they ask for it, and the real OpenHands mends a repository.

The task's container is a directory here; `test_coding_agent.py` has programs beside real containers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.agents.by_url.agent import UrlAgents
from recipes.environments.agents.coding.agent import Backend
from recipes.environments.agents.coding.programs import PROGRAMS
from recipes.environments.agents.conversation import Episode
from recipes.environments.agents.programs.rollouts import program_rollout
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.swe.contract import SweTask
from recipes.errors import RequestError
from recipes.types import Rollout, RolloutStatus
from tests.directory_container import DirectoryRuntime
from tests.unit.environments.agents.test_coding_agent import (
    FAULT,
    FIX,
    LIMITS,
    PATTERNS,
    Scripted,
    Tests,
    called,
    no_preparation,
    settings_of,
)
from tests.unit.environments.agents.test_patches import git
from tools.tiny.model import build_tokenizer

pytestmark = pytest.mark.functional
LOW = {"security_risk": "LOW"}
PROGRAM = f"""#!{sys.executable}
import json, os, socket, sys, urllib.request
task = json.load(sys.stdin)
container = socket.socket(fileno=task["container"]).makefile("rw")
def run(command, lasting):
    container.write(json.dumps({{"command": command, "lasting": lasting}}) + "\\n")
    container.flush()
    return json.loads(container.readline())["output"].strip()
run("cd /usr; x=1", True)
run("cd /etc; x=2", False)
said = f"lasting: {{run('echo $PWD:$x', True)}}; other: {{run('echo $PWD:$x', False)}}"
body = json.dumps({{"model": "policy", "messages": [{{"role": "user", "content": said}}]}}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)).read()
print(json.dumps({{"end": "finished"}}))
"""


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    place = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(place)
    return ChatCodec(place)


async def run(place: Path, codec: ChatCodec, says: list[str], **settings: Any) -> tuple[Rollout, Scripted]:
    """Let the program of the settings work on a small task; return the rollout, and the policy that it asked."""
    image = place / "image"
    image.mkdir(parents=True)
    (image / "calc.py").write_text(f"def add(a, b):\n    {FAULT}\n", encoding="utf-8")
    git(image, "init", "-q")
    git(image, "add", "-A")
    git(image, "commit", "-qm", "base")
    runtime = DirectoryRuntime(place)
    names = {"id": "calc__calc-1", "dataset": "tiny", "repository": "calc/calc", "problem": "add must {add}"}
    tests = {"gold_patch": "", "test_patch": "", "fail_to_pass": (), "pass_to_pass": ()}
    base = git(image, "rev-parse", "HEAD").strip()
    task = SweTask(**names, **tests, base_commit=base, image=str(image), workspace=runtime.workspace)
    model, servers = Scripted(codec, says), UrlAgents()
    episode = Episode(
        row={"responses_create_params": {"input": []}},
        codec=codec,
        model=model,
        verifier=None,  # type: ignore[arg-type]  # hidden tests decide
        patterns=PATTERNS,
        max_tokens=4096,
    )
    means = Backend(runtime=runtime, limits=LIMITS, prepare=no_preparation, enter="", evaluator=Tests(runtime))
    try:
        return await program_rollout(episode, task, settings_of(**settings), means, servers), model
    finally:
        servers.close()


def install(place: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Put a program in the place of OpenHands."""
    monkeypatch.setenv("AGENT_PROGRAMS_DIR", str(place / "programs"))
    python = PROGRAMS["openhands-ai"].python
    python.parent.mkdir(parents=True)
    python.write_text(program, encoding="utf-8")
    python.chmod(0o755)


async def test_what_lasts_is_the_shell_of_lasting_commands(
    tmp_path: Path, codec: ChatCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, PROGRAM)
    rollout, model = await run(
        tmp_path / "task", codec, ["hm</think>So it is.<|im_end|>"], agent_framework="openhands-ai"
    )
    assert "ended/finished" in rollout.metrics, rollout.reason
    assert "lasting: /usr:1; other: /usr:" in codec.text(model.prompts[0])
    assert rollout.metrics["program/num_commands"] == 4.0


GIVES_UP = f"""#!{sys.executable}
import json, os, urllib.error, urllib.request
body = json.dumps({{"model": "policy", "messages": [{{"role": "user", "content": "u"}}]}}).encode()
try:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)).read()
except urllib.error.HTTPError:
    print(json.dumps({{"end": "other"}}))
"""


async def test_a_program_whom_the_engine_has_failed_earns_nothing(
    tmp_path: Path, codec: ChatCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: Any, **_more: Any) -> Any:
        raise RequestError("engine 0 was late")

    monkeypatch.setattr(Scripted, "generate", fail)
    install(tmp_path, monkeypatch, GIVES_UP)
    rollout, _ = await run(tmp_path / "task", codec, [], agent_framework="openhands-ai")
    assert (rollout.status, rollout.reward) == (RolloutStatus.ABORTED, None), rollout.reason
    assert "engine 0 was late" in rollout.reason


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_openhands_solves_a_task(tmp_path: Path, codec: ChatCodec) -> None:
    """The real one, which `make swe-agent AGENT=openhands-ai` installs: its shell, its editor, its way to finish."""
    assert not (missing := PROGRAMS["openhands-ai"].missing()), missing
    path = str(tmp_path / "task/work")
    says = [
        "hm</think>I would look around.<|im_end|>",
        called("execute_bash", command="cd /usr; y=2", **LOW),
        called("execute_bash", command="echo $PWD:$y", **LOW),
        called("str_replace_editor", command="view", path=path, **LOW),
        called("str_replace_editor", command="str_replace", path=f"{path}/calc.py", old_str=FAULT, new_str=FIX, **LOW),
        called("finish", message="it adds now"),
    ]
    rollout, model = await run(tmp_path / "task", codec, says, agent_framework="openhands-ai")
    assert (rollout.status, rollout.reward, rollout.is_flagged) == (RolloutStatus.COMPLETED, 1.0, False), rollout.reason
    trained = [turn.token_ids for branch in (rollout.turns, *rollout.branches) for turn in branch]
    assert sorted(trained) == sorted(codec.token_ids(text) for text in says)
    seen = codec.text(model.prompts[-1])
    assert "add must {add}" in seen and "/usr:2" in seen and f"{path}/calc.py" in seen and FIX in seen
    endless = {"agent_framework": "openhands-ai", "agent_max_turns": 2}
    rollout, _ = await run(tmp_path / "endless", codec, says[1:2], **endless)
    assert rollout.metrics["ended/max_iteration"] == 1.0, rollout.reason
