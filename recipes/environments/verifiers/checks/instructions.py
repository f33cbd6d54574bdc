"""The checks of instruction_following: one small function each, from an answer and its arguments to yes or no.

The names are those of the IFEval family of instructions, as rows give them. A row's words are regular expressions
where the published checkers use them as such.

Which language a text is in, and its sentences and words, without a library or its data.

A language is told by its script, then by letters of its own, then by its most frequent words. This is coarser than a
trained detector: a text of a few words may have no language (None).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

# script (the first word of its letters' Unicode names) -> language of text in it, where it has one
SCRIPTS = {
    "BENGALI": "bn",
    "CJK": "zh-cn",
    "GREEK": "el",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "HANGUL": "ko",
    "HEBREW": "he",
    "HIRAGANA": "ja",
    "KANNADA": "kn",
    "KATAKANA": "ja",
    "MALAYALAM": "ml",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
}
# script -> (language, letters that others in that script do not have), the last is taken without any
LETTERS = {
    "ARABIC": (("ur", "\u0679\u0688\u0691\u06d2\u06ba"), ("fa", "\u067e\u0686\u0698\u06af\u06cc\u06a9"), ("ar", "")),
    "CYRILLIC": (("uk", "\u0456\u0457\u0454\u0491"), ("ru", "\u044b\u044d\u0451"), ("bg", "\u044a"), ("ru", "")),
}
WORDS = {
    "de": "der die das und ist nicht ein eine ich zu mit den von auf sie es im sich auch wie für",
    "en": "the of and to in is that it for you was on are with as this be at have not a an i or from by",
    "es": "el la de que y en los las un una es por con para no del se su como más está",
    "fi": "ja on ei se että hän oli mutta kun niin ovat tai joka sen minä ole kuin",
    "fr": "le la les de des et est un une dans que pour qui pas sur ne ce il je vous avec du au",
    "hi": "है के का की में और से को यह हैं नहीं पर था एक",
    "it": "il la di che e non un una per sono con del si le i da come ma più è della",
    "mr": "आहे आणि या तो ते ही हे आहेत च मध्ये नाही",
    "ne": "छ र को मा हो यो छन् गर्न भने पनि",
    "nl": "de het een en van is niet dat op te in zijn met voor ik je er aan",
    "pl": "i w nie na się jest to z do że jak o co ale jego po za od są",
    "pt": "o a de que e do da em um uma para com não os as por mais é no na se",
    "sv": "och att det är en som på jag för av med den inte har till ett",
    "sw": "na ya wa kwa ni katika la za cha kuwa hii hiyo yake",
    "tr": "ve bir bu da de için ile çok ne gibi daha var olarak",
    "vi": "và của là có không một các cho được trong với người này những",
}
_BY_LETTERS = {language for of_script in LETTERS.values() for language, _ in of_script}
LANGUAGES = frozenset({*SCRIPTS.values(), *WORDS, *_BY_LETTERS})  # those that are told apart
_WORDS = {language: frozenset(words.split()) for language, words in WORDS.items()}
# A full stop after these does not end a sentence.
_ABBREVIATED = "mr mrs ms dr prof st jr sr inc ltd co vs etc e.g i.e u.s u.k a.m p.m no fig capt lt mt"
ABBREVIATIONS = frozenset(_ABBREVIATED.split())
_ENDING = re.compile(r"[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)")


def language_of(text: str) -> str | None:
    """Return the code of the language, as langdetect writes it; None when it cannot be told."""
    scripts = Counter(unicodedata.name(char, "OTHER").split()[0] for char in text if char.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():
        return "ja"  # Japanese text is mostly written in Chinese characters
    script = scripts.most_common(1)[0][0]
    if script in SCRIPTS:
        return SCRIPTS[script]
    lowered = text.lower()
    if script in LETTERS:
        return next(language for language, letters in LETTERS[script] if not letters or set(letters) & set(lowered))
    found = Counter(re.findall(r"[^\W\d_]+", lowered) if script == "LATIN" else lowered.split())
    scores = {language: sum(found[word] for word in words) for language, words in _WORDS.items()}
    best = max(scores, key=lambda language: scores[language])
    return best if scores[best] else None


def sentences_of(text: str) -> list[str]:
    """Return the sentences: they end at `.`, `!` or `?` before space or the end, but not after an abbreviation."""
    sentences, start = [], 0
    for match in _ENDING.finditer(text):
        last = text[start : match.start()].split(" ")[-1].lower()
        is_initials = re.fullmatch(r"[a-z](\.[a-z])*", last) and last != "i"
        if match.group().startswith(".") and (last in ABBREVIATIONS or is_initials):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    return [sentence for sentence in [*sentences, text[start:].strip()] if sentence]


def tokens_of(text: str) -> list[str]:
    """Return words, numbers and signs of punctuation, each by itself."""
    return re.findall(r"\w+(?:[-'\u2019.]\w+)*|[^\w\s]", text)


SEPARATOR = "******"  # between several answers in one
RESPONSE_LANGUAGE = "language:response_language"
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
    RESPONSE_LANGUAGE: lambda text, language: language_of(text) in (language, None),
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


def why_unanswerable(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why no answer can follow an instruction, or None: it is unknown, or its arguments do not fit its check."""
    check = CHECKS.get(name)
    if check is None:
        return f"instruction {name!r} is unknown"
    try:
        check("A", **arguments)
    except (TypeError, ValueError, re.error, AttributeError, OverflowError, RecursionError) as error:
        return f"arguments of {name!r} do not fit it: {error}"
    except LookupError:  # a text so short has not what is asked for
        pass
    return None
