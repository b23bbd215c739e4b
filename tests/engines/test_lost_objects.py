"""An error of Ray in a rank ends the ranks, so that the run begins again from a checkpoint.

Ray is replaced by a fake.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from unstale.cluster import session
from unstale.cluster.ranks import Ranks, RanksDied


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::_RankActor.run() (pid=7)\n  File ...")
        self.cause = cause


class FakeRay:
    """The parts of Ray that ranks use, with actors whose `run` returns or raises `result`."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.result: Any = None
        self.num_killed = 0

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def is_initialized(self) -> bool:
        return True

    def remote(self, **options: Any) -> Callable[[type], Any]:
        methods = {
            "meet": lambda count: "127.0.0.1:1",
            "join": lambda address, rank, count: None,
            "make": lambda make: None,
            "ping": lambda: None,
            "run": lambda calls: self.result,
        }
        actor = SimpleNamespace(
            **{name: SimpleNamespace(remote=method) for name, method in methods.items()}
        )
        maker = SimpleNamespace(remote=lambda: actor)
        return lambda cls: SimpleNamespace(options=lambda **place: maker)

    def put(self, value: Any) -> Any:
        return value

    def wait(self, left: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [*left[:1]], [*left[1:]]

    def get(self, references: Sequence[Any], timeout: float) -> Sequence[Any]:
        for reference in references:
            if isinstance(reference, Exception):
                raise reference
        return references

    def kill(self, actor: Any) -> None:
        self.num_killed += 1


@pytest.mark.parametrize(
    ("cause", "raised", "match"),
    [
        (
            RayError("Failed to retrieve object 1.\nIts node has died."),
            RanksDied,
            r"an old-logit rank died \(load\): Failed to retrieve object 1\.$",
        ),
        (ValueError("words are missing"), ValueError, "^words are missing$"),
    ],
)
def test_an_object_that_a_rank_cannot_fetch_counts_as_the_death_of_a_rank(
    cause: Exception, raised: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay()
    monkeypatch.setattr(session, "connect", lambda address: ray)
    monkeypatch.setattr(session, "at_end", lambda end: None)
    ranks = Ranks(1, name="old-logit")
    ranks.make(lambda peers: None)  # type: ignore[arg-type, return-value]
    ray.result = 5
    assert ranks.call("load", None) == 5
    ray.result = RayTaskError(cause)
    with pytest.raises(raised, match=match):
        ranks.call("load", None)
    assert ray.num_killed == (raised is RanksDied)
