"""Whose password goes where: each host gets its own, and no other host gets any."""

from __future__ import annotations

import base64
import json
import stat
from http.server import BaseHTTPRequestHandler

import pytest

from recipes.errors import LaunchError
from recipes.retry import RetryPolicy
from tests.unit.tools.task_images.registry.loopback_server import serving
from tools.task_images.registry.client import Credentials, Registry, token_server
from tools.task_images.registry.references import DOCKER_HUB, ImageError, Reference, trusted_registries

VARIABLES = {"APPTAINER_DOCKER_USERNAME": "a", "APPTAINER_DOCKER_PASSWORD": "b"}
POLICY = RetryPolicy(max_retries=1, first_seconds=0.001)


def secret(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def test_passwords_come_from_the_files_of_docker(tmp_path):
    auths = {"https://index.docker.io/v1/": {"auth": secret("u", "p")}, "registry.example:5000": {"auth": "eDp5"}}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}), encoding="utf-8")
    credentials = Credentials.read({"DOCKER_CONFIG": str(tmp_path)})
    assert credentials.basic("docker.io") == f"Basic {secret('u', 'p')}"
    assert credentials.basic("registry.example:5000") == "Basic eDp5"
    assert credentials.basic("elsewhere.example") is None


def test_the_variables_belong_to_docker_hub_or_to_the_host_that_is_named():
    header = f"Basic {secret('a', 'b')}"
    assert Credentials.read(VARIABLES).basic("docker.io") == header
    assert Credentials.read(VARIABLES).basic("registry.example") is None
    named = Credentials.read({**VARIABLES, "SIF_LOGIN_HOST": "registry.example"})
    assert (named.basic("registry.example"), named.basic("docker.io")) == (header, None)


def test_a_program_may_keep_the_passwords(tmp_path, monkeypatch):
    program = tmp_path / "docker-credential-test"
    program.write_text(
        '#!/bin/sh\nread key\necho "{\\"Username\\": \\"$key\\", \\"Secret\\": \\"s\\"}"\n', encoding="utf-8"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config.json").write_text(
        json.dumps({"credHelpers": {"r.example": "test", "q.example": "absent"}}), encoding="utf-8"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    credentials = Credentials.read({"DOCKER_CONFIG": str(tmp_path)})
    assert credentials.basic("r.example") == f"Basic {secret('r.example', 's')}"
    assert credentials.basic("q.example") is None


def test_a_broken_file_of_passwords_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(LaunchError, match=r"config\.json"):
        Credentials.read({"DOCKER_CONFIG": str(tmp_path)})


def challenge(request: BaseHTTPRequestHandler, text: str) -> None:
    request.send_response(401)
    request.send_header("WWW-Authenticate", text)
    request.send_header("Content-Length", "0")
    request.end_headers()


def test_a_registry_that_a_row_names_gets_no_password_of_another():
    given = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        given.append(request.headers["Authorization"])
        challenge(request, 'Basic realm="x"')

    with serving(answer) as host:
        for environ in (VARIABLES, {**VARIABLES, "SIF_LOGIN_HOST": host}):
            registry = Registry(Credentials(environ, ()), POLICY, trusted=frozenset((host,)))
            with pytest.raises(ImageError, match="access: "):
                registry.digest(Reference.parse(f"{host}/a/b"))
            registry.close()
    assert given == [None, None, None, f"Basic {secret('a', 'b')}"]  # two requests for each; the last proves the test


def test_a_token_server_elsewhere_is_not_even_asked():
    asked = []

    def steal(request: BaseHTTPRequestHandler) -> None:
        asked.append((request.path, request.headers["Authorization"]))
        challenge(request, "Basic")

    with (
        serving(steal) as thief,
        serving(lambda request: challenge(request, f'Bearer realm="http://{thief}/"')) as host,
    ):
        files = ({"auths": {host: {"auth": secret("u", "p")}}},)
        registry = Registry(Credentials({}, files), POLICY)
        with pytest.raises(ImageError, match=rf"access: .*'http://{thief}/'.* SIF_REGISTRIES"):
            registry.digest(Reference.parse(f"{host}/a/b"))
        registry.close()
    assert asked == []


def test_no_redirect_takes_a_password_or_token_to_another_host(tmp_path):
    seen, asked = [], []

    def collect(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers["Authorization"])
        request.send_error(404)

    def send_away(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["Authorization"])
        if not asked[-1]:
            return challenge(request, "Basic")
        request.send_response(307)
        request.send_header("Location", f"http://{other}{request.path}")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with serving(collect) as other, serving(send_away) as host:
        registry = Registry(Credentials({}, ({"auths": {host: {"auth": secret("u", "p")}}},)), POLICY)
        with pytest.raises(ImageError, match="missing"):
            registry.blob(Reference.parse(f"{host}/a/b"), f"sha256:{'0' * 64}", tmp_path / "blob", lambda _: None)
        registry.close()
    assert asked == [None, f"Basic {secret('u', 'p')}"]
    assert seen == [None]


@pytest.mark.parametrize(
    ("host", "realm", "is_trusted"),
    [
        ("docker.io", "https://auth.docker.io/token", True),
        ("registry.example", "https://registry.example/token", True),
        ("registry.example", "https://login.example/jwt", True),  # the operator trusts it
        ("registry.example", "http://registry.example/token", False),  # not encrypted
        ("registry.example", "https://auth.docker.io/token", False),
        ("registry.example", "https://registry.example:8443/token", False),
        ("registry.example", "https://registry.example@thief.example/", False),
        ("registry.example", "https://registry.example.thief.example/", False),
        ("registry.example", "http://127.0.0.1:1/", False),
        ("127.0.0.1:5000", "http://127.0.0.1:5000/token", True),
        ("127.0.0.1:5000", "http://127.0.0.1:6000/token", False),
        ("registry.example", "file:///etc/passwd", False),
        ("registry.example", "", False),
    ],
)
def test_a_password_goes_to_a_token_server_of_its_registry_only(host, realm, is_trusted):
    reference, trusted = Reference(host=host, repository="a/b"), frozenset((DOCKER_HUB, "login.example"))
    if is_trusted:
        assert str(token_server(reference, realm, trusted)) == realm
    else:
        with pytest.raises(ImageError, match="access: "):
            token_server(reference, realm, trusted)


def test_the_operator_adds_registries():
    assert trusted_registries({}) == {"docker.io"}
    assert trusted_registries({"SIF_REGISTRIES": "a.example, b.example:5000"}) == {
        "docker.io",
        "a.example",
        "b.example:5000",
    }
    with pytest.raises(LaunchError, match=r"SIF_REGISTRIES: got 'https://a\.example', expected HOST\[:PORT\]"):
        trusted_registries({"SIF_REGISTRIES": "https://a.example"})
