"""Tests of compiling C code: what is a reason for slower code, and what is an error."""

import errno
from pathlib import Path
from typing import Any

import pytest

from unstale import native
from unstale.engines.embedded.kernels import Kernels
from unstale.native import NotCompiled, compile_library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a C file that does not compile. The cache of compiled files is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "wrong.c"
    path.write_text("int answer(void) { return nowhere; }\n")
    return path


def test_the_compilers_first_error_is_given(source: Path) -> None:
    with pytest.raises(NotCompiled, match=r"wrong\.c:1.*error.*nowhere"):
        compile_library(source)


def test_a_missing_compiler_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/does/not/exist")
    with pytest.raises(NotCompiled, match="/does/not/exist"):
        compile_library(source)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_used_up_resources_are_no_reason_for_slower_code(
    code: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used_up(*arguments: Any, **options: Any) -> None:
        raise OSError(code, "used up")

    monkeypatch.setattr(native.subprocess, "run", used_up)
    with pytest.raises(OSError, match="used up"):
        compile_library(source)
    with pytest.raises(OSError, match="used up"):
        Kernels(HEADS=3, KV_HEADS=1, HEAD_DIM=16, PAGE=16, RUN=8, LANES=16)
