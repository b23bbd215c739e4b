"""Test `unstale tool-traces`: which solutions become conversations, and that `sft` learns them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from unstale.cli.main import main
from unstale.envs import Message
from unstale.research.tool_traces import TOOLS, NotTraced, rewritten, trace, traces

GSM = "She sold 48/2 = <<48/2=24>>24 clips in May. In all she sold 48 + 24 = <<48+24=72>>72 clips."
PLAIN = (
    "Each of 1,200 boxes costs $3 \N{MULTIPLICATION SIGN} 4 = $12. So it is 12. The answer is 12."
)


def traced(solution: str, tool: str = "calculator") -> list[dict[str, object]]:
    return asyncio.run(trace("How many?", solution, TOOLS[tool]))


def test_computations_become_calls_and_words_stay() -> None:
    assert traced(PLAIN) == [
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": "Each of 1,200 boxes costs",
            "tool_calls": [
                {"function": {"name": "calculate", "arguments": {"expression": "3 * 4"}}}
            ],
        },
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "$12. So it is 12. The answer is 12."},
    ]


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("It is twelve.", "no computation"),
        ("3 * 4 = 13", "a wrong computation"),
        ("So 48/2 = 24", "the tool cannot compute it"),
        ("1 + 1 = 2 " * 33, "too many computations"),
    ],
)
def test_a_solution_is_kept_only_if_the_tool_agrees(solution: str, reason: str) -> None:
    with pytest.raises(NotTraced, match=reason):
        traced(solution)


def test_python_divides_and_the_notes_of_gsm8k_are_left_out() -> None:
    found = traced(GSM, "python")
    calls = [each["tool_calls"] for each in found if "tool_calls" in each]
    assert [call[0]["function"]["arguments"] for call in calls] == [  # type: ignore[index]
        {"code": "print(48/2)"},
        {"code": "print(48 + 24)"},
    ]
    assert [each["content"] for each in found if each["role"] == "tool"] == ["24.0", "72"]
    assert found[-1]["content"] == "72 clips."
    assert found[3]["content"] == "24 clips in May. In all she sold"


REWRITTEN = """The number of ways is a binomial.
```python
import math
print(math.comb(10, 3))
```
```output
120
```
Half of them are even.
```python
print(120 // 2)
```
```output
60
```
So the answer is 60."""


class Writes:
    """A model that always writes the same."""

    def __init__(self, text: str) -> None:
        self.text, self.asked = text, ""

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        self.asked = messages[0].content
        return self.text


def rewrite(writer: Writes) -> list[dict[str, object]]:
    solution = "There are ten choose three ways, half of them even, so 60."
    return asyncio.run(rewritten("How many?", solution, writer))


def test_a_model_rewrites_computations_in_words_as_programs_that_are_executed() -> None:
    writer = Writes(REWRITTEN)
    found = rewrite(writer)
    assert json.loads(writer.asked.partition("\n\n")[2])["problem"] == "How many?"
    calls = [each["tool_calls"] for each in found if "tool_calls" in each]
    assert [call[0]["function"]["arguments"]["code"] for call in calls] == [  # type: ignore[index]
        "import math\nprint(math.comb(10, 3))",
        "print(120 // 2)",
    ]
    assert [each["content"] for each in found] == [
        "How many?",
        "The number of ways is a binomial.",
        "120",
        "Half of them are even.",
        "60",
        "So the answer is 60.",
    ]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("```output\n120\n```\n", "", "no programs with outputs"),
        ("```output\n60", "```output\n61", "another output"),
        ("math.comb", "math.combs", "a program fails"),
        ("answer is 60", "answer is 59", "another answer"),
    ],
)
def test_a_rewritten_solution_is_kept_only_if_it_runs_as_written(
    old: str, new: str, reason: str
) -> None:
    with pytest.raises(NotTraced, match=reason):
        rewrite(Writes(REWRITTEN.replace(old, new)))


def test_reasons_of_rewritten_rows_are_counted() -> None:
    rows = [{"q": "How many?", "a": f"It is {end}."} for end in (60, 60, 7)]
    kept, refused = asyncio.run(
        traces(rows, TOOLS["python"], prompt="q", solution="a", writer=Writes(REWRITTEN))
    )
    assert len(kept) == 2 and refused == {"another answer": 1}


def test_an_answer_that_is_no_number_leaves_only_its_row_out() -> None:
    rows = [{"q": "?", "a": "2 * 3 = 6", "end": end} for end in ("6", r"$3\pi$")]
    counted = traces(rows, TOOLS["calculator"], prompt="q", solution="a", answer="end")
    kept, refused = asyncio.run(counted)
    assert len(kept) == 1 and refused == {"no number as the answer": 1}


def called(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code or 0


def test_the_command_writes_rows_that_sft_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"It is {n} + 1 = {n + 1}.", "end": n + 1}
        for n in range(10, 18)
    ]
    rows += [{"question": "What?", "answer": "2 * 3 = 6", "end": 7}]
    source, out = tmp_path / "plain.jsonl", tmp_path / "traces.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert called("tool-traces", str(source), str(out), "--answer", "end", "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"rows": 9, "kept": 8, "refused": {"another answer": 1}}
    size = ["--max_steps", "1", "--schedule.groups_per_step", "4", "--eval.tasks", "0"]
    assert called("sft", "calculator", str(out), "--folder", str(tmp_path / "warm"), *size) == 0
    assert (tmp_path / "warm" / "config.json").is_file()
    assert called("tool-traces", str(source), str(out), "--solution", "proof") == 2
    assert "there is no column 'proof'" in capsys.readouterr().err
    assert called("tool-traces", str(source), str(out), "--url", "http://127.0.0.1:1/v1") == 2
    assert "name a served writer together" in capsys.readouterr().err
    closed = ["--url", "http://127.0.0.1:1/v1", "--url-model", "writer", "--tool", "python"]
    assert called("tool-traces", str(source), str(out), *closed) == 2
    assert "http://127.0.0.1:1/v1 cannot be used" in capsys.readouterr().err
