"""Trainer ranks (processes that share the trainer's work) as Ray actors: start, call and watch
them.

`Ranks` calls a method on every rank at the same time, and returns the first rank's answer.
"""

import datetime
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from unstale.cluster import session
from unstale.cluster.gpus import divide_gpus
from unstale.cluster.ranks_worker import MakeRank, Rank
from unstale.cluster.weight_objects import Reference
from unstale.model.peers import RankGroup
from unstale.weights.leftovers import hold_lock, remove_leftovers

START_S = 600.0
"""Seconds within which all ranks must start and load the model."""
FIRST_CALL_S = 1800.0
"""Time limit in seconds for the first call of each method, and for every call of a method in
`FROM_DISK`.
"""
FROM_DISK = frozenset({"load", "restore", "recover"})
"""Names of the ranks' methods that read the run folder when a run resumes. Such a call may take
much longer than an earlier call of the same method, so its time limit is `FIRST_CALL_S`.
"""
LEAST_CALL_S = 120.0
SLOWER = 10
"""A call may take this many times as long as the longest call of the same method so far, or
`LEAST_CALL_S` seconds if that is more.
"""
_NOTICE_S = 5.0
"""Seconds within which Ray notices that a process has ended."""
_GROUP_S = 3600.0
"""Seconds after which a collective operation of the ranks fails. The run's main process ends
hanging ranks long before.
"""
_PLACE_S = 2
"""Seconds that Ray may take to reserve GPUs and cores before the run prints what it waits for."""

_LOOPBACK = "127.0.0.1"
_PREFIX = "unstale-ranks-"
"""Beginning of the name of the temporary folder in which ranks on one machine find each other."""
_FILES = "files"
"""Name of a rank's second thread, in Ray's terms a concurrency group."""

Notify = Callable[[str], None]
"""A function that shows a sentence to the user."""


class RanksDied(RuntimeError):
    """Error: a trainer rank ended or did not answer.

    The run can be resumed from the last checkpoint.
    """


class NodesMissing(RuntimeError):
    """Error: the Ray cluster had too few free GPUs or cores for the ranks for too long.

    The run can be resumed later.
    """


class _RankActor:
    """A Ray actor for one rank. It forwards calls to the rank's object."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._store: Any = None
        self._lock: TextIO | None = None
        """Lock of the temporary folder in which the ranks find each other."""

    def meet(self, count: int) -> str:
        """Create the store of torch.distributed by which the ranks find each other. Return its
        address.

        Only the first rank is called. If Ray listens on loopback only, the store is a file, because
        a store on a port listens on every network interface.
        """
        import ray

        host = str(ray.util.get_node_ip_address())
        if host == _LOOPBACK:
            remove_leftovers(Path(tempfile.gettempdir()), _PREFIX)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = hold_lock(folder)
            return f"{folder}/group"
        self._store = TCPStore(host, 0, count, is_master=True, wait_for_workers=False)
        return f"{host}:{self._store.port}"

    def ping(self) -> None:
        """Do nothing. If this process has ended, Ray raises an error instead."""

    def join(self, address: str, rank: int, count: int) -> None:
        """Join the process group of all `count` ranks, with the store at `address`, as number
        `rank`.
        """
        host, _, port = address.rpartition(":")
        if not host:
            os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
            self._store = FileStore(address, count)
        elif self._store is None:
            self._store = TCPStore(host, int(port), count, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=self._store,
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=_GROUP_S),
        )

    def make(self, make: MakeRank) -> None:
        if self._rank is not None:
            self._rank.close()
        self._rank = None  # frees its memory before the next is made
        self._rank = make(RankGroup.of_group())

    def run(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> Any:
        """Call methods of the rank's object in order. `calls` has their names and arguments.

        The first rank returns the last result, the others None.
        """
        result = None
        for name, arguments in calls:
            result = getattr(self._rank, name)(*arguments)
        return result if dist.get_rank() == 0 else None

    def run_parts(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> tuple[Any, Any]:
        """Call methods of the rank's object in order. Return the two results of the last call."""
        *before, (name, arguments) = calls
        self.run(before)
        first, second = getattr(self._rank, name)(*arguments)
        return first, second


class Ranks:
    """The trainer ranks of a run. Any thread may use `call`, which runs one call at a time."""

    def __init__(
        self,
        count: int,
        *,
        address: str = "",
        patience_s: float = 600.0,
        scorers: int = 0,
        name: str = "trainer",
    ) -> None:
        """Connect to Ray. `make` later starts `count` ranks, each with one GPU if the cluster has
        GPUs.

        With the address of a cluster, the ranks wait for further machines for at most `patience_s`
        seconds. `scorers` is the number of further ranks for a second model, which only computes
        log-probabilities. `name` is the word for these ranks in messages. Raises `ConfigError` if
        Ray has only this machine, with too few GPUs.
        """
        self.count = count
        self._ray: ModuleType = session.connect(address)
        self._address = address
        self.patience_s = patience_s
        self._name = name
        self.scorers: Ranks | None = None
        """The ranks of the second model, which only computes log-probabilities. They end with these
        ranks. None without a second model.
        """
        available = self._resources()["GPU"]
        if not address:
            gpus = list(map(str, range(available)))
            divide_gpus(gpus, trainers=count, scorers=scorers, engines=0)
        self.on_gpus = available > 0
        """True if each rank has a GPU. Ranks that the run starts later then also wait for GPUs."""
        self._actors: list[Any] = []
        self._group: Any = None
        """Ray's placement group, which reserves GPUs and cores for all ranks in a cluster. None
        without one.
        """
        self._lock = threading.Lock()
        self._later: deque[tuple[str, Sequence[Any]]] = deque()
        """Names and arguments of the methods to call before the next call, in order."""
        self._longest: dict[str, float] = {}
        """The duration in seconds of the longest call of each method by these ranks."""
        self._folder: Path | None = None
        """The temporary folder in which the ranks find each other if all are on this machine, else
        None.
        """
        session.at_end(self.close)
        if scorers:
            self.scorers = Ranks(scorers, address=address, patience_s=patience_s, name="old-logit")

    def make(self, make: MakeRank, notify: Notify = lambda text: None) -> None:
        """Create the object of every rank by `make`. An earlier object is closed. Start ranks if
        none run.

        `notify` is called with a sentence on what the ranks wait for. Raises `NodesMissing` if the
        cluster has too few free GPUs or cores for `patience_s` seconds, and `RanksDied` if the
        ranks do not start within `START_S` seconds.
        """
        self._later.clear()
        if not self._actors:
            self._start(notify)
        self._wait([each.make.remote(make) for each in self._actors], START_S, "load the model")

    def _start(self, notify: Notify) -> None:
        self._longest.clear()
        options: dict[str, Any] = {"num_cpus": int(self.on_gpus), "num_gpus": int(self.on_gpus)}
        places: list[dict[str, Any]] = [{} for _ in range(self.count)]
        if self._address:
            self._group = self._reserve(notify)
            options = {f"num_{name.lower()}s": 1 for name in self._needs}
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            table = self._ray.util.placement_group_table(self._group)
            places = [
                {"scheduling_strategy": strategy(self._group, placement_group_bundle_index=bundle)}
                for bundle in order_by_node(table["bundles_to_node_id"])
            ]
        actor = self._ray.remote(max_restarts=0, concurrency_groups={_FILES: 1}, **options)(
            _RankActor
        )
        self._actors = [actor.options(**place).remote() for place in places]
        (meeting,) = self._wait([self._actors[0].meet.remote(self.count)], START_S, "start")
        if Path(meeting).is_absolute():
            self._folder = Path(meeting).parent
        joins = [
            each.join.remote(meeting, rank, self.count) for rank, each in enumerate(self._actors)
        ]
        self._wait(joins, START_S, "start")

    def _reserve(self, notify: Notify) -> Any:
        """Wait until there are enough machines. Return a placement group with GPUs and cores for
        all ranks.

        Ray may take half a minute to notice that a machine died, and counts it until then.
        """
        placement = self._ray.util.placement_group
        until = time.monotonic() + self.patience_s
        asked: tuple[str, ...] = ()
        text, group = "", cast(Any, None)
        try:
            while True:
                self.on_gpus = self.on_gpus or self._resources()["GPU"] > 0
                if asked != self._needs:
                    if group is not None:
                        self._ray.util.remove_placement_group(group)
                    asked = self._needs
                    group = placement([dict.fromkeys(asked, 1)] * self.count, strategy="PACK")
                if group.wait(max(1, min(_PLACE_S, int(until - time.monotonic())))):
                    reserved, group = group, None
                    return reserved
                if time.monotonic() >= until:
                    raise NodesMissing(
                        f"after {self.patience_s:g} s (cluster.patience_s), {self._shortage()}. "
                        f"Add machines with `ray start --address {self._address}`, and start or "
                        "resume the run"
                    )
                text, before = self._shortage(), text
                if text != before:
                    notify(f"waiting for machines for at most {self.patience_s:g} s: {text}")
        finally:
            if group is not None:
                self._ray.util.remove_placement_group(group)

    @property
    def _needs(self) -> tuple[str, ...]:
        """The names of the Ray resources of which each rank in a cluster needs one."""
        return ("GPU", "CPU") if self.on_gpus else ("CPU",)

    def _resources(self) -> dict[str, int]:
        """Return the numbers of GPUs and cores of the Ray cluster, including those in use."""
        found = self._ray.cluster_resources()
        return {name: int(found.get(name, 0)) for name in ("GPU", "CPU")}

    def _shortage(self) -> str:
        free = self._ray.available_resources()
        total = self._resources()
        names = {"GPU": "GPUs", "CPU": "cores"}
        has = [f"{int(free.get(name, 0))} of {total[name]} {names[name]}" for name in self._needs]
        each = {1: "one core", 2: "one GPU and one core"}[len(self._needs)]
        return (
            f"{self.count} {self._name} ranks need {each} each, and the Ray cluster "
            f"{self._address} has {' and '.join(has)} free"
        )

    def later(self, name: str, *arguments: Any) -> None:
        """Call a method on every rank just before the next `call`. Return without waiting."""
        self._later.append((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank, after the calls that `later` has queued. Return the first
        rank's answer.

        Raises the error that a rank raised. Raises `RanksDied`, after ending all ranks, if a rank
        ended or did not answer, or if Ray lost an object.
        """
        return self._call(lambda actor, calls: actor.run.remote(calls), name, arguments)[0]

    def call_parts(self, name: str, *arguments: Any) -> tuple[list[Any], list[Reference]]:
        """Call a method that returns two results on every rank.

        Return the first results of all ranks, and references to the second results, which stay in
        Ray's store. Raises errors like `call`.
        """
        parts: list[Reference] = []

        def begin(actor: Any, calls: Any) -> Any:
            answer, part = actor.run_parts.options(num_returns=2).remote(calls)
            parts.append(part)
            return answer

        return self._call(begin, name, arguments), parts

    def _call(
        self, begin: Callable[[Any, Any], Any], name: str, arguments: Sequence[Any]
    ) -> list[Any]:
        """Begin a call on every rank, after the calls that `later` has queued.

        Return all answers.
        """
        with self._lock:
            actors = self._require_actors(name)
            calls = [self._later.popleft() for _ in range(len(self._later))]
            calls.append((name, arguments))
            shared = self._ray.put(calls)  # once, not once for each rank
            longest = None if name in FROM_DISK else self._longest.get(name)
            limit = FIRST_CALL_S if longest is None else max(LEAST_CALL_S, SLOWER * longest)
            began = time.monotonic()
            answers = self._wait([begin(each, shared) for each in actors], limit, name)
            self._longest[name] = max(longest or 0.0, time.monotonic() - began)
            return answers

    def _require_actors(self, name: str) -> Sequence[Any]:
        """Return the Ray actors of all ranks. `name` is the method to be called, for the error.

        Raises `RanksDied` if the actors have been ended, perhaps by another thread.
        """
        if not (actors := self._actors):
            raise RanksDied(f"the {self._name} ranks are ended ({name})")
        return actors

    def fetch(self, part: Reference, limit_s: float) -> Any:
        """Return a second result of `call_parts` from Ray's store.

        Raises `RanksDied` if the machine that has it died, or after `limit_s` seconds.
        """
        try:
            return self._ray.get(part, timeout=limit_s)
        except self._ray.exceptions.RayError as error:
            raise self._died(error, "fetch weights") from None

    def call_beside(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank, in a second thread of each rank. Other calls can run
        meanwhile.

        Calls of `call_beside` run one at a time. Return the first rank's answer. Raises errors like
        `call`.
        """
        actors = self._require_actors(name)
        shared = self._ray.put([(name, arguments)])
        runs = [each.run.options(concurrency_group=_FILES) for each in actors]
        return self._wait([run.remote(shared) for run in runs], FIRST_CALL_S, name)[0]

    def close(self) -> None:
        """End all ranks, including those of the second model (`scorers`). `make` can start new
        ones.
        """
        if self.scorers:
            self.scorers.close()
        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        if self._ray.is_initialized():
            for actor in actors:
                self._ray.kill(actor)
            if group is not None:
                self._ray.util.remove_placement_group(group)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, pending: Sequence[Any], limit_s: float, name: str) -> list[Any]:
        """Wait for the answers of all ranks, and return them.

        The error of a rank is raised at once, because other ranks may wait for this rank. If a rank
        ended, the others may fail because of that, so `RanksDied` is raised instead.
        """
        ray = self._ray
        left = list(pending)
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + limit_s
        while left:
            done, left = self._ended(left, deadline)
            if not done:
                self.close()
                raise RanksDied(
                    f"{len(left)} of {self.count} {self._name} ranks did not answer within "
                    f"{limit_s:.0f} s ({name})"
                )
            try:
                answers |= zip(done, ray.get(done, timeout=limit_s), strict=True)
            except ray.exceptions.RayTaskError as error:
                self._require_alive(name)
                cause = error.cause
                if isinstance(cause, ray.exceptions.RayError):  # an object or a machine is lost
                    raise self._died(cause, name) from None
                raise cause from None
            except ray.exceptions.RayError as error:
                raise self._died(error, name) from None
        return [answers[each] for each in pending]

    def _ended(self, calls: list[Any], deadline: float) -> tuple[list[Any], list[Any]]:
        """Wait until at least one call has ended. Return the calls that have ended, and the others.

        Calls of many ranks mostly end together. One wait for each would take time that grows with
        the square of their number.
        """
        limit_s = max(0.0, deadline - time.monotonic())
        done, left = self._ray.wait(calls, num_returns=1, timeout=limit_s)
        if done and left:
            more, left = self._ray.wait(left, num_returns=len(left), timeout=0)
            done += more
        return done, left

    def _require_alive(self, name: str) -> None:
        """Raise `RanksDied` if Ray notices within `_NOTICE_S` seconds that a rank ended.

        A busy rank does not answer meanwhile, and counts as alive.
        """
        left = [actor.ping.remote() for actor in self._require_actors(name)]
        deadline = time.monotonic() + _NOTICE_S
        while left:
            done, left = self._ended(left, deadline)
            if not done:
                return
            try:
                self._ray.get(done, timeout=_NOTICE_S)
            except self._ray.exceptions.RayError as error:
                raise self._died(error, name) from None

    def _died(self, error: Exception, name: str) -> RanksDied:
        """End all ranks. Return an error with the name of the call and the cause."""
        self.close()
        article = "an" if self._name[0] in "aeiou" else "a"
        return RanksDied(f"{article} {self._name} rank died ({name}): {session.first_line(error)}")


def order_by_node(nodes: Mapping[int, str]) -> list[int]:
    """Order the bundles of a Ray placement group so that those on one node are adjacent.

    `nodes` has the node of each bundle. Ranks that divide a forward pass are adjacent, so they are
    on one node if they fit there.

    >>> order_by_node({0: "b", 1: "a", 2: "b", 3: "a"})
    [0, 2, 1, 3]
    """
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    return sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
