"""Accessibility checks by axe-core, in a page of the browser.

The script is part of the package `axe-playwright-python`, of which nothing else is used. The
licence of axe-core is MPL-2.0.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.chromium import Page

PACKAGE = "axe_playwright_python"


def axe_script() -> Path | None:
    """Return the file of axe-core, or None if its package is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("axe.min.js")


needs_axe = pytest.mark.skipif(
    axe_script() is None, reason=f"needs {PACKAGE}: run `pip install -e '.[dev]'`"
)

RUN = """
axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
  .filter((each) => ['serious', 'critical'].includes(each.impact))
  .map((each) => `${each.id}: ${each.help}: ${each.nodes.slice(0, 4)
    .map((node) => node.html.slice(0, 160) + ' ' + node.any.map((check) => check.message).join(' '))
    .join(' | ')}`))
"""


def serious(page: Page) -> list[str]:
    """Return the serious and critical findings of axe-core about the page as it is now."""
    script = axe_script()
    assert script is not None, f"{PACKAGE} is not installed"
    if not page.run("Boolean(window.axe)"):
        page.run(f"{script.read_text()}; true")
    return list(page.run(RUN))
