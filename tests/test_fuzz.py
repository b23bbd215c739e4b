"""Readers of untrusted input return what was written or raise one clear error.

The promises are in `fuzz/targets.py`. The inputs here are the same in every run; `make fuzz`
searches further, guided by coverage."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import asks, run
from fuzz.targets import TARGETS
from unstale.rollout.endpoint import connections, server

EXAMPLES = {
    "config_file": 300, "config_knobs": 400, "journal": 150,
    "delta": 600, "version_chain": 300, "checkpoint": 50,
    "tool_call": 250, "chat_text": 200, "endpoint": 250,
}  # fmt: skip

inputs = st.binary(max_size=60) | st.integers(0, 2**32).map(
    lambda seed: random.Random(seed).randbytes(200)
)


def test_the_command_knows_every_target() -> None:
    assert run.NAMES == tuple(TARGETS) == tuple(EXAMPLES)


@pytest.fixture(scope="module", autouse=True)
def close_endpoint() -> Iterator[None]:
    yield
    if asks.world.cache_info().currsize:
        asks.world().close()
        asks.world.cache_clear()


@pytest.mark.costly
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, limit in (  # the targets lower them
        (server, "REQUEST_TIMEOUT_S"),
        (server, "MAX_BODY_BYTES"),
        (connections, "HEAD_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, limit, getattr(module, limit))
    limits = settings(
        derandomize=True,
        database=None,
        max_examples=EXAMPLES[name],
        suppress_health_check=list(HealthCheck),
    )
    passed = []

    def target(data: bytes) -> None:
        TARGETS[name](data)  # raises if the input breaks a promise
        passed.append(data)

    limits(given(inputs)(target))()
    assert passed, "no input was tried"
