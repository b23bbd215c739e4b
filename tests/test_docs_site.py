"""The docs site: complete without its own environment, and a checker that finds what it should.

`make docs` builds the site. These tests check its sources: every page is in the navigation, every
link and anchor exists, every command, public name and option is explained.
"""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import unstale
from tools import options_page, techniques_page
from tools.check_site import problems
from unstale.cli.main import make_parser, parse
from unstale.cli.recipe_options import configure, option_names
from unstale.config import ObjectiveConfig
from unstale.config.options import options
from unstale.config.techniques import techniques
from unstale.lint import check
from unstale.recipes import RECIPES

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks" / "results").glob("*.md"),
]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in plain}


def in_navigation(entries: Any) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from in_navigation(target)


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(in_navigation(config["nav"]))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages.append(ROOT / "benchmarks" / "results" / "README.md")
    assert sorted(listed) == sorted(page.relative_to(ROOT).as_posix() for page in pages)


def test_every_link_and_anchor_exists() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in LINK.findall(prose(page)):
            to = page.parent / target if target else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append(f"{page.name} links to {target}#{anchor}")
    assert not broken


def test_every_command_is_explained_with_its_arguments() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    _, verbs = make_parser()
    assert sections.keys() == verbs.keys()
    of_recipes = {f"--{name}" for name in option_names()}
    for name, parser in verbs.items():
        words = {word for word in parser.option_strings if word.startswith("--")}
        missing = [
            word
            for word in words - of_recipes - {"--help"}
            if not re.search(rf"(?<![\w-]){word}(?![\w-])", sections[name])
        ]
        assert f"unstale {name}" in sections[name] and not missing, (name, missing)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    names = {name.rpartition(".")[2] for name in shown}
    assert set(unstale.__all__) - {"recipes"} <= names
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute) or import_module(name)


def test_the_page_of_options_is_as_it_would_be_written_now() -> None:
    written = options_page.page()
    rows = set(re.findall(r"^\| `([\w.]+)` \|", written, re.MULTILINE))
    assert rows - set(ObjectiveConfig.variants_by_name()) == set(options())
    assert written == options_page.PAGE.read_text("utf-8"), (
        "run: .venv/bin/python -m tools.options_page"
    )


def test_the_page_of_techniques_is_as_it_would_be_written_now() -> None:
    written = techniques_page.page()
    assert re.findall(r"^### `(\w+)`", written, re.MULTILINE) == [
        name
        for slot in techniques_page.TITLES
        for name, entry in techniques().items()
        if entry.slot == slot
    ]
    assert written == techniques_page.PAGE.read_text("utf-8"), (
        "run: .venv/bin/python -m tools.techniques_page"
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="two.html#b">', ""),
        ('<a href="https://elsewhere.org/page">', ""),
        ('<a href="three.html">', "there is no such file"),
        ('<a href="two.html#c">', "there is no such anchor"),
        ('<img src="picture.png">', "there is no such file"),
        ('<script src="https://elsewhere.org/a.js"></script>', "from another host"),
        ('<script src="//elsewhere.org/a.js"></script>', "from another host"),
        ('<link rel="stylesheet" href="https://elsewhere.org/a.css">', "from another host"),
        ('<link rel="preconnect" href="https://elsewhere.org">', "from another host"),
        ("<style>@import 'https://elsewhere.org/a.css'</style>", "from another host"),
        ('<p style="background: url(https://elsewhere.org/a.png)">', "from another host"),
    ],
)
def test_the_checker_of_the_site(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(f"<h1 id='a'>one</h1>{body}")
    (tmp_path / "two.html").write_text("<h1 id='b'>two</h1>")
    found = list(problems(tmp_path))
    assert (problem in found[0] and len(found) == 1) if problem else not found


def test_the_checker_reads_style_sheets(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>one</h1>")
    (tmp_path / "a.css").write_text("@font-face { src: url('https://elsewhere.org/a.woff2') }")
    assert "a.css loads https://elsewhere.org/a.woff2" in next(iter(problems(tmp_path)))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands in the shell blocks of the docs, each with its page."""
    for page in PAGES:
        blocks = re.findall(
            r"^```(?:sh|bash)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for line in "".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            end = next((at for at, word in enumerate(words) if word in ("|", ">", "#")), None)
            yield page.name, words[:end]


def test_every_command_in_the_docs_is_accepted() -> None:
    """Each is parsed, not run: the verb, its arguments and every option exist."""
    unstale_commands = [words for _, words in commands() if words[:1] == ["unstale"]]
    assert len(unstale_commands) > 80
    for words in unstale_commands:
        if "--help" not in words and "--version" not in words:
            parse(words[1:])


def test_the_linter_is_content_with_every_run_in_the_docs() -> None:
    for page, words in commands():
        if words[:2] not in (["unstale", "train"], ["unstale", "lint"]) or "--help" in words:
            continue
        chosen = parse(words[1:])
        if chosen.recipe in RECIPES and not chosen.config:
            verdict = check(configure(chosen))
            assert not [*verdict.refusals, *verdict.warnings], (page, words)


def test_every_target_of_make_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {words[1] for _, words in commands() if words[:1] == ["make"]}
    used |= {name for page in PAGES for name in re.findall(r"`make ([a-z0-9-]+)", page.read_text())}
    assert {"docs", "env-peers"} <= used <= targets
