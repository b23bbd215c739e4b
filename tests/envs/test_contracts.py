"""Test which optional members of an environment or a task set are found."""

from typing import Any, Protocol

import pytest

from unstale.envs import Closable, HasSimulatedDelays, Resumable, implements


class Both(Resumable, Closable, Protocol):
    """A protocol without members of its own."""


class Plain:
    pass


class Half:
    def snapshot(self) -> str:
        return ""


class Whole(Half):
    async def resume(self, state: str) -> None: ...

    def close(self) -> None: ...


class OptsOut(Whole):
    snapshot = None  # type: ignore[assignment]


class Delays:
    def __init__(self) -> None:
        self.replaying = False


class Proxy:
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    "value, protocol, found",
    [
        (Plain(), Resumable, False),
        (Half(), Resumable, False),
        (Whole(), Resumable, True),
        (OptsOut(), Resumable, False),
        (Whole(), Both, True),
        (Half(), Both, False),
        (Delays(), HasSimulatedDelays, True),
        (Plain(), HasSimulatedDelays, False),
        (Proxy(Whole()), Resumable, True),
        (Proxy(Plain()), Resumable, False),
    ],
)
def test_a_value_implements_a_protocol_if_it_has_all_of_its_members(
    value: object, protocol: Any, found: bool
) -> None:
    assert implements(value, protocol) == found
