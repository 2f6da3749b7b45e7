"""Role changes in the middle of a replay: ``node1:decode@5s``."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from evolving_infra.errors import wrong
from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.clock import Clock
from evolving_infra.replay.wire import RequestError
from evolving_infra.types import Role

PATTERN = re.compile(r"([^:@\s]+):(prefill|decode|both)@(\d+(?:\.\d+)?)s")


@dataclass(frozen=True, kw_only=True)
class PlannedRoleChange:
    """Give ``node`` the ``role``, ``at`` seconds after the start of the replay."""

    node: str
    role: Role
    at: float

    def __str__(self) -> str:
        return f"{self.node}:{self.role.value}@{self.at:g}s"


def parse_role_change(text: str) -> PlannedRoleChange:
    """``NODE:ROLE@SECONDSs``; ``InputError`` on anything else."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise wrong("role change", "NODE:prefill|decode|both@SECONDSs, as node1:decode@5s", text)
    return PlannedRoleChange(node=match[1], role=Role(match[2]), at=float(match[3]))


class RoleChanger:
    """Carries out planned changes. ``problems`` says which failed or never came."""

    def __init__(
        self, planned: Sequence[PlannedRoleChange], client: GatewayClient, clock: Clock
    ) -> None:
        self._client = client
        self._clock = clock
        self._waiting = sorted(planned, key=lambda change: change.at)
        self._changing: asyncio.Task[None] | None = None
        self.problems: list[str] = []

    async def run(self) -> None:
        """Make each change when its time has come, counted from now."""
        start = self._clock.now()
        while self._waiting:
            await self._clock.sleep_until(start + self._waiting[0].at)
            self._changing = asyncio.create_task(self._change(self._waiting.pop(0)))
            # ``stop`` cancels the waiting, never a change that the cluster was asked for.
            await asyncio.shield(self._changing)

    async def stop(self, task: "asyncio.Task[None]") -> None:
        """End ``task``, which is ``run``. Changes still to come become problems."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._changing is not None:
            await self._changing
        for change in self._waiting:
            self.problems.append(f"role change {change}: the replay ended before")

    async def _change(self, change: PlannedRoleChange) -> None:
        try:
            await self._client.set_role(change.node, change.role)
        except RequestError as failure:
            self.problems.append(f"role change {change}: {failure.status} {failure}")
