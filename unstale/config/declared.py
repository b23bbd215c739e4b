"""Read the choices of an option from the source of their functions, without importing torch.

A decorated function of `unstale/algorithms` is a choice: `@estimator` in advantages.py, `@control`
in corrections.py, `@objective` in objectives.py. Its name is the value of the option, its
keyword-only parameters are options of the same section, and the first line of its docstring is its
help.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unstale.config.checks import ConfigError, nearest

ALGORITHMS = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True, slots=True)
class Choice:
    """A function that an option can select."""

    name: str
    help: str
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class ChoiceOf:
    """The functions of a module that an option selects from, as a rule in the option's type."""

    module: str
    decorator: str

    def choices(self) -> dict[str, Choice]:
        return choices(self.module, self.decorator)

    def readers(self, option: str) -> list[str]:
        """Return the functions that have an option."""
        return [name for name, choice in self.choices().items() if option in choice.options]

    def check(self, name: str, value: str) -> None:
        if value not in self.choices():
            raise ConfigError(f"{name} cannot be {value!r}{nearest(value, list(self.choices()))}")


@cache
def choices(module: str, decorator: str) -> dict[str, Choice]:
    """Return the functions of `algorithms/<module>.py` that carry a decorator, by name.

    >>> sorted(choices("advantages", "estimator")["turn_level"].options)
    ['discount', 'std']
    """
    tree = ast.parse((ALGORITHMS / f"{module}.py").read_text(encoding="utf-8"))
    choices = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _carries(node, decorator):
            options = frozenset(argument.arg for argument in node.args.kwonlyargs)
            help_line = (ast.get_docstring(node) or "").partition("\n")[0]
            choices[node.name] = Choice(node.name, help_line, options)
    return choices


def _carries(function: ast.FunctionDef, decorator: str) -> bool:
    names = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(isinstance(name, ast.Name) and name.id == decorator for name in names)
