"""Measure whether evaluations cost training time beyond that of their tokens.

    python -m benchmarks.evaluation_cost           # SmolLM2, five minutes of two quiet cores
    python -m benchmarks.evaluation_cost --model base --rows 4 --tokens 8 --repeats 1 --cycles 1

First, one engine samples as training, as a greedy evaluation, and as evaluations at another
temperature and with top-p, in turn. All replies have the same number of tokens. The figure is CPU
seconds a token over those of training.

Then a run trains, with a greedy evaluation after every fourth step. The next step overlaps it, and
the one after may wait for its batch. These two are compared with the two before and the two after
them. The tokens that the engine samples in addition explain a part of the difference: each takes
the engine's seconds a token in the other steps. The last ratio is that of the two steps to this
sum, at most 1 if an evaluation costs nothing else. Wall-clock time includes the wait of the
optimizer step for the end of the evaluation.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.tables import alternate, columns, ratios, row, spread, write
from unstale import train
from unstale.config import (
    SHIPPED_POLICIES,
    CheckpointConfig,
    CorrectionConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.config.hub import model_folder
from unstale.durability.console import Console
from unstale.engines.embedded.batcher import Batcher, SampleRequest
from unstale.engines.embedded.worker import build_runner
from unstale.envs import ListedTasks, Message, Turn
from unstale.kept_sets import WHOLE, Truncation
from unstale.model.policy import Policy
from unstale.records import Task

INTERVAL, GROUPS, SIZE, HELD_OUT = 4, 2, 2, 8
"""Steps between evaluations, groups of a step, episodes of a group, and held-out episodes."""
NAMES = ("a baker", "two sisters", "an old sailor", "a lost dog", "the last tree", "a young king")
THINGS = ("bread", "a rainbow", "glass", "the moon", "a bicycle", "honey", "a battery", "salt")
STORIES = [f"Write a story about {name} who finds {thing}." for name in NAMES for thing in THINGS]
TRAINING = "training"
ARMS: Mapping[str, tuple[float, Truncation]] = {
    TRAINING: (1.0, WHOLE),
    "greedy evaluation": (0.0, WHOLE),
    "evaluation at temperature 0.7": (0.7, WHOLE),
    "evaluation at top-p 0.95": (1.0, Truncation(top_p=0.95)),
}


class Story:
    """An environment of one turn: a prompt, and a reward for different words."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def begin(self) -> Turn:
        return Turn((Message("user", self._text),))

    async def step(self, reply: Message) -> Turn:
        words = reply.content.split()
        return Turn((), done=True, rewards={"words": len(set(words)) / max(1, len(words))})


class Stories(ListedTasks):
    """Stories to write: every sixth is held out."""

    name = "stories"
    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self) -> None:
        split = {
            "train": [text for i, text in enumerate(STORIES) if i % 6],
            "held_out": STORIES[::6],
        }
        self.data = {name: [{"text": text} for text in texts] for name, texts in split.items()}

    def text(self, task: Task) -> str:
        return str(self.data_of(task)["text"])

    def env(self, task: Task, seed: int) -> Story:
        return Story(self.text(task))


@dataclass
class Sampling:
    """An engine and prompts, of which every round takes the next ones."""

    engine: Batcher
    prompts: Sequence[Sequence[int]]
    rounds: int = 0

    def seconds(self, rows: int, tokens: int, temperature: float, limits: Truncation) -> float:
        """Sample `rows` replies at once. Return CPU seconds a token."""
        for number in range(rows):
            prompt = self.prompts[(self.rounds * rows + number) % len(self.prompts)]
            request = SampleRequest(number, prompt, tokens, (), temperature, number, limits)
            self.engine.submit(replace(request, return_sets=False))
        began, count = time.process_time(), 0
        with torch.inference_mode():
            while self.engine.has_work:
                count += sum(len(reply.tokens) for reply in self.engine.step())
        self.rounds += 1
        return (time.process_time() - began) / count


def engine_table(folder: Path, rows: int, tokens: int, repeats: int) -> list[str]:
    """Return the table of sampling alone."""
    policy = Policy.load(folder, dtype="bfloat16")
    prompts: list[Any] = [
        policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in STORIES
    ]
    sizes: dict[str, Any] = {"max_slots": rows, "max_context": 512}
    engine = Batcher(build_runner(folder, dtype="bfloat16", **sizes), **sizes)
    engine.load(policy.weights())
    sampling = Sampling(engine, prompts)
    sampling.seconds(rows, 4, *ARMS[TRAINING])  # oneDNN compiles its code
    sampling.rounds = 0
    found = alternate(
        {name: partial(sampling.seconds, rows, tokens, *arm) for name, arm in ARMS.items()}, repeats
    )
    lines = [
        f"{rows} replies of {tokens} tokens at once, {repeats} rounds in turn:",
        "",
        *columns("sampling", "CPU ms a token", "times training"),
    ]
    for name, values in found.items():
        times = [1000 * value for value in values]
        lines.append(row(name, spread(times), spread(ratios(found, name, over=TRAINING))))
    return lines


def config_of(folder: Path, tokens: int, cycles: int, runs: Path) -> RunConfig:
    return RunConfig(
        recipe="stories",
        model=str(folder),
        runs=runs,
        name="run",
        max_steps=INTERVAL * (cycles + 1),
        task=TaskConfig(env=f"{__spec__.name if __spec__ else __name__}:Stories"),
        engine=EngineConfig(max_completion_tokens=tokens, max_context=256, max_running=16),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=GROUPS, group_size=SIZE),
        trainer=TrainerConfig(lr=1e-7, threads=1, max_tokens_per_microbatch=256),
        old_logps=OldLogpsConfig(route="rollout"),
        correction=CorrectionConfig(mode="none"),
        checkpoint=CheckpointConfig(interval=1000),
        eval=EvalConfig(tasks=HELD_OUT, interval=INTERVAL, temperature=0.0),
    )


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two steps during and after an evaluation, compared with the two before and the two after."""

    tokens: float
    """Further sampled tokens, over those of two steps without evaluation."""
    steps: float
    """Seconds of the two steps over those of two steps without evaluation."""
    explained: float
    """The same over the sum that the tokens explain."""

    @classmethod
    def of(
        cls,
        others: Sequence[Mapping[str, float]],
        overlapping: Sequence[Mapping[str, float]],
        clock: str,
    ) -> "Overlap":
        """Compare rows of metrics. `others` has twice as many as `overlapping`.

        >>> plain = {"engine/busy_s": 2.0, "engine/idle_s": 8.0, "engine/sampled_tokens": 100}
        >>> longer = {"engine/busy_s": 5.0, "engine/idle_s": 7.0, "engine/sampled_tokens": 200}
        >>> Overlap.of([plain, plain], [longer], "wall")
        Overlap(tokens=1.0, steps=1.2, explained=1.0)
        """

        def seconds(rows: Sequence[Mapping[str, float]], *names: str) -> float:
            return sum(each[name] for each in rows for name in names)

        engine, rest = "engine/busy_s", "engine/idle_s"  # between readings, at the ends of steps
        if clock == "CPU":
            engine, rest = "engine/cpu_s", "trainer/cpu_s"
        usual = seconds(others, "engine/sampled_tokens") / 2
        further = seconds(overlapping, "engine/sampled_tokens") - usual
        before, now = seconds(others, engine, rest) / 2, seconds(overlapping, engine, rest)
        explained = before + further * seconds(others, engine) / 2 / usual
        return cls(further / usual, now / before, now / explained)


def run_table(folder: Path, tokens: int, cycles: int) -> list[str]:
    """Return the table of a run with evaluations."""
    with TemporaryDirectory() as runs:
        config = config_of(folder, tokens, cycles, Path(runs))
        metrics = train(config, console=Console(quiet=True)).metrics
    rows = {int(each["step"]): each for each in metrics}
    lines = [
        f"A run of {len(rows) - 1} steps of {GROUPS * SIZE} episodes with a greedy evaluation of "
        f"{HELD_OUT} episodes after every {INTERVAL}th; {tokens} tokens a reply; {cycles} "
        "evaluations:",
        "",
        *columns("clock", "further tokens", "steps over others", "over what tokens explain"),
    ]
    for clock in ("wall", "CPU"):
        found = [
            Overlap.of(
                [rows[end + shift] for shift in (-1, 0, 3, 4)],
                [rows[end + 1], rows[end + 2]],
                clock,
            )
            for end in range(INTERVAL, INTERVAL * cycles + 1, INTERVAL)
        ]
        lines.append(
            row(
                clock,
                spread([each.tokens for each in found]),
                spread([each.steps for each in found]),
                spread([each.explained for each in found]),
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=16, help="replies at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=4, help="evaluations that are measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = SHIPPED_POLICIES.get(options.model) or model_folder(options.model, convert=True)
    lines = [
        f"Model {options.model}.",
        "",
        *engine_table(folder, options.rows, options.tokens, options.repeats),
        "",
        *run_table(folder, options.tokens, options.cycles),
    ]
    write("evaluation-cost", "What an evaluation costs beside its tokens", lines)


if __name__ == "__main__":
    main()
