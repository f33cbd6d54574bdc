"""What one Ray node of a job is started with, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.errors import LaunchError, Problem
from tests.ray_logs import write_logs
from tools.job import local, node
from tools.job import node as node_check
from tools.job import node as ray_start
from tools.job.barrier import bring_up_seconds, read_unusable
from tools.job.node import Node, gpu_problems, start_command

ROOT = Path(__file__).resolve().parents[4]
TEMP = ("--temp-dir=/tmp/rl-7-0-ab", "--cache=/tmp/none")


def make_node(tmp_path: Path, *, is_head: bool) -> Node:
    paths = {"log_dir": tmp_path, "temp": Path("/tmp/rl-7-0-ab"), "cache": tmp_path / "cache"}
    return Node(is_head=is_head, head="n1", num_nodes=2, units=8, **paths)


@pytest.mark.parametrize(
    ("devices", "has_driver", "is_refused"),
    [(8, True, False), (16, True, False), (7, True, True), (0, True, True), (0, False, False), (4, False, True)],
)
def test_missing_gpus_are_named_and_a_machine_without_a_driver_uses_its_cpus(devices, has_driver, is_refused):
    problems = gpu_problems(8, devices, has_driver=has_driver)
    assert bool(problems) == is_refused
    if problems:
        assert f"got {devices} GPUs, expected 8" in str(problems[0])


def test_a_node_says_what_the_job_decided(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_start, "count_gpus", lambda: 8)
    monkeypatch.setattr(ray_start, "own_address", lambda: "10.0.0.7")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    head = start_command(make_node(tmp_path, is_head=True))
    worker = start_command(make_node(tmp_path, is_head=False))
    for command in (head, worker):
        assert "--num-gpus=8" in command
        assert '--resources={"worker_units": 8}' in command
        assert "--node-ip-address=10.0.0.7" in command
        assert "--node-name=gpu-7" in command, "which may differ from the host's"
        assert not [word for word in command if word.startswith("--object-store-memory")]  # Ray's own share
    assert "--port=1200" in head and "--temp-dir=/tmp/rl-7-0-ab/ray" in head
    assert "--address=n1:1200" in worker
    assert "--address=[fd00::2]:1200" in start_command(replace(make_node(tmp_path, is_head=False), head="fd00::2"))


@pytest.mark.parametrize(("address", "own"), [("10.0.0.7", "10.0.0.7"), ("127.0.1.1", ""), ("fd00::2", "fd00::2"),
                                              ("::1", "")])  # fmt: skip
def test_a_node_tells_no_address_that_means_only_itself(monkeypatch, address, own):
    monkeypatch.setattr(ray_start, "address_of", lambda _name: address)
    assert ray_start.own_address() == own


def test_a_node_without_gpus_offers_none_and_keeps_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_start, "count_gpus", lambda: 0)
    monkeypatch.setattr(ray_start, "own_address", lambda: "")
    command = start_command(make_node(tmp_path, is_head=True))
    assert "--num-gpus=0" in command
    assert f"--object-store-memory={256 * 2**20}" in command
    assert not [word for word in command if word.startswith("--node-ip-address")]  # Ray finds it out itself


class StoodByError(Exception):
    """The node would now stay until the job ends."""


@pytest.fixture(autouse=True)
def stands_by(monkeypatch):
    def pause():
        raise StoodByError

    monkeypatch.setattr(node.signal, "pause", pause)


def test_a_node_with_a_busy_port_says_so_and_stands_by(tmp_path, monkeypatch, capsys):
    (tmp_path / "nodes").touch()
    monkeypatch.setattr(node_check, "PORT_SECONDS", 0.0)
    monkeypatch.setattr(
        node_check,
        "busy_ports",
        lambda _ports: [Problem(where="port 1200", got="in use by pid 7", expected="a free port", fix="x")],
    )
    monkeypatch.setattr(node_check, "count_gpus", lambda: 0)
    arguments = ["--role=worker", "--head=n1", "--num-nodes=2", "--units=1", f"--log-dir={tmp_path}", *TEMP]
    monkeypatch.setattr(node, "STOPS", ())
    monkeypatch.setattr(node, "adopt_orphans", lambda: None)  # of the process that runs these tests
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    with pytest.raises(StoodByError):
        node.main(arguments)
    assert "node: port 1200: got in use by pid 7" in capsys.readouterr().err
    found = read_unusable(tmp_path, ["n1", "n2.domain", "n22"])
    assert list(found) == ["n2.domain"]
    assert found["n2.domain"].startswith("port 1200: got in use by pid 7, expected a free port")


def test_a_shared_file_system_may_show_the_run_directory_late(tmp_path):
    log_dir = tmp_path / "attempt_1"
    shown = threading.Timer(0.5, lambda: (log_dir.mkdir(), (log_dir / "nodes").touch()))
    shown.start()
    assert node_check.sight_problems(log_dir) == []
    shown.join()


def test_a_node_that_does_not_see_the_run_directory_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node_check, "SIGHT_SECONDS", 0.0)
    monkeypatch.setattr(node_check, "busy_ports", lambda _ports: [])
    arguments = ["--role=worker", "--head=n1", "--num-nodes=2", "--units=1", f"--log-dir={tmp_path}/elsewhere", *TEMP]
    monkeypatch.setattr(node, "STOPS", ())
    monkeypatch.setattr(node, "adopt_orphans", lambda: None)  # of the process that runs these tests
    assert node.main(arguments) == 69
    with pytest.raises(StoodByError):  # the job can go on without it, and a node that ends would end its step
        node.main([*arguments, "--spares=1"])
    assert f"no file {tmp_path}/elsewhere/nodes, which the job's first node has written" in capsys.readouterr().err


REFUSED = Problem(where="containers of tasks by bwrap", wrong="user namespaces cannot be made: no", fix="let users")


@pytest.mark.parametrize(
    ("image", "refused", "seconds", "said"),
    [
        ("/sif/a.sif", REFUSED, 60.0, f"node: {socket.gethostname()}: {REFUSED}"),
        (
            "/sif/a.sif",
            None,
            0.01,
            f"node: {socket.gethostname()}: a container of /sif/a.sif did not start, work and end",
        ),
        ("", REFUSED, 60.0, ""),
    ],
)
def test_a_node_that_cannot_start_a_container_stands_by_before_ray_starts(
    tmp_path, monkeypatch, capsys, image, refused, seconds, said
):
    async def check(_runtime, _image):
        if refused:
            raise LaunchError(refused)
        await asyncio.sleep(60)

    (tmp_path / "nodes").touch()
    monkeypatch.setattr(node_check, "CONTAINER_SECONDS", seconds)
    monkeypatch.setattr(node_check, "busy_ports", lambda _ports: [])
    monkeypatch.setattr(node_check, "count_gpus", lambda: 0)
    monkeypatch.setattr(node_check, "ephemeral_overlap", lambda _text: [])
    monkeypatch.setattr(node_check, "runtime_of_machine", lambda: None)
    monkeypatch.setattr(node_check, "check_runtime", check)
    started = []
    monkeypatch.setattr(node, "make_private", lambda *_, **__: started.append(1) or os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(node, "run_ray", lambda *_: 3)
    monkeypatch.setattr(node, "wait_for_head", lambda _node: None)
    for ends in ("end_ray", "clear_abandoned", "keep_logs", "adopt_orphans"):
        monkeypatch.setattr(node, ends, lambda *_: None)
    monkeypatch.setattr(node, "open_cache", lambda *_: None)
    monkeypatch.setattr(node, "STOPS", ())
    arguments = ["--role=worker", "--head=n1", "--num-nodes=2", "--units=1", f"--log-dir={tmp_path}", *TEMP]
    with pytest.raises(StoodByError) if image else nullcontext():
        assert node.main([*arguments, f"--task-image={image}"]) == 1
    assert bool(started) == (not image)
    assert said in capsys.readouterr().err


FAILS_FIRST = """
echo x >>"$0"
(($(wc -l <"$0") > 1)) || { echo 'no answer within 30 s'; exit 1; }
echo 'Ray runtime started.'
exit 3
"""


@pytest.mark.parametrize(
    ("program", "calls", "tries"),
    [
        (FAILS_FIRST, 2, 1),
        ('echo x >>"$0"; echo "Ray runtime started."; exit 3', 1, 0),
        ('echo x >>"$0"; exit 3', 2, 1),
    ],
)
def test_a_ray_that_ends_before_it_has_started_is_tried_once_more(tmp_path, monkeypatch, capfd, program, calls, tries):
    count = tmp_path / "count"
    monkeypatch.setattr(ray_start, "start_command", lambda _node: ["bash", "-c", program, str(count)])
    for ends in ("kill_descendants", "reap_orphans"):
        monkeypatch.setattr(ray_start, ends, lambda **_: None)  # of the process that runs these tests
    monkeypatch.setattr(ray_start, "allow_open_files", lambda: None)
    node = replace(make_node(tmp_path, is_head=True), temp=tmp_path)
    write_logs(tmp_path)
    assert ray_start.run_ray(node, {}) == 3
    assert count.read_text(encoding="utf-8").count("x") == calls
    assert capfd.readouterr().err.count("before it had started; once more") == tries
    assert bool(list((tmp_path / "ray").iterdir())) == (tries == 0)  # the second begins afresh


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_stop_ends_the_node_in_order_and_its_logs_leave_it(tmp_path, number):
    program = (
        "import sys, time; from tools.job import node\n"
        "def run_ray(n, _variables):\n"
        "    logs = n.temp / 'ray' / 'session_2026' / 'logs'; logs.mkdir(parents=True)\n"
        "    (logs / 'raylet.out').write_text('why'); print('up', flush=True); time.sleep(300); return 0\n"
        "node.require_usable = lambda _node: None; node.run_ray = run_ray; sys.exit(node.main(sys.argv[1:]))"
    )
    (tmp_path / "tmp").mkdir()
    words = ["--role=head", "--head=n1", "--num-nodes=2", "--units=1", f"--log-dir={tmp_path}"]
    words += [f"--temp-dir={tmp_path}/tmp/rl-7-0-ab", f"--cache={tmp_path}/cache"]
    with subprocess.Popen([sys.executable, "-c", program, *words], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
    assert process.returncode == 0
    assert not (tmp_path / "tmp" / "rl-7-0-ab").exists()
    assert [path.read_text(encoding="utf-8") for path in tmp_path.glob("ray_*/raylet.out")] == ["why"]


def test_more_nodes_have_more_time_to_come_up():
    assert bring_up_seconds(183) > bring_up_seconds(4) >= 1800


@pytest.mark.parametrize(
    ("gpus", "free_mib", "limit", "named"),
    [
        (8, 64, 4096, ["n7: /dev/shm: got 64 MiB free, expected 512 MiB: 256 MiB for Ray's object store, 256 MiB for"]),
        (0, 64, 4096, ["n7: /dev/shm: got 64 MiB free, expected 256 MiB: 256 MiB for Ray's object store"]),
        (8, 512, 4096, []),
        (8, 512, 64, ["n7: got a limit of 64 open files, expected at least 256 open files for each process"]),
        (0, 64, 64, ["n7: got a limit of 64 open files", "n7: /dev/shm: got 64 MiB free"]),
    ],
)  # fmt: skip
def test_a_node_with_little_shared_memory_or_few_descriptors_is_named(
    tmp_path, monkeypatch, gpus, free_mib, limit, named
):
    usage = shutil.disk_usage(tmp_path)._replace(free=free_mib * 2**20)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _path: usage)
    limits = {resource.RLIMIT_NOFILE: (limit, limit), resource.RLIMIT_NPROC: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(local.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(local, "control_groups", lambda _controller: [])
    monkeypatch.setattr(node.socket, "gethostname", lambda: "n7")
    monkeypatch.setattr(node, "count_gpus", lambda: gpus)
    monkeypatch.setattr(node, "sight_problems", lambda _directory: [])
    monkeypatch.setattr(node, "busy_ports", lambda _ports: [])
    monkeypatch.setattr(node, "ephemeral_overlap", lambda _text: [])
    problems = []
    try:
        node.require_usable(make_node(tmp_path, is_head=True))
    except LaunchError as error:
        problems = [str(problem) for problem in error.problems]
    assert len(problems) == len(named)
    assert all(problem.startswith(text) for problem, text in zip(problems, named, strict=True))
