"""Requests in progress, so that shutting down can wait for them and then abort them."""

import asyncio
from typing import Any


class RunningRequests:
    """The tasks that handle requests now. ``draining`` turns new requests away."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._tasks)

    def enter(self) -> None:
        """The current task began to handle a request."""
        self._tasks.add(_current())

    def leave(self) -> None:
        """The current task is done with its request."""
        self._tasks.discard(_current())

    async def drain(self, deadline_s: float) -> int:
        """Take no more requests, wait for the running ones, abort what is left.

        Returns:
            How many requests were aborted.
        """
        self.draining = True
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(set(self._tasks), timeout=deadline_s)
        for task in late:
            task.cancel()
        # The abort of a request happens while its task unwinds.
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "requests are handled in a task"
    return task
