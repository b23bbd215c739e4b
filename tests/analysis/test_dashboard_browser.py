"""What is promised of the dashboard's pages, in a real browser (Chromium, if it is installed).

- Every page shows its data, without an error of a script, in light, dark and narrow windows, and
  is not wider than the window.
- Text of a run that would be a script runs no script and becomes no element.
- The keyboard alone reaches every page, and moves through plots and tokens.
- A page follows a growing run, and an address of a token leads to the token.
- Controls have names, text has enough contrast, and axe-core finds nothing serious.

The long tests of the pages are in `test_dashboard_long.py` (`pytest -m slow tests/analysis`).
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analysis.test_dashboard import ATTACK, Client, served
from tests.analysis.test_report import audit_it
from tests.support.axe import needs_axe, serious
from tests.support.chromium import NO_BROWSER, Page, browser_program, dashboard_page
from tests.support.fake_run import fake_run
from unstale.durability.run_folder import AUDIT, METRICS

pytestmark = pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER)

PAGES = {
    "": "document.querySelectorAll('tbody tr').length == 2",
    "run/hostile": "document.querySelector('.uplot') && document.querySelector('.lanes')",
    "run/hostile/episodes": "document.querySelectorAll('tbody tr').length == 24",
    "run/hostile/episode/5": "document.querySelectorAll('.t.sampled').length > 10",
    "run/hostile/group/2": "document.querySelectorAll('.sibling').length == 4",
    "run/hostile/audit": "document.querySelectorAll('.cloud').length == 6 && "
    "document.querySelector('.verdict')",
    "run/plain/factors": "document.querySelector('.scatter')?.ariaLabel.includes(' tokens.')",
    "compare?a=hostile&b=plain": "document.querySelector('h1')?.innerText == 'Compare' && "
    "document.querySelector('.uplot')",
}
"""The pages, each with a condition that it is complete."""


def audit_with(run: Path, text: str) -> None:
    """Add what an audit leaves in the folder, with a text in its names and reasons."""
    audit_it(run)
    found = json.loads((run / AUDIT).read_text())
    found["routes"][1]["route"] = text
    found["not_built"] = {text: text}
    (run / AUDIT).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    fake_run(root / "plain", steps=6, with_values=True)
    run = fake_run(root / "hostile", steps=6, prefix=ATTACK)
    audit_with(run, ATTACK)
    config = json.loads((run / "config.json").read_text())
    config["recipe"] = config["name"] = config["techniques"] = ATTACK
    (run / "config.json").write_text(json.dumps(config))
    (run / "error.txt").write_text(ATTACK)
    with (run / METRICS).open("a") as file:
        file.write(json.dumps({"step": 6, f"env/{ATTACK}_mean": 1.0, f"{ATTACK}/x": 2.0}) + "\n")
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        found.when_read("hostile")
        found.when_read("plain")
        yield found


@pytest.fixture(scope="module")
def page(client: Client) -> Iterator[Page]:
    with dashboard_page(client.dashboard.url, runs=2) as page:
        yield page


def go(page: Page, client: Client, path: str) -> None:
    page.run(f"location.hash = {json.dumps('#/' + path)}")
    page.wait(PAGES[path])
    if re.fullmatch(r"run/[^/]+", path):
        see_all(page)


def see_all(page: Page) -> None:
    """Scroll through the page of a run, whose parts are asked for when they come into view."""
    shown = ("again", "section-episodes", "section-timeline")
    page.scroll_until(" && ".join(f"document.getElementById('{each}')" for each in shown))
    page.wait("document.querySelector('#section-episodes td')")
    page.run("scrollTo(0, 0)")


CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (text, under) => {
    canvas.fillStyle = `rgb(${under})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = (c) => c.map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getClientRects().length || element.disabled) continue;
    const above = [];
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) {
      above.unshift(getComputedStyle(each).backgroundColor);
      opacity *= Number(getComputedStyle(each).opacity);
    }
    const back = above.reduce((under, colour) => rgb(colour, under), [255, 255, 255]);
    const ink = rgb(getComputedStyle(element).color, back);
    const front = ink.map((v, i) => v * opacity + back[i] * (1 - opacity));
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const wanted = element.closest('.special, .nl') ? 2 : 4.5;
    const about = `${element.tagName}.${element.className} ${element.textContent.slice(0, 30)}`;
    if (ratio < wanted) found.push(`${about} ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)].slice(0, 12);
})()
"""
"""Return texts whose contrast with their background is below 4.5 to 1 (WCAG AA). The marks of a
chat template are fainter on purpose, because they repeat on every message.
"""

NAMELESS = """
[...document.querySelectorAll('button, input, select, a, [tabindex="0"], progress, meter')]
  .filter((each) => each.getClientRects().length && !each.textContent.trim())
  .filter((each) => !(each.ariaLabel || each.labels?.length || each.title))
  .map((each) => each.outerHTML.slice(0, 80))
"""


@pytest.mark.costly
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (380, False)])
def test_every_page_is_complete_and_readable(
    page: Page, client: Client, width: int, dark: bool
) -> None:
    page.resize(width, 900, dark=dark)
    for path in PAGES:
        go(page, client, path)
        assert page.run("document.documentElement.scrollWidth <= innerWidth + 1"), path
        assert page.run(CONTRAST) == [], path
        assert page.run(NAMELESS) == [], path
        assert page.run("document.querySelectorAll('h1').length") == 1, path
        assert page.run("document.title.endsWith('unstale')"), path
    assert page.errors == []


@pytest.mark.costly
@needs_axe
def test_axe_finds_nothing_serious_on_any_page(page: Page, client: Client) -> None:
    page.resize(1280, 900)
    for path in PAGES:
        go(page, client, path)
        assert serious(page) == [], path


def test_text_of_a_run_is_text(page: Page, client: Client) -> None:
    page.resize(1280, 900)
    for path in PAGES:
        go(page, client, path)
        assert page.run("document.scripts.length") == 2, path
        assert (
            page.run("document.querySelectorAll('main img, main iframe, main script').length") == 0
        )
        if path.startswith("run/hostile"):
            assert ATTACK in page.run("document.querySelector('main').textContent"), path
    assert page.errors == []


def test_the_keyboard_reaches_a_token(page: Page, client: Client) -> None:
    """From the list of runs: a run, its episodes, an episode, a token, all with Tab and Enter."""
    page.resize(1280, 900)
    go(page, client, "")

    def follow(address: str) -> None:
        for _ in range(200):
            page.press("Tab")
            if page.run(f"document.activeElement.getAttribute('href') === {json.dumps(address)}"):
                assert page.run("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
                page.press("Enter")
                return
        raise AssertionError(f"Tab never reached {address}")

    follow("#/run/hostile")
    page.wait(PAGES["run/hostile"])
    for _ in range(100):  # a plot has no values until its series arrives
        page.run("document.querySelector('.plot-box').focus()")
        page.press("ArrowLeft")
        if page.run("document.activeElement.ariaLabel") != "Learning curve":
            break
        time.sleep(0.1)
    assert page.run("document.activeElement.ariaLabel").startswith("Learning curve")
    assert page.run("document.activeElement.ariaLabel") != "Learning curve"
    page.run("document.activeElement.blur()")
    follow("#/run/hostile/episodes")
    page.wait(PAGES["run/hostile/episodes"])
    follow("#/run/hostile/episode/20")
    page.wait(PAGES["run/hostile/episode/5"])  # the same for every episode
    page.run("document.querySelector('.chat').focus()")
    page.press("]")
    page.press("ArrowRight")
    page.wait("document.querySelector('.selected')")
    place = page.run("document.querySelector('.selected').dataset.at")
    assert page.run("location.hash") == f"#/run/hostile/episode/20/token/{place}"
    shown = page.run("document.querySelector('.panel').innerText")
    assert "behavior_logp" in shown and "-0.10000" in shown
    assert page.errors == []


def test_the_numbers_of_a_token_have_the_limits_and_the_gradient_weight(
    page: Page, client: Client
) -> None:
    page.resize(1280, 900)
    page.run("location.hash = '#/run/plain/episode/5'")
    page.wait("document.querySelectorAll('.t.sampled').length > 10")
    page.run("document.querySelector('.tokens .t.sampled').click()")
    page.wait("document.querySelector('.panel').innerText.includes('limits of S')")
    shown = page.run("document.querySelector('.panel').innerText")
    names = ("log D + log S", "limits of D", "weight of the correction", "gradient weight")
    assert [name for name in names if name not in shown] == []
    answer = client.ask("episode", run="plain", episode=5)
    training = answer["training"]
    values = next(piece["trained"] for piece in answer["pieces"] if "trained" in piece)
    rows = page.run(
        "Object.fromEntries([...document.querySelectorAll('.panel tr')].map((row) => "
        "[row.querySelector('th').innerText, row.querySelector('td').innerText]))"
    )
    for limit, outside in zip(training["limits"], values["outside"][0], strict=True):
        side = "outside" if outside else "inside"
        ends = f"from {limit['low']:g} to {limit['high']:g}"
        assert rows[limit["name"]] == f"{ends} {limit['about']}; the token is {side}"
    formula = training["formulas"][values["formula"][0]]
    number = f"{values['gradient'][0]:.5f}" if values["gradient"][0] else "0"
    assert rows["gradient weight"] == f"{number} {formula}"
    assert page.errors == []


def test_an_address_leads_to_a_token_and_a_wrong_one_says_so(page: Page, client: Client) -> None:
    page.run("location.hash = '#/run/hostile/episode/6/token/9'")
    page.wait("document.querySelector('.selected')?.dataset.at === '9'")
    page.run("location.hash = '#/run/hostile/episode/6/token/100000'")
    page.wait("document.querySelector('.panel').innerText.includes('There is no token 100000')")
    page.run("location.hash = '#/run/hostile/episode/4711'")
    page.wait("document.querySelector('main').innerText.includes('the run has no episode 4711')")
    page.run("location.hash = '#/run/nowhere'")
    page.wait("""document.querySelector('main').innerText.includes("there is no run 'nowhere'")""")
    page.run("location.hash = '#/nonsense'")
    page.wait("document.querySelector('main').innerText.includes('There is no such page')")
    page.run("new Promise((done) => setTimeout(done, 500))")  # answers to questions before
    page.errors.clear()  # the browser notes the answers 404


def test_a_page_follows_a_growing_run(page: Page, client: Client, root: Path) -> None:
    page.resize(1280, 900)
    page.run("location.hash = '#/run/plain'")
    page.wait(
        "document.querySelector('.uplot') && document.body.innerText.includes('6 of 6 steps')"
    )
    with (root / "plain" / METRICS).open("a") as file:
        file.write(json.dumps({"step": 7, "time_s": 99, "rollout/success_rate": 0.123}) + "\n")
    page.wait("document.body.innerText.includes('7 of 6 steps')")
    page.wait("document.querySelector('.keys').innerText.includes('12.3%')")
    assert page.errors == []


def test_columns_are_chosen_sorted_and_kept_in_the_address(page: Page, client: Client) -> None:
    """A fact of the environment is a column as any other."""
    page.run("location.hash = '#/run/plain/episodes'")
    page.wait("document.querySelectorAll('tbody tr').length == 24")
    heads = "[...document.querySelectorAll('thead th')].map((each) => each.innerText)"
    usual = page.run(heads)
    boxes = "[...document.querySelectorAll('.choice input')]"
    names = page.run(f"{boxes}.map((each) => each.value)")
    (fact, *_) = [name for name in names if ":" in name]
    page.run(f"{boxes}[{names.index(fact)}].click()")
    assert page.run(heads) == [*usual, fact]
    assert "column=episode&column=group_number" in page.run("location.hash")
    page.run("[...document.querySelectorAll('thead button')].at(-1).click()")
    page.wait("document.querySelector('thead th[aria-sort=descending]')?.cellIndex > 10")
    shown = page.run("[...document.querySelectorAll('tbody tr')].map((r) => r.lastChild.innerText)")
    values = [float(each) for each in shown if each]
    assert values == sorted(values, reverse=True) and len(values) > 3
    page.run("document.querySelector('.choice input[value=stop]').click()")
    assert len(page.run(heads)) == len(usual)

    address = page.run("location.hash")
    page.run("location.hash = '#/'")
    page.wait("document.querySelector('h1').innerText === 'Runs'")
    page.run(f"location.hash = {json.dumps(address)}")
    page.wait("document.querySelectorAll('tbody tr').length == 24")
    kept = [name for name in usual if name != "stop"]
    assert [head.split(" ")[0] for head in page.run(heads)][: len(kept)] == [
        head.split(" ")[0] for head in kept
    ]
    page.run("document.querySelector('.choice button').click()")
    assert [head.split(" ")[0] for head in page.run(heads)] == [
        head.split(" ")[0] for head in usual
    ]
    assert "column" not in page.run("location.hash")


def test_plots_of_one_run_are_compared_and_series_are_asked_for_together(
    page: Page, client: Client
) -> None:
    """Only `hostile` has metrics of its environment. A request has at most 24 metrics."""
    page.run("performance.clearResourceTimings()")
    go(page, client, "compare?a=hostile&b=plain")
    page.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.scroll_until(
        "[...document.querySelectorAll('.card.chart')].every((c) => c.querySelector('.uplot'))"
    )
    texts = page.run("[...document.querySelectorAll('.card.chart')].map((each) => each.innerText)")
    (own,) = [text for text in texts if text.startswith(f"env/{ATTACK}") or "env/" in text][:1]
    assert "A " in own and "B " not in own
    asked = page.run(
        "performance.getEntriesByType('resource')"
        ".filter((each) => each.name.includes('/api/series'))"
        ".map((each) => [...new URL(each.name).searchParams].filter(([n]) => n === 'name').length)"
    )
    assert 4 < max(asked) <= 24 and len(asked) < sum(asked) / 2


def test_marks_of_an_axis_are_not_rounded_to_equal_ones(page: Page) -> None:
    def marks(unit: str, *values: float) -> object:
        return page.run(
            "import(new URL('chart.js', document.querySelector('script[type=module]').src)).then("
            f"({{ Plot }}) => Plot.prototype.marks.call({{ unit: '{unit}' }}, {list(values)}))"
        )

    assert marks("share", 0, 0.005, 0.01, 0.015, 1) == ["0%", "0.5%", "1%", "1.5%", "100%"]
    assert marks("nats", 12.34, 12.36) == ["12.34", "12.36"]
    assert marks("tokens", 10_000.5, 10_001) == ["10,000.5", "10,001"]
    assert marks("", 1.02e-5, 1.04e-5) == ["1.02e-5", "1.04e-5"]
    assert marks("", 0, 1, 2) == ["0", "1", "2"]


@pytest.mark.costly
def test_new_values_leave_the_chosen_steps_and_the_cursor(
    page: Page, client: Client, root: Path
) -> None:
    """A live page redraws its plots. Someone may have zoomed in, or read a value by the keys."""
    go(page, client, "run/hostile")
    plots = "[...document.querySelectorAll('.plot-box')]"
    box = f"{plots}.find((each) => each.getAttribute('aria-label').startsWith('Success'))"
    page.run(f"{box}.scrollIntoView()")
    page.wait(f"{box}.querySelector('.uplot')")
    page.run(
        """
        (() => {
          const over = BOX.querySelector('.u-over');
          const { left, top, width } = over.getBoundingClientRect();
          const send = (name, share) => over.dispatchEvent(new MouseEvent(name, {
            clientX: left + share * width, clientY: top + 40, bubbles: true, movementX: 1 }));
          send('mousemove', 0.3); send('mousedown', 0.3);
          send('mousemove', 0.9); send('mouseup', 0.9);
        })()
        """.replace("BOX", box)
    )
    page.run(f"{box}.focus()")
    page.press("Home")
    page.wait(f"/, step [23]:/.test({box}.getAttribute('aria-label'))")
    before = page.run(f"{box}.getAttribute('aria-label')")
    with (root / "hostile" / METRICS).open("a") as file:
        file.write(json.dumps({"step": 7, "rollout/success_rate": 0.5}) + "\n")
    page.wait("document.querySelector('#content').innerText.includes('7 of')")
    page.run("new Promise((done) => setTimeout(done, 500))")
    assert page.run(f"{box}.getAttribute('aria-label')") == before
    page.press("End")
    page.wait(f"/, step 5:/.test({box}.getAttribute('aria-label'))")
    at_step_5 = page.run(f"{box}.getAttribute('aria-label')")
    page.press("Escape")
    page.run("new Promise((done) => setTimeout(done, 100))")
    assert page.run(f"{box}.getAttribute('aria-label')") == at_step_5
    with (root / "hostile" / METRICS).open("a") as file:
        for step in (8, 9, 10):
            file.write(json.dumps({"step": step, "rollout/success_rate": 0.5}) + "\n")
    page.wait("document.querySelector('#content').innerText.includes('10 of')")
    page.run("new Promise((done) => setTimeout(done, 500))")
    assert page.run(f"{box}.getAttribute('aria-label')") == at_step_5, "without a zoom"
    for _ in range(2):  # to the other theme, and back
        page.run("document.getElementById('theme').click()")
        page.run("new Promise((done) => setTimeout(done, 100))")
        assert page.run(f"{box}.getAttribute('aria-label')") == at_step_5, "in another theme"
    page.press("End")
    page.wait(f"/, step 10:/.test({box}.getAttribute('aria-label'))")


def test_a_filter_that_waits_does_not_follow_to_another_page(page: Page, client: Client) -> None:
    """It is applied a moment after the last key."""
    go(page, client, "run/hostile/episodes")
    page.run(
        "{ const box = document.getElementById('filter'); box.value = 'episode<=3';"
        " box.dispatchEvent(new Event('input', { bubbles: true })); location.hash = '#/'; }"
    )
    page.wait(PAGES[""])
    page.run("new Promise((done) => setTimeout(done, 500))")
    assert page.run("location.hash") == "#/"


@pytest.mark.costly
def test_filter_and_search_narrow_the_table(page: Page, client: Client) -> None:
    go(page, client, "run/hostile/episodes")
    page.run(
        "{ const box = document.getElementById('filter'); box.value = 'episode<=3';"
        " box.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.wait("document.querySelectorAll('tbody tr').length === 3")
    assert page.run("location.hash") == "#/run/hostile/episodes?filter=episode%3C%3D3"
    page.run(
        "{ const box = document.getElementById('filter'); box.value = 'nonsense';"
        " box.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.wait("document.querySelector('[role=alert]')?.innerText.includes('cannot read')")
    page.errors.clear()  # the browser notes the answer 400
