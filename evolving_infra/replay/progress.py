"""How far a replay is: counters, shown live on a terminal and as plain lines elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.clock import Clock
from evolving_infra.replay.outcome import Outcome
from evolving_infra.replay.wire import RequestError

LIVE_S = 0.25
LINE_S = 5.0
STATE_S = 1.0


class Progress:
    """Counters of one replay of ``total`` requests."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.running = 0
        self.done = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.roles: dict[str, str] = {}

    def sent(self) -> None:
        self.running += 1

    def finished(self, outcome: Outcome) -> None:
        self.running -= 1
        self.done += 1
        self.failed += outcome.failed
        self.prompt_tokens += len(outcome.prompt)
        self.output_tokens += len(outcome.output)

    def saw(self, state: dict[str, Any]) -> None:
        """Keep the roles of the nodes; ``down`` for a node whose engine is away."""
        self.roles = {
            node["name"]: node["role"] if node.get("up", True) else "down"
            for node in state.get("nodes", ())
        }

    def line(self, elapsed: float) -> str:
        """One line; ``elapsed`` in seconds."""
        roles = " ".join(f"{name}:{role}" for name, role in self.roles.items())
        return (
            f"{elapsed:6.1f} s  {self.done}/{self.total} requests, {self.running} running, "
            f"{self.failed} failed  {self.prompt_tokens:,} prompt + {self.output_tokens:,} output "
            f"tokens  {roles}"
        ).rstrip()


@contextlib.asynccontextmanager
async def shown(
    progress: Progress, client: GatewayClient, clock: Clock, console: Console
) -> AsyncIterator[None]:
    """Show ``progress`` until the block ends, and keep asking the cluster for its roles."""
    start = clock.now()
    display = _live if console.is_terminal else _lines
    tasks = [
        asyncio.create_task(display(progress, clock, start, console)),
        asyncio.create_task(_watch(progress, client)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        console.print(progress.line(clock.now() - start), highlight=False, soft_wrap=True)


async def _live(progress: Progress, clock: Clock, start: float, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(progress.line(clock.now() - start)), refresh=True)
            await asyncio.sleep(LIVE_S)


async def _lines(progress: Progress, clock: Clock, start: float, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        console.print(progress.line(clock.now() - start), highlight=False, soft_wrap=True)


async def _watch(progress: Progress, client: GatewayClient) -> None:
    while True:
        with contextlib.suppress(RequestError):
            progress.saw(await client.state())
        await asyncio.sleep(STATE_S)
