"""The gauntlet: every architecture that docs/models.md names must load, score, sample and train.

python -m unstale.testing.gauntlet --write benchmarks/results/gauntlet.md

Each is a small random model, once plain and once with planted massive activations and an attention
sink. Errors of log-probabilities are measured against float64, in units of the error that plain
transformers has in the same precision. Pretrained models can be added: `--model NAME=FOLDER`.
"""

import argparse
import gc
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.builders import build_trainer
from unstale.config import ConfigError, Dtype, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.config.run import SHIPPED_POLICY
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.probe import FORWARD_ERRORS
from unstale.engines.embedded.runner import DTYPES as ENGINE_DTYPES
from unstale.engines.embedded.worker import build_runner
from unstale.model.loading import DTYPES, load_model, load_tokenizer
from unstale.model.pictures import PictureInputs
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.pictures import PictureStore
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.routed_experts import num_experts
from unstale.testing import pictures
from unstale.testing.architectures import ARCHITECTURES, save_architecture
from unstale.trainer import train_on

NAMES = (*ARCHITECTURES, *pictures.NAMES)
"""Names of all architectures and vision-language models that can be tested."""
PRECISIONS = tuple(name for name in DTYPES if name in ENGINE_DTYPES)
"""Names of the precisions that engine and trainer both have."""
STEPS = {"float32": 3, "bfloat16": 3, "float16": 12}
"""Precision -> number of training steps, each on replies that the engine samples with the newest
weights. In float16 the first steps are skipped, until a scale of the loss is found.
"""
MAX_CONTEXT = 256
MAX_ERROR = 4.0
"""Largest permitted error of log-probabilities, as a multiple of the error of plain transformers.
Both errors are random. The largest multiple in benchmarks/results/gauntlet.md is 2.25.
"""
_REPLY_TOKENS = 12
_BEGIN = (
    "<!-- the gauntlet's table: python -m unstale.testing.gauntlet --write "
    "benchmarks/results/gauntlet.md -->"
)
_END = "<!-- end of the table -->"
_QUESTIONS = (
    "What is the capital of France?",
    "How many days does a week have, and which is the last one?",
)
_ANSWERS = ("It is Paris.", "The last of the seven days is Sunday.", "I do not know that, sorry.")


@dataclass(slots=True)
class Trial:
    """The results of testing one model in one precision.

    Values that a failed trial did not reach keep their defaults.
    """

    trainer: str = ""
    """`packed` if the trainer computes several sequences in one pass, `apart` if each has its
    own.
    """
    engine: str = ""
    """The name of the embedded engine's runner for this model."""
    scored: float = float("nan")
    """Error of the trainer's log-probabilities, as a multiple of the error of plain
    transformers.
    """
    sampled: float = float("nan")
    """Error of `behavior_logp`, in the same unit: the larger of the errors before and after
    training.
    """
    steps: int = 0
    """Number of training steps after which all weights were finite. 0 if training changed no
    weight.
    """
    asked: int = 0
    """Number of training steps that the trial should make."""
    refused: str = ""
    """The message of the error that refuses the model. Empty if it is accepted."""
    crash: str = ""
    """The message of another error, which no model should cause. Empty if there was none."""

    @property
    def passed(self) -> bool:
        errors = self.scored, self.sampled
        return (
            not (self.refused or self.crash)
            and self.steps == self.asked > 0
            and all(error <= MAX_ERROR for error in errors)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The trials of one model. `plain` and `planted` map a precision to its trial.

    Planted models have massive activations and an attention sink.
    """

    name: str
    plain: dict[str, Trial] = field(default_factory=dict)
    planted: dict[str, Trial] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """A text for each trial that did not pass."""
        return [
            f"{self.name}, {how}, {dtype}: {trial}"
            for how, trials in (("plain", self.plain), ("planted", self.planted))
            for dtype, trial in trials.items()
            if not trial.passed
        ]


def run_architecture(name: str, dtypes: Sequence[str] = PRECISIONS) -> Row:
    """Test the small models of the architecture or vision-language model `name` in `NAMES`."""
    row = Row(name)
    if name in pictures.NAMES:
        with TemporaryDirectory() as folder:
            tokenizer = load_tokenizer(SHIPPED_POLICY)
            pictures.save_vision_model(pictures.NAMES[name], Path(folder), tokenizer)
            for dtype in dtypes:
                row.plain[dtype] = run_trial(Path(folder), dtype, lr=1e-3)
        return row
    architecture = ARCHITECTURES[name]
    for planted in (False, True) if architecture.has_sinks else (False,):
        trials = row.planted if planted else row.plain
        with TemporaryDirectory() as folder:
            save_architecture(architecture, Path(folder), planted=planted)
            for dtype in dtypes:
                trials[dtype] = run_trial(Path(folder), dtype, lr=1e-3)
    return row


def run_trial(folder: Path, dtype: str, *, lr: float) -> Trial:
    """Load, score, sample and train the model in `folder`, in the precision `dtype`.

    `lr` is the learning rate. If an error ends the trial, the result has its message.
    """
    trial = Trial()
    try:
        _run(trial, folder, dtype, lr=lr)
    except ConfigError as error:
        trial.refused = str(error)
    except FORWARD_ERRORS as error:
        trial.crash = f"{type(error).__name__}: {error}"
    gc.collect()
    return trial


def _run(trial: Trial, folder: Path, dtype: str, *, lr: float) -> None:
    policy = Policy.load(folder, dtype=dtype, device="cpu")
    policy.check_length(MAX_CONTEXT)
    trial.trainer = "apart" if policy.computes_apart else "packed"
    reference = _Reference(folder, dtype, policy.pictures)
    sequences = _conversations(policy)
    packed = Packed(
        torch.tensor([token for each in sequences for token in each]),
        tuple(accumulate(map(len, sequences), initial=0)),
    )
    with torch.no_grad():
        logps = policy.logps(packed, temperature=1.0).split(packed.lengths)
    trial.scored = reference.error(sequences, [each[1:] for each in logps])
    _sample_and_train(trial, folder, policy, reference, lr=lr)


def _sample_and_train(
    trial: Trial, folder: Path, policy: Policy, reference: "_Reference", *, lr: float
) -> None:
    dtype = str(policy.dtype).removeprefix("torch.")
    trial.asked = last = STEPS[dtype]
    runner = build_runner(
        folder,
        dtype=dtype,
        max_slots=8,
        max_context=MAX_CONTEXT,
        device="cpu",
        pictures=policy.pictures.store if policy.pictures else None,
    )
    trial.engine = runner.name
    batcher = Batcher(runner, max_slots=8, max_context=MAX_CONTEXT)
    config = RunConfig(
        recipe="",
        max_steps=last,
        trainer=TrainerConfig(lr=lr, dtype=cast(Dtype, dtype)),
        old_logps=OldLogpsConfig(route="current_recompute"),
    )
    trainer, _ = build_trainer(config, policy, LocalScorer(policy, 1.0, 512))
    prompts = _prompts(policy)
    errors = []
    before = {name: each.clone() for name, each in policy.weights().items()}
    for step in range(last + 1):
        with torch.inference_mode():
            batcher.load({name: each.clone() for name, each in policy.weights().items()})
        replies = _sample(batcher, prompts, seed=step)
        if step in (0, last):
            reference.load(policy.weights())
            texts = [[*prompts[i % len(prompts)], *reply.tokens] for i, reply in replies.items()]
            own = [torch.tensor(reply.behavior_logp) for reply in replies.values()]
            errors.append(reference.error(texts, own))
        if step == last:
            break
        train_on(trainer, _batch(prompts, replies, policy.version))
        trainer.start_version()
        trial.steps += all(bool(each.isfinite().all()) for each in policy.weights().values())
    after = policy.weights()
    if all(torch.equal(after[name], before[name]) for name in before):
        trial.steps = 0
    trial.sampled = max(errors)


class _Reference:
    """The tested model in plain transformers, in the same precision and in float64."""

    def __init__(self, folder: Path, dtype: str, inputs: PictureInputs | None) -> None:
        self._store = inputs.store if inputs else None
        self._plain = load_model(folder, DTYPES[dtype]).eval()
        self._exact = load_model(folder, DTYPES[dtype]).double().eval()
        self._has_experts = num_experts(self._exact.config.to_dict()) > 0
        if self._has_experts:
            self._exact.set_experts_implementation("eager")  # grouped products lack float64

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a policy's weights into the reference models."""
        for model in (self._plain, self._exact):
            model.load_state_dict(weights, strict=False)

    def error(self, sequences: Sequence[Sequence[int]], found: Sequence[Tensor]) -> float:
        """Return the error of log-probabilities, as a multiple of the error of plain transformers.

        `found` has the log-probabilities of the last tokens of each sequence. Errors are measured
        against float64.
        """
        ours, plain = [], []
        for tokens, logps in zip(sequences, found, strict=True):
            if self._store and self._plain.config.image_token_id in tokens:
                continue  # plain transformers takes this sampled token for a picture
            exact = _logps(self._exact, tokens, self._store)[-len(logps) :]
            ours.append(logps.double() - exact)
            plain.append(_logps(self._plain, tokens, self._store)[-len(logps) :] - exact)
        # A log-probability is reported in float32.
        size = max(self._size(torch.cat(plain)), torch.finfo(torch.float32).eps)
        return self._size(torch.cat(ours)) / size

    def _size(self, errors: Tensor) -> float:
        """Return the root mean square of errors.

        With experts it is the root of their median square, because rounding may change the choice
        of an expert, and with it the value of some tokens.
        """
        squares = errors.square()
        return float((squares.median() if self._has_experts else squares.mean()).sqrt())


@torch.no_grad()
def _logps(model: PreTrainedModel, tokens: Sequence[int], store: PictureStore | None) -> Tensor:
    """Return the log-probabilities `[T - 1]` of all tokens of a sequence except the first."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)])}
    if store:
        inputs = pictures.plain_inputs(model, store, tokens)
    logits = model(**inputs, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)


def _prompts(policy: Policy) -> list[list[int]]:
    """Return two prompts. If the policy reads pictures, each has two."""
    prompts: list[Any] = [
        policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in _QUESTIONS
    ]
    for number, prompt in enumerate(prompts if policy.pictures else ()):
        for place in (7, 3):
            data = pictures.draw_digit(place, Random(number))
            prompt[place:place] = policy.pictures.reader.tokens(data) if policy.pictures else ()
    return [list(prompt) for prompt in prompts]


def _conversations(policy: Policy) -> list[list[int]]:
    """Return two prompts with several answers each, as token sequences."""
    encoded = (policy.tokenizer(text, add_special_tokens=False) for text in _ANSWERS)
    answers = [list(each["input_ids"]) for each in encoded]
    return [prompt + answer for prompt in _prompts(policy) for answer in answers]


def _sample(
    batcher: Batcher, prompts: Sequence[Sequence[int]], *, seed: int
) -> dict[int, FinishedReply]:
    """Return number -> sampled reply. Each prompt gets four replies.

    Reply i belongs to prompt i modulo the number of prompts.
    """
    for number in range(4 * len(prompts)):
        prompt = tuple(prompts[number % len(prompts)])
        batcher.submit(
            SampleRequest(number, prompt, _REPLY_TOKENS, (), 1.0, seed=100 * seed + number)
        )
    found: dict[int, FinishedReply] = {}
    with torch.inference_mode():
        while batcher.has_work:
            found |= {reply.id: reply for reply in batcher.step()}
    return found


def _batch(
    prompts: Sequence[Sequence[int]], replies: Mapping[int, FinishedReply], version: int
) -> Batch:
    """Return a batch of the sampled replies, with advantages of 1 and -1."""
    scored = []
    for number, reply in sorted(replies.items()):
        pieces = (
            ContextPiece(tuple(prompts[number % len(prompts)])),
            Sampled(tuple(reply.tokens), tuple(reply.behavior_logp), version),
        )
        task = Task("gauntlet", "train", number % len(prompts))
        reward = number % 4 < 2
        trajectory = Trajectory(
            pieces, {"reward": float(reward)}, "done", task, seed=number, episode=number
        )
        scored.append(ScoredTrajectory(trajectory, (1.0 if reward else -1.0,)))
    return collate(scored)


def table(rows: Sequence[Row], dtypes: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table of all models. A cell has an error of the plain model
    and, if there is one, of the planted model.
    """
    columns = [f"{what}, {dtype}" for what in ("scored", "sampled") for dtype in dtypes]
    head = ["model", "trainer", "engine", *columns, "trains"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        trials = [*row.plain.values(), *row.planted.values()]
        engines = {_path(trial.engine) for trial in trials if trial.engine}
        trainers = {trial.trainer for trial in trials if trial.trainer}
        cells = [" or ".join(sorted(each)) for each in (trainers, engines)]
        cells += [_figures(row, dtype, "scored") for dtype in dtypes]
        cells += [_figures(row, dtype, "sampled") for dtype in dtypes]
        cells.append("**no**" if row.failures else "yes")
        lines.append(_line([row.name, *cells]))
    return lines


def _path(engine: str) -> str:
    """Return the kind of code that runs a model in the embedded engine. `engine` is the runner's
    name.
    """
    if not engine.startswith("transformers"):
        return "own decoder"
    return "transformers, packed" if engine.endswith("packed") else "transformers, one by one"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(row: Row, dtype: str, what: str) -> str:
    trials = [by_dtype[dtype] for by_dtype in (row.plain, row.planted) if dtype in by_dtype]
    return ", ".join(
        "**refused**"
        if trial.refused
        else "**error**"
        if trial.crash
        else f"{getattr(trial, what):.2f}"
        for trial in trials
    )


def table_in(page: str) -> list[str]:
    """Return the lines of the gauntlet's table in the text of a page. Raises ValueError without
    one.
    """
    if page.count(_BEGIN) != 1 or page.count(_END) != 1:
        raise ValueError(f"the page must have the lines {_BEGIN!r} and {_END!r} once")
    return page.partition(_BEGIN)[2].partition(_END)[0].strip().splitlines()


def with_table(page: str, lines: Sequence[str]) -> str:
    """Return the text of a page, with the table `lines` in place of the old table.

    Old rows of models that are not in `lines` are kept. If the heads of the tables differ, because
    of other precisions, no old row is kept.
    """
    old = table_in(page)
    if old[:2] == list(lines[:2]):
        rows = {_name(line): line for line in (*old[2:], *lines[2:])}
        rank = {name: place for place, name in enumerate(NAMES)}
        order = sorted(rows, key=lambda name: rank.get(name, len(rank)))
        lines = [*old[:2], *(rows[name] for name in order)]
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return "\n".join([before + _BEGIN, "", *lines, "", _END + after])


def _name(line: str) -> str:
    """Return the first cell of a line of the table: the name of a model."""
    return line.removeprefix("| ").partition(" | ")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gauntlet and print its table. Return 1 if a trial did not pass, else 0."""
    parser = argparse.ArgumentParser(prog="python -m unstale.testing.gauntlet", description=__doc__)
    parser.add_argument("--architectures", nargs="*", choices=NAMES, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the rows into this page")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="a pass holds all logits|the trainer computes each")
    names = NAMES if chosen.architectures is None else chosen.architectures
    rows = []
    for name in names:
        rows.append(run_architecture(name, chosen.dtypes))
        _report(rows[-1])
    for name, _, folder in (each.rpartition("=") for each in chosen.model):
        row = Row(name or Path(folder).name)
        for dtype in chosen.dtypes:
            row.plain[dtype] = run_trial(Path(folder), dtype, lr=1e-5)
        rows.append(row)
        _report(row)
    lines = table(rows, chosen.dtypes)
    sys.stdout.write("\n".join([*lines, ""]))
    if chosen.write:
        page = chosen.write.read_text("utf-8")
        chosen.write.write_text(with_table(page, lines), "utf-8")
    return int(any(row.failures for row in rows))


def _report(row: Row) -> None:
    for failure in row.failures:
        sys.stderr.write(f"{failure}\n")


if __name__ == "__main__":
    sys.exit(main())
