"""A run that several files of tests compare others with."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed deterministic run."""
    from tests.durability.test_resume import Toy, config, played

    folder = tmp_path_factory.mktemp("runs") / "whole"
    with played(Toy()) as toy:
        toy.begin(folder, config(deterministic=True))
    return folder
