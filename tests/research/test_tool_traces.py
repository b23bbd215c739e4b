"""Test `unstale tool-traces`: which solutions become conversations, and that `sft` learns them."""

import asyncio
import json
from pathlib import Path

import pytest

from unstale.cli.main import main
from unstale.research.tool_traces import TOOLS, NotTraced, trace

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
