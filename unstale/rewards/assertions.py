"""Split assertions of a data set into expressions for the tested program and a check of their
values.

In `assert abs(area(2) - 12.57) < 0.01`, the program's process evaluates `area(2)`. The rest is
evaluated in a process without the program, so the program cannot manipulate it.
"""

import ast
import builtins
import copy
import re
import sys
import threading
from dataclasses import dataclass, field

_MODULES = frozenset({"math", "cmath", "collections", "itertools", "datetime", "decimal", "re"})
"""Modules that an assertion may use without an import."""
_BUILTINS = frozenset(dir(builtins))
_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_DIGITS = threading.Lock()
"""A lock for changes of Python's limit on the digits of integers, which holds for all threads."""
_RANDOM = frozenset({"random", "secrets", "uuid", "time"})
_USE = "Put other code into a function check(f) that the test calls at its end"
RAISED = "__raised__"
"""Name of a function that assertions may call in the tested program's process. It makes a call and
returns the class name of the exception raised, with those of its base classes.
"""
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Assertion:
    """A test in two parts: expressions that use the tested program, and a check of their values."""

    questions: tuple[str, ...]
    """Expressions that the process of the tested program evaluates."""
    check: str
    """An expression for the values of `questions`, which it names `_0`, `_1`... Another process
    evaluates it.
    """
    constants: tuple[str, ...]
    """Expressions in `check` that are compared with the program's values."""
    imports: str
    setup: str = ""
    """Statements that the program's process runs before it evaluates `questions`."""


@dataclass(frozen=True, slots=True)
class CheckFunction:
    """A test that calls a function of its own, such as `check`, with a function of the tested
    program.
    """

    source: str
    """The source code of the test without its final call."""
    function: str
    candidate: str
    """The argument of the final call: an expression for the program's function, such as `gcd`."""


def parse_test(test: str) -> Assertion | CheckFunction:
    """Return the parts of a test, given as Python source.

    A test is one or more assertions, also in a `for` loop, or a call in `try` that must raise.
    Imports, assignments and other statements may precede them. A test may also end with a call of
    its own function. Raises ValueError for source of another form, and for a test that does not
    call the program.

    >>> parsed = parse_test("x = 2; assert abs(area(x) - 12.57) < 0.01, 'too far'")
    >>> parsed.questions, parsed.check
    (('area(2)',), 'abs(_0 - 12.57) < 0.01')
    """
    with _DIGITS:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)  # an expected number may have more than 4300 digits
        try:
            return _parsed(test)
        finally:
            sys.set_int_max_str_digits(limit)


def _parsed(test: str) -> Assertion | CheckFunction:
    body = _statements(test)
    match body:
        case [*above, ast.Expr(ast.Call(ast.Name(name), [candidate], []))] if any(
            isinstance(each, ast.FunctionDef) and each.name == name for each in above
        ):
            source = ast.unparse(ast.Module(body[:-1], []))
            return CheckFunction(source, name, ast.unparse(candidate))
    imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
    modules = {getattr(each, "module", None) or each.names[0].name for each in imports}
    if modules & _RANDOM:
        raise ValueError(f"assertions must have the same values in each process. {_USE}: {test!r}")
    tests = [each for each in body if isinstance(each, ast.Assert | ast.For | ast.Try)]
    setup = [each for each in body if each not in imports + tests]
    if not tests or body[-len(tests) :] != tests:
        raise ValueError(
            f"a test is assertions, after imports and assignments. {_USE}, got {test!r}"
        )
    values: dict[str, ast.expr] = {}
    for each in setup:
        match each:
            case ast.Assign([ast.Name(name)], value):
                values[name] = _Inline(values).visit(copy.deepcopy(value))
            case _:  # it has side effects, so that all of them run in the program
                values = {}
                break
    split = _Split(
        {(name.asname or name.name).partition(".")[0] for each in imports for name in each.names}
    )
    checks = [split.truth(_condition(_Inline(values).visit(each), split)) for each in tests]
    check = checks[0] if len(checks) == 1 else ast.BoolOp(ast.And(), checks)
    if not split.questions:
        raise ValueError(f"the test calls no function of the program: {test!r}")
    parts = [check, *(ast.parse(each) for each in split.questions)]
    names = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
    used = sorted(_MODULES & names)
    lines = [*(f"import {module}" for module in used), *map(ast.unparse, imports)]
    return Assertion(
        tuple(split.questions),
        ast.unparse(check),
        tuple(split.constants),
        "\n".join(lines),
        "" if values else "\n".join(map(ast.unparse, setup)),
    )


def _statements(test: str) -> list[ast.stmt]:
    """Return the statements of a test. A test that is only an expression becomes an assertion."""
    text = _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", test.strip())
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not a test: {test!r}: {error}") from error
    body = [each for each in body if getattr(each, "module", "") != "program"]
    match body:
        case [ast.Expr(value)]:
            return [ast.Assert(value)]
    return body


class _Inline(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._values.get(node.id, node))


def _condition(statement: ast.stmt, split: "_Split") -> ast.expr:
    """Return an expression that is true if a statement of a test, such as an assertion, passes."""
    match statement:
        case ast.Assert(test):
            return test
        case ast.For(target, source, body) if all(isinstance(each, ast.Assert) for each in body):
            loops = [
                ast.GeneratorExp(
                    each.test, [ast.comprehension(target, copy.deepcopy(source), [], 0)]
                )
                for each in body
                if isinstance(each, ast.Assert)
            ]
            calls = [ast.Call(ast.Name("all", ast.Load()), [loop], []) for loop in loops]
            return calls[0] if len(calls) == 1 else ast.BoolOp(ast.And(), [*calls])
        case ast.Try([ast.Expr(call), *_], [ast.ExceptHandler(type=kind, body=[*_, last])]) if (
            kind is not None and "False" not in ast.unparse(last)
        ):
            kinds = [each.id for each in ast.walk(kind) if isinstance(each, ast.Name)]
            names = split.ask(f"{RAISED}(lambda: ({ast.unparse(call)}))")
            return ast.parse(f"{names.id} & {set(kinds)!r}", mode="eval").body
    raise ValueError(f"no assertion: {ast.unparse(statement)!r}. {_USE}")


def _truth(node: ast.expr) -> ast.expr:
    """Return the expression `not not node`, whose value is True or False."""
    return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))


@dataclass(slots=True)
class _Split:
    """A rewriter of tests, which separates what the tested program must evaluate.

    Expressions that only the program can evaluate are collected in `questions`. In the test, a
    variable replaces each of them. `known` are names that the program does not define, such as
    those of imports.
    """

    known: set[str]
    questions: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    loops: list[ast.comprehension] = field(default_factory=list)
    """The loops around the expression that is being rewritten."""

    def truth(self, node: ast.expr) -> ast.expr:
        """Return a condition in which variables replace what the program must evaluate."""
        match node:
            case ast.BoolOp(op, values):
                return ast.BoolOp(op, [self.truth(value) for value in values])
            case ast.UnaryOp(ast.Not() as op, operand):
                return ast.UnaryOp(op, self.truth(operand))
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(ast.Name("hasattr" | "callable" | "issubclass")):
                return self._ask(_truth(node))
            case ast.Call(ast.Name("isinstance"), [_, kind]) if self._uses(kind):
                return self._ask(_truth(node))
        if self._is_program(node) or (isinstance(node, ast.Call) and not self._uses(node)):
            return self._ask(_truth(node))
        return self._parts(node)

    def _comparison(self, node: ast.Compare) -> ast.expr:
        """Return a comparison in which variables replace what the program must evaluate.

        The program evaluates a side of an equality as a whole. In inequalities, and in sides that
        have a comparison in them, it evaluates only its own functions and values, because it could
        redefine `abs` or `__eq__`.
        """
        sides = [node.left, *node.comparators]
        uses = [self._uses(side) for side in sides]
        if not any(uses) and isinstance(node.left, ast.Call):  # a function named as a builtin
            uses[0] = True
        if all(uses) and not self.loops:
            return self._ask(_truth(node))
        inner = (each for side in sides for each in ast.walk(side))
        in_parts = any(isinstance(op, _ORDERINGS) for op in node.ops) or any(
            isinstance(each, ast.Compare) for each in inner
        )
        checked = []
        for side, of_program in zip(sides, uses, strict=True):
            if of_program:
                checked.append(
                    self._parts(side) if in_parts and self._uses(side) else self._ask(side)
                )
            else:
                if not self.loops:
                    self.constants.append(ast.unparse(side))
                checked.append(side)
        return ast.Compare(checked[0], node.ops, checked[1:])

    def _parts(self, node: ast.expr) -> ast.expr:
        """Return an expression in which variables replace its smallest parts that use the
        program.
        """
        if self._is_program(node):
            return self._ask(node)
        if not self._uses(node):
            return node
        if isinstance(node, _SCOPES):
            return self._scope(node)
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

    def _scope(self, node: ast.expr) -> ast.expr:
        """Return a comprehension in which variables replace its first iterable, or its elements.

        Raises ValueError for a lambda, or if another part of the comprehension uses the program.
        """
        if not isinstance(node, ast.Lambda):
            first = node.generators[0]  # type: ignore[attr-defined]
            first.iter = self._parts(first.iter)
            if not self._uses(node):
                return node
            if isinstance(node, ast.DictComp) or self.loops or len(node.generators) > 1:  # type: ignore[attr-defined]
                raise ValueError(f"a test must not call the program in {ast.unparse(node)!r}")
            if not any(isinstance(each, ast.BoolOp | ast.IfExp) for each in ast.walk(node)):
                self.loops.append(first)
                node.elt = self.truth(node.elt)  # type: ignore[attr-defined]
                self.loops.pop()
                return node
        raise ValueError(f"a test must not call the program in {ast.unparse(node)!r}")

    def _ask(self, node: ast.expr) -> ast.expr:
        if not self.loops:
            return self.ask(ast.unparse(node))
        values = self.ask(ast.unparse(ast.ListComp(node, self.loops)))
        return ast.parse(f"{values.id}.pop(0)", mode="eval").body

    def ask(self, question: str) -> ast.Name:
        """Add an expression to `questions`. Return the variable that replaces it."""
        name = f"_{len(self.questions)}"
        self.questions.append(question)
        self.known.add(name)
        return ast.Name(name, ast.Load())

    def _is_program(self, node: ast.expr) -> bool:
        """Return True for a name that the program defines, or a call, attribute or item of it."""
        root = node
        while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        return isinstance(root, ast.Name) and self._is_own(root.id)

    def _uses(self, node: ast.expr) -> bool:
        """Return True if an expression contains a name that the program defines."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        bound = {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        } | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        return any(self._is_own(name) for name in names - bound)

    def _is_own(self, name: str) -> bool:
        return name not in self.known | _MODULES | _BUILTINS
