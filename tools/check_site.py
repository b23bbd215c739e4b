"""Check a built website: every link leads somewhere, and nothing is loaded from another host.

python tools/check_site.py site
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "use": "href",
}
"""Tag -> attribute with an address that a browser loads by itself. `a` is only followed."""
RELATIONS = {"canonical", "next", "prev", "alternate"}
"""Relations of a `link` tag that a browser does not load."""
FROM_HOST = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")
"""An address of another host in a style sheet."""


class Page(HTMLParser):
    """The links, the loaded addresses and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values and values.get("rel") not in RELATIONS:
            self.loaded.append(values[LOADED[tag]])
        self.loaded += FROM_HOST.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.loaded += FROM_HOST.findall(data)


@cache
def read(path: Path) -> Page:
    return Page(path.read_text("utf-8"))


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each broken link and each address that is loaded from another host."""
    for path in sorted(site.rglob("*.html")):
        page, name = read(path), path.relative_to(site)
        for address in page.loaded:
            if _is_elsewhere(address):
                yield f"{name} loads {address} from another host"
        for address in [*page.links, *page.loaded]:
            if not _is_elsewhere(address) and (missing := _missing(address, path, site)):
                yield f"{name} links to {address}: {missing}"
    for path in sorted(site.rglob("*.css")):
        for address in FROM_HOST.findall(path.read_text("utf-8")):
            yield f"{path.relative_to(site)} loads {address} from another host"


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def _missing(address: str, path: Path, site: Path) -> str:
    """Return why an address of the site leads nowhere, or nothing."""
    parts = urlsplit(address)
    if parts.scheme:  # data:, mailto:
        return ""
    target = unquote(parts.path)
    at = site / target.lstrip("/") if target.startswith("/") else path.parent / target
    file = (at / "index.html" if at.is_dir() else at) if target else path
    if not file.is_file():
        return "there is no such file"
    if file.suffix == ".html" and unquote(parts.fragment) not in read(file).anchors:
        return "there is no such anchor"
    return ""


def main() -> None:
    site = Path(sys.argv[1])
    if not (site / "index.html").is_file():
        sys.exit(f"{site} has no index.html: build the site first")
    found = list(problems(site))
    print("\n".join(found) or f"{site}: every link leads somewhere, nothing from other hosts")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
