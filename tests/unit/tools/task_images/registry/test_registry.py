"""What of a registry's answers is believed, and when a pull is given up."""

from __future__ import annotations

import socket
import traceback
from http.server import BaseHTTPRequestHandler

import pytest

from recipes.errors import LaunchError
from recipes.retry import RetryPolicy
from tests.unit.tools.task_images.registry.loopback_server import serving
from tools.task_images.registry.client import Credentials, Registry
from tools.task_images.registry.references import ImageError, Reference


def test_a_registry_that_never_answers_ends_the_run_soon():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        registry = Registry(Credentials({}, ()), RetryPolicy(first_seconds=0.001))
        for _ in range(3):  # images after the first are not tried at all
            with pytest.raises(
                LaunchError,
                match=rf"http://{host}: .* ConnectError .* 4 times in a row; .* MIRROR=",
            ):
                registry.digest(Reference.parse(f"{host}/a/b"))
        registry.close()
    assert sum(registry.waits.values()) == RetryPolicy().max_unreached_retries


def test_a_blob_that_never_comes_further_is_given_up(tmp_path):
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Range"])
        if len(asked) > 20:
            request.send_error(404)
        elif request.headers["Range"]:
            request.send_error(416)
        else:
            request.send_response(200)
            request.send_header("Content-Length", "20")
            request.end_headers()
            request.wfile.write(b"only half ")

    with serving(answer) as host:
        registry = Registry(Credentials({}, ()), RetryPolicy(max_retries=4, first_seconds=0.001))
        with pytest.raises(ImageError, match="network: "):
            registry.blob(Reference.parse(f"{host}/a/b"), f"sha256:{'0' * 64}", tmp_path / "blob", lambda _: None)
        registry.close()
    assert len(asked) == 5  # the first came further than nothing


def test_a_password_is_in_no_message():
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(401)
        request.send_header("WWW-Authenticate", "Basic")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with serving(answer) as host:
        files = ({"auths": {host: {"auth": "c2VjcmV0\n"}}},)
        registry = Registry(Credentials({}, files), RetryPolicy(max_retries=2, first_seconds=0.001))
        with pytest.raises(ImageError, match=r"access: .* no header can hold the password") as raised:
            registry.manifest(Reference.parse(f"{host}/a/b"))
        registry.close()
    assert "c2VjcmV0" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    "listed",
    [
        '["sha256:0"]',
        "7",
        "null",
        '[{"platform": "linux"}]',
        '[{"platform": {"os": "linux", "architecture": "amd64"}}]',
    ],
)
def test_an_odd_list_of_manifests_is_the_failure_of_one_image(listed):
    def answer(request: BaseHTTPRequestHandler) -> None:
        content = f'{{"manifests": {listed}}}'.encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    with serving(answer) as host:
        registry = Registry(Credentials({}, ()), RetryPolicy(max_retries=0))
        with pytest.raises(ImageError, match="its list of manifests"):
            registry.manifest(Reference.parse(f"{host}/a/b"))
        registry.close()
