"""Where programs run: the sandbox that a job has on every node, else a server of our own on this machine.

Both are servers of one protocol (`containers/sandbox/server.py`), so there is one way to run a program. Our own is
started when it is first needed, and ends with this process, however that ends. It needs bubblewrap and a kernel that
lets an account make namespaces; without them a program is not run, and gives no verdict.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.cluster.ports import connect, host_port, url_of

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "containers" / "sandbox" / "server.py"
START_SECONDS = 60.0  # of our own server, which tries one jail first
CONNECT_SECONDS = 5.0  # to the job's
END_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
ENDING_SECONDS = 1.0  # from the last connection of a killed process to its end
_POLL_SECONDS = 0.02
FAILED_SECONDS = 30.0  # for which a start that failed is not tried again
KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH")  # of ours, for the server; programs get none of them
_SHOWN_CHARACTERS = 300


HostPort = tuple[str, int]
"""Host and port."""


class SandboxFailedError(Exception):
    """No sandbox answered; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One server, and the token that opens it."""

    url: str
    token: str


class SandboxServer:
    """The servers that this process asks; a job's is opened by the job's token, and our own by one of its own."""

    def __init__(self) -> None:
        self._token = os.environ.get("SANDBOX_TOKEN", "")  # "" outside of a job
        self._jobs: dict[HostPort, bool] = {}  # whether the job's sandbox answered there
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = -1  # what our own server writes to standard error
        self._own: Address | None = None
        self._failure = ""  # of the last start
        self._failed_at = 0.0
        # Searches have a thread of their own: the event loop's are for others, such as the look-up of host names.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="sandbox")

    @property
    def places(self) -> int:
        """How many programs may run at the same time: the start of one leaves a core idle half of the time."""
        return 2 * (os.cpu_count() or 1)

    async def address(self, place: HostPort) -> Address:
        """Return where to ask: at the address of the job's sandbox, or at our own, which is started if need be.

        Raises `SandboxFailedError`, without another start for `FAILED_SECONDS` after one that failed.
        """
        if self._jobs.get(place):
            return self._address_of(place)
        own, process = self._own, self._process
        is_known = not self._token or place in self._jobs
        if is_known and own is not None and process is not None and process.poll() is None:
            return own
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._find, place)

    async def notice_end(self) -> None:
        """Wait a moment for the end of our own server: its connections are closed before anybody can see that end."""
        process, end = self._process, time.monotonic() + ENDING_SECONDS
        while process is not None and process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End our own server, if there is one."""
        with self._lock:
            self._end()

    def _address_of(self, place: HostPort) -> Address:
        return Address(url=url_of(*place), token=self._token)

    def _find(self, place: HostPort) -> Address:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                logger.warning("the sandbox of this process ended with status %d; it is started again", self._end())
            if self._token and place not in self._jobs:
                self._jobs[place] = answers(place)
            if self._jobs.get(place):
                return self._address_of(place)
            if self._own is None:
                self._own = self._start_unless_failed()
            return self._own

    def _start_unless_failed(self) -> Address:
        if self._failure and time.monotonic() - self._failed_at < FAILED_SECONDS:
            raise SandboxFailedError(self._failure)
        try:
            own = self._start()
        except SandboxFailedError as error:
            self._failure, self._failed_at = str(error), time.monotonic()
            raise
        self._failure = ""
        return own

    def _start(self) -> Address:
        """Start our own server on a socket that is ours from the start."""
        token = secrets.token_hex(32)
        self._log = os.memfd_create("sandbox")
        with socket.create_server((LOOPBACK, 0), backlog=512) as listening:
            descriptor = listening.fileno()
            given = {"SANDBOX_TOKEN": token, "SANDBOX_LISTEN_FD": str(descriptor), "PYTHONPATH": str(ROOT)}
            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            limits = {"SANDBOX_CONCURRENCY": str(self.places), "SANDBOX_MEMORY_MIB": str(memory_mib(self.places))}
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                env={**kept, **given, **limits},
                stdin=subprocess.PIPE,  # its end tells the server that this process has ended
                stdout=subprocess.PIPE,
                stderr=self._log,
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C is for the run to handle
            )
            port = listening.getsockname()[1]
        self._wait_until_ready(self._process)
        return Address(url=url_of(LOOPBACK, port), token=token)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline, said = time.monotonic() + START_SECONDS, b""
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        while not said.endswith(b"\n"):
            left = deadline - time.monotonic()
            data = os.read(process.stdout.fileno(), 64) if left > 0 and waiting.poll(1000 * left) else b""
            if not data:
                process.kill()
                process.wait()
                why = os.pread(self._log, 1 << 16, 0).decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
                self._end()
                raise SandboxFailedError(f"no sandbox could be started here: {why or 'it did not become ready'}")
            said += data

    def _end(self) -> int:
        """End the server and forget it; returns its exit status."""
        process, self._process, self._own = self._process, None, None
        if process is None:
            return 0
        os.close(self._log)
        with process:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            try:
                return process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()


def memory_mib(places: int) -> int:
    """Return how much memory one program may use: all of them together get half of the machine's at most.

    A program gets 1 GiB on any machine, and no more than 4 GiB.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return max(1024, min(4096, total // (2 * places)))


def answers(place: HostPort) -> bool:
    """Return whether the job's sandbox listens there, and log a warning where it does not."""
    try:
        connect(*place, seconds=CONNECT_SECONDS).close()
    except OSError as error:
        where = host_port(*place)
        logger.warning("no sandbox of the job listens at %s (%s); programs run in one of our own", where, error)
        return False
    return True
