"""Test the rewards.

Rules give 1 to equivalent answers and 0 to similar wrong ones. A task set combines named rewards
and records each. A program's prints, exits and patches pass no test, and expected values are not in
its process.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.rollout.test_episode import END, TASK, LetterChat, Tasks, awake, says
from unstale.config import EngineConfig, RolloutConfig
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Turn, sandbox
from unstale.envs.calculator import CalculatorTasks
from unstale.records import Failure, Trajectory
from unstale.rewards import exact_match, json_schema, numeric, numeric_answer, weighted
from unstale.rewards.programs import unit_tests
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.testing import check_env


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Paris", 1.0),
        (' "PARIS".\n', 1.0),
        ("**Paris!**", 1.0),
        ("Ｐａｒｉｓ", 1.0),  # noqa: RUF001
        ("Paris or London", 0.0),
        ("Pari s", 0.0),
        ("", 0.0),
    ],
)
def test_exact_match(text: str, same: float) -> None:
    assert exact_match(text, "London", "paris") == same


def test_a_match_with_nothing_is_refused() -> None:
    assert exact_match(".5", "5") == 0
    for expected in ((), ("paris", " . ")):
        with pytest.raises(ValueError, match="must not be empty"):
            exact_match("", *expected)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("42", 1.0),
        ("It is 42.", 1.0),
        ("41, no, 42", 1.0),
        ("42 or 41", 0.0),
        ("$42.00", 1.0),
        ("4.2e1", 1.0),
        ("42%", 1.0),
        ("42.001", 0.0),
        ("-42", 0.0),
        ("\N{EN DASH}42", 0.0),
        ("6\N{EN DASH}42", 0.0),
        ("The answer is...42", 1.0),
        ("version 1.2.42", 0.0),
        ("x42", 0.0),
        ("forty-two", 0.0),
        ("nan inf", 0.0),
        ("9" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(text: str, near: float) -> None:
    assert numeric(text, 42) == near


def test_numbers_have_signs_commas_and_tolerances() -> None:
    assert numeric("a loss of \N{MINUS SIGN}1,250,000.5", -1250000.5) == 1
    assert numeric("it is -.5 or...5", 5) == numeric("it is .5", 0.5) == 1
    for between in ("{,}", "\\,", "\\ ", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"):
        assert numeric(f"It is 1{between}350{between}000.5 in all", 1_350_000.5) == 1
    row = {"answer": "\N{MINUS SIGN}5"}
    assert numeric_answer("-5", row) == numeric_answer("\N{MINUS SIGN}5", row) == 1
    assert numeric_answer("5", row) == 0
    assert numeric("The balance is -$5.00", -5) == numeric("-\\$1,350", -1350) == 1
    assert numeric("\N{MINUS SIGN}\N{EURO SIGN}.5", -0.5) == numeric("12 - $5", 7) == 1
    assert numeric_answer("It is 1/4.", {"answer": "3/4"}) == 0
    assert numeric_answer("\\frac{3}{4}", {"answer": "3/4"}) == numeric("-3/4", -0.75) == 1
    assert numeric("on 3/4/2024", 2024) == numeric("4 km/2", 2) == 0
    assert numeric("1/" + "9" * 5000, 0) == 0
    for text in ("2 1/2", "2\\frac{1}{2}", "5/2", "5 / 2 cups", "step 7 10/4", "\\dfrac{5}{2} kg"):
        assert numeric(text, 2.5) == 1
    assert numeric("-1 1/2", -1.5) == numeric("\\frac{-3}{2}", -1.5) == 1
    assert numeric("1,000/8", 125) == numeric("9/10 or 11", 11) == 1
    assert numeric("1,2", 2) == numeric("10-3", 3) == 0 and numeric(".5", 0.5) == 1
    assert numeric("3.14", 3.14159) == 0 and numeric("3.14", 3.14159, relative=1e-3) == 1
    assert numeric("1/0", 0) == numeric("7/0", 7) == 0
    assert numeric("0.01", 0) == 0 and numeric("0.01", 0, absolute=0.05) == 1
    with pytest.raises(ValueError, match="must be finite, got nan"):
        numeric("1", float("nan"))


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("1000001", "1000000", 0),
        ("$1,234,568", "1234567", 0),
        ("12345678901234567890", "12345678901234567891", 0),
        ("1000000.0", "1,000,000", 1),
        ("10^6", "1000000", 1),
        ("6", "10^6", 0),
        ("2^{10}", "1024", 1),
        ("1.5 \\times 10^3", "1500", 1),
        ("1.5\N{MULTIPLICATION SIGN}10\N{SUPERSCRIPT THREE}", "1500", 1),
        ("5 cm^2", "5", 1),
        ("#### 5 km\N{SUPERSCRIPT TWO}", "5", 1),
        ("\\boxed{\\frac{1.5}{2}}", "0.75", 1),
        ("\\boxed{\\frac{ 3 }{-4}}", "-0.75", 1),
        ("\\boxed{\\cfrac12}", "1/2", 1),
        ("\\frac{\\pi}{2}", "2", 0),
        ("\N{VULGAR FRACTION ONE HALF}", "0.5", 1),
        ("3\N{VULGAR FRACTION ONE HALF} cups", "3.5", 1),
        ("\\boxed{x^2}", "2", 0),
        ("x_{12}", "12", 0),
        ("\\boxed{2\\sqrt{3}}", "3", 0),
        ("\\boxed{2\\sqrt{3}}", "3.4641016", 1),
        ("\\sqrt{16}", "4", 1),
        ("\\sqrt[3]{8}", "8", 0),
        ("3\\pi", "3", 0),
        ("7/0", "0", 0),
        ("9^9^9^9", "9", 0),
        ("1e400", "5", 0),
    ],
)
def test_powers_roots_and_units(reply: str, answer: str, right: int) -> None:
    assert numeric_answer(reply, {"answer": answer}) == right


@pytest.mark.costly(cases=3)
@pytest.mark.parametrize(
    "part", ["9", "9 ", "1,", "\\frac{", "\\sqrt[", "9^", "_{", "1.", " ", "(3"]
)
def test_a_long_reply_takes_no_time(part: str) -> None:
    numeric(part * 50_000, 42)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ('{"city": "Oslo", "people": 700000}', 1.0),
        (' {"city": "Oslo"}\n', 1.0),
        ('{"city": "Oslo", "people": 0}', 0.0),
        ('{"city": "Oslo", "country": "Norway"}', 0.0),
        ('{"people": 3}', 0.0),
        ('Here it is: {"city": "Oslo"}', 0.0),
        ('{"city": "Oslo", "people": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_keeps_to_its_schema(text: str, keeps: float) -> None:
    pytest.importorskip("jsonschema", reason="the extra rewards is not installed")
    assert json_schema(text, SCHEMA) == keeps


def test_what_is_no_schema_is_refused_and_nothing_is_fetched() -> None:
    pytest.importorskip("jsonschema", reason="the extra rewards is not installed")
    for schema in ({"type": "number of people"}, {"pattern": "["}):
        with pytest.raises(ValueError, match="not a JSON schema"):
            json_schema("1", schema)
    for reference in ("http://127.0.0.1:9/schema.json", "#/$defs/city", "#city"):
        with pytest.raises(ValueError, match=r"not a JSON schema: it does not define"):
            json_schema("1", {"$ref": reference})


class Weighing(Tasks):
    """A task set that multiplies its rewards."""

    def combine(self, rewards: Mapping[str, float]) -> float:
        return rewards["answer"] * rewards["form"]


def play(tasks: Tasks) -> Trajectory | Failure:
    async def main() -> Trajectory | Failure:
        generator = Generator(
            await awake(ScriptedEngine(lambda tokens, params: [END])), LetterChat(), EngineConfig()
        )
        return await Rollout(generator, tasks, RolloutConfig(retries=0)).episode(
            TASK, env_seed=1, noise_seed=2
        )

    return asyncio.run(main())


def verdict(**rewards: float) -> list[Turn]:
    return [says("hi"), Turn((), done=True, rewards=rewards, facts={"calls": 2.0})]


def test_a_task_set_combines_its_rewards_and_what_they_were_is_kept() -> None:
    added, multiplied = (play(kind(verdict(answer=1.0, form=0.5))) for kind in (Tasks, Weighing))
    assert isinstance(added, Trajectory) and isinstance(multiplied, Trajectory)
    assert (added.reward, added.rewards) == (1.5, {"answer": 1.0, "form": 0.5}) and added.success
    assert (multiplied.reward, multiplied.rewards) == (
        0.5,
        {"reward": 0.5},
    ) and not multiplied.success
    assert multiplied.facts == {"calls": 2.0, "reward/answer": 1.0, "reward/form": 0.5}


def test_what_cannot_be_combined_is_a_failed_episode() -> None:
    failed = play(Weighing(verdict(answer=1.0)))
    assert (
        isinstance(failed, Failure)
        and failed.stage == "step 1"
        and "KeyError: 'form'" in failed.error
    )


def test_the_contract_has_what_it_combines() -> None:
    class Misnamed(CalculatorTasks):
        combine = staticmethod(weighted(answer=1.0))

    with pytest.raises(
        ValueError, match=r"the rewards are \['success'\], the weights are of \['answer'\]"
    ):
        check_env(Misnamed())


def test_weights_are_of_these_rewards_and_no_others() -> None:
    combine = weighted(answer=2.0, form=-0.5)
    assert combine({"form": 1.0, "answer": 0.25}) == 0.0
    for odd in ({"answer": 1.0}, {"answer": 1.0, "form": 1.0, "taste": 1.0}):
        with pytest.raises(ValueError, match=r"the weights are of \['answer', 'form'\]"):
            combine(odd)


GCD = """
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a

if __name__ == "__main__":
    print(gcd(*map(int, input().split())))
"""
TESTS = (
    "assert gcd(12, 18) == 6",
    "gcd(7, 13) == 1",
    "assert gcd(0, 5) == 5",
    "assert gcd(48, 36) == 12",
)
LIMITS = sandbox.Limits(seconds=5.0)
LONG = sandbox.Limits(seconds=10.0, output_kb=4096)


def share(
    program: str, tests: Sequence[str | tuple[str, str]] = TESTS, limits: sandbox.Limits = LIMITS
) -> float:
    return asyncio.run(unit_tests(program, tests, limits=limits))


def test_the_share_of_tests_that_a_program_passes() -> None:
    assert (
        share(
            GCD,
            [TESTS[0], ("48 36", "12"), ("7 13\n", " 1 \n\n".lstrip()), "assert gcd(2, 4) == 4"],
        )
        == 3 / 4
    )
    assert share("def gcd(a, b): return min(a, b)", TESTS[:2]) == 0
    assert share("import random; def", TESTS[:1]) == 0


def test_answers_are_compared_as_python_does() -> None:
    values = "{'t': (1, [2.5]), 's': {1, 2}, 'd': {'a': None}, 'x': 'a\\nb', 'o': object()}"
    program = f"f = lambda kind: {values}[kind]"
    tests = [
        "assert f('t') == (1, [2.5])",
        "assert f('s') == {2, 1}",
        "assert f('d') == {'a': None}",
    ]
    tests += ["assert f('x') == 'a\\nb'", "assert f('o') == 1", "assert f('t') == [1, [2.5]]"]
    assert share(program, tests) == 4 / 6


@pytest.mark.parametrize(
    "program",
    [
        "from collections import Counter\ncount = Counter",
        "from collections import OrderedDict\n"
        "count = lambda text: OrderedDict((each, text.count(each)) for each in text)",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\n"
        "class Counted:\n    letter: str\n    times: int\n    after: Counted | None = None\n\n"
        "count = lambda text: {each.letter: each.times for each in\n"
        "                      [Counted(letter, text.count(letter)) for letter in text]}",
        "import pickle\nclass Text(str): pass\nText = pickle.loads(pickle.dumps(Text))\n"
        "count = lambda text: {Text(each): text.count(each) for each in text}",
    ],
)
def test_plain_python_passes(program: str) -> None:
    """The program is an importable module, and subclasses of dict and str equal the plain ones."""
    assert share(program, ["assert count('aab') == {'a': 2, 'b': 1}"]) == 1


def test_a_subclass_equals_the_type_itself() -> None:
    program = (
        "from collections import namedtuple\nfrom enum import IntEnum\n"
        "from fractions import Fraction\n"
        "Point = namedtuple('Point', 'x y')\nLevel = IntEnum('Level', 'LOW HIGH')\n"
        "values = {'p': Point(1, [2]), 'l': [Level.HIGH], 'f': Fraction(1, 2), 'b': [True],\n"
        "          's': frozenset({1}), 'n': None}\nf = values.get"
    )
    tests = ["assert f('p') == (1, [2])", "assert f('l') == [2]", "assert f('f') == 0.5"]
    tests += ["assert f('b') == [True]", "assert f('s') == {1}", "assert f('n') == None"]
    assert share(program, tests) == 1
    assert share(program, ["assert f('p') == [1, [2]]", "assert f('l') == [1]"]) == 0


@pytest.mark.parametrize(
    "program",
    [
        "print('4 passed'); print('OK'); raise SystemExit(0)",
        "import os; os.write(1, b'\\nTrue'); os._exit(0)",
        "class Equal:\n    def __eq__(self, other): return True\n\ngcd = lambda a, b: Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\n\ngcd = lambda a, b: "
        "Equal(3)",
        "import builtins; builtins.repr = lambda value: 'True'; gcd = lambda a, b: 0",
        "import builtins; builtins.eval = lambda *_: True; gcd = lambda a, b: 0",
        "import ast, sys; sys.settrace(lambda *_: None); ast.Compare = None; gcd = lambda a, b: "
        "True",
        "import sys; frame = sys._getframe(1); frame.f_globals['names'] = {}; gcd = lambda a, b: 0",
        "import atexit, os; atexit.register(os._exit, 0); gcd = lambda a, b: 1 / 0",
        "gcd = lambda a, b: print('6' * 100_000)",
        "gcd = lambda a, b: '6'",
        "import os\nwhile True:\n    os.write(1, b'6\\n' * 1000)",
        "import sys; sys.stdout = None; gcd = lambda a, b: 5",
    ],
)
def test_no_trick_passes_a_test(program: str) -> None:
    """The answer for 12 and 18 is 6. Any other value fails, however it is returned."""
    assert share(program, TESTS[:1], sandbox.Limits(seconds=1.0)) == 0
    nested = ["assert (gcd(12, 18) == 6) is True", "assert int(gcd(12, 18) == 6) == 1"]
    assert share(program, nested, sandbox.Limits(seconds=1.0)) == 0


def test_what_is_expected_is_not_where_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    run = sandbox.run

    async def spy(command: Sequence[str], **rest: Any) -> sandbox.ProgramResult:
        sent.append(f"{command} {rest}")
        return await run(command, **rest)

    monkeypatch.setattr(sandbox, "run", spy)
    secret = 918_273_645
    program = (
        "def f(n): return 918_273_6 * 100 + n if n else None\n"
        "if __name__ == '__main__': print(f(int(input())))"
    )
    assert (
        share(
            program,
            [f"assert f(45) == {secret}", f"f(0) == {secret}", ("45", str(secret)), ("0", "None")],
        )
        == 3 / 4
    )
    runs = [words for words in sent if "'program.py':" in words]
    assert len(runs) == 4 and not any(str(secret) in words for words in runs)


def test_the_usual_assertions_of_data_sets() -> None:
    """Also of functions that are named as builtins. A wrong program passes none of them."""
    tests = [
        "assert f('set') == set([1, 2])",
        "assert f('true') is True, 'with a message'",
        "assert (f('true'))",
        "assert not f('zero')",
        "assert abs(f('float') - 0.3) < 1e-6",
        "import math\nassert math.isclose(f('float'), 0.3)",
        "assert f('float') in (0.3, 1)",
        "assert f('inf') == float('inf') and f('list') == [1, 1e999]",
        "assert f('decimal') == 1.5",
        "assert f('big') == 2**100",
        "assert sum(10, 15) == 6",
        "assert sorted(f('set'), reverse=True) == [2, 1]",
    ]
    values = (
        "{'set': {1, 2}, 'true': True, 'zero': 0, 'float': 0.3 + 1e-12, 'inf': float('inf'),"
        " 'list': [1, float('inf')], 'decimal': Decimal('1.5'), 'big': 2**100}"
    )
    right = f"from decimal import Decimal\nf = {values}.get\nsum = lambda a, b: 6"
    assert share(right, [*tests[:6], *tests[7:], "assert (f('zero') == 0) == True"]) == 1
    cheat = "class X(int):\n  def __eq__(self, o): return True\nabs = lambda x: 0\n"
    nan = f"{cheat}import math; math.isclose = lambda *_: True\nf = lambda x: float('nan')"
    tests.remove("assert (f('true'))")  # not a number is true
    assert share(f"{nan}\nsum = lambda a, b: X(7)", tests) == 0


SAVED = """
import datetime, os, sys
from collections import Counter, deque
from fractions import Fraction
print("hello")
sys.stdout.close()
class Pair:
    def __init__(self, a): self.a = a
    def __eq__(self, other): return self.a == other.a
def f(n):
    if n is None: raise KeyError("n")
    return n
def values(name):
    return {
        "long": "y" * 300_000, "big": 10**5000, "sets": {frozenset({1})}, "empty": bytearray(b"a"),
        "day": datetime.date(2020, 1, 1), "queue": deque([1]), "range": range(3), "type": int,
        "third": Fraction(1, 3), "none": ..., "surrogate": "\\ud800", "many": list(range(200_000)),
    }[name]
"""


def test_what_a_right_program_returns_is_compared_as_python_does() -> None:
    """Also if it closes its output. A test may compare values of the program with each other."""
    tests = [
        "assert values('long') == 'y' * 300_000",
        "assert values('big') == 10**5000",
        f"assert values('big') == {10**3000}0{'0' * 1999}",
        "assert values('many') == list(range(200_000))",
        "assert values('sets') == {frozenset([1])} and values('none') is ...",
        "import datetime\nassert values('day') == datetime.date(2020, 1, 1)",
        "from collections import deque\nassert values('queue') == deque([1])",
        "assert values('empty') == b'a' and values('range') == range(3)",
        "from fractions import Fraction\nassert values('third') == Fraction(1, 3)",
        "assert values('third') == 1 / 3 and values('type') is int",
        "assert values('surrogate') == '\ud800'",
        "assert f(1) < f(2) and f(0) < f(1) < f(2)",
        "assert f(Pair(1)) == Pair(1) and isinstance(f(Pair(2)), Pair)",
        "assert hasattr(f(Pair(1)), 'a')",
        "assert all(n == 2 for n in f([2, 2]))",
        "assert all(f(n) == n for n in range(9))",
        "for n in range(9):\n    assert f(n) == n\n    assert f(-n - 2) < 0",
        "assert any(abs(a - b) < 0.1 for a, b in zip(f([1, 2]), [1, 2]))",
        "# comments\nx = 3\nassert f(x) == 3\nassert f(4) == x + 1",
        "p = Pair(1)\np.a = 2\nassert p.a == 2",
        "try:\n    f(None)\n    assert False\nexcept (LookupError, ValueError):\n    pass",
        "from program import f\nassert f(math.pi) == math.pi",
    ]
    assert share(f"\ufeff{SAVED}".replace("\n", "\r\n"), tests, LONG) == 1
    wrong = "f = values = lambda n: 7\nclass Pair: a = 0"
    assert share(wrong, [each for each in tests if "any" not in each], LONG) == 0


def test_what_a_program_reads_and_how_it_ends() -> None:
    ends = "import os, sys, threading, time\n"
    ends += "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
    right = (
        f"{ends}print(input() + '  ')\nprint(input(), flush=True)\nsys.stdout.close()\nos._exit(0)"
    )
    assert share(right, [("1\r\n2\r\n", "1\r\n2\r\n"), ("é\n✓", "é\n✓\n")]) == 1
    assert share("print(7)\ninput()", [("", "7")]) == share("print(0.1 + 0.2)", [("", "0.3")]) == 0
    assert share("", [("", "")]) == share("print(7)\nexit()", [("", "7")]) == 1


def test_a_large_output_and_many_warnings_are_right() -> None:
    program = "import sys\nprint('1 ' * 600_000)\nprint('w' * 3_000_000, file=sys.stderr)"
    assert asyncio.run(unit_tests(program, [("", "1 " * 600_000)])) == 1
    assert asyncio.run(unit_tests(program, [("", "1 " * 599_999)])) == 0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("assert gcd(1, 2) == 10**70_000", "is longer than 65,536 bytes"),
        ("assert gcd(1, 2) == max()", "no program can pass .*TypeError: max expected"),
        ("assert gcd(1, 2) == float('nan')", "is not equal to any value"),
        (("", "\ud83d"), "no program can write"),
        (("", "1" * 70_000), "has 70,000 bytes, and a program may write 64 kB"),
    ],
)
def test_a_test_that_no_program_can_pass_is_an_error(test: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share(GCD, [test])


CHECK = """
def encode(s): return s[1:] + s[0]
def decode(s): "Undo encode."
def check(candidate):
    from random import choice
    for _ in range(20):
        text = "".join(choice("abc") for _ in range(choice([3, 4])))
        assert candidate(encode(text)) == text, "decoded"
    word = candidate(candidate("abc"))
    assert word == decode(decode("abc")) == "bca"
    try:
        candidate("")
        assert False
    except IndexError:
        pass
check(decode)"""
DECODE = "def decode(s): return s[-1] + s[:-1]"


def test_a_check_function_runs_where_the_program_does_not() -> None:
    assert share(DECODE, [CHECK, CHECK]) == 1
    for wrong in (
        "def decode(s): return s",
        "class A(str):\n    def __eq__(self, other): return True\ndef decode(s): return A()",
        f"import builtins, random\nrandom.seed(3)\nencode = len\n{DECODE}[:2]",
        "def decode(s): return object()",
        "def decode(s): raise NameError(s)",
        "import os\nos.write(1, b'\\n{\"tuple\": [1]}')\nos._exit(0)",
        "import itertools\nn = itertools.count()\ndef decode(s): return str(next(n))",
        "",
    ):
        assert share(wrong, [CHECK]) == 0, wrong
    with pytest.raises(ValueError, match="NameError: name 'encode' is not defined"):
        share(DECODE, [CHECK.replace("def encode", "def other")])
    with pytest.raises(ValueError, match="differ from call to call"):
        share(DECODE, ["import uuid\ndef check(f): assert f(str(uuid.uuid4()))\ncheck(decode)"])


def test_a_test_that_hangs_is_the_last_one() -> None:
    hangs = "def gcd(a, b):\n    while a == 7: pass\n    return 6"
    assert share(hangs, [TESTS[0], TESTS[1], TESTS[0]], sandbox.Limits(seconds=4.0)) == 1 / 3


@pytest.mark.parametrize(
    "test",
    [
        "import random; assert gcd(1, random.randint(2, 3)) == 1",
        "while True: assert gcd(1, 2) == 1",
        "import os",
        "assert 1 == 1 == 1",
        "(",
        "all(gcd(n, m) == 1 for n in [2] for m in [3])",
    ],
)
def test_only_questions_with_a_known_answer_are_tests(test: str) -> None:
    with pytest.raises(ValueError, match="test"):
        share(GCD, [test])
    with pytest.raises(ValueError, match="must not be empty"):
        share(GCD, [])
