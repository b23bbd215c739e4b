"""Run recipes of the Tinker cookbook, unmodified, against the command `unstale tinker`.

    make env-tinker
    .venv-tinker/bin/python -m benchmarks.cookbook          # half an hour on two cores

Each round runs a recipe of each of two tenants at once. A recipe is a process, started as its users
start it, without a network: its working folder has folders with the names of the hub's model and
datasets. Then the tenant compares the engine's log-probabilities with `compute_logprobs` of the
version that the recipe saved last, and the other tenant asks for it. Writes a dated table under
benchmarks/results/. The exit status is 1 if a recipe failed, or if a tenant got another's version.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import mean, stdev
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks import tables
from unstale.config import SHIPPED_POLICIES
from unstale.config.hub import model_folder

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""The name of the served model for clients, for which recipes choose a chat format."""
MEANS = 5
"""Number of steps at the start and at the end whose means show what was learned."""
PROMPT = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
PROBES, PROBE_TOKENS = 16, 64
SUPERVISED = "sl_loop train_mean_nll batch_size=16 learning_rate=3e-4"
LEARNING = (
    "math_rl.train env/all/correct loss_fn=importance_sampling group_size=8 groups_per_batch=16 "
    "learning_rate=1e-4 eval_every=0 load_checkpoint_path=STATE"
)
"""It starts from the weights that `SUPERVISED` saved, `STATE`: the model rarely answers a sum."""
ROUNDS = (
    (
        SUPERVISED,
        "rl_loop reward/total loss_fn=importance_sampling group_size=4 batch_size=4 max_tokens=32",
    ),
    (LEARNING,),
    (
        "math_rl.train env/all/correct loss_fn=ppo max_steps_off_policy=1 groups_per_batch=8",
        "multiplayer_rl.guess_number.train env/all/reward/total renderer_name=qwen3_instruct "
        "group_size=4 batch_size=2 max_tokens=16 eval_every=0",
    ),
)
"""The recipes of each round: a module of the cookbook, a metric that it logs, and its options."""


class Outcome(NamedTuple):
    """What a recipe left: exit status, metric of each step, and what it saved last.

    Of that, `path` is for sampling and `state` for training.
    """

    status: int
    values: list[float]
    path: str
    state: str = ""


def prepare(folder: Path, model: str) -> list[int]:
    """Make what recipes find in place of the hub: the model's tokenizer, and sums as datasets.

    Return the tokens of a prompt.
    """
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).symlink_to(SHIPPED_POLICIES.get(model) or model_folder(model))
    draw, chats, questions = Random(0), [], []
    for a, b in ((draw.randrange(101), draw.randrange(101)) for _ in range(400)):
        asked = {"role": "user", "content": f"What is {a} + {b}?"}
        chats.append({"messages": [asked, {"role": "assistant", "content": f"{a + b}"}]})
        questions.append({"question": asked["content"], "answer": f"#### {a + b}"})
    for name, rows in (("HuggingFaceH4/no_robots", chats), ("openai/gsm8k", questions)):
        (folder / name).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines)
        config = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
        (folder / name / "README.md").write_text(config)
    return AutoTokenizer.from_pretrained(folder / NAME).encode(PROMPT, add_special_tokens=False)


@contextmanager
def service(model: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Run `unstale tinker` with two tenants until the context ends. Yield its URL and tokens."""
    words = ["tinker", model, "--name", NAME, "--folder", str(folder / "saved"), "--tenants", "2"]
    command = [sys.executable, "-m", "unstale", *words]
    with subprocess.Popen(command, cwd=tables.ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url, *tokens = (process.stdout.readline().strip().partition("=")[2] for _ in range(3))
            if not url:
                raise RuntimeError(f"`unstale tinker {model}` ended with {process.wait()}")
            yield url, tokens
        finally:
            process.send_signal(signal.SIGINT)


def play(
    recipes: Mapping[str, int], folder: Path, url: str, tokens: Sequence[str]
) -> list[Outcome]:
    """Run recipes at once, and return when all have ended.

    `recipes` has the number of steps of each. Each runs as another tenant, with its token.
    """
    offline = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/cache"}
    running = []
    for (recipe, steps), token in zip(recipes.items(), tokens, strict=False):
        log = Path(mkdtemp(dir=folder), "log")
        module, metric, *words = recipe.split()
        words += [f"model_name={NAME}", f"log_path={log}", f"max_steps={steps}"]
        command = [sys.executable, "-P", "-m", f"tinker_cookbook.recipes.{module}", *words]
        env = os.environ | offline | {"TINKER_BASE_URL": url, "TINKER_API_KEY": token}
        with log.with_name("output").open("w") as out:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
        running.append((metric, log, process))
    return [outcome(metric, log, process.wait()) for metric, log, process in running]


def outcome(metric: str, log: Path, status: int) -> Outcome:
    if status:
        sys.stderr.write(log.with_name("output").read_text()[-4000:])
        return Outcome(status, [], "")
    rows = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    values = [row[metric] for row in rows if metric in row]
    saved = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    return Outcome(status, values, saved["sampler_path"], saved["state_path"])


def sampler(url: str, token: str, path: str) -> Any:
    """Return a client that samples from the version `path`, as the tenant with this token."""
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=token)
    return client.create_sampling_client(path).result()


def largest_difference(url: str, token: str, path: str, prompt: Sequence[int]) -> float:
    """Return the largest difference of the engine's log-probabilities to `compute_logprobs`.

    Both are of the version `path`, in `PROBES` replies of `PROBE_TOKENS` tokens.
    """
    import tinker

    client, inputs = sampler(url, token, path), tinker.ModelInput.from_ints
    options = tinker.SamplingParams(max_tokens=PROBE_TOKENS, stop=[], seed=0)
    replies = client.sample(inputs(list(prompt)), PROBES, options).result().sequences
    scored = [client.compute_logprobs(inputs([*prompt, *reply.tokens])) for reply in replies]
    return max(
        abs(ours - theirs)
        for reply, scores in zip(replies, scored, strict=True)
        for ours, theirs in zip(reply.logprobs, scores.result()[len(prompt) :], strict=True)
    )


def refusal(url: str, token: str, path: str) -> str:
    """Return the service's message to a tenant that asks for `path`, empty if it is not refused."""
    import tinker

    try:
        sampler(url, token, path)
    except tinker.APIStatusError as error:
        return str(error.body["error"]["message"])
    return ""


def mean_of(values: Sequence[float]) -> str:
    return f"{mean(values):.1%} ± {stdev(values) / len(values) ** 0.5:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--steps", type=int, default=6, help="default: 6")
    parser.add_argument("--learning-steps", type=int, default=40, help="default: 40")
    options = parser.parse_args()
    rows: list[str] = []
    failed, curve, state = 0, list[float](), ""
    with TemporaryDirectory() as made, service(options.model, Path(made)) as (url, tokens):
        prompt = prepare(Path(made), options.model)
        for number, recipes in enumerate(ROUNDS, 1):
            played = {
                recipe.replace("STATE", state): (
                    options.learning_steps if recipe in (SUPERVISED, LEARNING) else options.steps
                )
                for recipe in recipes
            }
            found = play(played, Path(made), url, tokens)
            for recipe, result, step in zip(recipes, found, (1, -1), strict=False):
                status, values, path, saved = result
                own, other = tokens[::step]
                module, metric, *words = recipe.split()
                answer = refusal(url, other, path).replace(path, "PATH") if path else ""
                cells: list[object] = [number, module, " ".join(words), status, len(values), metric]
                if path:
                    difference = f"{largest_difference(url, own, path, prompt):.1e}"
                    cells += [f"{values[0]:.3f}", f"{values[-1]:.3f}", difference]
                failed += not answer
                curve = values if recipe == LEARNING else curve
                state = saved if recipe == SUPERVISED else state
                rows.append(tables.row(*cells, answer or "NOT REFUSED"))
                tables.CONSOLE.print(rows[-1])
    packages = ", ".join(f"{each} {version(each)}" for each in ("tinker", "tinker-cookbook"))
    heads = "round, recipe, options, exit, steps, metric, first, last, difference, other tenant"
    lines = [
        f"The model is {options.model}, with {packages}. Recipes of one round ran at once, each "
        "of its own tenant. Steps and metric are what the recipe logged. The difference is the "
        "largest between log-probabilities of the engine and `compute_logprobs` of the path that "
        f"the recipe saved last, in {PROBES * PROBE_TOKENS} tokens. The last column is the "
        "service's answer to the other tenant, who asked for that path. `STATE` is what "
        "`sl_loop` saved.",
        "",
        *tables.columns(*heads.split(", ")),
        *rows,
    ]
    if len(curve) >= 2 * MEANS:
        first, last = mean_of(curve[:MEANS]), mean_of(curve[-MEANS:])
        lines += [
            "",
            f"Of its sums, each drawn anew, round 2 answered {first} rightly in the first {MEANS} "
            f"steps and {last} in the last {MEANS}: mean and standard error over steps.",
        ]
    tables.write("cookbook", "Recipes of the Tinker cookbook against the service", lines)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
