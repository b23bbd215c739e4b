"""What a reply is worth: rules, from 0 to 1, for environments to give as named rewards. See docs/rewards.md.

`programs.py` runs unit tests in the sandbox, `judge.py` asks a language model.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_AROUND = " ,;:!?\"'`*\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"


def weighted(**weights: float) -> Callable[[Mapping[str, float]], float]:
    """A way to combine rewards: their weighted sum. ValueError for rewards of other names.

    >>> weighted(answer=1.0, form=0.25)({"answer": 1.0, "form": 1.0})
    1.25
    """

    def combine(rewards: Mapping[str, float]) -> float:
        if set(rewards) != set(weights):
            raise ValueError(
                f"the rewards are {sorted(rewards)}, the weights are of {sorted(weights)}"
            )
        return sum(weights[name] * value for name, value in rewards.items())

    return combine


def normalised(text: str) -> str:
    """Unicode's compatible form in lower case, words one space apart, without quotes and punctuation around it.

    >>> normalised(' "PARIS,   France". ')
    'paris, france'
    """
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.lstrip(_AROUND).rstrip(f"{_AROUND}.")


def exact_match(text: str, *expected: str) -> float:
    """1 if the text is one of the expected ones; both `normalised`.

    >>> exact_match("Paris.", "paris", "city of paris"), exact_match("not Paris", "paris")
    (1.0, 0.0)
    """
    wanted = {normalised(each) for each in expected}
    if not wanted or "" in wanted:
        raise ValueError(f"nothing is left to compare with: {expected}")
    return float(normalised(text) in wanted)


def numeric(text: str, expected: float, *, relative: float = 1e-6, absolute: float = 0.0) -> float:
    """1 if the last number in the text is within either tolerance of the expected one, 0 also without a number.

    Commas between thousands are read over, units, `%` and `$` too.

    >>> numeric("9 boxes of $150 are $1,350.00.", 1350), numeric("41 or 42", 41), numeric("many", 41)
    (1.0, 0.0, 0.0)
    """
    if not math.isfinite(expected):
        raise ValueError(f"no number is near {expected}")
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not numbers:
        return 0.0
    return float(
        math.isclose(
            float(numbers[-1].replace(",", "")), expected, rel_tol=relative, abs_tol=absolute
        )
    )


def json_schema(text: str, schema: Mapping[str, Any]) -> float:
    """1 if the text is JSON and keeps to the schema (draft 2020-12 unless it says otherwise). Nothing is fetched.

    Needs the package jsonschema, of the extra `rewards`. ValueError for what is no schema, also when judging comes to a
    reference that leads out of it or nowhere.
    """
    from jsonschema import SchemaError, validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    try:
        return float(
            kind(schema, registry=Registry()).is_valid(json.loads(text, parse_constant=_no_number))
        )
    except Unresolvable as error:
        raise ValueError(f"not a JSON schema: its reference {error.ref!r} leads nowhere") from error
    except (ValueError, RecursionError):
        return 0.0


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
