"""The program that evaluates unit tests inside the sandbox.

`unstale.rewards.programs` runs its source in two kinds of processes, so that the tested program
cannot change the result of a test. With the argument `ask`, a process runs the tested program. It
reads expressions from standard input, evaluates them in the program's module, and prints their
values. Without an argument, a process does not run the program. It reads tests together with these
values, and evaluates the tests. Values are JSON, so none can be an object of the program.
"""

import ast
import builtins
import collections
import contextlib
import copy
import datetime
import decimal
import fractions
import json
import numbers
import os
import random
import sys
import types
from collections.abc import Callable
from typing import Any

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set, bytes)
}
_MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (tuple, set, frozenset, dict, collections.deque)},
    "Counter": lambda items: collections.Counter(dict(items)),
    "range": lambda parts: range(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "Fraction": lambda parts: fractions.Fraction(*parts),
    "Decimal": decimal.Decimal,
    **{
        kind.__name__: kind.fromisoformat
        for kind in (datetime.date, datetime.datetime, datetime.time)
    },
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "type": lambda name: _TYPES.get(name, object),
    "object": lambda name: object(),
    "ellipsis": lambda name: ...,
}
"""Functions that create a value from its packed form, by the kind of the value. Kinds that JSON has
itself are left out.
"""


def pack(value: Any) -> Any:
    """Return a value in a form that JSON can express, from which `unpack` restores it.

    A value of a subclass becomes one of the plain type. A value of an unknown type becomes a plain
    `object`.
    """
    if value is None or isinstance(value, (bool, str)):
        return str.__str__(value) if isinstance(value, str) else value
    name = type(value).__name__
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, list):
        if {type(each) for each in value} <= {int, str}:
            return value  # quickly, since it may be long
        return [pack(each) for each in value]
    if isinstance(value, dict):
        kind = "Counter" if isinstance(value, collections.Counter) else "dict"
        return {kind: [[pack(key), pack(each)] for key, each in value.items()]}
    for kinds in (tuple, set, frozenset, collections.deque):
        if isinstance(value, kinds):
            return {kinds.__name__: [pack(each) for each in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, fractions.Fraction):
        return {"Fraction": [value.numerator, value.denominator]}
    if isinstance(value, decimal.Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (datetime.date, datetime.time)) and name in _MAKE:
        return {name: value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, type):
        return {"type": value.__name__ if _TYPES.get(value.__name__) is value else ""}
    return {"ellipsis" if value is ... else "object": ""}


def unpack(text: str, *, as_floats: bool = False) -> Any:
    """Return the value from whose packed form JSON made a text. Raises ValueError for any other
    text.

    With `as_floats`, fractions and decimals become floats.

    >>> unpack(json.dumps(pack({"a": [float("inf"), {frozenset()}, fractions.Fraction(1, 3)]})))
    {'a': [inf, {frozenset()}, Fraction(1, 3)]}
    """

    def make(parts: dict[str, Any]) -> Any:
        ((name, value),) = parts.items()
        made = _MAKE[name](value)
        return float(made) if as_floats and name in ("Fraction", "Decimal") else made

    return json.loads(text, object_hook=make)


def raised(call: Callable[[], Any]) -> set[str]:
    """Return the names of the class, and its base classes, of the exception that a call raises.

    Empty if it raises none.
    """
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of the tested program
        return {kind.__name__ for kind in type(error).__mro__}
    return set()


def answer_calls(function: Callable[..., Any], calls: list[str]) -> list[Any]:
    """Call `function` once for each of `calls`, whose arguments are packed as text.

    Return, for each call, its value in a tuple, or in a list the class names of its exception.
    """
    answers: list[Any] = []
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    parsed = [unpack(call) for call in calls]
    sys.set_int_max_str_digits(limit)
    for args, options in parsed:
        try:
            value = function(*args, **options)
        except Exception as error:  # noqa: BLE001 - of the tested program
            answers.append([kind.__name__ for kind in type(error).__mro__])
            continue
        with contextlib.suppress(Exception):  # what cannot be copied is not plain data
            value = copy.deepcopy(value)  # a later call may change it
        answers.append((value,))
    return answers


def evaluate(imports: str, setup: str, *expressions: str) -> None:
    """Run `program.py` as a module and print, as the last line, the values of `expressions` in it.

    `imports` and `setup` are statements that the expressions need.
    """
    answer = os.dup(1)  # the program may close its own
    program = sys.modules["program"] = types.ModuleType("program")
    with open("program.py", "rb") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), program.__dict__)
    names: dict[str, Any] = {"__raised__": raised, "__answer__": answer_calls}
    exec(imports, names)
    names |= program.__dict__
    exec(setup, names)
    values = tuple([eval(expression, names) for expression in expressions])
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    line = "\n" + json.dumps(pack(values))
    if sys.stdout and not sys.stdout.closed:
        sys.stdout.flush()
    with open(answer, "w", encoding="ascii") as out:
        out.write(line)
    os._exit(0)


def check(test: dict[str, Any]) -> bool | str:
    """Return True if an assertion holds for the program's values, else False.

    False if values are missing or cannot be compared. An error in the test itself is returned as
    text.
    """
    names: dict[str, Any] = {}
    try:
        exec(test["imports"], names)
        for constant in test["constants"]:
            value = eval(constant, names)
            if value != value:
                return f"{constant} is not equal to any value"
            if len(json.dumps(pack(value))) >= test["room"]:
                return f"{constant[:80]} is longer than {test['room']:,} bytes"
    except Exception as error:  # noqa: BLE001 - of the test's own code
        return f"{type(error).__name__}: {error}"
    for as_floats in (False, True):
        try:
            values = unpack(test["values"], as_floats=as_floats)
            given = {f"_{number}": value for number, value in enumerate(values)}
            if eval(test["check"], names | given):
                return True
        except Exception:  # noqa: BLE001 - of values that the program chose
            continue
    return False


class _Lenient(ast.NodeTransformer):
    """A transformer that lets a test continue after a failed assertion if answers are missing."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        kind = ast.Name("Exception", ast.Load())
        return ast.Try([node], [ast.ExceptHandler(kind, None, _FAILED)], [], [])


_FAILED = ast.parse("_failed_()").body


def replay(test: dict[str, Any]) -> bool | str | list[str]:
    """Call a test's own check function, with known answers of the program to the calls that it
    makes.

    Return True if it passes and False if it fails. An error in the test itself is returned as text.
    If an answer is missing, a `MagicMock` takes its place, and the list of all calls is returned.
    """
    if not test["calls"]:
        first, again = _Replay([], ()), _Replay([], ())
        result = first.run(**test["check"])
        again.run(**test["check"])
        return result if first.calls == again.calls else "its values differ from call to call"
    try:
        (answers,) = unpack(test["values"])
        return _Replay(test["calls"], answers).run(**test["check"])
    except Exception:  # noqa: BLE001 - of answers that the program chose
        return False


class _Replay:
    """The calls of the tested program that a check function makes. The answers to the first calls
    are known.
    """

    def __init__(self, known: list[str], answers: tuple[Any, ...]) -> None:
        self.calls: list[str] = []
        self._is_missing = False
        self._known = dict(enumerate(zip(known, answers, strict=True)))
        self._raised: list[Exception] = []

    def run(self, source: str, function: str, candidate: str) -> bool | str | list[str]:
        tree = ast.fix_missing_locations(_Lenient().visit(ast.parse(source)))
        names: dict[str, Any] = {"__name__": "test", "_failed_": self._failed}
        random.seed(0)
        try:
            exec(compile(tree, "test.py", "exec"), names)
            names[candidate] = self._call
            names[function](self._call)
        except Exception as error:  # noqa: BLE001 - of the test, or of the program's values
            if not self._is_missing:
                is_own = type(error) in (NameError, ImportError, ModuleNotFoundError)
                is_own = not self.calls or (is_own and error not in self._raised)
                return f"{type(error).__name__}: {error}" if is_own else False
        return self.calls if self._is_missing else bool(self.calls) or "it calls no program"

    def _failed(self) -> None:
        if not self._is_missing:
            raise  # the exception that is handled

    def _call(self, *args: Any, **options: Any) -> Any:
        call = json.dumps(pack([args, options]))
        if '{"object": ""}' in call:
            raise TypeError("arguments must be plain data")
        known, found = self._known.get(len(self.calls), ("", ()))
        self.calls.append(call)
        if self._is_missing or known != call:
            from unittest.mock import MagicMock  # slow

            self._is_missing = True
            return MagicMock()
        if isinstance(found, tuple):
            return found[0]
        kinds = [getattr(builtins, name, None) for name in found]
        self._raised.append(next(kind for kind in kinds if kind)())
        raise self._raised[-1]


if __name__ == "__main__":
    given = json.load(sys.stdin)
    if sys.argv[1:]:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - the program's
        os.dup2(sys.stdin.fileno(), 0)
        evaluate(*given)
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    sys.stdout.write(
        "\n" + json.dumps([(replay if "calls" in test else check)(test) for test in given])
    )
