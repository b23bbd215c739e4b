"""The command line. Errors a user can mend are one line and exit code 2; nothing here imports torch before it must."""

import argparse
import dataclasses
import inspect
import os
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unstale.config import ConfigError, RunConfig, install, nearest
from unstale.config.options import field_docs as field_docs
from unstale.config.renamed import refuse_renamed
from unstale.planner.simulate_command import add as planned
from unstale.recipes import RECIPES

if TYPE_CHECKING:  # the journal brings torch along
    from unstale.durability.journal import JournalReader

CUT_SHORT = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `unstale`. Leaves with 0, 1 (the run failed), 2 (the command cannot be right) or 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "" not in sys.path:
        sys.path.append("")  # a module that task.env names may lie in the current folder
    try:
        chosen = _parser(given).parse_args(given)
        chosen.given = given
        sys.exit(chosen.act(chosen))
    except ConfigError as error:
        _complain(str(error))


def _complain(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]unstale:[/] {escape(message)}", highlight=False
    )
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """argparse, with errors in one line that names the nearest words."""

    known: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            refuse_renamed(unknown[0].split("=")[0].removeprefix("--"), "command line")
            options = getattr(found, "knobs", self.known)
            raise ConfigError(
                f"unknown argument {unknown[0]}{nearest(unknown[0].split('=')[0], options)}"
            )
        return found


def _parser(given: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="unstale", description="Asynchronous RL for language-model agents.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser, metavar="VERB")

    train = verbs.add_parser("train", help="run a recipe", allow_abbrev=False)
    train.add_argument("recipe", nargs="?", help=f"one of: {', '.join(RECIPES)}")
    train.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder instead"
    )
    train.set_defaults(act=_train)

    lint = verbs.add_parser(
        "lint", help="what a recipe's ratios mean, and whether they can", allow_abbrev=False
    )
    lint.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    lint.set_defaults(act=_lint)

    evaluate = verbs.add_parser(
        "eval", help="success of a run's policy on a recipe's held-out tasks", allow_abbrev=False
    )
    evaluate.add_argument(
        "trained", type=Path, metavar="folder", help="a run folder or a model folder"
    )
    evaluate.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    evaluate.add_argument(
        "--k", nargs="+", type=_reader(int), default=[1], metavar="K", help="pass@k. Now: 1"
    )
    evaluate.add_argument(
        "--attempts", type=_reader(int), metavar="N", help="at each task. Now: the largest k"
    )
    evaluate.set_defaults(act=_eval)

    versus = verbs.add_parser(
        "compare", help="run arms of a recipe against each other", allow_abbrev=False
    )
    versus.add_argument("recipe", nargs="?", help=f"one of: {', '.join(RECIPES)}")
    versus.add_argument(
        "--routes", nargs="+", default=[], metavar="ROUTE", help="an arm for each of these routes"
    )
    versus.add_argument(
        "--arms", nargs="+", default=[], metavar="'NAME: KNOB=VALUE ...'", help="an arm for each"
    )
    versus.add_argument(
        "--seeds", type=_reader(int), default=3, metavar="N", help="runs of every arm. Now: 3"
    )
    versus.add_argument(
        "--jobs", type=_reader(int), default=1, metavar="N", help="runs at the same time. Now: 1"
    )
    versus.add_argument(
        "--report", type=Path, metavar="FOLDER", help="only write the page of a comparison (again)"
    )
    versus.set_defaults(act=_compare)

    for verb in (train, lint, evaluate, _add_serve(verbs), versus):
        recipe = (
            RECIPES[given[position]]()
            if (position := _recipe_position(given)) is not None
            else None
        )
        _add_knobs(verb, recipe)

    report = verbs.add_parser(
        "report", help="write (again) the report of a run", allow_abbrev=False
    )
    report.add_argument("run", type=Path, help="a run folder")
    report.set_defaults(act=_report)

    audit = verbs.add_parser(
        "audit", help="every route on the tokens of a recorded run", allow_abbrev=False
    )
    audit.add_argument("run", type=Path, help="a run folder, trained with --audit.record true")
    audit.add_argument(
        "--routes", nargs="+", default=[], metavar="ROUTE", help="these only. Now: all"
    )
    audit.add_argument(
        "--alpha",
        nargs="+",
        type=_reader(float),
        default=[0.5],
        help="constant weights of interp_prox_*. Now: 0.5",
    )
    audit.set_defaults(act=_audit)

    journal = verbs.add_parser(
        "journal", help="what a run's journal holds, and if it is sound", allow_abbrev=False
    )
    journal.add_argument("run", type=Path, help="a run folder; the run may be going on")
    journal.set_defaults(act=_journal)

    export = verbs.add_parser(
        "export-trajectories", help="a run's trajectories for other tools", allow_abbrev=False
    )
    export.add_argument("run", type=Path, help="a run folder; the run may be going on")
    export.add_argument(
        "--format", choices=("jsonl", "parquet"), default="jsonl", help="Now: jsonl"
    )
    export.add_argument(
        "--out", type=Path, metavar="FILE", help="jsonl goes to standard output without it"
    )
    export.set_defaults(act=_export)

    again = verbs.add_parser(
        "replay", help="a number that went wrong in a run, again", allow_abbrev=False
    )
    again.add_argument("run", type=Path, help="the folder of the run that failed")
    again.add_argument(
        "--batch", type=Path, help="the file that was kept. Now: went_wrong.safetensors of the run"
    )
    again.set_defaults(act=_replay)

    same = verbs.add_parser(
        "same", help="whether two deterministic runs are equal, bit for bit", allow_abbrev=False
    )
    same.add_argument("run", type=Path, help="a run folder")
    same.add_argument("other", type=Path, help="the folder of a run with the same configuration")
    same.set_defaults(act=_same)

    _add_without_run(verbs)
    return parser


def _add_serve(verbs: Any) -> _Parser:
    served: _Parser = verbs.add_parser(
        "serve", help="a policy behind an OpenAI endpoint", allow_abbrev=False
    )
    served.add_argument(
        "trained", type=Path, metavar="folder", help="a run folder or a model folder"
    )
    served.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    served.add_argument(
        "--port", type=_reader(int), default=0, metavar="N", help="on loopback; 0 is any. Now: 0"
    )
    told = os.environ.get("UNSTALE_TOKEN")
    served.add_argument(
        "--token", default=told, help="that is asked for. Now: $UNSTALE_TOKEN, or a new one"
    )
    served.set_defaults(act=_serve)
    return served


def _add_without_run(verbs: Any) -> None:
    """Verbs that need neither a run nor a recipe."""
    verbs.add_parser("recipes", help="list the recipes", allow_abbrev=False).set_defaults(
        act=_recipes
    )
    template = verbs.add_parser(
        "check-template", help="whether its conversations go on exactly", allow_abbrev=False
    )
    template.add_argument(
        "folder", type=Path, help="a model folder, or the folder of its tokenizer"
    )
    template.add_argument(
        "--conversations", type=_reader(int), default=1000, metavar="N", help="Now: 1000"
    )
    template.set_defaults(act=_check_template)
    planned(verbs)


def _recipe_position(given: Sequence[str]) -> int | None:
    """Where the recipe's name stands, once a verb that takes one was given."""
    place = {"train": 1, "lint": 1, "eval": 2, "serve": 2, "compare": 1}.get(
        given[0] if given else ""
    )
    if place is None or len(given) <= place or given[place].startswith("-"):
        return None
    _require_recipe(given[place])
    return place


def _require_recipe(name: str) -> None:
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, list(RECIPES))}")


def _add_knobs(parser: _Parser, recipe: RunConfig | None) -> None:
    """One option per knob of `RunConfig`; its help is the docstring under the field."""
    names = []
    for section, cls, docs in _documented():
        group = parser.add_argument_group(section or "run", inspect.getdoc(cls))
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(_types(cls)[field.name]) or field.name == "recipe":
                continue
            name = f"{section}.{field.name}" if section else field.name
            shown = _default(recipe, name) if recipe else field.default
            group.add_argument(
                f"--{name}",
                type=_reader(_types(cls)[field.name]),
                default=argparse.SUPPRESS,
                metavar=_metavar(_types(cls)[field.name]),
                help=f"{docs.get(field.name, '')} Now: {shown}".replace("%", "%%"),
            )
            names.append(f"--{name}")
    parser.set_defaults(knobs=tuple(names))


def _sections() -> Iterator[tuple[str, Any]]:
    yield "", RunConfig
    for field in dataclasses.fields(RunConfig):
        kind = _types(RunConfig)[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield field.name, kind


@cache
def _documented() -> list[tuple[str, Any, dict[str, str]]]:
    """Every section, with the docstrings of its fields: reading them takes longer than all other parsing."""
    return [(section, cls, field_docs(cls)) for section, cls in _sections()]


def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _default(recipe: RunConfig, name: str) -> Any:
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    return _plain(kind).__name__.upper() + ("|none" if _optional(kind) else "")


def _optional(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _plain(kind: Any) -> Any:
    """`float` for `float` and for `float | None`."""
    return typing.get_args(kind)[0] if _optional(kind) else kind


def _reader(kind: Any) -> Callable[[str], Any]:
    """What turns an option's text into a value of the field's type."""

    def read(text: str) -> Any:
        if typing.get_origin(kind) is Literal:
            if text not in typing.get_args(kind):
                raise argparse.ArgumentTypeError(
                    f"cannot be {text!r}{nearest(text, typing.get_args(kind))}"
                )
            return text
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
            return text.lower() == "true"
        if _optional(kind) and text.lower() == "none":
            return None
        try:
            return _plain(kind)(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[_plain(kind)]
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None

    return read


def configure(chosen: argparse.Namespace) -> RunConfig:
    """The recipe with the knobs that were given."""
    _require_recipe(chosen.recipe)
    return override(RECIPES[chosen.recipe](), chosen)


def override(config: RunConfig, chosen: argparse.Namespace) -> RunConfig:
    """With the knobs that were given in place of its own."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in vars(chosen).items():
        if f"--{name}" in chosen.knobs:
            section, _, field = name.rpartition(".")
            changes.setdefault(section, {})[field] = value
    top = changes.pop("", {})
    sections = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in changes.items()
    }
    return dataclasses.replace(config, **sections, **top)


def _train(chosen: argparse.Namespace) -> int:
    if chosen.resume:
        return _resume(chosen)
    if chosen.recipe is None:
        raise ConfigError(
            f"train what? Name a recipe ({', '.join(RECIPES)}), or a run to go on with (--resume RUN)"
        )
    config = configure(chosen)
    from unstale.cli.session import train

    return _run(lambda: train(config, command=shlex.join(["unstale", *chosen.given])))


def _resume(chosen: argparse.Namespace) -> int:
    if chosen.recipe is not None:
        raise ConfigError(
            f"a run goes on as the recipe that it is: leave {chosen.recipe} out, or leave --resume out"
        )
    from unstale.cli.resume import stored
    from unstale.cli.session import resume

    named = vars(chosen).get("task.env", "")
    config = override(stored(chosen.resume, named_env=named), chosen)
    return _run(lambda: resume(chosen.resume, config))


def _lint(chosen: argparse.Namespace) -> int:
    """2 if the recipe is refused."""
    from unstale.lint import check, page

    verdict = check(configure(chosen))
    Console().print(page(verdict), highlight=False)
    return 2 if verdict.refusals else 0


def _run(work: Callable[[], object]) -> int:
    """The exit code of a run: 0, 1 when its machinery failed, 130 after Ctrl-C."""
    from unstale.cli.session import RunFailed

    try:
        work()
    except RunFailed as failure:
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]the run failed:[/] {escape(str(failure))}"
        )
        return 1
    except KeyboardInterrupt:
        return CUT_SHORT
    return 0


def _eval(chosen: argparse.Namespace) -> int:
    config, attempts = (
        configure(chosen),
        max(chosen.k) if chosen.attempts is None else chosen.attempts,
    )
    if min(chosen.k) < 1 or max(chosen.k) > attempts:
        raise ConfigError(
            f"--k is at least 1 and at most --attempts ({attempts}), got {' '.join(map(str, chosen.k))}"
        )
    from unstale.cli.session import evaluate

    def grade() -> None:
        grade = evaluate(chosen.trained, config, attempts=attempts)
        rows = {f"avg@{attempts}": grade.average} | {
            f"pass@{k}": grade.passed(k) for k in sorted(set(chosen.k) - {1})
        }
        table = Table("", "held-out success", "95% interval", "", title=str(grade))
        for name, found in rows.items():
            table.add_row(
                name, f"{found.value:.1%}", f"{found.low:.1%} to {found.high:.1%}", found.interval
            )
        Console().print(table)

    return _run(grade)


def _serve(chosen: argparse.Namespace) -> int:
    config = configure(chosen)
    try:
        from unstale.cli.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: {install('endpoint')}") from error
    return _run(lambda: serve(chosen.trained, config, token=chosen.token, port=chosen.port))


def _compare(chosen: argparse.Namespace) -> int:
    from unstale.cli.compare import Arm, compare, plan
    from unstale.observe.report.compare_page import write_comparison

    if chosen.report:
        Console(soft_wrap=True).print(str(write_comparison(chosen.report)), highlight=False)
        return 0
    if not chosen.recipe:
        raise ConfigError("compare needs a recipe, or --report and the folder of a comparison")
    base = [
        f"--{name}={_word(value)}"
        for name, value in vars(chosen).items()
        if f"--{name}" in chosen.knobs
    ]
    train = _parser(["train", chosen.recipe])

    def configured(words: Sequence[str]) -> RunConfig:
        return configure(train.parse_args(["train", chosen.recipe, *words]))

    arms = [*map(Arm.of_route, chosen.routes), *map(Arm.parse, chosen.arms)]
    command = shlex.join(["unstale", *chosen.given])
    try:
        compare(
            plan(arms, chosen.seeds, base=base, configure=configured),
            jobs=chosen.jobs,
            command=command,
        )
    except KeyboardInterrupt:
        return CUT_SHORT
    return 0


def _word(value: Any) -> str:
    """A knob's value as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _replay(chosen: argparse.Namespace) -> int:
    """0 if it went wrong again, 1 if not."""
    from unstale.cli.replay import replay

    return 0 if replay(chosen.run, chosen.batch) else 1


def _audit(chosen: argparse.Namespace) -> int:
    from unstale.cli.audit import audit

    try:
        audit(chosen.run, routes=chosen.routes, alphas=chosen.alpha)
    except KeyboardInterrupt:
        return CUT_SHORT
    return 0


def _report(chosen: argparse.Namespace) -> int:
    from unstale.cli.survivors import write_survivors
    from unstale.observe.report.page import told_report

    write_survivors(chosen.run)
    Console(soft_wrap=True).print(told_report(chosen.run), highlight=False, markup=False)
    return 0


@contextmanager
def _opened(run: Path) -> "Iterator[JournalReader]":
    """The journal of a run folder. A damaged one is told in a line and ends with 1."""
    from unstale.durability.journal import Journal, JournalError

    try:
        with Journal.read(run) as journal:
            yield journal
    except OSError as error:
        raise ConfigError(str(error)) from error
    except JournalError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]damaged:[/] {escape(str(error))}", highlight=False
        )
        sys.exit(1)


def _journal(chosen: argparse.Namespace) -> int:
    """1 if something is wrong with it."""
    from unstale.durability.journal import check, page, survivors
    from unstale.observe.report.survivors import table

    with _opened(chosen.run) as journal:
        wrong = check(journal)
        Console().print(page(journal, wrong), highlight=False)
        Console().print(table(survivors(journal).row()), highlight=False)
    return 1 if wrong else 0


def _export(chosen: argparse.Namespace) -> int:
    from unstale.durability.journal import write_jsonl, write_parquet

    if chosen.format == "parquet" and not chosen.out:
        raise ConfigError("--format parquet needs --out FILE")
    with _opened(chosen.run) as journal:
        if chosen.format == "parquet":
            write_parquet(journal, chosen.out)
        elif chosen.out:
            with chosen.out.open("w", encoding="utf-8") as file:
                write_jsonl(journal, file)
        else:
            try:
                write_jsonl(journal, sys.stdout)
                sys.stdout.flush()
            except (
                BrokenPipeError
            ):  # who reads has seen enough; nothing more may be written, not even at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _same(chosen: argparse.Namespace) -> int:
    """1 if they are not, or cannot be read."""
    from unstale.durability.checkpoint import CheckpointError
    from unstale.durability.compare_runs import differences
    from unstale.durability.journal import JournalError

    try:
        found = differences(chosen.run, chosen.other)
    except OSError as error:
        raise ConfigError(str(error)) from error
    except (CheckpointError, JournalError) as error:
        found = [str(error)]
    for text in found:
        Console(soft_wrap=True).print(text, highlight=False, markup=False)
    if not found:
        Console().print("the same, bit for bit, in all that was not measured", highlight=False)
    return 1 if found else 0


def _check_template(chosen: argparse.Namespace) -> int:
    from unstale.cli.check_template import check_template

    return 0 if check_template(chosen.folder, conversations=chosen.conversations) else 1


def _recipes(chosen: argparse.Namespace) -> int:
    listed = Table.grid(padding=(0, 2))
    listed.add_column(style="bold", no_wrap=True)
    for name, recipe in RECIPES.items():
        listed.add_row(name, (inspect.getdoc(recipe) or "").splitlines()[0])
    Console().print(listed)
    return 0


if __name__ == "__main__":
    main()
