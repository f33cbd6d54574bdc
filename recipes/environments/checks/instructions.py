"""The checks of instruction_following: one small function each, from an answer and its arguments to yes or no.

The names are those of the IFEval family of instructions, as rows give them. A row's words are regular expressions
where the published checkers use them as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise

from recipes.environments.checks.languages import language_of, sentences_of, tokens_of

SEPARATOR = "******"  # between several answers in one
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
END_OF_WORD = frozenset(".,?!'\"")


def compare(count: int, wanted: int, relation: str) -> bool:
    """Return whether a count is "less than" or "at least" what is wanted; raises `ValueError` for another relation."""
    if relation not in ("less than", "at least"):
        raise ValueError(f"unknown relation {relation!r}")
    return count < wanted if relation == "less than" else count >= wanted


def occurrences(text: str, pattern: str) -> int:
    """Count a regular expression, whatever its case."""
    return len(re.findall(pattern, text, re.IGNORECASE))


def same(text: str, other: str) -> bool:
    """Return whether two texts are equal but for their case and outer space."""
    return text.strip().lower() == other.strip().lower()


def is_english(text: str) -> bool:
    """Return whether text is English, or in no language that can be told."""
    return language_of(text) in ("en", None)


def parts_between(text: str, separator: str) -> list[str] | None:
    """Return the parts, an empty first and last left out; None when one between is empty."""
    parts = re.split(separator, text)
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return [part for part in parts if part.strip()]


def _count_of_parts(text: str, separator: str, wanted: int) -> bool:
    parts = parts_between(text, separator)
    return parts is not None and len(parts) == wanted


def _bare(word: str) -> str:
    return re.sub(r"[^\w\s]", "", word).lower()


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = re.split(r"\n\n", text)
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if nth_paragraph > count or count != num_paragraphs or not (words := paragraphs[nth_paragraph - 1].split()):
        return False
    word = words[0].lstrip("'").lstrip('"')
    end = next((index for index, char in enumerate(word) if char in END_OF_WORD), len(word))
    return word[:end].lower() == first_word.lower()


def postscript(text: str, postscript_marker: str) -> bool:
    known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = known.get(postscript_marker, r"\s*" + postscript_marker.lower() + r".*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    stars, dashes = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE), re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)  # bold text counts in both
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def json_format(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def sentence_hyphens(text: str) -> bool:
    parts = text.split("-")
    return all(
        part == part.strip() == whole for part, whole in zip(parts, sentences_of(text.replace("-", " ")), strict=False)
    )


def bigram_wrapping(text: str) -> bool:
    words = text.split()
    return all(
        left.startswith("<<") and right.endswith(">>") for left, right in zip(words[::2], words[1::2], strict=False)
    )


def two_responses(text: str) -> bool:
    parts = parts_between(text, re.escape(SEPARATOR))
    return parts is not None and len(parts) == 2 and parts[0].strip() != parts[1].strip()


def repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    words = phrase.split()
    found = re.findall(rf"{words[0]} .*? {words[-1]}", text)
    if len(found) != small_n:
        return False
    changes = []
    for repeat in found:
        given = repeat.split()
        if len(given) != len(words):
            return False
        changes.append(sum(one != other for one, other in zip(given, words, strict=True)))
    return all(change <= 1 for change in changes) and bool(changes) and changes[-1] == 1


def copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    copies = text.split(SEPARATOR)
    return len(copies) == N and all(same(copy, prompt_to_repeat) for copy in copies)


def counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    paragraphs = parts_between(text, r"\s?\*\*\*\s?") or []
    groups = [sentences_of(paragraph) for paragraph in paragraphs]
    return len(groups) == 3 and all(
        len(sentences) == n_sent and all(len(tokens_of(sentence)) == n_words for sentence in sentences)
        for sentences in groups
    )


def keyword_specific_position(text: str, keyword: str, n: int, m: int) -> bool:
    sentences = sentences_of(text)
    tokens = tokens_of(sentences[n - 1]) if len(sentences) >= n else []
    return len(tokens) >= m and tokens[m - 1] == keyword


def start_end(text: str) -> bool:
    tokens = [token.lower() for token in tokens_of(text)]
    return len(tokens) >= 2 and tokens[0] == tokens[-1]


def no_adjacent_consecutive(text: str) -> bool:
    return not any(ord(right[0].lower()[0]) - ord(left[0].lower()[0]) == 1 for left, right in pairwise(text.split()))


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.lower()), let_frequency, let_relation)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(occurrences(text, keyword), frequency, relation)


PARAGRAPHS = r"\s?\*\*\*\s?"
CHECKS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(token.isupper() for token in tokens_of(text)), capital_frequency, capital_relation
    ),
    "change_case:english_capital": lambda text: text.isupper() and is_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and is_english(text),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": two_responses,
    "copy:copy": lambda text, prompt_to_repeat: same(text, prompt_to_repeat),
    "copy:copying_multiple": copying_multiple,
    "copy:copying_simple": lambda text, prompt_to_repeat: same(text, prompt_to_repeat),
    "copy:repeat_phrase": repeat_phrase,
    "count:count_increment_word": lambda text, keyword1, keyword2: (
        (occurrences(text, keyword1), occurrences(text, keyword2)) == (1, 2)
    ),
    "count:count_unique": lambda text: len(tokens := tokens_of(text)) == len(set(tokens)),
    "count:counting_composition": counting_composition,
    "count:lowercase_counting": lambda text, N: len(re.findall(r"\b[a-z]+\b", text)) <= N,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    "detectable_format:bigram_wrapping": bigram_wrapping,
    "detectable_format:constrained_response": lambda text: any(option in text for option in OPTIONS),
    "detectable_format:json_format": json_format,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.split(rf"\s?{section_spliter}\s?\d+\s?", text)) - 1 >= num_sections
    ),
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:sentence_hyphens": sentence_hyphens,
    "detectable_format:square_brackets": lambda text: all(
        word.startswith("[") and word.endswith("]") for word in text.split()
    ),
    "detectable_format:title": lambda text: any(
        title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "first_word:first_word_answer": lambda text, first_word: text.split()[0].lower() == first_word.lower(),
    "first_word:first_word_sent": lambda text, first_word: all(
        sentence.split()[0].lower() == first_word.lower() for sentence in sentences_of(text)
    ),
    "keywords:exclude_word_harder": lambda text, keyword: f" {keyword} " not in text,
    "keywords:existence": lambda text, keywords: all(occurrences(text, keyword) for keyword in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(occurrences(text, rf"\b{word}\b") for word in forbidden_words)
    ),
    "keywords:frequency": _frequency,
    "keywords:keyword_specific_position": keyword_specific_position,
    "keywords:letter_frequency": _letters,
    "keywords:no_adjacent_consecutive": no_adjacent_consecutive,
    "keywords:palindrome": lambda text: any(word == word[::-1] for word in text.split()),
    "keywords:start_end": start_end,
    "keywords:word_count_different_numbers": _frequency,
    "keywords:word_once": lambda text, keyword: occurrences(text, keyword) == 1,
    "language:response_language": lambda text, language: language_of(text) in (language, None),
    "last_word:last_word_answer": lambda text, last_word: _bare(text.split()[-1]) == last_word.lower(),
    "last_word:last_word_sent": lambda text, last_word: all(
        _bare(sentence.split()[-1]) == last_word.lower() for sentence in sentences_of(text)
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: _count_of_parts(
        text, PARAGRAPHS, num_paragraphs
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        len(sentences_of(text)), num_sentences, relation
    ),
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(re.findall(r"\w+", text)), num_words, relation
    ),
    "letters:letter_counting": lambda text, N, relation: compare(len(re.findall(r"[a-zA-Z]", text)), N, relation),
    "letters:letter_counting2": _letters,
    "new:copy_span_idx": lambda text, prompt_to_repeat, n_start, n_end: same(text, prompt_to_repeat[n_start:n_end]),
    "paragraphs:paragraphs": lambda text: _count_of_parts(text, PARAGRAPHS, 2),
    "paragraphs:paragraphs2": lambda text: _count_of_parts(text, r"\n\n", 2),
    "punctuation:no_comma": lambda text: "," not in text,
    "punctuation:punctuation_dot": lambda text: "." not in text,
    "punctuation:punctuation_exclamation": lambda text: "!" not in text,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": quotation,
}
