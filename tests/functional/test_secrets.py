"""No secret of a run reaches a file of it or a command line, and another user of the machine cannot hold it up.

One tiny run on this machine has planted keys. While it trains, every process of it is looked at, and another user
tries what can be got, and makes a thousand connections to each of its ports; afterwards every file is looked at, and
the ledger.
"""

from __future__ import annotations

import json
import resource
import shutil
import socket
import stat
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from killing import RunCase, make_case
from listening import beyond_loopback, sockets
from speed import patiently

from recipes.cluster.ports import CEILING, PORT_TABLE

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

LOOK_SECONDS = 1.0
OPEN_FILES = 1024  # that a process of the run may have when it starts, as on most machines
WINDOWS, WINDOW_STEPS = 6, 20  # without a crowd and with it, in turn
MANY, FEW = 1000, 20  # connections of the crowd to a port of the table, and to one that the kernel picked for gloo
NOBODY = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", "/usr/bin/python3", "-I", "-c"]
CROWD = Path(__file__).with_name("crowd.py").read_text(encoding="utf-8")


def processes(mark: str) -> dict[int, dict[str, str]]:
    """Return process id -> environment of every process that carries the mark."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended, or is another user's
            continue
        environ = dict(word.split("=", 1) for word in words if "=" in word)
        if environ.get("LAUNCH_MARK") == mark:
            found[int(path.parent.name)] = environ
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def what_a_neighbour_gets(seen: Mapping[int, Mapping[str, str]], run_dir: Path) -> set[str]:
    """Let another user of this machine try what it can do to these processes and to the files of the run."""
    places = {str(run_dir), *(environ["TMPDIR"] for environ in seen.values() if "TMPDIR" in environ)}
    given = json.dumps({"pids": list(seen), "places": sorted(places)})
    program = Path(__file__).with_name("neighbour.py").read_text(encoding="utf-8")
    done = subprocess.run(
        [*NOBODY, program], cwd="/", input=given, capture_output=True, text=True, check=True, timeout=patiently(60)
    )
    return set(json.loads(done.stdout))


def connections(port: int) -> int:
    """Return how often the crowd connects: its own open files must do for all ports."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    many = MANY if hard == resource.RLIM_INFINITY else min(MANY, hard // 20)
    return many if port < CEILING else FEW


@contextmanager
def crowd(ports: list[int]) -> Iterator[dict[str, dict[str, Any]]]:
    """Let another user connect very often to each port, and stay; yield what became of the connections by port."""
    with subprocess.Popen(
        [*NOBODY, CROWD], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        print(json.dumps({port: connections(port) for port in ports}), file=program.stdin, flush=True)
        yield json.loads(program.stdout.readline())
        program.stdin.close()


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Return a directory that every user of the machine can pass through, unlike those of pytest."""
    place = Path(tempfile.mkdtemp(prefix="neighbours-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@dataclass
class Watch:
    """What the processes of a run, and another user's attempts on it, have shown so far."""

    case: RunCase
    run: subprocess.Popen[bytes]
    mark: str
    tokens: set[str] = field(default_factory=set)
    lines: set[str] = field(default_factory=set)
    open_ports: dict[str, str] = field(default_factory=dict)
    got: set[str] = field(default_factory=set)

    def look(self) -> None:
        seen = processes(self.mark)
        self.tokens |= {environ["RAY_AUTH_TOKEN"] for environ in seen.values() if "RAY_AUTH_TOKEN" in environ}
        self.lines |= {command_line(pid) for pid in seen}
        self.open_ports |= beyond_loopback(seen)
        self.got |= what_a_neighbour_gets(seen, self.case.run_dir)
        time.sleep(LOOK_SECONDS)

    def until_step(self, step: int, *, looks: bool = True) -> None:
        def is_there() -> bool:
            if looks:
                self.look()
            return self.case.steps_done() >= step

        self.case.wait_until(self.run, is_there, f"step {step}")

    def ports(self) -> list[int]:
        return sorted({port for _, port in sockets(processes(self.mark))})


@contextmanager
def started(directory: Path, variables: Mapping[str, str], *, num_steps: int) -> Iterator[Watch]:
    """Start a run that would take long, with as many open files as most machines allow; ask it to end on the way out.

    It must then stop at the next step and save it, with every prompt trained once or to come.
    """
    mark = uuid.uuid4().hex
    case = make_case(directory, num_steps, {"policy.generation.max_new_tokens": 8})
    case = replace(case, environment={**case.environment, **variables, "LAUNCH_MARK": mark})
    with case.started() as run:
        resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        yield Watch(case, run, mark)
        case.stop(run)


def hostile_shell() -> dict[str, str]:
    """Return what profiles of clusters export, and worse: with it a run must not listen beyond this machine."""
    addresses = {
        name: found.address
        for name, interface in psutil.net_if_addrs().items()
        for found in interface
        if found.family == socket.AF_INET and not found.address.startswith("127.")
    }
    name, address = next(iter(addresses.items()), ("eth0", "192.0.2.2"))
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), name)
    hosts = dict.fromkeys(("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "MASTER_ADDR"), address)
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{address}:6379", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    python = {"PYTHONWARNINGS": "error::FutureWarning", "PYTHONSTARTUP": "/nothing", "PYTHONOPTIMIZE": "1"}
    return interfaces | hosts | ray | python | {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "64"}


def test_no_secret_is_in_a_file_or_a_command_line_and_others_cannot_hold_the_run_up(open_place: Path) -> None:
    planted = {"WANDB_API_KEY": uuid.uuid4().hex, "HF_TOKEN": f"hf_{uuid.uuid4().hex}"}
    with started(open_place, planted | hostile_shell(), num_steps=400) as watch:
        watch.until_step(2)
        ports = watch.ports()
        with crowd(ports) as found:
            watch.until_step(watch.case.steps_done() + 5)
    run_dir, output = watch.case.run_dir, watch.case.text()
    check_crowd(ports, found)
    assert len(watch.tokens) == 1, "the run has one token of Ray, and this test has seen it"
    secrets = {**planted, "RAY_AUTH_TOKEN": watch.tokens.pop()}

    for name, secret in secrets.items():
        assert secret not in output, f"{name} is printed"
        assert not [line for line in watch.lines if secret in line], f"{name} is on a command line"
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        assert len(files) > 20
        assert not [str(path) for path in files if secret.encode() in path.read_bytes()], f"{name} is in a file"
    writable = [path for path in run_dir.rglob("*") if not path.is_symlink() and is_open(path)]
    assert not writable, "others could change the run"
    assert watch.open_ports == {}
    assert watch.got == set()


def check_crowd(ports: list[int], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Every port is in the table or was picked by the kernel, all were crowded, and none gave more than an error."""
    assert [
        port for port in ports if port < CEILING and not any(one.low <= port < one.high for one in PORT_TABLE)
    ] == []
    assert found.keys() == {str(port) for port in ports}
    for port, fates in found.items():
        assert sum(fates[fate] for fate in ("waiting", "held", "closed", "refused")) == connections(int(port)), port
        assert "200 OK" not in fates["answer"], port
    assert sum(fates["held"] + fates["closed"] >= FEW for fates in found.values()) >= 8, "few ports were reached"


@pytest.mark.slow
def test_a_crowd_at_its_ports_makes_no_step_dearer_by_a_tenth(open_place: Path) -> None:
    with started(open_place, {}, num_steps=1000) as watch:
        watch.until_step(20, looks=False)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(WINDOWS):
            seconds[False].append(cpu_seconds_per_step(watch))
            with crowd(watch.ports()):
                seconds[True].append(cpu_seconds_per_step(watch))
    ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
    print(f"a step with the crowd takes {ratio:.3f} times the computing time: {seconds}")
    assert ratio < 1.1, seconds


def cpu_seconds_per_step(watch: Watch) -> float:
    """Return what the processes of the run compute for a step, over some steps; other programs do not count."""
    before, start = cpu_seconds(watch.mark), watch.case.steps_done()
    watch.until_step(start + WINDOW_STEPS, looks=False)
    after, end = cpu_seconds(watch.mark), watch.case.steps_done()
    return sum(after[pid] - before[pid] for pid in before.keys() & after.keys()) / (end - start)


def cpu_seconds(mark: str) -> dict[int, float]:
    found = {}
    for pid in processes(mark):
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found


def is_open(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IWOTH)
