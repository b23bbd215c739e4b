"""Test the calculator: it evaluates sums, refuses other input, and scores the final number."""

import asyncio

import pytest

from unstale.envs import Message, ToolCall, Turn
from unstale.envs.calculator import CalculatorTasks, calculate
from unstale.records import Task

TASK = Task("calculator", "train", 3)


def play(*replies: Message) -> Turn:
    async def episode() -> Turn:
        env = CalculatorTasks().env(TASK, 0)
        turn = await env.begin()
        for reply in replies:
            turn = await env.step(reply)
        return turn

    return asyncio.run(episode())


def call(expression: object) -> Message:
    return Message("assistant", "", (ToolCall("calculate", {"expression": expression}),))


@pytest.mark.parametrize(
    ("text", "value"), [("2 + 3 * 4", 14), ("(2+3)*4", 20), (" -7 - 1", -8), ("12", 12)]
)
def test_it_computes(text: str, value: int) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text", ["2 ** 9999999", "1 / 2", "abs(1)", "True", "1.5", "", "1 +", "(" * 90, "9" * 101]
)
def test_what_is_no_sum_is_an_error_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|cannot read|characters"):
        calculate(text)
    assert play(call(text)).messages[0].content.startswith("Error: ")


def test_using_the_tool_and_saying_the_result_is_rewarded() -> None:
    expression = CalculatorTasks().expression(TASK)
    told = play(call(expression))
    assert told.messages == (Message("tool", str(calculate(expression))),)
    assert not told.done
    ended = play(call(expression), Message("assistant", f"It is {told.messages[0].content}."))
    assert ended.done
    assert dict(ended.rewards) == {"success": 1.0}


def test_a_number_inside_another_is_no_answer() -> None:
    value = calculate(CalculatorTasks().expression(TASK))
    assert play(Message("assistant", f"9{abs(value)}")).rewards["success"] == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("**{}**", 1),
        ("{}. I used the tool.", 1),
        ("It is {}, as it says.", 1),
        ("So x = {}!", 1),
        ("x = {}!", 0),  # a factorial
        ("{}0", 0),
        ("{}.5", 0),
        ("1{}", 0),
        ("", 0),
    ],
)
def test_the_answer_may_have_punctuation_around_it(text: str, reward: float) -> None:
    value = calculate(CalculatorTasks().expression(TASK))
    assert play(Message("assistant", text.format(value))).rewards["success"] == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("{0} or {1}", 0),
        ("{1}, no, {0}", 1),
        ("\\(\\boxed{{{0:,}}}\\)", 1),
        ("It is {0:.1f}", 1),
    ],
)
def test_the_last_number_is_the_answer(text: str, reward: float) -> None:
    value = calculate(CalculatorTasks().expression(TASK))
    assert play(Message("assistant", text.format(value, value + 1))).rewards["success"] == reward


def test_malformed_and_unknown_calls_are_answered_and_counted() -> None:
    wrong = (
        ToolCall("", {}, error="the call is not JSON"),
        ToolCall("divide", {}),
        ToolCall("calculate", {}),
    )
    wrong += (ToolCall("calculate", {"expression": [[]]}),)
    turn = play(Message("assistant", "", wrong))
    assert [m.content for m in turn.messages] == [
        "Error: the call is not JSON",
        "Error: unknown tool 'divide'; the tool is calculate",
        "Error: calculate takes expression",
        "Error: expression must be a string",
    ]
    assert turn.facts == {"tool_calls": 4.0, "tool_errors": 4.0}


def test_held_out_tasks_are_fixed_and_never_trained_on() -> None:
    tasks = CalculatorTasks()
    stream = tasks.train(0)
    trained = {next(stream).key for _ in range(50)}
    assert tasks.held_out(50) == tasks.held_out(60)[:50]
    assert not trained & {task.key for task in tasks.held_out(50)}


def test_too_few_terms_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="terms must be >= 2, got 1"):
        CalculatorTasks(terms=1)


def test_functions_of_two_numbers() -> None:
    assert (calculate("gcd(12, 18)"), calculate("lcm(4, 6) + 1")) == (6, 13)
    for wrong in ("gcd(12)", "gcd(1, 2, 3)", "gcd", "pow(2, 3)", "gcd(a, 2)"):
        with pytest.raises(ValueError, match=r"only whole numbers|cannot read"):
            calculate(wrong)


def test_two_numbers_alone_are_answered_with_the_calls_that_could_be_meant() -> None:
    told = {play(call(f"{first}, 20")).messages[0].content for first in (12, 13)}
    assert told == {
        "Error: gcd(12, 20) or lcm(12, 20)?",
        "Error: lcm(13, 20) or gcd(13, 20)?",
    }
