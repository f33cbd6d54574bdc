"""What happens around a local run: others that take ports, an output that cannot be written, an early signal."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.cluster.ports import ray_ports
from recipes.cluster.tuning import KEPT_BACK
from recipes.stop import EXIT_RESUME
from tools.job import local
from tools.job.local import Signals, limit_problems, run_environment, take_slot, watch

ROOT = Path(__file__).resolve().parents[4]


def test_a_slot_with_a_port_that_another_program_took_is_passed_over() -> None:
    ports, held = take_slot()
    held.close()
    with closing(socket.create_server(("127.0.0.1", ports.metrics))):
        others, held = take_slot()
    held.close()
    assert others.gcs != ports.gcs


def test_what_is_copied_to_a_full_disk_is_lost_and_the_copy_goes_on(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from tools.job.local import echo
out, full, log = os.dup(1), os.open("/dev/full", os.O_WRONLY), Path({str(tmp_path / "log")!r})
with echo(log):
    os.dup2(full, 1)
    log.write_text("first\\n", encoding="utf-8")
    time.sleep(1)
    os.dup2(out, 1)
    with log.open("a") as file:
        file.write("second\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("second\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_start_weights_are_checked_means_start_it_again(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import os, time
from pathlib import Path
from tools.job import local
def check(*_):
    os.kill(os.getpid(), {int(number)})
    time.sleep(30)
local.with_start_weights = check
local.supervise(local.LocalRun(run_dir=Path({str(tmp_path)!r}), command=("true",), num_units=1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, preexec_fn=take_signals
    )
    assert done.returncode == EXIT_RESUME, done.stderr


def take_signals() -> None:
    """End at each signal: a shell has a program that runs in the background ignore some, and what that starts, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def sleeping() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two programs that handle no signal, as a driver and a head; they are ended after the test."""
    programs = [subprocess.Popen(["sleep", "60"], preexec_fn=take_signals) for _ in range(2)]
    yield programs
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_a_driver_that_still_loads_means_start_it_again(
    sleeping: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals.forward_to(driver)
    signals._handle(number, None)
    assert watch(driver, head, signals, set()) == EXIT_RESUME


def test_a_signal_that_comes_while_the_driver_is_started_reaches_it(
    sleeping: list[subprocess.Popen[bytes]],
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals._handle(signal.SIGTERM, None)
    signals.forward_to(driver)
    driver.wait(timeout=30)
    assert watch(driver, head, signals, set()) == EXIT_RESUME


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_another_program_ends_has_failed(
    sleeping: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    driver, head = sleeping
    signals = Signals()
    signals.forward_to(driver)
    driver.send_signal(number)
    assert watch(driver, head, signals, set()) == 128 + number


def test_why_ray_ended_is_said_in_the_systems_own_words(tmp_path: Path) -> None:
    log = tmp_path / "ray_head.log"
    log.write_text(
        "Local node IP: 127.0.0.1\n[E 1] raylet.cc: Check failed: Too many open files\n*** SIGABRT\n @ 0x7f",
        encoding="utf-8",
    )
    assert local.cause_of_end(log) == "[E 1] raylet.cc: Check failed: Too many open files"
    log.write_text("one\nlast\n", encoding="utf-8")
    assert local.cause_of_end(log) == "last"
    log.write_text("", encoding="utf-8")
    assert local.cause_of_end(log) == "no output"


HOSTILE = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "TP_SOCKET_IFNAME": "eth0",
    "VLLM_HOST_IP": "192.0.2.2",
    "VLLM_LOOPBACK_IP": "192.0.2.2",
    "RAY_ADDRESS": "192.0.2.2:6379",
    "RAY_AUTH_MODE": "disabled",
    "RAY_AUTH_TOKEN": "known",
    "RAY_AUTH_TOKEN_PATH": "/known",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_NODE_IP_ADDRESS": "192.0.2.2",
    "RAY_OVERRIDE_RESOURCES": '{"worker_units": 0}',
    "RAY_RUNTIME_ENV_HOOK": "os.system",
    "RAY_TMPDIR": "/known",
    "RAY_USE_TLS": "1",
    "HF_HUB_OFFLINE": "0",
    "OMP_NUM_THREADS": "64",
    "TMPDIR": "/known",
    **dict.fromkeys(KEPT_BACK, "1"),
}


def test_a_hostile_shell_changes_nothing_that_the_launch_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: 0)
    clean = run_environment(tmp_path, ray_ports(0))
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("http_proxy", "http://192.0.2.3:3128")
    monkeypatch.setenv("no_proxy", "intranet")
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "777")
    monkeypatch.setenv("LD_PRELOAD_OF_MINE", "kept")
    env = run_environment(tmp_path, ray_ports(0))
    assert {name: env.get(name) for name in HOSTILE} == {
        name: env["RAY_AUTH_TOKEN"] if name == "RAY_AUTH_TOKEN" else clean.get(name) for name in HOSTILE
    }
    assert len(env["RAY_AUTH_TOKEN"]) == 64 and env["RAY_AUTH_TOKEN"] != clean["RAY_AUTH_TOKEN"]
    assert env["RAY_AUTH_MODE"] == "token" and env["VLLM_HOST_IP"] == "127.0.0.1" and env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env["no_proxy"] == "intranet,127.0.0.1,localhost" and env["NO_PROXY"].endswith("127.0.0.1,localhost")
    assert env["RAY_worker_register_timeout_seconds"] == "777" and env["LD_PRELOAD_OF_MINE"] == "kept"


def test_a_slurm_job_keeps_back_the_same_variables() -> None:
    text = (ROOT / "tools/job/steps.sh").read_text(encoding="utf-8")
    assert tuple(text.partition("KEPT_BACK=(")[2].partition(")")[0].split()) == KEPT_BACK
    script = text.partition("export_environment() {")[2].partition("\n}\n")[0]
    command = script.partition("  # When the job started")[0]
    arrays = f"readonly -a KEPT_BACK=({' '.join(KEPT_BACK)})"
    hostile = {name: value for name, value in HOSTILE.items() if name != "TMPDIR"} | {"RAY_TLS_SERVER_CERT": "x"}
    done = subprocess.run(
        ["bash", "-euc", f"{arrays}\nf() {{ {command}\n}}\nf; env -0"],
        env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "1", **hostile},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    env = dict(word.split("=", 1) for word in done.stdout.split("\0") if "=" in word)
    assert env["RAY_AUTH_MODE"] == "token" and len(env["RAY_AUTH_TOKEN"]) == 64
    gone = {*KEPT_BACK, "RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "RAY_RUNTIME_ENV_HOOK", "RAY_TLS_SERVER_CERT"}
    assert not gone & env.keys()


def test_another_checkout_in_pythonpath_is_not_run_in_place_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise SystemExit('the other checkout')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = run_environment(tmp_path, ray_ports(0))
    command = [sys.executable, str(ROOT / "recipes" / "run_grpo.py"), "--help"]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert env["PYTHONPATH"].endswith(str(tmp_path))


def test_a_driver_that_the_kernel_ended_for_want_of_memory_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "memory_cause", lambda before: f"the kernel ended {before}")
    signals = Signals(kills={Path("events"): 1})
    assert signals.status_of(1) == 1 and capsys.readouterr().err == ""  # it has said so itself
    assert signals.status_of(-signal.SIGKILL) == 137
    assert capsys.readouterr().err == "local: the kernel ended {PosixPath('events'): 1}\n"


@pytest.fixture
def of_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user with 300 threads, in no control group that bounds them."""
    limits = {resource.RLIMIT_NOFILE: (4096, 4096), resource.RLIMIT_NPROC: (1000, 2000)}
    monkeypatch.setattr(local.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(local.os, "getuid", lambda: 7)
    mine = SimpleNamespace(info={"uids": SimpleNamespace(real=7), "num_threads": 300})
    others = SimpleNamespace(info={"uids": SimpleNamespace(real=8), "num_threads": 5000})
    hidden = SimpleNamespace(info={"uids": None, "num_threads": None})
    monkeypatch.setattr(local.psutil, "process_iter", lambda _facts: [mine, others, hidden])
    monkeypatch.setattr(local, "control_groups", lambda _controller: [])


@pytest.mark.usefixtures("of_no_root")
def test_too_few_threads_for_a_run_are_told_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert limit_problems(3) == []  # 700 are free, and 650 are needed
    [problem] = limit_problems(4, where="n7")
    assert str(problem) == (
        "n7: got room for 700 more processes and threads (ulimit -u is 1000, 300 are in use), expected 800: 200 for "
        "Ray and the driver, 150 for each of 4 worker units; raise the limit of processes (ulimit -u), or end other "
        "programs"
    )
    monkeypatch.setattr(local.os, "getuid", lambda: 0)  # whom the kernel does not count
    assert limit_problems(4) == []
    monkeypatch.setattr(local, "control_groups", lambda controller: [tmp_path] if controller == "pids" else [])
    for limit, is_enough in (("max", True), ("900", True), ("512", False)):
        (tmp_path / "pids.max").write_text(f"{limit}\n", encoding="utf-8")
        (tmp_path / "pids.current").write_text("50\n", encoding="utf-8")
        problems = limit_problems(4)
        assert bool(problems) != is_enough
    assert f"room for 462 more processes and threads (pids.max of {tmp_path} is 512, 50" in str(problems[0])
    assert "--pids-limit" in problems[0].fix
