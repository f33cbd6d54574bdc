"""Execute code for the trainer over HTTP, in the protocol of the NeMo-Skills sandbox; every execution is jailed.

    POST /execute   {generated_code, timeout, language, std_input, max_output_characters}; X-Session-ID for ipython
                    -> {process_status: completed | error | timeout, stdout, stderr, new_session_created (ipython)}
    GET /sessions, DELETE /sessions/ID, GET /health

Languages: ipython (one Python session per X-Session-ID, no magics), python, python3, shell, and pypy3 where the image
has it. Lean 4 is only in the image of NeMo-Skills.

Usage: python3 server.py. Environment: NGINX_PORT or LISTEN_PORT (6000), SANDBOX_HOST (0.0.0.0: the driver's node asks
those of the others), SANDBOX_MEMORY_MIB, SANDBOX_PROCESSES, SANDBOX_DISK_MIB, SANDBOX_CONCURRENCY (executions at a
time), SANDBOX_SESSIONS.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any

from jail import Limits, Outcome, no_namespaces, run
from sessions import Sessions

log = logging.getLogger("sandbox")

COMMANDS = {
    "python": ["python3", "-I", "/main"],
    "python3": ["python3", "-I", "/main"],
    "pypy3": ["pypy3", "-I", "/main"],
    "shell": ["bash", "/main"],
}
CUT = "<output cut>"
MAX_BODY_BYTES = 16 * 2**20
MAX_SECONDS = 3600.0
QUEUE_SECONDS = 4.0  # a client waits for the timeout and five seconds more
IDLE_SECONDS = 3600.0
SESSION_NAME = re.compile(r"[\w.:-]{1,200}")
KILLED = {
    "memory": "Killed: more than {memory} MiB of memory\n",
    "output": "Killed: too much output\n",
    "end": "The process of the session ended; its variables are lost\n",
}


class RequestError(ValueError):
    """A request that the protocol does not know."""


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
            execution = cls(
                code=str(given["generated_code"]),
                seconds=min(max(float(given.get("timeout", 10)), 0.1), MAX_SECONDS),
                language=str(given.get("language", "ipython")),
                stdin=str(given.get("std_input") or ""),
                max_characters=int(given.get("max_output_characters", 1000)),
                session=session,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"not a request to execute: {type(error).__name__}: {error}") from error
        if execution.language == "ipython":
            if not SESSION_NAME.fullmatch(session):
                raise RequestError("X-Session-ID is needed for ipython: letters, digits and . _ : -")
        elif shutil.which(COMMANDS.get(execution.language, [""])[0]) is None:
            have = ", ".join(["ipython", *(name for name, words in COMMANDS.items() if shutil.which(words[0]))])
            raise RequestError(f"no language {execution.language!r} here; there are {have}")
        return execution


class Sandbox:
    """Executes requests, so many at a time."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.limits = Limits(
            memory_mib=int(environ.get("SANDBOX_MEMORY_MIB", "4096")),
            processes=int(environ.get("SANDBOX_PROCESSES", "64")),
            disk_mib=int(environ.get("SANDBOX_DISK_MIB", "256")),
        )
        self.places = threading.BoundedSemaphore(int(environ.get("SANDBOX_CONCURRENCY", 4 * (os.cpu_count() or 1))))
        most = int(environ.get("SANDBOX_SESSIONS", "512"))
        self.sessions = Sessions(self.limits, most=most, idle_seconds=IDLE_SECONDS)

    def check(self) -> None:
        """Run a first program; ends the server where a jail cannot be made."""
        if not no_namespaces():
            log.warning(
                "programs can mount memory without a limit: bubblewrap is older than 0.8, or /proc/sys read-only"
            )
        outcome = run(COMMANDS["python3"], "print(6 * 7)", "", 30, self.limits)
        if outcome.status != 0 or outcome.stdout != "42\n":
            sys.exit(
                f"sandbox: a jail cannot be made here: {outcome.stderr.strip() or outcome}\n"
                "sandbox: bubblewrap needs user namespaces; in a container that is --security-opt=seccomp=unconfined "
                "--security-opt=unmask=ALL for podman and docker, and nothing for enroot"
            )

    def execute(self, request: Execution) -> dict[str, Any]:
        """Execute a request; the answer is that of the protocol."""
        extra: dict[str, Any] = {}
        if request.language == "ipython":
            outcome, is_new = self.sessions.run(request.session, request.code, request.seconds)
            extra["new_session_created"] = is_new
        else:
            outcome = run(COMMANDS[request.language], request.code, request.stdin, request.seconds, self.limits)
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


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 120.0  # of a client that says nothing
    sandbox: Sandbox

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(HTTPStatus.OK, {"status": "healthy"})
        elif self.path == "/sessions":
            ages = self.sandbox.sessions.ages()
            self._send(HTTPStatus.OK, {"sessions": {name: {"idle_seconds": age} for name, age in ages.items()}})
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"no {self.path}"})

    def do_DELETE(self) -> None:
        name = self.path.removeprefix("/sessions/")
        if self.sandbox.sessions.delete(name):
            self._send(HTTPStatus.OK, {"message": f"session {name} deleted"})
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"no session {name}"})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY_BYTES:
            self.close_connection = True
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"more than {MAX_BODY_BYTES} bytes"})
        body = self.rfile.read(size)
        if self.path != "/execute":
            return self._send(HTTPStatus.NOT_FOUND, {"error": f"no {self.path}"})
        try:
            request = Execution.parse(body, self.headers.get("X-Session-ID") or "")
        except RequestError as error:
            return self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        if not self.sandbox.places.acquire(timeout=QUEUE_SECONDS):
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "all places are taken"})
        try:
            answer = self.sandbox.execute(request)
        finally:
            self.sandbox.places.release()
        self._send(HTTPStatus.OK, answer)

    def _send(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a session has two, a connection one
    sandbox = Handler.sandbox = Sandbox(os.environ)
    sandbox.check()
    port = int(os.environ.get("NGINX_PORT") or os.environ.get("LISTEN_PORT") or 6000)
    server = Server((os.environ.get("SANDBOX_HOST", "0.0.0.0"), port), Handler)

    def stop(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    log.info("ready on port %d: %s", port, sandbox.limits)
    server.serve_forever()
    sandbox.sessions.close()


if __name__ == "__main__":
    main()
