"""Execute code for the trainer over HTTP, in the protocol of the NeMo-Skills sandbox, each execution in a jail.

    POST /execute   {generated_code, timeout, language, std_input, max_output_characters}; X-Session-ID for ipython
                    -> {process_status: completed | error | timeout, stdout, stderr, new_session_created (ipython),
                        used_seconds (timeout, not ipython: those in which the code ran or waited by itself)}
    DELETE /sessions/ID, GET /sessions (how many), GET /health (needs no token)

Every other request needs the job's token: `Authorization: Bearer TOKEN`, or, for a client that can only be given a
URL, http://job:TOKEN@HOST:PORT.

Languages: ipython (one Python session per X-Session-ID, without magics), python, python3, shell, and pypy3 where it is
installed. Lean 4 is only in the image of NeMo-Skills.

Usage: start.sh, so that it finds recipes/confinement. Environment: SANDBOX_TOKEN (required), NGINX_PORT or LISTEN_PORT
(6000), SANDBOX_HOST (0.0.0.0, because the driver's node asks those of the other nodes), SANDBOX_MEMORY_MIB,
SANDBOX_PROCESSES, SANDBOX_DISK_MIB, SANDBOX_CONCURRENCY (executions at a time), SANDBOX_SESSIONS, SANDBOX_IDLE_SECONDS
(after which an unused session ends), SANDBOX_KEPT_SECONDS (for which a session that was used is not ended to make room
for another: that one is refused with status 503). SANDBOX_LISTEN_FD: a listening socket that another process hands
over; the server then says "ready" on standard output, and ends when standard input does.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import io
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from jail import Limits, Outcome, run
from sessions import KEPT_SECONDS, NoRoomError, Sessions

log = logging.getLogger("sandbox")

COMMANDS = {
    "python": ["python3", "-I", "/main"],
    "python3": ["python3", "-I", "/main"],
    "pypy3": ["pypy3", "-I", "/main"],
    "shell": ["bash", "/main"],
}
CUT = "<output cut>"
UTF8_BYTES = 4  # of one character, at most
MAX_KEPT_BYTES = 32 * 2**20  # of each stream of a program
MAX_BODY_BYTES = 16 * 2**20
MAX_SECONDS = 3600.0
QUEUE_SECONDS = 2.5  # a client waits for the timeout and five seconds more
IDLE_SECONDS = "1800"
MIN_TOKEN_CHARACTERS = 16
MAX_HEAD_BYTES = 2**16
REQUEST_SECONDS = 60.0  # for the head of a request, and again for its body; also for the client to take an answer
MAX_CONNECTIONS = 2048  # that have shown the token
MAX_STRANGERS = 1024  # connections that have not, in places of their own
SESSION_NAME = re.compile(r"[\w.:-]{1,200}")
KILLED = {
    "memory": "Killed: more than {memory} MiB of memory\n",
    "output": "Killed: too much output\n",
    "sockets": "Killed: too many sockets\n",
    "files": "Killed: too many files\n",
    "idle": "The session was ended: what it left running used too much CPU time, or it was not used for too long\n",
    "end": "The process of the session ended; its variables are lost\n",
}


class RequestError(ValueError):
    """A request that the protocol does not have; `status` is the answer's."""

    def __init__(self, text: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One request to execute code."""

    code: str
    seconds: float
    language: str
    stdin: str
    max_characters: int
    session: str

    @classmethod
    def parse(cls, body: bytes, session: str) -> Execution:
        """Read the body of a request; raises `RequestError`."""
        try:
            given: dict[str, Any] = json.loads(body)
            seconds = float(given.get("timeout", 10))
            if math.isnan(seconds):  # it would be no limit at all
                raise ValueError("timeout is no number")
            execution = cls(
                code=str(given["generated_code"]),
                seconds=min(max(seconds, 0.1), MAX_SECONDS),
                language=str(given.get("language", "ipython")),
                stdin=str(given.get("std_input") or ""),
                max_characters=int(given.get("max_output_characters", 1000)),
                session=session,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise RequestError(f"not a request to execute: {type(error).__name__}: {error}") from error
        if execution.language == "ipython":
            if not SESSION_NAME.fullmatch(session):
                raise RequestError("X-Session-ID is needed for ipython: letters, digits and . _ : -")
        elif shutil.which(COMMANDS.get(execution.language, [""])[0]) is None:
            have = ", ".join(["ipython", *(name for name, words in COMMANDS.items() if shutil.which(words[0]))])
            raise RequestError(f"language {execution.language!r} is not installed here; installed: {have}")
        return execution


class Sandbox:
    """Executes requests, a limited number at a time."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.limits = Limits(
            memory_mib=int(environ.get("SANDBOX_MEMORY_MIB", "4096")),
            processes=int(environ.get("SANDBOX_PROCESSES", "64")),
            disk_mib=int(environ.get("SANDBOX_DISK_MIB", "256")),
        )
        self.places = threading.BoundedSemaphore(int(environ.get("SANDBOX_CONCURRENCY", 4 * (os.cpu_count() or 1))))
        self.token = environ.get("SANDBOX_TOKEN", "")
        self.sessions = Sessions(
            self.limits,
            most=int(environ.get("SANDBOX_SESSIONS", "512")),
            idle_seconds=float(environ.get("SANDBOX_IDLE_SECONDS", IDLE_SECONDS)),
            kept_seconds=float(environ.get("SANDBOX_KEPT_SECONDS", KEPT_SECONDS)),
        )

    def check(self) -> None:
        """End the server where it has no token or cannot make a jail."""
        if len(self.token) < MIN_TOKEN_CHARACTERS:
            sys.exit(f"sandbox: SANDBOX_TOKEN: missing or short; set at least {MIN_TOKEN_CHARACTERS} random characters")
        outcome = run(COMMANDS["python3"], "print(6 * 7)", "", 30, self.limits)
        if outcome.status != 0 or outcome.stdout != "42\n":
            sys.exit(
                f"sandbox: no jail can be made here: {outcome.stderr.strip() or outcome}\n"
                "sandbox: bubblewrap needs user namespaces; in a container that is --security-opt=seccomp=unconfined "
                "--security-opt=unmask=ALL for podman and docker, and nothing for enroot"
            )

    def accepts(self, authorization: str) -> bool:
        """Whether a header "Authorization" holds the job's token."""
        kind, _, given = authorization.partition(" ")
        if kind.lower() == "basic":  # base64 of USER:TOKEN, of a URL with both
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def execute(self, request: Execution) -> dict[str, Any]:
        """Execute a request; the answer is that of the protocol."""
        extra: dict[str, Any] = {}
        if request.language == "ipython":
            outcome, is_new = self.sessions.run(request.session, request.code, request.seconds)
            extra["new_session_created"] = is_new
        else:
            kept = min(UTF8_BYTES * (request.max_characters + 1), MAX_KEPT_BYTES)
            limits = dataclasses.replace(self.limits, output_bytes=kept)
            outcome = run(COMMANDS[request.language], request.code, request.stdin, request.seconds, limits)
            if outcome.timed_out:
                extra["used_seconds"] = round(outcome.used_seconds, 2)
        status = "timeout" if outcome.timed_out else "completed" if outcome.status == 0 else "error"
        streams = {"stdout": outcome.stdout, "stderr": outcome.stderr + self._reason(outcome, request)}
        cut = {name: _cut(text, request.max_characters) for name, text in streams.items()}
        return {"process_status": status, **cut, **extra}

    def _reason(self, outcome: Outcome, request: Execution) -> str:
        if outcome.timed_out:
            return f"Execution timed out after {request.seconds:g} seconds\n"
        return KILLED.get(outcome.reason, "").format(memory=self.limits.memory_mib)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + CUT


class Arriving(io.RawIOBase):
    """What a client sends, up to a deadline and a size: bytes that drip do not prolong the time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.allow(0)

    def allow(self, num_bytes: int) -> None:
        """Read so many bytes from now on, for `REQUEST_SECONDS`."""
        self._deadline, self._bytes_left = time.monotonic() + REQUEST_SECONDS, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; raises `TimeoutError` and `ConnectionError` when there is no time or room left."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request did not arrive in time")
        if self._bytes_left <= 0:
            raise ConnectionError("the client sends too much")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer)
        self._bytes_left -= count
        return count


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    sandbox: Sandbox
    server: Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._arriving = Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._arriving.allow(MAX_HEAD_BYTES)
        super().handle_one_request()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(HTTPStatus.OK, {"status": "healthy"})
        elif self._is_allowed():
            if self.path == "/sessions":
                self._send(HTTPStatus.OK, {"num_sessions": len(self.sandbox.sessions)})
            else:
                self._send(HTTPStatus.NOT_FOUND, {"error": f"no {self.path}"})

    def do_DELETE(self) -> None:
        if not self._is_allowed():
            return
        prefix, name = self.path[: len("/sessions/")], self.path[len("/sessions/") :]
        if prefix == "/sessions/" and self.sandbox.sessions.delete(name):
            self._send(HTTPStatus.OK, {"message": f"session {name} deleted"})
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        try:
            body = self._body()
            if self.path != "/execute":
                raise RequestError(f"no {self.path}", HTTPStatus.NOT_FOUND)
            request = Execution.parse(body, self.headers.get("X-Session-ID") or "")
        except RequestError as error:
            return self._send(error.status, {"error": str(error)})
        if not self.sandbox.places.acquire(timeout=QUEUE_SECONDS):
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "all places are taken"})
        try:
            answer = self.sandbox.execute(request)
        except NoRoomError as error:  # nothing was executed: the same request may be sent again
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
        finally:
            self.sandbox.places.release()
        self._send(HTTPStatus.OK, answer)

    def _is_allowed(self) -> bool:
        """Whether the request has the token; if not, answer it without reading its body."""
        if self.sandbox.accepts(self.headers.get("Authorization") or ""):
            if self.server.admits(self.connection):
                return True
            self.close_connection = True
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many connections"})
            return False
        self.close_connection = True
        self._send(HTTPStatus.UNAUTHORIZED, {"error": "this needs the job's token: Authorization: Bearer TOKEN"})
        return False

    def _body(self) -> bytes:
        """Read the body; raises `RequestError` unless its length is known and allowed. The connection then closes."""
        text = self.headers.get("Content-Length") or ""
        is_number = text.isascii() and text.isdecimal()
        if not is_number or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise RequestError(f"Content-Length is {text!r} and must be a number", HTTPStatus.LENGTH_REQUIRED)
        if len(text) > len(str(MAX_BODY_BYTES)) or int(text) > MAX_BODY_BYTES:
            self.close_connection = True
            raise RequestError(f"more than {MAX_BODY_BYTES} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self._arriving.allow(int(text))
        return self.rfile.read(int(text))

    def _send(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.connection.settimeout(REQUEST_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class Server(ThreadingHTTPServer):
    """One thread per connection, up to a limit.

    Who has not shown the token has a place among the strangers, and loses it to a newer one when there are too many: a
    client of the job shows it at once, so however many connections others hold, it gets in.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: type[Handler], listening: str = "") -> None:
        """Listen at an address, or on the socket whose descriptor `listening` names."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler, bind_and_activate=not listening)
        if listening:
            self.socket.close()
            self.socket = socket.socket(fileno=int(listening))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most, self._most_strangers = min(MAX_CONNECTIONS, files // 2), min(MAX_STRANGERS, files // 8)
        self._lock = threading.Lock()
        self._admitted: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first

    def admits(self, connection: socket.socket) -> bool:
        """Give a connection that has shown the token a place, unless too many have."""
        with self._lock:
            if connection not in self._admitted and len(self._admitted) >= self._most:
                return False
            self._strangers.pop(connection, None)
            self._admitted.add(connection)
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._strangers) >= self._most_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
            self._strangers[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._admitted.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the connection of %s broke off", client_address)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a session needs three, a connection one
    sandbox = Handler.sandbox = Sandbox(os.environ)
    os.environ.pop("SANDBOX_TOKEN", None)
    sandbox.check()
    port = int(os.environ.get("NGINX_PORT") or os.environ.get("LISTEN_PORT") or 6000)
    listening = os.environ.get("SANDBOX_LISTEN_FD", "")
    everywhere = "::" if Path("/proc/net/if_inet6").exists() else "0.0.0.0"  # "::" takes IPv4 too
    server = Server((os.environ.get("SANDBOX_HOST") or everywhere, port), Handler, listening)

    def stop(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown).start()

    for number in (signal.SIGTERM, signal.SIGUSR2):  # a job ends its steps with USR2
        signal.signal(number, stop)
    # `scancel --signal=USR1` reaches every process of every step, and is meant for the driver alone. What is ignored
    # here stays ignored in the cells.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if listening:
        threading.Thread(target=lambda: stop(len(sys.stdin.buffer.read()), None), daemon=True).start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    log.info("ready on port %d: %s", server.socket.getsockname()[1], sandbox.limits)
    server.serve_forever()
    sandbox.sessions.close()


if __name__ == "__main__":
    main()
