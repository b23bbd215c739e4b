"""Environments on the nodes of a Ray cluster: the same turns, and dead processes and nodes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.cluster.conftest import NODE_MEMORY
from tests.support import hostile_envs as hostile
from tests.support.isolated_envs import Mixed, agents
from tests.support.waits import LIMIT_S
from unstale.cluster.env_hosts import remote_workers
from unstale.config import ClusterConfig, ConfigError, RunConfig, TaskConfig
from unstale.durability import virtual_clock
from unstale.envs import EnvError, Message, Turn, combine_rewards
from unstale.envs.registry import build_taskset
from unstale.isolation import IsolatedTasks, isolate
from unstale.records import Task

REPLY = Message("assistant", "good")


def add_node(cluster: Any) -> Any:
    """Add a machine that has room for one worker."""
    return cluster.add_node(num_cpus=1, object_store_memory=NODE_MEMORY)


def on_ray(cluster: Any, env: str, *, workers: int, patience_s: float = LIMIT_S) -> IsolatedTasks:
    config = TaskConfig(env=f"tests.support.{env}", isolate="ray", workers=workers)
    options = ClusterConfig(address=cluster.address, patience_s=patience_s)
    tasks = isolate(build_taskset(config), config, remote_workers(options))
    assert isinstance(tasks, IsolatedTasks)
    return tasks


async def play(env: Any) -> list[Turn]:
    """Return the turns of an episode of two replies."""
    return [await _done(env.begin()), await _done(env.step(REPLY)), await _done(env.step(REPLY))]


async def _done(turn: Turn | Awaitable[Turn]) -> Turn:
    return turn if isinstance(turn, Turn) else await turn


async def first_error(envs: Sequence[Any]) -> EnvError:
    """Call environments in turn until one fails. Ray needs some seconds to notice a death."""
    while True:
        for env in envs:
            try:
                await env.begin()
            except EnvError as error:
                return error
        await asyncio.sleep(0.1)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test for at most `LIMIT_S`."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    virtual_clock.run(limited())


def test_environments_on_nodes_survive_the_death_of_one(cluster: Any) -> None:
    nodes = [add_node(cluster) for _ in range(2)]
    tasks = on_ray(cluster, "isolated_envs:Mixed", workers=2)
    ended: list[str] = []
    tasks.workers.on_event = lambda kind, reason, **_: ended.append(reason)

    async def main() -> None:
        async with tasks:
            for number in range(4):
                task = Task("mixed", "train", number)
                remote, here = tasks.env(task, 5), Mixed().env(task, 5)
                turns, expected = await play(remote), await play(here)
                assert [turn.messages for turn in turns] == [turn.messages for turn in expected]
                assert turns[-1].rewards == combine_rewards(Mixed(), expected[-1]).rewards
                await remote.close()
            # a task of its own for each worker
            both = [tasks.env(Task("mixed", "train", number), 5) for number in range(2)]
            for env in both:
                await env.begin()
            await asyncio.to_thread(cluster.remove_node, nodes.pop(), allow_graceful=False)
            error = await first_error(both)
            assert "the machine of a worker process does not answer" in str(error)
            assert ended == [str(error)]
            for env in both:
                await env.close()
            nodes.append(add_node(cluster))
            for number in range(2):  # no task is suspected, so both workers are shared
                env = tasks.env(Task("mixed", "train", number), 5)
                assert (await play(env))[-1].done
                await env.close()

    run(main)
    for node in nodes:
        cluster.remove_node(node)


def test_an_environment_that_ends_its_process_fails_alone(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker takes its place, even if Ray fails to end the actor."""
    import ray

    node = add_node(cluster)
    tasks = on_ray(cluster, "hostile_envs:isolated_tasks", workers=1)
    ended: list[str] = []
    tasks.workers.on_event = lambda kind, reason, **_: ended.append(reason)
    kill, refused = ray.kill, []

    def refuse_once(actor: Any) -> None:
        if not refused:
            refused.append(actor._actor_id)
            raise ray.exceptions.RaySystemError("the connection is broken")
        kill(actor)

    monkeypatch.setattr(ray, "kill", refuse_once)

    async def main() -> None:
        async with tasks:
            env = tasks.env(Task("toy", "train", hostile.ISOLATED.index(hostile.Exits)), 5)
            await env.begin()
            with pytest.raises(EnvError, match="a worker process ended with exit code 3 during"):
                await env.step(REPLY)
            await env.close()
            assert len(refused) == len(ended) == 1
            assert "(and Ray could not end its actor: " in ended[0]
            env = tasks.env(Task("toy", "train", 1000), 5)
            assert (await env.begin()).messages
            await env.close()

    run(main)
    cluster.remove_node(node)


def test_external_agents_deterministic_runs_and_missing_machines_are_refused(cluster: Any) -> None:
    config = TaskConfig(env="tests.support.isolated_envs:agents", isolate="ray")
    with pytest.raises(ConfigError, match=r"task.isolate = ray cannot run an ExternalAgent"):
        isolate(agents(), config, remote_workers(ClusterConfig(address=cluster.address)))
    with pytest.raises(ConfigError, match=r"task.isolate = ray needs deterministic = false"):
        RunConfig(recipe="x", deterministic=True, task=config)

    tasks = on_ray(cluster, "isolated_envs:Mixed", workers=1, patience_s=1.0)

    async def main() -> None:
        with pytest.raises(EnvError, match=r"no machine was ready .* within 1 s"):
            async with tasks:
                pass

    run(main)
