"""A resources server of a type that this project does not know, in NeMo Gym's shapes and with fields of its own.

A row names the email that must go, as `wanted`. The tool deletes one in the session of its cookie; the verdict is 1.0
when that one email was deleted and no other.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOL = "email_delete_email"
COOKIE = "MailroomResourcesServer___mail"


class Mailroom(ThreadingHTTPServer):
    """The server, and what it has answered."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: Counter[str] = Counter()  # by path
        self.deleted: dict[str, list[str]] = {}  # by session
        self.reply: tuple[int, bytes] | None = None  # of /verify, in place of a verdict
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, session: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return status and object of one reply."""
        with self.lock:
            self.calls[path] += 1
            if path == "/seed_session":
                self.deleted[session] = []
                return 200, {}
            if session not in self.deleted:
                return 400, {"detail": "no session"}
            if path == f"/{TOOL}":
                self.deleted[session].append(body["email_id"])
                return 200, {"output": "Email deleted."}
            deleted = self.deleted.pop(session)
        reward = float(deleted == [body["wanted"]])
        return 200, {**body, "reward": reward, "num_deleted": len(deleted), "deleted": " ".join(deleted)}


class _Handler(BaseHTTPRequestHandler):
    server: Mailroom

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cookie = SimpleCookie(self.headers.get("cookie", "")).get(COOKIE)
        session = cookie.value if cookie else uuid.uuid4().hex
        status, reply = self.server.answer(self.path, session, body)
        content = json.dumps(reply).encode()
        if self.path == "/verify" and self.server.reply is not None:
            status, content = self.server.reply
        self._send(status, content, {"set-cookie": f"{COOKIE}={session}; path=/"})

    def do_GET(self) -> None:
        self._send(200, b'{"status": "ok"}', {})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def mailroom() -> Iterator[Mailroom]:
    """Run the server in a thread."""
    server = Mailroom()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def settings(url: str) -> dict[str, str]:
    """Return the keys of a configuration that let rows of the agent `mail_agent` be run with this server."""
    return {
        "env.nemo_gym.mail.resources_servers.mailroom.url": url,
        "env.nemo_gym.mail_agent.responses_api_agents.simple_agent.resources_server.type": "resources_servers",
        "env.nemo_gym.mail_agent.responses_api_agents.simple_agent.resources_server.name": "mail",
        "env.nemo_gym.mail_agent.responses_api_agents.simple_agent.max_steps": "4",
    }
