"""Which text may reach a library that evaluates it: literals, and arithmetic without names that do anything.

Nothing here evaluates. A text is parsed as Python, as the evaluating library does, and every node is looked up in a
list of what is harmless; whatever is not in it is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
UNREADABLE = (SyntaxError, ValueError, MemoryError, RecursionError)  # what parsing raises for text that is no Python


def is_literal(text: str) -> bool:
    """Return whether text is numbers, strings, lists, tuples, sets and dicts of them, and arithmetic on these."""
    try:
        nodes = ast.walk(ast.parse(text.lstrip(" \t"), mode="eval"))
        return all(isinstance(node, (*ARITHMETIC, *COLLECTIONS, ast.Constant)) for node in nodes)
    except UNREADABLE:
        return False


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
