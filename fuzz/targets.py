"""Fuzz targets, one per kind of input. Each takes bytes and raises when the package misbehaves.

Target, then its input and the allowed results:

config_file      config.json of a run folder: ConfigError, or a configuration equal to the file
config_knobs     command line options: ConfigError, or a configuration that reads back equal
journal          a journal's file and rows: JournalError, the written rows, or a finding of `check`
delta            bytes of a weight delta: ValueError and unchanged weights, or the new version
version_chain    the state of a version store: ValueError, or the weights of every version
checkpoint       the files of a checkpoint: CheckpointError, or the written values
tool_call        tokens of a reply: a message, each of whose tool calls gets a text result
chat_text        texts of tools, users and tasks: they stay text, and prompts only grow by turns
endpoint         an HTTP request: the specified answer or status 4xx; no status 500, no hang
"""

import json
import math
import shutil
import sqlite3
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from zstandard import ZstdCompressor, ZstdDecompressor

from fuzz.asks import endpoint
from fuzz.draws import NESTED, ODD, Draws, as_json, require
from fuzz.talk import chat_text, tool_call
from unstale.cli import main, recipe_options
from unstale.config import ConfigError, RunConfig
from unstale.config.options import read_values, reset_unread, stored_config
from unstale.durability.checkpoint import CheckpointError, Checkpoints, Progress
from unstale.durability.journal import JournalError, JournalReader, check, export_rows, write_jsonl
from unstale.durability.journal.tables import (
    COLUMNS,
    COUNTED,
    FORMAT,
    SCHEMA,
    count_rows,
    insert,
    outcome_row,
    piece_rows,
    seal,
)
from unstale.durability.run_folder import CONFIG, RunFolder, plain
from unstale.recipes import RECIPES
from unstale.records import ContextPiece, Failure, Sampled, Task, Trajectory
from unstale.weights.codec import Encoded, _seal, advance, checksum, dumps, encode, loads, words
from unstale.weights.store import Delta, VersionStore


@cache
def scratch() -> Path:
    """Return a temporary folder of this process."""
    held = tempfile.TemporaryDirectory(prefix="fuzz-")
    scratch.held = held  # type: ignore[attr-defined]
    return Path(held.name)


# ----------------------------------------------------------------------------------------------
# configuration


def config_file(data: bytes) -> None:
    draws = Draws(data)
    sound = json.loads(json.dumps(plain(RECIPES["retail"]())))
    match draws.number(4):
        case 0:
            text = draws.rest()
        case 1:
            text = draws.damaged(json.dumps(sound).encode())
        case _:
            text = as_json(draws.changed(sound)).encode()
    run = scratch() / "run"
    run.mkdir(exist_ok=True)
    (run / CONFIG).write_bytes(text)
    given = RunFolder(run).config()
    try:
        config = stored_config(given)
    except ConfigError as error:
        require(bool(str(error)), "an error without a word")
        return
    _require_says(config, given)


def _require_says(config: RunConfig, given: Mapping[str, Any]) -> None:
    held = json.loads(json.dumps(plain(config)))
    stored = read_values(given, CONFIG)
    reset = {name for name, value in reset_unread(stored).items() if value != stored[name]}
    for name, value in given.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, wanted in parts:
            if f"{name}.{part}" in reset:  # an earlier version accepted it, although it is unused
                continue
            found = held[name][part] if part else held[name]
            infinite = isinstance(wanted, float) and math.isinf(wanted) and found is None
            same = found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
            same = same or (name == "runs" and found == str(Path(wanted)))
            require(
                same or infinite,
                f"{name}.{part} is {wanted!r} in the file, {found!r} in the configuration",
            )
    require(stored_config(held) == config, "it is not read back equal")


def _flat(config: Mapping[str, Any]) -> list[str]:
    names = []
    for name, value in config.items():
        names += [f"{name}.{part}" for part in value] if isinstance(value, dict) else [name]
    return [name for name in names if name != "recipe"]


ONES = (
    "0",
    "1",
    "2",
    "3",
    "16",
    "0.5",
    "0.9999",
    "1e3",
    "inf",
    "-inf",
    "nan",
    "true",
    "False",
    "none",
    "1_0",
    " 2 ",
    "٣",
    "snapshot_old",
    "eager",
    "ewma_prox",
    "full",
    "bfloat16",
    "x:y",
    "../x",
    "é",
    "-1",
    "--seed",
    "=",
    "sequence",
)


def config_knobs(data: bytes) -> None:
    draws = Draws(data)
    knobs = tuple(f"--{name}" for name in recipe_options.option_names())
    words_given = []
    for _ in range(1 + draws.number(3)):
        name = draws.choice(knobs) if draws.number(12) < 11 else f"--{draws.text()}"
        value = draws.choice((*ONES, *_defaults(name[2:]))) if name in knobs else "1"
        if draws.number(4) == 3:
            value = str(draws.choice(ODD[:-1])) if draws.number(2) else draws.text()
        word = f"{name}={value}" if draws.number(12) < 11 else value
        words_given += [] if word.startswith(("-h", "--help")) else [word]
    config = _configured(words_given)
    if config is None:
        return
    held = plain(config)
    again = [f"--{name}={_word(_at(config, name))}" for name in _flat(held)]
    require(_configured(again) == config, "as words it is not read back equal")
    require(
        stored_config(json.loads(json.dumps(held))) == config, "as a file it is not read back equal"
    )


def _configured(given: list[str]) -> RunConfig | None:
    try:
        return recipe_options.configure(main.parse(["train", "retail", *given]))
    except ConfigError as error:
        require(bool(str(error)), "an error without a word")
        return None


def _defaults(name: str) -> list[str]:
    """Return the retail recipe's value of an option, if the option belongs to its route and env."""
    try:
        return [_word(_at(RECIPES["retail"](), name))]
    except AttributeError:
        return []


def _at(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------
# journal


@cache
def _sound_journal() -> tuple[bytes, Any]:
    """Return the bytes of a small valid journal and its content."""
    path = scratch() / "sound.sqlite"
    task = Task("retail", "train", 17)
    rows = [insert("checkpoints", 0, 0, 0, "step000000-version000000", 0.5)]
    for number in range(3):
        rows.append(insert("groups", number, task.env, task.split, 17, 5, number, 0.5, 0))
        for sibling in range(2):
            episode = 2 * number + sibling
            rows.append(insert("episodes", episode, number, sibling, episode + 70, 0.5, 0))
            sampled = Sampled((3, 70_000, 4 + episode), (-0.5, -0.25, -2.0), 0)
            pieces = (
                ContextPiece((1, 2, 9, 8)),
                sampled,
                ContextPiece((5, 6)),
                Sampled((7,), (-1.0,), 1),
            )
            for position, piece in enumerate(pieces):
                rows += piece_rows(episode, position, piece, 0)
            ended = Trajectory(
                pieces,
                {"r": 1.0},
                "done",
                task,
                episode + 70,
                episode,
                (0.5, 1.0),
                {"tool_errors": 1.0},
            )
            failed = Failure(task, "step", "it broke", 1, 3)
            if number < 2:
                rows.append(outcome_row(episode, failed if episode == 3 else ended, 0))
        if number < 2:
            rows.append(insert("finished", number, 0.5, 0))
    rows += [insert("checkpoints", 1, 1, 1, "step000001-version000001", 0.75)]
    rows += [insert("consumed", 0, 1, 0, 1, 0.5, 1)]
    rows += [insert("versions", version, 0.5, 0) for version in (0, 1)]
    rows += [
        insert("events", 0.5, "step", json.dumps({"step": step, "loss": 0.5}), 0)
        for step in range(2)
    ]
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA page_size=512; {SCHEMA} PRAGMA user_version={FORMAT};")
    counts = dict.fromkeys(COUNTED, 0)
    tables = Counter(statement.split()[2] for statement, _ in rows)
    for statement, row in [*rows, *count_rows(tables, counts)]:
        connection.execute(statement, row)
    connection.commit()
    connection.close()
    wrong, *expected = _read_journal(path)
    require(not wrong, wrong)
    return path.read_bytes(), expected


def _read_journal(path: Path) -> list[Any]:
    with JournalReader(path) as journal:
        wrong = check(journal)
        handed = journal.groups()
        groups = [journal.group(each.number) for each in handed if each.finished is not None]
        pieces = [journal.pieces(episode) for episode in range(6)]
        trained = [journal.consumed(step) for step in range(3)]
        out = StringIO()
        write_jsonl(export_rows(journal, "tokens", str), out)
        rewards = [kept.trajectory.reward for kept in journal.trajectories()]
        return [
            wrong,
            repr(
                (
                    handed,
                    groups,
                    pieces,
                    trained,
                    rewards,
                    journal.requests(),
                    journal.checkpoints(),
                )
            ),
            out.getvalue(),
            repr((journal.events(), journal.versions())),
            pieces,
        ]


def journal(data: bytes) -> None:
    draws = Draws(data)
    sound, expected = _sound_journal()
    path = scratch() / "journal.sqlite"
    resealed = False
    if draws.number(2):
        path.write_bytes(draws.damaged(sound))
    else:
        path.write_bytes(sound)
        resealed = bool(draws.number(2))
        for _ in range(1 + draws.number(2)):
            _change_row(path, draws, resealed=resealed)
    try:
        wrong, *found = _read_journal(path)
    except JournalError as error:
        require(path.name in str(error), f"an error without the file: {error}")
        return
    require(
        bool(wrong) or resealed or found == expected,
        "changed rows were read and nothing was found wrong",
    )
    for one, other in zip(found[-1], expected[-1], strict=True):
        require(resealed or one == other[: len(one)], "changed pieces were read")


def _change_row(path: Path, draws: Draws, *, resealed: bool) -> None:
    """Change one value of one row, as a user of SQL could."""
    table = draws.choice(sorted(COLUMNS))
    column = draws.choice(COLUMNS[table])
    value = draws.choice(
        (
            None,
            0,
            1,
            -1,
            1.5,
            2**40,
            "x",
            "[1]",
            '{"r": "x"}',
            '{"r": 7}',
            "3",
            b"\1\0\2\0",
            NESTED[0],
        )
    )
    if isinstance(value, bytes) and draws.number(2):
        value = draws.rest()
    columns = ", ".join(COLUMNS[table])
    connection = sqlite3.connect(path)
    connection.create_function("seal", -1, seal)
    try:
        rows = [
            row for (row,) in connection.execute(f"SELECT {COLUMNS[table][0]} FROM {table}")
        ] or [0]
        where = f"WHERE {COLUMNS[table][0]} = ?"
        keyed = draws.choice(rows)
        connection.execute(f"UPDATE {table} SET {column} = ? {where}", (value, keyed))
        if resealed:
            connection.execute(f"UPDATE {table} SET seal = seal('{table}', {columns})")
        connection.commit()
    except (sqlite3.Error, OverflowError):
        pass  # the tables are strict: most values cannot even be put there
    finally:
        connection.close()


# ----------------------------------------------------------------------------------------- deltas
# and versions


def _weights(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    start, moved = torch.randn(700, generator=draw), torch.rand(700, generator=draw)
    return {
        "a": torch.where(moved < 0.05 * step, start * 2, start),
        "b": (start * (1 + step / 64)).bfloat16().reshape(7, 100),
        "c": torch.full((5,), step, dtype=torch.int8),
    }


@cache
def _sound_delta() -> tuple[Delta, bytes]:
    before, after = _weights(1), _weights(2)
    tensors = {name: encode(words(before[name]) ^ words(after[name])) for name in before}
    made = Delta(1, 2, checksum(after), tensors)
    return made, dumps(made)


def delta(data: bytes) -> None:
    draws = Draws(data)
    made, sound = _sound_delta()
    hostile = bool(draws.number(2))
    try:
        read = loads(_forged(sound, draws) if hostile else draws.damaged(sound))
    except ValueError as error:
        require(len(str(error)) > 20, "an error without a word")
        return
    require(hostile or read == made, "damaged bytes were read as another delta")
    weights = _weights(1)
    before = checksum(weights)
    try:
        advance(weights, read)
    except ValueError:
        require(checksum(weights) == before, "the weights are not as they were")
    else:
        require(checksum(weights) == read.checksum, "these are not the weights of the version")


def _forged(sound: bytes, draws: Draws) -> bytes:
    """Return a file with changed content and a matching checksum."""
    if draws.number(2):
        made = _sound_delta()[0]
        name = draws.choice(sorted(made.tensors))
        streams = list(made.tensors[name].streams)
        at = draws.number(len(streams))
        unpacked = (
            streams[at]
            if made.tensors[name].kind == "raw"
            else ZstdDecompressor().decompress(streams[at])
        )
        streams[at] = ZstdCompressor().compress(draws.damaged(unpacked))
        return dumps(
            replace(
                made, tensors={**made.tensors, name: _Claims(made.tensors[name], tuple(streams))}
            )
        )
    (size,) = struct.unpack_from("<Q", sound)
    header, body = json.loads(sound[8 : 8 + size]), sound[8 + size :]
    written = header["__metadata__"]["delta"].partition(" ")[2]
    about = json.loads(written)
    if draws.number(2):
        body = draws.damaged(body)
    else:
        about = draws.changed(about)
    parts = []
    for name in json.loads(written)["tensors"]:
        spans = [header[key]["data_offsets"] for key in header if key.rpartition("/")[0] == name]
        parts.append(SimpleNamespace(streams=[body[first:last] for first, last in spans]))
    text = as_json(about)
    header["__metadata__"] = {"delta": f"{_seal(text, dict(enumerate(parts)))} {text}"}
    if not draws.number(4):
        header = draws.changed(header)
    packed = as_json(header).encode()
    return struct.pack("<Q", len(packed)) + packed + body


class _Claims(Encoded):
    """What is written without being looked at."""

    def __init__(self, held: Encoded, streams: tuple[bytes, ...]) -> None:
        for name, value in (asdict(held) | {"streams": streams}).items():
            object.__setattr__(self, name, value)


VERSIONS = (1, 2, 4, 7)


@cache
def _sound_state(at: int) -> Mapping[str, Any]:
    store = VersionStore()
    for version in VERSIONS:
        store.put(version, _weights(version))
    store.move_to(at)
    return store.state()


def version_chain(data: bytes) -> None:
    draws = Draws(data)
    sound = _sound_state(draws.choice(VERSIONS))
    state = {**sound, "shelf": dict(sound["shelf"]), "versions": list(sound["versions"])}
    shelf = state["shelf"]
    one, other = draws.choice(sorted(shelf)), draws.choice(sorted(shelf))
    match draws.number(7):
        case 0:
            bytes_of = draws.damaged(shelf[one].numpy().tobytes())
            shelf[one] = torch.frombuffer(bytearray(bytes_of or b"\0"), dtype=torch.uint8)
        case 1:
            shelf[one], shelf[other] = shelf[other], shelf[one]
        case 2:
            del shelf[one]
        case 3:
            state["versions"] = draws.choice(
                ([], [1], [*VERSIONS, 9], [7, 4, 2, 1], [1, 2, 2, 4, 7], [1, 2, 4, 8])
            )
        case 4:
            state["at"] = draws.choice((*VERSIONS, -1, 3))
        case 5:
            moved = {name: tensor.clone() for name, tensor in sound["movable"].items()}
            words(moved[draws.choice(sorted(moved))]).view(-1)[draws.number(5)] ^= (
                1 << draws.number(7)
            )
            state["movable"] = moved
        case 6:
            shelf[9 + draws.number(9)] = shelf[one]
    store = VersionStore()
    try:
        store.restore(state)
    except ValueError as error:
        require(len(str(error)) > 20, "an error without a word")
        return
    require(store.versions == VERSIONS, f"it was restored with versions {store.versions}")
    for version in (*VERSIONS, *VERSIONS[::-1]):
        require(
            checksum(store.tensors(version)) == checksum(_weights(version)),
            f"version {version} is another one",
        )


# ------------------------------------------------------------------------------------------------
# checkpoints


CHECKPOINT = "step000003-version000007"


@cache
def _sound_checkpoint() -> tuple[Path, list[str]]:
    """Return a run folder with a checkpoint and a version, and its content."""
    run = scratch() / "checkpointed"
    shutil.rmtree(run, ignore_errors=True)
    state = {
        "trainer": {"weights": _weights(3), "steps": 3},
        "route": {"versions": [1, 2], "nan": math.nan, "by": {1: "a"}, "held": torch.arange(6.0)},
        "none": {"none": None},
    }
    parts = {name: _Part(state[name]) for name in state}
    held = Checkpoints(run, parts)
    held.save(
        Progress(3, {"loss": math.nan}), SimpleNamespace(version=7, weights=lambda: _weights(7))
    )  # type: ignore
    held.write_version(8, _weights(8), None)
    return run, [repr(read()) for read in _reads(run)]


def _reads(run: Path) -> list[Callable[[], Any]]:
    """Return every function that reads from the disk."""
    torch.set_printoptions(threshold=10**6)
    held = Checkpoints(run, {})
    return [partial(held.load, CHECKPOINT), partial(held.weights, 7), partial(held.weights, 8)]


class _Part:
    """A component that has only a state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.restored: Mapping[str, Any] = state

    def state(self) -> Mapping[str, Any]:
        return self.restored

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restored = state


def checkpoint(data: bytes) -> None:
    draws = Draws(data)
    sound, expected = _sound_checkpoint()
    run = scratch() / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(sound, run)
    path = draws.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    forged = path.name == "manifest.json" and draws.number(2)
    if forged:
        body = draws.changed(json.loads(path.read_bytes())["body"])
        path.write_text(as_json({"checksum": zlib.crc32(as_json(body).encode()), "body": body}))
    elif draws.number(8):
        path.write_bytes(draws.damaged(path.read_bytes()))
    else:
        path.rename(path.with_name(f"other{draws.number(9)}{path.suffix}"))
    for read, written in zip(_reads(run), expected, strict=True):
        try:
            found = repr(read())
        except (CheckpointError, LookupError) as error:
            require(
                not isinstance(error, KeyError) and len(str(error)) > 20,
                f"an error without a word: {error!r}",
            )
        else:
            require(
                bool(forged) or found == written,
                f"{path.name} was changed, read, and is another one",
            )


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        config_file,
        config_knobs,
        journal,
        delta,
        version_chain,
        checkpoint,
        tool_call,
        chat_text,
        endpoint,
    )
}
