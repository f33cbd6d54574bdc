"""Answers rows with an engine that is asked by its URL in OpenAI's chat completions, scored as in training.

    row -> chat request -> the engine -> its message -> the row's own agent and verifier -> a line of the profile

Nothing of the model is here: the engine has its tokenizer and its chat template. What stands for token ids between the
agent and the engine are numbers of requests and of answers. So agents that take turns with tools work as well, and
those do not that speak to a model server themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config.keys.derive import template_kwargs
from recipes.config.tree import Config
from recipes.environments.chat.codec import ChatCodec, Decoded, PrefixError, row_template_kwargs
from recipes.environments.chat.messages import assistant_items, chat_messages, chat_tools
from recipes.environments.contract.http import RefusedError
from recipes.environments.environments import AGENT_KINDS, Environments
from recipes.environments.instances import agents_of, find_agent, servers_of
from recipes.environments.scoring.judge import JudgeClient, JudgeFailedError
from recipes.errors import DataError, InputError, Problem, RequestError
from recipes.grpo.data import PromptDataset, require_rows, row_id
from recipes.grpo.metrics import PASS_REWARD, profile_entry
from recipes.rollouts.group import GroupRequest, GroupRunner
from recipes.tokens import pack_rollouts
from recipes.types import Completion, Sampling, VersionSpan
from tools.data.curriculum.profile import GREEDY, ProfileLedger, greedy, what_is_measured

ROWS_IN_FLIGHT = 64
PROBE_SECONDS = 10.0
TOO_LONG = ("max_tokens", "context length", "max_model_len")  # in the refusal of a request that the context cannot hold


class ServedChat(ChatCodec):
    """Codec and engine of a model that is served: a request is one number, an answer one for each of its tokens."""

    def __init__(self, client: JudgeClient, kwargs: Mapping[str, Any]) -> None:
        self.eos_token_id = -1
        self._client, self._kwargs = client, kwargs
        self._numbers = itertools.count()
        self._requests: dict[int, dict[str, Any]] = {}
        self._messages: dict[int, Mapping[str, Any]] = {}

    def encode(self, params: Mapping[str, Any], items: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the number of a request."""
        before = params["input"]
        before = [{"role": "user", "content": before}] if isinstance(before, str) else list(before)
        body: dict[str, Any] = {"messages": chat_messages({**params, "input": [*before, *items]})}
        if tools := chat_tools(params):
            body["tools"] = tools
            body |= {"tool_choice": params["tool_choice"]} if params.get("tool_choice") else {}
        if kwargs := {**self._kwargs, **row_template_kwargs(params)}:
            body["chat_template_kwargs"] = kwargs
        number = next(self._numbers)
        self._requests[number] = body
        return (number,)

    def extend(
        self, seen_ids: tuple[int, ...], params: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """Return the number of the whole conversation as a request."""
        return self.encode(params, items)

    def suffix(self, answer: object, messages: object, kwargs: object) -> tuple[int, ...]:
        """Refuse: a request holds the whole conversation."""
        raise PrefixError("a request by URL holds the whole conversation")

    def why_refused(self, params: object, template_kwargs: object, *, goes_on: bool) -> None:
        """Return nothing: the engine has the template."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        num_calls: int = 0,
        is_cut: bool = False,
    ) -> Decoded:
        """Return the message of an answer as items."""
        message = self._messages.pop(token_ids[0])
        thought, text = message.get("reasoning_content") or message.get("reasoning"), message.get("content") or ""
        text = f"<think>{thought}</think>{text}" if thought else text
        calls = [
            {"id": f"call_{num_calls + place}", "function": call["function"]}
            for place, call in enumerate(message.get("tool_calls") or ())
        ]
        return Decoded(items=tuple(assistant_items({"content": text, "tool_calls": calls})), text=text)

    async def generate(self, prompt_token_ids: Sequence[int], sampling: Sampling, **_: object) -> Completion:
        """Ask the engine; raises `RequestError` when it gives no answer."""
        asked = self._requests.pop(prompt_token_ids[-1])
        how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        body = {"model": self._client.model, **asked, **how}
        try:
            reply = await self._client.within_time(lambda: self._post(body))
            choice = reply["choices"][0]
            message, why = choice["message"], choice.get("finish_reason")
            num_tokens = max(1, int((reply.get("usage") or {}).get("completion_tokens") or 1))
        except JudgeFailedError as error:
            raise RequestError(str(error)) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestError(f"{self._client.name}: the reply is no chat completion ({error!r})") from error
        number = next(self._numbers)
        self._messages[number] = message
        return Completion(
            token_ids=(number,) * num_tokens,
            logprobs=(0.0,) * num_tokens,
            versions=(VersionSpan(version=0, start=0, end=num_tokens),),
            finish_reason="length" if why == "length" else "stop",
        )

    async def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._client.post("chat/completions", body)
        except RefusedError as error:  # less room is left than an answer may have: then the rest of the context is its
            if not any(words in str(error) for words in TOO_LONG):
                raise
            return await self._client.post("chat/completions", {k: v for k, v in body.items() if k != "max_tokens"})

    def end(self, session: object) -> None:
        """Nothing: the engine keeps no session."""


def served_model(url: str, name: str) -> str:
    """Return the model that is asked for: the one of that name, else the only one; raises `InputError`."""
    key = os.environ.get("OPENAI_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/models", headers=headers)
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as answer:
            names = [str(one["id"]) for one in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wrong = f"it lists no models ({type(error).__name__}: {error})"
        fix = "start the engine, or correct the address, which ends with /v1; set OPENAI_API_KEY where it wants a key"
        raise InputError(Problem(where=f"URL={url}", wrong=wrong, fix=fix)) from error
    if name in names or (not name and len(names) == 1):
        return name or names[0]
    expected = f"one of {', '.join(names)}"
    raise InputError(Problem(where="MODEL", got=name or "no name", expected=expected, fix="give MODEL=NAME"))


def measure(config: Config, rows: Path, run_dir: Path, *, url: str, model: str, samples: int) -> int:
    """Write the profile of a served model, as `make profile` does of a checkpoint; return its status."""
    client = JudgeClient(
        name=url,
        urls=(url,),
        model=model,
        params={},
        timeout_seconds=config.deadlines.generation,
        max_concurrency=ROWS_IN_FLIGHT * samples,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
    )
    chat = ServedChat(client, template_kwargs(config.policy))
    environments = Environments.from_config(config.env, chat)
    try:
        dataset = require_rows(rows, environments.check_row)
        require_own_agents(config, dataset, rows)
        known = what_is_measured(config, rows, samples=samples, pass_reward=PASS_REWARD, model=f"{model} at {url}")
        runner = GroupRunner(
            sampler=chat,
            runner=environments,
            max_model_len=config.policy.generation.vllm_cfg.max_model_len,
            rollout_seconds=config.deadlines.rollout,
        )
        cfg, without_verdict = config.policy.generation, 0
        for directory, temperature, num in ((run_dir, cfg.temperature, samples), (run_dir / GREEDY, 0.0, 1)):
            entries = known if directory == run_dir else greedy(known)
            ledger = ProfileLedger.open(directory, entries)
            sampling = Sampling(temperature=temperature, top_p=cfg.top_p, max_tokens=cfg.max_new_tokens)
            asyncio.run(_answer(runner, dataset, ledger, sampling, num))
            asyncio.run(client.http.close())
            without_verdict += ledger.finish(entries)["without_verdict"]
        return 1 if without_verdict else 0
    finally:
        environments.close()


def require_own_agents(config: Config, dataset: PromptDataset, rows: Path) -> None:
    """Raise `DataError` for rows whose agent speaks to a model server itself."""
    instances = config.env.nemo_gym.instances
    agents = agents_of(instances, servers_of(instances, judge_texts=config.env.judge_texts))
    names = {dataset[index]["agent_ref"]["name"] for index in range(len(dataset))}
    if others := sorted(name for name in names if find_agent(name, agents).kind not in AGENT_KINDS):
        wrong = f"agents that no chat request answers: {', '.join(others)}"
        fix = "leave their rows out, or give the weights themselves: CHECKPOINT"
        raise DataError(Problem(where=str(rows), wrong=wrong, fix=fix))


async def _answer(
    runner: GroupRunner, dataset: PromptDataset, ledger: ProfileLedger, sampling: Sampling, num_samples: int
) -> None:
    """Answer and score the rows that the ledger does not have, some of them at once."""
    gate = asyncio.Semaphore(ROWS_IN_FLIGHT)

    async def one(index: int) -> None:
        async with gate:
            row = dataset[index]
            request = GroupRequest(row=row, sampling=sampling, affinity=index, num_rollouts=num_samples)
            headers, _ = pack_rollouts(await runner.run(request))
            ledger.add(profile_entry(index + 1, row_id(row), row["agent_ref"]["name"], headers))

    missing = [index for index in range(len(dataset)) if index + 1 not in ledger.entries]
    print(f"profile: {len(dataset)} rows, {num_samples} answers each: {len(missing)} to answer", flush=True)
    async with asyncio.TaskGroup() as group:
        for index in missing:
            group.create_task(one(index))
