"""The first items of an asynchronous iterator."""

from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def taken(items: AsyncIterator[T], number: int) -> list[T]:
    """Return the next `number` items, or fewer if the iterator ends."""
    found: list[T] = []
    while len(found) < number:
        try:
            found.append(await anext(items))
        except StopAsyncIteration:
            break
    return found
