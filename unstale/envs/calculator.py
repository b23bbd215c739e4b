"""The environment `calculator`: arithmetic with a calculator tool, answered in text."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from unstale.config.tasks import EnvSpec
from unstale.envs import Message, NumberedTasks, tool_schema
from unstale.envs.numbers import given_answer
from unstale.envs.question import Question, ToolRunner
from unstale.records import Task

TOOL = tool_schema(
    "calculate",
    "Work out an expression, such as (12 + 7) * 3, gcd(12, 18) or lcm(4, 6).",
    {"expression": {"type": "string", "description": "For example (12 + 7) * 3."}},
)

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
FUNCTIONS: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm}
"""Name of a function that an expression may call, with two numbers -> the function."""
_ALLOWED = re.compile(rf"(?:[0-9+\-*(), ]|{'|'.join(FUNCTIONS)})*")
_REFUSED = f"only whole numbers, + - * {' '.join(FUNCTIONS)} and parentheses"
MAX_LENGTH = 100


class CalculatorTasks(NumberedTasks):
    """Tasks with arithmetic expressions. The reward is 1 if the last reply ends with the right
    number.
    """

    name = "calculator"
    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def __init__(self, *, terms: int = 3) -> None:
        if terms < 2:
            raise ValueError(f"terms must be >= 2, got {terms}")
        self.terms = terms

    def expression(self, task: Task) -> str:
        """Return the arithmetic expression of a task.

        >>> task = Task("calculator", "train", 1)
        >>> CalculatorTasks().expression(task) == CalculatorTasks().expression(task)
        True
        """
        random = Random(f"{task.key}/{self.terms}")
        parts = [str(random.randrange(10, 100))]
        for _ in range(self.terms - 1):
            parts += [random.choice("+-*"), str(random.randrange(10, 100))]
        return " ".join(parts)

    def text(self, task: Task) -> str:
        return self.expression(task)

    def answer_of(self, task: Task, reply: str) -> str:
        return given_answer(reply)

    def env(self, task: Task, seed: int) -> Question:
        """Return the environment of a task. `seed` is not used, because nothing in it is random."""
        expression = self.expression(task)
        prompts = (
            Message("system", "Work it out with the tool, then give the number."),
            Message("user", f"What is {expression}?"),
        )
        return Question(prompts, str(calculate(expression)), ToolRunner(TOOL, run))


async def run(expression: str) -> str:
    """Return the value of an expression as text. Raises `ValueError` if it is not understood."""
    return str(calculate(expression))


def calculate(expression: str) -> int:
    """Return the value of an arithmetic expression of integers.

    Raises `ValueError` for any other text.

    >>> calculate("(12 + 7) * -3"), calculate("gcd(12, 18)")
    (-57, 6)
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"an expression may have {MAX_LENGTH} characters, this has {len(expression)}"
        )
    if not _ALLOWED.fullmatch(expression):
        raise ValueError(_REFUSED)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"cannot read {expression!r}") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[first, second]) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(first), _value(second))
        case ast.Tuple(elts=[first, second]):
            raise ValueError(_functions_of(_value(first), _value(second)))
    raise ValueError(_REFUSED)


def _functions_of(first: int, second: int) -> str:
    """Return a text that asks which function a pair of numbers is meant for.

    The order of the functions depends on the numbers. A small policy copies the function that it
    reads first, so with a fixed order it would never try the other.
    """
    names = sorted(FUNCTIONS, reverse=(first + second) % 2 == 1)
    return " or ".join(f"{name}({first}, {second})" for name in names) + "?"


ENV = EnvSpec("calculator", lambda options: CalculatorTasks())
