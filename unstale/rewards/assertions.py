"""Assertions of a data set, split into what the tested program evaluates and what it must not see.

In `assert abs(area(2) - 12.57) < 0.01` the program evaluates `area(2)`. The rest is evaluated where
the program does not run.
"""

import ast
import builtins
from dataclasses import dataclass, field

_MODULES = frozenset({"math", "cmath", "collections", "itertools", "datetime", "decimal", "re"})
"""Modules that an assertion may use without an import."""
_BUILTINS = frozenset(dir(builtins))
_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Assertion:
    """An assertion in two parts."""

    questions: tuple[str, ...]
    """Expressions that are evaluated in the program."""
    check: str
    """An expression with the names `_0`, `_1`... for the values of the questions."""
    constants: tuple[str, ...]
    """The expressions in `check` that do not depend on the program."""
    imports: str

    @property
    def literal(self) -> str | None:
        """The literal that the only question must be equal to. None for other assertions."""
        match ast.parse(self.check, mode="eval").body:
            case ast.Compare(left=ast.Name("_0"), ops=[ast.Eq()], comparators=[right]):
                try:
                    ast.literal_eval(right)
                except ValueError:
                    return None
                return ast.unparse(right)
        return None


def parse_assertion(test: str) -> Assertion:
    """Return the parts of an assertion. Imports may stand before it.

    Raises ValueError for text of another form, for an assertion that uses no program, and for one
    that compares only values of the program.

    >>> parsed = parse_assertion("assert abs(area(2) - 12.57) < 0.01, 'too far'")
    >>> parsed.questions, parsed.check
    (('area(2)',), 'abs(_0 - 12.57) < 0.01')
    """
    text = test.strip()
    try:
        if not text.startswith(("assert", "import ", "from ")):
            text = f"assert {text}"
        *imports, last = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not a test: {test!r}: {error}") from error
    are_imports = all(isinstance(each, ast.Import | ast.ImportFrom) for each in imports)
    if not isinstance(last, ast.Assert) or not are_imports:
        raise ValueError(f"a test is one assertion, after imports, got {test!r}")
    known = {
        (alias.asname or alias.name).partition(".")[0]
        for each in imports
        if isinstance(each, ast.Import | ast.ImportFrom)
        for alias in each.names
    }
    split = _Split(known)
    check = split.truth(last.test)
    if not split.questions:
        raise ValueError(f"the test calls no function of the program: {test!r}")
    used = sorted(_MODULES & {each.id for each in ast.walk(check) if isinstance(each, ast.Name)})
    lines = [*(f"import {module}" for module in used), *map(ast.unparse, imports)]
    return Assertion(
        tuple(split.questions), ast.unparse(check), tuple(split.constants), "\n".join(lines)
    )


@dataclass(slots=True)
class _Split:
    """Replaces what the program evaluates by names. `known` are the names that imports define."""

    known: set[str]
    questions: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)

    def truth(self, node: ast.expr) -> ast.expr:
        """Return a condition without the program's parts."""
        match node:
            case ast.BoolOp(op, values):
                return ast.BoolOp(op, [self.truth(value) for value in values])
            case ast.UnaryOp(ast.Not() as op, operand):
                return ast.UnaryOp(op, self.truth(operand))
            case ast.Compare():
                return self._comparison(node)
        if self._is_program(node) or (isinstance(node, ast.Call) and not self._uses(node)):
            node = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))
            return self._ask(node)
        return self._parts(node)

    def _comparison(self, node: ast.Compare) -> ast.expr:
        """Return a comparison. A side of an equality is evaluated as a whole by the program.

        Of an inequality, only the program's own values are: it could redefine `abs` otherwise.
        """
        sides = [node.left, *node.comparators]
        uses = [self._uses(side) for side in sides]
        if not any(uses) and isinstance(node.left, ast.Call):  # a function named as a builtin
            uses[0] = True
        if all(uses):
            raise ValueError(f"the test has no expected value: {ast.unparse(node)!r}")
        in_parts = any(isinstance(op, _ORDERINGS) for op in node.ops)
        checked = []
        for side, of_program in zip(sides, uses, strict=True):
            if of_program:
                checked.append(
                    self._parts(side) if in_parts and self._uses(side) else self._ask(side)
                )
            else:
                self.constants.append(ast.unparse(side))
                checked.append(side)
        return ast.Compare(checked[0], node.ops, checked[1:])

    def _parts(self, node: ast.expr) -> ast.expr:
        """Return an expression with names for the smallest parts that the program evaluates."""
        if self._is_program(node):
            return self._ask(node)
        if not self._uses(node):
            return node
        if isinstance(node, _SCOPES):
            raise ValueError(f"a test must not call the program in {ast.unparse(node)!r}")
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, name, self._parts(value))
            elif isinstance(value, list):
                parts = [
                    self._parts(each) if isinstance(each, ast.expr) else each for each in value
                ]
                setattr(node, name, parts)
            if isinstance(value, list) and value and isinstance(value[0], ast.keyword):
                for keyword in value:
                    keyword.value = self._parts(keyword.value)
        return node

    def _ask(self, node: ast.expr) -> ast.expr:
        self.questions.append(ast.unparse(node))
        return ast.Name(f"_{len(self.questions) - 1}", ast.Load())

    def _is_program(self, node: ast.expr) -> bool:
        """Return True for a name of the program, and for what is called or read of it."""
        root = node
        while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        return isinstance(root, ast.Name) and self._is_own(root.id)

    def _uses(self, node: ast.expr) -> bool:
        """Return True if an expression has a name of the program."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        bound = {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        } | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        return any(self._is_own(name) for name in names - bound)

    def _is_own(self, name: str) -> bool:
        return name not in self.known | _MODULES | _BUILTINS
