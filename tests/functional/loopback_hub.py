"""A hub on loopback, and GitHub's raw address: the endpoints that downloads use, with faults that a test plans.

A fault is a function that is given the request's handler and returns True when it has answered itself. Faults of a
path are used up in order; after them the hub is well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

Fault = Callable[["Handler"], bool]

LISTING = re.compile(r"/api/datasets/([^/]+/[^/]+)/paths-info/([^/]+)")
INFO = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)/revision/([^/?]+)\?blobs=true")
CONTENT = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
STORE = re.compile(r"/store/([0-9a-f]+)")


@dataclass
class Hub:
    """What the hub holds, what it will do wrong, and what it was asked."""

    dataset: str
    commit: str
    files: dict[str, bytes] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)  # files kept in git itself, without a sha256
    raw: dict[str, bytes] = field(default_factory=dict)  # path -> content, as GitHub's raw address serves it
    token: str | None = None
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))  # "list", "info", "get", "raw"
    requests: list[str] = field(default_factory=list)  # one of those per request, as "get 100-" where a part is asked
    with_token: set[str] = field(default_factory=set)  # those of them that came with one
    url: str = ""
    store: str = ""  # address of the hub that gives out large files; empty: this one

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name in self.small:
            return entry
        sha256 = hashlib.sha256(content).hexdigest()
        return {**entry, "lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}}

    def etag(self, name: str) -> str:
        entry = self.entry(name)
        return entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    content = b""  # of the file that is asked for

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> bool:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def refused(self, kind: str, content: bytes = b"") -> bool:
        """Note a request; return whether a fault or the lack of a token has answered it."""
        start = self.start()
        self.content = content
        self.hub.requests.append(f"{kind} {start}-" if start else kind)
        if "Authorization" in self.headers:
            self.hub.with_token.add(kind)
        faults = self.hub.faults[kind]
        if faults and faults.pop(0)(self):
            return True
        if self.hub.token and kind != "raw" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.answer(401, b"Invalid username or password.")
        return False

    def unknown(self, dataset: str, revision: str) -> bool:
        if dataset != self.hub.dataset:
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        if unquote(revision) not in (self.hub.commit, "main"):
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        return False

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        found = LISTING.fullmatch(self.path)
        assert found
        if not self.refused("list") and not self.unknown(found[1], found[2]):
            self.answer_json([self.hub.entry(name) for name in form["paths"] if name in self.hub.files])

    def do_GET(self) -> None:
        if found := INFO.fullmatch(self.path):
            if not self.refused("info") and not self.unknown(found[1], found[2]):
                self.answer_json({"id": found[1], "sha": self.hub.commit, "siblings": self.siblings()})
        elif found := CONTENT.fullmatch(self.path):
            name = unquote(found[3])
            headers = {"X_Repo_Commit": self.hub.commit, "X_Linked_Etag": f'"{self.hub.etag(name)}"'}
            if name in self.hub.small:
                self.send_content("get", self.hub.files[name], **headers)
            else:  # large files lie elsewhere
                self.answer(302, Location=f"{self.hub.store or self.hub.url}/store/{self.hub.etag(name)}", **headers)
        elif found := STORE.fullmatch(self.path):
            self.send_content(
                "get", next(content for name, content in self.hub.files.items() if self.hub.etag(name) == found[1])
            )
        elif (name := unquote(self.path).lstrip("/")) in self.hub.raw:
            self.send_content("raw", self.hub.raw[name])
        elif not self.path.startswith("/api/") and not self.refused("raw"):
            self.answer(404, b"404: Not Found")

    def siblings(self) -> list[dict[str, Any]]:
        """Return the entries of all files under the other names that this answer of the hub has for them."""
        found = []
        for entry in (self.hub.entry(name) for name in self.hub.files):
            lfs = {"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
            found.append({"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], **lfs})
        return found

    def send_content(self, kind: str, content: bytes, **headers: str) -> None:
        if not self.refused(kind, content):
            self.send_part(content, **headers)

    def send_part(self, content: bytes, **headers: str) -> None:
        start = self.start()
        if start >= len(content) > 0:
            self.answer(416)
        elif start:
            size = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[start:], Content_Range=size, **headers)
        else:
            self.answer(200, content, **headers)

    def start(self) -> int:
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(found[1]) if found else 0

    def cut(self, body: bytes, declared: int, *, reset: bool) -> bool:
        """Send only `body` of `declared` bytes, then close or reset the connection."""
        start = self.start()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{start + declared - 1}/{start + declared}")
        self.send_header("Content-Length", str(declared))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_WR) if not reset else self.connection.close()
        return True


def status(code: int, **headers: str) -> Fault:
    return lambda handler: handler.answer(code, b"no", **headers)


def truncated(content: bytes, num_bytes: int, *, reset: bool = False) -> Fault:
    """Send `num_bytes` of the rest of `content` while declaring all of it."""

    def fault(handler: Handler) -> bool:
        rest = content[handler.start() :]
        return handler.cut(rest[:num_bytes], len(rest), reset=reset)

    return fault


def broken_off(share: float, *, reset: bool = False) -> Fault:
    """Send a share of the rest of whatever is asked for, while declaring all of it."""
    return lambda handler: truncated(
        handler.content, int(share * (len(handler.content) - handler.start())), reset=reset
    )(handler)


def environment(place: Path, hub: Hub, **more: str) -> dict[str, str]:
    """Return the environment of a program that knows no other host than `hub`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "http", "HTTP"))}
    here = {"HF_ENDPOINT": hub.url, "GITHUB_RAW_ENDPOINT": hub.url, "HF_HOME": str(place / "home")}
    return {**kept, **here, "no_proxy": "127.0.0.1", **more}


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on loopback."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Say nothing of connections that a fault closed."""

    with Server(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
