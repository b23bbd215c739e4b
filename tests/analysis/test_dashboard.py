"""What is promised of the dashboard's server.

- Only the user with the token is answered, on the right host name, and only to GET.
- No path, name or link leads out of the runs folder or the folder of the pages.
- Every answer has a content security policy without inline scripts; text of a run stays text.
- Nothing is written into a run folder.
- The episodes of a live run are counted, and read once a page shows them.
- A live run's growth is sent as it happens; a damaged journal is a sentence.
"""

import http.client
import json
import os
import re
import resource
import shutil
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.fake_run import fake_run
from tests.support.waits import wait_until
from unstale.analysis.commands import dashboard as dashboard_command
from unstale.analysis.dashboard import indexer, summary
from unstale.analysis.dashboard.folders import RunFolders
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.server import HEADERS, HOST, POLICY, Dashboard, _json
from unstale.cli import main
from unstale.config import ConfigError
from unstale.durability.journal import JOURNAL
from unstale.durability.run_folder import EVENTS, METRICS

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
SECRET = "a secret of yours"
OUTSIDE = r"https?://(?!www\.w3\.org/2000/svg)|@import|\burl\("
STATIC = files("unstale.analysis.dashboard") / "static"


class Client:
    """An HTTP client of one dashboard, with the cookie unless another is given."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self.cookie = f"unstale_{dashboard.port}={dashboard.token}"

    def request(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, self.dashboard.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="host" in headers)
            for name, value in {"cookie": self.cookie, **headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def ask(self, question: str, status: int = 200, /, **params: Any) -> Any:
        query = urlencode(params, doseq=True)
        code, headers, body = self.request(f"/api/{question}?{query}")
        assert (code, headers["content-type"]) == (status, "application/json"), body
        return json.loads(body)

    def when_read(self, run: str, **search: str) -> Any:
        """Wait until the index has all of a run, and return the answer about the run.

        With `search`, the index also has all texts.
        """
        pause = threading.Event()
        while not self.ask("episodes", run=run, **search)["index"]["complete"]:
            pause.wait(0.05)
        return self.ask("run", run=run)


@contextmanager
def served(root: Path) -> Iterator[Client]:
    dashboard = Dashboard(root)
    client = Client(dashboard)
    thread = threading.Thread(target=dashboard.serve)
    thread.start()
    try:
        # A server makes its loggers until it answers, and pytest iterates over them.
        client.request("/")
        yield client
    finally:
        dashboard.stop()
        thread.join()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the folders more often than a user needs."""
    monkeypatch.setattr(indexer, "POLL_S", 0.05)
    monkeypatch.setattr(indexer, "SEARCH_S", 0.05)
    monkeypatch.setattr(indexer, "JOURNAL_S", 0.05)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "first", steps=6, prefix=ATTACK)


@pytest.fixture
def root(recorded: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "runs" / "first")
    (tmp_path / "yours").write_text(SECRET)
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        yield found


def test_only_the_token_admits_a_request(client: Client) -> None:
    token, port = client.dashboard.token, client.dashboard.port
    assert len(token) >= 32 and client.dashboard.url == f"http://{HOST}:{port}/?token={token}"
    paths = ["/", "/main.js", "/api/runs", "/api/stream", "/api/episode?run=first&episode=1"]
    for path in paths:
        for cookie in ("", f"unstale_{port}=wrong", f"unstale_{port + 1}={token}", token):
            status, _, body = client.request(path, cookie=cookie)
            assert status == 401 and b"open the address" in body and b"first" not in body
    assert client.request("/?token=wrong", cookie="")[0] == 401
    for path, place in (("/?token=", "/"), ("/api/runs?token=", "/api/runs")):
        status, headers, _ = client.request(path + token, cookie="")
        assert status == 303 and headers["location"] == place
        kept = headers["set-cookie"]
        assert kept.startswith(f"{client.cookie};") and "HttpOnly" in kept
        assert "SameSite=strict" in kept
    assert client.request(f"//elsewhere.org?token={token}", cookie="")[1]["location"] == "/"
    assert client.request("/api/runs")[0] == 200


def test_another_host_name_and_other_methods_are_refused(client: Client) -> None:
    port = client.dashboard.port
    for host in ("elsewhere.org", f"elsewhere.org:{port}", HOST, f"{HOST}:1", ""):
        assert client.request("/api/runs", host=host)[0] == 421
    assert client.request("/api/runs", host=f"localhost:{port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert client.request("/api/runs", method=method)[0] == 405


def test_every_answer_has_the_policy(client: Client) -> None:
    assert "unsafe" not in POLICY and "http" not in POLICY
    assert "script-src 'self'" in POLICY and "default-src 'none'" in POLICY
    token = client.dashboard.token
    for path in ("/", "/main.js", "/api/runs", "/api/run?run=no", "/nowhere", f"/?token={token}"):
        _, headers, _ = client.request(path)
        assert {name: headers.get(name) for name in HEADERS} == HEADERS, path
    assert client.request("/", cookie="")[1]["content-security-policy"] == POLICY
    for path, kind in (("/", "text/html"), ("/main.js", "text/javascript"), ("/api/runs", "app")):
        assert client.request(path)[1]["content-type"].startswith(kind)
    assert "access-control-allow-origin" not in client.request("/", origin="null")[1]


OUT = ["..", "../yours", "first/../../yours", "/etc", "first/../first", "linked", "", ".", "%2e%2e"]


def test_no_name_leads_out_of_the_runs(client: Client, root: Path) -> None:
    shutil.copytree(root / "first", root.parent / "outside")
    (root / "linked").symlink_to(root.parent / "outside")
    for name in OUT:
        for question in ("run", "series", "lags", "spans", "log", "episodes", "stream"):
            status, _, body = client.request(f"/api/{question}?{urlencode({'run': name})}")
            assert status == 404 and SECRET.encode() not in body, (name, question)
        assert client.ask("episode", 404, run=name, episode=1)["error"]
        assert client.ask("group", 404, run=name, group=1)["error"]
    assert [run["name"] for run in client.ask("runs")["runs"]] == ["first"]


def test_no_path_leads_out_of_the_pages(client: Client) -> None:
    for path in (
        "/../server.py",
        "/vendor/../../server.py",
        "/%2e%2e/server.py",
        "/..%2fserver.py",
        "//etc/passwd",
        "/vendor",
        "/vendor/",
        "/static/main.js",
        "/__init__.py",
        "/\\..\\server.py",
    ):
        assert client.request(path)[0] == 404, path


def test_links_in_a_run_folder_are_not_followed(root: Path) -> None:
    run = root / "first"
    for name in ("config.json", "events.jsonl", "error.txt", "tokenizer.json", JOURNAL):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(root.parent / "yours")
    with served(root) as client:
        found = client.when_read("first")
        texts = json.dumps([found, client.ask("runs"), client.ask("log", run="first")])
        assert SECRET not in texts
        assert f"{JOURNAL} is a link, and links are not followed" in found["problems"]
        assert client.ask("episodes", run="first")["total"] == 0


def test_nothing_is_written_into_a_run_folder(root: Path) -> None:
    def content() -> dict[str, tuple[bytes, int]]:
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    before = content()
    with served(root) as client:
        client.when_read("first")
        client.ask("episode", run="first", episode=1)
        client.ask("group", run="first", group=1)
        client.ask("episodes", run="first", search="Mia")
    assert content() == before


def test_the_runs_and_a_run(client: Client) -> None:
    found = client.when_read("first")
    (run,) = client.ask("runs")["runs"]
    assert (run["name"], run["recipe"], run["route"]) == ("first", "retail", "snapshot_old")
    assert (run["step"], run["steps"], run["state"]) == (6, 6, "stopped")
    assert [each["step"] for each in run["evaluations"]] == [0]
    assert run["rollouts"][0] == [1, 2, 3, 4, 5, 6]
    assert found["index"]["ended"] == 24 and found["options"]["max_steps"] == "6"
    assert found["exact"] and len(found["factors"]) == 2 and len(found["checks"]) == 9
    names = [section["name"] for section in found["sections"]]
    assert names[:2] == ["outcome", "signal"] and "engines" in names
    metrics = ["reward/mean", "objective/loss"]
    series = client.ask("series", run="first", name=metrics)["series"]
    assert all(len(series[name][0]) == len(series[name][1]) == 6 for name in metrics)
    lags = client.ask("lags", run="first")
    assert sum(tokens for _, tokens in lags["total"]) == found["figures"]["trained_tokens"]
    assert sum(tokens for _, by_lag in lags["steps"] for _, tokens in by_lag) == pytest.approx(
        found["figures"]["trained_tokens"]
    )
    assert client.ask("spans", run="first", start=20, end=21)["total"] > 0


@pytest.mark.parametrize(
    ("question", "params", "sentence"),
    [
        ("run", {}, "the parameter run is missing"),
        ("episode", {"run": "first"}, "the parameter episode is missing"),
        ("episode", {"run": "first", "episode": "x"}, "episode must be a whole number, got 'x'"),
        ("episode", {"run": "first", "episode": "9" * 20}, "episode is too large"),
        ("episodes", {"run": "first", "sort": "x"}, "sort must be one of episode,"),
        ("episodes", {"run": "first", "filter": "x=1"}, "there is no column 'x'"),
        ("episodes", {"run": "first", "page": "1.5"}, "page must be a whole number"),
        ("episodes", {"run": "first", "filter": "x" * 2001}, "at most 2000 characters, got 2001"),
        ("series", {"run": "first", "name": ["a"] * 25}, "at most 24 metrics at a time, got 25"),
        ("series", {"run": "first", "points": "1"}, "points must be between 2 and 2000"),
        ("spans", {"run": "first", "start": "x"}, "start must be a number, got 'x'"),
    ],
)
def test_a_wrong_question_is_explained(
    client: Client, question: str, params: dict[str, Any], sentence: str
) -> None:
    assert sentence in client.ask(question, 400, **params)["error"]


def test_what_a_run_says_stays_text(client: Client) -> None:
    """It is in JSON that browsers never show as a page, and no script makes HTML of text."""
    client.when_read("first")
    found = client.ask("episode", run="first", episode=1)
    text = "".join(text for piece in found["pieces"] for text in piece["texts"])
    assert text.startswith(ATTACK) and found["task"].startswith(f"{ATTACK}retail/train/")
    ways = (
        r"(inner|outer|insertAdjacent)HTML|document\.write|srcdoc|DOMParser|\beval\(|new Function"
    )
    for file in STATIC.iterdir():
        if file.name.endswith((".js", ".html")):
            assert not re.search(ways, file.read_text()), file.name
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|javascript:|//", page)


def test_the_pages_need_nothing_from_elsewhere(client: Client) -> None:
    page = (STATIC / "index.html").read_text()
    wanted = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    for file in STATIC.iterdir():
        if file.name.endswith(".js"):
            wanted |= set(re.findall(r'from "\./([^"]+)"', file.read_text()))
        if file.name.endswith((".js", ".css", ".html")):
            assert not re.search(OUTSIDE, file.read_text()), file.name
    assert {"main.js", "vendor/uPlot.min.js", "base.css"} <= wanted
    for name in wanted:
        assert client.request(f"/{name}")[0] == 200, name
    assert b"MIT" in client.request("/vendor/uPlot-LICENSE.txt")[2]


class Stream:
    """A stream of server-sent events."""

    def __init__(self, client: Client, query: str = "") -> None:
        self._connection = http.client.HTTPConnection(HOST, client.dashboard.port, timeout=60)
        self._connection.request("GET", f"/api/stream{query}", headers={"cookie": client.cookie})
        self._response = self._connection.getresponse()
        assert self._response.getheader("content-type", "").startswith("text/event-stream")

    def until(self, name: str, value: Any) -> dict[str, Any]:
        """Read until an event has a value, and return the event."""
        while True:
            line = self._response.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                if found.get(name) == value:
                    return found

    def close(self) -> None:
        self._connection.close()


def test_a_growing_run_is_sent_as_it_grows(client: Client, root: Path) -> None:
    all_runs, stream = Stream(client), Stream(client, "?run=first")
    assert all_runs.until("runs", 1) and stream.until("ended", 24)["state"] == "stopped"
    with (root / "first" / METRICS).open("a") as file:
        file.write('{"step": 7, "time_s": 99, "reward/mean": 0.75}\n')
    assert stream.until("last_step", 7)["rows"] == 8
    found = client.ask("series", run="first", name="reward/mean")["series"]["reward/mean"]
    assert (found[0][-1], found[1][-1]) == (7, 0.75)
    shutil.copytree(root / "first", root / "second")
    assert all_runs.until("runs", 2)
    for each in (all_runs, stream):
        each.close()
    again = Stream(client, "?run=first")  # a client that lost its connection
    assert again.until("last_step", 7)["episodes"] == 24
    again.close()


def test_the_episodes_of_a_live_run_are_read_when_they_are_shown(root: Path) -> None:
    """The page of a live run counts them, because the training needs the processor."""
    events = root / "first" / EVENTS
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"stopped"' not in line))
    with served(root) as client:
        stream = Stream(client, "?run=first")
        assert stream.until("started", 24)["state"] == "live"
        pause = threading.Event()
        pause.wait(0.3)
        index = client.ask("run", run="first")["index"]
        assert (index["started"], index["ended"], index["complete"]) == (24, 0, False)
        client.ask("episodes", run="first")
        assert stream.until("complete", True)["ended"] == 24
        stream.close()
    with served(root) as client:
        stream = Stream(client, "?run=first&episodes=1")
        assert stream.until("complete", True)["searchable"] == 0
        client.ask("episodes", run="first", search="Mia")
        assert stream.until("searchable", 24)["complete"]
        found = client.ask("episodes", run="first", search="Mia")
        assert 0 < found["total"] < 24 and found["index"]["complete"]
        stream.close()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("plain ü", b'"plain \xc3\xbc"'),
        ("\x7f\u202e", b'"\\u007f\\u202e"'),
        ("\ud800", b'"?"'),
        (float("nan"), b"null"),
        (1 << 70, b"1180591620717411303424"),
    ],
)
def test_an_answer_is_valid_json_whatever_a_run_says(text: Any, written: bytes) -> None:
    body = bytes(_json({"text": text, 3: [1]}).body)
    assert body.replace(b'": ', b'":').replace(b", ", b",") == b'{"text":' + written + b',"3":[1]}'


def test_a_damaged_journal_is_a_sentence_and_the_rest_is_shown(root: Path) -> None:
    data = bytearray((root / "first" / JOURNAL).read_bytes())
    data[:64] = b"x" * 64
    (root / "first" / JOURNAL).write_bytes(data)
    with served(root) as client:
        found = client.when_read("first")
        (problem,) = found["problems"]
        assert "failed: file is not a database" in problem and found["step"] == 6
        assert client.ask("episodes", run="first")["index"]["problems"] == [problem]
        assert client.ask("episode", 404, run="first", episode=1)["error"]


def test_a_copied_run_without_its_tokenizer_is_shown_by_numbers(root: Path) -> None:
    (root / "first" / "tokenizer.json").unlink()
    with served(root) as client:
        (problem,) = client.when_read("first")["problems"]
        assert problem.startswith("texts cannot be searched: ")
        found = client.ask("episode", run="first", episode=1)
        assert not found["has_texts"] and found["pieces"][0]["ids"]
        assert client.ask("episodes", 400, run="first", search="Mia")["error"] == problem


def test_one_run_that_cannot_be_followed_stops_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be opened, and an index that cannot be written, are sentences."""
    shutil.copytree(root / "first", root / "broken")
    shutil.copytree(root / "first", root / "full")
    opened, written = Path.open, RunIndex._read_events

    def open_file(path: Path, *given: Any, **named: Any) -> Any:
        if path == root / "broken" / METRICS:
            raise PermissionError(13, "Permission denied")
        return opened(path, *given, **named)

    def read_events(index: RunIndex) -> bool:
        if index.folder == root / "full":
            raise sqlite3.OperationalError("database or disk is full")
        return written(index)

    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(RunIndex, "_read_events", read_events)
    with served(root) as client:
        found = client.when_read("broken")
        assert found["problems"] == ["metrics.jsonl cannot be read: Permission denied"]
        assert found["index"]["ended"] == 24
        pause = threading.Event()
        while not (problems := client.ask("run", run="full")["problems"]):
            pause.wait(0.05)
        (failure,) = problems
        assert failure.endswith("failed: database or disk is full; start again")
        assert client.when_read("first")["problems"] == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (sqlite3.OperationalError("no such table: names"), "no such table: names; was it removed?"),
        (ConfigError("steps must be positive"), "steps must be positive"),
    ],
)
def test_a_run_that_is_removed_while_it_is_read_is_a_sentence(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def overview(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(summary, "overview", overview)
    assert client.ask("run", 409, run="first")["error"].endswith(sentence)


def test_idle_connections_do_not_lock_out_the_user(client: Client) -> None:
    with ExitStack() as opened:
        for _ in range(120):
            address = (HOST, client.dashboard.port)
            opened.enter_context(socket.create_connection(address)).sendall(b"GET /")
        assert len(client.ask("runs")["runs"]) == 1


def test_more_runs_than_descriptors_are_read(tmp_path: Path) -> None:
    for number in range(60):
        run = tmp_path / f"run{number:02}"
        run.mkdir()
        (run / METRICS).write_text('{"step": 1, "loss": 1}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folders = RunFolders(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
        with indexer.Indexer(folders) as found:
            wait_until(
                lambda: sum(each.num_rows for each in found.known().values()) == 60, "all rows"
            )
            assert not found.problem
            assert not any(each.problems for each in found.known().values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_runs_need_few_descriptors_and_one_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        run = tmp_path / f"run{number:02}"
        run.mkdir()
        (run / METRICS).write_text('{"step": 1, "loss": 1}\n')
    made = indexer.RunIndex

    def make(folder: Path, path: Path) -> RunIndex:
        if folder.name == "run07":
            raise sqlite3.OperationalError("unable to open database file")
        return made(folder, path)

    monkeypatch.setattr(indexer, "RunIndex", make)
    before = len(os.listdir("/proc/self/fd"))
    with indexer.Indexer(RunFolders(tmp_path)) as found:

        def has_read_all() -> bool:
            known = found.known()
            return len(known) >= 39 and all(each.num_rows for each in known.values())

        def has_closed_files() -> bool:
            return len(os.listdir("/proc/self/fd")) <= before + 20

        wait_until(has_read_all, "the rows of 39 runs")
        wait_until(has_closed_files, "files of runs without new rows to be closed")
        assert found.problem == "run07 cannot be read: unable to open database file"


def test_the_command_refuses_what_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["dashboard", str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert "is not a folder of runs: it does not exist" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    taken = Dashboard(tmp_path / "runs")
    with taken._socket, pytest.raises(SystemExit) as end:
        main.main(["dashboard", str(tmp_path / "runs"), "--port", str(taken.port)])
    assert end.value.code == 2
    assert f"cannot listen on port {taken.port}" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Dashboard(tmp_path / "nowhere")


def test_the_command_serves_at_the_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run_at_low_priority(act: Callable[[], object]) -> int:
        calls.append("low priority")
        act()
        return 7

    monkeypatch.setattr(dashboard_command, "run_at_low_priority", run_at_low_priority)

    def serve(dashboard: Dashboard) -> None:
        dashboard._socket.close()
        calls.append("served")

    monkeypatch.setattr(Dashboard, "serve", serve)
    with pytest.raises(SystemExit) as end:
        main.main(["dashboard", str(tmp_path)])
    assert end.value.code == 7
    assert calls == ["low priority", "served"]
