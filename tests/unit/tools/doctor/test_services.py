"""Judges by address and by name, and tokens: asked, looked up, never downloaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.doctor.services import has_wandb_key, is_cached, model_findings, probe, probes


class Answers(BaseHTTPRequestHandler):
    """Answers like an OpenAI-compatible server that wants a key, and fails at /broken."""

    def do_GET(self) -> None:
        self.send_response({"/v1/models": 401, "/broken": 503}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def models(**settings: object) -> dict[str, object]:
    return {"judge": {"responses_api_models": {"vllm_model": settings}}}


def test_addresses_of_models_and_verifiers():
    instances = {
        **models(base_url=["http://a:1/v1", "http://b:2/"]),
        "math": {"resources_servers": {"math_with_judge": {"url": "http://c:3"}}},
        "mcqa": {"resources_servers": {"mcqa": None}},
    }
    assert dict(probes(instances)) == {
        "env.nemo_gym.judge.responses_api_models.vllm_model.base_url[0]": "http://a:1/v1/models",
        "env.nemo_gym.judge.responses_api_models.vllm_model.base_url[1]": "http://b:2/v1/models",
        "env.nemo_gym.math.resources_servers.math_with_judge.url": "http://c:3",
    }


def test_any_answer_of_its_own_shows_that_a_server_is_there(server):
    assert probe(f"{server}/v1/models") == ""
    assert probe(f"{server}/other") == ""
    assert probe(f"{server}/broken") == "status 503"
    assert "refused" in probe("http://127.0.0.1:9/v1/models")
    assert probe("ftp://somewhere") == "no http address"


def test_a_model_is_a_directory_or_in_the_cache(tmp_path):
    name = "lab/Judge-7B"
    environ = {"HF_HOME": str(tmp_path / "hf")}
    codes = [finding.code for finding in model_findings(models(model=name), environ)]
    assert codes == ["JDG002", "TOK002"]
    codes = [finding.code for finding in model_findings(models(model=name), environ | {"HF_TOKEN": "x"})]
    assert codes == ["JDG002"]
    snapshot = tmp_path / "hf" / "hub" / "models--lab--Judge-7B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert not is_cached(name, environ)  # a download that has only begun
    (snapshot / "config.json").touch()
    assert list(model_findings(models(model=name), environ)) == []
    assert list(model_findings(models(model=str(tmp_path)), {})) == []
    assert list(model_findings(models(model="served", base_url="http://a:1"), environ)) == []
    [finding] = model_findings(models(model="/no/model"), {})
    assert finding.code == "JDG002"
    assert "hf download" not in finding.problem.fix  # a path is no name of the hub


@pytest.mark.parametrize(
    ("model", "command"), [("tiny-wide-sft", "`make tiny BLEND=wide`"), ("tiny-nemotron-h-sft", "`make tiny`")]
)
def test_a_missing_tiny_judge_is_named_with_the_command_that_makes_it(model: str, command: str):
    [finding] = model_findings(models(model=f"/no/models/{model}"), {})
    assert f"run {command}" in finding.problem.fix


def test_a_key_of_weights_and_biases_is_found_where_its_client_looks(tmp_path: Path):
    environ = {"NETRC": str(tmp_path / "netrc")}
    assert not has_wandb_key(environ, reads_netrc=True)
    assert has_wandb_key(environ | {"WANDB_API_KEY": "x"}, reads_netrc=False)
    assert has_wandb_key(environ | {"WANDB_MODE": "offline"}, reads_netrc=False)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n", encoding="utf-8")
    (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key(environ, reads_netrc=True)
    assert not has_wandb_key(environ, reads_netrc=False)  # as in a container
    assert not has_wandb_key(environ | {"WANDB_BASE_URL": "https://wandb.example"}, reads_netrc=True)
