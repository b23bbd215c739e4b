"""The program that evaluates unit tests inside the sandbox, in two kinds of processes.

`unstale.rewards.programs` runs this source. With arguments, the expressions that they name are
evaluated in the module of the tested program, and their values are printed. Without arguments, the
assertions in the standard input are evaluated with such values, where the program does not run. A
value is printed as a literal, so it cannot be an object of the program.
"""

import ast
import json
import numbers
import os
import sys
import types
from typing import Any


def show(value: Any) -> str:
    """Return a value as a literal. Subclasses become the plain type, and exact numbers a float."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(key)}: {show(each)}' for key, each in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(map(show, value))}}}" if value else "set()"
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{show(each)}, ' for each in value)})"
    if isinstance(value, (bool, complex)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real) or type(value).__name__ == "Decimal":
        return repr(float(value)).replace("inf", "1e999")
    return repr(str.__str__(value) if isinstance(value, str) else value)


def read(text: str) -> Any:
    """Return the value of a literal of `show`. Raises ValueError for other text.

    >>> read(show({"a": [float("inf"), frozenset()]}))
    {'a': [inf, set()]}
    """
    tree = ast.parse(text, mode="eval")
    return ast.literal_eval(_Nan().visit(tree))


class _Nan(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "nan":
            return ast.copy_location(ast.Constant(float("nan")), node)
        return node


def evaluate(expressions: list[str]) -> None:
    """Run `program.py` as a module, and print the values of expressions in it as a last line."""
    program = sys.modules["program"] = types.ModuleType("program")
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), program.__dict__)
    values = tuple(eval(expression, program.__dict__) for expression in expressions)
    sys.stdout.write("\n" + show(values))
    sys.stdout.flush()
    os._exit(0)


def check(test: dict[str, Any]) -> bool | str:
    """Return if an assertion holds for its values, or the error in the test itself.

    Without values, or if they cannot be compared, it does not hold.
    """
    names: dict[str, Any] = {}
    try:
        exec(test["imports"], names)
        for constant in test["constants"]:
            value = eval(constant, names)
            if value != value:
                return f"{constant} is not equal to any value"
    except Exception as error:  # noqa: BLE001 - of the test's own code
        return f"{type(error).__name__}: {error}"
    try:
        values = read(test["values"])
        names |= {f"_{number}": value for number, value in enumerate(values)}
        return bool(eval(test["check"], names))
    except Exception:  # noqa: BLE001 - of values that the program chose
        return False


if __name__ == "__main__":
    if sys.argv[1:]:
        evaluate(sys.argv[1:])
    sys.stdout.write("\n" + json.dumps([check(test) for test in json.load(sys.stdin)]))
