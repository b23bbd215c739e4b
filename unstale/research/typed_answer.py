"""The reward of a task whose answer is a number or at most three words."""

import re
from collections.abc import Mapping
from typing import Any

from unstale.envs.numbers import given_answer, last_quantity
from unstale.rewards import normalised

MAX_WORDS = 3
"""Largest number of words of an answer that is not a number."""
ANSWER_LINE = re.compile(
    r"^\W*(?:the )?(?:final )?answer(?:\W*:| is:?)[ \t]*(.+)$", re.IGNORECASE | re.MULTILINE
)
"""Pattern of the line with the answer, in a reply or in a draft of a task."""


def final_answer(reply: str) -> str:
    """Return the answer of a reply: its last line `answer: ...`, or else its last number."""
    named = ANSWER_LINE.findall(reply)
    return str(named[-1]).strip() if named else given_answer(reply)


def answer_key(answer: str) -> str:
    """Return a text that is the same for equal answers.

    It is empty for an answer without a number and of more than three words.

    >>> answer_key("$1,350.00"), answer_key("Tuesday."), answer_key("It depends on the price")
    ('1350', 'tuesday', '')
    """
    number = last_quantity(answer)
    if number is not None:
        return f"{number.value}{'%' * number.is_percent}"
    words = normalised(answer)
    return words if len(words.split()) <= MAX_WORDS else ""


def typed_answer(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 if a reply's answer is the `answer` of the row, else 0.

    This is the reward function for tasks of `unstale synthesize`.

    >>> typed_answer("So 3 * 4 is 12.\\nAnswer: 12 apples", {"answer": "12"})
    1.0
    """
    return float(answer_key(final_answer(reply)) == answer_key(str(row["answer"])))


typed_answer.answer = lambda reply: answer_key(final_answer(reply))  # type: ignore[attr-defined]
