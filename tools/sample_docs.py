"""Draw docstrings and documentation paragraphs at random, for a reader who does not know the code.

Usage: python -m tools.sample_docs --seed 7 --count 30
"""

import argparse
import ast
import inspect
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the qualified name and docstring of a module and its classes, functions and fields."""
    module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    stack: list[tuple[str, ast.AST]] = [(module, ast.parse(path.read_text()))]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield name, text
            body = node.body
        else:
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                stack.append((f"{name}.{statement.name}", statement))
            field = _assigned_name(before)
            if field and isinstance(statement, ast.Expr):
                value = statement.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield f"{name}.{field}", inspect.cleandoc(value.value)


def _assigned_name(node: ast.AST | None) -> str:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Attribute(attr=name)):
            return name
    return ""


def paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `(file, paragraph)` of a page: prose of at least 12 words, without tables and code."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip().splitlines()
        if not lines or lines[0].startswith(("#", "|", "    ", "![")):
            continue
        if len(block.split()) >= 12:
            yield str(path.relative_to(ROOT)), block.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    chosen = parser.parse_args()
    drawn: list[tuple[str, str]] = []
    for path in sorted((ROOT / "unstale").rglob("*.py")):
        drawn.extend(docstrings(path))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        drawn.extend(paragraphs(path))
    for number, (name, text) in enumerate(
        random.Random(chosen.seed).sample(drawn, chosen.count), 1
    ):
        print(f"--- {number}. {name}\n{text}\n")


if __name__ == "__main__":
    main()
