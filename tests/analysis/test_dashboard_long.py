"""What is promised of the dashboard's pages, tried at length (minutes, `-m slow`).

- axe-core finds nothing serious on any page, in light, dark and narrow windows.
- Names, texts, numbers and links of a malicious run folder run no script, become no element and
  lead out of no folder, on any page.
- A page follows a demo while it trains, and shows what is left of it after a kill.
- The keyboard alone leads from the curve to the token, by every page between.
- 100,000 episodes are opened, sorted, filtered and searched with as many requests and elements as
  1,000, and with answers of bounded size.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from benchmarks.dashboard import multiply, read_groups
from tests.analysis.test_dashboard import Client, served
from tests.analysis.test_dashboard_browser import PAGES, audit_with, go, see_all
from tests.support.axe import needs_axe, serious
from tests.support.chromium import NO_BROWSER, Page, browser_program, dashboard_page
from tests.support.fake_run import fake_run
from unstale.analysis.dashboard import summary
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import EVENTS, METRICS
from unstale.records import ContextPiece, Failure, GroupRequest, Sampled, Task, Trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER),
]

SCRIPT = "<img src=x onerror=window.attacked=1><svg onload=window.attacked=2>"
TEXTS = (
    "<script>window.attacked=3</script>",
    SCRIPT,
    "javascript:window.attacked=4",
    "\"><iframe srcdoc='<script>parent.attacked=5</script>'>",
    "{{constructor.constructor('window.attacked=6')()}}",
    "\u202e\u0000\ud7ff</title></style></textarea>" + SCRIPT,
)
"""Texts that run a script where a page takes them for something else than text."""

FOLDER = "<img src=x onerror=window.attacked=7>"
"""A name of a run folder, which cannot have a slash."""

WINDOWS = {"light": (1280, False), "dark": (1280, True), "narrow": (380, False)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    fake_run(root / "plain", steps=6, with_values=True)
    audit_with(fake_run(root / "hostile", steps=6, prefix=SCRIPT, with_values=True), SCRIPT)
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        yield found


@pytest.fixture(scope="module")
def page(client: Client) -> Iterator[Page]:
    with dashboard_page(client.dashboard.url, runs=2) as page:
        yield page


@needs_axe
@pytest.mark.parametrize("window", WINDOWS)
def test_axe_finds_nothing_serious(page: Page, client: Client, window: str) -> None:
    width, dark = WINDOWS[window]
    client.when_read("hostile")
    page.resize(width, 900, dark=dark)
    for path in PAGES:
        go(page, client, path)
        assert serious(page) == [], path
    assert page.errors == []


def attack(run: Path, secret: Path) -> None:
    """Write the texts into everything that a run folder has."""
    config = json.loads((run / "config.json").read_text())
    config["recipe"], config["name"], config["techniques"] = TEXTS[:3]
    config[TEXTS[0]] = TEXTS[1]
    (run / "config.json").write_text(json.dumps(config))
    (run / "error.txt").write_text("\n".join(TEXTS))
    with (run / METRICS).open("a") as file:
        names = {f"{prefix}/{text}": 1.0 for text in TEXTS for prefix in ("env", text)}
        file.write(json.dumps({"step": 7, **names}) + "\n")
        file.write("x" * (5 << 20) + "\n")  # a line longer than what is read at a time
        file.write(json.dumps({"step": 8, "rollout/success_rate": 0.5}) + "\n")
    with (run / EVENTS).open("a") as file:
        for text in TEXTS:
            failed = {"kind": "episode_failed", "task": text, "stage": text, "error": text * 400}
            span = {"kind": "span", "lane": text, "label": text, "start": 1.0, "end": 2.0}
            check = {"kind": "check", "name": text, "text": text, "severity": text}
            for row in (failed, span, check, {"kind": text, text: text}):
                file.write(json.dumps({"time": 1.0, **row}) + "\n")
    task = Task(TEXTS[0], "train", 1)
    with Journal(run / JOURNAL) as journal:  # a text in each name that a journal has
        journal.add_request(GroupRequest(100, task, seed=1, place=100))
        for sibling, text in enumerate(TEXTS[:4]):
            writer = journal.begin(100, sibling, episode=1000 + sibling, seed=sibling)
            pieces = (ContextPiece((1, 2)), Sampled((3, 4), (-0.5, -0.5), 5))
            for position, piece in enumerate(pieces):
                writer.write_piece(position, piece)
            named = dict.fromkeys(TEXTS, 1.0)
            ended = Trajectory(pieces, named, "done", task, sibling, 1000 + sibling, facts=named)
            writer.write_outcome(ended if sibling else Failure(task, text, text))
        asyncio.run(journal.barrier())
    (run / "linked").symlink_to(secret.parent, target_is_directory=True)
    (run.parent / "linked").symlink_to(secret.parent, target_is_directory=True)


def test_a_malicious_folder_runs_no_script(page: Page, client: Client, root: Path) -> None:
    secret = root.parent / "secret" / "config.json"
    secret.parent.mkdir()
    secret.write_text('{"recipe": "a secret of yours"}')
    shutil.copytree(root / "hostile", root / FOLDER)
    attack(root / FOLDER, secret)
    page.resize(1280, 900)
    page.run("location.hash = '#/'")
    page.wait("document.querySelectorAll('tbody tr').length == 3")
    name = quote(FOLDER, safe="")
    for path in (*PAGES, "run/hostile/factors"):
        there = path.replace("run/hostile", f"run/{name}").replace("a=hostile", f"a={name}")
        page.run(f"location.hash = {json.dumps('#/' + there)}")
        page.wait("document.querySelector('main h1')")
        client.when_read(FOLDER)
        if path == "run/hostile":
            see_all(page)
        page.wait(
            "!document.querySelector('main [role=status]')?.textContent.startsWith('Reading')"
        )
        for press in ("details", "select"):  # all parts and colours
            page.run(
                f"document.querySelectorAll('main {press}').forEach((each) => each.open = true)"
            )
        page.wait("new Promise((done) => setTimeout(() => done(true), 300))")
        assert page.run("window.attacked") is None, path
        assert page.run("document.scripts.length") == 2, path
        unwanted = (
            "main script, main iframe, main img, main object, main embed, [onerror], [onload]"
        )
        assert page.run(f"document.querySelectorAll('{unwanted}').length") == 0, path
        links = page.run("[...document.querySelectorAll('a[href]')].map((each) => each.protocol)")
        assert set(links) <= {"http:", "data:"}, path
    assert [each["name"] for each in client.ask("runs")["runs"]] == [FOLDER, "hostile", "plain"]
    for name in ("linked", f"{FOLDER}/linked", f"{FOLDER}/../../secret", "../secret", "/etc"):
        assert "secret of yours" not in json.dumps(client.ask("run", 404, run=name))
    page.run("location.hash = '#/'")
    page.wait("document.querySelector('h1')?.textContent === 'Runs'")
    shutil.rmtree(root / FOLDER)
    (root / "linked").unlink()
    page.wait("document.querySelectorAll('tbody tr').length == 2")
    page.errors.clear()


DEMO = (
    "--max_steps=4000 --eval.tasks=4 --eval.interval=2 --minutes=0 --schedule.groups_per_step=4 "
    "--schedule.group_size=4 --task.latency_s=0 --audit.share=0 --checkpoint.interval=1"
)


def test_a_demo_is_followed_and_what_a_kill_leaves_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "LIVE_S", 5.0)
    command = [sys.executable, "-m", "unstale", "train", "retail", f"--runs={tmp_path}"]
    demo = subprocess.Popen(
        [*command, "--name=demo", *DEMO.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with served(tmp_path) as client, dashboard_page(client.dashboard.url, runs=1) as page:
            assert page.run("document.querySelector('tbody a').textContent") == "demo"
            page.run("location.hash = '#/run/demo'")
            step = r"Number(/(\d+) of 4000 steps/.exec(document.body.innerText)?.[1] ?? 0)"
            page.wait(f"{step} >= 1")
            page.wait(f"{step} > {page.run(step)}")
            page.run("location.hash = '#/run/demo/episodes?filter=outcome%3Dtrained'")
            page.wait("document.querySelectorAll('tbody tr').length >= 16")
            demo.kill()
            demo.wait()
            page.run("location.hash = '#/run/demo'")
            page.wait("document.body.innerText.includes('no end recorded')")
            page.run("location.hash = '#/run/demo/episode/1'")
            page.wait("document.querySelectorAll('.t.sampled').length > 3")
            assert page.errors == []
    finally:
        demo.kill()
        demo.wait()


def test_the_keyboard_alone_leads_from_a_curve_to_a_token(page: Page, client: Client) -> None:
    """Every step is Tab, Enter, an arrow key or a letter, and the focus is always visible."""
    client.when_read("hostile")
    page.resize(1280, 900)
    go(page, client, "")
    page.run("document.activeElement?.blur()")

    def tab_to(condition: str) -> None:
        for _ in range(400):
            page.press("Tab")
            if page.run(f"Boolean(document.activeElement?.matches({json.dumps(condition)}))"):
                assert page.run(
                    "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
                ), condition
                return
        raise AssertionError(f"Tab never reached {condition}")

    tab_to("[href='#/run/hostile']")
    page.press("Enter")
    page.wait(PAGES["run/hostile"])
    tab_to(".plot-box")
    tab_to("[href='#/run/hostile/episodes']")
    page.press("Enter")
    page.wait(PAGES["run/hostile/episodes"])
    tab_to("#filter")
    for letter in "step>=4":
        page.press(letter)
    page.wait("document.querySelectorAll('tbody tr').length === 12")
    tab_to("th:nth-child(6) button")
    page.press("Enter")
    page.wait("document.querySelector('th:nth-child(6)').ariaSort === 'descending'")
    assert page.run("document.activeElement.closest('th').ariaSort") == "descending"
    tab_to("tbody a[href*='/group/']")
    page.press("Enter")
    page.wait(PAGES["run/hostile/group/2"])
    tab_to(".sibling h2 a")
    page.press("Enter")
    page.wait(PAGES["run/hostile/episode/5"])
    tab_to("#colour")
    page.press("ArrowDown")
    page.wait("location.hash.includes('colour=')")
    tab_to(".chat")
    page.press("]")
    page.press("ArrowRight")
    page.wait("document.querySelector('.panel').innerText.includes('behavior_logp')")
    assert "/token/" in page.run("location.hash")
    assert page.errors == []


ASKED = (
    "performance.getEntriesByType('resource').map((each) => [each.name, each.decodedBodySize])"
    ".filter(([name]) => name.includes('/api/') && !name.includes('/api/stream'))"
)
SETTLED = "new Promise((done) => setTimeout(() => done(true), 1500))"
"""Waits for requests that a page makes with a delay, after the first news of the run."""

MAX_BYTES = 120_000
MAX_SERIES_BYTES = 24 * 500 * 25
"""Largest answers, in bytes: cells and 800 points of the plane of D and S, and the series of 24
metrics with 500 points, of up to 25 bytes each."""

SCROLL = """(async () => {
  for (let at = 0; at < document.body.scrollHeight; at += 400) {
    scrollTo(0, at);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)));
  }
  scrollTo(0, 0);
})()"""


class Visit:
    """What a page of a run asks of the server, and the elements that it has."""

    def __init__(self, page: Page, run: str) -> None:
        self.page = page
        self.run = run
        self.elements: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.bytes = {"series": 0, "other": 0}

    def do(self, name: str, action: str, condition: str) -> None:
        """Act on the page, and count what was asked until it had its answers."""
        self.page.run("performance.clearResourceTimings()")
        self.page.run(action)
        self.page.wait(condition)
        self.page.run(SETTLED)
        asked = self.page.run(ASKED)
        self.requests[name] = len(asked)
        is_series = ["/api/series?" in url for url, _ in asked]
        for kind, wanted in (("series", True), ("other", False)):
            sizes = [
                size for (_, size), each in zip(asked, is_series, strict=True) if each == wanted
            ]
            self.bytes[kind] = max([self.bytes[kind], *sizes])
        self.elements[name] = self.page.run("document.querySelectorAll('*').length")

    def go(self, name: str, query: str, condition: str) -> None:
        self.do(name, f"location.hash = '#/run/{self.run}{query}'", condition)


def visit(page: Page, run: str, total: int) -> Visit:
    """Open, sort, filter and search the table of a run, and scroll through its page."""
    rows = "document.querySelectorAll('tbody tr').length === 50"
    note = "document.querySelector('main [role=status]').innerText"
    found = Visit(page, run)
    found.go("open", "/episodes", f"{rows} && {note}.startsWith('{total:,} episodes')")
    for number in range(1, page.run("document.querySelectorAll('th').length") + 1):
        head = f"document.querySelector('th:nth-child({number})')"
        press = f"{head}.querySelector('button').click()"
        found.do(f"sort {number}", press, f"{head}.ariaSort !== 'none' && {rows}")
    found.do("next page", f"{PAGER}('Next page').click()", f"{NUMBER}.startsWith('page 2 of')")
    found.do("last page", f"{PAGER}('Last page').click()", f"{PAGER}('Next page').disabled")
    narrowed = f"{rows} && {note}.includes(' episodes of {total:,}')"
    for name, query in {"filter": "filter=success%3D0", "search": "search=desk"}.items():
        found.go(name, f"/episodes?{query}", narrowed)
    found.go("run", "", "document.querySelector('.uplot') && document.querySelector('.lanes')")
    found.do("scroll", SCROLL, "document.querySelectorAll('.card .uplot').length > 10")
    return found


PAGER = "((name) => document.querySelector(`.pager button[aria-label='${name}']`))"
NUMBER = "document.querySelector('.pager span').innerText"


def test_a_page_of_100_000_episodes_does_no_more_than_one_of_1_000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of requests, of elements and of bytes do not depend on the machine.

    benchmarks/dashboard.py measures the pauses.
    """
    monkeypatch.setattr(summary, "LIVE_S", 0.0)  # the state does not change meanwhile
    source = fake_run(tmp_path / "source", steps=12, with_values=True)
    groups = read_groups(source)
    for name, episodes in (("short", 1_000), ("long", 100_000)):
        multiply(source, groups, tmp_path / "runs" / name, episodes)
    visits = {}
    totals = {}
    with served(tmp_path / "runs") as client, dashboard_page(client.dashboard.url, runs=2) as page:
        page.run("performance.setResourceTimingBufferSize(5000)")
        for name in ("short", "long"):
            totals[name] = client.when_read(name, search="desk")["index"]["episodes"]
            visits[name] = visit(page, name, totals[name])
        assert page.errors == []
    short, long = visits["short"], visits["long"]
    assert totals["short"] < 1_001 and totals["long"] > 99_000
    # The first news of a run may come late, so a few requests may count for another action.
    assert sum(long.requests.values()) <= sum(short.requests.values()) + 4
    for name, count in long.requests.items():
        assert count <= short.requests[name] + 2, name
    for name, count in long.elements.items():  # the last page of the short run has fewer rows
        assert count <= 1.1 * max(short.elements[each] for each in (name, "open")), name
    assert 0 < long.bytes["series"] <= MAX_SERIES_BYTES
    assert 0 < long.bytes["other"] <= MAX_BYTES
