"""What every verifier module declares: one `VERIFIER`, which says all that the rest of the project knows of it.

A module in `verifiers/` has the same parts in the same order: a docstring (the task, the reward, every decision that
a reader might not expect), a frozen `Task`, `parse_task`, a pure `score`, and `VERIFIER` at the end. A Task's fields
are JSON values with tuples in place of lists, so that it can be hashed and sent to a scoring process.

A verifier that scores the answers of one group together: what it declares, and how it asks its judge.

It differs from a `Verifier` in what it is given: all answers to one prompt. It is a generator that yields questions
like a verifier with a judge (`advance`), but is sent `NoReply` where a question had none: one comparison that fails
costs only the answers that have no other. Whoever drives it bounds the time of the whole group.

Tools that a verifier answers itself, over a state that belongs to one rollout.

A state is a value: a call returns the next one, so a session is one variable and a test needs none. A tool that runs
code keeps that code's variables in a sandbox, in a session that belongs to the rollout too.

The Responses object: building its items, and the ways verifiers read text from it.

The ways differ on purpose: each verifier names the one that its reward was defined with. Reasoning items are
never part of the graded text.

What a verifier says about one response: a verdict with its reason, or the fact that there is none.

A missing verdict is a value of its own and never becomes a number: a rollout without a verdict has no reward, does
not enter its group's statistics and is counted.

How a verifier asks a judge model or runs a program while it scores, without doing any input or output itself.

A verifier that needs nobody else is a function: `score(response, task) -> Verdict`. One that needs a judge, or a
sandbox, is a generator: it yields the requests that may be made at the same time, all of one kind, is sent one reply
for each, and returns its verdict. Who drives it decides how judges and sandboxes are reached; a test sends fixed
replies.

    def score(response: Response, task: Task) -> Scoring:
        (reply,) = yield [JudgeQuestion(messages=(("user", "Is it right? [[YES]] or [[NO]]"),))]
        is_right = first_label(last_part_text(reply), "[[YES]]", "[[NO]]") == "[[YES]]"
        return Verdict(reward=float(is_right), reason="the judge says yes" if is_right else "the judge says no")

A generator never sees a judge or a sandbox that failed: its driver gives up and reports no verdict, so that no failure
becomes a number. A reply that arrives and says nothing usable is the verifier's to read; each states what it means
there.

Scoring is pure, so a driver may keep no generator between two requests: `advance` starts it again and sends it all
replies so far. That is how a scoring process, which keeps nothing, scores with a judge.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.environments.contract.rows import shown, wrong
from recipes.environments.contract.settings import NoSettings
from recipes.environments.contract.texts import PublishedText
from recipes.exact_json import loads
from recipes.types import RolloutStatus, Row

Response = Mapping[str, Any]
"""A Responses object: `output` is a list of `message`, `reasoning` and `function_call` items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and why; raises `ValueError` for a reward that is not finite."""

    reward: float
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # numeric extras, averaged per agent in the logs
    details: Mapping[str, str | None] = field(default_factory=dict)  # what was read from the answer, for logs
    is_flagged: bool = False  # the environment asks to keep the rollout out of the loss

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, got {self.reward} ({self.reason})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoVerdict:
    """The environment failed; `status` says which part of it."""

    status: RolloutStatus
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An answer that is scored together with those of its group, once all of them are there."""

    response: Response


def env_failed(reason: str) -> NoVerdict:
    """Return that the environment itself failed, and why."""
    return NoVerdict(status=RolloutStatus.ENV_FAILED, reason=reason)


Item = dict[str, Any]

UNFINISHED = ("failed", "cancelled", "queued", "in_progress")  # states of a response that is no answer


def message_item(text: str, *, index: int = 0) -> Item:
    """Return an assistant message with one text part."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "id": f"msg_{index}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def reasoning_item(summaries: Sequence[str], *, index: int = 0) -> Item:
    """Return a reasoning item with one summary part per text."""
    parts = [{"type": "summary_text", "text": text} for text in summaries]
    return {"id": f"rs_{index}", "type": "reasoning", "summary": parts}


def function_call_item(name: str, arguments: str, *, call_id: str) -> Item:
    """Return a function call; `arguments` is JSON text as the model wrote it."""
    return {
        "id": call_id,
        "call_id": call_id,
        "type": "function_call",
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def function_call_output_item(output: str, *, call_id: str) -> Item:
    """Return what a tool answered to a call, as text."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def response_object(output: Sequence[Item], *, incomplete_reason: str | None = None) -> dict[str, Any]:
    """Return a Responses object around output items; a reason marks it incomplete."""
    return {
        "id": "resp_0",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "incomplete" if incomplete_reason else "completed",
        "incomplete_details": {"reason": incomplete_reason} if incomplete_reason else None,
    }


def require_response(value: object, field: str = "response") -> Mapping[str, Any]:
    """Return a Responses object that can be read; raises `ValueError` that names the field that cannot.

    What a verifier does not find counts as no answer, so nothing may be passed over: a reply of another API or an item
    without a type would earn 0.
    """
    if not isinstance(value, Mapping):
        raise wrong(field, value, "a Responses object")
    if value.get("status") in UNFINISHED:
        raise wrong(f"{field}.status", value["status"], "an answer: completed or incomplete")
    items = value.get("output")
    if not isinstance(items, list):
        raise wrong(f"{field}.output", items, "a list of output items")
    for number, item in enumerate(items):
        _require_item(item, f"{field}.output.{number}")
    return value


def _require_item(item: object, field: str) -> None:
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
        got = item.get("type") if isinstance(item, Mapping) else item
        raise wrong(f"{field}.type" if isinstance(item, Mapping) else field, got, "an item with its type, as `message`")
    if item["type"] == "message":
        _require_parts(item.get("content"), f"{field}.content")
    elif item["type"] == "function_call":
        for name in ("name", "arguments"):
            if not isinstance(item.get(name), str):
                raise wrong(f"{field}.{name}", item.get(name), "a string")
    elif item["type"] == "reasoning" and item.get("summary") is not None:
        _require_parts(item["summary"], f"{field}.summary")


def _require_parts(parts: object, field: str) -> None:
    if isinstance(parts, str):
        return
    if not isinstance(parts, list):
        raise wrong(field, parts, "a list of parts")
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            got = part.get("type") if isinstance(part, Mapping) else part
            raise wrong(f"{field}.{number}", got, "a part with its type, as `output_text`")
        if part["type"].endswith("text") and not isinstance(part.get("text"), str):
            raise wrong(f"{field}.{number}.text", part.get("text"), "a string")


def output_items(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the output items that are objects."""
    output = response.get("output")
    if not isinstance(output, list):
        return []
    return [item for item in output if isinstance(item, Mapping)]


def _parts(item: Mapping[str, Any]) -> Iterator[str]:
    content = item.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]


def all_text(response: Mapping[str, Any]) -> str:
    """Return every text part of every message, concatenated."""
    return "".join(message_texts(response))


def last_item_text(response: Mapping[str, Any]) -> str:
    """Return the first text part of the last output item; "" when that is no message."""
    items = output_items(response)
    return next(_parts(items[-1]), "") if items else ""


def last_message_text(response: Mapping[str, Any]) -> str:
    """Return the text parts of the last assistant message, joined by newlines, stripped."""
    messages = [item for item in output_items(response) if item.get("type") == "message"]
    return "\n".join(_parts(messages[-1])).strip() if messages else ""


def message_texts(response: Mapping[str, Any]) -> list[str]:
    """Return every text part of every message, in order."""
    return [text for item in output_items(response) if item.get("type") == "message" for text in _parts(item)]


def function_calls(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the function calls in order."""
    return [item for item in output_items(response) if item.get("type") == "function_call"]


MAX_SCANNED = 20_000_000  # characters that are read in search of objects, some several times


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeQuestion:
    """One call of a judge model."""

    messages: tuple[tuple[str, str], ...]  # (role, text) in order
    marks: tuple[str, ...] = ()  # control strings of its template, which stay: no text of a row or an answer has them
    params: Mapping[str, Any] = field(default_factory=dict)  # over those of the server: temperature, top_p, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One program to run in a sandbox.

    Its reply has `process_status` (completed, error, failed or timeout), `stdout` and `stderr`; at a timeout also
    `used_seconds`, those in which it ran, or waited, but not for a processor.
    """

    language: str  # as the sandbox names it: python3, shell, lean4
    code: str
    seconds: float  # on the clock, once it has started; in an image those that it uses
    stdin: str = ""
    max_characters: int = 1000  # kept of each of stdout and stderr
    image: str = ""  # file of a container image in which it runs; "" = the sandbox
    preparation: str = ""  # in an image: script that ends, with status 0, before the program begins
    network: bool = False  # in an image: whether it has this machine's network, its loopback too


Scoring = Generator[Sequence[JudgeQuestion] | Sequence[Execution], Sequence[Response], Verdict]
"""A verdict in progress. Replies are one per request, in the order of the requests: of a judge a Responses object."""


Requests = list[JudgeQuestion] | list[Execution]


Replies = Sequence[Sequence[Response]]
"""What a scoring was answered so far, one sequence per time that it asked."""


def advance(scored: Verdict | Scoring, replies: Replies) -> Verdict | Requests:
    """Return the verdict of what a verifier's `score` returned, or what it requests after these replies."""
    if isinstance(scored, Verdict):
        return scored
    try:
        requests = next(scored)
        for answers in replies:
            requests = scored.send(answers)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
    finally:
        scored.close()
    return list(requests)  # type: ignore[return-value]  # all are of one kind


NO_LABELS: Mapping[str, str] = {}


class SilentJudgeError(Exception):
    """A judge's reply holds no text, such as one that was cut off while it thought: there is no verdict."""


def require_text(reply: Response) -> str:
    """Return the text of a reply's last message; raises `SilentJudgeError` for a reply without text.

    For a judge whose silence would earn something.
    """
    text = last_message_text(reply)
    if not text:
        raise SilentJudgeError("the judge's reply holds no text; let it write more tokens")
    return text


def last_part_text(reply: Response) -> str:
    """Return the last text part of the last output item; "" when that is no message, as after cut-off reasoning."""
    items = output_items(reply)
    if not items or items[-1].get("type") != "message":
        return ""
    content = items[-1].get("content")
    parts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return parts[-1] if parts and isinstance(parts[-1], str) else ""


def json_objects(text: str) -> Iterator[str]:
    """Yield every object `{...}` that JSON can read and that no other such object holds, in order.

    It reads at most `MAX_SCANNED` characters: each brace of a reply may begin an object that ends nowhere.
    """
    decoder, at, left = json.JSONDecoder(), text.find("{"), MAX_SCANNED
    while at >= 0 and left > 0:
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            left -= 1 + error.pos  # the error counts the lines before it
            at = text.find("{", at + 1)
        except (ValueError, RecursionError):  # a number of too many digits, or too deep
            left -= len(text) - at
            at = text.find("{", at + 1)
        else:
            yield text[at:end]
            at = text.find("{", end)


def first_label(text: str, *labels: str) -> str | None:
    """Return the label that stands first in a text, None when none does. The longer one wins at the same place."""
    places = [(text.find(label), -len(label), label) for label in labels if label in text]
    return min(places)[2] if places else None


def without_labels(text: str, *labels: str, any_case: bool = False) -> str:
    """Return a text for a judge to read, in which every label is broken by a space, as its reader finds it.

    A judge may quote what it judges, or the question, before it says its label: the quote must not be read as its
    verdict.
    """
    pattern = "|".join(f"{re.escape(label[0])}(?={re.escape(label[1:])})" for label in labels if label) or "(?!)"
    flags = re.IGNORECASE if any_case else re.NOFLAG
    return re.sub(pattern, lambda found: f"{found[0]} ", text, flags=flags)  # each: labels may overlap


# What chat templates set between messages. A server reads it out of a text too: an answer that holds it would end its
# own message, and begin one of the system, or that of the answer which it is compared with. Tags of reasoning and of
# calls are among them: what stands behind one would be read as the judge's own thoughts, or as no part of the answer.
CONTROLS = re.compile(
    r"<[|\uff5c](?=[^<>\n]{0,40}?[|\uff5c])|<[|\uff5c](?:im|start|end|eot|eom|header|user|assistant|system)"
    r"|</?s>|<(?:bos|eos|pad|unk|mask|cls|sep)>|<(?:start|end)_of_(?:turn|image)>|<SPECIAL_\d+>|<extra_id_\d+>"
    r"|<reserved_\d+>|<unused\d+>|<[|_]?(?:Human|User|Bot|System|Assistant|function_(?:call|results))[|_]?>"
    r"|</?(?:think|thinking|thought|reasoning|reflection|seed:\w+)>|</?tool_(?:call|calls|response|responses|list)>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|THINK|gMASK|sMASK|MASK|CLS|SEP|PAD|UNK|BOS|EOS)\]"
    r"|<sop>|<eop>|<</?SYS>>",
    re.IGNORECASE,
)
ZERO_WIDTH_SPACE = "\u200b"  # breaks a control string, and is not seen


def without_controls(text: str, marks: Sequence[str] = ()) -> str:
    """Return a text in which control strings (`CONTROLS`) are broken, but for those that begin one of `marks`."""

    def broken(found: re.Match[str]) -> str:
        is_kept = any(text.startswith(mark, found.start()) for mark in marks)
        return found[0] if is_kept else f"{found[0][0]}{ZERO_WIDTH_SPACE}{found[0][1:]}"

    return CONTROLS.sub(broken, text)


_FIELDS = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def filled(
    template: str, values: Mapping[str, str], *, labels: Mapping[str, str] = NO_LABELS, any_case: bool = False
) -> str:
    """Replace each `{name}` of a template by its value, and doubled braces by one, as `str.format` does, in one pass.

    A name without a value stays as it is. `labels` are values, too: those by which a judge answers, which are broken in
    all others (`without_labels`).
    """
    texts = list(labels.values())
    own = {name: without_labels(value, *texts, any_case=any_case) for name, value in values.items()} | dict(labels)
    return _FIELDS.sub(lambda found: own.get(found[1], found[0]) if found[1] else found[0][0], template)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReply:
    """A question that was not answered, and why."""

    reason: str


GroupScoring = Generator[Sequence[JudgeQuestion], Sequence[Response | NoReply], list[Verdict | NoVerdict]]
"""The verdicts of a group in progress, one per answer in the order of the answers. Replies come in the order of the
questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerifier:
    """One verifier of groups: its functions, how rows reach it, and what it needs to run."""

    parse_task: Callable[[Row, Any], Any]
    """Read the verifier's fields of a row, under its settings. Raises `ValueError` that names the field, what was got
    and what is expected."""
    score: Callable[[Sequence[Response], Any], GroupScoring]
    """Score the answers to one task. It takes little time on any text, since it runs beside all other rollouts."""
    judge: str  # the judge's name in the settings of its server: `<judge>_model_server`
    agents: Mapping[str, Agent]  # agent names of rows that need no configuration
    seconds: float  # for one group, unless its server says otherwise
    concurrency: int  # questions asked at the same time, of all groups together
    settings: type = NoSettings  # the frozen dataclass of its server's settings
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # instance name -> settings
    needs_judge: Callable[[Any], bool] = lambda _settings: True
    texts: Callable[[Any], Mapping[str, PublishedText]] = lambda _settings: {}  # as in `Verifier`


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Python to run in the rollout's session of a sandbox, which keeps variables from cell to cell."""

    code: str
    seconds: float
    max_characters: int  # kept of each of stdout and stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """How a session with tools begins and goes on."""

    start: Callable[[Any], Any]
    """Return the first state, under the server's settings. Raises `ValueError` that says what is missing."""
    call: Callable[[Any, str, Mapping[str, Any]], tuple[Any, str | Cell]]
    """Return the next state and the text that the model is shown, or the cell that `read` makes it of. Pure; takes any
    name and arguments, never raises."""
    read: Callable[[Any, Mapping[str, Any]], tuple[Any, str]] | None = None
    """Return the next state and the text, from a sandbox's answer to a cell. Pure; takes any answer."""


def read_arguments(text: object) -> dict[str, Any]:
    """Return the arguments in a function call; raises `ValueError` for text that is no JSON object."""
    if not isinstance(text, str):
        raise ValueError(f"got {shown(text)}, expected JSON text")
    value = loads(text.encode("utf-8", "replace"))  # its error is a ValueError, for deep nesting too
    if not isinstance(value, dict):
        raise ValueError(f"got {shown(value)}, expected an object")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How rows of one agent name are run, and the server instance that scores them."""

    kind: str  # a key of environments.AGENT_KINDS; `by_url` for an agent elsewhere
    server: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # over those of the policy, under a row's own
    max_steps: int | None = None  # model calls of one rollout at most, for an agent that makes several
    url: str = ""  # of an agent elsewhere
    timeout_seconds: float = 0.0  # of one rollout of an agent elsewhere
    keeps_history: bool = True  # see `PromptBuilder.keeps_history`
    trains_main_only: bool = False  # of an agent elsewhere: see `sequences_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """One verifier: its functions, how rows reach it, and what it needs to run."""

    task: type  # the frozen dataclass that `parse_task` returns
    parse_task: Callable[[Row, Any], Any]
    """Read the verifier's fields of a row, under its settings. Raises `ValueError` that names the field, what was got
    and what is expected."""
    score: Callable[[Response, Any], Verdict | Scoring]
    """Score one response to a task. Pure; takes any response. A generator where it asks a judge or runs a program
    (`advance`)."""
    settings: type = NoSettings  # the frozen dataclass of its server's settings
    rewards: tuple[float, float] = (0.0, 1.0)  # smallest and largest reward it can give
    class_name: str = ""  # of NeMo Gym's server, part of the name of its session cookie; "" = made of the module's name
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """Agent names of rows that need no configuration; none = `NAME_simple_agent`, which makes one model call."""
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of instances that need no configuration
    needs_judge: Callable[[Any], bool] = lambda _settings: False
    """Whether a server with these settings asks a judge, which its setting `judge_model_server` then names."""
    texts: Callable[[Any], Mapping[str, PublishedText]] = lambda _settings: {}
    """Of a server with these settings, setting -> the published text that it has with `env.judge_texts: published`
    where the configuration gives it none."""
    files: Callable[[Any], Mapping[str, str]] = lambda _settings: {}
    """Of a server with these settings, setting -> the file or directory of the user's that it names (`named_file`)."""
    tools: Tools | None = None  # that the model can call during a rollout, beside the scoring
    needs_sandbox: bool = False  # whether it runs programs
    imports: tuple[str, ...] = ()  # libraries to load before the first score
    kind_of: Callable[[Any], str] = lambda _task: ""
    """Name the kind of a task, for `prepare`."""
    prepare: Callable[[str], None] = lambda _kind: None
    """Build and keep what scores of a kind of task share. It runs where no model text is seen; "" is every task."""
    is_cheap: Callable[[Any], bool] = lambda _task: False
    """Whether scoring a task takes little time on any text, so that it needs no scoring process."""
    exempt: Callable[[Any], Mapping[str, str]] = lambda _task: {}
    """What a kind of task rightly pays -> why: "any text", "another row", "said twice". `make env-check` fails on every
    other task that does."""

    def __post_init__(self) -> None:
        name = self.module.rpartition(".")[2]
        if not self.class_name:
            object.__setattr__(self, "class_name", f"{name.title().replace('_', '')}ResourcesServer")
        if not self.agents:
            object.__setattr__(self, "agents", {f"{name}_simple_agent": Agent(kind="single_turn", server=name)})

    @property
    def module(self) -> str:
        """The module that declares it, from which a scoring process loads it."""
        return self.score.__module__
