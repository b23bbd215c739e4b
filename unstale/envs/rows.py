"""Rows of data files, of data sets on the Hugging Face hub, and of Python lists.

Each row has its place, so that errors can name the file and line. Input that a reader would
silently drop or mix up is refused: repeated names, values without a column, unclear separators. The
memory for rows is limited, however large the content of a compressed file is.
"""

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from itertools import chain, islice
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from unstale.config import ConfigError, install
from unstale.config.given import HERE
from unstale.envs.strict_json import loads

FILES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files with rows, in lower or upper case. All but Parquet may be compressed (.gz)."""
MAX_BYTES = 2 << 30
"""Largest number of bytes of a file's values. As Python objects they take several times as much."""
MAX_ROW_BYTES = 16 << 20
"""Largest number of bytes of a line. A context of a million tokens has about 4 MB."""
_ROW_BYTES = 512
"""Bytes of memory that a row of a data set takes in addition to its values, as an estimate."""
_SEPARATORS = ",;\t|"
_SAMPLE = 256
"""Number of lines in which the separator is looked for, and of Parquet rows that are read at
once.
"""


class Row(dict[str, Any]):
    """A row of data: column -> value. Its `place` is a text for errors, such as `rows.jsonl, line
    3`.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], place: str) -> None:
        super().__init__(values)
        self.place = place


class _Meter:
    """A counter of the memory that the rows of a file take."""

    def __init__(self) -> None:
        self.left = MAX_BYTES

    def add(self, num_bytes: int, path: Path) -> None:
        """Count another row of `num_bytes`. Raises `ConfigError` if the rows exceed `MAX_BYTES`."""
        self.left -= num_bytes + _ROW_BYTES
        if self.left < 0:
            raise ConfigError(
                f"{path} has more than {MAX_BYTES >> 20:,} MiB of rows, and all are kept in "
                "memory: take a part of them, or write a task set that reads them itself"
            )


def load_rows(
    source: str, *, subset: str = "", split: str = "train", option: str = "task.env"
) -> list[Row]:
    """Return the rows of a file, or of a data set on the hub.

    `source` is the name of a data set if it has no suffix of a data file and no file has this name.
    Data sets need the extra `datasets`. `option` is named in errors. Raises `ConfigError` if the
    rows cannot be read.
    """
    path, kind = Path(source), file_type(source)
    if source.startswith(HERE):
        raise ConfigError(
            f"{option}: the rows were given in Python, and this process does not have them. Give "
            f"them again in Python, or write them to a file and name it with --{option}"
        )
    if kind not in FILES and path.is_file():
        raise ConfigError(
            f"{option}: {path} is not of a type that is read: {', '.join(FILES)}, or one of the "
            "first three with .gz"
        )
    if kind not in FILES:
        return _hub_rows(source, subset, split)
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path.absolute()}")
    if kind == ".parquet":
        return list(_parquet_rows(path))
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if kind == ".json":
                return list(_json_rows(file, path))
            lines = _lines(file, path)
            return list(_csv_rows(lines, path) if kind == ".csv" else _jsonl_rows(lines, path))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def list_rows(rows: Any, option: str, prompt_column: str) -> list[Row]:
    """Return the rows that a Python program passed as the option named `option`.

    A text or a list of messages is a row with only a prompt. Raises `ConfigError` if `rows` is no
    list of rows.
    """
    if hasattr(rows, "iloc"):  # a table of pandas, whose items are the names of columns
        _require_names([str(name) for name in rows.columns], option)
        rows = rows.to_dict("records")
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"{option} must be a list of rows, got a {kind} with {', '.join(map(str, rows))}. Give "
            "one of them; task.held_out_file takes the rows for evaluation"
        )
    if not hasattr(rows, "__len__"):
        raise ConfigError(
            f"{option} must be rows with a length, got a {kind}. Give a list of it, such as "
            "list(itertools.islice(rows, 1000))"
        )
    listed: list[Row] = []
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str | list):
            row = {prompt_column: row}
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{option}, row {number} must be a dict, a text or a list of messages, got a "
                f"{type(row).__name__}"
            )
        listed.append(Row(row, f"{option}, row {number}"))
    return listed


def file_type(source: str) -> str:
    """Return the suffix that decides how a file is read, in lower case and without `.gz`.

    >>> file_type("Rows.JSONL.gz"), file_type("rows.parquet"), file_type("openai/gsm8k")
    ('.jsonl', '.parquet', '')
    """
    name = source.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    return "" if name != source.lower() and suffix == ".parquet" else suffix


def _lines(file: BufferedIOBase, path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends, without a byte order mark."""
    meter = _Meter()
    number = 0
    while data := file.readline(MAX_ROW_BYTES + 1):
        if len(data) > MAX_ROW_BYTES:
            raise ConfigError(f"{path}, line {number + 1} has more than {MAX_ROW_BYTES:,} bytes")
        meter.add(len(data), path)
        for line in data.splitlines(keepends=True):
            number += 1
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                problem = f"byte {error.start + 1} is {line[error.start]:#04x}"
                raise ConfigError(
                    f"{path}, line {number} is not UTF-8 ({problem}): save the file as UTF-8"
                ) from None
            if "\0" in text:
                raise ConfigError(
                    f"{path}, line {number} has a NUL character: save the file as UTF-8 text"
                )
            yield text


def _jsonl_rows(lines: Iterator[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _object(_json(line, f"{path}, line {number}"), f"{path}, line {number}")


def _json_rows(file: BufferedIOBase, path: Path) -> Iterator[Row]:
    most = MAX_BYTES // 8  # a value of two characters takes 8 times as much
    data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(
            f"{path} has more than {most >> 20} MiB: write one object a line (.jsonl)"
        )
    values = _json(data, str(path))
    if not isinstance(values, list):
        raise ConfigError(f"{path} must be a list of objects; for one object a line use .jsonl")
    for number, value in enumerate(values, start=1):
        yield _object(value, f"{path}, item {number}")


def _csv_rows(lines: Iterator[str], path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header. All values are texts."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the process: other readers are not used
    first = list(islice(lines, _SAMPLE))
    separator = _separator(first, path)
    reader = csv.reader(chain(first, lines), delimiter=separator, strict=True)
    names: list[str] = []
    number = 1
    try:
        for values in reader:
            if values and not names:
                names = values
                _require_names(names, f"{path}, line {number}")
            elif values and len(values) != len(names):
                raise ConfigError(
                    f"{path}, line {number}: the row has {len(values)} values, and the header has "
                    f"{len(names)} columns, separated by {separator!r}"
                )
            elif values:
                yield Row(zip(names, values, strict=True), f"{path}, line {number}")
            number = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{path}, line {number} is not CSV: {error}") from None


def _separator(lines: Sequence[str], path: Path) -> str:
    """Return the character that separates columns: the header and the first row then have equally
    many.
    """
    found = []
    for each in _SEPARATORS:
        rows = (row for row in csv.reader(lines, delimiter=each) if row)
        header, row = next(rows, []), next(rows, None)
        if len(header) > 1 and (row is None or len(row) == len(header)):
            found.append(each)
    if len(found) > 1:
        raise ConfigError(
            f"{path} may have its columns separated by {' or '.join(map(repr, found))}: write the "
            "names of the columns without them"
        )
    return found[0] if found else ","


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"reading {path} needs pyarrow: {install('parquet')}") from None
    meter = _Meter()
    number = 0
    try:
        file = parquet.ParquetFile(path)
        _require_names(file.schema_arrow.names, str(path))
        for batch in file.iter_batches(batch_size=_SAMPLE):
            meter.add(batch.nbytes + _ROW_BYTES * batch.num_rows, path)
            for row in batch.to_pylist():
                number += 1
                yield Row(row, f"{path}, row {number}")
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from None


def _require_names(names: Sequence[str], where: str) -> None:
    """Raise `ConfigError` if a column has no name, or if two columns have the same one."""
    earlier = set[str]()
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise ConfigError(f"{where}: column {number} has no name, so its values would be lost")
        if name in earlier:
            raise ConfigError(f"{where}: two columns have the name {name[:80]!r}: rename one")
        earlier.add(name)


def _json(text: str | bytes, where: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, JSONDecodeError) and isinstance(text, str):  # one line of a file
            problem = f"{error.msg}, column {min(error.pos, len(text.rstrip())) + 1}"
        raise ConfigError(f"{where}: not valid JSON: {problem}") from None


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected an object, got {str(value)[:80]}")
    return Row(value, place)


def _hub_rows(name: str, subset: str, split: str) -> list[Row]:
    """Return the rows of a data set on the hub, from the cache of the library `datasets` or by
    download.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name} is not a file ({', '.join(FILES)}), and a data set of the hub needs "
            f"the library datasets: {install('datasets')}"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
        return [Row(row, f"{name}, row {number}") for number, row in enumerate(rows, start=1)]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        first_line = next(islice(str(error).splitlines(), 1), repr(error))
        raise ConfigError(
            f"the data set {name} cannot be loaded (split {split}): {first_line}"
        ) from None
