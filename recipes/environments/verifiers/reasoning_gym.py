"""Procedural reasoning tasks of the reasoning-gym library. Reward in [0, 1], as the library's scorer of the task says.

Many scorers give partial credit. Some families evaluate text as Python or SymPy (EVALUATED): there, an answer that is
no literal or plain expression is replaced by one that no parser reads, so that the scorer rates it as nonsense, and a
row whose own text is neither has no verdict. In addition, everything runs in a jailed process.

Some scorers pay for what is not right: CAPS says, per family, the most that such an answer earns here. A response
without any text earns 0.0.

Kept from the reference, because rewards depend on it: a board of BOARDS is never right, and earns 0.05. It comes out of
a row as lists, and the scorer compares it with tuples. With the setting `compare_boards` a right one earns 1.0.

Which text may reach a library that evaluates it: literals, and arithmetic without names that do anything.

Nothing here evaluates. A text is parsed as Python, as the evaluating library does, and every node is looked up in a
list of what is harmless; whatever is not in it is not read.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from recipes.environments.contract import Response, Row, Verdict, Verifier, all_text, optional_str, require_str, wrong

ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
UNREADABLE = (SyntaxError, ValueError, MemoryError, RecursionError)  # what parsing raises for text that is no Python

MAX_SHIFT = 1024  # bits
PLAIN = re.compile(r"[0-9+*/() -]+")  # no letter, no point, no other digits: a number is what it looks like
OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of sums, differences, products and quotients of whole numbers, and those numbers.

    None for every other text, also for powers, for a division by zero, and for numbers in another notation (0x1f, 1_0,
    1e1), in which a number can be hidden.
    """
    flat = " ".join(text.split())
    if not PLAIN.fullmatch(flat):
        return None
    try:
        return _value(ast.parse(flat.strip(), mode="eval").body), [int(digits) for digits in re.findall("[0-9]+", flat)]
    except (*UNREADABLE, ZeroDivisionError):
        return None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise ValueError("another operation")


def is_literal(text: str) -> bool:
    """Return whether text is numbers, strings, lists, tuples, sets and dicts of them, and arithmetic on numbers.

    What a few characters can make huge is none: powers, shifts by a big number, and a text or list times a number.
    """
    try:
        nodes = list(ast.walk(ast.parse(text.lstrip(" \t"), mode="eval")))
    except UNREADABLE:
        return False
    is_arithmetic = all(isinstance(node, (*ARITHMETIC, *COLLECTIONS, ast.Constant)) for node in nodes)
    return is_arithmetic and all(_is_small(node) for node in nodes if isinstance(node, ast.BinOp))


def _is_small(node: ast.BinOp) -> bool:
    """Return whether an operation takes numbers only, and is no power and no shift by more than MAX_SHIFT."""
    operands = [inner for side in (node.left, node.right) for inner in ast.walk(side)]
    if any(isinstance(inner, COLLECTIONS) or _is_text(inner) for inner in operands):
        return False
    if isinstance(node.op, ast.LShift):
        by = node.right
        return isinstance(by, ast.Constant) and isinstance(by.value, int) and by.value <= MAX_SHIFT
    return not isinstance(node.op, ast.Pow)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def is_expression(text: str, functions: Collection[str]) -> bool:
    """Return whether text is arithmetic on numbers and plain names, with calls of the given functions only.

    It may use the notation that SymPy's parser adds to Python: factorials (`4!`) and repeated decimals (`0.2[1]`).
    """
    try:
        tree = ast.parse(re.sub(r"!+(?!=)", "", text).strip(), mode="eval")
    except UNREADABLE:
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_harmless(node, functions, called) for node in ast.walk(tree))


def _is_harmless(node: ast.AST, functions: Collection[str], called: Collection[int]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return node.id in functions if id(node) in called else "__" not in node.id
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Constant) and isinstance(node.slice, ast.Constant)
    return isinstance(node, ARITHMETIC)


NONSENSE = "="  # neither Python nor SymPy reads it
BOARDS = ("arc_agi", "rearc")
REFUSED = {"composite": "it is made of other families, and its rows are theirs"}  # families without a scorer -> why
THREE_DIGITS = 0.005  # largest share by which a number may be off whose first three digits are right
COPY = 0.25  # what the library gives for a conclusion that says nothing
WRONG_FORMULA = 0.05  # what the library gives for a formula with other numbers or another value
READ_PROSE = "the scorer looks for the first answer in a text"
READERS_OF_PROSE = frozenset(
    {"advanced_geometry", "cryptarithm", "fraction_simplification", "gsm_symbolic", "kakurasu", "knights_knaves"}
    | {"palindrome_partitioning", "quantum_lock", "sokoban", "survo", "time_intervals"}
)
ROUNDING = 1e-9  # by which a sum of parts may come out above 1 (`spell_backward`)


def _is_formula(text: str) -> bool:
    functions = importlib.import_module("sympy.functions")
    return is_expression(text, {*functions.__all__, "Float", "Integer", "Rational"})


def _is_arithmetic(text: str) -> bool:
    return arithmetic(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a family's scorer evaluates, and what text it may be given."""

    is_safe: Callable[[str], bool]
    evaluates_answer: bool = True
    compares_first: bool = False  # an answer that equals a known one is not evaluated
    row_texts: tuple[str, ...] = ()  # fields of the row or its metadata that the scorer evaluates as well


EVALUATED: Mapping[str, Evaluated] = {
    "binary_matrix": Evaluated(is_safe=is_literal, compares_first=True),
    "bitwise_arithmetic": Evaluated(is_safe=is_literal, evaluates_answer=False, row_texts=("problem",)),
    "countdown": Evaluated(is_safe=_is_arithmetic),
    "intermediate_integration": Evaluated(is_safe=_is_formula, row_texts=("integrand",)),
    "n_queens": Evaluated(is_safe=is_literal, compares_first=True),
    "number_sorting": Evaluated(is_safe=is_literal, evaluates_answer=False, row_texts=("answer",)),
    "polynomial_multiplication": Evaluated(is_safe=_is_formula, row_texts=("answer",)),
    "puzzle24": Evaluated(is_safe=_is_arithmetic),
    "simple_integration": Evaluated(is_safe=_is_formula, row_texts=("integrand",)),
    "spiral_matrix": Evaluated(is_safe=is_literal, compares_first=True),
    "string_insertion": Evaluated(is_safe=is_literal, compares_first=True),
}


def _same_word(answer: str, entry: Mapping[str, Any]) -> float:
    """Compare texts: the scorer of `game_of_life_halting` takes any text for true."""
    return float(answer.casefold() == str(entry["answer"]).strip().casefold())


def _close(answer: str, entry: Mapping[str, Any]) -> float:
    """Want three right digits: `coin_flip` pays for each leading character, so "0" is right, and 0.5 nearly."""
    plain = r"([0-9]*\.?[0-9]+|[0-9]+\.)([eE][-+]?[0-9]{1,3})?|[0-9]{1,99}/[0-9]{1,99}"
    flat = answer.replace(",", "")
    if not re.fullmatch(plain, flat, re.ASCII):
        return 0.0
    try:
        given, right = (float(Fraction(text)) for text in (flat, str(entry["answer"])))
    except (ValueError, ArithmeticError):
        return 0.0
    return float(abs(given - right) <= THREE_DIGITS * abs(right))


def _from_numbers(answer: str, entry: Mapping[str, Any]) -> float:
    """Want each given number once, and the exact target: `puzzle24` compares no numbers, and cuts 24.5 to 24."""
    found, metadata = arithmetic(answer), entry["metadata"]
    is_right = (
        found is not None and found[0] == metadata.get("target", 24) and sorted(found[1]) == sorted(metadata["numbers"])
    )
    return 1.0 if is_right else WRONG_FORMULA


def _finite(answer: str, entry: Mapping[str, Any]) -> float:
    """Want digits: `complex_arithmetic` takes the distance from NaN for none."""
    del entry
    return float(re.fullmatch(r"[-+0-9.eEiIjJ() ]*", answer, re.ASCII) is not None)


def _same_numbers(answer: str, entry: Mapping[str, Any]) -> float:
    """Compare the numbers: `number_sorting` lets each be off by one."""
    given, right = (json.loads(text.replace("'", '"')) for text in (answer, str(entry["answer"])))
    pairs = zip(given, right, strict=True)
    return float(all(math.isclose(float(one), float(other), abs_tol=1e-9) for one, other in pairs))


def _no_copy(answer: str, entry: Mapping[str, Any]) -> float:
    """Pay no full reward for premises said again, some of them joined by "and", in whatever form."""
    read = importlib.import_module("reasoning_gym.logic.propositional_logic").Expression.from_string
    names, premises = entry["metadata"]["variables"], [read(text) for text in entry["metadata"]["premises"]]
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))]
    said, *given = [tuple(bool(one.evaluate(case)) for case in cases) for one in (read(answer), *premises)]
    subsets = itertools.chain.from_iterable(itertools.combinations(given, count + 1) for count in range(len(given)))
    return COPY if any(said == tuple(map(all, zip(*chosen, strict=True))) for chosen in subsets) else 1.0


def _no_surplus(parts: Callable[[str], Sequence[Any]]) -> Callable[[str, Mapping[str, Any]], float]:
    """Let parts that were not asked for cost as much as the library's own rule has it for longer texts."""

    def most(answer: str, entry: Mapping[str, Any]) -> float:
        return len(parts(str(entry["answer"]))) / max(len(parts(answer)), len(parts(str(entry["answer"]))), 1)

    return most


def _cells(text: str) -> list[Any]:
    return [cell for line in json.loads(text) for cell in (line if isinstance(line, list) else [line])]


CAPS: Mapping[str, Callable[[str, Mapping[str, Any]], float]] = {
    "coin_flip": _close,
    "complex_arithmetic": _finite,
    "countdown": _from_numbers,
    "game_of_life": _no_surplus(_cells),
    "game_of_life_halting": _same_word,
    "letter_jumble": _no_surplus(str.split),
    "number_sorting": _same_numbers,
    "propositional_logic": _no_copy,
    "puzzle24": _from_numbers,
    "spell_backward": _no_surplus(list),
    "word_sorting": _no_surplus(lambda text: text.split(",")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Puzzles with the library's own scorers."""

    compare_boards: bool = False
    """give a right board of arc_agi and rearc a reward of 1 instead of 0.05"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One generated question with all that its scorer needs."""

    task_name: str
    entry: str  # JSON of {question, answer, metadata}
    compares_boards: bool = False


def parse_task(row: Row, settings: Settings) -> Task:
    """Read `question`, `answer` and `metadata.source_dataset`."""
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping):
        raise wrong("metadata", metadata, "an object")
    name = metadata.get("source_dataset")
    if not isinstance(name, str) or not name:
        raise wrong("metadata.source_dataset", name, "the name of a reasoning-gym task")
    if name in REFUSED:
        raise wrong("metadata.source_dataset", name, f"another family: {REFUSED[name]}")
    entry = {"question": require_str(row, "question"), "answer": optional_str(row, "answer"), "metadata": metadata}
    return Task(task_name=name, entry=json.dumps(entry), compares_boards=settings.compare_boards)


def score(response: Response, task: Task) -> Verdict:
    """Extract the answer and let the task's own scorer judge it.

    Raises what the library raises where it cannot build a scorer: an installation that is broken gives no verdict.
    """
    text = all_text(response)
    answer = extract_answer(text)
    details = {"extracted_answer": answer, "task_name": task.task_name}
    entry = json.loads(task.entry)
    board = entry["metadata"].get("output")
    if task.compares_boards and task.task_name in BOARDS and isinstance(board, list):
        entry["metadata"]["output"] = tuple(tuple(line) if isinstance(line, list) else line for line in board)
    graded = answer if _may_be_evaluated(answer, task.task_name, entry) else NONSENSE
    if not _is_known(task.task_name):  # as Gym's server answers
        return Verdict(reward=0.0, reason=f"{task.task_name}: the library has no such task", details=details)
    if not text.strip():  # the right answer of some rows is an empty text, which an answer must say
        return Verdict(reward=0.0, reason=f"{task.task_name}: the response is empty", details=details)
    scorer = _scorer(task.task_name)
    try:
        most = CAPS[task.task_name](graded, entry) if task.task_name in CAPS else math.inf
        reward = min(float(scorer(graded, entry)), most) if most > 0 else 0.0
    except MemoryError:  # a limit that is met is no verdict
        raise
    except Exception as error:  # the scorer cannot read the model's text, which earns no credit
        reason = f"{task.task_name}: the scorer failed: {type(error).__name__}: {error}"[:200]
        return Verdict(reward=0.0, reason=reason, details=details)
    if not math.isfinite(reward):
        return Verdict(reward=0.0, reason=f"{task.task_name}: the scorer returned {reward}", details=details)
    reward = min(reward, 1.0) if reward <= 1.0 + ROUNDING else reward
    return Verdict(reward=reward, reason=f"{task.task_name}: {answer[:80]!r} scored {reward:.3g}", details=details)


def _may_be_evaluated(answer: str, task_name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a family's scorer may see the answer; raises `ValueError` when it must not see the row."""
    family = EVALUATED.get(task_name)
    if family is None:
        return True
    for key in family.row_texts:
        text = entry["metadata"].get(key) if key in entry["metadata"] else entry.get(key)
        if isinstance(text, str) and not family.is_safe(text):
            raise ValueError(f"field '{key}': {text[:80]!r} is not safe to evaluate")
    known = entry["metadata"].get("valid_answers")
    is_known = answer == str(entry["answer"]).strip() or (isinstance(known, list) and answer in known)
    if family.compares_first and is_known:
        return True  # the scorer compares it, and evaluates nothing
    return not family.evaluates_answer or family.is_safe(answer)


def prepare(task_name: str) -> None:
    """Build the scorer of a family of tasks, which reads data files for some."""
    if task_name and _is_known(task_name):
        _scorer(task_name)


def extract_answer(text: str) -> str:
    """Return the last <answer> block, else the first box up to its first brace, else the whole text."""
    tagged = list(_between(text, "<answer>", "</answer>"))
    if tagged:
        return tagged[-1].strip()
    return next((boxed for boxed in _between(text, "\\boxed{", "}") if boxed), text).strip()


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield what stands between an opening and the next closing, in order, in time linear in the text."""
    at = text.find(opening)
    while at >= 0 and (end := text.find(closing, at + len(opening))) >= 0:
        yield text[at + len(opening) : end]
        at = text.find(opening, end + len(closing))


def _is_known(name: str) -> bool:
    from reasoning_gym.factory import DATASETS

    return name in DATASETS


@lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(name)
    return scorer


VERIFIER = Verifier(
    task=Task,
    parse_task=parse_task,
    score=score,
    settings=Settings,
    imports=("reasoning_gym",),
    kind_of=lambda task: task.task_name,
    prepare=prepare,
    exempt=lambda task: {"said twice": READ_PROSE} if task.task_name in READERS_OF_PROSE else {},
)
