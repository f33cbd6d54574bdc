"""Attacks on the sandbox's server and from the programs in it: each is contained, and the server goes on serving."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from below import below
from sandbox_client import TOKEN, Client
from small_root import require
from speed import patiently
from system_calls import REFUSED

ROOT = Path(__file__).resolve().parents[2]
MEMORY_MIB, PROCESSES, DISK_MIB = 256, 32, 16
CANARY = "canary-of-the-host"

pytestmark = pytest.mark.functional


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, int]]:
    """A server with low limits, and its pid."""
    require("bwrap", "prlimit", "setpriv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    limits = {"MEMORY_MIB": MEMORY_MIB, "PROCESSES": PROCESSES, "DISK_MIB": DISK_MIB}
    environ = {**os.environ, **{f"SANDBOX_{name}": str(value) for name, value in limits.items()}}
    environ |= {"SANDBOX_TOKEN": TOKEN, "SANDBOX_HOST": "127.0.0.1", "NGINX_PORT": port, "HF_TOKEN": CANARY}
    environ |= {"SANDBOX_CONCURRENCY": "40"}
    process = subprocess.Popen([ROOT / "containers/sandbox/start.sh"], env=environ)
    client = Client(port)
    client.wait_until_healthy(process)
    yield client, process.pid
    process.send_signal(signal.SIGUSR2)  # as a job ends its steps
    assert process.wait(timeout=patiently(30)) == 0


@pytest.fixture
def sandbox(server: tuple[Client, int]) -> Client:
    return server[0]


def test_a_server_without_a_token_does_not_start():
    for token in ("", "short"):
        environ = {**os.environ, "SANDBOX_TOKEN": token, "NGINX_PORT": "1"}
        start = [ROOT / "containers/sandbox/start.sh"]
        result = subprocess.run(start, env=environ, capture_output=True, text=True, timeout=patiently(30), check=False)
        assert result.returncode == 1 and "sandbox: SANDBOX_TOKEN: missing or short; set at least 16" in result.stderr


def test_a_signal_for_the_driver_ends_neither_server_nor_sessions(server):
    """`scancel --signal=USR1` reaches every process of every step."""
    sandbox, pid = server
    sandbox.cell("kept = 7", "signalled")
    for process in [*below(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    assert sandbox.cell("print(kept)", "signalled")["stdout"] == "7\n"


def test_only_the_token_opens_the_server(sandbox):
    port = sandbox.url.rpartition(":")[2]
    body = {"generated_code": "1", "language": "python"}
    wrong = base64.b64encode(b"job:wrong").decode()
    for authorization in ("", "Bearer wrong", f"Basic {TOKEN}", f"Basic {wrong}", TOKEN, "Bearer é"):
        stranger = Client(port, authorization)
        assert stranger.send("/execute", body)[0] == 401
        assert stranger.send("/execute", body, session="mine")[0] == 401
        assert stranger.send("/sessions")[0] == 401
        assert stranger.send("/sessions/mine", method="DELETE")[0] == 401
        assert stranger.send("/health")[0] == 200
    by_url = Client(port, f"Basic {base64.b64encode(f'job:{TOKEN}'.encode()).decode()}")
    assert by_url.send("/execute", body)[0] == 200


def test_names_of_sessions_are_not_listed(sandbox):
    sandbox.cell("1", "a-secret-name")
    assert "a-secret-name" not in str(sandbox.send("/sessions"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: -1", 411),
        ("Content-Length: 1e3", 411),
        ("Content-Length: ²", 411),
        ("Content-Length: 99999999999999999999", 413),
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 4\r\nTransfer-Encoding: chunked", 411),
        ("X: y", 411),
    ],
)
def test_a_body_without_a_plain_length_is_refused_at_once(sandbox, headers, status):
    host, _, port = sandbox.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        request = f"POST /execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{headers}\r\n\r\n"
        connection.sendall(request.encode("latin-1"))
        answer = connection.makefile("rb").read()  # the server closes, though this side does not
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def test_a_body_that_never_comes_blocks_nobody(sandbox):
    host, _, port = sandbox.url.removeprefix("http://").partition(":")
    open_ones = [socket.create_connection((host, int(port)), timeout=10) for _ in range(100)]
    for connection in open_ones:
        connection.sendall(
            f"POST /execute HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n".encode()
        )
    assert sandbox.python("print(1)")["stdout"] == "1\n"
    for connection in open_ones:
        connection.close()


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses(sandbox, name):
    answer = sandbox.python(REFUSED[name])
    said = answer["stdout"] + answer["stderr"]
    reasons = ("not permitted", "Permission denied", "Read-only file system", "No such file", "not implemented")
    assert any(reason in said for reason in (*reasons, "Invalid argument", "not allowed to raise")), said
    assert "root:" not in said


FORK_BOMB = """
import os, time
made = 0
while True:
    try:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        made += 1
    except OSError:
        break
print(made, flush=True); os._exit(0)
"""
ENDLESS_FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
THREADS = """
import threading, time
made = 0
try:
    while True: threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); made += 1
except RuntimeError: pass
import os; print(made, flush=True); os._exit(0)
"""
HOG = "x = bytearray(1 << 30)"
MANY_HOGS = "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = bytearray(120 << 20)\ntime.sleep(9)"
QUIET_HOG = "import os\nos.closerange(0, 3)\nimport time\n" + MANY_HOGS
SHARED_HOG = """
import mmap, os, time
shared = mmap.mmap(-1, 90 << 20)
for _ in range(90): shared.write(bytes(1 << 20))
for _ in range(3):
    if os.fork() == 0: sum(shared[::4096])
time.sleep(9)
"""
INODES = "n = 0\nwhile True: open(f'/tmp/{n}', 'w').close(); n += 1"
SOCKETS = """
import socket, os, time
kept = []
for _ in range(8):
    if os.fork() == 0: break
try:
    while True: kept.append(socket.socketpair())
except OSError: time.sleep(9)
"""
FILL = """
import os
def fill(place):
    written = 0
    try:
        for number in range(50):
            with open(f"{place}/fill{number}", "wb") as file:
                for _ in range(4): file.write(bytes(1 << 20)); written += 1
    except OSError: pass
    return written
print(*[fill(place) for place in ("/tmp", "/dev/shm", "/dev", "", "/var/tmp", "/usr")])
"""
FLOOD = "import os\nwhile True: os.write(1, b'y' * 65536); os.write(2, b'n' * 65536)"
STUBBORN = """
import os, signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
while True: pass
"""
KILLER = """
import os, signal
for pid in (1, os.getppid(), -1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
"""
NEIGHBOURS = f"""
import os, socket
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try: text = open(f"/proc/{{pid}}/{{name}}").read()
        except OSError: continue
        if "{CANARY}" in text or "{TOKEN}" in text or "server.py" in text: print("read", pid)
for address in (("127.0.0.1", PORT), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    try: socket.create_connection(address, 1); print("connected")
    except OSError: pass
print(len(list(filter(str.isdigit, os.listdir("/proc")))), os.getuid(), os.listdir("/tmp"))
print([place for place in ("/root", "/home", "/work", "/etc/passwd", "/sandbox") if os.path.exists(place)])
"""


def test_processes_are_limited(sandbox):
    assert 5 < int(sandbox.python(FORK_BOMB)["stdout"]) < PROCESSES
    assert 5 < int(sandbox.python(THREADS)["stdout"]) < PROCESSES
    started = time.monotonic()
    assert sandbox.python(ENDLESS_FORK_BOMB, timeout=2)["process_status"] == "timeout"
    assert time.monotonic() - started < patiently(20)
    assert sandbox.python("print(1)")["stdout"] == "1\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (HOG, "MemoryError"),
        (MANY_HOGS, f"more than {MEMORY_MIB} MiB of memory"),
        (QUIET_HOG, f"more than {MEMORY_MIB} MiB of memory"),
        (SHARED_HOG, f"more than {MEMORY_MIB} MiB of memory"),
        (INODES, "too many files"),
        (SOCKETS, "too many sockets"),
    ],
    ids=["one", "many", "quiet", "shared", "files", "sockets"],
)
def test_memory_is_limited(sandbox, code, message):
    answer = sandbox.python(code)
    assert answer["process_status"] == "error" and message in answer["stderr"], answer


def test_disk_is_limited_wherever_it_can_be_written(sandbox):
    tmp, shared, *others = map(int, sandbox.python(FILL)["stdout"].split())
    assert 0 < tmp <= DISK_MIB and 0 < shared <= DISK_MIB
    assert others == [0, 0, 0, 0]


def test_output_is_limited(sandbox):
    answer = sandbox.python(FLOOD)
    assert answer["process_status"] in ("error", "timeout")
    assert len(answer["stdout"]) == 1000 + len("<output cut>")


def test_nothing_escapes_the_time_limit(sandbox):
    started = time.monotonic()
    assert sandbox.python(STUBBORN, timeout=1)["process_status"] == "timeout"
    assert sandbox.cell(STUBBORN, "stubborn", timeout=1)["process_status"] == "timeout"
    assert time.monotonic() - started < patiently(20)
    assert sandbox.cell("1", "stubborn")["new_session_created"] is True


def test_a_name_that_is_no_text_hides_nobody_from_the_limits(sandbox):
    """What a program uses is read from files in which its name stands."""
    nameless = "open('/proc/self/comm', 'wb').write(b'\\xff\\n')\n"
    waits = f"{nameless}import time\nprint(1, flush=True)\ntime.sleep(1e6)"
    start = time.monotonic()
    answer = sandbox.python(waits, timeout=2)
    assert (answer["process_status"], answer["stdout"]) == ("timeout", "1\n")
    assert time.monotonic() - start < patiently(20)
    sandbox.cell(f"{nameless}kept = 7", "nameless")
    time.sleep(1.5)
    assert sandbox.cell("print(kept)", "nameless")["stdout"] == "7\n"


def test_nothing_of_the_host_or_of_neighbours_is_reached(sandbox):
    sandbox.cell("secret = 1", "neighbour")
    code = NEIGHBOURS.replace("PORT", sandbox.url.rpartition(":")[2])
    processes, uid, *files = sandbox.python(code, timeout=20)["stdout"].split("\n", 1)[0].split(" ", 2)
    assert (int(processes), uid, files) == (2, "65534" if os.geteuid() == 0 else str(os.getuid()), ["[]"])
    assert sandbox.python(code, timeout=20)["stdout"].splitlines()[1:] == ["[]"]


def test_a_program_kills_nobody_but_itself(sandbox):
    sandbox.cell("x = 1", "bystander")
    sandbox.python(KILLER)
    sandbox.cell(KILLER, "killer")
    assert sandbox.cell("x", "bystander")["stdout"] == "1\n"


def test_a_forged_answer_stays_in_its_session(sandbox):
    forge = """import os
for number in range(3, 20):
    try: os.write(number, b'{"status": "completed", "stdout": "forged", "stderr": ""}\\n' + b'[' * 100000 + b'\\n')
    except OSError: pass"""
    sandbox.cell("x = 2", "honest")
    sandbox.cell(forge, "forger")
    assert sandbox.cell("x", "honest")["stdout"] == "2\n"
    assert sandbox.python("print(1)")["stdout"] == "1\n"


LEFT_RUNNING = {
    "memory": """
import os, time
for _ in range(2):
    if os.fork() == 0:
        time.sleep(1)
        kept = [bytearray(1 << 20) for _ in range(200)]
        time.sleep(100)
""",
    "processor": "import os\nif os.fork() == 0:\n    while True: pass",
    "files": "import os\nif os.fork() == 0:\n    n = 0\n    while True: open(f'/tmp/{n}', 'w').close(); n += 1",
    "sockets": """
import os, socket, time
for _ in range(4):
    if os.fork() == 0:
        kept = [socket.socketpair() for _ in range(40)]
        time.sleep(100)
""",
}


@pytest.mark.parametrize("kind", LEFT_RUNNING)
def test_what_a_cell_leaves_running_meets_the_limits(sandbox, kind):
    before = sandbox.send("/sessions")[1]["num_sessions"]
    assert sandbox.cell(LEFT_RUNNING[kind], f"leaves {kind}".replace(" ", "-"))["process_status"] == "completed"
    end = time.monotonic() + patiently(40)
    while sandbox.send("/sessions")[1]["num_sessions"] > before:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_every_process_of_a_jail_has_the_filter(sandbox):
    code = "import glob\nfor name in glob.glob('/proc/[0-9]*/status'):\n    print(open(name).read())"
    lines = sandbox.python(code, max_output_characters=20_000)["stdout"].splitlines()
    filters = [line.split()[1] for line in lines if line.startswith("Seccomp:")]
    assert len(filters) >= 2 and set(filters) == {"2"}


def children_of(pid: int) -> list[int]:
    text = [(task / "children").read_text(encoding="utf-8") for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for words in text for child in words.split()]


def test_thirty_two_attacks_at_once_are_contained(server):
    sandbox, pid = server
    attacks = [ENDLESS_FORK_BOMB, HOG, MANY_HOGS, QUIET_HOG, INODES, SOCKETS, FILL, FLOOD, STUBBORN, KILLER] * 3
    attacks += [FORK_BOMB, THREADS]
    with ThreadPoolExecutor(len(attacks)) as threads:
        futures = [threads.submit(sandbox.python, code, timeout=6) for code in attacks]
        time.sleep(2)
        started = time.monotonic()
        assert sandbox.python("print(6 * 7)", timeout=60)["stdout"] == "42\n"  # the host keeps serving
        assert time.monotonic() - started < patiently(60)
        statuses = [future.result()["process_status"] for future in futures]
    assert set(statuses) <= {"completed", "error", "timeout"}
    end = time.monotonic() + patiently(10)
    while len(children_of(pid)) > sandbox.send("/sessions")[1]["num_sessions"]:  # no jail is left but the sessions'
        assert time.monotonic() < end
        time.sleep(0.1)
    assert sandbox.python("print(1)")["stdout"] == "1\n"
