"""The steps of a Dockerfile that can be carried out without images: folders, files and commands.

The image that `FROM` names is not used. Programs of this machine take its place.
"""

import fnmatch
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from shlex import split

from unstale.config import ConfigError
from unstale.envs.sandboxes.runtime import File, Files

_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)\}|(\w+)|(\{[^}]*\}?))")


@dataclass
class Copy:
    """A step that makes folders and writes files. All paths are absolute."""

    folders: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)


@dataclass
class Run:
    """A step that runs a command, in a folder and with environment variables."""

    argv: list[str]
    folder: str
    env: dict[str, str]


@dataclass
class Build:
    """The steps of a Dockerfile in order, and the state after the last one."""

    steps: list[Copy | Run] = field(default_factory=list)
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    """Name of the image in FROM."""
    arguments: dict[str, str] = field(default_factory=dict)


def read_dockerfile(text: str, context: Files) -> Build:
    """Return the steps of a Dockerfile. `context` has the files that it may copy.

    Raises `ConfigError`, with the line, for an instruction that cannot be carried out without
    images.
    """
    build = Build()
    for line in _lines(text):
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name.upper():
            case "FROM" if not build.image:
                build.image = rest.split()[0] if rest else ""
            case "WORKDIR":
                build.folder = posixpath.join(build.folder, _expand(rest, build, line))
                build.steps.append(Copy([build.folder]))
            case "ENV":
                build.env |= _pairs(rest, build, line)
            case "ARG":
                argument, _, default = rest.partition("=")
                build.arguments[argument] = _expand(default, build, line)
            case "COPY" | "ADD":
                build.steps.append(_copy(rest, build, context, line))
            case "RUN" if not rest.startswith(("--", "<<")):
                argv = _list(rest) or ["/bin/sh", "-c", rest]
                build.steps.append(Run(argv, build.folder, {**build.arguments, **build.env}))
            case "USER" if rest in ("root", "0"):
                pass
            case instruction if instruction in _WITHOUT_EFFECT:
                pass
            case _:
                raise _refusal(line)
    if not build.image:
        raise ConfigError("the Dockerfile has no FROM")
    return build


def _lines(text: str) -> Iterator[str]:
    """Yield each instruction of a Dockerfile as one line."""
    joined = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#") or not (stripped or joined):
            continue
        joined += stripped
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        yield joined
        joined = ""
    if joined:
        yield joined


def _refusal(line: str, why: str = "") -> ConfigError:
    return ConfigError(
        f"the Dockerfile's {line[:100]!r} cannot be obeyed without images"
        f"{': ' + why if why else ''}"
    )


def _expand(text: str, build: Build, line: str) -> str:
    """Return a text in which variables are replaced by their values."""
    known = {**build.arguments, **build.env}

    def value(found: re.Match[str]) -> str:
        if found[0] == r"\$":
            return "$"
        if found[3]:
            raise _refusal(line, f"${found[3]} is more than a name")
        return known.get(found[1] or found[2], "")

    return _VARIABLE.sub(value, text.strip())


def _pairs(rest: str, build: Build, line: str) -> Mapping[str, str]:
    words = split(rest)
    if words and "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return {name: _expand(value, build, line)}
    pairs = (word.partition("=") for word in words)
    return {name: _expand(value, build, line) for name, _, value in pairs}


def _list(text: str) -> list[str]:
    """Return the strings of a JSON list. Empty if the text is no JSON list."""
    try:
        values = json.loads(text)
    except ValueError:
        return []
    return [str(each) for each in values] if isinstance(values, list) else []


def _copy(rest: str, build: Build, context: Files, line: str) -> Copy:
    words = _list(rest) or split(rest)
    if len(words) < 2 or words[0].startswith("--") or "://" in rest:
        raise _refusal(line, "only files of the build context are copied")
    *sources, target = (_expand(word, build, line) for word in words)
    to_folder = len(sources) > 1 or target.endswith(("/", "."))
    target = posixpath.normpath(posixpath.join(build.folder, target))
    step = Copy()
    for source in sources:
        path = posixpath.normpath(source).lstrip("/")
        found = dict(_found(path, context))
        if not found and path != ".":
            raise ConfigError(f"the Dockerfile's {line!r}: the environment folder has no {source}")
        is_file = len(found) == 1 and "" in found
        for inner, file in found.items():
            inside = posixpath.basename(source) if is_file and to_folder else inner
            step.files[posixpath.join(target, inside) if inside else target] = file
    return step


def _found(source: str, context: Files) -> Iterator[tuple[str, File]]:
    """Yield the files that the source of a COPY names, as (path below the source, file).

    The path is empty if the source is the file itself.
    """
    for path, file in context.items():
        if source == "." or path.startswith(f"{source}/"):
            yield (path if source == "." else path.removeprefix(f"{source}/")), file
        elif path == source:
            yield "", file
        elif path.count("/") == source.count("/") and fnmatch.fnmatchcase(path, source):
            yield posixpath.basename(path), file
