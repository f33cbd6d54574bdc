"""A scripted policy and an office with tools, for tests of the agent of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.types import Completion, Rollout, VersionSpan
from tests.configuration import environments as env_block
from tests.office import PEOPLE, small_office
from tests.scripted import written_call

SEND = {"recipient": PEOPLE[0], "subject": "Hi", "body": "there"}
TEXT_OR_LIST = ["string", "array"]
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"body": {"type": TEXT_OR_LIST}}}}
    for name in ("email_send_email", "email_search_emails", "email_delete_email")
]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Write to Ana."}], "tools": TOOLS},
    "agent_ref": {"type": "responses_api_agents", "name": "workplace_assistant_simple_agent"},
    "ground_truth": [{"name": "email_send_email", "arguments": json.dumps(SEND)}],
}


def called(name: str, **arguments: Any) -> str:
    return f"why not</think>\n{written_call(name, arguments)}<|im_end|>"


DONE = "all done</think>Sent.<|im_end|>"


@dataclass
class Scripted:
    """A policy that says one given text, or given ids, per call; a call after the last repeats it."""

    codec: ChatCodec
    says: Sequence[str | tuple[int, ...]]
    room: int = 1_000_000
    cut_from: int = 1_000_000  # the call from which answers are cut off
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    async def generate(self, prompt_token_ids: tuple[int, ...], *, max_tokens: int) -> Completion:
        number = len(self.prompts)
        self.prompts.append(tuple(prompt_token_ids))
        said = self.says[min(number, len(self.says) - 1)]
        sampled = ids(self.codec, said) if isinstance(said, str) else said
        if len(prompt_token_ids) >= self.room:
            return Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        return Completion(
            token_ids=sampled,
            logprobs=(-0.5 - number,) * len(sampled),
            versions=(VersionSpan(version=number, start=0, end=len(sampled)),),
            finish_reason="length" if number >= self.cut_from else "stop",
        )


def made(codec: ChatCodec, **instances: Any) -> Environments:
    office = {"workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": small_office()}}}}
    patterns = {"invalid_tool_call_patterns": ("<tool_call>", "</tool_call>"), "thinking_tags": ("<think>", "</think>")}
    config = env_block(instances={**office, **instances}, **patterns)
    return Environments.from_config(config, codec)


def made_environments(codec: ChatCodec) -> Iterator[Environments]:
    """Give environments with an office, and close them afterwards; for a fixture."""
    environments = made(codec)
    yield environments
    environments.close()


def ids(codec: ChatCodec, text: str) -> tuple[int, ...]:
    return codec._tokenize(text)


def all_ids(rollout: Rollout) -> tuple[int, ...]:
    return tuple(token for turn in rollout.turns for token in (*turn.prompt_token_ids, *turn.token_ids))
