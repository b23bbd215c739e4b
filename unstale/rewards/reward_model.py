"""A reward model, an `AutoModelForSequenceClassification`, in one or more separate processes.

It can also score the steps of a solution, and so can an `AutoModelForTokenClassification`, a
process reward model. An episode waits for its score while others run. All conversations that wait
when a process becomes free are scored together. A deterministic run scores them one after the
other, because the last digits of a score depend on the others in its batch. The reward's name has
the model's checksum, so the journal shows for every episode which version of the model gave its
reward.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.envs import EnvError
from unstale.envs.elastic import ElasticPool, LineProcess
from unstale.weights.child_process import cores, visible_gpus

Messages = Sequence[Mapping[str, str]]
_WHOLE = "ForSequenceClassification"
_STEPS = "ForTokenClassification"


class ModelEnded(EnvError):
    """Error: a process of a reward model could not load it, or has ended."""


class RewardModel:
    """A model that scores conversations. Its method `reward` is a reward function for `dataset`.

    The score is the model's own number, which has no fixed range. A process with the model starts
    with the first conversation. All end with this process or with `close`.
    """

    def __init__(  # noqa: PLR0913 - all but the folder have defaults
        self,
        folder: Path | str,
        *,
        prompt_column: str = "prompt",
        largest_batch: int = 16,
        steps: bool = False,
        processes: int = 1,
        min_processes: int = 1,
        devices: Sequence[str] = (),
    ) -> None:
        """Check the model folder. The model is loaded later.

        `prompt_column` is the column of a row that has the prompt. At most `largest_batch`
        conversations are scored in one forward pass. With `steps`, the model may also be one that
        classifies tokens, which can only be used for `step_scores`. At most `processes` processes
        score, and `min_processes` (0 or more) remain when idle (docs/rewards.md). Process n uses
        the n-th of `devices`, counted round: numbers of GPUs, or `cpu`. Without `devices`, each
        uses the first GPU, if there is one. Raises `ConfigError` if the folder has no such model.
        """
        self.folder = Path(folder)
        self._column = prompt_column
        self.of_steps = check_folder(self.folder, steps=steps)
        """True if the model classifies tokens, so it only scores steps."""
        if isinstance(devices, str):
            raise ConfigError(
                f"reward model {self.folder}: devices must be a list such as ['0', 'cpu'], got "
                f"{devices!r}"
            )
        if largest_batch < 1:
            raise ConfigError(
                f"reward model {self.folder}: largest_batch must be at least 1, got {largest_batch}"
            )
        if not 0 <= min_processes <= processes or processes < 1:
            raise ConfigError(
                f"reward model {self.folder}: processes must be at least 1 and min_processes from "
                f"0 to processes, got {processes} and {min_processes}"
            )
        self._devices = devices
        self.pool = ElasticPool(
            self._start,
            name=f"reward model {self.folder}",
            ended=ModelEnded,
            fewest=min_processes,
            most=processes,
            largest_batch=largest_batch,
        )

    @property
    def version(self) -> str:
        """Checksum of the model's files, in hexadecimal. Empty before the first score."""
        return min(self.pool.versions, default="")

    @property
    def batches(self) -> Sequence[int]:
        """The number of conversations in each forward pass so far."""
        return self.pool.batches

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

        Raises `EnvError` if no process can load the model, if two processes in turn have ended
        while they scored it, or if the model cannot score this conversation.
        """
        return float(await self.pool.ask([*map(dict, messages)]))

    def load(self) -> None:
        """Load the model now, and wait for it. Raises `ConfigError` if this fails."""
        if cause := self.pool.load():
            raise ConfigError(f"reward model {self.folder}: {cause}")

    def step_scores(self, task: str, steps: Sequence[str]) -> list[float]:
        """Return for each step of a solution the probability, 0 to 1, that it is right.

        A model that classifies tokens (two labels, of which 1 means right) reads the task and the
        steps once, as plain text with a line end after each step, and its answers at these are
        taken. Of a model with a single score, the sigmoid of the score of the solution up to each
        step is taken. Blocks, so call it in a thread. Raises the errors of `score`.
        """
        found = self.pool.submit({"task": task, "steps": [*steps]}).result()
        return [float(each) for each in found]

    def close(self) -> None:
        """End the processes of the model. Conversations without a score get an `EnvError`."""
        self.pool.close()

    def _start(self, number: int) -> LineProcess:
        """Start process `number`. All processes together have about as many threads as cores."""
        device = self._devices[number % len(self._devices)] if self._devices else ""
        environment = dict(os.environ)
        if self.pool.most > 1:  # of the largest number, so that no score depends on the present one
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.pool.most)))
        if device:
            environment |= visible_gpus(["" if device == "cpu" else device])
        kind = "cpu" if device == "cpu" else "cuda" if device else "any"
        program = "unstale.rewards.reward_model_worker"
        return LineProcess(["-m", program, str(self.folder), kind], environment)


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
