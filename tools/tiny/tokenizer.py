"""The tiny tokenizer: all bytes, and one piece for each frequent word of the tiny tasks.

It is a unigram model in which every piece costs the same, so a text becomes as few pieces as possible, and every text
can be encoded. No piece spans a turn boundary: the ids of a conversation are a prefix of the ids of the same
conversation with more turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

END_OF_TURN = "<|im_end|>"  # eos
PADDING = "<|endoftext|>"
MAX_TOKENS = 512  # of a conversation: the number of positions of the model
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
# Added tokens that are not special: they stay in the decoded text, where the parsers look for them.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

NAMES = ("Tom", "Ann", "Bob", "Eva", "Max", "Lea", "Ben", "Ida")
CITIES = ("Rome", "Oslo", "Bonn", "Lima", "Kiel", "Nice", "Graz", "Bari")
WORDS = (
    *("system\n", "user\n", "assistant\n", "tool\n", "\\boxed{", "<answer>", "</answer>", "):", ": ", "?\n"),
    *("Compute", "Spell", "Which", "Write", "What", "JSON", "name", "age", "city", "member", "sun", "nus"),
    *(" is", " in", " the", " to", " of", " by", " as", " this", " with", " word", " backward", " (example", " ->"),
    *(" Answer", " answer", " largest", " digit", " number", " letter", " step", " problem"),
    *(" JSON", " name", " age", " city", " member", " true", " false", "true", "false"),
    *(*NAMES, *CITIES),
    *(f" {word}" for word in (*NAMES, *CITIES)),
    *(f" {letter}: " for letter in "ABCDEFGHI"),
    *('{"', '":"', '","', '":', ',"', '"}'),
    *("# Tools", "<function=", "</function>", "<parameter=", "</parameter>", "function", "description", "parameters"),
)


def build_tokenizer(more_words: Sequence[str] = ()) -> Any:
    """Return the tokenizer with its chat template, as a transformers fast tokenizer; `more_words` are pieces, too."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(piece for piece, _ in bytes_to_letters.pre_tokenize_str(word)) for word in (*WORDS, *more_words)]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + words
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces]))
    tokenizer.pre_tokenizer = bytes_to_letters
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return fast
