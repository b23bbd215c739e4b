"""The tasks of the Berkeley Function Calling Leaderboard (BFCL v4): `--task.env bfcl:multiple`.

Questions, function schemas and verdicts are from the package `bfcl-eval`. The dependencies of
`bfcl-eval` are not needed: only its modules that import none of them are used. Single-turn replies
are judged by its `ast_checker`, which compares parsed calls and runs none. Multi-turn calls run on
its API classes in the sandbox, where its `multi_turn_checker` compares the calls' results and the
final states.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from hashlib import blake2b
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

from unstale.config import ConfigError, nearest
from unstale.envs import EnvError, ListedTasks, Message, ToolCall, Turn, sandbox
from unstale.records import Task

SINGLE_TURN = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
    *("parallel_multiple", "irrelevance", "live_simple", "live_multiple", "live_parallel"),
    *("live_parallel_multiple", "live_irrelevance", "live_relevance"),
)
MULTI_TURN = (
    *("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param"),
    "multi_turn_long_context",
)
REFUSED = ("web_search", "memory", "format_sensitivity")
"""Prefixes of the names of categories that this adapter does not support."""
MAX_STEPS = 20
"""Largest number of replies in one turn, as in `bfcl_eval`. A task that needs more
replies fails.
"""
MAX_CALL_CHARACTERS = 10_000
"""Largest number of characters of a reply's calls as JSON. Longer calls count as wrong, because
checking them could take long.
"""
LIMITS = sandbox.Limits(seconds=10.0, memory_mb=1024, file_mb=1)

_SIGNAL = 128
_MODEL = "policy"
"""Name of the policy for the checkers of `bfcl_eval`."""
_FOLDER = TemporaryDirectory(prefix="bfcl-", ignore_cleanup_errors=True)
"""The folder in which `bfcl_eval` creates its own folders when it is imported."""

_RUN = """
import json, sys
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
request = json.load(sys.stdin)
entry, turns = request["entry"], request["turns"]
if request["answers"] is None:
    results = []
    for calls in (step for turn in turns for step in turn):
        results, _ = execute_multi_turn_func_call(
            calls, entry["initial_config"], entry["involved_classes"], "policy", entry["id"],
            long_context="long_context" in entry["id"],
        )
    answer = results
else:
    category = entry["id"].rsplit("_", 1)[0]
    answer = multi_turn_checker(turns, request["answers"], entry, category, "policy")["valid"]
sys.stdout.write("\\0" + json.dumps(answer))
"""


@cache
def bfcl() -> SimpleNamespace:
    """Return the functions and tables of `bfcl_eval` that this adapter uses.

    They are imported without the leaderboard's models and clients. `ast_checker` reads only one
    fact from the leaderboard's table of models: whether a model replaces dots in function names.
    Here the table has one entry, for a policy that keeps dots. Raises `ConfigError` if the package
    is not installed.
    """
    before = os.environ.get("BFCL_PROJECT_ROOT")
    os.environ["BFCL_PROJECT_ROOT"] = _FOLDER.name
    try:
        utils = import_module("bfcl_eval.utils")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"bfcl needs {error.name}: pip install --no-deps bfcl-eval==2026.3.23 "
            "(its dependencies are not needed)"
        ) from error
    finally:
        os.environ.pop("BFCL_PROJECT_ROOT")
        if before is not None:
            os.environ["BFCL_PROJECT_ROOT"] = before
    constants = import_module("bfcl_eval.constants.enums")
    name = "bfcl_eval.constants.model_config"
    models = ModuleType(name)
    vars(models)["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=False)}
    file = Path(str(utils.__file__)).parent / "eval_checker/ast_eval/ast_checker.py"
    spec = importlib.util.spec_from_file_location("unstale_bfcl_ast_checker", file)
    assert spec and spec.loader
    checker = importlib.util.module_from_spec(spec)
    other = sys.modules.get(name)
    sys.modules[name] = models
    try:
        spec.loader.exec_module(checker)
    finally:
        del sys.modules[name]
        if other is not None:
            sys.modules[name] = other
    return SimpleNamespace(
        check=checker.ast_checker,
        languages=constants.Language,
        is_empty=utils.is_empty_output,
        load=utils.load_dataset_entry,
        load_answers=utils.load_ground_truth_entry,
        types=import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI,
        new_tools=import_module(
            "bfcl_eval.constants.default_prompts"
        ).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING,
    )


class BfclTasks(ListedTasks):
    """The tasks of one BFCL category. A hash of a task's id decides whether it is held out."""

    def __init__(self, category: str, *, held_out_share: float = 0.25) -> None:
        """Load a category. Raises `ConfigError` if it is unknown or not supported."""
        known = (*SINGLE_TURN, *MULTI_TURN)
        if category.startswith(REFUSED):
            raise ConfigError(
                f"bfcl:{category} is not supported: web search and memory need paid services or "
                "models besides the policy, and format_sensitivity is not scored. Supported are "
                + ", ".join(known)
            )
        if category not in known:
            raise ConfigError(f"bfcl has no {category!r}{nearest(category, known)}")
        self.name = f"bfcl:{category}"
        self.category = category
        entries = load_entries(category)
        self.data: dict[str, list[Mapping[str, Any]]] = {"train": [], "held_out": []}
        for entry in entries:
            split = "held_out" if share_of(entry["id"]) < held_out_share else "train"
            self.data[split].append(entry)
        for split, chosen in self.data.items():
            if not chosen and (split == "train" or held_out_share):
                raise ConfigError(
                    f"{self.name} has {len(entries)} tasks and none for {split}; change "
                    f"task.held_out_share ({held_out_share:g})"
                )
        tools = (tool for entry in entries for tool in entry["tools"])
        self.tools = tuple({json.dumps(tool): tool for tool in tools}.values())

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        tools: Sequence[Mapping[str, Any]] = self.data_of(task)["tools"]
        return tools

    def identity(self, task: Task) -> str:
        return f"{self.name}/{self.data_of(task)['id']}"

    def text(self, task: Task) -> str:
        turns = self.data_of(task)["question"]
        return "\n".join(each["content"] for turn in turns for each in turn)

    def env(self, task: Task, seed: int) -> "BfclEnv | BfclTurns":
        """Return the environment of a task. `seed` is not used: nothing in a task is random."""
        entry = self.data_of(task)
        return BfclTurns(entry) if self.category in MULTI_TURN else BfclEnv(entry, self.category)

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        """Return the question of a task and a reply with the right calls.

        Raises `ConfigError` for a category with several turns, with replies without calls, or with
        a language other than Python.
        """
        others = ("simple_java", "simple_javascript")
        entry = self.data_of(task)
        if self.category in (*MULTI_TURN, *others) or entry["answer"] is None:
            raise ConfigError(
                f"{self.name} has no demonstrations: only one-turn categories with calls in Python "
                "have them, such as bfcl:simple_python"
            )
        reply = Message("assistant", "", reference_calls(entry))
        return (*_messages(entry["question"][0]), reply)


def load_entries(category: str) -> list[Mapping[str, Any]]:
    """Return the entries of a category, each with its `tools` and the right `answer`.

    The field `function` of an entry is for the checker. `tools` are shown to the policy: in Java
    and JavaScript all arguments are text, as in the leaderboard.
    """
    package = bfcl()
    shown = package.load(category)
    has_answers = category not in ("irrelevance", "live_irrelevance", "live_relevance")
    answers = package.load_answers(category) if has_answers else []
    answer_of = {each["id"]: each["ground_truth"] for each in answers}
    entries = package.load(category, include_language_specific_hint=False)
    return [
        {
            **entry,
            "answer": answer_of[entry["id"]] if has_answers else None,
            "tools": [as_tool(function) for function in other["function"]],
        }
        for entry, other in zip(entries, shown, strict=True)
    ]


def as_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a function description of BFCL to a tool with a JSON schema."""
    shown = {key: function[key] for key in ("name", "description")}
    return {
        "type": "function",
        "function": {**shown, "parameters": json_schema(function["parameters"])},
    }


def json_schema(schema: Any) -> Any:
    """Convert a schema of BFCL to JSON Schema: types are renamed, such as `dict` to `object`."""
    if not isinstance(schema, Mapping):
        return schema
    converted = dict(schema)
    if isinstance(schema.get("type"), str):
        converted["type"] = bfcl().types.get(schema["type"], schema["type"])
    if isinstance(schema.get("properties"), Mapping):
        inner = schema["properties"].items()
        converted["properties"] = {name: json_schema(each) for name, each in inner}
    for key in ("items", "additionalProperties"):
        if key in schema:
            converted[key] = json_schema(schema[key])
    return converted


def share_of(name: str) -> float:
    """Return a number in [0, 1) that is a hash of the task id `name`."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest()) / 2**48


class BfclEnv:
    """An environment with one question and one reply.

    The reward `valid` is the leaderboard's verdict, 0 or 1.
    """

    def __init__(self, entry: Mapping[str, Any], category: str) -> None:
        self._entry = entry
        self._category = category

    def begin(self) -> Turn:
        return Turn(_messages(self._entry["question"][0]))

    def step(self, reply: Message) -> Turn:
        facts = {
            "no_call": float(not reply.tool_calls),
            "malformed": float(any(call.error for call in reply.tool_calls)),
        }
        rewards = {"valid": float(is_valid(self._entry, self._category, reply.tool_calls))}
        return Turn((), done=True, rewards=rewards, facts=facts)


def is_valid(entry: Mapping[str, Any], category: str, calls: Sequence[ToolCall]) -> bool:
    """Return True if the leaderboard accepts the calls of a single-turn reply."""
    package = bfcl()
    are_read = not any(call.error for call in calls)
    output = [{call.name: dict(call.arguments)} for call in calls]
    if category.endswith("relevance"):
        has_call = are_read and not package.is_empty(output)
        return not has_call if category.endswith("irrelevance") else has_call
    if not are_read or len(json.dumps(output)) > MAX_CALL_CHARACTERS:
        return False
    word = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}.get(category, "PYTHON")
    language = package.languages[word]
    try:
        verdict = package.check(
            entry["function"], output, entry["answer"], language, category, _MODEL
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return False  # the checker raises errors for values of other forms than it expects
    return bool(verdict["valid"])


class BfclTurns:
    """An environment with several user turns. A turn ends with a reply without calls.

    The reward `valid` is 1 if, after every turn, the API classes have the right states and have
    returned the right results, otherwise 0.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = entry
        self._functions = {tool["name"] for tool in entry["function"]}
        self._turns: list[list[list[str]]] = [[]]

    async def begin(self) -> Turn:
        return Turn(self._question())

    async def step(self, reply: Message) -> Turn:
        readable = reply.tool_calls and not any(call.error for call in reply.tool_calls)
        if not readable:
            if len(self._turns) == len(self._entry["question"]):
                valid = await self._run(self._entry["answer"])
                return Turn((), done=True, rewards={"valid": float(valid)})
            self._turns.append([])
            return Turn(self._question())
        if len(self._turns[-1]) == MAX_STEPS:
            return Turn((), done=True, rewards={"valid": 0.0}, facts={"too_many_steps": 1.0})
        problems = [self._problem(call) for call in reply.tool_calls]
        good = [call for call, bad in zip(reply.tool_calls, problems, strict=True) if not bad]
        self._turns[-1].append([as_python(call) for call in good])
        results = iter(await self._run(None) if good else [])
        texts = [problem or str(next(results)) for problem in problems]
        return Turn(tuple(Message("tool", text) for text in texts))

    def fork(self) -> "BfclTurns":
        copied = BfclTurns(self._entry)
        copied._functions = set(self._functions)
        copied._turns = deepcopy(self._turns)
        return copied

    def _question(self) -> tuple[Message, ...]:
        """Return the messages that begin the current turn: the question, and possibly new tools."""
        number = len(self._turns) - 1
        added = self._entry.get("missed_function", {}).get(str(number), [])
        if not added:
            return _messages(self._entry["question"][number])
        self._functions |= {function["name"] for function in added}
        return (Message("user", bfcl().new_tools.format(functions=json.dumps(added))),)

    def _problem(self, call: ToolCall) -> str:
        """Return an error message if a call cannot be run, otherwise "".

        Only the names of functions and arguments become code, and both are checked here.
        """
        if call.name not in self._functions:
            return f"Error: there is no tool {call.name!r}"
        wrong = [key for key in call.arguments if not key.isidentifier() or iskeyword(key)]
        return f"Error: {wrong[0]!r} is no argument of {call.name}" if wrong else ""

    async def _run(self, answers: Any) -> Any:
        """Run all calls of the episode from the start, and return the results of the last reply's
        calls.

        With `answers`, the right calls of all turns, return True if the episode is right instead.
        Calls run again each time so that an episode keeps no state of foreign code.
        """
        keys = ("id", "initial_config", "involved_classes")
        entry = {key: self._entry[key] for key in keys}
        request = {"entry": entry, "turns": self._turns, "answers": answers}
        command = [sys.executable, "-s", "-c", _RUN]
        done = await sandbox.run(command, stdin=json.dumps(request), limits=LIMITS)
        if done.code == 0 and "\0" in done.stdout:
            return json.loads(done.stdout.rpartition("\0")[2])
        is_too_much = done.ended == "timeout" or "MemoryError" in done.stderr or done.code > _SIGNAL
        if not is_too_much and "AssertionError" not in done.stderr:
            raise EnvError(f"the calls of {entry['id']} failed: {done.stderr[-300:]}")
        if answers is not None:  # the checker asserts that the same classes were used
            return False
        # what takes too long or too much memory has no effect
        num_calls = len(self._turns[-1].pop())
        return ["Error: the call took too long or too much memory"] * num_calls


def as_python(call: ToolCall) -> str:
    """Return a call as Python code with literals, in the form that `bfcl_eval` executes."""
    return f"{call.name}({', '.join(f'{key}={each!r}' for key, each in call.arguments.items())})"


def reference_calls(entry: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Return calls that the leaderboard accepts as the answer to a task in Python.

    Each argument has the first of its accepted values. Optional arguments are left out.
    """
    calls = []
    for answer in entry["answer"]:
        ((name, arguments),) = answer.items()
        calls.append(ToolCall(name, first_values(arguments)))
    return tuple(calls)


def first_values(arguments: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any]:
    """Return the first accepted value of each required argument, or of all arguments with
    `optional`.

    `arguments` maps each name to its list of accepted values. The fields of a value that is an
    object have such lists, too.
    """
    found = {}
    for name, values in arguments.items():
        listed = values if isinstance(values, list) else [values]
        if listed and (optional or "" not in listed):
            given = [value for value in listed if value != ""]
            found[name] = _unfold((given or listed)[0], optional)
    return found


def _unfold(value: Any, optional: bool) -> Any:
    if isinstance(value, dict):
        return first_values(value, optional=optional)
    return [_unfold(each, optional) for each in value] if isinstance(value, list) else value


def _messages(records: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(each["role"], each["content"]) for each in records)


TASKSET = BfclTasks
