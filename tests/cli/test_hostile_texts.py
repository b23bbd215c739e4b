"""Test that no command lets a text of a run folder or a model folder control the terminal."""

import json
import logging
import re
import shutil
import sqlite3
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import fake_run
from unstale.cli.main import main
from unstale.config.run import SHIPPED_POLICIES
from unstale.durability.console import escape_logs
from unstale.durability.journal import JOURNAL
from unstale.durability.journal.tables import COLUMNS, seal

EVIL = "\x1b]0;t\x07\x1b]8;;x\x1b\\\x1b]52;c;eA==\x07\x1b[2J\x9b1A\x9d0;t\x9c\u202e\u2066\r\b\x7f"
"""Titles, links, the clipboard and the cursor by ESC and by C1, the direction of text, the line."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COMMANDS = (
    *(("journal", "RUN"), ("journal", "RUN", "--json"), ("advise", "RUN"), ("report", "RUN")),
    *(("advise", "RUN", "--json"), ("report", "RUN", "--json"), ("replay", "RUN")),
    *(("export-trajectories", "RUN", "--content", "text"), ("export-trajectories", "RUN")),
    *(("export", "RUN", "OUT"), ("same", "RUN", "RUN"), ("audit", "RUN"), ("eval", "RUN")),
    *(("train", "--resume", "RUN"), ("compare", "--report", "RUN"), ("push-to-hub", "RUN")),
    *(("probe-distillation", "RUN", "RUN"), ("check-template", "RUN"), ("check-template", "MODEL")),
    *(("eval", "MODEL", "calculator"), ("train", "calculator", "--model", "MODEL")),
    ("lint", "CONFIG"),
    ("train", "CONFIG"),
)


def poisoned(value: Any, key: str = "") -> Any:
    """Return JSON in which every text but a few names is followed by controls."""
    if isinstance(value, dict):
        return {name: poisoned(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, key) for each in value]
    return value + EVIL if isinstance(value, str) and key != "kind" else value


def poison_journal(path: Path) -> None:
    with closing(sqlite3.connect(path)) as writer:
        writer.create_function("seal", -1, seal)
        texts = {"groups": ("env", "split"), "failures": ("stage", "error"), "events": ("kind",)}
        for table, columns in texts.items():
            for column in columns:
                writer.execute(f"UPDATE {table} SET {column} = {column} || ?", (EVIL,))
            writer.execute(
                f"UPDATE {table} SET seal = seal('{table}', {', '.join(COLUMNS[table])})"
            )
        writer.commit()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "run"
    fake_run(folder, steps=3, prefix=EVIL)
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("where", ["texts", "options", "journal", "damage"])
def test_no_command_shows_a_raw_control_character(
    where: str,
    run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    escape_logs()  # as in a process of its own
    folder, model = tmp_path / f"run{EVIL}", tmp_path / f"model{EVIL}"
    shutil.copytree(run, folder)
    shutil.copytree(SHIPPED_POLICIES["base"], model)
    match where:
        case "texts":
            for name in ("metrics.jsonl", "events.jsonl"):
                lines = (folder / name).read_text().strip().split("\n")
                rows = [poisoned(json.loads(line)) for line in lines]
                rows = [{**row, f"a/{EVIL}": 1.0} for row in rows]
                lines = [json.dumps(row, ensure_ascii=False) for row in rows]
                (folder / name).write_text("\n".join(lines) + "\n")
            (folder / "error.txt").write_text(EVIL)
        case "options":
            for each in (folder / "config.json", model / "config.json"):
                each.write_text(json.dumps(poisoned(json.loads(each.read_text()))))
        case "journal":
            poison_journal(folder / JOURNAL)
            config = json.loads((model / "tokenizer_config.json").read_text())
            template = "{{ raise_exception('" + EVIL.replace("\\", "\\\\") + "') }}"
            config = {**config, "chat_template": template}
            (model / "tokenizer_config.json").write_text(json.dumps(config))
            (model / "chat_template.jinja").write_text(template)
        case "damage":
            (folder / JOURNAL).write_bytes(b"SQLite format 3\0" + EVIL.encode() * 99)
            (folder / "events.jsonl").write_text(f"{EVIL}\n{{}}\n")
            (model / "config.json").write_text(f'{{"model_type": "{EVIL}"')
    options = tmp_path / f"options{EVIL}.toml"
    options.write_text('recipe = "calculator"\n"x\\u001b[2J" = "y\\u009b"\n')
    words = {"RUN": folder, "MODEL": model, "CONFIG": options, "OUT": tmp_path / "out"}
    for command in COMMANDS:
        if where == "texts" and "MODEL" in command:
            continue  # the model is the shipped one
        with suppress(SystemExit):
            main([str(words.get(word, word)) for word in command])
        shown = "".join(capfd.readouterr())
        assert shown and not CONTROL.search(shown), f"{command}: {shown[:2000]!r}"
