"""Train an agent that uses the OpenAI SDK, and measure the cost of the endpoint.

    python -m benchmarks.agent --seeds 0    # about 15 minutes on two quiet cores

Each seed runs the retail recipe twice, each time in a new process: with `examples/retail_agent.py`
through the endpoint, then with the built-in environment. Tasks, noise, held-out tasks and settings
are the same. Then a few steps of each are timed in turn, with their CPU time. Runs that a folder
already has are not repeated. Writes a dated table under benchmarks/results/."""

import argparse
import json
import resource
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks import tables
from benchmarks.demo import finished, graded, read
from unstale.durability.journal import Journal, check
from unstale.durability.machine import commit
from unstale.durability.run_folder import RunFolder
from unstale.envs.chat import Chat
from unstale.envs.retail import RetailTasks
from unstale.model.policy import Policy

AGENT, NATIVE = "examples.retail_agent:tasks", "retail"
NAMES = {AGENT: "agent", NATIVE: "native"}
ROOT = Path(__file__).parent.parent


def train(env: str, folder: Path, *options: str) -> None:
    """Run the recipe from the command line and save its CPU seconds."""
    before, code = _processor_s(), commit()
    command = [
        sys.executable,
        "-m",
        "unstale.cli.main",
        "train",
        "retail",
        "--task.env",
        env,
        *options,
    ]
    subprocess.run(
        [*command, "--runs", str(folder.parent.resolve()), "--name", folder.name],
        check=True,
        cwd=ROOT,
    )
    (folder / "processor.json").write_text(json.dumps(_processor_s() - before))
    (folder / "commit").write_text(code)


def _processor_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def learnt(runs: Path, seeds: list[int]) -> list[str]:
    """Return a table of the trained policies, one line per seed."""
    lines = [
        "| seed | base policy | trained with the agent | trained with the built-in environment "
        "| minutes | steps | tokens by staleness 0 / 1 / 2 | trajectories of several versions "
        "| staleness measured / bound | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        folder, beside = (runs / f"{name}-seed{seed}" for name in NAMES.values())
        if not finished(folder):
            continue
        one = read(seed, folder)
        total = sum(one.lags.values())
        shares = " / ".join(f"{one.lags.get(lag, 0) / total:.0%}" for lag in ("0", "1", "2"))
        native = graded(read(seed, beside).trained) if finished(beside) else "not run"
        lines.append(
            f"| {seed} | {graded(one.base)} | {graded(one.trained)} | {native} | {one.minutes:.1f} "
            f"| {one.steps} | {shares} | {one.mixed:.0%} | {one.staleness[0]} / {one.staleness[1]} "
            f"| {(folder / 'commit').read_text()} |"
        )
    return lines


def recorded(runs: Path, seeds: list[int]) -> list[str]:
    """Return a table of the calls in the journals of the agent's runs."""
    lines = [
        "| seed | episodes trained on | attempts that failed and were retried | calls answered "
        "| tokens sampled in them | with exact old logits | branches | malformed tool calls, "
        "returned as text | problems found in the journal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        folder = runs / f"{NAMES[AGENT]}-seed{seed}"
        if not finished(folder):
            continue
        chat = Chat(Policy.load(folder / "policy").tokenizer, RetailTasks(level=1).tools)
        steps = [row for row in RunFolder(folder).metrics() if "schedule/staleness_max" in row]
        exact = min(row["old_logps/exact_share"] for row in steps)
        with Journal.read(folder) as reader:
            wrong = len(check(reader))
            trained = [
                one
                for row in steps
                for group in reader.consumed(row["step"])
                for one in group.trajectories
            ]
        again = sum(
            event["kind"] == "episode_failed" and not event.get("held_out")
            for event in RunFolder(folder).rows("events.jsonl")
        )
        calls, broken = sum(one.num_turns for one in trained), 0
        for one in trained:
            said = [chat.text(piece.tokens) for piece in one.sampled]
            broken += sum(
                any(call.error for call in chat.reader.parse_content(text).tool_calls)
                for text in said
            )
        lines.append(
            f"| {seed} | {len(trained):,} | {again} | {calls:,} | "
            f"{sum(one.num_sampled for one in trained):,} | {exact:.0%} | "
            f"{sum(len(one.branches) for one in trained)} | {broken} | {wrong} |"
        )
    return lines


def pace(runs: Path, turns: int) -> list[str]:
    """Return a table of medians over the timed runs, from the first step's end to the last's."""
    lines = [
        "| environment | steps per minute | sampled tokens per second | CPU seconds per step |",
        "|---|---|---|---|",
    ]
    for name in NAMES.values():
        figures = []
        for folder in (runs / f"pace-{name}{turn}" for turn in range(turns)):
            if not finished(folder):
                continue
            steps = [row for row in RunFolder(folder).metrics() if "schedule/staleness_max" in row]
            took = steps[-1]["time_s"] - steps[0]["time_s"]
            tokens = sum(row["trainer/action_tokens"] for row in steps[1:])
            used = json.loads((folder / "processor.json").read_text())
            figures.append((60 * (len(steps) - 1) / took, tokens / took, used / len(steps)))
        if figures:
            columns = [median(column) for column in zip(*figures, strict=True)]
            lines.append(f"| {name} | {columns[0]:.1f} | {columns[1]:.0f} | {columns[2]:.1f} |")
    return lines


def report(chosen: argparse.Namespace, *, quiet: bool = False) -> None:
    """Write the table of the runs that have finished."""
    runs = chosen.runs
    lines = [
        "The recipe `retail` trains "
        "`examples/retail_agent.py`, which uses only the OpenAI SDK, through the endpoint. Success "
        "on the recipe's 256 held-out tasks, sampled at temperature 1; 95% Wilson intervals.",
        "",
        *learnt(runs, chosen.seeds),
        "",
        "The minutes are those of the agent's run with its two evaluations. `python -m "
        "benchmarks.demo` runs the built-in environment with more seeds.",
        "",
        "The agent's calls, counted from the journal:",
        "",
        *recorded(runs, chosen.seeds),
        "",
        f"The cost: {chosen.steps} steps with each in turn, medians of {chosen.turns} runs, with "
        "the CPU time of both processes:",
        "",
        *pace(runs, chosen.turns),
    ]
    tables.write("agent", "An external agent on the retail tasks", lines, quiet=quiet)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="the recipe's; more on a machine that is not quiet",
    )
    parser.add_argument("--turns", type=int, default=3, help="timed runs of each")
    parser.add_argument("--steps", type=int, default=6, help="of a timed run")
    parser.add_argument("--without-native", action="store_true", help="train the agent alone")
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"bench-agent-{date.today()}")
    chosen = parser.parse_args()
    work: list[tuple[str, str, tuple[str, ...]]] = [
        (env, f"{NAMES[env]}-seed{seed}", ("--seed", str(seed), "--minutes", str(chosen.minutes)))
        for env in ((AGENT,) if chosen.without_native else (AGENT, NATIVE))
        for seed in chosen.seeds
    ]
    short: tuple[str, ...] = (
        "--max_steps",
        str(chosen.steps),
        "--minutes",
        "0",
        "--eval.tasks",
        "0",
    )
    work += [
        (env, f"pace-{name}{turn}", short)
        for turn in range(chosen.turns)
        for env, name in NAMES.items()
    ]
    for env, name, options in work:
        if not finished(chosen.runs / name):
            train(env, chosen.runs / name, *options)
        report(chosen, quiet=True)
    report(chosen)


if __name__ == "__main__":
    main()
