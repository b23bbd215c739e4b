"""A reward model, an `AutoModelForSequenceClassification`, in a separate process.

It can also score the steps of a solution, and so can an `AutoModelForTokenClassification`, a
process reward model. An episode waits for its score while others run. All conversations that wait
when the process becomes free are scored together. A deterministic run scores them one after the
other, because the last digits of a score depend on the others in its batch. The reward's name has
the model's checksum, so the journal shows for every episode which version of the model gave its
reward.
"""

import asyncio
import atexit
import json
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.envs import EnvError
from unstale.envs.guard import OCCUPANCY
from unstale.envs.hooks import has_virtual_clock
from unstale.frames import last_words, outcome

LOAD_S = 600.0
"""Longest wait for a score in a deterministic run, in seconds. The first waits until the model is
loaded.
"""

Messages = Sequence[Mapping[str, str]]
_WHOLE = "ForSequenceClassification"
_STEPS = "ForTokenClassification"


class ModelEnded(EnvError):
    """Error: the process of a reward model could not load it, or has ended."""


class RewardModel:
    """A model that scores conversations. Its method `reward` is a reward function for `dataset`.

    The score is the model's own number, which has no fixed range. The process with the model starts
    with the first conversation, and ends with this process or with `close`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        prompt_column: str = "prompt",
        largest_batch: int = 16,
        steps: bool = False,
    ) -> None:
        """Check the model folder. The model is loaded later.

        `prompt_column` is the column of a row that has the prompt. At most `largest_batch`
        conversations are scored in one forward pass. With `steps`, the model may also be one that
        classifies tokens, which can only be used for `step_scores`. Raises `ConfigError` if the
        folder has no such model.
        """
        self.folder = Path(folder)
        self._column = prompt_column
        self._largest = largest_batch
        self.of_steps = check_folder(self.folder, steps=steps)
        """True if the model classifies tokens, so it only scores steps."""
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[Any, Future[Any]] | None] = SimpleQueue()
        self._loaded: Future[str] = Future()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes]  # `_start` opens it
        self.version = ""
        """Checksum of the model's files, in hexadecimal. Empty before the first score."""
        self.batches: list[int] = []
        """The number of conversations in each forward pass so far."""
        _MODELS.add(self)

    async def reward(self, reply: str, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the score of a reply to the row's prompt, under the name `MODEL@VERSION` of the
        model.
        """
        prompt = row[self._column]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        score = await self.score([*messages, {"role": "assistant", "content": reply}])
        return {f"{self.folder.name}@{self.version}": score}

    async def score(self, messages: Messages) -> float:
        """Return the score of the last message of a conversation.

        Raises `EnvError` if the process cannot load the model, has ended, or cannot score this
        conversation.
        """
        found = self._submit([*map(dict, messages)])
        if has_virtual_clock():  # the clock must wait, and no batch may depend on real time
            with OCCUPANCY.waiting(LOAD_S):
                return float(found.result())
        return float(await asyncio.wrap_future(found))

    def load(self) -> None:
        """Load the model now, and wait for it. Raises `ConfigError` if this fails."""
        with self._lock:
            self._begin()
        if cause := self._loaded.result():
            raise ConfigError(f"reward model {self.folder}: {cause}")

    def step_scores(self, task: str, steps: Sequence[str]) -> list[float]:
        """Return for each step of a solution the probability, 0 to 1, that it is right.

        A model that classifies tokens (two labels, of which 1 means right) reads the task and the
        steps once, as plain text with a line end after each step, and its answers at these are
        taken. Of a model with a single score, the sigmoid of the score of the solution up to each
        step is taken. Blocks, so call it in a thread. Raises the errors of `score`.
        """
        return [float(each) for each in self._submit({"task": task, "steps": [*steps]}).result()]

    def _submit(self, item: Any) -> "Future[Any]":
        found: Future[Any] = Future()
        with self._lock:
            self._begin()
            self._waiting.put((item, found))
        return found

    def _begin(self) -> None:
        """Start the thread of the process, unless it runs. The caller holds the lock."""
        if self._thread is None:
            self._loaded = Future()
            self._thread = threading.Thread(target=self._serve, daemon=True, name="reward")
            self._thread.start()

    def close(self) -> None:
        """End the process of the model. Conversations that wait for a score get an `EnvError`."""
        with self._lock:
            thread, self._thread = self._thread, None
            if self._process:
                self._process.kill()
            if thread:
                self._waiting.put(None)
        if thread:
            thread.join()
        if self._process:
            self._process.communicate()  # waits for its end, and closes the pipes
            self._stderr.close()

    def _serve(self) -> None:
        """Send the waiting conversations to the process, one batch after another, until `close`."""
        cause = self._start()
        self._loaded.set_result(cause)
        while (batch := self._next_batch()) is not None:
            answers: list[Any] = [cause] * len(batch)
            if not cause:
                self.batches.append(len(batch))
                read = self._ask([item for item, _ in batch])
                cause = "" if read else self._end()
                answers = read or [cause] * len(batch)
            for (_, found), answer in zip(batch, answers, strict=True):
                if isinstance(answer, str):
                    kind = ModelEnded if cause else EnvError
                    found.set_exception(kind(f"reward model {self.folder}: {answer}"))
                else:
                    found.set_result(answer)

    def _start(self) -> str:
        """Start the process and wait until the model is loaded. Return an error text, or "" on
        success.
        """
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unstale.rewards.reward_model_worker", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        loaded = json.loads(line) if line else {"error": self._end()}
        self.version = loaded.get("version", "")
        return str(loaded.get("error", ""))

    def _end(self) -> str:
        """Wait for the end of the process. Return the signal that ended it, or its exit code and
        the last line that it printed.
        """
        assert self._process
        code = self._process.wait()
        last = last_words(self._stderr) if code >= 0 else ""  # progress of loading
        return f"its process has ended with {outcome(code)}{last}"

    def _next_batch(self) -> list[tuple[Any, Future[Any]]] | None:
        """Return the waiting conversations and solutions, at most `largest_batch`, with the futures
        of their scores.

        Blocks until there is one. None after `close`.
        """
        batch = []
        item = self._waiting.get()
        while item is not None:
            if item[1].set_running_or_notify_cancel():  # False if its episode was cancelled
                batch.append(item)
            try:
                if len(batch) == self._largest:
                    return batch
                item = self._waiting.get_nowait() if batch else self._waiting.get()
            except Empty:
                return batch
        self._waiting = SimpleQueue()
        for _, found in batch:
            found.set_exception(EnvError(f"reward model {self.folder}: it was closed"))
        return None

    def _ask(self, items: Sequence[Any]) -> list[Any]:
        """Send conversations and solutions to the process. Return a score, the scores of steps or
        an error text for each.

        Empty if the process has ended.
        """
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(items) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return []
        return list(json.loads(line)) if line else []


def check_folder(folder: Path, *, steps: bool = False) -> bool:
    """Return True if a folder's `config.json` names a model that classifies tokens, not sequences.

    Raises `ConfigError` if it names neither, or the former without `steps`.
    """
    if not folder.is_dir():
        raise ConfigError(f"reward model: no folder at {folder}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"reward model: {folder} has no config.json: name a model folder")
    named = read_mapping(folder / "config.json").get("architectures") or ["no architecture"]
    kinds = (_WHOLE, _STEPS) if steps else (_WHOLE,)
    if not any(kind in str(each) for each in named for kind in kinds):
        raise ConfigError(
            f"reward model: {folder} has a {named[0]}: name the folder of a model whose "
            f"architecture ends with {' or '.join(kinds)}"
        )
    return _STEPS in str(named[0])


_MODELS: "weakref.WeakSet[RewardModel]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for model in list(_MODELS):
        model.close()
