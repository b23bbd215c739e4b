"""A reward model, an `AutoModelForSequenceClassification`, in a separate process.

An episode waits for its score while others run. All conversations that wait when the process
becomes free are scored together. The reward's name has the model's checksum, so the journal shows
for every episode which version of the model gave its reward.
"""

import asyncio
import atexit
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.envs import EnvError

Messages = Sequence[Mapping[str, str]]
_CONCERNS = "ForSequenceClassification"


class RewardModel:
    """A model that scores conversations. Its method `reward` is a reward function for `dataset`.

    The score is the model's own number, which has no fixed range. The process with the model starts
    with the first conversation, and ends with this process or with `close`.
    """

    def __init__(
        self, folder: Path | str, *, prompt_column: str = "prompt", largest_batch: int = 16
    ) -> None:
        """Check the model folder. The model is loaded later.

        `prompt_column` is the column of a row that has the prompt. At most `largest_batch`
        conversations are scored in one forward pass. Raises `ConfigError` if the folder has no
        sequence-classification model.
        """
        self.folder = Path(folder)
        self._column = prompt_column
        self._largest = largest_batch
        _check(self.folder)
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[Messages, Future[float]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
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
        found: Future[float] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True, name="reward")
                self._thread.start()
            self._waiting.put((messages, found))
        return await asyncio.wrap_future(found)

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

    def _serve(self) -> None:
        """Send the waiting conversations to the process, one batch after another, until `close`."""
        cause = self._start()
        while (batch := self._next_batch()) is not None:
            answers: list[Any] = [cause] * len(batch)
            if not cause:
                self.batches.append(len(batch))
                read = self._ask([list(map(dict, messages)) for messages, _ in batch])
                cause = "" if read else "its process has ended"
                answers = read or [cause] * len(batch)
            for (_, found), answer in zip(batch, answers, strict=True):
                if isinstance(answer, str):
                    found.set_exception(EnvError(f"reward model {self.folder}: {answer}"))
                else:
                    found.set_result(float(answer))

    def _start(self) -> str:
        """Start the process and wait until the model is loaded. Return an error text, or "" on
        success.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unstale.rewards.reward_model_worker", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        loaded = json.loads(line) if line else {"error": "its process has ended"}
        self.version = loaded.get("version", "")
        return str(loaded.get("error", ""))

    def _next_batch(self) -> list[tuple[Messages, Future[float]]] | None:
        """Return the waiting conversations, at most `largest_batch`, with the futures of their
        scores.

        Blocks until there is one. None after `close`.
        """
        batch = []
        item = self._waiting.get()
        while item is not None:
            batch.append(item)
            try:
                if len(batch) == self._largest:
                    return batch
                item = self._waiting.get_nowait()
            except Empty:
                return batch
        self._waiting = SimpleQueue()
        for _, found in batch:
            found.set_exception(EnvError(f"reward model {self.folder}: it was closed"))
        return None

    def _ask(self, conversations: Sequence[Messages]) -> list[Any]:
        """Send conversations to the process. Return a score or an error text for each.

        Empty if the process has ended.
        """
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(conversations) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return []
        return list(json.loads(line)) if line else []


def _check(folder: Path) -> None:
    """Raise `ConfigError` unless a folder's `config.json` names a sequence-classification model."""
    if not folder.is_dir():
        raise ConfigError(f"reward model: no folder at {folder}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"reward model: {folder} has no config.json: name a model folder")
    named = read_mapping(folder / "config.json").get("architectures") or ["no architecture"]
    if not any(_CONCERNS in str(each) for each in named):
        raise ConfigError(
            f"reward model: {folder} has a {named[0]}: name the folder of a model whose "
            f"architecture ends with {_CONCERNS}"
        )


_MODELS: "weakref.WeakSet[RewardModel]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for model in list(_MODELS):
        model.close()
