"""Fixtures of the environment tests: example rows, answers, a byte-level tokenizer with the tiny chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.environments.chat.codec import ChatCodec
from recipes.environments.contract.verifier import message_item
from tests.recorded import recorded

ROOT = Path(__file__).resolve().parents[3]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="session")
def gym_row() -> Callable[..., dict[str, Any]]:
    """Return one real row: gym_row("mcqa", 0)."""
    directory = recorded("GYM_EXAMPLES_DIR", "gym_examples")

    def row(name: str, index: int = 0) -> dict[str, Any]:
        lines = (directory / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        parsed: dict[str, Any] = json.loads(lines[index])
        return parsed

    return row


@pytest.fixture(scope="session")
def answer() -> Callable[..., dict[str, Any]]:
    """Return a Responses object with one message per text."""
    return lambda *texts: {"output": [message_item(text) for text in texts]}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tokenizer whose ids are bytes, with the tiny model's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = (ROOT / "tools" / "tiny" / "chat_template.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def codec(tokenizer_dir: Path) -> ChatCodec:
    """Return the codec of that tokenizer, thinking on."""
    return ChatCodec(tokenizer_dir)
