"""Run a driver on a one-node Ray cluster of its own, and leave nothing behind.

    super_launch.sh -> this supervisor -+-> ray start --head --block -> GCS, raylet -> actors -> engine processes
                                        +-> the driver (RAY_ADDRESS set)

The supervisor locks the run directory, takes a slot of the port table, starts the Ray head, then the driver. It
forwards TERM, INT and USR1 to the driver, ends the run when the head dies, and exits with the driver's status, or with
75 (start it again) when the signal came before the driver could handle it. Every process below it is found and ended,
also when the driver was killed; when the supervisor itself is killed, the kernel signals the head and the driver.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

import psutil

from recipes.cluster.ports import NUM_SLOTS, RayPorts, hold, host_port, node_problems, ray_ports
from recipes.cluster.tuning import is_kept_back, with_loopback, worker_environment
from recipes.errors import (
    LaunchError,
    Problem,
    RecipeError,
    RunError,
    control_groups,
    group_limit,
    memory_cause,
    memory_kills,
    resource_problem,
)
from recipes.stop import EXIT_RESUME
from tools.draft.run_dir import lock_run, new_attempt
from tools.job.begin import stop_at_once, with_start_weights
from tools.job.ray_temp import PREFIX, RAY, clear_abandoned, keep_logs, make_private, remove_sessions
from tools.processes import (
    adopt_orphans,
    allow_open_files,
    caught,
    descendants,
    dies_with_parent,
    kill_descendants,
    reap_orphans,
    remove_shared_memory,
    shared_memory_inodes,
)

ROOT = Path(__file__).resolve().parents[2]
TEMP_ROOT = Path("/tmp")
HEAD_SECONDS, HEAD_STARTS = 300.0, 4  # for the Ray head, all its starts together
LOCAL_RUNS = "local runs"  # where a problem is when there are too many of them
RAY_STARTED = b"Ray runtime started"  # what `ray start` of Ray 2 prints last, when its node has registered itself
STOP_SECONDS = 600.0  # for the driver to finish its step and save after a signal
_POLL_SECONDS = 0.1
MIN_OPEN_FILES = 256  # of one process of a run; with 64 the raylet aborts
RAY_THREADS, UNIT_THREADS = 200, 150  # of Ray and the driver, and for each worker unit: a tiny run of two has 380
_SHM_SCAN_SECONDS = 1.0  # a scan takes about 15 ms
SHARED_MEMORY = Path("/dev/shm")
NCCL_BYTES = 32 * 2**20  # of one rank, for its neighbours on the machine
OBJECT_STORE_BYTES = 256 * 2**20  # a tiny run's batches are a few MiB; Ray's default is 30 % of the memory

# What Ray prints before the addresses of its C++ stack, which say nothing to a user.
SYSTEM_WORDS = tuple(
    os.strerror(number)
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.EAGAIN, errno.EADDRINUSE)
)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LOOPBACK = "127.0.0.1"
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # spinning OpenMP threads of two processes on two cores cost a factor of ten
    "TOKENIZERS_PARALLELISM": "false",
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything a run reads is on disk before it starts
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_AUTH_MODE": "token",  # others on this machine cannot run code in the cluster
    # Nothing of a local run listens on another interface, or asks for this machine's address in the network.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_LOOPBACK_IP": LOOPBACK,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # with this Ray itself uses the loopback address, as on a desktop
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """One start of one run."""

    run_dir: Path
    command: tuple[str, ...]  # the driver
    num_units: int  # policy workers plus engine workers: placement gives one to each


@dataclass(slots=True)
class Signals:
    """Forwards TERM, INT and USR1 to the driver, HUP as TERM. One that comes before the driver starts ends the run."""

    driver: subprocess.Popen[bytes] | None = None
    received: list[signal.Signals] = field(default_factory=list)
    stop_by: float | None = None  # monotonic second at which a driver that was told to stop is killed
    kills: Mapping[Path, int] = field(default_factory=memory_kills)  # of the kernel, before the run

    def install(self) -> None:
        for number in caught(*FORWARDED):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        received = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        is_second_interrupt = received == signal.SIGINT and signal.SIGINT in self.received
        self.received.append(received)
        self.stop_by = self.stop_by or time.monotonic() + STOP_SECONDS
        if self.driver is not None:
            self.driver.send_signal(signal.SIGKILL if is_second_interrupt else received)

    def forward_to(self, driver: subprocess.Popen[bytes]) -> None:
        """Forward signals to `driver` from now on, and at once those that came while it was started."""
        self.driver = driver
        for received in tuple(self.received):
            driver.send_signal(received)

    def status_of(self, returncode: int) -> int:
        """Return the status of the run for that of the driver: 128 + N when a signal N ended it that nobody sent here.

        A driver that a forwarded signal ended had no handler for it yet, so it could not say itself what this means.
        """
        if -returncode in self.received:
            print("local: the driver was asked to stop before it could take the signal", file=sys.stderr)
            return EXIT_RESUME
        if returncode == -signal.SIGKILL:  # else the driver has said so itself
            self.say_memory()
        return returncode if returncode >= 0 else 128 - returncode

    def say_memory(self) -> None:
        """Say so when the kernel has ended processes for want of memory."""
        if said := memory_cause(self.kills):
            print(f"local: {said}", file=sys.stderr)


def take_slot() -> tuple[RayPorts, socket.socket]:
    """Take the first slot of the port table whose ports are all free; raises `LaunchError` when there is none.

    A slot without a run may still miss a port: any user of the machine can take one.
    """
    found: list[Problem] = []
    for slot in range(NUM_SLOTS):
        ports = ray_ports(slot)
        try:
            held = hold(ports.lock, host=LOOPBACK)
        except LaunchError:
            continue
        problems = node_problems(ports, head=True)
        if not problems:
            return ports, held
        held.close()
        found = found or problems
    raise LaunchError(
        found
        or Problem(
            where=LOCAL_RUNS,
            wrong=f"{NUM_SLOTS} are in progress on this machine, and more have no ports",
            fix="wait for one to end",
        )
    )


def limit_problems(num_units: int, where: str = "this shell") -> list[Problem]:
    """Return a problem where the processes of a run may open fewer files, or start fewer threads, than they need."""
    problems = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        expected, fix = f"at least {MIN_OPEN_FILES} open files for each process", "raise the hard limit (ulimit -Hn)"
        problems.append(Problem(where=where, got=f"a limit of {hard} open files", expected=expected, fix=fix))
    needed = RAY_THREADS + UNIT_THREADS * num_units
    parts = f"{RAY_THREADS} for Ray and the driver, {UNIT_THREADS} for each of {num_units} worker units"
    for words, limit, used, fix in thread_limits():
        if limit - used < needed:
            got = f"room for {max(0, limit - used)} more processes and threads ({words} is {limit}, {used} are in use)"
            problems.append(Problem(where=where, got=got, expected=f"{needed}: {parts}", fix=fix))
    return problems


def thread_limits() -> list[tuple[str, int, int, str]]:
    """Return what bounds the threads of a run: its name, the limit, how many there are, and what to do."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # the kernel does not count those of root
        own = [one.info for one in psutil.process_iter(["uids", "num_threads"]) if one.info["uids"]]
        used = sum(one["num_threads"] or 0 for one in own if one["uids"].real == os.getuid())
        found.append(("ulimit -u", soft, used, "raise the limit of processes (ulimit -u), or end other programs"))
    for group in control_groups("pids"):
        limit, used = group_limit(group, "pids.max"), group_limit(group, "pids.current") or 0
        if limit is not None:
            fix = "raise it: --pids-limit of the container, TasksMax= of the service"
            found.append((f"pids.max of {group}", limit, used, fix))
    return found


def shared_memory_problems(parts: Mapping[str, int], *, where: str) -> list[Problem]:
    """Return a problem where /dev/shm has not the bytes free that processes will share there, by what they are for."""
    needed = sum(parts.values())
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else needed
    if free >= needed:
        return []
    named = ", ".join(f"{size / 2**20:.0f} MiB for {what}" for what, size in parts.items() if size)
    got, expected = f"{free / 2**20:.0f} MiB free", f"{needed / 2**20:.0f} MiB: {named}"
    fix = "make it larger: mount -o remount,size=..., or the container's --shm-size or --ipc=host"
    return [Problem(where=where, got=got, expected=expected, fix=fix)]


def make_temp(attempt: Path) -> tuple[Path, int]:
    """Make the private directory of Ray and of all temporary files; return it and the descriptor of its lock."""
    clear_abandoned(TEMP_ROOT)
    temp = TEMP_ROOT / f"{PREFIX}{secrets.token_hex(4)}"  # short: see ray_temp.py
    lock = make_private(temp, logs=attempt / "ray")
    (temp / "tmp").mkdir()
    return temp, lock


def count_devices() -> int:
    """Count the NVIDIA devices of this machine without loading a CUDA library."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def count_gpus() -> int:
    """Count the devices that a run in this Python can use: none where torch is a build for processors alone."""
    try:
        return 0 if version("torch").endswith("+cpu") else count_devices()
    except PackageNotFoundError:
        return count_devices()


def run_environment(temp: Path, ports: RayPorts) -> dict[str, str]:
    """Return the environment of head and driver: the shell's, without what would break a promise of the launch.

    What a profile of a cluster exports for all its users must not open this run to them. A shell tunes Ray's timings
    alone. In PYTHONPATH this checkout comes first: another one that the user has there would be run in its place.
    """
    shell = {name: value for name, value in os.environ.items() if not is_kept_back(name)}
    fixed = ENVIRONMENT | ({} if count_gpus() else CPU_ENVIRONMENT)
    fixed |= {
        **{name: with_loopback(shell.get(name, "")) for name in ("no_proxy", "NO_PROXY")},
        "RAY_ADDRESS": host_port(LOOPBACK, ports.gcs),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TMPDIR": str(temp / "tmp"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        **ports.variables(),
    }
    return worker_environment(1) | shell | fixed


def start_head(run: LocalRun, ports: RayPorts, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start the Ray head; it does not answer yet."""
    temp = Path(env["TMPDIR"]).parent
    memory = [] if count_gpus() else [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"),
        *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),  # nobody reads what they show
        f"--temp-dir={temp / RAY}",
        f"--num-gpus={count_gpus()}",
        f"--resources={json.dumps({'worker_units': run.num_units})}",
        *memory,
        *ports.flags(head=True),
    ]
    head_env = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            env=head_env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )


def wait_for_head(head: subprocess.Popen[bytes], signals: Signals, log: Path, *, end: float) -> None:
    """Wait until `ray start` is done; the driver, started earlier, would take its time on a machine of few cores."""
    while RAY_STARTED not in log.read_bytes() and not signals.received:
        if head.poll() is not None:
            raise RunError(f"the Ray head exited with status {head.returncode}: {cause_of_end(log)} (log: {log})")
        if time.monotonic() >= end:
            raise RunError(f"the Ray head has not started after {HEAD_SECONDS:g} s (log: {log})")
        time.sleep(_POLL_SECONDS / 2)


def bring_up_head(
    run: LocalRun, ports: RayPorts, env: dict[str, str], signals: Signals, log: Path
) -> subprocess.Popen[bytes]:
    """Start the Ray head and wait for it; again when it ends.

    Ray gives a node 30 s, and its agents 15, also on a machine that is too busy for that.
    """
    end = time.monotonic() + HEAD_SECONDS
    for number in range(1, HEAD_STARTS + 1):
        head = start_head(run, ports, env, log)
        try:
            wait_for_head(head, signals, log, end=end)
            break
        except RunError as error:
            if head.poll() is None or number == HEAD_STARTS:
                raise
            print(f"local: {error}; starting it again", file=sys.stderr, flush=True)
            kill_descendants(deadline_seconds=20)
            remove_sessions(Path(env["TMPDIR"]).parent)
    return head


def start_driver(run: LocalRun, env: dict[str, str], log: Path, locks: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the driver in a session of its own: a Ctrl-C in the terminal reaches it once, through the supervisor.

    It holds the locks of the run and of its temporary directory, too: it may outlive a killed supervisor for a moment.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            run.command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=locks,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )


def watch(driver: subprocess.Popen[bytes], head: subprocess.Popen[bytes], signals: Signals, shm: set[int]) -> int:
    """Wait for the driver and return the status of the run; 1 when the head died first."""
    next_scan = 0.0
    while driver.poll() is None:
        now = time.monotonic()
        if head.poll() is not None:
            why = f"the Ray head exited with status {head.returncode}"
            print(
                f"local: {why}; ending the driver; see raylet.out and gcs_server.out below logs/latest", file=sys.stderr
            )
            signals.say_memory()
            driver.kill()
            driver.wait()
            return 1
        if signals.stop_by is not None and now >= signals.stop_by:
            print(f"local: the driver did not stop within {STOP_SECONDS:g} s; killing it", file=sys.stderr)
            driver.kill()
        if now >= next_scan:
            shm |= shared_memory_inodes(descendants(os.getpid()))
            reap_orphans(besides={driver.pid, head.pid})
            next_scan = now + _SHM_SCAN_SECONDS
        time.sleep(_POLL_SECONDS)
    return signals.status_of(driver.returncode)


@contextmanager
def echo(log: Path) -> Iterator[None]:
    """Copy what is appended to `log` to standard output until the block ends.

    What cannot be written there, because the disk is full or nobody reads any more, is in the log alone.
    """
    done = threading.Event()

    def follow() -> None:
        with log.open("rb") as lines:
            while True:
                is_last = done.wait(_POLL_SECONDS)
                while chunk := lines.read(65536):
                    with suppress(OSError):
                        os.write(sys.stdout.fileno(), chunk)
                if is_last:
                    return

    log.touch()
    thread = threading.Thread(target=follow, name="echo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=10)


def tear_down(temp: Path, attempt: Path, shm: set[int]) -> None:
    """End every process of the run, keep Ray's logs, remove its temporary and shared-memory files.

    The driver has already closed its actors in order, if it could; what is left is killed at once.
    """
    shm |= shared_memory_inodes(descendants(os.getpid()))
    if left := kill_descendants(deadline_seconds=20):
        print(f"local: processes {left} could not be killed", file=sys.stderr)
    keep_logs(temp, attempt / RAY)
    print(f"local: Ray's logs and those of its workers are now in {attempt / RAY}", flush=True)
    remove_shared_memory(shm)


def supervise(run: LocalRun) -> int:
    """Run the job from lock to cleanup and return its exit status."""
    if problems := limit_problems(run.num_units):
        raise LaunchError(problems)
    lock = lock_run(run.run_dir)
    for number in caught(*FORWARDED):
        signal.signal(number, stop_at_once)  # the checksums of large start weights take minutes
    run = replace(run, command=with_start_weights(run.run_dir, run.command))
    ports, slot = take_slot()
    signals = Signals()
    signals.install()
    adopt_orphans()
    allow_open_files()
    attempt = new_attempt(run.run_dir)
    temp, held = make_temp(attempt)
    env = run_environment(temp, ports)
    log = attempt / "driver.log"
    shm: set[int] = set()
    print(f"local: {run.run_dir.name}, {attempt.name}, {run.num_units} worker units")
    print(f"  tail -F {log}\n  tail -F {temp}/{RAY}/session_latest/logs/worker-*", flush=True)
    print("local: starting Ray", flush=True)
    try:
        head = bring_up_head(run, ports, env, signals, attempt / "ray_head.log")
        if signals.received:
            print(f"local: got {signals.received[0].name} before the driver was started", file=sys.stderr)
            return EXIT_RESUME
        print("local: Ray is up, starting the driver", flush=True)
        with echo(log):
            driver = start_driver(run, env, log, (lock, held))
            signals.forward_to(driver)
            return watch(driver, head, signals, shm)
    finally:
        tear_down(temp, attempt, shm)
        os.close(held)
        slot.close()


def cause_of_end(log: Path) -> str:
    """Return the line of Ray's output that says why it ended: one with the system's own words, else the last one."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    refused = [line.strip() for line in lines if any(words in line for words in SYSTEM_WORDS)]
    return (refused or lines or ["no output"])[-1]


def parse(argv: list[str] | None) -> LocalRun:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run a driver on a one-node Ray cluster of its own.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run, results/EXP_NAME")
    parser.add_argument("--num-units", type=int, required=True, help="worker units the node offers")
    parser.add_argument("command", nargs="+", help="the driver, after --")
    args = parser.parse_args(argv)
    return LocalRun(run_dir=args.run_dir.resolve(), command=tuple(args.command), num_units=args.num_units)


def main(argv: list[str] | None = None) -> int:
    """Supervise and return the exit status."""
    try:
        return supervise(parse(argv))
    except RecipeError as error:
        for line in str(error).splitlines():
            print(f"local: {line}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"local: {resource_problem(error, 'starting a process of the run')}", file=sys.stderr)
        return RunError.exit_code


if __name__ == "__main__":
    sys.exit(main())
