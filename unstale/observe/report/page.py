"""Write the report of a run as one HTML page. Text of the run is escaped."""

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from unstale.durability.run_folder import REPORT, write_whole
from unstale.observe.report import audited, figures, sections, survivors
from unstale.observe.report.gather import Gathered, gather
from unstale.observe.report.markup import Markup, el, join
from unstale.observe.report.timeline import pace, pace_of


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, finished or not, complete or not.

    Raises `ConfigError` when the folder holds no run. An older report is replaced as a whole.
    """
    return _write(run_folder, gather(run_folder))


def write_and_summarize(run_folder: Path) -> str:
    """Write the report and return its path, the bottleneck and the advice, as text."""
    run = gather(run_folder)
    pace = pace_of(run)
    return "\n".join(filter(None, (str(_write(run_folder, run)), pace.sentence, pace.advice)))


def _write(run_folder: Path, run: Gathered) -> Path:
    write_whole(run_folder / REPORT, render(run))
    return run_folder / REPORT


def render(run: Gathered) -> str:
    """Return the page as text."""
    return document(
        run.name,
        sections.header(run),
        sections.tiles(run),
        figures.learning(run),
        sections.factors(run),
        figures.staleness(run),
        figures.two_factors(run),
        audited.audit(run),
        pace(run),
        survivors.trained_on(run),
        sections.conversations(run),
        sections.forks(run),
        sections.failures(run),
        sections.reproduce(run),
    )


def document(title: str, *content: Markup | None) -> Markup:
    """Return an HTML page with these sections. One of them contains the button `theme`."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'; "
    policy += "base-uri 'none'; form-action 'none'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"{title} · unstale"),
        el("style", Markup(style)),
    )
    body = el(
        "body",
        el("main", *content),
        el("div", id="tip", role="status", hidden=True),
        el("script", Markup(script)),
    )
    return join(Markup("<!doctype html>\n"), el("html", head, body, lang="en"))


def _asset(name: str) -> str:
    return (files("unstale.observe.report") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """Return the hash that allows this script in the page's content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
