"""Find the choices of an option in the source of functions, without importing torch.

Each decorated function of `unstale/algorithms` is one choice: `@estimator` in advantages.py,
`@control` in corrections.py. The function's name is the value of the option that chooses it. Its
keyword-only parameters are the names of other options of the same section, whose values it gets.
`add_choice` adds functions of other files. Estimators of other distributions are called without
options.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path

from unstale.config.plugins import added_names

ALGORITHMS = Path(__file__).parents[1] / "algorithms"


@cache
def choices(module: str, decorator: str) -> dict[str, frozenset[str]]:
    """Return the names of the decorated functions in a file of `algorithms`, each with its options.

    The options are its keyword-only parameters. `module` is the name of the file without `.py`, and
    `decorator` that of the decorator without `@`.

    >>> sorted(choices("advantages", "estimator")["turn_level"])
    ['discount', 'std']
    """
    tree = ast.parse((ALGORITHMS / f"{module}.py").read_text(encoding="utf-8"))
    own = {
        node.name: frozenset(argument.arg for argument in node.args.kwonlyargs)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and _carries(node, decorator)
    }
    return {**own, **dict.fromkeys(added_names(f"unstale.{decorator}s", own), frozenset[str]())}


def add_choice(module: str, decorator: str, function: Callable[..., object]) -> None:
    """Add a function of another file to what `choices(module, decorator)` returns.

    The decorator itself calls this.
    """
    parameters = inspect.signature(function).parameters.values()
    options = frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    choices(module, decorator)[function.__name__] = options


def _carries(function: ast.FunctionDef, decorator: str) -> bool:
    names = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(isinstance(name, ast.Name) and name.id == decorator for name in names)
