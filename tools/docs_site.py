"""Build steps of the docs site that mkdocs has no setting for: its hook and an extension of griffe.

The site has the tree of the repository, not of `docs/` alone: the README is its front page, and a
relative link leads to the same file on the site and in the repository. Source files that a page
links to are shown on pages of their own.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md")
MEASUREMENTS = "benchmarks/results"
STATIC = ("docs/*.png", "docs/*.webp", "docs/*.css", f"{MEASUREMENTS}/*.png")
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
"""The target of a Markdown link inside the repository, without its anchor."""
FILE_NAME = re.compile(r"\[(?:docs/)?[\w-]+\.md\](?=\(([^)#]+)[)#])")
"""The text of a link that is a file's name. The site shows the page's title instead."""
CODE_IN_TABLE = re.compile(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")
"""Code with `\\|`, the bar of a table in the repository. Here code needs no backslash."""
DOCTEST = re.compile(r"(?:^>>> .*\n(?:.+(?:\n|$))*\n?)+", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs/` by those of the repository that the site shows."""
    shown = Files([file for file in files if file.src_dir != config.docs_dir])
    for pattern in (*PAGES, *STATIC):
        for path in sorted(ROOT.glob(pattern)):
            shown.append(_file(path, config))
    for path in sorted((ROOT / MEASUREMENTS).glob("*.md")):
        is_index = path.name == "README.md"
        in_nav = InclusionLevel.INCLUDED if is_index else InclusionLevel.NOT_IN_NAV
        shown.append(_file(path, config, in_nav))
    for source in sorted(set(_linked_sources(shown))):
        text = (ROOT / source).read_text("utf-8")
        language = "python" if source.endswith(".py") else "text"
        content = f"# {posixpath.basename(source)}\n\n`{source}`\n\n````{language}\n{text}````\n"
        shown.append(
            File.generated(
                config, f"{source}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return shown


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to source files and folders to their pages, and list the measurements."""
    here = posixpath.dirname(page.file.src_uri)

    def page_of(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[0]))
        if (ROOT / target).is_dir():
            return posixpath.join(link[0], "README.md")
        return f"{link[0]}.md" if files.get_file_from_path(f"{target}.md") else link[0]

    titles = dict(_titles(config.nav))

    def title_of(link: re.Match[str]) -> str:
        title = titles.get(posixpath.normpath(posixpath.join(here, link[1])))
        return f"[*{title}*]" if title else link[0]

    if page.file.generated_by:  # a source file
        page.meta["search"] = {"exclude": True}
    elif here == MEASUREMENTS:
        page.meta["search"] = {"boost": 0.3}
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]  # it would have one entry
    if page.file.src_uri == f"{MEASUREMENTS}/README.md":
        markdown += "\n" + "\n".join(_measurements())
    markdown = CODE_IN_TABLE.sub(lambda code: code[0].replace("\\|", "|"), markdown)
    return LINK.sub(page_of, FILE_NAME.sub(title_of, markdown))


class Doctests(Extension):
    """Show the doctests of docstrings as code. Markdown would read `>>>` as quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value + "\n"
            )


def _file(
    path: Path, config: MkDocsConfig, inclusion: InclusionLevel = InclusionLevel.INCLUDED
) -> File:
    return File(
        path.relative_to(ROOT).as_posix(),
        str(ROOT),
        config.site_dir,
        config.use_directory_urls,
        inclusion=inclusion,
    )


def _linked_sources(files: Files) -> Iterator[str]:
    """Yield the files of the repository that pages link to and that are not on the site."""
    for file in files.documentation_pages():
        for link in LINK.findall(file.content_string):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(file.src_uri), link))
            if not files.get_file_from_path(target) and (ROOT / target).is_file():
                yield target


def _titles(entries: Any) -> Iterator[tuple[str, str]]:
    """Yield each page of the navigation with its title there."""
    for entry in entries:
        for title, target in entry.items():
            if isinstance(target, str):
                yield target, title
            else:
                yield from _titles(target)


def _measurements() -> Iterator[str]:
    """Yield a table of the measurements."""
    yield from ("| measurement | file |", "|---|---|")
    for path in sorted((ROOT / MEASUREMENTS).glob("[!R]*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        yield f"| [{title}]({path.name}) | `{path.stem}` |"
