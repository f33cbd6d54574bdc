"""Model text that attacks: whatever an answer does in a scoring process stays there, with namespaces and without."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.contract.verifier import NoVerdict, Verdict, message_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.scoring import jail, process
from recipes.environments.scoring.pool import ScoringPool
from tests.recorded import golden

pytestmark = pytest.mark.functional

SECRET = "a-token-that-no-answer-may-see"
HOSTILE = """
from dataclasses import dataclass
from recipes.environments.contract.verifier import Verdict
from recipes.environments.contract.verifier import Verifier

@dataclass(frozen=True)
class Task:
    pass

def score(response, task):
    found = {}
    try:
        exec(response["output"][0]["content"][0]["text"], {"score": score}, found)
    except Exception as error:
        return Verdict(reward=0.0, reason=f"{type(error).__name__}: {error}"[:200])
    return Verdict(reward=float(found.get("reward", 0.0)), reason=str(found.get("said", "done")))

VERIFIER = Verifier(
    task=Task, parse_task=lambda row, settings: Task(), score=score, class_name="H", rewards=(0.0, 1.0), agents={}
)
"""


@pytest.fixture(params=["namespaces", "filter alone"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a verifier that runs the answer as Python, which only a jail that shows this directory can import."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "hostile.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(code))
    paths, visible, trial = jail._import_paths, jail._visible, jail._trial
    monkeypatch.setattr(jail, "_import_paths", lambda: [*paths(), str(code)])
    monkeypatch.setattr(jail, "_visible", lambda: [*visible(), code])
    if request.param == "filter alone":
        monkeypatch.setattr(jail, "_trial", lambda _: "not allowed in this test")
    else:
        monkeypatch.setattr(jail, "_trial", trial)
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    jail.jail.cache_clear()
    import hostile as module

    yield module.VERIFIER
    jail.jail.cache_clear()


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    made = ScoringPool(num_workers=1, cpu_seconds=2.0, cached_verdicts=0)
    yield made
    made.close()


def text(code: str) -> dict[str, Any]:
    return {"output": [message_item(code)]}


async def said(pool: ScoringPool, verifier: Any, code: str) -> str:
    verdict = await pool.score(verifier, verifier.parse_task({}, verifier.settings()), text(code))
    return verdict.reason


REFUSED = {
    "write a file": "open('/tmp/from-an-answer', 'w').write('x')",
    "write a file of ours": "open(score.__code__.co_filename, 'a').write('x')",
    "make a directory": "import os; os.mkdir('/tmp/from-an-answer')",
    "remove a file": "import os; os.unlink(score.__code__.co_filename)",
    "fork": "import os; os.fork()",
    "start a program": "import os; os.execv('/bin/true', ['true'])",
    "start a shell": "import subprocess; subprocess.run(['true'])",
    "start a thread that outlives": "import threading; threading.Thread(target=print).start()",
    "kill its loader": "import os; os.kill(os.getppid(), 9)",
    "stop everything": "import os; os.kill(-1, 19)",
    "make a socket": "import socket; socket.socket()",
    "make a unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "memory outside of its limit": "import os; os.memfd_create('x')",
    "namespaces": "import ctypes; n = ctypes.CDLL(None, use_errno=True); assert n.unshare(0x10000000) == 0, 'EPERM'",
    "trace its loader": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b').write(b'x')",
}


@pytest.mark.timeout(300)
async def test_nothing_outside_can_be_changed_or_reached(pool: ScoringPool, hostile: Any) -> None:
    for name, code in REFUSED.items():
        reason = await said(pool, hostile, code)
        kinds = ("PermissionError", "OSError", "RuntimeError: can't start new thread", "AssertionError: EPERM")
        assert reason.startswith((*kinds, "BlockingIOError", "ValueError: ", "FileNotFoundError")), (name, reason)
    assert await said(pool, hostile, "said = 'still here'") == "still here"
    assert not Path("/tmp/from-an-answer").exists()


async def test_the_environment_is_not_ours(pool: ScoringPool, hostile: Any) -> None:
    seen = await said(pool, hostile, "import os; said = str(dict(os.environ))")
    assert SECRET not in seen
    assert "TOKEN" not in seen
    everyone = "import glob; said = ''\nfor p in glob.glob('/proc/[0-9]*/environ'):\n    try: said += open(p).read()\n"
    if jail.jail().words:
        assert SECRET not in await said(pool, hostile, everyone + "    except OSError: pass")


async def test_files_of_the_host_cannot_be_seen(pool: ScoringPool, hostile: Any, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(SECRET, encoding="utf-8")
    secret.chmod(0o600)
    reason = await said(pool, hostile, f"said = open({str(secret)!r}).read()")
    if jail.jail().words or jail.jail().becomes_nobody:
        assert SECRET not in reason


async def test_no_connection(pool: ScoringPool, hostile: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert "Error" in await said(pool, hostile, f"import socket; socket.create_connection({address!r}, timeout=5)")


async def test_memory_and_time_are_bounded(pool: ScoringPool, hostile: Any) -> None:
    assert (await said(pool, hostile, "x = bytearray(8 << 30)")).startswith("MemoryError")
    task = hostile.parse_task({}, hostile.settings())
    busy = "import signal; signal.signal(signal.SIGPROF, signal.SIG_DFL)\nwhile True: pass"
    spent = await pool.score(hostile, task, text(busy))
    assert isinstance(spent, NoVerdict)
    assert "scoring used more than 2 s of processor time" in spent.reason
    asleep = await pool.score(hostile, task, text("import time; time.sleep(100)"), seconds=2.0)
    assert isinstance(asleep, NoVerdict)
    assert "no score within 2 s" in asleep.reason
    assert await said(pool, hostile, "said = 'still here'") == "still here"


async def test_an_answer_cannot_speak_for_another(
    pool: ScoringPool, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = hostile.parse_task({}, hostile.settings())
    forged = json.dumps({"id": "0" * 16, "verdict": {"reward": 1.0}})
    each = "try: os.write(fd, struct.pack('!2I', 1, len(b)) + b)"
    flood = f"import os, struct\nb = {forged!r}.encode()\n"
    flood += f"for fd in range(3, 64):\n    {each}\n    except OSError: pass"
    assert isinstance(await pool.score(hostile, task, text(flood)), NoVerdict)
    honest = await pool.score(hostile, task, text("said = 'mine'"))
    assert (honest.reason, isinstance(honest, Verdict)) == ("mine", True)
    rich = await pool.score(hostile, task, text("reward = 99.0"))
    assert isinstance(rich, NoVerdict)
    assert "expected a number between 0 and 1" in rich.reason


async def test_what_an_answer_changes_is_gone_with_its_scorer(
    pool: ScoringPool, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SCORES_PER_PROCESS", 1)
    task = hostile.parse_task({}, hostile.settings())
    swap = "import sys; from recipes.environments.contract.verifier import Verdict\n"
    swap += "v = sys.modules['hostile'].VERIFIER\n"
    swap += "object.__setattr__(v, 'score', lambda *_: Verdict(reward=1.0, reason='bribed'))"
    await pool.score(hostile, task, text(swap))
    assert (await pool.score(hostile, task, text("said = 'honest'"))).reason == "honest"


# The two answers with which the first version of this pool was broken, and their kin for every family that evaluates.
PAYLOADS = (
    "__import__('os').system('touch /tmp/from-an-answer')",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "__import__('sys').modules['recipes.environments.verifiers.reasoning_gym'].__dict__.update(score=None) or 'a'",
    "sympify(\"__import__('os').mkdir('/tmp/from-an-answer')\")",
    "(lambda: open('/tmp/from-an-answer', 'w'))()",
)


async def test_an_answer_to_reasoning_gym_is_never_run(pool: ScoringPool) -> None:
    verifier = VERIFIERS["reasoning_gym"]
    for name in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24"):
        extra = {"numbers": [1, 2], "target": 3, "valid_answers": ["x"]}
        row = {"question": "q", "answer": "right", "metadata": {"source_dataset": name, **extra}}
        for payload in PAYLOADS:
            verdict = await pool.score(
                verifier, verifier.parse_task(row, verifier.settings()), text(f"<answer>{payload}</answer>")
            )
            assert isinstance(verdict, Verdict)
            assert verdict.reward <= 0.01
    assert not Path("/tmp/from-an-answer").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["reasoning_gym", "math_with_judge_library"])
async def test_the_jail_changes_no_score(pool: ScoringPool, name: str) -> None:
    verifier = VERIFIERS[name.removesuffix("_library")]
    for case in golden(f"env/{name}.json").get("cases", []):
        try:
            task = verifier.parse_task(case["row"], verifier.settings())
        except ValueError:
            continue
        verdict = await pool.score(verifier, task, case["response"])
        assert isinstance(verdict, Verdict), verdict
        assert verdict.reward == case["reward"], case["name"]
