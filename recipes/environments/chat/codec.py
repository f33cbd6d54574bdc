"""Convert between Responses items and token ids with the model's own tokenizer and chat template, without torch.

Token in, token out: sampled ids are never rendered from text again. The prompt of a later turn is the ids seen so far,
followed by what the template adds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from recipes.config.keys.derive import template_kwargs
from recipes.environments.chat.messages import assistant_items, chat_messages, chat_tools, flat_text, is_assistants
from recipes.environments.chat.template import compile_template
from recipes.environments.chat.tool_calls import ToolCall, parse_tool_calls
from recipes.environments.contract import Item, wrong
from recipes.errors import InputError, Problem
from recipes.exact_json import dumps, loads
from recipes.weight_files import require_object

if TYPE_CHECKING:
    from recipes.config.tree import PolicyConfig

KEPT_SPECIAL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # the parsers look for them
# Whose texts a template is given.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
OURS = frozenset({"messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS})  # arguments of every template
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # what a request may ask for, as in vLLM
ZERO_WIDTH_SPACE = "\u200b"  # breaks a control string inside a text
_BEFORE_AN_ANSWER = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})  # what `suffix` shows first
_THOUGHTFUL = {"role": "assistant", "content": "<think>t</think>a"}
_CACHED_PROMPTS = 64  # the G rollouts of a prompt render and tokenize it once
_NO_MODEL = "set policy.tokenizer.name to a model directory in Hugging Face format"
_DIFF_TOKENS = 24  # shown on each side of the first difference
_DIFF_CHARS = 80  # shown of each of two renderings that differ


class PrefixError(ValueError):
    """A prompt does not start with the ids that were seen before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One model call as output items, and as the text they were read from."""

    items: tuple[Item, ...]
    text: str


class ChatCodec:
    """Encodes requests and decodes completions of one model."""

    def __init__(
        self,
        tokenizer_path: str | Path,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = "qwen3_coder",
        reads_reasoning: bool = True,
    ) -> None:
        from tokenizers import Tokenizer

        directory = Path(tokenizer_path)
        config = require_object(directory / "tokenizer_config.json", fix=_NO_MODEL)
        try:
            self._tokenizer = Tokenizer.from_str(_read_text(directory / "tokenizer.json"))
        except InputError:
            raise
        except Exception as error:  # the library has no error of its own for a file that it cannot read
            raise _unreadable(directory / "tokenizer.json", error) from error
        self._encode_request = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_json)
        self._template = _compiled(chat_template or template_of(directory, config), directory)
        with_tools = None if chat_template else tools_template_of(directory, config)
        self._tools_template = _compiled(with_tools, directory) if with_tools else self._template
        self._known_kinds: dict[str, str | None] = {}  # of requests -> why the template refuses them
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._tool_parser, self._reads_reasoning = tool_parser, reads_reasoning
        self._special_tokens = {
            name: str(token.get("content", "")) if isinstance(token, Mapping) else str(token)
            for name, token in config.items()
            if name in SPECIAL_TOKENS and token is not None
        }
        self._end = self._special_tokens.get("eos_token", "")
        self.eos_token_id = self._id_of("eos_token", directory)
        self.pad_token_id = self._id_of("pad_token", directory) if "pad_token" in config else self.eos_token_id
        added = self._tokenizer.get_added_tokens_decoder()
        hidden = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and token.content not in KEPT_SPECIAL_TOKENS
        }
        self._hidden_ids = set(hidden)
        self._controls = re.compile("|".join(map(re.escape, hidden.values())) or "(?!)")

    @classmethod
    def from_config(cls, policy: PolicyConfig) -> ChatCodec:
        """Return the codec of a policy: its tokenizer, template arguments and parsers."""
        tokenizer, chat = policy.tokenizer, policy.generation.vllm_cfg.http_server_serving_chat_kwargs
        return cls(
            tokenizer.name,
            chat_template=_read_text(Path(tokenizer.chat_template)) if tokenizer.chat_template else None,
            chat_template_kwargs=template_kwargs(policy),
            tool_parser=chat.tool_parser if chat.enable_auto_tools else None,
            reads_reasoning=chat.reasoning_parser is not None,
        )

    def encode(self, params: Mapping[str, Any], items: Sequence[Item] = ()) -> tuple[int, ...]:
        """Return the prompt of the next model call: the request, then `items`, then the generation prompt."""
        return self._encode_request(dumps([params, items]))

    def extend(self, seen_ids: tuple[int, ...], params: Mapping[str, Any], items: Sequence[Item]) -> tuple[int, ...]:
        """Return only the ids that follow `seen_ids` in the prompt of the next turn.

        `items` are all items since the request. The new part begins after the last assistant message, which is found
        by counting end tokens: that works even when the template drops or changes earlier reasoning. Only the text
        after the last end token that both renderings share is tokenized, so the cost is that of the new part.
        Raises `PrefixError` when the prompt does not continue the ids seen.
        """
        last = max(index for index, item in enumerate(items) if is_assistants(item))
        before = self._render(params, items[: last + 1], add_generation_prompt=False)
        prompt = self._render(params, items, add_generation_prompt=True)
        shared = len(before) if prompt.startswith(before) else first_difference(before, prompt)
        cut = max(before.rfind(self._special_tokens["eos_token"], 0, shared), 0)
        tails = self._tokenize(before[cut:]), self._tokenize(prompt[cut:])
        try:
            full = replace_prefix(seen_ids, *tails, eos=self.eos_token_id)
        except PrefixError as error:
            seen, new = (text[shared : shared + _DIFF_CHARS] for text in (before, prompt))
            raise PrefixError(f"{error}: seen {seen!r}, now {new!r}") from error
        return self.new_ids(seen_ids, full)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the prompt of a chat request; `kwargs` are arguments of the template over those of the codec."""
        return self._tokenize(self._render_chat(messages, tools, kwargs, add_generation_prompt=True))

    def why_refused(
        self, params: Mapping[str, Any], template_kwargs: Mapping[str, Any], *, goes_on: bool
    ) -> str | None:
        """Return why the chat template cannot show a request, or, where the rollout `goes_on`, a further turn of it.

        One request of each kind is rendered: with the same roles, calls, reasoning, tools and template arguments.
        """
        messages, tools = chat_messages(params), chat_tools(params)
        kwargs = {**template_kwargs, **row_template_kwargs(params)}
        parts = [(m["role"], m["content"] is None, "tool_calls" in m, "<think>" in str(m["content"])) for m in messages]
        kind = (goes_on, parts[:2], parts[-1:], sorted(set(parts)), bool(tools), sorted(map(repr, kwargs.items())))
        if (key := repr(kind)) not in self._known_kinds:
            self._known_kinds[key] = self._why_refused(messages, tools, kwargs, goes_on=goes_on)
        return self._known_kinds[key]

    def _why_refused(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        goes_on: bool,
    ) -> str | None:
        shown = [list(messages)]
        if goes_on and tools:
            call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "x", "b": [1]}'}}
            answered = {"role": "tool", "tool_call_id": "call_0", "content": "a"}
            shown.append([*messages, {**_THOUGHTFUL, "tool_calls": [call]}, answered])
        elif goes_on:
            shown.append([*messages, _THOUGHTFUL, {"role": "user", "content": "u"}])
        try:
            for conversation in shown:
                self._render_chat(conversation, tools, kwargs, add_generation_prompt=True)
        except Exception as error:  # a template may fail in any way
            what = "a further turn" if len(shown) > 1 and conversation is shown[1] else "the request"
            return f"the chat template refuses {what} ({type(error).__name__}: {str(error)[:200]})"
        return None

    def suffix(
        self, answer: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the ids that follow an assistant's message: its end token, then `messages`, the generation prompt.

        What came before the answer is not rendered, so the cost is that of the new messages. End tokens are counted,
        because a template may show an answer in another way once more follows. Raises `PrefixError` when the template
        gives no such ids.
        """
        said = [*_BEFORE_AN_ANSWER, answer]
        num_ends = self._render_chat(said, (), kwargs, add_generation_prompt=False).count(self._end)
        text = self._render_chat([*said, *messages], (), kwargs, add_generation_prompt=True)
        parts = text.split(self._end, num_ends)
        if num_ends < 1 or len(parts) <= num_ends:
            raise PrefixError(f"the prompt has {len(parts) - 1} end tokens, the conversation before it {num_ends}")
        return self._tokenize(self._end + parts[-1])

    def closing(self, token_ids: Sequence[int], *, is_thinking_open: bool) -> tuple[int, ...]:
        """Return the ids that end an answer which was cut: `</think>` if its reasoning is open; nothing after its end.

        The end token itself is the first id of `suffix`.
        """
        has_ended = len(token_ids) > 0 and token_ids[-1] == self.eos_token_id
        return self._tokenize("</think>") if is_thinking_open and not has_ended else ()

    def is_thinking_open(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Return whether an answer leaves its reasoning open."""
        opened = self.text(prompt_ids[-8:]).rstrip().endswith("<think>")
        text = self.text(token_ids)
        return "</think>" not in text and (opened or text.lstrip().startswith("<think>"))

    def new_ids(self, seen_ids: tuple[int, ...], prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return `prompt_ids` behind `seen_ids`; raises `PrefixError` with a decoded diff otherwise."""
        if prompt_ids[: len(seen_ids)] == seen_ids:
            return prompt_ids[len(seen_ids) :]
        at = first_difference(seen_ids, prompt_ids)
        seen_text, new_text = (self.text(ids[at : at + _DIFF_TOKENS]) for ids in (seen_ids, prompt_ids))
        raise PrefixError(f"token {at} of the prompt differs from what was seen: seen {seen_text!r}, now {new_text!r}")

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        num_calls: int = 0,
        is_cut: bool = False,
    ) -> Decoded:
        """Return one completion as Responses items: reasoning, message, function calls.

        `prompt_ids` shows whether the generation prompt opened a thinking block. `num_calls` is the number of function
        calls before this completion in the rollout; the ids of the new calls count on from it.
        """
        visible = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        text = self.text(visible)
        prompt = self.text(prompt_ids[-8:]).rstrip()
        reasoning, answer = "", text
        if self._reads_reasoning:
            is_open, is_off = prompt.endswith("<think>"), prompt.endswith("</think>")
            reasoning, answer = split_reasoning(text, is_open=is_open, is_off=is_off)
        content, calls = self._calls(answer, tools, is_cut)
        if "<tool_call>" in reasoning:  # a call ends open reasoning, as in vLLM; what is no call is still a thought
            thoughts, tag, rest = text.partition("<tool_call>")
            _, early_calls = self._calls(tag + rest, tools, is_cut)
            if early_calls:
                reasoning, content, calls = thoughts.removeprefix("<think>"), "", early_calls
        message = {
            "content": (f"<think>{reasoning}</think>" if reasoning else "") + content,
            "tool_calls": [
                {"id": f"call_{num_calls + n}", "function": {"name": call.name, "arguments": call.arguments}}
                for n, call in enumerate(calls)
            ],
        }
        return Decoded(items=tuple(assistant_items(message)), text=text)

    def _calls(self, answer: str, tools: Sequence[Mapping[str, Any]], is_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
        if self._tool_parser is None:
            return answer, ()
        return parse_tool_calls(answer, chat_tools({"tools": list(tools)}), notation=self._tool_parser, is_cut=is_cut)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, control strings included."""
        return self._tokenize(text)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _encode_json(self, request: bytes) -> tuple[int, ...]:
        params, items = loads(request)
        return self._tokenize(self._render(params, items, add_generation_prompt=True))

    def _without_controls(self, value: Any) -> Any:
        """Return JSON values whose texts hold no control string: a zero-width space breaks each.

        A tool's answer, or a call's argument that the model wrote, could otherwise end a turn and begin another one.
        """
        text = json.dumps(value, ensure_ascii=False)
        broken = self._controls.sub(lambda found: found[0][0] + ZERO_WIDTH_SPACE + found[0][1:], text)
        return value if broken == text else json.loads(broken)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _id_of(self, name: str, directory: Path) -> int:
        token = self._special_tokens.get(name)
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        if token_id is None:
            where, expected = str(directory / "tokenizer_config.json"), f"a {name} of the vocabulary"
            raise InputError(Problem(where=where, got=repr(token), expected=expected, fix="use the model's tokenizer"))
        return int(token_id)

    def _render(self, params: Mapping[str, Any], items: Sequence[Item], *, add_generation_prompt: bool) -> str:
        request = params
        if items:
            before = params["input"]
            before = [{"role": "user", "content": before}] if isinstance(before, str) else before
            request = {**params, "input": [*before, *items]}
        kwargs = row_template_kwargs(params)
        return self._render_chat(
            chat_messages(request), chat_tools(params), kwargs, add_generation_prompt=add_generation_prompt
        )

    def _render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        template = self._tools_template if tools else self._template
        text: str = template.render(
            messages=self._without_controls([_template_message(message) for message in messages]),
            tools=self._without_controls(list(tools)) or None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
            **{"documents": None, **self._template_kwargs, **kwargs},
        )
        return text


def callable_tools(params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools whose calls are read in an answer: none for a request with tool_choice "none".

    Such a request still shows its tools to the model, as in vLLM. Raises `ValueError` for a choice that forces
    a call: sampling is not constrained, so the model could ignore it.
    """
    choice = params.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise wrong("tool_choice", choice, "auto or none: rollouts cannot force a call")
    return () if choice == "none" else params.get("tools") or ()


def row_template_kwargs(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template arguments that a row sets, by `reasoning.effort` and `metadata.chat_template_kwargs`.

    An effort sets `reasoning_effort`, and `enable_thinking` unless it is "none", as vLLM's chat completions do. The
    metadata holds an object as JSON text; its values win.
    """
    effort = (params.get("reasoning") or {}).get("effort")
    if effort is not None and effort not in EFFORTS:
        raise wrong("reasoning.effort", effort, f"one of {', '.join(EFFORTS)}")
    of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    text = (params.get("metadata") or {}).get("chat_template_kwargs")
    if text is None:
        return of_effort
    try:
        value = loads(text)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise wrong("metadata.chat_template_kwargs", text, "JSON text of an object")
    if taken := sorted(OURS & value.keys()):
        raise wrong("metadata.chat_template_kwargs", taken[0], "other arguments: the codec gives the template this one")
    return of_effort | value


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first place where two sequences differ; where none does, the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def split_reasoning(text: str, *, is_open: bool, is_off: bool = False) -> tuple[str, str]:
    """Return (reasoning, answer). A thinking block that never closes is all reasoning: it was cut off.

    Where the prompt has closed the block (`is_off`), the request wants no reasoning, and it is all answer.
    """
    reasoning, closing, answer = text.partition("</think>")
    if closing:
        return reasoning.removeprefix("<think>"), answer
    if is_off:
        return "", text.lstrip().removeprefix("<think>") if text.lstrip().startswith("<think>") else text
    if is_open or text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>") if not is_open else text, ""
    return "", text


def replace_prefix(
    seen: tuple[int, ...], template_prefix: tuple[int, ...], template: tuple[int, ...], *, eos: int
) -> tuple[int, ...]:
    """Return `template` with the part up to its last assistant message replaced by the ids that were seen.

    `template_prefix` is the rendering up to and including that message. If it has k end tokens, the replaced part ends
    at the k-th end token of `template`.
    """
    if not seen:
        return template
    count = template_prefix.count(eos)
    ends = [index for index, token_id in enumerate(template) if token_id == eos]
    if count < 1 or len(ends) < count:
        raise PrefixError(f"the prompt has {len(ends)} end tokens, the conversation before it {count}")
    kept = seen[:-1] if seen[-1] == eos else seen
    return kept + template[ends[count - 1] :]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message in the form that templates expect: flat text, reasoning apart, arguments as objects."""
    flat = {**message, "content": flat_text(message.get("content"))}
    if message["role"] == "assistant" and "<think>" in flat["content"]:
        thinking = assistant_items({"content": flat["content"]})
        reasoning = [part["text"] for item in thinking if item["type"] == "reasoning" for part in item["summary"]]
        answers = [item["content"][0]["text"] for item in thinking if item["type"] == "message"]
        flat |= {"content": "".join(answers), "reasoning": "".join(reasoning), "reasoning_content": "".join(reasoning)}
    if calls := message.get("tool_calls"):
        flat["tool_calls"] = [{**call, "function": _with_object_arguments(call["function"])} for call in calls]
    return flat


def _with_object_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (ValueError, RecursionError):  # a past call with malformed arguments is shown as it was written
        return dict(function)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
    return InputError(Problem(where=str(path), wrong=f"this file cannot be read ({why})", fix=_NO_MODEL))


def _compiled(source: str, directory: Path) -> Template:
    try:
        return compile_template(source)
    except (TemplateError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        wrong = f"the chat template cannot be compiled ({line}{str(error)[:200]})"
        fix = "correct the template, or set policy.tokenizer.chat_template to a file with another one"
        raise InputError(Problem(where=str(directory), wrong=wrong, fix=fix)) from error


def template_of(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the chat template that a model directory carries, in its own file or in the tokenizer's settings."""
    if (directory / "chat_template.jinja").is_file():
        return _read_text(directory / "chat_template.jinja")
    template = _named_template(config, "default")
    if template is None:
        fix = "use a chat model's tokenizer, or set policy.tokenizer.chat_template"
        raise InputError(Problem(where=str(directory), wrong="it has no chat template", fix=fix))
    return template


def tools_template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template that a model directory has for requests with tools, None where it has one for all."""
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        return _read_text(file)
    is_in_file = (directory / "chat_template.jinja").is_file()
    return _named_template(config, "tool_use") if not is_in_file else None


def _named_template(config: Mapping[str, Any], name: str) -> str | None:
    """Return a template of the tokenizer's settings, where it may be one of several; a single one is the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == name]
        template = entries[0].get("template") if entries else None
    elif name != "default":
        return None
    return template if isinstance(template, str) else None
