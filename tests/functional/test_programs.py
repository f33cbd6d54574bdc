"""Programs of answers in a real sandbox: every recorded case, programs that cheat or attack, servers that end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from below import below
from small_root import require
from speed import patiently
from test_environments_http import served

from recipes.config.tree import build
from recipes.environments.contract.http import JsonClient
from recipes.environments.contract.settings import NoSettings, SandboxSettings
from recipes.environments.contract.verifier import Execution, NoVerdict, Verdict, advance, message_item
from recipes.environments.instances import VERIFIERS
from recipes.environments.sandbox import server as sandbox_server
from recipes.environments.sandbox.client import SandboxClient, client_of
from recipes.environments.sandbox.server import SandboxFailedError, SandboxServer
from recipes.environments.scoring.clients import HttpVerifier, InProcessVerifier
from recipes.environments.scoring.pool import ScoringPool
from recipes.environments.verifiers import code_gen as code_gen_module
from recipes.environments.verifiers.checks import program_harness
from tests.recorded import golden, recorded, skip_where_missing

pytestmark = pytest.mark.functional

SECRET = "the-answer-that-nobody-may-see"


@pytest.fixture(scope="module")
def server() -> Iterator[SandboxServer]:
    require("bwrap", "prlimit", "setpriv")
    made = SandboxServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    made = ScoringPool(num_workers=1)
    yield made
    made.close()


@pytest.fixture
async def http() -> AsyncIterator[JsonClient]:
    client = JsonClient()
    yield client
    await client.close()


def verifier_in(
    server: SandboxServer, name: str, pool: ScoringPool, http: JsonClient, **settings: Any
) -> InProcessVerifier:
    """Return a verifier that runs programs in the sandbox of `server`."""
    made = build(VERIFIERS[name].settings, settings)
    return InProcessVerifier(
        name=name,
        verifier=VERIFIERS[name],
        settings=made,
        pool=pool,
        timeout_seconds=60,
        sandbox=client_of(made, server, http),
    )


@pytest.fixture
def code_gen(server: SandboxServer, pool: ScoringPool, http: JsonClient) -> InProcessVerifier:
    return verifier_in(server, "code_gen", pool, http, unit_test_timeout_secs=0.5)


async def scored(
    verifier: InProcessVerifier, code: str, outputs: tuple[str, ...] = (SECRET,), fn_name: str | None = None
) -> Verdict | NoVerdict:
    tests = {"inputs": [str(n) for n in range(len(outputs))], "outputs": list(outputs), "fn_name": fn_name}
    answer = {"output": [message_item(f"```python\n{code}\n```")]}
    return await verifier.verify({"verifier_metadata": {"unit_tests": tests}}, answer)


# Recorded cases that are decided otherwise here, and what they earn.
DECIDED = {"open_zero": 1.0}  # standard input can be opened by its number, as Python has it


@pytest.mark.timeout(300)
async def test_every_recorded_case(code_gen: InProcessVerifier) -> None:
    cases = golden("env/code_gen.json").get("cases", [])
    skip_where_missing(cases, "cases in code_gen")
    verdicts = await asyncio.gather(*(code_gen.verify(case["row"], case["response"]) for case in cases))
    for case, verdict in zip(cases, verdicts, strict=True):
        assert isinstance(verdict, Verdict), (case["name"], verdict)
        reward = DECIDED.get(case["name"], case["reward"])
        assert verdict.reward == reward, (case["name"], verdict.reason)


async def test_real_rows_over_http_as_in_process(code_gen: InProcessVerifier) -> None:
    path = recorded("GYM_EXAMPLES_DIR", "gym_examples") / "code_gen.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    programs = ["print(input())", "import sys\nprint(sys.stdin.read().count('0'))", "1/0"]
    answers = [{"output": [message_item(f"```python\n{code}\n```")]} for code in [*programs, "x = ("]]
    # The first tests of a row can be answered by a table of them, which only somebody who knows them can write.
    tests = rows[0]["verifier_metadata"]["unit_tests"]
    table = dict(zip(tests["inputs"], tests["outputs"], strict=True))
    answers.append({"output": [message_item(f"```python\nimport sys\nprint({table!r}[sys.stdin.read()])\n```")]})
    with served("code_gen", "--set", "unit_test_timeout_secs=0.5") as (url, _):
        remote = HttpVerifier(name="code_gen", url=url, timeout_seconds=60)
        pairs = [(row, answer) for row in rows for answer in answers]
        here = await asyncio.gather(*(code_gen.verify(row, answer) for row, answer in pairs))
        there = await asyncio.gather(*(remote.verify(row, answer) for row, answer in pairs))
        await remote.http.close()
    assert here == there
    assert [verdict.reward for verdict in here if isinstance(verdict, Verdict)] == [0, 0, 0, 0, 1] + [0] * 20


WAYS_TO_READ_AND_WRITE = (
    # Code, standard input, what Python prints.
    ("n = int(input())\ninput()\nprint(n + int(input()))", "2\n\n3\n", "5\n"),
    ("print(len(input()))", "\n", "0\n"),
    ("from sys import stdin, stdout\nstdout.write(str(int(stdin.readline()) + 1))", "4\n", "5"),
    ("from sys import stdin\nprint([line for line in stdin])", "a\n\nb", "['a\\n', '\\n', 'b']\n"),
    ("import sys\nread = sys.stdin.readline\nprint([read(), read(), read(), read()])", "1\n\n3", None),
    ("import sys\nprint(input(), len(sys.stdin.readlines()), sys.stdin.read())", "1\n2\n3\n", "1 2 \n"),
    ("import sys\nprint(input(), sys.stdin.buffer.read())", "1\n2\n", "1 b''\n"),
    ("import sys\nprint(sys.stdin.buffer.readline(), sys.stdin.readline())", "1\n2\n", None),
    ("print(sum(map(int, open(0))))", "1\n2\n", "3\n"),
    ("print(open('/dev/stdin').read())", "x", "x\n"),
    ("import os\nprint(os.read(0, 1 << 20).split())", "1 2", "[b'1', b'2']\n"),
    ("import os, io\nf = io.BytesIO(os.read(0, os.fstat(0).st_size))\nprint(f.readline())", "1\n2", "b'1\\n'\n"),
    ("import fileinput\nprint(*(int(line) for line in fileinput.input()))", "1\n2\n", "1 2\n"),
    ("import sys\nprint(sys.stdin.name, sys.stdin.fileno(), sys.stdout.encoding)", "", "<stdin> 0 utf-8\n"),
    ("import sys\nsys.stdout.buffer.write(b'5')\nprint(6, end='')", "", None),
    ("import sys\nprint(1, flush=True)\nsys.stdout.buffer.write(b'2')", "", "1\n2"),
    ("out = open(1, 'w')\nout.write('never closed')", "", "never closed"),
    ("import os\nos.write(1, b'7')", "", "7"),
    ("import atexit\natexit.register(print, 'last')\nprint('first')", "", "first\nlast\n"),
    ("import threading\nthreading.Thread(target=lambda: print(input())).start()", "7", "7\n"),
    ("import subprocess\nprint(subprocess.run(['cat'], capture_output=True).stdout)", "7", "b'7'\n"),
    ("print(1)\nquit()\nprint(2)", "", "1\n"),
    ("print(1)\nimport sys\nsys.exit('with a text')", "", "1\n"),
    ("import os\nprint(os.getcwd() > '', flush=True)\nos._exit(0)", "", "True\n"),
    (
        "count = 0\ndef add():\n    global count\n    count += 1\nadd()\nprint(count, 'count' in globals())",
        "",
        "1 True\n",
    ),
    ("from __future__ import annotations\nprint(input())", "x", "x\n"),
    ("def main():\n    print(1)\nif __name__ == '__main__':\n    main()\nx = 1", "", "1\n"),
    ("if '__main__' == __name__:\n    print(1)", "", "1\n"),
    ("class A:\n    def f(self, n): return n and A().f(n - 1) + n\nprint(A().f(9))", "", "45\n"),
    ("print(repr(input()), repr(input()))", "1\r\nab\r\n", "'1\\r' 'ab\\r'\n"),
    ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)", "", "A\n"),
    ("import builtins, sys\nbuiltins.input = sys.stdin.readline\nprint(repr(input()))", "a\n", "'a\\n'\n"),
    ("print(pow(2, 10, 1000), open.__module__)", "", None),
    ("print(Counter('aab').most_common(1), math.gcd(4, 6), List)", "", "[('a', 2)] 2 typing.List\n"),
    ("\ufeffprint('\u4e2d\u6587', input())", "\u00e9", "\u4e2d\u6587 \u00e9\n"),
    ("n = 0\ntry:\n    while True: n += len(input())\nexcept EOFError:\n    print(n)", "ab\n\nc", "3\n"),
)
UNASKED = "Counter("  # a name that only the harness has


async def test_a_program_reads_and_writes_as_python_has_it(
    server: SandboxServer, http: JsonClient, tmp_path: Path
) -> None:
    """What the table leaves out is asked of this machine's Python; what it says, too."""
    client, main, file = client_of(NoSettings(), server, http), tmp_path / "main.py", tmp_path / "input"
    for code, given, expected in WAYS_TO_READ_AND_WRITE:
        main.write_text(code, encoding="utf-8")
        file.write_bytes(given.encode())
        words = [sys.executable, "-I", "-X", "utf8", str(main)]
        with file.open("rb") as stdin:
            plain = subprocess.run(words, stdin=stdin, capture_output=True, timeout=patiently(30), check=False)
        if UNASKED not in code:
            assert expected in (None, plain.stdout.decode()), code
        wanted = plain.stdout.decode() if expected is None else expected
        task = code_gen_module.Task(inputs=(given,), outputs=(wanted,), fn_name=None, seconds=10.0, format_reward=0.0)
        (reply,) = await client.run(advance(code_gen_module._score_by_running(code, task), []))  # type: ignore[arg-type]
        assert json.loads(reply["stdout"].splitlines()[1]) == {"output": wanted}, (code, reply)


def test_a_stop_from_outside_uses_nothing_of_a_tests_time() -> None:
    """As on a machine that gives nobody of them a processor: the clock runs on, and that is all."""
    harness = [sys.executable, "-I", str(program_harness.__file__)]
    code = "import time\ntime.sleep(0.5)\nprint(input())"
    request = json.dumps({"code": code, "inputs": ["7"], "fn_name": None, "seconds": 1.5})
    with subprocess.Popen(harness, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        process.stdin.close()
        end = time.monotonic() + patiently(30)
        while not (pids := below(process.pid)):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        for number, seconds in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
            for pid in (process.pid, *pids):
                os.kill(pid, number)
            time.sleep(seconds)
        assert process.stdout.read() == '{"ready": true}\n{"output": "7\\n"}\n'


async def test_each_test_begins_with_a_new_process(code_gen: InProcessVerifier) -> None:
    code = "import builtins\nbuiltins.seen = getattr(builtins, 'seen', 0) + 1\nprint(builtins.seen)"
    verdict = await scored(code_gen, code, ("1",) * 6)
    assert isinstance(verdict, Verdict) and verdict.reward == 1.0, verdict


# Where a program could look for what its tests expect. Each prints what it finds, and must not find SECRET.
SEARCHES = {
    "objects": "import gc\nprint([o for o in gc.get_objects() if 'the-answer' in repr(o)][:1])",
    "frames": "f = sys._getframe()\nwhile f:\n    print(f.f_locals, f.f_globals)\n    f = f.f_back",
    "files": "import glob\nfor p in glob.glob('/tmp/*') + glob.glob('/proc/*/[ce][mn][dv]*'):\n"
    "    print(io.open(p, 'rb').read())",
    "descriptors": "import os\nfor fd in range(3, 40):\n    try: print(os.pread(fd, 1 << 20, 0))\n"
    "    except OSError: pass",
    "the memory of its process": "for line in io.open('/proc/self/maps'):\n    if 'rw-p' in line:\n"
    "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "        with io.open('/proc/self/mem', 'rb') as m:\n            m.seek(low)\n"
    "            print(b'the-answer-that' in m.read(high - low))",
    "the rows on the disk": "import subprocess\nprint(subprocess.run(['grep', '-rhs', 'the-answer', 'PLACE', '/tmp', "
    "'/home', '/root', '/var'], capture_output=True).stdout)",
}
# Programs that try to be called right, to take the harness apart, or to hurt the machine.
CHEATS = {
    "a printed verdict": "print('{\"reward\": 1.0}')\nprint('True')\nprint('PASSED')",
    "a clean exit": "sys.exit(0)",
    "a hard exit": "import os\nos._exit(0)",
    "an exit at the end": "import atexit\natexit.register(lambda: print('passed'))",
    "a signal to itself": "import _posixsubprocess, signal\nsignal.raise_signal(9)",
    "its parents": "import posix\nfor p in (1, posix.getppid(), -1):\n    try: posix.kill(p, 9)\n"
    "    except OSError: pass",
    "a report of its own": "import os\nfor fd in range(3, 40):\n"
    '    try: os.write(fd, b\'{"output": "", "passed": true, "reward": 1}\\n\')\n    except OSError: pass',
    "equality of its own": "class E(str):\n    __eq__ = lambda *_: True\n    __hash__ = None\nprint(E('x'))",
    "other builtins": "import builtins\nbuiltins.print = builtins.len = builtins.str = lambda *_, **__: 'yes'\n"
    "builtins.all = builtins.any = lambda *_: True",
    "another json": "import json\njson.dumps = lambda *_, **__: '{\"value\": true}'\n"
    "json.loads = lambda *_, **__: True",
    "the harness's own functions": "import __main__\n__main__.answer_of = lambda *_: {'output': 'x'}\n"
    "__main__.Reporter.say = lambda *_: None",
    "no clocks": "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0)\nsignal.alarm(0)\n"
    "signal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
    "caught time": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a long sleep": "import time\ntime.sleep(1000)",
    "a long expression": "print(9**9**9**9)",
    "a fork bomb": "import posix\nwhile True:\n    try: posix.fork()\n    except OSError: pass",
    "a thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    "a memory hog": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "a flood": "while True: print('x' * 1000000)",
    "a flood past its output": "import os\nwhile True: os.write(2, b'x' * 1000000)",
    "a flood of reports": "import os\nwhile True:\n    for fd in range(3, 10):\n"
    "        try: os.write(fd, b'x' * 1000000)\n        except OSError: pass",
    "a full disk": "n = 0\nwhile True:\n    io.open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 24))\n    n += 1",
    "deep recursion": "def f(n): return f(n + 1) + f(n + 1)\nf(0)",
    "a sleep past the harness": "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(1000)",
    "work past the harness": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass",
    "a stop": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "a lock that nobody opens": "import threading\nx = threading.Lock()\nx.acquire()\nx.acquire()",
    "a deep value": "x = []\nfor _ in range(10**6): x = [x]\nprint(x)",
    "a process left behind": "import posix, time\nif posix.fork() == 0: time.sleep(1000)",
}


@pytest.mark.parametrize("name", SEARCHES)
async def test_what_a_test_expects_is_nowhere_to_be_found(
    server: SandboxServer, http: JsonClient, name: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(SECRET, encoding="utf-8")
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": [SECRET]}}}
    verifier = VERIFIERS["code_gen"]
    code = SEARCHES[name].replace("PLACE", str(tmp_path))
    answer = {"output": [message_item(f"```python\n{code}\n```")]}
    requests = advance(
        verifier.score(answer, verifier.parse_task(row, verifier.settings(unit_test_timeout_secs=5))), []
    )
    assert isinstance(requests, list)
    (reply,) = await client_of(NoSettings(), server, http).run(requests)  # type: ignore[arg-type]  # a program
    assert '{"output": ' in reply["stdout"] or '{"error": ' in reply["stdout"], reply
    assert SECRET not in reply["stdout"]


@pytest.mark.timeout(300)
async def test_no_cheat_earns_anything_and_the_sandbox_goes_on(code_gen: InProcessVerifier) -> None:
    verdicts = await asyncio.gather(*(scored(code_gen, code) for code in CHEATS.values()))
    for name, verdict in zip(CHEATS, verdicts, strict=True):
        if isinstance(verdict, Verdict):
            assert verdict.reward == 0.0, (name, verdict.reason)
        else:  # it was stopped before it had used its time
            assert "a busy machine" in verdict.reason, (name, verdict)
    honest = await scored(code_gen, "print(int(input()) * 2)", ("0", "2", "4", "6", "8", "10"))
    assert isinstance(honest, Verdict)
    assert honest.reward == 1.0


CALLED = {
    "no function": "x = 1",
    "no such class": "class Solution: pass",
    "an exit": "def f(n): sys.exit(0)",
    "a hard exit": "import os\ndef f(n): os._exit(0)",
    "a report of its own": "import os\ndef f(n): os.write(3, b'{\"passed\": true}\\n')",
    "itself": "def f(n): return f",
    "no JSON": "def f(n): return {1, 2}",
    "a class that fails everywhere": "class E:\n    def __getattribute__(self, name): raise RuntimeError\n"
    "    def __float__(self): raise KeyboardInterrupt\ndef f(n): return E()",
}


@pytest.mark.parametrize("name", CALLED)
async def test_a_function_that_cheats_earns_nothing(code_gen: InProcessVerifier, name: str) -> None:
    verdict = await scored(code_gen, CALLED[name], ('"x"',), fn_name="f")
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.0, verdict.reason


async def test_a_value_that_equals_everything_is_not_believed(code_gen: InProcessVerifier) -> None:
    code = "class E(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(n): return E(3)"
    verdict = await scored(code_gen, code, ("7",), fn_name="f")
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 0.0, verdict.reason


class CountedTask(code_gen_module.Task):
    """A task that counts how often its tests are read."""

    num_reads = 0

    def __getattribute__(self, name: str) -> Any:
        CountedTask.num_reads += name == "inputs"
        return super().__getattribute__(name)


async def test_a_task_is_encoded_once_for_all_runs_of_its_tests(code_gen: InProcessVerifier) -> None:
    task = CountedTask(inputs=("1",) * 12, outputs=("1",) * 12, fn_name=None, seconds=2.0, format_reward=0.0)
    verifier = replace(code_gen.verifier, parse_task=lambda _row, _settings: task)
    CountedTask.num_reads = 0
    verdict = await scored(replace(code_gen, verifier=verifier), "print(1)")
    assert isinstance(verdict, Verdict), verdict
    assert verdict.reward == 1.0
    assert CountedTask.num_reads == 1


async def test_a_server_that_died_is_replaced(code_gen: InProcessVerifier, server: SandboxServer) -> None:
    first = await scored(code_gen, "print(1)", ("1",))
    assert server._process is not None
    os.killpg(server._process.pid, signal.SIGKILL)
    second = await scored(code_gen, "print(1)", ("1",))
    assert isinstance(first, Verdict)
    assert isinstance(second, Verdict), second
    assert first.reward == second.reward == 1.0


async def test_a_machine_that_makes_no_jail_gives_no_verdict(
    pool: ScoringPool, http: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lacking = SandboxServer()
    verdict = await scored(verifier_in(lacking, "code_gen", pool, http), "print(1)", ("1",))
    assert isinstance(verdict, NoVerdict)
    assert "no sandbox could be started here" in verdict.reason
    lacking.close()


async def test_a_verifier_without_a_sandbox_gives_no_verdict(pool: ScoringPool) -> None:
    verifier = InProcessVerifier(
        name="code_gen",
        verifier=VERIFIERS["code_gen"],
        settings=VERIFIERS["code_gen"].settings(),
        pool=pool,
        timeout_seconds=60,
    )
    verdict = await scored(verifier, "print(1)")
    assert isinstance(verdict, NoVerdict)
    assert "it asks a sandbox, and none is configured" in verdict.reason


async def test_the_sandbox_of_a_job_is_asked_where_there_is_one(
    server: SandboxServer, http: JsonClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = await server.address(("127.0.0.1", 1))  # nobody listens there, and there is no token: it is our own
    monkeypatch.setenv("SANDBOX_TOKEN", own.token)
    in_job = SandboxServer()
    host, port = own.url.removeprefix("http://").split(":")
    program = Execution(language="python3", code="print(input() * 2)", stdin="ab", seconds=20)
    (answer,) = await client_of(SandboxSettings(sandbox_host=host, sandbox_port=1), in_job, http).run([program])
    assert answer["stdout"] == "abab\n"
    assert "no sandbox of the job listens at 127.0.0.1:1" in caplog.text
    assert await in_job.address((host, int(port))) == own  # though one of its own runs by now
    (answer,) = await client_of(SandboxSettings(sandbox_host=host, sandbox_port=port), in_job, http).run([program])
    assert (answer["process_status"], answer["stdout"]) == ("completed", "abab\n")
    in_job.close()


async def test_a_language_that_is_not_there_is_refused(server: SandboxServer, http: JsonClient) -> None:
    client = SandboxClient(server=server, host_port=("127.0.0.1", 6000), max_concurrency=1, http=http)
    with pytest.raises(SandboxFailedError, match="language 'lean4' is not installed here"):
        await client.run([Execution(language="lean4", code="", seconds=5)])


async def test_a_proof_without_lean_gives_no_verdict(
    server: SandboxServer, pool: ScoringPool, http: JsonClient
) -> None:
    verifier = verifier_in(server, "math_formal_lean", pool, http)
    row = {"header": "", "formal_statement": "theorem t : 1 = 1 := by\n"}
    verdict = await verifier.verify(row, {"output": [message_item("rfl")]})
    assert isinstance(verdict, NoVerdict)
    assert "language 'lean4' is not installed here" in verdict.reason
    empty = await verifier.verify(row, {"output": []})
    assert isinstance(empty, Verdict)
    assert empty.reward == 0.0


START = """
import asyncio
from recipes.environments.sandbox.server import SandboxServer
server = SandboxServer()
print(asyncio.run(server.address(("127.0.0.1", 6000))).url, server._process.pid, flush=True)
asyncio.run(asyncio.sleep(1000))
"""


def test_the_server_ends_with_a_process_that_is_killed() -> None:
    root = Path(sandbox_server.__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", START], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        process.kill()
    end = time.monotonic() + patiently(30)
    while (
        Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2][:3]
    ):
        assert time.monotonic() < end, "the server lives on"
        time.sleep(0.05)
