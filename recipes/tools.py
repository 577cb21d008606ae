"""A calculator for a model to call, and a reward that reads the last message of a conversation."""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def calculate(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers, parentheses and the operators + - * /, for example "(3 + 4) * 2".
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    # Walked, not evaluated: the model writes this text.
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic; use numbers, parentheses and + - * /.")


def boxed_reward(completions: list[list[dict[str, Any]]], solution: list[str], **_: Any) -> list[float]:
    """1 where the last message boxes the solution, else 0.

    TRL's `accuracy_reward` reads the first message of a completion, which here may be a call of the calculator.
    """
    rewards = []
    for completion, right in zip(completions, solution, strict=True):
        found = _BOXED.findall(completion[-1].get("content") or "")
        rewards.append(float(bool(found) and found[-1].replace(",", "").strip() == right))
    return rewards
