"""A client of the sandbox's HTTP protocol."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

TOKEN = "token-of-this-test-job"


class Client:
    """Asks the sandbox at a port of this machine."""

    def __init__(self, port: str, authorization: str = f"Bearer {TOKEN}") -> None:
        self.url, self.authorization = f"http://127.0.0.1:{port}", authorization

    def send(self, path: str, body: dict[str, Any] | None = None, *, method: str = "", session: str = "") -> Any:
        """Send a request; return the status and the answer."""
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": self.authorization} if self.authorization else {}
        headers |= {"X-Session-ID": session} if session else {}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method or None)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def python(self, code: str, **fields: Any) -> dict[str, Any]:
        """Execute a program and return the answer."""
        status, answer = self.send("/execute", {"generated_code": code, "language": "python", "timeout": 10, **fields})
        assert status == 200, answer
        return answer

    def cell(self, code: str, session: str, **fields: Any) -> dict[str, Any]:
        """Execute a cell of a session and return the answer."""
        status, answer = self.send("/execute", {"generated_code": code, "timeout": 10, **fields}, session=session)
        assert status == 200, answer
        return answer

    def wait_until_healthy(self, process: subprocess.Popen[Any], seconds: float = 60) -> None:
        """Wait until the server answers; fail when it ends."""
        end = time.monotonic() + seconds
        while True:
            assert process.poll() is None, "the sandbox ended"
            try:
                if self.send("/health") == (200, {"status": "healthy"}):
                    return
            except OSError:
                assert time.monotonic() < end, "the sandbox does not answer"
                time.sleep(0.1)
