"""A real registry on loopback, small images in it, and in front of it a proxy that asks for a login and goes wrong.

An image is two layers that are pushed through the registry's own HTTP API: a busybox root shared by all, and a few
files of its own. Faults belong to repositories; those that pass are counted down, the others stay.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from speed import patiently

START_SECONDS = 20.0
USER, PASSWORD, TICKET = "trainer", "not a secret", "ticket-of-this-test"
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # not through a proxy of this machine
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
APPLETS = ("sh", "ls", "cat", "echo", "touch", "mkdir", "grep", "sleep", "env", "head", "wc", "test", "true")
CONFIG = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {directory}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
Files = Mapping[str, bytes | str | None]  # content, or the target of a link, or None for a directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start_registry(directory: Path) -> Iterator[str]:
    """Run docker-registry and return its address."""
    program = shutil.which("docker-registry")
    assert program, "docker-registry is missing: .ci/run installs it"
    directory.mkdir(parents=True)
    port = free_port()
    config = directory / "config.yml"
    config.write_text(CONFIG.format(directory=directory / "blobs", port=port), encoding="utf-8")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + patiently(START_SECONDS)
        while True:
            try:
                OPEN(f"{url}/v2/", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, (directory / "log").read_text(
                    encoding="utf-8"
                )
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def busybox_root() -> dict[str, bytes | str | None]:
    """Return the files of a root in which a shell runs."""
    program = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    root: dict[str, bytes | str | None] = {"bin": None, "tmp": None, "etc": None, "bin/busybox": program}
    root |= {f"bin/{name}": "busybox" for name in APPLETS}
    return root | {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}


def layer(files: Files) -> tuple[bytes, bytes]:
    """Return a layer, plain and compressed."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return plain.getvalue(), gzip.compress(plain.getvalue(), 1, mtime=0)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Pusher:
    """Writes images to a registry."""

    url: str

    def push(self, repository: str, tag: str, layers: list[tuple[bytes, bytes]], env: list[str] | None = None) -> str:
        """Push an image and return its digest."""
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": env or ["PATH=/bin"], "Cmd": ["/bin/sh"], "WorkingDir": "/testbed"},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(plain) for plain, _ in layers]},
        }
        content = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._blob(repository, content, "application/vnd.docker.container.image.v1+json"),
            "layers": [
                self._blob(repository, packed, "application/vnd.docker.image.rootfs.diff.tar.gzip")
                for _, packed in layers
            ],
        }
        body = json.dumps(manifest).encode()
        self._ask("PUT", f"{self.url}/v2/{repository}/manifests/{tag}", body, MANIFEST)
        return digest_of(body)

    def _blob(self, repository: str, data: bytes, kind: str) -> dict[str, object]:
        digest = digest_of(data)
        answer = self._ask("POST", f"{self.url}/v2/{repository}/blobs/uploads/", b"")
        place = answer["Location"]
        joint = "&" if "?" in place else "?"
        self._ask("PUT", f"{place}{joint}digest={digest}", data)
        return {"mediaType": kind, "size": len(data), "digest": digest}

    def _ask(self, method: str, url: str, data: bytes, kind: str = "application/octet-stream") -> Mapping[str, str]:
        request = urllib.request.Request(url, method=method, data=data, headers={"Content-Type": kind})
        with OPEN(request, timeout=30) as answer:
            return dict(answer.headers)


@dataclass
class Faults:
    """What the proxy does wrong, by a part of the path, and what it did."""

    limited: dict[str, int] = field(default_factory=dict)  # so many answers 429 to questions about manifests
    cut: dict[str, int] = field(default_factory=dict)  # so many blobs end in the middle
    broken: set[str] = field(default_factory=set)  # blobs always come with a wrong byte
    down: dict[str, int] = field(default_factory=dict)  # so many connections are reset
    seen: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # kind of answer -> times
    limited_until: float = 0.0
    early: int = 0  # requests that came although all were asked to wait
    delay: float = 0.0  # of every blob, so that a kill meets work
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, kind: str, path: str) -> bool:
        """Return whether a fault that passes is due, and count it."""
        plan: dict[str, int] = getattr(self, kind)
        with self.lock:
            for part, left in plan.items():
                if part in path and left:
                    plan[part] -= 1
                    self.seen[kind] += 1
                    return True
        return False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    faults: Faults

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if self.path.startswith("/token?"):
            expected = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
            self.answer(*((200, json.dumps({"token": TICKET}).encode()) if given == expected else (401,)))
            return
        if given != f"Bearer {TICKET}":
            self.faults.seen["login"] += 1
            realm = f"http://{self.headers['Host']}/token"
            self.answer(401, WWW_Authenticate=f'Bearer realm="{realm}",service="loopback"')
            return
        if time.monotonic() < self.faults.limited_until:
            self.faults.early += 1
        if "/manifests/" in self.path and self.faults.take("limited", self.path):
            self.faults.limited_until = time.monotonic() + 0.9
            self.answer(429, b'{"errors":[{"code":"TOOMANYREQUESTS"}]}', Retry_After="1")
            return
        if self.faults.take("down", self.path):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.forward()

    def forward(self) -> None:
        """Pass the request on, and the answer back, or most of it."""
        headers = {"Accept": ", ".join(self.headers.get_all("Accept") or ["*/*"])}
        if self.headers.get("Range"):
            headers["Range"] = self.headers["Range"]
            self.faults.seen["resumed"] += 1
        request = urllib.request.Request(self.upstream + self.path, method=self.command, headers=headers)
        try:
            answer = OPEN(request, timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
        is_blob = "/blobs/" in self.path
        self.faults.seen["blob" if is_blob else f"manifest {self.command}"] += 1
        if is_blob:
            time.sleep(self.faults.delay)
        if is_blob and any(part in self.path for part in self.faults.broken) and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Length", "Content-Range", "Docker-Content-Digest"):
            if answer.headers.get(name):
                self.send_header(name, answer.headers[name])
        self.end_headers()
        if is_blob and len(body) > 64 and self.faults.take("cut", self.path):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def start_proxy(upstream: str) -> Iterator[tuple[str, Faults]]:
    """Run the proxy; return host:port and its faults."""
    faults = Faults()
    handler = type("ProxyHandler", (Handler,), {"upstream": upstream, "faults": faults})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()


def login(directory: Path, host: str) -> dict[str, str]:
    """Write docker's file of passwords for a host and return the environment that names it."""
    directory.mkdir(parents=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (directory / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}), encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("APPTAINER_", "REGISTRY_"))}
    return {**kept, "DOCKER_CONFIG": str(directory), "no_proxy": "127.0.0.1"}
