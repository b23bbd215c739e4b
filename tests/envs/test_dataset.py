"""Test data sets as environments.

Rows of JSONL, JSON and Parquet files, and of data sets of the hub, become tasks. A hash of the
prompt decides the split, or a second file or split has the held-out tasks. Rewards are the user's
function. Every mistake names file and line.
"""

import asyncio
import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from tests.cli.test_run import quiet, small
from unstale.cli import session
from unstale.cli.saved_episodes import describe_evaluation
from unstale.config import ConfigError, make_task
from unstale.envs import EnvError, Message, NumberedTasks, Taskset, task_identity
from unstale.envs.guard import describe
from unstale.envs.hooks import with_place
from unstale.envs.registry import build_taskset
from unstale.envs.rows import list_rows, load_rows
from unstale.testing import check_env

pytestmark = pytest.mark.usefixtures("forked_children")

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(60)]
NUMERIC = "unstale.rewards:numeric_answer"


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def taskset(path: Path, **options: object) -> Taskset:
    return build_taskset(make_task(f"dataset:{path}", **{"reward": NUMERIC, **options}))


async def play(tasks: Taskset, *replies: str) -> tuple[list[str], dict[str, float]]:
    """Return all messages as `role: text`, and the rewards after the last reply."""
    env = tasks.env(tasks.held_out(1)[0], 0)
    turn = await env.begin()
    messages = [f"{message.role}: {message.content}" for message in turn.messages]
    for reply in replies:
        assert not turn.done
        turn = await env.step(Message("assistant", reply))
        messages += [f"{message.role}: {message.content}" for message in turn.messages]
    return messages, dict(turn.rewards)


def test_rows_keep_the_contract_of_environments(tmp_path: Path) -> None:
    check_env(taskset(write_jsonl(tmp_path / "sums.jsonl", ROWS)))


def test_the_reward_compares_the_reply_with_the_row(tmp_path: Path) -> None:
    tasks = taskset(write_jsonl(tmp_path / "sums.jsonl", ROWS), system="Add.")
    messages, _ = asyncio.run(play(tasks))
    assert messages[0] == "system: Add."
    number = int(messages[1].split()[3])
    for reply, expected in ((f"It is {number + 1}.", 1.0), ("It is 0.", 0.0), ("none", 0.0)):
        assert asyncio.run(play(tasks, reply))[1] == {"reward": expected}


def test_the_split_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    tasks = taskset(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out_share=0.3)
    shuffled = [*reversed(ROWS), *ROWS]
    again = taskset(write_jsonl(tmp_path / "b.jsonl", shuffled), held_out_share=0.3)
    prompts = [
        {row["prompt"] for row in each.data["held_out"]}  # type: ignore[attr-defined]
        for each in (tasks, again)
    ]
    assert prompts[0] == prompts[1]
    assert 8 <= len(prompts[0]) <= 28  # 18 expected, standard deviation 3.5
    train = {row["prompt"] for row in tasks.data["train"]}  # type: ignore[attr-defined]
    assert not train & prompts[0] and len(train | prompts[0]) == len(ROWS)


def test_parquet_json_and_datasets_give_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    folder = tmp_path / "hub"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", list(ROWS))
    for source in ("rows.parquet", "rows.json"):
        assert load_rows(str(tmp_path / source)) == ROWS
    pytest.importorskip("datasets")
    assert load_rows(str(folder)) == ROWS


def test_conversations_and_follow_ups(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Count."}
    rows = [
        {"talk": [system, {"role": "user", "content": f"{n}"}], "more": ["b", "c"], "answer": "4"}
        for n in range(40)
    ]
    path = write_jsonl(tmp_path / "talk.jsonl", list(rows))
    tasks = taskset(path, prompt_column="talk", follow_up_column="more")
    messages, rewards = asyncio.run(play(tasks, "one", "two", "4"))
    assert messages[0] == "system: Count." and messages[2:] == ["user: b", "user: c"]
    assert rewards == {"reward": 1.0}


def test_own_rewards_may_be_named_async_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward.py").write_text(
        "def named(reply, row): return {'right': reply == row['answer'], 'short': 0.5}\n"
        "async def later(reply, row): return len(reply)\n"
        "def text(reply, row): return 'good'\n"
        "def one(reply): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def play_with(name: str) -> dict[str, float]:
        return asyncio.run(play(taskset(path, reward=f"own_reward:{name}"), "ab"))[1]

    assert play_with("named") == {"right": 0.0, "short": 0.5}
    assert play_with("later") == {"reward": 2.0}
    with pytest.raises(
        EnvError,
        match=r"^the reward function text .*line 3.: rewards must be a finite .*, got 'good'",
    ):
        play_with("text")
    with pytest.raises(ConfigError, match=r"own_reward:one' cannot be used: too many positional"):
        taskset(path, reward="own_reward:one")


def test_an_error_in_a_reward_has_the_line_of_the_user_and_the_name_of_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a library raises it, and if it is the cause of another error."""
    (tmp_path / "broken_reward.py").write_text(
        "import json\n"
        "def _read(text):\n"
        "    return json.loads(text)  # of the user\n"
        "def by_library(reply, row): return _read(reply)\n"
        "async def by_cause(reply, row):\n"
        "    try:\n"
        "        return row['gold']\n"
        "    except KeyError as error:\n"
        "        raise LookupError('two\\nlines') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)

    def error_of(name: str) -> str:
        with pytest.raises(EnvError) as error:
            asyncio.run(play(taskset(path, reward=f"broken_reward:{name}"), "ab"))
        return describe(error.value)

    file = f"{tmp_path / 'broken_reward.py'}"[-120:]
    assert error_of("by_library") == (
        "the reward function by_library: JSONDecodeError: Expecting value: line 1 column 1 "
        f"(char 0) ({file}, line 3, in _read: return json.loads(text) # of the user)"
    )
    assert error_of("by_cause").endswith(
        f"LookupError: two lines ({file}, line 9, in by_cause: "
        "raise LookupError('two\\nlines') from error)"
    )


def test_blank_lines_and_empty_lists_of_follow_ups_are_no_mistakes(tmp_path: Path) -> None:
    rows: list[object] = [{**row, "more": ["Why?"] if n else None} for n, row in enumerate(ROWS)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n \t\n"))
    tasks = taskset(path, follow_up_column="more")
    assert sum(len(rows) for rows in tasks.data.values()) == len(ROWS)  # type: ignore[attr-defined]
    path = write_jsonl(path, [{**row, "more": None} for row in ROWS])
    rewards = asyncio.run(play(taskset(path, follow_up_column="more"), "none"))[1]
    assert rewards == {"reward": 0.0}
    path = write_jsonl(path, [{**row, "more": 3} for row in ROWS])
    with pytest.raises(ConfigError, match="more must be a list of texts"):
        taskset(path, follow_up_column="more")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt"\n', r"bad\.jsonl, line 3: not valid JSON"),
        ('{"prompt": NaN}\n', r"line 1: not valid JSON: NaN"),
        ('["prompt"]\n', r"line 1: expected an object, got \['prompt'\]"),
        ('{"question": "a"}\n', r"bad\.jsonl, line 1: no column 'prompt' \(task.prompt_column\)"),
        ('{"prompt": 3}\n', r"prompt must be text, or messages"),
        ('{"prompt": null}\n', r"bad\.jsonl, line 1: prompt is empty \(null\)$"),
        ('{"prompt": []}\n', r"prompt must end with a user message"),
        (
            '{"prompt": "a"}\n{"prompt": "b"\n',
            r"line 2: .* JSON: Expecting ',' delimiter, column 15$",
        ),
        ('{"prompt": "a"}\n', r"1 rows with 1 different prompts, and none for"),
        ('{"prompt": "a"}\n' * 60, r"60 rows with 1 .* task.held_out_share = 0"),
        ("", r"bad.jsonl has no rows: name data with at least one row$"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        taskset(tmp_path / "bad.jsonl")


def test_missing_files_and_rewards_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*gone\.jsonl"):
        taskset(tmp_path / "gone.jsonl")
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"task\.reward must be module:function"):
        taskset(path, reward="")
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        taskset(path, reward="nowhere:f")
    with pytest.raises(ConfigError, match=r"task\.env cannot be 'dataset'"):
        make_task("dataset")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the data set nobody/nothing cannot be loaded"):
        load_rows("nobody/nothing")


OTHERS = [{"prompt": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(7)]


def held_out_prompts(tasks: Taskset) -> list[str]:
    return [tasks.text(task) for task in tasks.held_out(100)]  # type: ignore[attr-defined]


def test_a_second_file_has_the_held_out_tasks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", list(ROWS))
    (tmp_path / "others.json").write_text(json.dumps(OTHERS))
    tasks = taskset(path, held_out_file=str(tmp_path / "others.json"))
    check_env(tasks)
    assert held_out_prompts(tasks) == [row["prompt"] for row in OTHERS]
    drawn = list(islice(tasks.train(0), len(ROWS)))
    trained = {tasks.text(task) for task in drawn}  # type: ignore[attr-defined]
    assert trained == {row["prompt"] for row in ROWS}
    identities = [task_identity(tasks, task) for task in (*drawn, *tasks.held_out(100))]
    assert len(set(identities)) == len(ROWS) + len(OTHERS)
    assert asyncio.run(play(tasks, "2"))[1] == {"reward": 1.0}


def test_a_second_split_of_the_hub_has_the_held_out_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", list(ROWS))
    write_jsonl(folder / "test.jsonl", list(OTHERS))
    tasks = taskset(folder, held_out_split="test")
    assert held_out_prompts(tasks) == [row["prompt"] for row in OTHERS]
    assert len(tasks.data["train"]) == len(ROWS)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"cannot be loaded \(split best\): .*best"):
        taskset(folder, held_out_split="best")
    with pytest.raises(ConfigError, match=r"held_out_split = train is also task\.split"):
        taskset(folder, held_out_split="train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt"\n', r"other\.jsonl, line 2: not valid JSON"),
        ('{"prompt": "a"}\n{"question": "b"}\n', r"other\.jsonl, line 2: no column 'prompt'"),
        ("", r"other\.jsonl has no rows"),
        (None, r"task\.held_out_file: there is no file .*other\.jsonl"),
    ],
)
def test_mistakes_in_the_held_out_file_name_it(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", list(ROWS))
    if text is not None:
        (tmp_path / "other.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        taskset(path, held_out_file=str(tmp_path / "other.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"held_out_file": "b.jsonl", "held_out_share": 0.2},
            r"held_out_share must not be set with task\.held_out_file = b\.jsonl, got 0\.2",
        ),
        (
            {"held_out_file": "b.xlsx"},
            r"b\.xlsx must be a file of type \.jsonl, \.json, \.csv, \.parquet",
        ),
        ({"held_out_file": "a.jsonl"}, r"is the file of task\.env: name another one"),
        ({"held_out_file": "b.jsonl", "held_out_split": "test"}, "give one of them"),
        ({"held_out_split": "test"}, r"task\.env is a\.jsonl\. Use task\.held_out_file"),
    ],
)
def test_held_out_options_that_contradict_each_other_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task("dataset:a.jsonl", reward=NUMERIC, **options)


def test_saved_episodes_belong_to_the_content_of_the_held_out_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", list(ROWS))
    other = write_jsonl(tmp_path / "other.jsonl", list(OTHERS))
    task = make_task(f"dataset:{path}", reward=NUMERIC, held_out_file=str(other))
    config = small(tmp_path, task=task)
    before = describe_evaluation(config)
    assert describe_evaluation(config) == before
    write_jsonl(other, list(OTHERS[1:]))
    assert describe_evaluation(config) != before


def test_a_missing_held_out_file_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", list(ROWS))
    task = make_task(f"dataset:{path}", reward=NUMERIC, held_out_file=str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match=r"there is no file .*gone\.json"):
        session.train(small(tmp_path / "runs", task=task), console=quiet())
    assert not (tmp_path / "runs").exists()


def test_a_run_trains_on_rows_and_evaluates_on_others(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", ROWS)
    task = make_task(f"dataset:{path}", reward=NUMERIC, held_out_share=0.2)
    rows = session.train(small(tmp_path, task=task, max_steps=2), console=quiet()).metrics
    assert [row["step"] for row in rows] == [0, 1, 2] and "eval/success_rate" in rows[-1]


@pytest.mark.parametrize("name", ["rows.csv", "Rows.JSONL", "rows.jsonl.gz", "rows.csv.GZ"])
def test_other_types_of_files_are_read(tmp_path: Path, name: str) -> None:
    if ".csv" in name:
        text = "prompt,answer\n" + "".join(f'"{row["prompt"]}",{row["answer"]}\n' for row in ROWS)
    else:
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
    data = text.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    assert load_rows(str(path)) == ROWS


@pytest.mark.parametrize(
    "name, data, problem",
    [
        ("rows.xlsx", b"x", r"rows.xlsx is not of a type that is read: .jsonl, .json, .csv"),
        ("rows", b"x", "not of a type"),
        ("rows.jsonl.gz", b"x", "cannot be read"),
        (
            "rows.csv",
            b"prompt,answer\nonly\n",
            "line 2: the row has 1 values, and the header has 2",
        ),
        ("rows.csv", b"prompt\na,b\n", "line 2: the row has 2 values, and the header has 1"),
        ("rows.csv", b"prompt,answer,answer\na,1,2\n", "two columns have the name 'answer'"),
        ("rows.csv", b"\nprompt,,b\na,1,2\n", "line 2: column 2 has no name, so its values"),
        ("rows.csv", b"prompt,a;b\nx,y;z\n", "may have its columns separated by ',' or ';'"),
        ("rows.csv", b'prompt,b\n"two\nlines",2\nx\n', "line 4: the row has 1 values"),
        ("rows.csv", b"prompt,b\nx\0,1\n", "line 2 has a NUL character: save the file as UTF-8"),
        ("rows.csv", b"prompt,b\nx\xff,1\n", r"line 2 is not UTF-8 \(byte 2 is 0xff\)"),
        ("rows.csv", "prompt,b\nx,1\n".encode("utf-16"), "line 1 is not UTF-8"),
        ("rows.csv", b'prompt,b\n"x,1\n', "line 2 is not CSV: unexpected end of data"),
        ("rows.jsonl", b'{"a": 1}\n{"a": 1, "b": {"c": 2, "c": 3}}\n', "line 2: .* 'c' is given"),
        ("rows.json", b'[{"a": 1e-999}]', "rows.json: .*1e-999 is too small for a number"),
        ("rows.jsonl", b'{"a": "x\\ud83d"}\n', r"line 1: .* a text has '\\ud83d', which is half"),
        ("rows.jsonl", b'{"a": "x\xed\xa0\xbd"}\n', "line 1 is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_never_sought_on_the_hub(
    tmp_path: Path, name: str, data: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=problem):
        load_rows(str(tmp_path / name))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_csv_file_is_read_whatever_separates_its_columns(tmp_path: Path, separator: str) -> None:
    lines = ["prompt,answer (a|b; c)", '"What, is;\n2\t|?",4', "", "Which?,5"]
    if separator != ",":
        lines = [line.replace(",", separator) for line in ("prompt,answer", *lines[1:])]
    path = tmp_path / "rows.csv"
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    rows = load_rows(str(path))
    assert [[*row.values()][1] for row in rows] == ["4", "5"]
    assert [row["prompt"] for row in rows][1] == "Which?"
    assert [row.place for row in rows] == [f"{path}, line 2", f"{path}, line 5"]


def test_texts_with_commas_and_semicolons_may_be_the_only_column(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt\n"a, b"\na; b\n' + '"' + "x" * 200_000 + '"\n')
    assert [len(row["prompt"]) for row in load_rows(str(tmp_path / "rows.csv"))] == [4, 4, 200_000]


def test_tens_of_thousands_of_columns_are_read(tmp_path: Path) -> None:
    names = [f"column {number}" for number in range(50_000)]
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(names)}\n{','.join('x' for _ in names)}\n")
    (row,) = load_rows(str(path))
    assert list(row) == names
    path.write_text(f"{','.join([*names, 'column 7'])}\n")
    with pytest.raises(ConfigError, match="two columns have the name 'column 7'"):
        load_rows(str(path))


def test_two_columns_with_one_name_are_refused_in_tables(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame([["a", 1, 2]], columns=["prompt", "answer", "answer"])
    with pytest.raises(ConfigError, match=r"task\.env: two columns have the name 'answer'"):
        list_rows(table, "task.env", "prompt")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([["a"], ["b"]], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet: two columns have the name 'prompt'"):
        load_rows(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("content", ["one long line", "many rows"])
def test_the_memory_for_rows_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, content: str
) -> None:
    monkeypatch.setattr("unstale.envs.rows.MAX_BYTES", 4 << 20)
    monkeypatch.setattr("unstale.envs.rows.MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / f"rows.{kind}.gz"
    size = 5 << 20 if content == "one long line" else 10
    rows = [{"prompt": "x" * size}] * (1 if content == "one long line" else 30_000)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        path = tmp_path / "rows.parquet"
        table = pyarrow.Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        texts = {
            "jsonl": "\n".join(map(json.dumps, rows)),
            "json": json.dumps(rows),
            "csv": "\n".join(["prompt", *(row["prompt"] for row in rows)]),
        }
        path.write_bytes(gzip.compress(texts[kind].encode()))
    with pytest.raises(ConfigError, match=r"rows\.\S+(, line . has more than| has more than)"):
        load_rows(str(path))
    assert kind == "parquet" or path.stat().st_size < 1 << 17


def test_a_failure_names_the_file_and_the_line_of_the_task(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", list(ROWS))
    path.write_text("\n" + path.read_text())
    tasks = taskset(path)
    for task in (*tasks.held_out(3), *islice(tasks.train(7), 3)):
        number = ROWS.index(tasks.data_of(task)) + 2  # type: ignore[attr-defined]
        assert asyncio.run(with_place("no", tasks, task)) == f"no ({path}, line {number})"
    assert asyncio.run(with_place("no", NumberedTasks(), task)) == "no"  # type: ignore[arg-type]
