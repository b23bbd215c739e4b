"""The share of unit tests that a model's program passes, in the sandbox.

What is expected never enters the sandbox, and nothing in there passes a verdict: a test is a question, the program's
answer is data, and the two are compared here. All that a program can do by printing, exiting, patching or looking
around is to name an answer; every test has a process of its own.
"""

import ast
import sys
from collections.abc import Sequence
from typing import Any

from unstale.envs import sandbox

LIMITS = sandbox.Limits(seconds=2.0, memory_mb=512, file_mb=1, processes=4, output_kb=64)

_ASK = """
import os, sys
names = {"__name__": "program"}
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), names)
sys.stdout.write("\\n" + repr(eval(sys.argv[1], names)))
sys.stdout.flush()
os._exit(0)
"""
"""What follows the last line end is the answer, whatever was printed before."""


async def unit_tests(
    program: str, tests: Sequence[str | tuple[str, str]], *, limits: sandbox.Limits | None = None
) -> float:
    """The share of tests passed. A test is `"assert gcd(12, 18) == 6"`, or what goes in and comes out: `("3 4", "7")`.

    Of an assertion the left side is worked out in the program, the right side is a literal; ValueError for another
    kind. Of what comes out, space at the end of lines and of all does not count. The limits are of each test; one that
    takes too long is the last one tried. Keep tests times seconds under `rollout.timeout_s`.
    """
    if not tests:
        raise ValueError("there are no tests to pass")
    questions = [_question(test) if isinstance(test, str) else test for test in tests]
    passed = 0
    for test, (question, expected) in zip(tests, questions, strict=True):
        called = isinstance(test, str)
        command = (
            [sys.executable, "-s", "-c", _ASK, question]
            if called
            else [sys.executable, "-s", "program.py"]
        )
        done = await sandbox.run(
            command,
            stdin="" if called else question,
            files={"program.py": program},
            limits=limits or LIMITS,
        )
        if done.ended == "timeout":
            break
        if done.code == 0 and done.ended == "exited":
            passed += (
                _same(done.stdout, expected)
                if called
                else _lines(done.stdout) == _lines(str(expected))
            )
    return passed / len(tests)


def _question(test: str) -> tuple[str, Any]:
    """What is asked, and the answer that is expected.

    >>> _question("assert add(2, 3) == 5")
    ('add(2, 3)', 5)
    """
    try:
        match ast.parse(test.strip().removeprefix("assert "), mode="eval").body:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return ast.unparse(left), ast.literal_eval(right)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not a test: {test!r}: {error}") from error
    raise ValueError(f"a test is 'assert CALL == LITERAL', got {test!r}")


def _same(printed: str, expected: Any) -> bool:
    try:
        return bool(ast.literal_eval(printed.rpartition("\n")[2]) == expected)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
