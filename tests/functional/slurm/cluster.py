"""A real Slurm cluster that lasts as long as a test: controller and nodes in namespaces of their own.

    one pid, net, mount, uts, ipc namespace: munged, slurmctld, a bridge 10.77.0.1/24
      one more of each per node: slurmd, 10.77.0.11 upwards, own host name, /tmp, /run, /dev/shm

`directory` is the file system that all nodes share, with the directories named in `shared`. Nothing of the machine is
changed; when the first process ends, the kernel ends all others and forgets mounts and addresses. Needs root and the
Debian packages munge, slurm-wlm, iproute2, and for accounting slurmdbd and mariadb-server (`make test`
installs them).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from speed import patiently

from slurm.conf import address, write_conf
from tools.processes import dies_with_parent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NODES_UP_SECONDS, STOP_SECONDS = 60.0, 20.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter", "pgrep")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
TURN = Path(tempfile.gettempdir()) / f"slurm-tests-{os.getuid()}.lock"  # of all processes on this machine
_SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other process has its turn: the nodes of two clusters would take all time from each other."""
    with TURN.open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also where a process that the test has forked still has the file open


class Cluster:
    """Use as a context manager, or `up` and `down`."""

    def __init__(
        self,
        *,
        num_nodes: int = 2,
        cpus: int = 2,
        gpus: int = 1,
        shared: Sequence[Path] = (),
        accounting: bool = False,
    ) -> None:
        """Prepare a cluster of nodes with `gpus` fake GPUs (0: none counted); all see the directories `shared`."""
        # Short: the paths of Slurm's sockets below it may have at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-")).resolve()
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._addresses = {node: address(number) for number, node in enumerate(self.nodes, start=1)}
        self._shared = [str(path.resolve()) for path in (ROOT, *shared)]
        self._accounting = accounting
        self._outer: subprocess.Popen[bytes] | None = None
        for name in ("etc", "log", "nodes", "run", "state"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        write_conf(self.directory, num_nodes=num_nodes, cpus=cpus, gpus=gpus, accounting=accounting)

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Start controller and nodes and wait until all are idle."""
        programs = (*PROGRAMS, *(ACCOUNTING_PROGRAMS if self._accounting else ()))
        missing = [name for name in programs if shutil.which(name, path=_SEARCH_PATH) is None]
        assert not missing, f"not installed: {', '.join(missing)}; `make test` installs the Debian packages"
        assert os.geteuid() == 0, "the throw-away Slurm cluster makes namespaces, for which it must be root"
        with (self.directory / "log" / "controller.log").open("ab") as log:
            self._outer = subprocess.Popen(
                [
                    *("unshare", "--pid", "--net", "--mount", "--uts", "--ipc", "--fork", "--kill-child=KILL"),
                    *("--mount-proc", "--propagation", "private"),
                    *(str(HERE / "controller.sh"), str(self.directory), "accounting" if self._accounting else "plain"),
                ],
                env=os.environ | {"PATH": _SEARCH_PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        try:
            self.wait_until((self.directory / "run" / "ready").exists, "the controller", seconds=NODES_UP_SECONDS)
            for node in self.nodes:
                self.start_node(node)
            self.wait_for_nodes(self.nodes)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the cluster and remove its files."""
        if self._outer is not None:
            self._outer.kill()
            self._outer.wait()
            end = time.monotonic() + STOP_SECONDS
            while self._pids() and time.monotonic() < end:
                time.sleep(0.02)
            assert not self._pids(), f"processes of the cluster are still there: {self._pids()}"
            self._outer = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login side, with the environment `env` (this process's by default)."""
        return self._enter(self._init_pid(), argv, env=env, cwd=cwd, seconds=seconds, check=check)

    def on_node(self, node: str, argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node."""
        pid = int((self.directory / "nodes" / node / "pid").read_text(encoding="utf-8"))
        inside = ["nsenter", "--target", str(pid), *_NAMESPACES, "--root", "--wd=/", "--", *argv]
        return self._enter(self._init_pid(), inside, check=check)

    def start_node(self, node: str) -> None:
        """Start a node, also one that was killed."""
        words = [str(HERE / "node.sh"), "start", str(self.directory), node, self._addresses[node], *self._shared]
        self.run(words)

    def kill_node(self, node: str) -> None:
        """Switch a node off: every process in it is gone at once."""
        self.run(["kill", "-9", (self.directory / "nodes" / node / "pid").read_text(encoding="utf-8").strip()])

    def wait_for_nodes(self, nodes: Sequence[str]) -> None:
        """Wait until Slurm could start a job on each of `nodes`."""

        def all_idle() -> bool:
            # sinfo blocks for long when the controller is dead.
            listed = self.run(["timeout", "5", "sinfo", "--noheader", "--Node", "--format=%N %T"], check=False).stdout
            return {f"{node} idle" for node in nodes} <= set(listed.splitlines())

        self.wait_until(all_idle, f"idle nodes {', '.join(nodes)}", seconds=NODES_UP_SECONDS)

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Poll `condition` until it holds; fails with the controller's last lines at the deadline."""
        assert self._outer is not None, "the cluster is not up"
        end = time.monotonic() + patiently(seconds)
        while not condition():
            assert self._outer.poll() is None, f"the cluster ended while waiting for {what}:\n{self.log()}"
            assert time.monotonic() < end, f"no {what} within {patiently(seconds):.0f} s:\n{self.log()}"
            time.sleep(0.05)

    def log(self) -> str:
        """Return the last lines of every daemon's log."""
        files = sorted((self.directory / "log").glob("*.log"))
        return "\n".join(f"== {file.name}\n" + "\n".join(_lines(file)[-15:]) for file in files)

    def _enter(
        self,
        pid: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        seconds = patiently(seconds)
        # `timeout` inside, too: ours would end nsenter and leave its child.
        inside = ["timeout", "--kill-after=5", f"{seconds:g}", *argv]
        done = subprocess.run(
            ["nsenter", "--target", str(pid), *_NAMESPACES, "--root", f"--wd={cwd or '/'}", "--", *inside],
            env={
                **(os.environ if env is None else env),
                "PATH": f"{(env or os.environ)['PATH']}:/usr/sbin:/sbin",
                "SLURM_CONF": f"{self.directory}/etc/slurm.conf",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + 30,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(argv)}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def _init_pid(self) -> int:
        assert self._outer is not None, "the cluster is not up"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text(encoding="utf-8").split()
        return int(children[0])

    def _pids(self) -> list[int]:
        """Find processes that name this cluster's directory, wherever they are."""
        needle = os.fsencode(self.directory)
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if needle in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue  # it ended while we looked
        return found


_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()
