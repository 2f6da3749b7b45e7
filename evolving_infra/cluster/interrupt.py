"""Signals end a command in order: its task is cancelled, and what it started is stopped."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptibly(work: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run``, ended by Ctrl-C, SIGTERM or SIGHUP. Raises ``KeyboardInterrupt`` then.

    Signals are for the main thread; in another one nothing interrupts it.
    """

    async def main() -> Result:
        task = asyncio.create_task(work)
        is_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main else ():
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
