"""A reward for programs: the share of unit tests that they pass, run in a sandbox.

The expected values are never passed to the sandbox. It returns the program's answer as data, which
is compared outside. So a program cannot change its grade by printing, patching or exiting. Every
test runs in a new process.
"""

import ast
import sys
from collections.abc import Sequence
from typing import Any

from unstale.envs import sandbox

LIMITS = sandbox.Limits(seconds=2.0, memory_mb=512, file_mb=1, processes=4, output_kb=64)

_EVALUATE = """
import numbers, os, sys, types
def plain(value):
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return (set if kind is frozenset else kind)(map(plain, value))
    if isinstance(value, (bool, complex)):
        return value
    for kind, number in ((int, numbers.Integral), (float, numbers.Real)):
        if isinstance(value, number):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    return value
program = sys.modules["program"] = types.ModuleType("program")
source = open("program.py", encoding="utf-8").read()
exec(compile(source, "program.py", "exec"), program.__dict__)
sys.stdout.write("\\n" + repr(plain(eval(sys.argv[1], program.__dict__))))
sys.stdout.flush()
os._exit(0)
"""
"""Source of the code that evaluates a test in the sandbox. Its answer is the text after the last
line end, so that earlier output of the program is ignored. A `Counter` counts as a dict, and so on:
such values equal the plain ones.
"""


async def unit_tests(
    program: str, tests: Sequence[str | tuple[str, str]], *, limits: sandbox.Limits | None = None
) -> float:
    """Return the share of tests that a program passes.

    A test is an assertion such as `"assert gcd(12, 18) == 6"`, or a pair of standard input and
    expected output such as `("3 4", "7")`. The right side of an assertion must be a literal.
    Outputs are compared without trailing space. The limits apply to each test, and a time-out ends
    the testing. The number of tests times `limits.seconds` should be below `rollout.timeout_s`.
    Raises ValueError for another form of assertion.
    """
    if not tests:
        raise ValueError("tests must not be empty")
    parsed = [parse_assertion(test) if isinstance(test, str) else test for test in tests]
    passed = 0
    for test, (question, expected) in zip(tests, parsed, strict=True):
        is_assertion = isinstance(test, str)
        arguments = ["-c", _EVALUATE, question] if is_assertion else ["program.py"]
        result = await sandbox.run(
            [sys.executable, "-s", *arguments],
            stdin="" if is_assertion else question,
            files={"program.py": program},
            limits=limits or LIMITS,
        )
        if result.ended == "timeout":
            break
        if result.code != 0 or result.ended != "exited":
            continue
        if is_assertion:
            passed += _equals(result.stdout, expected)
        else:
            passed += _lines(result.stdout) == _lines(str(expected))
    return passed / len(tests)


def parse_assertion(test: str) -> tuple[str, Any]:
    """Return the expression and the expected value of an assertion.

    >>> parse_assertion("assert add(2, 3) == 5")
    ('add(2, 3)', 5)
    """
    try:
        match ast.parse(test.strip().removeprefix("assert "), mode="eval").body:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return ast.unparse(left), ast.literal_eval(right)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not a test: {test!r}: {error}") from error
    raise ValueError(f"a test is 'assert CALL == LITERAL', got {test!r}")


def _equals(printed: str, expected: Any) -> bool:
    try:
        return bool(ast.literal_eval(printed.rpartition("\n")[2]) == expected)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
