"""The thread an engine computes in. Everything else about the engine process is asyncio.

The engine is touched only by this thread: others post actions, which run between two iterations.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from evolving_infra.engine.engine import Engine, Measured
from evolving_infra.engine.request import EngineEvent

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one step of the engine brought."""

    events: tuple[EngineEvent, ...]
    seconds: float
    measured: Measured | None


class EngineThread:
    """Runs ``engine.step`` while there is work; ``on_iteration``, ``on_crash`` run in ``loop``."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        on_iteration: Callable[[Iteration], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.pools = engine.pools
        self._engine = engine
        self._clock = clock
        self._loop = loop
        self._on_iteration = on_iteration
        self._on_crash = on_crash
        self._actions: list[Callable[[Engine, float], object]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the running iteration and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def post(self, action: Callable[[Engine, float], object]) -> None:
        """Run ``action(engine, now)`` before the next iteration."""
        with self._wake:
            self._actions.append(action)
            self._wake.notify()

    def post_back(
        self, action: Callable[[Engine, float], Result], then: Callable[[Result], None]
    ) -> None:
        """``post``, and run ``then`` with the result in the loop, in order with iterations."""

        def act(engine: Engine, now: float) -> None:
            self._loop.call_soon_threadsafe(then, action(engine, now))

        self.post(act)

    async def ask(self, action: Callable[[Engine, float], Result]) -> Result:
        """``post`` and wait for the result."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def settle(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        self.post_back(action, settle)
        return await future

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._actions or self._engine.has_work or self._stopping):
                        self._wake.wait()
                    if self._stopping:
                        return
                    actions, self._actions = self._actions, []
                for action in actions:
                    action(self._engine, self._clock())
                self._iterate()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._on_crash, error)
            raise

    def _iterate(self) -> None:
        before = self._clock()
        events = self._engine.step(before)
        iteration = Iteration(
            events=events, seconds=self._clock() - before, measured=self._engine.measured
        )
        if events or iteration.measured is not None:
            self._loop.call_soon_threadsafe(self._on_iteration, iteration)
