"""podman and buildah with a store of their own, for machines without systemd and without all of root's rights.

And a proxy for plain HTTP, as at the edge of a company's network.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from speed import patiently

# runc: crun refuses hybrid cgroups. Limits: podman's own defaults may lie above what this process is allowed.
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
STORAGE_CONF = """[storage]
driver = "{driver}"
graphroot = "{home}/graph"
runroot = "{home}/run"
"""
MAX_NOFILE, MAX_NPROC = 20000, 32768


@dataclass
class Engine:
    """A container store; `env` makes podman and buildah use it."""

    env: dict[str, str]
    image: str = ""

    def podman(self, *words: str) -> str:
        return self._run("podman", *words)

    def buildah(self, *words: str, cwd: Path | None = None) -> str:
        return self._run("buildah", *words, cwd=cwd)

    def _run(self, *words: str, cwd: Path | None = None) -> str:
        env = {**os.environ, **self.env}
        result = subprocess.run(
            words, env=env, cwd=cwd, capture_output=True, text=True, timeout=patiently(300), check=False
        )
        assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout}{result.stderr}"
        return result.stdout

    def import_root(self, root: Path, name: str) -> str:
        """Make an image of a directory and return its name."""
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", container, name)
        self.buildah("rm", container)
        return name


@contextmanager
def start_engine(home: Path) -> Iterator[Engine]:
    """Make a store; at the end remove it with its containers."""
    home.mkdir(parents=True)
    nofile = min(MAX_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    nproc = min(MAX_NPROC, resource.getrlimit(resource.RLIMIT_NPROC)[1] % 2**63)
    (home / "containers.conf").write_text(CONTAINERS_CONF.format(nofile=nofile, nproc=nproc), encoding="utf-8")
    kind = subprocess.run(["stat", "--file-system", "--format=%T", home], capture_output=True, text=True, check=True)
    driver = "vfs" if kind.stdout.strip() == "overlayfs" else "overlay"  # an overlay cannot lie on another one
    (home / "storage.conf").write_text(STORAGE_CONF.format(home=home, driver=driver), encoding="utf-8")
    engine = Engine(
        {
            "CONTAINERS_CONF": str(home / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
    )
    try:
        yield engine
    finally:
        engine.podman("rm", "--all", "--force", "--time=5")
        engine.buildah("rm", "--all")
        engine.podman("image", "unmount", "--all", "--force")
        shutil.rmtree(home)  # each layer is a whole root


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append(self.path)
        kept = {
            name: self.headers[name] for name in ("Range", "If-Modified-Since", "User-Agent") if name in self.headers
        }
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.path, headers=kept), timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Range", "Last-Modified"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def start_proxy() -> Iterator[tuple[str, list[str]]]:
    """Run the proxy; return its URL and what it was asked for."""
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ProxyOfThisTest", (Proxy,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
