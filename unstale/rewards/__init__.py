"""Functions that grade replies, mostly from 0 to 1. Environments combine their values to rewards.

docs/rewards.md describes them. `programs` runs unit tests in a sandbox, and `judge` grades with a
language model.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from unstale.envs.arithmetic import Value
from unstale.envs.numbers import Quantity, last_number, last_quantity

DEFAULT_TOLERANCE = 1e-6
"""Relative difference up to which two numbers count as equal if one of them is not whole."""
LARGEST_GAP = Fraction(1, 1000)
"""Largest difference up to which a whole number and another number count as equal, if no tolerance
is given. The other number may be rounded.
"""
_PUNCTUATION = " ,;:!?\"'`*\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"


def weighted(**weights: float) -> Callable[[Mapping[str, float]], float]:
    """Return a function that computes the weighted sum of named rewards.

    `weights` has the weight of each reward. The function raises ValueError for other names.

    >>> weighted(answer=1.0, form=0.25)({"answer": 1.0, "form": 1.0})
    1.25
    """

    def combine(rewards: Mapping[str, float]) -> float:
        if set(rewards) != set(weights):
            raise ValueError(
                f"the rewards are {sorted(rewards)}, the weights are of {sorted(weights)}"
            )
        return math.fsum(weights[name] * value for name, value in rewards.items())

    return combine


def normalised(text: str) -> str:
    """Return the text in lower case and Unicode form NFKC, without outer punctuation.

    Runs of spaces become a single space.

    >>> normalised(' "PARIS,   France". ')
    'paris, france'
    """
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.lstrip(_PUNCTUATION).rstrip(f"{_PUNCTUATION}.")


def exact_match(text: str, *expected: str) -> float:
    """Return 1 if the text equals one of the expected texts, else 0. Both go through `normalised`
    first.

    Raises ValueError if an expected text is empty then.

    >>> exact_match("Paris.", "paris", "city of paris"), exact_match("not Paris", "paris")
    (1.0, 0.0)
    """
    normal = {normalised(each) for each in expected}
    if not normal or "" in normal:
        raise ValueError(f"the expected texts must not be empty once normalised, got {expected}")
    return float(normalised(text) in normal)


def numeric(
    text: str, expected: float, *, relative: float | None = None, absolute: float = 0.0
) -> float:
    """Return 1 if the last number in the text is close enough to the expected number, else 0.

    Their difference must be within the tolerance `absolute`, or within `relative` times the larger
    one. Without tolerances, two whole numbers must be equal. Other numbers may then differ by 1e-6
    of the larger one, but at most by 0.001 if one of them is whole. The number in the text may be
    an expression, such as `3/4` or `10^6`; docs/rewards.md lists the forms. `5%` is 5 or 0.05.

    >>> numeric("9 boxes of $150 are $1,350.00.", 1350), numeric("41 or 42", 41)
    (1.0, 0.0)
    """
    if isinstance(expected, float) and not math.isfinite(expected):
        raise ValueError(f"expected must be finite, got {expected}")
    last = last_quantity(text)
    return float(
        last is not None
        and any(_close(each, expected, relative, absolute) for each in _readings(last, False))
    )


def _readings(quantity: Quantity, other_is_percent: bool) -> list[Value]:
    """Return the values that a number in a text can mean. `5%` can mean 5 or 0.05.

    If the number to which it is compared is a percentage too (`other_is_percent`), it only means 5.
    """
    value = quantity.value
    if isinstance(value, str | tuple) or other_is_percent or not quantity.is_percent:
        return [value]
    return [value, value / 100]


def _close(value: Value, expected: Value, relative: float | None, absolute: float) -> bool:
    if value == expected or isinstance(value, str | tuple) or isinstance(expected, str | tuple):
        return value == expected
    one, other = Fraction(value), Fraction(expected)
    gap = abs(one - other)
    if relative is None and not absolute:
        whole = [each.denominator == 1 for each in (one, other)]
        if all(whole) or (any(whole) and gap > LARGEST_GAP):
            return False
    tolerance = DEFAULT_TOLERANCE if relative is None else relative
    if not (0 <= tolerance < math.inf and 0 <= absolute < math.inf):
        raise ValueError(f"tolerances must be >= 0 and finite, got {tolerance} and {absolute}")
    largest = max(abs(one), abs(other))  # as fractions, because a float may be 0 or infinite
    return gap <= max(Fraction(tolerance) * largest, Fraction(absolute))


def exact_answer(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the reply equals the `answer` of the task's row, else 0. Both go through
    `normalised`.

    This is a reward function for the environment `dataset`, whose tasks are rows of a data set.

    >>> exact_answer("Oslo.", {"answer": "Oslo"})
    1.0
    """
    return exact_match(reply, str(row["answer"]))


exact_answer.answer = normalised  # type: ignore[attr-defined]  # of `Votable.answer_of`


def numeric_answer(reply: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the reply's last number equals the last number of the row's `answer`, else 0.

    This is a reward function for the environment `dataset`. Raises ValueError if `answer` has no
    number that `numeric` understands.

    >>> numeric_answer("It costs $1,350.", {"answer": "9 * 150 = 1350 #### 1350"})
    1.0
    """
    expected = last_quantity(str(row["answer"]))
    if expected is None:
        raise ValueError(
            f"the answer has no number that is understood: {row['answer']!r}. Use the reward "
            "unstale.rewards.mathematics:math_answer or unstale.rewards:exact_answer"
        )
    last = last_quantity(reply)
    if last is None:
        return 0.0
    return float(
        any(
            _close(one, other, None, 0.0)
            for one in _readings(last, expected.is_percent)
            for other in _readings(expected, last.is_percent)
        )
    )


def first_error(reply: str, row: Mapping[str, Any]) -> float:
    """Grade a reply that names the first wrong step of a solution. Return a reward from -1 to 1.

    This is a reward function for the environment `dataset`, to train a judge of steps (FAPO, arXiv
    2510.22543). The row has `steps`, the number of steps of the solution, and `first_error`, the
    number of the first wrong one, from 1; 0 means that none is wrong. The reply's number is its
    last one. If both numbers are 0, the reward is 1. If only one is 0, it is -1. Otherwise it is 1
    - |difference| / steps. A reply without a whole number from 0 to `steps` gets -1.

    >>> row = {"first_error": 3, "steps": 8}
    >>> first_error("Step 5 is wrong: 5", row), first_error("No error: 0", row)
    (0.75, -1.0)
    """
    actual, steps = int(row["first_error"]), int(row["steps"])
    if not 0 <= actual <= steps:
        raise ValueError(f"first_error must be from 0 to steps, got {actual} and {steps}")
    named = last_number(reply)
    if named is None:
        return -1.0
    if not (Fraction(named).denominator == 1 and 0 <= named <= steps) or (named == 0) != (
        actual == 0
    ):
        return -1.0
    return 1.0 - abs(float(named) - actual) / steps if actual else 1.0


def json_schema(text: str, schema: Mapping[str, Any]) -> float:
    """Return 1 if the text is JSON that satisfies a JSON Schema, else 0.

    A schema that does not name its version is read as draft 2020-12. The package jsonschema, in the
    extra `rewards`, does the check in a worker process. A text whose check takes more than 3 s of
    CPU time gets 0. No schema is downloaded. Raises ValueError for an invalid schema, and for a
    reference to another schema.
    """
    from unstale.rewards.schemas import satisfies

    return float(satisfies(text, schema) or False)
