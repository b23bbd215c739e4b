"""Episodes that could all continue take turns."""

import asyncio
from itertools import pairwise

from unstale.rollout.timeouts import MOST_IN_ROUND, in_turn

NUMBER = 5 * MOST_IN_ROUND


def begin(order: list[int]) -> list[asyncio.Task[None]]:
    """Start tasks that wait for their turn, and then add their number to `order`."""

    async def episode(number: int) -> None:
        await in_turn()
        order.append(number)

    return [asyncio.create_task(episode(number)) for number in range(NUMBER)]


def test_few_episodes_continue_in_a_round_and_others_run_between() -> None:
    async def rounds() -> list[int]:
        order, sizes = list[int](), [0]
        tasks = begin(order)
        while not tasks[-1].done():
            await asyncio.sleep(0)
            sizes.append(len(order))
        assert order == [*range(NUMBER)]
        return [after - before for before, after in pairwise(sizes)]

    counts = asyncio.run(rounds())
    assert [count for count in counts if count] == [MOST_IN_ROUND] * 5


def test_an_episode_that_is_cancelled_while_it_waits_lets_the_others_continue() -> None:
    async def run() -> list[int]:
        order = list[int]()
        tasks = begin(order)
        await asyncio.sleep(0)
        for task in tasks[MOST_IN_ROUND:-1]:
            task.cancel()
        await asyncio.wait(tasks)
        return order

    assert asyncio.run(run()) == [*range(MOST_IN_ROUND), NUMBER - 1]
