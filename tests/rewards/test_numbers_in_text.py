"""Test the rule of `numeric_answer`.

The last expression is computed as a whole, in any notation, or it is no number. Its parts are never
the answer, and no expression takes noticeable time.
"""

import math
from fractions import Fraction
from random import Random

import pytest

from unstale.envs.numbers import last_number, last_quantity
from unstale.rewards import numeric, numeric_answer


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("√9", "3"),
        ("\\sqrt[3]{8}", "2"),
        ("(-2)^2", "4"),
        ("-2^2", "-4"),
        ("10**3", "1000"),
        ("2^{2^3}", "256"),
        ("27^{2/3}", "9"),
        ("\\frac{1}{\\sqrt{4}}", "0.5"),
        ("\\left(\\frac{1}{2}\\right)^2", "0.25"),
        ("1'000", "1000"),
        ("1_000", "1000"),
        ("10 000", "10000"),
        ("5,\\!000", "5000"),
        ("12,00,000", "1200000"),
        ("1.234,5", "1234.5"),
        ("$5!$", "120"),
        ("The answer is 5!", "5"),
        ("12 - $5", "7"),
        ("5 - 7", "-2"),
        ("2 x 3", "6"),
        ("2\N{DOT OPERATOR}3", "6"),
        ("2(3)", "6"),
        ("100 - 30%", "99.7"),
        ("5%", "5"),
        ("5%", "0.05"),
        ("0.28", "28%"),
        ("2 million", "2000000"),
        ("3.5k", "3500"),
        ("10_2", "2"),
        ("so 3 apples and 4 pears make 7", "7"),
        ("5 m/s^2", "5"),
        ("762 M&Ms", "762"),
        ("3 egg(s)", "3"),
        ("(C) 5", "5"),
        ("x = - 5", "-5"),
        ("- 5", "5"),
        ("The answer is 5 (see step 3)", "5"),
        ("**18**\n\n(Check: 9*2=18)", "18"),
        ("**18** (in 2024)", "18"),
        ("\\boxed{5} or 6?", "5"),
        ("\\boxed{x = 5 \\text{ cm}^2}", "5"),
        ("Answer: 3:30", "3:30"),
        ("It is (1/2, 3).", "(0.5,3)"),
        ("2024-11-29", "2024-11-29"),
        ("答案是5", "5"),
        ("9007199254740993.0", "9007199254740993"),
        ("x \\ne 0, so it is 5", "5"),
        ("if x > 3, then 5", "5"),
        ("<answer>5</answer>", "5"),
        ("<<48/2=24>>24", "24"),
        ("5!=120", "120"),
        ("\\boxed{f(1, 2) = 5}", "5"),
        ("\\boxed{x = 2+3 = 5}", "5"),
        ("5\\times3", "15"),
        ("1000000.0000001", "1000000"),
    ],
)
def test_an_expression_is_computed_as_a_whole(reply: str, answer: str) -> None:
    assert numeric_answer(reply, {"answer": answer}) == 1


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ("7/-0", "0"),
        ("√9", "9"),
        ("(-2)^2", "-2"),
        ("10**3", "3"),
        ("1'000", "0"),
        ("5!", "5"),
        ("2i", "2"),
        ("2xy", "2"),
        ("x - 3", "3"),
        ("2^x", "2"),
        ("12 R 3", "3"),
        ("log_2 8", "8"),
        ("max(3, 4)", "4"),
        ("5 choose 2", "2"),
        ("3 mod 5", "5"),
        ("|-5|", "-5"),
        ("±5", "5"),
        ("0x1F", "0"),
        ("12_5", "5"),
        ("5-7", "7"),
        ("1/2/3", "3"),
        ("7:30", "30"),
        ("3 : 4", "4"),
        ("2,5", "5"),
        ("(5,2)", "2"),
        ("\\boxed{5, 6}", "6"),
        ("\\boxed{5 \\text{ or } 6}", "6"),
        ("3 * (5 apples)", "5"),
        ("5 apples + 3 pears", "3"),
        ("1 + 2 + ... + 100", "100"),
        ("2 million 500 thousand", "500000"),
        ("18 (9 x 2)", "2"),
        ("5%", "500"),
        ("0.28%", "28%"),
        ("9007199254740993.0", "9007199254740992"),
        ("x \\ge 5", "5"),
        ("5 \N{LESS-THAN OR EQUAL TO} x", "5"),
        ("x != 5", "5"),
        ("\\boxed{x > 5}", "5"),
        ("\\boxed{\\neq 5}", "5"),
        ("\\boxed{x=5, x=6}", "6"),
        ("\\boxed{x=5 \\text{ or } x=6}", "6"),
        ("\\boxed{5\\cdot x}", "5"),
        ("\\boxed{\\lim_{x\\to5} x}", "5"),
        ("0.(5)", "5"),
        ("1000000.5", "1000000"),
        ("100000000.1", "100000000"),
    ],
)
def test_a_part_of_an_expression_is_not_the_answer(reply: str, part: str) -> None:
    assert numeric_answer(reply, {"answer": part}) == 0


def test_an_answer_that_is_no_number_is_an_error_of_the_row() -> None:
    for answer in ("2\\pi", "x + 1", "-6.0 - 2.0i"):
        with pytest.raises(ValueError, match="no number that is understood"):
            numeric_answer("5", {"answer": answer})


@pytest.mark.parametrize(
    "text",
    [
        "10**10**10",
        "9!!!!",
        "401!",
        "2^{2^{2^{2^{10}}}}",
        "1e999999999",
        "9" * 100_000,
        "(" * 50_000 + "5" + ")" * 50_000,
        "2^" * 20_000 + "2",
        "11," * 20_000,
        "a^{" * 20_000,
        "\\frac{1}{" * 20_000,
    ],
)
def test_what_is_too_large_is_no_number(text: str) -> None:
    assert last_quantity(text) is None


Expression = tuple[Fraction, str, str, int]
"""A value, its text in plain notation and in LaTeX, and how tightly it binds, from 0 to 3."""


def grouped(made: Expression, least: int) -> tuple[str, str]:
    """Return the texts of an operand, in parentheses unless it binds tightly enough."""
    _, plain, latex, binds = made
    return (plain, latex) if binds >= least else (f"({plain})", f"\\left({latex}\\right)")


def expression(random: Random, depth: int) -> Expression:
    """Return a random expression, with its value as computed by Fraction."""
    kind = random.choice("+-*/^rn") if depth else "n"
    if kind == "n":
        number = random.randrange(10 ** random.randint(1, 7))
        plain = random.choice((f"{number}", f"{number:,}", f"{number:,}".replace(",", "'")))
        return Fraction(number), plain, f"{number:,}".replace(",", "{,}"), 3
    one, other = expression(random, depth - 1), expression(random, depth - 1)
    if kind in "+-":
        left, right = grouped(one, 0), grouped(other, 1)
        value = one[0] + other[0] if kind == "+" else one[0] - other[0]
        return value, f"{left[0]} {kind} {right[0]}", f"{left[1]} {kind} {right[1]}", 0
    if kind == "*":
        left, right = grouped(one, 1), grouped(other, 2)
        sign = random.choice(("*", "×", "x", "·"))  # noqa: RUF001
        return (
            one[0] * other[0],
            f"{left[0]} {sign} {right[0]}",
            f"{left[1]} \\{random.choice(('times', 'cdot'))} {right[1]}",
            1,
        )
    if kind == "/" and other[0]:
        left, right = grouped(one, 1), grouped(other, 2)
        plain = f"{left[0]} {random.choice('/÷')} {right[0]}"
        return one[0] / other[0], plain, f"\\dfrac{{{one[2]}}}{{{other[2]}}}", 1
    exponent = random.randint(2, 3)
    base = grouped(one, 3)
    if kind == "r" and one[0] >= 0:
        plain = f"sqrt(({one[1]})^2)" if exponent == 2 else f"∛(({one[1]})^3)"
        return one[0], plain, f"\\sqrt[{exponent}]{{{base[1]}^{exponent}}}", 2
    plain = f"{base[0]}{random.choice(('^', '**'))}{exponent}"
    return one[0] ** exponent, plain, f"{base[1]}^{{{exponent}}}", 2


@pytest.mark.parametrize("seed", range(4))
def test_random_expressions_have_the_value_that_fraction_computes(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        value, plain, latex, _ = expression(random, random.randint(1, 3))
        if max(map(int.bit_length, map(abs, value.as_integer_ratio()))) > 500:
            continue
        named = f"{value.numerator}/{value.denominator}" if value.denominator > 1 else f"{value}"
        for text in (f"So it is {plain}.", f"So it is ${latex}$.", f"\\boxed{{{latex}}} cm^2"):
            assert last_number(text) == value, text
            assert numeric_answer(text, {"answer": named}) == 1, text
            assert numeric(text, float(value) * 1.01 + 1) == 0, text
            wrong = math.floor(value) + 1
            gap = wrong - value
            is_near = gap <= Fraction(1, 1000) and value.denominator > 1
            is_near = is_near and math.isclose(value, wrong, rel_tol=1e-6)
            assert numeric_answer(text, {"answer": str(wrong)}) == is_near, text
