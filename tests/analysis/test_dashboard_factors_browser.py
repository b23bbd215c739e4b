"""What is promised of the page D against S in a real browser (Chromium, if it is installed).

- It is complete and readable in light, dark and narrow windows; texts of a run stay text.
- A drag selects the tokens under it, the keyboard reaches the same, and the address keeps it.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.analysis.test_dashboard import ATTACK, Client, served
from tests.analysis.test_dashboard_browser import CONTRAST, NAMELESS
from tests.support.chromium import NO_BROWSER, Page, browser_program, dashboard_page
from tests.support.fake_run import fake_run

pytestmark = pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER)

NAME = "hostile<b>run"
PAGE = "run/hostile%3Cb%3Erun/factors"
READY = "document.querySelector('.scatter')?.ariaLabel.includes('tokens.')"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("runs")
    run = fake_run(root / NAME, steps=5, prefix=ATTACK, with_values=True)
    config = json.loads((run / "config.json").read_text())
    config["recipe"] = config["name"] = ATTACK
    (run / "config.json").write_text(json.dumps(config))
    broken = fake_run(root / "broken", steps=2, with_values=True)
    (broken / "config.json").write_text(json.dumps({"recipe": "x", ATTACK: ATTACK}))
    with served(root) as found:
        found.when_read(NAME)
        yield found


@pytest.fixture(scope="module")
def page(client: Client) -> Iterator[Page]:
    with dashboard_page(client.dashboard.url, runs=2) as page:
        yield page


def go(page: Page, query: str = "", *, path: str = PAGE) -> None:
    page.run("location.hash = '#/compare'")
    page.wait("document.querySelector('h1')?.innerText.startsWith('Compare')")
    page.run(f"location.hash = {json.dumps(f'#/{path}{query}')}")
    page.wait(READY)


def drag(
    page: Page, start: tuple[float, float], end: tuple[float, float], *, touch: bool = False
) -> None:
    """Drag over the plot by mouse or by touch. Places are shares of its width and height."""
    page.run("document.querySelector('.scatter').scrollIntoView({ block: 'center' })")
    box: dict[str, float] = page.run(
        "(({ x, y, width, height }) => ({ x, y, width, height }))"
        "(document.querySelector('.scatter').getBoundingClientRect())"
    )

    def place(at: tuple[float, float]) -> dict[str, Any]:
        return {"x": box["x"] + at[0] * box["width"], "y": box["y"] + at[1] * box["height"]}

    def finger(kind: str, *points: dict[str, Any]) -> None:
        page.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=list(points))

    def mouse(kind: str, point: dict[str, Any]) -> None:
        buttons = {"button": "left", "buttons": 1, "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **point, **buttons)

    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    act = finger if touch else mouse
    act("Start" if touch else "Pressed", place(start))
    for at in (middle, end):
        act("Move" if touch else "Moved", place(at))
    if touch:
        finger("End")
    else:
        mouse("Released", place(end))


def picked(page: Page) -> str:
    page.wait("document.querySelector('#selected b')")
    return str(page.run("document.querySelector('#selected b').innerText"))


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (380, False)])
def test_the_page_is_complete_and_readable(
    page: Page, client: Client, width: int, dark: bool
) -> None:
    page.resize(width, 900, dark=dark)
    go(page, "?s_min=0.1")
    page.wait("document.querySelector('#selected b')")
    assert page.run("document.documentElement.scrollWidth <= innerWidth + 1")
    assert page.run(CONTRAST) == []
    assert page.run(NAMELESS) == []
    assert page.run("document.querySelectorAll('h1').length") == 1
    inked = (
        "(() => { const c = document.querySelector('.scatter');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return new Set(new Uint32Array(d.buffer)).size; })()"
    )
    assert page.run(inked) > 20  # points, shading, lines and texts have colours of their own
    assert page.run("document.scripts.length") == 2
    assert page.run("document.querySelectorAll('main img, main b > b, main script').length") == 0
    assert NAME in page.run("document.getElementById('trail').innerText")
    assert page.errors == []


def test_text_of_a_broken_configuration_is_text(page: Page, client: Client) -> None:
    page.resize(1280, 900)
    page.run("location.hash = '#/run/broken/factors'")
    page.wait("document.querySelectorAll('main [role=alert]').length == 1")
    assert ATTACK in page.run("document.querySelector('main').textContent")
    assert page.run("document.querySelectorAll('main img, main script').length") == 0
    page.errors.clear()  # the browser notes the answer 400


def test_a_drag_and_the_fields_select_the_same_tokens(page: Page, client: Client) -> None:
    page.resize(1280, 900)
    go(page)
    assert page.run("document.querySelector('#selected').innerText") == ""
    drag(page, (0.3, 0.25), (0.7, 0.45))
    shown = picked(page)
    limits = page.run(
        "['d_min', 'd_max', 's_min', 's_max'].map((name) => document.getElementById(name).value)"
    )
    low_d, high_d, low_s, high_s = map(float, limits)
    assert low_d < 0 < high_d and low_s < high_s
    brush = dict(zip(("d_min", "d_max", "s_min", "s_max"), limits, strict=True))
    found = client.ask("factors", run=NAME, **brush)
    expected = f"{found['selected']['tokens']:,} of {found['placed']:,} tokens"
    assert shown == expected and found["selected"]["tokens"] > 0
    address = page.run("location.hash")
    assert all(f"{name}={value}" in address for name, value in brush.items())
    row = found["selected"]["rows"][0]
    colour = "log_d" if abs(row["log_d"]) > abs(row["log_s"]) else "log_s"
    link = f"#/run/hostile%3Cb%3Erun/episode/{row['episode']}/token/{row['token']}"
    link += f"?colour={colour}&step={row['step']}"
    assert page.run(f"Boolean(document.querySelector(`#selected a[href={json.dumps(link)}]`))")
    go(page, address.partition("factors")[2])  # the address alone leads to the same
    assert picked(page) == expected
    page.run(f"document.querySelector(`#selected a[href={json.dumps(link)}]`).click()")
    page.wait(f"document.querySelector('.selected')?.dataset.at === '{row['token']}'")
    assert page.errors == []


def test_a_finger_selects_tokens_and_does_not_scroll(page: Page, client: Client) -> None:
    page.resize(380, 900)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        go(page)
        page.run("document.querySelector('.scatter').scrollIntoView({ block: 'center' })")
        page.run("window.before = scrollY; window.kinds = []; true")
        page.run(
            "document.querySelector('.scatter').addEventListener('pointerup', "
            "(event) => window.kinds.push(event.pointerType)); true"
        )
        drag(page, (0.25, 0.8), (0.75, 0.25), touch=True)
        shown = picked(page)
        assert page.run("scrollY === window.before")
        assert page.run("window.kinds") == ["touch"]
        limits = page.run(
            "['d_min', 'd_max', 's_min', 's_max']"
            ".map((name) => document.getElementById(name).value)"
        )
        brush = dict(zip(("d_min", "d_max", "s_min", "s_max"), limits, strict=True))
        found = client.ask("factors", run=NAME, **brush)
        assert found["selected"]["tokens"] > 0
        assert shown == f"{found['selected']['tokens']:,} of {found['placed']:,} tokens"
        drag(page, (0.45, 0.5), (0.45, 0.5), touch=True)  # where most tokens are
        page.wait("location.hash.includes('/token/') && document.querySelector('.selected')")
    finally:
        page.call("Emulation.setTouchEmulationEnabled", enabled=False)
    assert page.errors == []


def test_the_keyboard_alone_selects_and_reaches_a_token(page: Page, client: Client) -> None:
    page.resize(1280, 900)
    go(page)

    def tab_to(condition: str) -> None:
        for _ in range(120):
            page.press("Tab")
            if page.run(f"document.activeElement.matches({json.dumps(condition)})"):
                assert page.run("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
                return
        raise AssertionError(f"Tab never reached {condition}")

    tab_to("#s_min")
    for key in "0.2":
        page.press(key)
    page.press("Tab")
    found = client.ask("factors", run=NAME, s_min=0.2)
    assert picked(page) == f"{found['selected']['tokens']:,} of {found['placed']:,} tokens"
    assert "s_min=0.2" in page.run("location.hash")
    tab_to("#selected a[href*='/token/']")
    page.press("Enter")
    page.wait("document.querySelector('.selected')")
    assert page.errors == []
