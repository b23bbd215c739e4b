"""Test a report in a real browser (Chromium, if it is installed), opened as a file.

- It asks for nothing, also while its pages are visited, and no script fails or is refused.
- Plots, timeline, tokens, episodes and audit are shown, in wide, narrow and dark windows.
- On a phone it is folded: at most 6,000 pixels high, and not wider than the window.
- Text of a run runs no script and becomes no element.
- What is not in the file is said, with the command that shows it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analysis.test_dashboard import ATTACK
from tests.analysis.test_dashboard_browser import CONTRAST, NAMELESS, audit_with, see_all
from tests.support.axe import needs_axe, serious
from tests.support.chromium import NO_BROWSER, Page, browser, browser_program
from tests.support.fake_run import fake_run
from unstale.analysis.dashboard import frozen
from unstale.analysis.dashboard.frozen import write_report

pytestmark = pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER)

REQUESTS = "performance.getEntriesByType('resource').map((each) => each.name)"
COMPLETE = "document.querySelector('.uplot') && document.querySelector('#again td')"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = fake_run(tmp_path_factory.mktemp("runs") / "run", steps=12, with_values=True)
    return write_report(run)


def show(
    page: Page, file: Path, *, anchor: str = "", width: int = 1280, dark: bool = False
) -> None:
    page.errors.clear()
    page.resize(width, 900, dark=dark)
    page.open("about:blank")
    page.open(file.as_uri() + anchor)
    page.run("window.alert = () => { throw new Error('a script of the run was run'); }")


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, False), (1280, True)])
def test_report_is_complete_and_asks_for_nothing(
    page: Page, report: Path, width: int, dark: bool
) -> None:
    show(page, report, width=width, dark=dark)
    page.wait("document.querySelector('.uplot')")
    assert page.run("location.hash") == "#/run/run"
    if width == 400:
        assert page.run("document.body.scrollHeight") <= 6000
        page.run("document.querySelectorAll('details').forEach((each) => each.open = true)")
    see_all(page)
    page.scroll_until("document.querySelectorAll('.uplot').length > 20")
    page.scroll_until("document.querySelector('.lanes').ariaLabel.includes('training')")
    page.scroll_until("document.querySelector('.scatter').ariaLabel.includes(' tokens.')")
    assert page.run("document.documentElement.scrollWidth <= innerWidth + 1")
    assert page.run(CONTRAST) == [] and page.run(NAMELESS) == []
    assert page.run(REQUESTS) == [] and page.errors == []


def test_an_episode_is_read_token_by_token(page: Page, report: Path) -> None:
    show(page, report)
    page.scroll_until("document.querySelector('#section-episodes td a')")
    page.run("document.querySelector('#section-episodes td a').click()")
    page.wait("document.querySelectorAll('.t.sampled').length > 10")
    page.run("document.querySelector('.tokens .sampled').click()")
    page.wait("document.querySelector('.panel h2')?.textContent.includes('Token')")
    assert page.run("location.hash.includes('/token/')")
    page.run("history.back()")
    page.wait("document.querySelector('.outcome')")
    assert page.run(REQUESTS) == [] and page.errors == []


def test_a_long_episode_says_how_much_of_it_is_shown(
    page: Page, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "EPISODE_TOKENS", 60)
    file = write_report(report.parent)
    number, found = next(iter(frozen.freeze(report.parent)["episodes"].items()))
    show(page, file, anchor=f"#/run/run/episode/{number}/token/100")
    page.wait("document.querySelectorAll('.tokens .t').length === 60")
    text = page.run("document.querySelector('main').textContent")
    assert f"The first 60 of {found['num_tokens']} tokens are in this report." in text
    assert "Token 100 is not among those shown." in text and page.errors == []


def test_a_page_that_is_not_in_the_report_names_the_command(page: Page, report: Path) -> None:
    for where in ("episodes", "episode/99999", "group/1"):
        show(page, report, anchor=f"#/run/run/{where}")
        page.wait(f"document.body.textContent.includes('unstale dashboard {report.parent}')")
        assert page.errors == []


@needs_axe
@pytest.mark.costly
def test_axe_finds_nothing_serious_in_a_report(page: Page, report: Path) -> None:
    show(page, report)
    see_all(page)
    assert serious(page) == []


def test_text_of_a_run_is_text(page: Page, tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=6, prefix=ATTACK)
    audit_with(run, ATTACK)
    config = json.loads((run / "config.json").read_text())
    config["recipe"] = config["name"] = config["techniques"] = ATTACK
    (run / "config.json").write_text(json.dumps(config))
    (run / "error.txt").write_text(ATTACK)
    file = write_report(run)
    for anchor, condition in (
        ("", COMPLETE),
        ("#/run/run/audit", "document.querySelector('.verdict')"),
        ("#/run/run/episode/", "document.querySelectorAll('.t.sampled').length > 10"),
    ):
        episode = json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])
        number = next(iter(episode["episodes"])) if anchor.endswith("episode/") else ""
        show(page, file, anchor=anchor + number)
        page.scroll_until(condition)
        assert ATTACK in page.run("document.querySelector('main').textContent"), anchor
        assert page.run("document.scripts.length") == 2
        assert page.run("document.querySelectorAll('img, iframe, main script').length") == 0
        assert page.run(REQUESTS) == [] and page.errors == []


def test_the_script_of_a_run_would_be_refused(page: Page, report: Path, tmp_path: Path) -> None:
    """The policy is what refuses it: the same file with a script added does not run it."""
    text = report.read_text().replace("<noscript>", "<script>document.title = 'run'</script>", 1)
    (tmp_path / "changed.html").write_text(text)
    show(page, tmp_path / "changed.html")
    page.wait("document.querySelector('.uplot')")
    assert page.run("document.title") != "run"
    assert any("Content Security Policy" in error for error in page.errors)
