"""Run one task with an agent and print its calls as a forest, and which of them would not be trained.

    make agent-check URL=http://host:port              an agent server: the row is posted to /run
    make agent-check CMD="python my_agent.py"          a program: it reads the row, and OPENAI_BASE_URL

No model is loaded: the answers come from a file, one JSON string per line, or are made up: a call of the row's first
tool, a text without a call, and a last word, which is repeated for as long as the agent asks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recipes.environments.agents.by_url.agent import UrlAgents, sequences_of
from recipes.environments.agents.by_url.forest import CallNode, walk
from recipes.environments.agents.by_url.messages import REASONS
from recipes.environments.agents.by_url.session import MODEL, RolloutSession, SessionLimits
from recipes.environments.chat.codec import ChatCodec
from recipes.environments.chat.tool_calls import FlagPatterns
from recipes.environments.contract.http import JsonClient, RefusedError
from recipes.errors import InputError, Problem
from recipes.retry import TransientError
from recipes.types import Completion, VersionSpan
from tools.command_line import exit_status
from tools.draft.launch import TINY_MODEL

CONTEXT = 32_768  # tokens
PATTERNS = FlagPatterns(invalid_tool_call=("<tool_call>",), thinking_tags=("<think>", "</think>"))
QUESTION = {"responses_create_params": {"input": [{"role": "user", "content": "Say what you can do."}]}}
SHOWN = 60  # characters of an answer


@dataclass
class WrittenPolicy:
    """A policy whose answers are written down beforehand; the last one is repeated."""

    codec: ChatCodec
    answers: Sequence[str]
    num_asked: int = 0
    max_model_len: int = CONTEXT

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int) -> Completion:
        """Return the next answer, cut at the limits of the request and of the context."""
        text = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        room = max(min(max_tokens, self.max_model_len - len(prompt_token_ids)), 0)
        whole = (*self.codec.token_ids(text), self.codec.eos_token_id)
        ids = whole[:room]
        return Completion(
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason="stop" if ids == whole else "length",
        )


@exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the forest; returns 1 when the agent failed or a call would not be trained, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="agent_check", description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="address of an agent server, http://host:port")
    which.add_argument("--command", help="command line of an agent program")
    parser.add_argument(
        "--rows",
        type=Path,
        help="JSONL file whose first row is the task; default: a question, without the fields of any environment",
    )
    parser.add_argument("--answers", type=Path, help="what the policy says: one JSON string per line")
    parser.add_argument("--tokenizer", default=TINY_MODEL, help="model directory with a chat template")
    parser.add_argument("--seconds", type=float, default=300.0, help="deadline of the agent")
    options = parser.parse_args(arguments)
    if options.url and not options.url.startswith(("http://", "https://")):
        fix = "write the address with its scheme"
        raise InputError(Problem(where="URL", got=options.url, expected="http://host:port", fix=fix))
    row = _task(options.rows) if options.rows else QUESTION
    answers = [str(answer) for answer in _values(options.answers)] if options.answers else made_up(row)
    return asyncio.run(_check(options, row, answers))


async def _check(options: argparse.Namespace, row: Mapping[str, Any], answers: Sequence[str]) -> int:
    codec = ChatCodec(options.tokenizer)
    policy, agents = WrittenPolicy(codec, answers), UrlAgents()
    limits = SessionLimits(max_tokens=CONTEXT)
    session = RolloutSession(codec=codec, model=policy, patterns=PATTERNS, limits=limits)
    server = await agents.server_for(urlsplit(options.url or "http://127.0.0.1").hostname or "")
    failure = ""
    try:
        async with server.serving(session) as base_url, asyncio.timeout(options.seconds):
            if options.url:
                await _post(agents.http, options.url, row, base_url)
            else:
                await _run(options.command, row, base_url)
    except TimeoutError:
        failure = f"it was not done within {options.seconds:g} s"
    except (TransientError, RefusedError, OSError) as error:
        failure = str(error)
    finally:
        agents.close()
    print("\n".join(report(session)))
    if failure:
        print(f"the agent failed, so the rollout would have no reward: {failure}")
        if row is QUESTION:
            print("it was given a question without fields of an environment: give ROWS of the kind that it reads")
    kept = sequences_of(session.forest, max_tokens=2 * CONTEXT)
    return int(bool(failure) or not kept.paths or kept.num_trained < kept.num_delivered)


async def _post(http: JsonClient, url: str, row: Mapping[str, Any], base_url: str) -> None:
    await http.post(f"{url.rstrip('/')}/run", {**row, "model_server": {"base_url": base_url, "model": MODEL}})


async def _run(command: str, row: Mapping[str, Any], base_url: str) -> None:
    """Run a program until it ends; raises `OSError` when it fails."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "of-the-path"}
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command), stdin=asyncio.subprocess.PIPE, env={**os.environ, **variables, "OPENAI_MODEL": MODEL}
    )
    try:
        await process.communicate(json.dumps(row).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"{command}: exit status {process.returncode}")


def made_up(row: Mapping[str, Any]) -> list[str]:
    """Return answers that try what agents differ in: a call of a tool, a turn without one, a last word."""
    offered = (row.get("responses_create_params") or {}).get("tools") or ()
    tools = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in offered]
    tools = [tool for tool in tools if isinstance(tool.get("name"), str)]
    last = ["I have looked.</think>This turn calls no tool.", "That is all.</think>Done."]
    return (
        [f"I look.</think><tool_call>\n<function={tools[0]['name']}>\n</function>\n</tool_call>", *last]
        if tools
        else last
    )


def report(session: RolloutSession) -> list[str]:
    """Return one line per call, indented below the call that it continues, and what is trained of them."""
    forest = session.forest
    kept = sequences_of(forest, max_tokens=2 * CONTEXT)
    trained = frozenset().union(*kept.trained)
    lines = [_line(node, is_trained=node.number in trained) for node in walk(forest.roots)]
    lines.append(f"{len(forest.nodes)} calls answered, {session.num_calls} begun, {len(forest.roots)} conversations")
    lines += [_counted(name, count) for name, count in sorted((session.counts + forest.counts).items())]
    trains = f"{kept.num_trained} of {kept.num_delivered} sampled tokens would be trained"
    lines.append(f"{trains}, in {len(kept.paths)} sequences")
    lines += [f"lost: {count} sampled tokens, {reason}" for reason, count in sorted(kept.lost.items())]
    return lines


def _counted(name: str, count: int) -> str:
    return f"{name}: {count} ({REASONS[name]})" if name in REASONS else f"{name}: {count}"


def _line(node: CallNode, *, is_trained: bool) -> str:
    turn = node.turn
    why = f" ({node.reason})" if node.reason else ""
    sizes = f"{len(turn.prompt_token_ids)} new + {len(turn.token_ids)} sampled tokens, {turn.finish_reason}"
    said = " ".join((node.served.text or ", ".join(call.name for call in node.served.calls)).split())[:SHOWN]
    mark = "" if is_trained else "; NOT TRAINED" + ("" if node.is_delivered else ": nobody took the answer")
    return f"{'  ' * (node.num_calls - 1)}{node.kind} {node.number}{why}: {sizes}; {said!r}{mark}"


def _task(path: Path) -> Mapping[str, Any]:
    """Return the first row of a file; raises `InputError` for one that no agent could be given."""
    row: Any = _values(path)[0]
    params = row.get("responses_create_params") if isinstance(row, Mapping) else None
    tools = params.get("tools") or [] if isinstance(params, Mapping) else None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        wrong, fix = "its first value is no row with responses_create_params", "give rows as a run reads them"
        raise InputError(Problem(where=str(path), wrong=wrong, fix=fix))
    task: Mapping[str, Any] = row
    return task


def _values(path: Path) -> list[Any]:
    """Return the JSON value of each line of a file; raises `InputError` when there is none."""
    values = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            values += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            fix = "write one JSON value per line"
            raise InputError(Problem(where=f"{path}:{number}", wrong=f"no JSON ({error})", fix=fix)) from error
    if not values:
        raise InputError(Problem(where=str(path), wrong="it has no line", fix="write at least one"))
    return values


if __name__ == "__main__":
    sys.exit(main())
