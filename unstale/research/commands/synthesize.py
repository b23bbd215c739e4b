"""The command `synthesize`: let a language model write tasks, and keep those that are verified."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from unstale.cli.preflight import quick_imports
from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import (
    CONFIG,
    COUNT,
    JSON,
    OWN_RECIPE,
    TRAINED,
    argument,
    command,
    console_of,
    options_of,
)
from unstale.config import ConfigError, RunConfig
from unstale.config.checks import bounded, output_file
from unstale.durability.console import Console

SHARE = bounded(float, 0, 1)


def _synthesize(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import configure_trained

    config = configure_trained(chosen)
    if bool(chosen.url) != bool(chosen.url_model):
        raise ConfigError("--url and --url-model name a served writer together: give both")
    with quick_imports():
        from unstale.durability.run_folder import write_whole
        from unstale.research.synthesize import REWARD, summary, tasks_of

    rows = _make(chosen, config)
    tasks = tasks_of(rows)
    text = "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    write_whole(chosen.out, text, durable=True)
    counts = summary(rows)
    if chosen.json:
        print_json(counts)
        return 0
    refused = ", ".join(f"{count} {reason}" for reason, count in counts["refused"].items())
    lines = [f"kept {counts['kept']} of {counts['drafts']} drafts; refused: {refused or 'none'}"]
    if counts["controls"]:
        lines.append(
            f"of {counts['controls']} puzzles with known answers, {counts['controls_kept']} passed "
            f"the check, {counts['controls_kept_wrong']} of them with a wrong answer"
        )
    if tasks:
        lines.append(f"train with --task.env dataset:{chosen.out} --task.reward {REWARD}")
    console = Console(soft_wrap=True)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    return 0


def _make(chosen: argparse.Namespace, config: RunConfig) -> list[dict[str, object]]:
    """Draft the tasks. Return a row for each draft and each control."""
    from unstale.builders import build_server
    from unstale.cli.evaluate import run_until_complete, running_generator
    from unstale.cli.process import limit_threads
    from unstale.cli.trained import policy_folder
    from unstale.observe.live import LiveDisplay
    from unstale.research.served_writer import ServedWriter, Writer
    from unstale.research.synthesize import (
        Plan,
        Synthesis,
        SynthesisOptions,
        load_plan,
        rates_of,
    )
    from unstale.rollout.writer import PolicyWriter

    options = options_of(SynthesisOptions, chosen)
    options.check(writes_itself=not chosen.url)
    plan = load_plan(chosen.plan) if chosen.plan else Plan()
    rates = rates_of(chosen.rates) if chosen.rates else {}
    config = config.with_policy(policy_folder(Path(chosen.trained)))
    limit_threads()
    policy, _, generator = build_server(config)

    async def main() -> list[dict[str, object]]:
        async with running_generator(config, policy, generator) as running:
            own = PolicyWriter(running)
            writer: Writer = own
            if chosen.url:
                writer = ServedWriter(chosen.url, chosen.url_model)
            with LiveDisplay(config, console=console_of(chosen)) as display:
                progress: Callable[..., None] = display.phase
                work = Synthesis(
                    writer,
                    own,
                    plan,
                    options,
                    seed=config.seed,
                    rates=rates,
                    progress=progress,
                )
                return await work.run(chosen.out.with_suffix(".drafts.jsonl"))

    return run_until_complete(main())


add = command(
    "synthesize",
    "let a model write tasks, and keep those whose answers are verified",
    TRAINED,
    OWN_RECIPE,
    CONFIG,
    argument(
        "--out", type=output_file, required=True, metavar="FILE", help="the kept tasks, as .jsonl"
    ),
    argument("--plan", type=Path, metavar="FILE", help="subjects, skills, difficulties, rubric"),
    argument(
        "--drafts", type=bounded(int, 1, 10**7), default=256, metavar="N", help="default: 256"
    ),
    argument(
        "--solves", type=COUNT, default=4, metavar="K", help="solutions of a draft; default: 4"
    ),
    argument(
        "--agree",
        type=SHARE,
        default=1.0,
        metavar="SHARE",
        help="solutions that must have the draft's answer; default: 1, all",
    ),
    argument(
        "--attempts",
        type=bounded(int, 0, 10_000),
        default=8,
        metavar="N",
        help="the policy's attempts at a verified draft; default: 8",
    ),
    argument(
        "--lowest-rate", type=SHARE, default=0.01, metavar="P", help="smallest pass rate; 0.01"
    ),
    argument(
        "--highest-rate", type=SHARE, default=0.99, metavar="P", help="largest pass rate; 0.99"
    ),
    argument(
        "--controls",
        type=bounded(int, 0, 10_000),
        default=32,
        metavar="N",
        help="puzzles with known answers that are checked like drafts; default: 32",
    ),
    argument("--url", default="", help="let a served model write and solve: http://host:port/v1"),
    argument("--url-model", default="", metavar="NAME", help="the served model's name"),
    argument(
        "--rates", type=Path, metavar="RUN", help="a run on earlier tasks, whose pass rates decide"
    ),
    JSON,
)(_synthesize)
