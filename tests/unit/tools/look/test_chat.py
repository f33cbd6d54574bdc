"""What a conversation with a checkpoint sends to the engine, and what it shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tools.look.chat import converse


class Codec:
    """Prompts and answers as text: a token is a character."""

    def encode_chat(self, messages: Any, tools: Any, kwargs: Any) -> tuple[str, ...]:
        return tuple(" / ".join(f"{one['role']}: {one['content']}" for one in messages))

    def decode(self, token_ids: Any, *, prompt_ids: Any) -> Any:
        text = "".join(token_ids)
        answer = text.partition("</think>")[2] if "<think>" in text else text
        message = {"type": "message", "content": [{"type": "output_text", "text": answer}]}
        return SimpleNamespace(text=text, items=({"type": "reasoning"}, message) if answer else ())


def test_a_conversation_goes_on_until_an_empty_line() -> None:
    prompts: list[str] = []
    shown: list[str] = []
    answers = iter(["<think>so</think> one\x1b[2J", "<think>cut", None, ""])

    def generate(prompt: Any) -> Any:
        prompts.append("".join(prompt))
        answer = next(answers)
        return None if answer is None else tuple(answer)

    converse(["a\n", "b\n", "c\n", "\n", "d\n"], Codec(), generate, shown.append)
    so_far = "user: a / assistant: one\x1b[2J / user: b"
    assert prompts == ["user: a", so_far, f"{so_far} / assistant:  / user: c", "user: d"]
    assert shown[:2] == ["<think>so</think> one<U+001B>[2J", "<think>cut"]
    assert "no room is left" in shown[2]
    assert shown[3:] == ["(a new conversation)", "(an empty answer)"]
