"""An HTTP server for tests that writes nothing about its clients."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Answers over kept connections and logs no request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""


class QuietServer(ThreadingHTTPServer):
    """Writes nothing when a client is gone before its answer."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Write nothing."""
