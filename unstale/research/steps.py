"""Judges that find the first wrong step of an attempt, and correctors that write a right one.

Both are named by a string: the folder of a model, the address of a server (`http://...`), or the
user's function (`module:function`). Their calls block, so they run in threads.
"""

import asyncio
import atexit
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from inspect import isawaitable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Literal, Protocol

from unstale.config.checks import ConfigError, is_served
from unstale.config.files import read_mapping
from unstale.engines.http import Http, HttpError
from unstale.envs import EnvError, Message
from unstale.envs.numbers import last_number
from unstale.envs.registry import import_user_code
from unstale.records import Trajectory, replies
from unstale.research.served_writer import DATA, KEY, ServedWriter
from unstale.rewards.reward_model import ModelEnded, RewardModel, check_folder
from unstale.techniques.hooks import Texts

StepKind = Literal["paragraph", "line", "reply"]
SEPARATORS: dict[str, str] = {"paragraph": r"\n[ \t]*\n\s*", "line": r"\n\s*"}
"""Regular expressions of the text that ends a step within a reply. This text is a part of the
step.
"""
ENDS: dict[str, str] = {"paragraph": "\n\n", "line": "\n"}
"""The text after a step that a corrector wrote."""
FIND = f"""You check an attempt at a task, whose steps are numbered. {DATA} Find the first step \
that is wrong. End with its number, or with 0 if no step is wrong."""
CORRECT_STEP = f"""You correct an attempt at a task. {DATA} Its last step is wrong. Write the \
right step that should be in its place, in the style of the steps before, and nothing else."""
CORRECT_REST = f"""You correct an attempt at a task. {DATA} Its last step is wrong. Write what \
should be in its place and all that must follow, to the end of the answer, and nothing else."""
PROBE = (
    "".join(map(chr, range(32, 127)))
    + " Zürich, 東京, Київ: 3.14159e-10 != 2,718 \n\t def f(x): 🙂"
)
"""A text that is encoded with the tokenizers of policy and corrector for comparison."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of an attempt: a part of a reply, with the separator at its end, or a whole reply."""

    text: str
    before: str
    """The environment's answer before this step. Empty for a step within a reply, and for the first
    step.
    """
    reply: int
    """Number of the reply, from 0."""
    start: int
    """Number of characters of the reply before the step."""

    @property
    def shown(self) -> str:
        """The text of the step, after the environment's answer before it."""
        return f"{self.before}{self.text}"


def split(attempt: Trajectory, texts: Texts, kind: StepKind) -> list[Step]:
    """Return the steps of an attempt. A reply with tool calls is one step."""
    steps: list[Step] = []
    end, tokens = 0, attempt.tokens
    for number, (start, said) in enumerate(replies(attempt.pieces)):
        before = texts.text(tokens[end:start]) if end else ""
        text = texts.text(said)
        ends = [len(text)]
        if kind != "reply" and not texts.parse(said).tool_calls:
            ends = [each.end() for each in re.finditer(SEPARATORS[kind], text)]
            ends += [] if ends and ends[-1] == len(text) else [len(text)]
        begin = 0
        for stop in ends:
            if text[begin:stop].strip() or stop == len(text):
                steps.append(Step(text[begin:stop], "" if begin else before, number, begin))
                begin = stop
        end = start + len(said)
    return steps


def place_of(attempt: Trajectory, reply: int, start: int, texts: Texts) -> tuple[int, str]:
    """Return the number of tokens before a place in a reply, and the text from there to the place.

    The place is `start` characters after the beginning of reply number `reply`. The text is not
    empty if a token contains the place.
    """
    begin, said = replies(attempt.pieces)[reply]
    text = texts.text(said)
    low, high = 0, len(said)
    while low < high:
        middle = (low + high + 1) // 2
        is_before = len(texts.text(said[:middle])) <= start
        low, high = (middle, high) if is_before else (low, middle - 1)
    while not text[:start].startswith(known := texts.text(said[:low])):
        low -= 1  # an incomplete character
    return begin + low, text[len(known) : start]


class StepJudge(Protocol):
    """An interface of a judge of steps."""

    def first_wrong(self, task: str, steps: Sequence[Step], seed: int) -> int | None:
        """Return the index of the first wrong step of a solution of `task`. None if there is none,
        or if the judge's answer has no number of a step.
        """
        ...


@cache
def loaded(folder: str) -> RewardModel:
    """Return the reward model in a folder. Raises `ConfigError` if it cannot be loaded.

    The model of a folder is loaded once. So a deterministic run, which is built again after each
    checkpoint, keeps the process of its model.
    """
    model = RewardModel(folder, steps=True)
    model.load()
    return model


class FolderJudge:
    """A process reward model in a folder. A step is wrong if its score is below a threshold."""

    def __init__(self, folder: str, threshold: float) -> None:
        self._model = loaded(folder)
        self._threshold = threshold

    def first_wrong(self, task: str, steps: Sequence[Step], seed: int) -> int | None:
        try:
            scores = self._model.step_scores(task, [step.shown for step in steps])
        except ModelEnded:
            raise
        except EnvError:  # the attempt is longer than the model's context
            return None
        return next((i for i, score in enumerate(scores) if score < self._threshold), None)


class ServedJudge:
    """A judge that is a served model. It answers with the number of the first wrong step, or with 0
    if all are right.
    """

    def __init__(self, url: str) -> None:
        self._writer = served(url)

    def first_wrong(self, task: str, steps: Sequence[Step], seed: int) -> int | None:
        numbered = "\n".join(
            f"{step.before}[step {number}] {step.text}" for number, step in enumerate(steps, 1)
        )
        named = last_number(_reply(self._writer, seed, FIND, task=task, attempt=numbered))
        if named is None or Fraction(named).denominator != 1 or not 0 < named <= len(steps):
            return None
        return int(named) - 1


class FunctionJudge:
    """A judge that calls the user's function with the texts of the task and of the steps."""

    def __init__(self, name: str) -> None:
        self._find: Callable[[str, list[str]], Any] = _function("retry.judge", name)

    def first_wrong(self, task: str, steps: Sequence[Step], seed: int) -> int | None:
        found = _called(self._find, task, [step.text for step in steps])
        if found is None or (type(found) is int and 0 <= found < len(steps)):
            return found
        raise ConfigError(
            f"retry.judge returned {found!r}: it must return the index of the first wrong one of "
            f"{len(steps)} steps, from 0, or None"
        )


class TextCorrector(Protocol):
    """An interface of a corrector that writes a text."""

    def write(self, task: str, right: Sequence[Step], wrong: str, seed: int) -> str | None:
        """Return a text to replace a wrong step, after the steps `right`."""
        ...


class ServedCorrector:
    """A corrector that is a served model. It writes a right step, or the rest of the solution after
    the right steps.
    """

    def __init__(self, url: str, *, to_end: bool) -> None:
        self._writer = served(url)
        self._asked = CORRECT_REST if to_end else CORRECT_STEP

    def write(self, task: str, right: Sequence[Step], wrong: str, seed: int) -> str | None:
        steps = "".join(step.shown for step in right)
        return _reply(self._writer, seed, self._asked, task=task, right=steps, wrong=wrong)


class FunctionCorrector:
    """A corrector that calls the user's function with the texts of the task, of the right steps and
    of the wrong step.
    """

    def __init__(self, name: str) -> None:
        self._write: Callable[[str, list[str], str], Any] = _function("retry.corrector", name)

    def write(self, task: str, right: Sequence[Step], wrong: str, seed: int) -> str | None:
        found = _called(self._write, task, [step.text for step in right], wrong)
        if found is None or isinstance(found, str):
            return found
        raise ConfigError(f"retry.corrector returned {found!r}: it must return a text or None")


class FolderCorrector:
    """A language model in a folder, with the policy's tokenizer, in a process of its own.

    It continues the tokens of the attempt at temperature 1, from its whole vocabulary. So the
    log-probability of each token that it writes is known.
    """

    def __init__(self, folder: str) -> None:
        """Load the model. Raises `ConfigError` if this fails."""
        self._folder = folder
        self._lock = threading.Lock()
        self._errors = TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unstale.research.corrector_worker", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        _CORRECTORS.add(self)
        answer = self._ask({"encode": PROBE})
        if error := answer.get("error"):
            self.close()
            raise ConfigError(f"retry.corrector {folder}: {error}")
        self._probe = tuple(answer["tokens"])

    def require_tokenizer(self, texts: Texts) -> None:
        """Raise `ConfigError` if the model's tokenizer is not that of `texts`."""
        if self._probe != texts.encode(PROBE):
            raise ConfigError(
                f"retry.corrector {self._folder} has another tokenizer than the policy: it divides "
                "a text into other tokens. Serve it (vllm serve), and give the address"
            )

    def tokens(
        self, before: Sequence[int], kind: StepKind, most: int, ends: frozenset[int], seed: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the tokens of the next step after `before`, and their log-probabilities.

        A step of the kind `reply` ends at the end of the reply. Both results are empty if the step
        is not complete after `most` tokens.
        """
        asked = {"before": [*before], "most": most, "ends": sorted(ends), "seed": seed % (1 << 63)}
        found = self._ask({**asked, "stop": SEPARATORS.get(kind, "")})
        return tuple(found["tokens"]), tuple(found["logps"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except (BrokenPipeError, ValueError):  # ValueError: the pipe is closed
                line = ""
        if not line:
            cause = _last_line(self._errors)
            raise ModelEnded(f"retry.corrector {self._folder}: its process has ended{cause}")
        return dict(json.loads(line))


def _last_line(errors: BinaryIO) -> str:
    """Return ": " and the last line in a file of a process's messages.

    Empty if there is none, or if the file is closed.
    """
    if errors.closed:
        return ""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _ERRORS_TAIL))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


_CORRECTORS: "weakref.WeakSet[FolderCorrector]" = weakref.WeakSet()
_ERRORS_TAIL = 4096
"""Number of bytes at the end of a process's messages in which its last line is searched."""
TOO_LARGE = 413
"""HTTP status of a request that is too large, whatever the message."""
REFUSED = (400, 422)
"""HTTP statuses of refused requests. Their cause is only in the message."""
TOO_LONG = re.compile(
    r"context (length|window|size)|too long|longer than|token (count|limit)|"
    r"tokens\b.*(exceed|must be <)|maximum prompt length|reduce the length",
    re.IGNORECASE | re.DOTALL,
)
"""A pattern of the errors of vLLM, SGLang, llama.cpp, TGI and similar servers for a question that
is longer than the model's context.
"""


@atexit.register
def _end() -> None:
    for each in list(_CORRECTORS):
        each.close()


def is_function(name: str) -> bool:
    """Return True if a name is `module:function`."""
    return bool(re.fullmatch(r"[\w.]+:[\w.<>]+", name))


def check_judge(name: str) -> None:
    """Raise `ConfigError` if `name` cannot be a judge. No model is loaded, and no code is
    imported.
    """
    if not (is_served(name) or is_function(name)):
        check_folder(Path(name), steps=True)


def check_corrector(name: str) -> None:
    """Raise `ConfigError` if `name` cannot be a corrector."""
    if is_served(name) or is_function(name):
        return
    config = Path(name) / "config.json"
    named = read_mapping(config).get("architectures") if config.is_file() else None
    if not named or not str(named[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise ConfigError(
            f"retry.corrector {name!r} is not a folder with a language model, not an address "
            "(http://...), and not module:function"
        )


def make_judge(name: str, threshold: float) -> StepJudge:
    """Return the judge that `name` names. Raises `ConfigError` if it cannot be used."""
    if is_served(name):
        return ServedJudge(name)
    return FunctionJudge(name) if is_function(name) else FolderJudge(name, threshold)


def make_corrector(name: str, texts: Texts, *, to_end: bool) -> TextCorrector | FolderCorrector:
    """Return the corrector that `name` names. Raises `ConfigError` if it cannot be used."""
    if is_served(name):
        return ServedCorrector(name, to_end=to_end)
    if is_function(name):
        return FunctionCorrector(name)
    corrector = _corrector(name)
    corrector.require_tokenizer(texts)
    return corrector


_corrector = cache(FolderCorrector)
"""A function that returns the corrector in a folder. The model of a folder is loaded once in a
process, so a deterministic run, which is built again after each checkpoint, does not load it again.
"""


def served(url: str) -> ServedWriter:
    """Return a writer for the first model that a server lists. Raises `ConfigError` if it lists
    none.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"

    async def ask() -> str:
        listed = await Http(base, key=os.environ.get(KEY, "")).call("GET", "/models")
        return str(listed["data"][0]["id"])

    try:
        return ServedWriter(base, _complete(ask))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url} names no model at {base}/models: {error!r}") from error


def _complete(work: Callable[[], Any]) -> Any:
    """Return the result of a coroutine function in a thread with an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


def _reply(writer: ServedWriter, seed: int, asked: str, **texts: str) -> str:
    """Return the reply to a question about texts. Empty if the question is longer than the model's
    context.

    The call blocks. Raises OSError if there is no reply, also if the server refuses the question
    for another cause.
    """
    prompt = f"{asked}\n\n{json.dumps(texts, ensure_ascii=False)}"
    try:
        return asyncio.run(writer.reply((Message("user", prompt),), seed))
    except OSError as error:
        cause = error.__cause__
        if isinstance(cause, HttpError) and _is_too_long(cause):
            return ""
        raise


def _is_too_long(error: HttpError) -> bool:
    if error.status == TOO_LARGE:
        return True
    return error.status in REFUSED and bool(TOO_LONG.search(str(error)))


def _function(option: str, name: str) -> Callable[..., Any]:
    found = import_user_code(name, f"{option} {name!r} cannot be used")
    if not callable(found):
        raise ConfigError(f"{option} {name!r} is no function")
    return found


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, or of its coroutine."""
    found = function(*arguments)
    if not isawaitable(found):
        return found

    async def result() -> Any:
        return await found

    return asyncio.run(result())
