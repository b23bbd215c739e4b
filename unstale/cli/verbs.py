"""The commands of the command line: their arguments, and the functions that do their work.

Such a function returns the exit code of its command. It imports modules that need torch only when
it is called, so that `--help` is quick.
"""

import argparse
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from unstale.cli.failures import exit_after
from unstale.cli.preflight import new_folder, quick_imports, refuse_early, start_engines
from unstale.cli.recipe_options import configure, file_values, fit_context, print_json
from unstale.config import SHIPPED_POLICIES, ConfigError, install, nearest
from unstale.config.checks import JsonObject, bounded
from unstale.config.hub import cached_folder
from unstale.config.options import override
from unstale.config.plugins import (
    Plugins,
    added_names,
    missing_annexes,
    modules,
    owner,
    problem,
)
from unstale.durability.console import Console
from unstale.durability.run_folder import RunFolder
from unstale.recipes import find_recipes, recipe_names

if TYPE_CHECKING:
    from unstale.durability.journal import JournalReader

Argument = tuple[tuple[str, ...], dict[str, Any]]
Act = Callable[[argparse.Namespace], int]


Add = Callable[[Any], None]
"""The type of functions that add a command to the subparsers of argparse."""
VERBS: dict[str, Add] = {}
"""The commands that this file declares, by name, each with the function that adds it to
argparse.
"""
ADDED = Plugins("unstale.verbs", Callable)
ANNEX = {name.replace("_", "-"): place for name, place in modules(ADDED.group).items()}
"""The modules in `unstale.analysis` and `unstale.research` that declare commands, by command. Each
has a function `add`.
"""


def verb_names() -> list[str]:
    """Return the names of all commands."""
    own = [*VERBS, *ANNEX]
    return sorted([*own, *added_names(ADDED.group, own)])


def unknown_verb(name: str) -> ConfigError:
    """Return the error for a command `name` that does not exist. Its text names a similar one."""
    if name == "align":
        return ConfigError("align is now probe-distillation")
    hint = nearest(name, verb_names()) + missing_annexes()
    return ConfigError(f"unknown command {name!r}{hint}")


def add_verb(name: str, verbs: Any, *, listed: bool) -> None:
    """Add the command `name` to `verbs`, the subparsers of argparse.

    With `listed`, a command of another distribution is only listed, and not imported. Raises
    `ConfigError` if such a command is broken.
    """
    if name in ANNEX:
        import_module(ANNEX[name]).add(verbs)
    elif name in VERBS:
        VERBS[name](verbs)
    elif listed:
        verbs.add_parser(name, help=f"a command of {owner(ADDED.group, name)}")
        return
    else:
        ADDED.load(name)(verbs)
    if name not in verbs.choices:
        raise problem(ADDED.group, name, "it adds no command with this name")


def argument(*names: str, **options: Any) -> Argument:
    """Return the description of an argument of a command, for `verb` and `command`.

    The parameters are those of `ArgumentParser.add_argument`.
    """
    return names, options


def command(name: str, about: str, *arguments: Argument) -> Callable[[Act], Add]:
    """Return a decorator for the function that does a command's work.

    It turns the function into one that adds the command to argparse. `about` is the command's help.
    """

    def declare(act: Act) -> Add:
        def add(verbs: Any) -> None:
            description = f"{about[0].upper()}{about[1:]}."
            parser = verbs.add_parser(name, help=about, description=description)
            for names, options in arguments:
                parser.add_argument(*names, **options)
            takes_options = CONFIG in arguments or CONFIG_OF_RUN in arguments
            parser.set_defaults(act=act, takes_options=takes_options)

        return add

    return declare


def verb(name: str, about: str, *arguments: Argument) -> Callable[[Act], Act]:
    """Return a decorator for a function of this file that does a command's work. `about` is its
    help.
    """

    def register(act: Act) -> Act:
        VERBS[name] = command(name, about, *arguments)(act)
        return act

    return register


RUN = argument("run", type=Path, help="a run folder")
OPEN_RUN = argument("run", type=Path, help="a run folder; the run may be in progress")
TRAINED = argument(
    "trained",
    type=Path,
    metavar="folder",
    help="a run folder, a model folder, or org/name of the Hugging Face hub",
)
RECIPE_HELP = f"{', '.join(recipe_names())}, MODULE:FUNCTION, or a .toml or .json file of options"
RECIPE = argument("recipe", help=RECIPE_HELP)
OPTIONAL_RECIPE = argument("recipe", nargs="?", help=RECIPE_HELP)
OWN_RECIPE = argument("recipe", nargs="?", help=f"{RECIPE_HELP}; default: the run's own")
JSON = argument("--json", action="store_true", help="print JSON")
CONFIG = argument(
    "--config",
    type=Path,
    metavar="FILE",
    help="a file with the options below, one table per section; the command line wins. "
    "It may also be given in place of the recipe",
)
"""The argument `--config`. A command with it also accepts every option of a run."""
CONFIG_OF_RUN = argument(
    "--config",
    type=Path,
    metavar="FILE",
    help="a file with options that replace those of the run, one table per section; the command "
    "line wins",
)
"""The argument `--config` of a command on a run folder, which accepts no recipe."""


LIMIT_TURNS = argument(
    "--limit-turns",
    action="store_true",
    help="limit the turns of an episode by the run's successes, as the technique limits does",
)
COUNT = bounded(int, 1, 10_000)
"""The type of an argument that is a number of runs or attempts, from 1 to 10000."""


def options_of(kind: Any, chosen: argparse.Namespace) -> Any:
    """Return an object of the dataclass `kind`, with the arguments of a command as its fields."""
    return kind(**{field.name: getattr(chosen, field.name) for field in fields(kind)})


def console_of(chosen: argparse.Namespace) -> Console:
    """Return the console for progress and tables: stderr with `--json`, otherwise stdout."""
    return Console(stderr=chosen.json, soft_wrap=True)


def require_runs(*folders: Path) -> None:
    """Raise `ConfigError` if a folder has no run. Commands call this before they import torch."""
    for folder in folders:
        RunFolder(folder)


@verb(
    "check-template",
    "check that a chat template extends conversations exactly",
    argument(
        "model",
        type=Path,
        help="a model folder, the folder of its tokenizer, or org/name in the local cache of the "
        "Hugging Face hub",
    ),
    argument(
        "--conversations",
        type=bounded(int, 1, 10**9),
        default=1000,
        metavar="N",
        help="conversations to try (default: 1000)",
    ),
    JSON,
    argument(
        "--chat-template",
        default="",
        metavar="NAME",
        help="check this template, as the option chat_template, instead of the model's own",
    ),
    argument(
        "--chat-template-kwargs",
        default="",
        metavar="JSON",
        help='variables of the template, such as {"enable_thinking": false}',
    ),
)
def _check_template(chosen: argparse.Namespace) -> int:
    JsonObject().check("--chat-template-kwargs", chosen.chat_template_kwargs)
    name = str(chosen.model)
    folder = SHIPPED_POLICIES.get(name) or cached_folder(name, "tokenizer")
    with quick_imports():
        from unstale.cli.check_template import check_template

    result = check_template(
        folder,
        conversations=chosen.conversations,
        chat_template=chosen.chat_template,
        template_kwargs=json.loads(chosen.chat_template_kwargs or "{}"),
        console=console_of(chosen),
    )
    if chosen.json:
        print_json(result.as_json())
    return 0 if result else 1


@verb(
    "eval",
    "measure a policy's success on held-out tasks",
    TRAINED,
    OWN_RECIPE,
    CONFIG,
    argument(
        "--k", nargs="+", type=COUNT, default=[1], metavar="K", help="report pass@k and pass^k"
    ),
    argument(
        "--attempts",
        type=COUNT,
        metavar="N",
        help="attempts per task (default: the largest of k and eval.samples)",
    ),
    argument("--save", type=Path, metavar="FILE", help="save episodes; a repeated command resumes"),
    LIMIT_TURNS,
    JSON,
)
def _eval(chosen: argparse.Namespace) -> int:
    words = " ".join(map(str, chosen.k))
    if chosen.attempts and max(chosen.k) > chosen.attempts:
        raise ConfigError(f"--k must be at most --attempts ({chosen.attempts}), got {words}")
    from unstale.cli.trained import configure_trained

    config = configure_trained(chosen)
    attempts = chosen.attempts or max(*chosen.k, config.eval.samples)
    with quick_imports():
        from unstale.cli.evaluate import evaluate

    result = evaluate(
        chosen.trained,
        config,
        attempts=attempts,
        save=chosen.save,
        limit_turns=chosen.limit_turns,
        console=console_of(chosen),
    )
    if chosen.json:
        print_json({"task": config.task.env, **result.as_json(chosen.k)})
    else:
        Console().print(result.table(chosen.k))
    return 0


@contextmanager
def open_journal(run: Path) -> "Iterator[JournalReader]":
    """Return a context with a reader of a run's journal.

    If the journal cannot be read, the command ends with exit code 1.
    """
    from unstale.durability.journal import Journal, JournalError

    try:
        with Journal.read(run) as journal:
            yield journal
    except OSError as error:
        raise ConfigError(str(error)) from error
    except JournalError as error:
        exit_after("cannot be read", error, code=1)


@verb(
    "export",
    "write the policy of a run's checkpoint as a model folder",
    OPEN_RUN,
    argument("folder", type=Path, help="a new or empty folder for the model"),
    argument(
        "--step",
        type=bounded(int, 0, 10**9),
        metavar="N",
        help="the checkpoint of this step; default: the newest",
    ),
)
def _export(chosen: argparse.Namespace) -> int:
    require_runs(chosen.run)
    with quick_imports():
        from unstale.cli.export import export
        from unstale.durability.checkpoint import CheckpointError

    try:
        step = export(chosen.run, chosen.folder, step=chosen.step)
    except CheckpointError as error:
        exit_after("cannot be exported", error, code=1)
    text = f"the policy of step {step} is in {chosen.folder}"
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
    return 0


@verb(
    "export-trajectories",
    "write a run's trajectories for other tools",
    OPEN_RUN,
    argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="default: jsonl"),
    argument(
        "--content",
        choices=("tokens", "text", "samples"),
        default="tokens",
        help="token columns, readable conversations, or samples of trained tokens; default: tokens",
    ),
    argument("--out", type=Path, metavar="FILE", help="default for jsonl: standard output"),
)
def _export_trajectories(chosen: argparse.Namespace) -> int:
    from unstale.durability.journal import export_rows, write_jsonl, write_parquet
    from unstale.durability.journal.conversations import load_decoder

    if chosen.format == "parquet" and not chosen.out:
        raise ConfigError("--format parquet needs --out FILE")
    with open_journal(chosen.run) as journal:
        try:
            decode = load_decoder(chosen.run) if chosen.content == "text" else str
        except ValueError as error:
            raise ConfigError(str(error)) from error
        rows = export_rows(journal, chosen.content, decode)
        if chosen.format == "parquet":
            with _write_errors(chosen.out):
                write_parquet(rows, chosen.content, chosen.out)
        elif chosen.out:
            with _write_errors(chosen.out), chosen.out.open("w", encoding="utf-8") as file:
                write_jsonl(rows, file)
        else:
            try:
                write_jsonl(rows, sys.stdout)
                sys.stdout.flush()
            except BrokenPipeError:
                # the reader has closed the pipe: write nothing more, not even at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextmanager
def _write_errors(path: Path) -> "Iterator[None]":
    """Return a context that raises `ConfigError` if the file of the argument `--out` cannot be
    written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from error


@verb("journal", "check and summarize a run's journal", OPEN_RUN, JSON)
def _journal(chosen: argparse.Namespace) -> int:
    from unstale.durability.journal import check, content, page, survivors
    from unstale.observe.survivors import terminal_table

    with open_journal(chosen.run) as journal:
        problems = check(journal)
        if chosen.json:
            row = {"content": content(journal), "survivors": survivors(journal)}
            print_json({"problems": problems, **row})
            return 1 if problems else 0
        Console().print(page(journal, problems), highlight=False)
        Console().print(terminal_table(survivors(journal)), highlight=False)
    return 1 if problems else 0


@verb("lint", "explain a recipe's ratios and find wrong settings", RECIPE, CONFIG, JSON)
def _lint(chosen: argparse.Namespace) -> int:
    from unstale.lint import check, page

    verdict = check(configure(chosen))
    if chosen.json:
        print_json(verdict)
    else:
        Console().print(page(verdict), highlight=False)
    return 2 if verdict.refusals else 0


@verb(
    "completion",
    "print the completion script of a shell",
    argument(
        "shell", choices=("bash", "zsh", "tcsh"), help='as in: eval "$(unstale completion bash)"'
    ),
)
def _completion(chosen: argparse.Namespace) -> int:
    from unstale.cli.completion import completion

    sys.stdout.write(completion(chosen.shell, chosen.make_parser) + "\n")
    return 0


@verb(
    "push-to-hub",
    "export a run's policy with a model card",
    RUN,
    argument("--folder", type=Path, metavar="OUT", help="a new folder for the model"),
    argument("--repo", default="", metavar="ORG/NAME", help="a repository on the Hugging Face hub"),
    argument("--public", action="store_true", help="make a new repository public"),
)
def _push_to_hub(chosen: argparse.Namespace) -> int:
    require_runs(chosen.run)
    with quick_imports():
        from unstale.cli.push import push_to_hub

    pushed = push_to_hub(chosen.run, chosen.folder, repo=chosen.repo, public=chosen.public)
    Console(soft_wrap=True).print(pushed, highlight=False, markup=False)
    return 0


@verb(
    "sft",
    "train a recipe's policy on reference replies",
    RECIPE,
    argument(
        "data", type=Path, help="a .jsonl, .json, .csv or .parquet file with messages in each row"
    ),
    CONFIG,
    argument("--folder", type=Path, required=True, metavar="OUT", help="a new folder of the model"),
    argument(
        "--loss",
        choices=("cross_entropy", "otr"),
        default="cross_entropy",
        help="otr weights each token by its probability; default: cross_entropy",
    ),
    argument(
        "--beta",
        type=bounded(float, -10, 0.99),
        default=0.0,
        help="for otr: reward of other tokens; default: 0",
    ),
    argument(
        "--samples",
        type=bounded(int, 0, 1_000_000),
        default=0,
        help="for otr: tokens drawn at each position; default: 0, which takes the expectation",
    ),
    argument("--batch", type=COUNT, default=32, help="conversations in a step; default: 32"),
    argument(
        "--mistakes",
        type=bounded(int, 0, 100),
        default=0,
        help="teach edits of drafts with up to so many mistakes; default: 0",
    ),
)
def _sft(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import fetch_policy

    config = fetch_policy(configure(chosen), file_values(chosen))
    with quick_imports():
        from unstale.cli.sft import SftOptions, sft

    options = SftOptions(
        loss=chosen.loss,
        beta=chosen.beta,
        samples=chosen.samples,
        batch=chosen.batch,
        mistakes=chosen.mistakes,
    )
    console = Console(soft_wrap=True)
    sft(config, chosen.data, chosen.folder, options, console=console)
    console.print(f"the policy is in {chosen.folder}", highlight=False, markup=False)
    return 0


@verb(
    "dpo",
    "train a recipe's policy on pairs of episodes from journals",
    RECIPE,
    argument("runs", type=Path, nargs="+", help="folders of runs"),
    CONFIG,
    argument("--folder", type=Path, required=True, metavar="OUT", help="a new folder of the model"),
    argument(
        "--beta",
        type=bounded(float, 1e-6, 1e6),
        default=0.1,
        help="strength of the pull to the policy before the first step; default: 0.1",
    ),
    argument("--batch", type=COUNT, default=16, help="pairs in a step; default: 16"),
)
def _dpo(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import fetch_policy

    config = fetch_policy(configure(chosen), file_values(chosen))
    require_runs(*chosen.runs)
    with quick_imports():
        from unstale.cli.dpo import DpoOptions, dpo

    options = DpoOptions(beta=chosen.beta, batch=chosen.batch)
    console = Console(soft_wrap=True)
    dpo(config, chosen.runs, chosen.folder, options, console=console)
    console.print(f"the policy is in {chosen.folder}", highlight=False, markup=False)
    return 0


@verb("recipes", "list the recipes")
def _recipes(chosen: argparse.Namespace) -> int:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, recipe in find_recipes().items():
        table.add_row(name, (inspect.getdoc(recipe) or "").splitlines()[0])
    Console().print(table)
    return 0


@verb(
    "replay",
    "repeat the batch at which a run failed",
    argument("run", type=Path, help="the folder of the failed run"),
    argument(
        "--batch", type=Path, help="the saved batch (default: went_wrong.safetensors of the run)"
    ),
)
def _replay(chosen: argparse.Namespace) -> int:
    """Repeat a failed step. Return exit code 0 if it fails again, otherwise 1."""
    require_runs(chosen.run)
    with quick_imports():
        from unstale.cli.replay import replay

    return 0 if replay(chosen.run, chosen.batch) else 1


@verb(
    "same",
    "compare two deterministic runs bit for bit",
    RUN,
    argument("other", type=Path, help="the folder of a run with the same configuration"),
)
def _same(chosen: argparse.Namespace) -> int:
    """Compare two runs. Return exit code 1 if they differ or cannot be read."""
    require_runs(chosen.run, chosen.other)
    with quick_imports():
        from unstale.durability.checkpoint import CheckpointError
        from unstale.durability.compare_runs import differences
        from unstale.durability.journal import JournalError

    try:
        lines = differences(chosen.run, chosen.other)
    except OSError as error:
        raise ConfigError(str(error)) from error
    except (CheckpointError, JournalError) as error:
        lines = [str(error)]
    equal = ["equal bit for bit, except for measured times"]
    for line in lines or equal:
        Console(soft_wrap=True).print(line, highlight=False, markup=False)
    return 1 if lines else 0


@verb(
    "serve",
    "serve a policy to agents, in OpenAI's and Anthropic's formats",
    TRAINED,
    OWN_RECIPE,
    CONFIG,
    argument(
        "--port",
        type=bounded(int, 0, 65535),
        default=0,
        metavar="N",
        help="port on endpoint.host; 0 takes a free one",
    ),
    argument(
        "--token",
        help="API key that clients must send (default: $UNSTALE_TOKEN, which other users of the "
        "machine do not see, or a new one)",
    ),
    LIMIT_TURNS,
)
def _serve(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import configure_trained

    config = configure_trained(chosen)
    try:
        with quick_imports():
            from unstale.cli.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: {install('endpoint')}") from error
    token = chosen.token or os.environ.get("UNSTALE_TOKEN")
    limit = chosen.limit_turns
    serve(chosen.trained, config, token=token, port=chosen.port, limit_turns=limit)
    return 0


@verb(
    "train",
    "run a recipe, or resume a run",
    OPTIONAL_RECIPE,
    CONFIG,
    argument("--resume", type=Path, metavar="RUN", help="resume the run in this folder"),
)
def _train(chosen: argparse.Namespace) -> int:
    if chosen.resume:
        return _resume(chosen)
    if chosen.recipe is None and chosen.config is None:
        raise ConfigError(
            f"train needs a recipe ({', '.join(recipe_names())}, MODULE:FUNCTION), a .toml or "
            ".json file, or --resume and the folder of a run"
        )
    config = configure(chosen)
    new_folder(config)
    refuse_early(config)
    config = fit_context(config, file_values(chosen))  # the policy may have arrived only now
    start_engines(config)
    with quick_imports():
        from unstale.cli.session import train

    train(config, command=shlex.join(["unstale", *chosen.given]))
    return 0


def _resume(chosen: argparse.Namespace) -> int:
    if chosen.recipe is not None:
        raise ConfigError(
            f"a run resumes with its own recipe: leave out {chosen.recipe} or --resume"
        )
    from unstale.cli.resume import (
        changes_to_run,
        load_config,
        require_named_trackers,
        require_own_folder,
    )

    values = file_values(chosen)
    config = load_config(chosen.resume, named=values)
    require_named_trackers(config, values)
    require_own_folder(config, values)
    config = override(config, values)
    changes_to_run(chosen.resume, config)  # raises an error for options that cannot change
    refuse_early(config)
    start_engines(config)
    with quick_imports():
        from unstale.cli.session import resume

    resume(chosen.resume, config)
    return 0
