"""Write docs/options.md: every option with its values, its default and its help.

python -m tools.options_page
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from unstale.config.checks import Section, option_types
from unstale.config.objectives import objectives
from unstale.config.options import Option, field_docs, options, sections
from unstale.config.routes import routes
from unstale.config.tasks import shipped_envs

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
HEAD = """# Options

Look up an option here. `unstale train RECIPE --help all` shows those that a recipe reads, with
their values now. There are three ways to set one:

| where | how |
|---|---|
| command line | `--trainer.lr 1e-5`; options of the run itself have no section: `--max_steps 20` |
| [file](your-own-data.md) | `lr = 1e-5` in the table `[trainer]`; `steps = 20` at the top |
| Python | `RunConfig(recipe="mine", trainer=TrainerConfig(lr=1e-5))`, from `unstale.config` |

The defaults are those of the classes. Recipes set others. A section whose options depend on a
choice, such as `old_logps` on its route, refuses options that the choice does not read. `none` is
a value for options that allow it.

This page is written by `python -m tools.options_page` from the configuration's own help.
"""
NAMES = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + "".join(_section(name, cls) for name, cls in sections().items())


def _section(section: str, cls: type) -> str:
    about = (inspect.getdoc(cls) or "").partition("\n")[0]
    table = "\n".join(
        ["| option | values | default | meaning |", "|---|---|---|---|", *rows_of(section)]
    )
    more = "\n".join(["", *objective_rows(), ""]) if section == "objective" else ""
    return f"\n## {section or 'run'}\n\n{_linked(about)}\n\n{table}\n{more}"


def objective_rows() -> list[str]:
    """Return the table of objectives: the loss of a token, its source and when to use it."""
    rows = [
        f"| `{name}` | {spec.docs.loss} | {spec.docs.source} | {spec.docs.choose} |"
        for name, spec in objectives().items()
    ]
    head = ["| `objective.loss_type` | loss of a token | source | use it |", "|---|---|---|---|"]
    return [*head, *rows]


def rows_of(section: str) -> list[str]:
    """Return the rows of a section's table."""
    return [_row(option) for option in options().values() if option.section == section]


def _row(option: Option) -> str:
    meaning = " ".join(field_docs(option.owner)[option.field].split())
    cells = (
        f"`{option.name}`",
        _values(option),
        _default(option),
        _linked(meaning if meaning.startswith("Only for") else meaning + _only(option)),
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _only(option: Option) -> str:
    """Return which routes or environments read an option, if not all do.

    The help of an option that sections share does not have the values of one of them.
    """
    if not issubclass(option.owner, Section):
        shared = sections()[option.section].readers(option.field)
        return _sentence(shared) if shared else ""
    declared: dict[str, dict[str, type]] = {
        "task": {name: spec.options for name, spec in shipped_envs().items()},
        "old_logps": dict(routes()),
        "objective": dict(objectives()),
    }
    classes = declared.get(option.section, {})
    readers = [name for name, cls in classes.items() if option.field in option_types(cls)]
    return _sentence(readers) if len(readers) < len(classes) else ""


def _sentence(readers: Sequence[str]) -> str:
    return f" Only for {', '.join(f'`{name}`' for name in readers)}."


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = (NAMES.get(kind.__name__, kind.__name__) for kind in option.kinds)
    return " or ".join("none" if kind == "NoneType" else kind.lower() for kind in kinds)


def _default(option: Option) -> str:
    field = next(each for each in fields(option.owner) if each.name == option.field)
    if field.default is MISSING:
        return "the recipe's"
    value = field.default
    text = str(value).lower() if value is None or isinstance(value, bool) else f"{value}"
    return f"`{text}`" if text else "empty"


def _linked(text: str) -> str:
    """Return help with links to the pages that it names."""
    return " ".join(_links(text))


def _links(text: str) -> Iterator[str]:
    for word in text.split(" "):
        bare = word.strip("().,;")
        name = bare.removeprefix("docs/")
        page, _, _ = name.partition("#")
        is_page = name != bare and page.endswith(".md")
        yield word.replace(bare, f"[{page}]({name})") if is_page else word


if __name__ == "__main__":
    text = page()
    if not PAGE.is_file() or PAGE.read_text("utf-8") != text:  # a test may read it meanwhile
        PAGE.write_text(text, encoding="utf-8")
