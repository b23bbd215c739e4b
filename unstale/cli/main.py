"""The entry point of the command line. Importing this module does not import torch.

A wrong command ends with one line of text and exit code 2.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from unstale import __version__
from unstale.cli.failures import (
    RunFailed,
    end_despite_threads,
    exhausted,
    exit_after,
    exit_code,
)
from unstale.cli.recipe_options import (
    option_names,
    options_help,
    refuse_unknown,
    split_options,
    take_file,
)
from unstale.cli.supervisor import SUPERVISED, supervise
from unstale.cli.verbs import add_verb, unknown_verb, verb_names
from unstale.config import ConfigError
from unstale.durability.console import escape_logs, escape_tracebacks, keep_outputs
from unstale.stop_signals import note_end

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

_PLAIN = {
    r"^argument ": "",
    r"the following arguments are required: (.*)": r"missing: \1",
    r"invalid int value: (.*)": r"must be a whole number, got \1",
    r"invalid float value: (.*)": r"must be a number, got \1",
    r"invalid choice: (.*) \(choose from (.*)\)": r"must be one of \2, got \1",
}
"""Regular expressions for error messages of argparse, each with a plainer text."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 the run failed, 2 the command is wrong, 130 interrupted.

    Without `arguments`, those of the process are used.
    """
    if "" not in sys.path:
        # `task.env` may name a module in the current folder. The folder is last, so that no file
        # in it replaces a library. `import_user_code` looks there first.
        sys.path.append("")
    if arguments is None:
        keep_outputs()
        escape_tracebacks()
        escape_logs()
    try:
        chosen = parse(sys.argv[1:] if arguments is None else arguments)
        if arguments is None and chosen.verb in SUPERVISED:
            code = supervise()
            if code is not None:
                os._exit(code)
        sys.exit(chosen.act(chosen))
    except ConfigError as error:
        exit_after("unstale", error, code=2)
    except RunFailed as error:
        exit_after("the run failed", error, code=1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (OSError, MemoryError, RuntimeError, SystemError, ImportError) as error:
        if reason := exhausted(error):
            exit_after("the system has too few resources", reason, code=1)
        raise
    finally:
        if arguments is None:  # the command runs in a separate process
            end_despite_threads()
            note_end(exit_code(sys.exception()))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return a command and its arguments as the attributes of a namespace.

    `values` has the options of a run, by name, and `given` all words of the command line. Raises
    `ConfigError` for a word that the command does not accept.
    """
    words = list(arguments)
    command = words[0] if words and not words[0].startswith("-") else None
    if command is not None and command not in verb_names():
        raise unknown_verb(command)
    parser, verbs = make_parser(command)
    values: dict[str, Any] = {}
    verb = verbs[command] if command is not None else None
    if verb is not None and verb.get_default("takes_options"):
        words, values = split_options(words)
        if "-h" in words or "--help" in words:
            takes_recipe = any(action.dest == "recipe" for action in verb.actions)
            whose = "a recipe" if takes_recipe else "a run, with their defaults"
            verb.epilog = options_help(words, values, whose)
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        refuse_unknown(unknown, verb.option_strings if verb else ())
    chosen.given = list(arguments)
    chosen.make_parser = make_parser
    chosen.values = values
    if verb is not None and verb.get_default("takes_options") and "recipe" in chosen:
        take_file(chosen)
    return chosen


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises `ConfigError` where argparse would exit."""

    def __init__(self, **options: Any) -> None:
        defaults = {
            "allow_abbrev": False,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        }
        super().__init__(**{**defaults, **options})

    @property
    def actions(self) -> list[argparse.Action]:
        """The argparse actions for the arguments of the command."""
        return self._actions

    @property
    def option_strings(self) -> list[str]:
        """The names of the command's own options and, if it accepts them, of the options of a
        run.
        """
        own = [word for action in self._actions for word in action.option_strings]
        of_recipe = [f"--{name}" for name in option_names()]
        return own + of_recipe if self.get_default("takes_options") else own

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with argparse's message in plain words."""
        for pattern, words in _PLAIN.items():
            message = re.sub(pattern, words, message)
        raise ConfigError(f"{message}; see {self.prog} --help")


def make_parser(only: str | None = None) -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and the parsers of its commands, by name.

    With `only`, the parser has only the command of this name, and modules of other commands are not
    imported.
    """
    parser = _Parser(
        prog="unstale",
        description="Asynchronous reinforcement learning for LLM agents.",
        epilog="`unstale COMMAND --help` explains a command and its options.",
    )
    parser.add_argument("--version", action="version", version=f"unstale {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", required=True, parser_class=_Parser, metavar="COMMAND"
    )
    for name in verb_names() if only is None else [only]:
        add_verb(name, verbs, listed=only is None)
    return parser, verbs.choices


if __name__ == "__main__":
    main()
