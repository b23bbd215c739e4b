"""A model's folder, and the weights of two versions of it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from unstale.testing import nudge, tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save(path)
    return path


@pytest.fixture(scope="module")
def weights() -> list[Mapping[str, Tensor]]:
    policy, other = tiny_policy(), tiny_policy()
    nudge(other, seed=1, size=0.05)
    return [policy.weights(), other.weights()]
