"""A reward for programs: the share of unit tests that they pass in a sandbox.

The program never gets the expected values. It returns its answers as data, which another process
compares. So a program cannot change its grade by printing, patching or exiting. Every test runs in
a new process.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from unstale.envs import EnvError, sandbox
from unstale.rewards.assertions import Assertion, CheckFunction, parse_test

LIMITS = sandbox.Limits(seconds=5.0, memory_mb=512, file_mb=1, processes=4, output_kb=64)
"""Default limits of the sandbox for each test.

The limit on output grows with the expected output.
"""

ANSWER_LIMITS = replace(LIMITS, output_kb=4096, file_mb=8)
"""Limits of the sandbox for evaluating an assertion, whose values may have any length."""
_MAX_ROUNDS = 64
"""Largest number of times that a test's own check function is called. Two are enough unless it
calls the program with arguments that depend on the program's answers.
"""
_WORKER = Path(__file__).with_name("unit_test_worker.py").read_text("utf-8")


async def unit_tests(
    program: str, tests: Sequence[str | tuple[str, str]], *, limits: sandbox.Limits | None = None
) -> float:
    """Return the share of tests that a program passes.

    A test is one of three: an assertion such as `"assert gcd(12, 18) == 6"` or `"assert abs(area(1)
    - 3.14) < 0.01"`, after imports if it needs some; a function that is called at the end with a
    function of the program (`"def check(f): ... \\ncheck(gcd)"`); or a pair of standard input and
    expected output such as `("3 4", "7")`. Outputs are compared without trailing space. The limits
    apply to each test, and a time-out ends the testing. The number of tests times `limits.seconds`
    should be below `rollout.timeout_s`. Raises ValueError for another form of test, and for a test
    that no program can pass.
    """
    if not tests:
        raise ValueError("tests must not be empty")
    parsed = [
        parse_test(test) if isinstance(test, str) else _check_output(test, limits) for test in tests
    ]
    answers = await _answers(program, parsed, limits)
    room = (limits or ANSWER_LIMITS).output_kb << 10
    pairs = [
        (test, answer)
        for test, answer in zip(parsed, answers, strict=True)
        if isinstance(test, Assertion)
    ]
    checked = iter(await _check(pairs, room))
    passed = 0
    for test, source, answer in zip(parsed, tests, answers, strict=True):
        match test:
            case Assertion():
                result = next(checked)
            case CheckFunction():
                result = await _call_check(program, test, limits)
            case (_, expected):
                result = _is_output(answer, expected)
        if isinstance(result, str):
            raise ValueError(f"no program can pass the test {source!r}: {result}")
        passed += result
    return passed / len(tests)


def _check_output(test: tuple[str, str], limits: sandbox.Limits | None) -> tuple[str, str]:
    """Return a pair of input and expected output, with line ends as the program gets them.

    Raises ValueError if no program can write this output.
    """
    question, expected = test
    try:
        size = len(str(expected).encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"no program can write the expected output: {error}") from error
    if limits and size >= limits.output_kb << 10:
        raise ValueError(
            f"the expected output has {size:,} bytes, and a program may write "
            f"{limits.output_kb} kB: raise limits.output_kb"
        )
    return question.replace("\r\n", "\n"), str(expected)


async def _answers(
    program: str,
    tests: Sequence[Assertion | CheckFunction | tuple[str, str]],
    limits: sandbox.Limits | None,
) -> list[str | None]:
    """Return what the program printed in each test. None if it failed.

    After a time-out, no further test is run. Tests that are not run, and tests with a
    `CheckFunction`, get None, too.
    """
    answers: list[str | None] = [None] * len(tests)
    for number, test in enumerate(tests):
        match test:
            case Assertion():
                result = await _evaluate(program, test.imports, test.setup, test.questions, limits)
            case CheckFunction():
                continue
            case (question, expected):
                result = await sandbox.run(
                    [sys.executable, "-s", "program.py"],
                    stdin=question,
                    files={"program.py": program},
                    limits=limits or _for_output(expected),
                    keep_stderr=False,
                )
        if result.ended == "timeout":
            break
        if result.code == 0 and result.ended == "exited":
            answers[number] = result.stdout
    return answers


async def _evaluate(
    program: str, imports: str, setup: str, questions: Sequence[str], limits: sandbox.Limits | None
) -> sandbox.ProgramResult:
    """Run the program as a module, then `imports` and `setup`, and print the values of
    `questions`.
    """
    return await sandbox.run(
        [sys.executable, "-s", "-c", _WORKER, "ask"],
        stdin=json.dumps([imports, setup, *questions]),
        files={"program.py": program},
        limits=limits or ANSWER_LIMITS,
        keep_stderr=False,
    )


async def _call_check(
    program: str, test: CheckFunction, limits: sandbox.Limits | None
) -> bool | str:
    """Run a test's own check function. Return True if it passes, False if it fails.

    Return an error text if no program can pass it. The function runs in a process without the
    program. Its calls of the program are collected and answered in the program's process. It is
    then called again with these answers, until it makes no new calls, at most `_MAX_ROUNDS` times.
    """
    calls: list[str] = []
    values = ""
    for _ in range(_MAX_ROUNDS):
        row = {"check": asdict(test), "calls": calls, "values": values}
        result = await sandbox.run(
            [sys.executable, "-s", "-c", _WORKER],
            stdin=json.dumps([row]),
            limits=replace(ANSWER_LIMITS, seconds=LIMITS.seconds + len(values) / 2e6),
        )
        if result.code or result.ended != "exited":
            if calls:
                return False  # the program's answers are too costly
            raise EnvError(f"the test could not be evaluated: {result.stderr[-300:]}")
        found = json.loads(result.stdout.rpartition("\n")[2])[0]
        if not isinstance(found, list):
            return found
        calls = found
        question = f"tuple(__answer__({test.candidate}, {calls!r}))"
        answer = await _evaluate(program, "", "", [question], limits)
        if answer.code or answer.ended != "exited":
            return False
        values = answer.stdout.rpartition("\n")[2]
    return False


def _for_output(expected: str) -> sandbox.Limits:
    """Return limits that let the program write at least twice the expected output."""
    size_kb = len(expected.encode()) >> 10
    return replace(
        LIMITS,
        output_kb=LIMITS.output_kb + 2 * size_kb,
        file_mb=LIMITS.file_mb + (2 * size_kb >> 10),
    )


async def _check(tests: Sequence[tuple[Assertion, str | None]], room: int) -> list[bool | str]:
    """Evaluate the checks of assertions, in a process without the program.

    Each assertion has the program's answer, or None. Return True if it holds, False if not, and an
    error text if no program can pass it. A program's answer has less than `room` bytes.
    """
    rows = [
        {
            "imports": test.imports,
            "check": test.check,
            "constants": test.constants,
            "values": (answer or "").rpartition("\n")[2],
            "room": room,
        }
        for test, answer in tests
    ]
    if not rows:
        return []
    size = sum(len(answer or "") for _, answer in tests)
    result = await sandbox.run(
        [sys.executable, "-s", "-c", _WORKER],
        stdin=json.dumps(rows),
        limits=replace(LIMITS, seconds=LIMITS.seconds + 0.1 * len(rows) + size / 2e6),
    )
    if not result.code and result.ended == "exited":
        found: list[bool | str] = json.loads(result.stdout.rpartition("\n")[2])
        return found
    if len(tests) > 1:
        return [(await _check([each], room))[0] for each in tests]
    if tests[0][1] is None:
        raise EnvError(f"the tests could not be evaluated: {result.stderr[-300:]}")
    return await _check([(tests[0][0], None)], room)  # the program's answer is too costly


def _is_output(answer: str | None, expected: str) -> bool:
    return answer is not None and _lines(answer) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
