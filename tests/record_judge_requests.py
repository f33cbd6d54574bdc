"""Record what NeMo Gym's servers ask their judges about our rows: `tests/golden/judge_requests.json`.

    PYTHON -m tests.record_judge_requests --gym CHECKOUT_OF_NEMO_GYM --stage STAGE1_RLVR_YAML_OF_NEMO_RL

The published servers run as they are, with the published settings of stage 1; in place of a judge's engine stands one
that writes the request down and says what the case says. PYTHON needs what NeMo Gym imports (hydra-core, yappi, pydot,
wandb, ... beside this project's packages). The file holds hashes and rewards, no text.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.judge_requests import RECORDED, Case, cases, request_sha256

SERVERS = {  # instance -> directory and class of its server
    "over_refusal_detection": ("over_refusal_detection", "OverRefusalDetectionResourcesServer"),
    "jailbreak_detection": ("jailbreak_detection", "JailbreakDetectionResourcesServer"),
    "genrm_compare_resources_server": ("genrm_compare", "GenRMCompareResourcesServer"),
    "multichallenge": ("multichallenge", "MultiChallengeServer"),
    "inverse_if": ("inverse_if", "InverseIFServer"),
    "equivalence_llm_judge": ("equivalence_llm_judge", "LLMJudgeResourcesServer"),
    "lc_judge": ("equivalence_llm_judge", "LLMJudgeResourcesServer"),
    "math_with_judge": ("math_with_judge", "LibraryJudgeMathResourcesServer"),
    "ns_tools": ("math_with_judge", "LibraryJudgeMathResourcesServer"),  # which it hands its verdicts to
    "math_formal_lean": ("math_formal_lean", "MathFormalLeanResourcesServer"),
}
SETTINGS_OF = {"ns_tools": "math_with_judge"}
JUDGE_KEYS = ("judge_model_server", "genrm_model_server")


def main() -> int:
    """Record every case; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--gym", type=Path, required=True, help="checkout of NeMo Gym at the pinned commit")
    parser.add_argument("--stage", type=Path, required=True, help="stage1_rlvr.yaml of NeMo RL at the pinned commit")
    options = parser.parse_args()
    sys.path.insert(0, str(options.gym))
    published = Published(options.gym, options.stage)
    found = {}
    for case in cases():
        found[case.name] = asyncio.run(published.record(case))
        print(case.name, len(found[case.name]["requests"]), found[case.name]["rewards"])
    lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


class Published:
    """The published servers with the settings of stage 1."""

    def __init__(self, gym: Path, stage: Path) -> None:
        from omegaconf import OmegaConf

        self.gym = gym
        own = OmegaConf.load(stage).env.nemo_gym
        merged = OmegaConf.merge(*(OmegaConf.load(gym / path) for path in own.config_paths), own)
        self.settings: dict[str, Any] = OmegaConf.to_container(merged, resolve=False)

    async def record(self, case: Case) -> dict[str, Any]:
        """Return the hashes of the requests of a case and the rewards of its answers."""
        folder, class_name = SERVERS[case.server]
        place = self.gym / "resources_servers" / folder
        sys.path.insert(0, str(place))
        for shared in ("util", "proof_utils", "sandbox_client"):
            sys.modules.pop(shared, None)
        module = importlib.import_module(f"resources_servers.{folder}.app")
        engine = Engine(case.replies)
        server = self._server(case.server, folder, getattr(module, class_name), self._client(case.server, engine))
        sys.path.remove(str(place))
        if case.output:
            server._sandbox_client.execute_lean4 = compiled(case.output)
        request_class = type(server).verify.__annotations__["body"]
        if isinstance(request_class, str):
            request_class = getattr(module, request_class)
        bodies = [request_class.model_validate({**case.row, "response": response}) for response in case.responses]
        if case.server == "genrm_compare_resources_server":
            history = module._input_to_conversation_history(bodies[0].responses_create_params.input)
            answers = [body.response.model_dump() for body in bodies]
            rewards, *_ = await server._run_compare(history, answers, bodies[0].principle)
        else:
            verdict = await server.verify(bodies[0])
            rewards = [verdict.reward]
            if case.server == "math_formal_lean":
                engine.requests = [{"prompt": verdict.correction_prompt}] if verdict.correction_prompt else []
        return {"requests": [request_sha256(request) for request in engine.requests], "rewards": rewards}

    def _server(self, instance: str, folder: str, server: type, client: Any) -> Any:
        [settings] = self.settings[SETTINGS_OF.get(instance, instance)]["resources_servers"].values()
        config_class = server.model_fields["config"].annotation  # type: ignore[attr-defined]
        os.chdir(self.gym / "resources_servers" / folder)
        given = {key: value for key, value in settings.items() if not str(value).startswith("${")}
        config = config_class.model_validate({**given, "host": "127.0.0.1", "port": 1, "name": instance})
        made = server(config=config, server_client=client)
        if hasattr(made, "_load_policy_verifier_templates"):
            made._load_policy_verifier_templates()
        return made

    def _client(self, instance: str, engine: Engine) -> Any:
        [settings] = self.settings[SETTINGS_OF.get(instance, instance)]["resources_servers"].values()
        name = next((settings[key]["name"] for key in JUDGE_KEYS if key in settings), None)
        from nemo_gym.server_utils import ServerClient

        class Client(ServerClient):
            model: Any = None

            async def post(self, server_name: str, url_path: str, **kwargs: Any) -> Any:
                assert url_path == "/v1/responses" and server_name == name
                # As over HTTP: the body is JSON without what was not set.
                body = kwargs["json"].model_dump(exclude_unset=True, mode="json")
                return Reply(await self.model(body))

        client = Client.model_construct(head_server_config=None, global_config_dict=None)
        client.model = model_server(self.settings[name]["responses_api_models"], engine) if name else None
        return client


def model_server(block: Mapping[str, Any], engine: Engine) -> Any:
    """Return a function from a request to the published model server to its reply, with `engine` behind it."""
    from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
    from responses_api_models.vllm_model import app

    [(kind, settings)] = block.items()
    model_class, config_class = app.VLLMModel, app.VLLMModelConfig
    if kind == "genrm_model":  # its own module starts a vLLM; only what it does to a request matters here
        local = types.ModuleType("responses_api_models.local_vllm_model.app")
        local.LocalVLLMModel, local.LocalVLLMModelConfig = model_class, config_class  # type: ignore[attr-defined]
        sys.modules[local.__name__] = local
        genrm = importlib.import_module("responses_api_models.genrm_model.app")
        model_class, config_class = genrm.GenRMModel, genrm.GenRMModelConfig
    given = {key: value for key, value in settings.items() if not key.startswith(("vllm_", "hf_", "debug"))}
    given |= {"base_url": "http://127.0.0.1:1", "api_key": "k", "host": "127.0.0.1", "port": 1, "name": "judge"}
    config = config_class.model_validate(given)
    server = model_class.model_construct(config=config)
    server._converter = server.get_converter()
    server._transport_call_index = 0
    server._resolve_client = lambda _request: engine

    async def respond(body: Mapping[str, Any]) -> str:
        params = NeMoGymResponseCreateParamsNonStreaming.model_validate(body)
        request = types.SimpleNamespace(headers={}, session={})
        return (await server.responses(request, params)).model_dump_json()

    return respond


class Engine:
    """In place of vLLM: writes each request down, and says what the case says."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.replies = itertools.cycle(replies or ["?"])

    async def create_chat_completion(self, **request: Any) -> dict[str, Any]:
        """Answer one request."""
        self.requests.append(json.loads(json.dumps(request)))
        message = {"role": "assistant", "content": next(self.replies)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


class Reply:
    """What an HTTP client of the published servers gives back."""

    ok, status = True, 200

    def __init__(self, body: str) -> None:
        self.body = body

    async def text(self) -> str:
        """Return the body."""
        return self.body

    async def read(self) -> bytes:
        """Return the body's bytes."""
        return self.body.encode()

    async def json(self) -> Any:
        """Return the body's value."""
        return json.loads(self.body)


def compiled(output: Mapping[str, str]) -> Any:
    """Return a compiler that says `output`."""

    async def execute(**_: Any) -> dict[str, str]:
        return dict(output)

    return execute


if __name__ == "__main__":
    sys.exit(main())
