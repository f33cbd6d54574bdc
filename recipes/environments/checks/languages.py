"""Which language a text is in, and its sentences and words, without a library or its data.

A language is told by its script, then by letters of its own, then by its most frequent words. This is coarser than a
trained detector: a text of a few words may have no language (None).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

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
