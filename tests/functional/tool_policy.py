"""A tiny policy that has learned to call one tool, and rows for it: of the office, the mailroom, an agent elsewhere.

It is trained on rollouts that a script has made with the real agent, half of which delete the wrong email. So most of
its own rollouts have two turns, and their rewards differ.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.environments import Environments
from recipes.types import Rollout
from tests.configuration import environments as env_block
from tests.scripted import Scripted
from tools.tiny.model import build_model, build_tokenizer

AGENT, MAIL_AGENT, OUTSIDE_AGENT = "workplace_assistant_simple_agent", "mail_agent", "outside_agent"
EMAILS = ("00000001", "00000002")
TOOL = {
    "type": "function",
    "name": "email_delete_email",
    "parameters": {"type": "object", "properties": {"email_id": {"type": "string"}}},
}
NUM_STEPS, LEARNING_RATE = 40, 3e-3
IGNORED = -100  # label of a token that is not trained on


def make_row(number: int) -> dict[str, Any]:
    """Return a row that asks for one of the emails to be deleted."""
    email_id = EMAILS[number % len(EMAILS)]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Delete {email_id}"}], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "ground_truth": [{"name": TOOL["name"], "arguments": json.dumps({"email_id": email_id})}],
        "uuid": number,
    }


def make_mail_row(number: int) -> dict[str, Any]:
    """Return the same task for the mailroom, whose rows have a field of their own."""
    row = {key: value for key, value in make_row(number).items() if key != "ground_truth"}
    agent = {"type": "responses_api_agents", "name": MAIL_AGENT}
    return {**row, "agent_ref": agent, "wanted": EMAILS[number % len(EMAILS)]}


def make_outside_row(number: int) -> dict[str, Any]:
    """Return the same task for an agent program elsewhere."""
    return {**make_row(number), "agent_ref": {"type": "responses_api_agents", "name": OUTSIDE_AGENT}}


def make_lunch_row(number: int) -> dict[str, Any]:
    """Return a row for an agent program elsewhere that does not say which email must go: the reward teaches it."""
    asked = [{"role": "user", "content": "Delete the email about lunch"}]
    truth = [{"name": TOOL["name"], "arguments": json.dumps({"email_id": EMAILS[0]})}]
    params = {"input": asked, "tools": [TOOL]}
    return {**make_outside_row(number), "responses_create_params": params, "ground_truth": truth}


Maker = Callable[[int], dict[str, Any]]
ALL_KINDS: tuple[Maker, ...] = (make_row, make_mail_row, make_outside_row)


def write_policy(
    directory: Path,
    office: str,
    *,
    kinds: Sequence[Maker] = ALL_KINDS,
    num_rows: int = 32,
    num_steps: int = NUM_STEPS,
) -> None:
    """Write into `directory` the rows, and the checkpoint of a policy that was taught the first kind of them."""
    import torch

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    tokenizer.save_pretrained(directory / "model")
    rollouts = asyncio.run(_demonstrations(ChatCodec(directory / "model"), office, kinds[0]))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    _train(model, rollouts, num_steps=num_steps, pad_token_id=tokenizer.pad_token_id)
    torch.set_num_threads(num_threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory / "model")
    for name, count in (("train", num_rows), ("val", 4)):
        rows = [kinds[number // 2 % len(kinds)](number) for number in range(count)]
        lines = [json.dumps(row) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


async def _demonstrations(codec: ChatCodec, office: str, make: Maker) -> list[Rollout]:
    settings = {"workplace_assistant": {"resources_servers": {"workplace_assistant": {"tables": office}}}}
    patterns: dict[str, Any] = {"invalid_tool_call_patterns": (), "thinking_tags": ()}
    config = env_block(instances=settings, **patterns)
    environments = Environments.from_config(config, codec)
    rollouts = []
    for number in range(len(EMAILS)):
        row = {**make(number), "agent_ref": make_row(number)["agent_ref"]}
        for email_id in EMAILS:
            parameter = f"<parameter=email_id>\n{email_id}\n</parameter>"
            call = f"</think><tool_call><function={TOOL['name']}>{parameter}</function></tool_call><|im_end|>"
            says = [call, "</think>Done<|im_end|>"]
            rollouts.append(await environments.run(row, Scripted(codec, says), max_tokens=64))
    environments.close()
    assert sorted(rollout.reward or 0.0 for rollout in rollouts) == [0.0, 0.0, 1.0, 1.0]
    return rollouts


def _train(model: Any, rollouts: Sequence[Rollout], *, num_steps: int, pad_token_id: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rows = [_ids_and_labels(rollout) for rollout in rollouts]
    width = max(len(ids) for ids, _ in rows)
    ids_BS = torch.tensor([ids + [pad_token_id] * (width - len(ids)) for ids, _ in rows])
    labels_BS = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    for _ in range(num_steps):
        logits_BSV = model(input_ids=ids_BS).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _ids_and_labels(rollout: Rollout) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for turn in rollout.turns:
        ids += [*turn.prompt_token_ids, *turn.token_ids]
        labels += [*[IGNORED] * len(turn.prompt_token_ids), *turn.token_ids]
    return ids, labels
