"""Measure the speed of training on ragged batches and of whole steps, against TRL.

    python -m benchmarks.train          # 8 minutes on two cores; `--help` for smaller sizes

Both use the same model, batch, loss and precision, each in a separate process. A batch has groups
of 8 siblings with one prompt, several turns, ragged replies and tool results, and given advantages.
TRL's own `train()` runs, and receives the batch where it would generate. The gradients of both are
compared first. Then whole steps are timed: 16 prompts x 8 completions of 32 tokens, from prompts to
new weights, by TRL and by `unstale.train`. TRL must be installed in a separate environment
(`--peers`).
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import StringIO
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import unstale
from benchmarks.tables import (
    CONSOLE,
    OURS,
    alternate,
    columns,
    environ,
    peers,
    picture,
    ratios,
    row,
    spread,
    verdict,
    write,
)
from unstale import loop
from unstale.builders import build_old_logps
from unstale.config import (
    CheckpointConfig,
    CorrectionConfig,
    EngineConfig,
    EvalConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.durability.console import Console
from unstale.envs import Message, Turn
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import ContextPiece, Sampled, ScoredTrajectory, Task, Trajectory, collate
from unstale.trainer.local import LocalTrainer
from unstale.weights.child_process import cores

ROOT = Path(__file__).parent.parent
SIBLINGS = 8
GOALS = {
    "ours, `rollout`": 6.0,
    "ours, `snapshot_old`": 5.0,
    "ours, synchronous": 2.0,
    "ours, one version behind, exact": 1.6,
}
"""The wanted ratio to TRL, in float32, of trained tokens and of whole steps per second."""
WARM = 3
"""Steps of a whole run that are not measured, at least 1."""


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    vocab: int


MODELS = {"tiny": Shape(1, 32, 2, 64), "1M": Shape(4, 128, 4, 1024), "5M": Shape(6, 256, 8, 2048)}
Row = dict[str, Any]


def make_model(folder: Path, shape: Shape) -> None:
    """Write a model with random weights, the same each time, and a tokenizer with as many words.

    The model never samples `<eos>`.
    """
    words = ["w0", "<eos>", "<pad>", *(f"w{i}" for i in range(3, shape.vocab))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each['content'] }}"
        "{% if each['role'] == 'assistant' %}<eos>{% endif %} {% endfor %}"
    )
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=2,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # Every hidden state points along its first axis, and the one word the other way. No layer adds
    # to this axis: what twenty layers add would turn it.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.model.embed_tokens.weight[1, 0] = -2.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    Policy(model, tokenizer).save(folder)


def ragged(groups: int, vocab: int, seed: int = 0) -> list[Row]:
    """Return TRL's input for each completion: in `tool_mask`, replies are 1 and tool results 0."""
    dice = random.Random(seed)
    rows: list[Row] = []

    def text(length: int) -> list[int]:
        return [dice.randrange(3, vocab) for _ in range(length)]

    for _ in range(groups):
        prompt = text(dice.randint(100, 300))
        for _ in range(SIBLINGS):
            said, mask = list[int](), list[int]()
            for turn in range(dice.randint(1, 6)):
                lengths = (
                    min(200, 5 + int(dice.expovariate(1 / 40))) if turn else 0,
                    8 + int(dice.expovariate(1 / 32)),
                )
                for own, length in enumerate(lengths):
                    said += text(length)
                    mask += [own] * length
            advantage = dice.choice([-1.0, 1.0]) * dice.uniform(0.2, 1.5)
            rows.append(
                {
                    "prompt_ids": prompt,
                    "completion_ids": said,
                    "tool_mask": mask,
                    "advantage": advantage,
                }
            )
    return rows


def credited(rows: list[Row]) -> list[ScoredTrajectory]:
    """Return the same batch as trajectories with advantages."""
    made = []
    for number, each in enumerate(rows):
        pieces: list[ContextPiece | Sampled] = [ContextPiece(tuple(each["prompt_ids"]))]
        changes = [
            0,
            *(i + 1 for i, (a, b) in enumerate(pairwise(each["tool_mask"])) if a != b),
            len(each["tool_mask"]),
        ]
        for start, end in pairwise(changes):
            tokens = tuple(each["completion_ids"][start:end])
            own = bool(each["tool_mask"][start])
            pieces.append(
                Sampled(tokens, (-7.0,) * len(tokens), 0) if own else ContextPiece(tokens)
            )
        task = Task("ragged", "train", number // SIBLINGS)
        trajectory = Trajectory(tuple(pieces), {}, "done", task, seed=0, episode=number)
        made.append(ScoredTrajectory(trajectory, (each["advantage"],)))
    return made


def ours(chosen: argparse.Namespace) -> None:
    """Train on the batch with this package's trainer, one step per line of standard input."""
    torch.set_num_threads(chosen.threads)
    options = TrainerConfig(
        dtype=chosen.dtype,
        share_prompts=chosen.share,
        gradient_checkpointing=chosen.recompute,
        compile=chosen.compile,
        max_tokens_per_microbatch=chosen.micro,
    )
    policy = Policy.load(chosen.model, dtype=chosen.dtype)
    scorer = LocalScorer(policy, 1.0, options.max_tokens_per_microbatch)
    old = build_old_logps(OldLogpsConfig(route=chosen.route), scorer)
    config = RunConfig(
        recipe="",
        max_steps=100_000,
        correction=CorrectionConfig(mode="none"),
        objective=ObjectiveConfig(loss_type="none" if chosen.route == "rollout" else "ppo_clip"),
        trainer=options,
    )
    trainer = LocalTrainer(policy, config, old)
    given = credited(json.loads(chosen.batch.read_text()))
    if (
        chosen.route == "rollout"
    ):  # what an engine of the same numbers would have said: S is 1, as it is in TRL
        batch = collate(given)
        said = policy.score(
            batch,
            batch.sampled,
            temperature=1.0,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
        ).logp
    while sys.stdin.readline():
        began = time.perf_counter()
        batch = collate(given)
        if chosen.route == "rollout":
            batch.behavior_logp.copy_(said)
        else:  # all of it is of the newest version
            batch.version.masked_fill_(batch.sampled, policy.version)
            old.on_published(live={policy.version})
        (part,) = trainer.prepare(batch)
        trainer.backward(part)
        if chosen.gradient and not trainer.steps:
            torch.save(
                {name: weight.grad for name, weight in policy.model.named_parameters()},
                chosen.gradient,
            )
        trainer.step()
        policy.version += 1
        CONSOLE.file.write(f"took {time.perf_counter() - began}\n")
        CONSOLE.file.flush()


class Words:
    """An environment with one reply to eight words. The reward is the share of odd words in it."""

    name, tools = "words", ()

    def train(self, seed: int) -> Iterator[Task]:
        return (Task("words", "train", number) for number in count())

    def held_out(self, number: int) -> list[Task]:
        return [Task("words", "held-out", -1 - index) for index in range(number)]

    def env(self, task: Task, seed: int) -> "Episode":
        return Episode(task.index)


class Episode:
    def __init__(self, number: int) -> None:
        self.number = number % 64

    async def begin(self) -> Turn:
        return Turn((Message("user", " ".join(f"w{3 + self.number % 32 + i}" for i in range(8))),))

    async def step(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"odd": worth(reply.content)})


def worth(text: str) -> float:
    """
    >>> worth("w1 w2 w3 w4")
    0.5
    """
    numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
    return sum(number % 2 for number in numbers) / max(1, len(numbers))


def whole(chosen: argparse.Namespace) -> None:
    """Run whole steps by `unstale.train` in this process."""
    ends: list[float] = []
    take_step = loop.take_step

    async def timed(*given: Any) -> Any:
        found = await take_step(*given)
        ends.append(time.perf_counter())
        return found

    loop.take_step = timed  # type: ignore[assignment]
    apart = chosen.staleness == 0  # engines and trainer take turns: each side may have all cores
    share = max(1, chosen.threads // 2)
    # 0, the default, gives the trainer the engines' cores while they are idle. It counts all cores
    # of the machine, so it needs a benchmark of as many threads.
    trainer_threads = 0 if chosen.threads == cores() else chosen.threads if apart else share
    processes = (chosen.processes or chosen.threads) if apart else 1
    run = unstale.train(
        RunConfig(
            recipe="train",
            model=str(chosen.model),
            runs=chosen.model,
            name=f"run-{time.time_ns()}",
            max_steps=chosen.steps + chosen.warm,
            task=TaskConfig(env="benchmarks.train:Words"),
            schedule=ScheduleConfig(
                max_staleness=chosen.staleness, groups_per_step=chosen.prompts, group_size=SIBLINGS
            ),
            rollout=RolloutConfig(max_turns=1),
            engine=EngineConfig(
                dtype="float32",
                threads=chosen.threads // processes if apart else share,
                processes=processes,
                max_context=64,
                max_running=chosen.prompts * SIBLINGS,
                max_completion_tokens=chosen.tokens,
            ),
            old_logps=OldLogpsConfig(route="rollout" if apart else "snapshot_old"),
            correction=CorrectionConfig(mode="none") if apart else CorrectionConfig(),
            trainer=TrainerConfig(lr=chosen.lr, threads=trainer_threads),
            eval=EvalConfig(tasks=0),
            checkpoint=CheckpointConfig(interval=10_000),
        ),
        console=Console(file=StringIO()),
    )
    rows = run.metrics[chosen.warm :]
    expected = chosen.prompts * SIBLINGS * chosen.tokens
    if said := [
        each["trainer/action_tokens"] for each in rows if each["trainer/action_tokens"] != expected
    ]:
        raise RuntimeError(f"a step has {said[0]:.0f} tokens, and TRL's has {expected}")
    training = [each["trainer/update_s"] + each["old_logps/prepare_s"] for each in rows]
    waiting = [each["schedule/wait_for_batch_s"] for each in rows]
    found = {"steps_per_s": chosen.steps / (ends[-1] - ends[chosen.warm - 1])}
    found |= {"waiting_s": median(waiting), "training_s": median(training)}
    for name in ("engine/cpu_s", "trainer/cpu_s"):
        found[name] = median(each[name] for each in rows)
    CONSOLE.file.write(f"took {json.dumps(found)}\n")


class Child:
    """A process of one of the two trainers. It takes a step on request."""

    def __init__(self, *command: object, waiting: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environ(waiting),
        )

    def __enter__(self) -> Callable[[], Any]:
        return self.turn

    def __exit__(self, *reason: object) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()

    def turn(self) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("took "):
                return json.loads(line[5:])
        status = self.process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-3:]
        command = " ".join(map(str, self.process.args))  # type: ignore[arg-type]
        raise RuntimeError(f"{command} ended with {status}: {' '.join(last)}")


class Bench:
    """Settings and measurements shared by all parts of the benchmark."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self.chosen, self.folder = chosen, folder

    def made(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.is_dir():
            make_model(folder, MODELS[name])
        return folder

    def theirs(self, model: Path, *options: object) -> Child:
        script = ROOT / "benchmarks" / "train_trl.py"
        return Child(
            self.chosen.peers, script, model, "--threads", self.chosen.threads, *options, waiting={}
        )

    def mine(self, kind: str, model: Path, *options: object) -> Child:
        common = ("--threads", self.chosen.threads)
        command = (
            sys.executable,
            "-m",
            "benchmarks.train",
            "--child",
            kind,
            "--model",
            model,
            *common,
            *options,
        )
        return Child(*command, waiting=OURS)

    def best_micro(self, micros: Iterable[int], model: Path, *options: object) -> int:
        """Return TRL's fastest micro-batch, by two steps of each after a warm-up step."""
        took = {}
        for micro in micros:
            with self.theirs(model, "--micro", micro, *options) as turn:
                turn()
                took[micro] = min(turn(), turn())
            CONSOLE.print(f"TRL in micro-batches of {micro}: {took[micro]:.2f} s")
        return min(took, key=lambda micro: took[micro])

    def trained(
        self, name: str, dtype: str = "float32"
    ) -> tuple[list[str], list[float], dict[str, list[float]]]:
        """Return the first table's rows, our time over TRL's, and the seconds of each round."""
        model, batch = self.made(name), self.folder / f"{name}.json"
        rows = ragged(self.chosen.groups, MODELS[name].vocab)
        batch.write_text(json.dumps(rows))
        actions, tokens = (
            sum(sum(each["tool_mask"]) for each in rows),
            sum(len(each["prompt_ids"]) + len(each["completion_ids"]) for each in rows),
        )
        narrow = ["--bf16"] if dtype == "bfloat16" else []
        micro = self.best_micro(self.chosen.micros, model, "--batch", batch, *narrow)
        gradients = [self.folder / f"{name}-{side}.pt" for side in ("ours", "theirs")]
        plain = ("--batch", batch, "--dtype", dtype)
        with ExitStack() as stack:
            turns = {
                "TRL": stack.enter_context(
                    self.theirs(
                        model,
                        "--batch",
                        batch,
                        "--micro",
                        micro,
                        "--gradient",
                        gradients[1],
                        *narrow,
                    )
                ),
                "ours, `rollout`": stack.enter_context(
                    self.mine("ours", model, *plain, "--gradient", gradients[0])
                ),
                "ours, `snapshot_old`": stack.enter_context(
                    self.mine("ours", model, *plain, "--route", "snapshot_old")
                ),
                "ours, unshared": stack.enter_context(
                    self.mine("ours", model, *plain, "--no-share")
                ),
            }
            for turn in turns.values():
                turn()
            alike = cosine(*(torch.load(path) for path in gradients))
            if alike < (0.999 if dtype == "float32" else 0.98):
                raise RuntimeError(
                    f"{name}: the gradients are not of the same loss: their cosine is {alike:.6f}"
                )
            took = alternate(turns, self.chosen.repeats)
        lines = []
        for contestant, seconds in took.items():
            speed = [actions / one for one in seconds]
            over = ratios(took, "TRL", over=contestant)
            wanted = GOALS.get(contestant) if dtype == "float32" else None
            goal = verdict(over, wanted) if wanted else ""
            label = f"{contestant}, micro-batches of {micro}" if contestant == "TRL" else contestant
            lines.append(
                row(
                    f"{name}, {dtype}",
                    label,
                    spread(speed, "{:.0f}"),
                    f"{tokens / median(seconds):.0f}",
                    spread(over),
                    goal,
                    f"{alike:.6f}",
                )
            )
            CONSOLE.print(lines[-1], markup=False)
        return lines, ratios(took, "TRL", over="ours, `rollout`"), took

    def stepped(self) -> tuple[list[str], dict[str, list[float]]]:
        """Return the rows of the second table, and the steps per second of each round."""
        chosen, name = self.chosen, self.chosen.models[0]
        model = self.made(name)
        size = ("--prompts", chosen.prompts, "--tokens", chosen.tokens)
        parts: dict[str, list[dict[str, float]]] = {}

        def by_us(label: str, staleness: int) -> float:
            with self.mine(
                "whole", model, *size, "--staleness", staleness, "--steps", chosen.steps
            ) as turn:
                found = turn()
            parts.setdefault(label, []).append(found)
            return float(found["steps_per_s"])

        sync, late = "ours, synchronous", "ours, one version behind, exact"
        all_of_them = chosen.prompts * SIBLINGS
        micro = self.best_micro((all_of_them // 4, all_of_them // 2, all_of_them), model, *size)
        with self.theirs(model, *size, "--micro", micro) as turn:
            for _ in range(WARM):
                turn()
            contestants = {
                "TRL": lambda: chosen.steps / sum(turn() for _ in range(chosen.steps)),
                sync: lambda: by_us(sync, 0),
                late: lambda: by_us(late, 1),
            }
            found = alternate(contestants, chosen.repeats)
        lines = []
        for contestant, speed in found.items():
            over = ratios(found, contestant, over="TRL")
            bounds = ["", "", ""]
            if contestant in parts:
                waits, trains = (
                    [each[key] for each in parts[contestant]] for key in ("waiting_s", "training_s")
                )
                bounds = [
                    f"{1 / max(1e-9, median(waits)):.2f}" if contestant == sync else "",
                    f"{1 / median(trains):.2f}",
                    f"{1 / median(speed) - median(waits) - median(trains):.2f}",
                ]
            goal = verdict(over, GOALS[contestant]) if contestant in GOALS else ""
            label = f"{contestant}, micro-batches of {micro}" if contestant == "TRL" else contestant
            lines.append(row(name, label, spread(speed), spread(over), goal, *bounds))
            CONSOLE.print(lines[-1], markup=False)
        return lines, found


def cosine(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the cosine of two gradients. Their lengths may differ, because one may be clipped."""
    names = sorted(one.keys() & other.keys())
    a, b = (torch.cat([side[name].flatten().double() for name in names]) for side in (one, other))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def measure(bench: Bench) -> list[str]:
    chosen = bench.chosen
    lines = [
        f"{chosen.groups} groups of {SIBLINGS} siblings, {chosen.threads} threads, medians and "
        f"ranges of {chosen.repeats} alternating rounds. The ratio is TRL's time over theirs in "
        f"the same round. Theirs is {peers('.venv-peers', 'trl', 'transformers', 'torch')}.",
        "",
        *columns(
            "model",
            "trainer",
            "action tokens/s",
            "all tokens/s",
            "over TRL",
            "goal",
            "cosine of gradients",
        ),
    ]
    bars: dict[str, dict[str, list[float]]] = {}
    for name in chosen.models:
        for dtype in chosen.dtypes:
            CONSOLE.print(f"{name}, {dtype}")
            found, _, bars[f"{name}, {dtype}"] = bench.trained(name, dtype)
            lines += found
    lines += [
        "",
        f"## The whole step: {chosen.prompts} prompts x {SIBLINGS} completions of {chosen.tokens} "
        "tokens",
        "",
        "Synchronously our engines, a process for each thread, and our trainer take turns on all "
        "of them; one version behind, the engine has half of them, and the trainer the other half, "
        "and all while no episode runs. "
        "The last columns are what steps/s would be if only generating, or only training, took "
        "time.",
        "",
        *columns(
            "model",
            "contestant",
            "steps/s",
            "over TRL",
            "goal",
            "generation alone",
            "training alone",
            "s beside both",
        ),
    ]
    found, speeds = bench.stepped()
    draw(bars, speeds)
    return lines + found


def draw(bars: dict[str, dict[str, list[float]]], speeds: dict[str, list[float]]) -> None:
    with picture("train", panels=2, width=9.0) as (left, right):
        names = list(next(iter(bars.values())))
        for place, name in enumerate(names):
            values = [median(ratios(found, "TRL", over=name)) for found in bars.values()]
            at = [group + (place - 1.5) * 0.2 for group in range(len(bars))]
            left.bar(at, values, width=0.18, label=name.replace("`", ""))
        left.set_xticks(range(len(bars)), list(bars))
        left.set_ylabel("trained tokens/s over TRL's")
        left.axhline(GOALS["ours, `rollout`"], color="grey", linestyle=":")
        left.set_ylim(top=1.35 * max(3.0, left.get_ylim()[1]))
        left.legend(frameon=False, fontsize=7, loc="upper left")
        right.bar(range(len(speeds)), [median(found) for found in speeds.values()], width=0.5)
        right.set_xticks(range(len(speeds)), [name.replace(", ", ",\n") for name in speeds])
        right.set_ylabel("whole steps/s")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["1M", "5M"], choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--groups", type=int, default=4, help=f"groups in a batch, each of {SIBLINGS} siblings"
    )
    parser.add_argument(
        "--micros",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32],
        help="sizes of TRL's micro-batch; the fastest is used",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a whole step")
    parser.add_argument(
        "--tokens", type=int, default=32, help="tokens of a completion in a whole step"
    )
    parser.add_argument("--steps", type=int, default=8, help="whole steps of a round")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-peers/bin/python", help="a python that has trl"
    )
    inner = parser.add_argument_group("of the processes that it starts itself")
    inner.add_argument("--child", choices=["ours", "whole"])
    inner.add_argument("--model", type=Path)
    inner.add_argument("--batch", type=Path)
    inner.add_argument("--gradient", type=Path)
    inner.add_argument("--route", default="rollout")
    inner.add_argument("--dtype", default="float32")
    inner.add_argument("--micro", type=int, default=TrainerConfig().max_tokens_per_microbatch)
    inner.add_argument("--share", action=argparse.BooleanOptionalAction, default=True)
    inner.add_argument("--recompute", action="store_true")
    inner.add_argument("--compile", action="store_true")
    inner.add_argument("--staleness", type=int, default=0)
    inner.add_argument("--lr", type=float, default=TrainerConfig().lr)
    inner.add_argument("--warm", type=int, default=WARM, help="steps that are not measured")
    inner.add_argument("--processes", type=int, help="engines of a synchronous run, else --threads")
    return parser


def main() -> None:
    chosen = options().parse_args()
    if chosen.child:
        (ours if chosen.child == "ours" else whole)(chosen)
        return
    if not chosen.peers.is_file():
        raise SystemExit(
            f"{chosen.peers} is not there: --peers names a python that has trl (make env-peers)"
        )
    with tempfile.TemporaryDirectory() as folder:
        write("train", "The trainer beside TRL's", measure(Bench(chosen, Path(folder))))


if __name__ == "__main__":
    main()
