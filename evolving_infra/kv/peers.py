"""Connections of one store to the stores of its peers, opened once and shared by all fetches."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from evolving_infra.errors import EvolvingInfraError, PeerError, wrong
from evolving_infra.kv.channel import HANDSHAKE_S, Channel, Fields, connect
from evolving_infra.kv.fields import int_field, refs_field
from evolving_infra.kv.slots import BlockRef
from evolving_infra.kv.transport.transport import Transport
from evolving_infra.types import BlockKey


class Peer:
    """A peer's store: a channel to lease blocks, and a transport session to read them."""

    def __init__(self, channel: Channel, session: Any) -> None:
        self.channel = channel
        self.session = session

    async def lease(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockRef | None]]:
        """Lease id and where each block is, None if the peer lacks it. ``PeerError``."""
        try:
            answer = await self.channel.call("lease", keys=list(keys))
            return int_field(answer, "lease"), refs_field(answer, keys)
        except PeerError:
            raise
        except EvolvingInfraError as error:
            raise PeerError(f"lease: the peer answers {error}") from None

    def release(self, lease: int) -> None:
        """Give the lease back; if the peer is gone, so is the lease."""
        self.channel.tell("release", lease=lease)


class Peers:
    """All peers by address. Channel and mapping live and die together."""

    def __init__(self, name: str, secret: str, transport: Transport) -> None:
        self._name = name
        self._secret = secret
        self._transport = transport
        self._opening: dict[str, asyncio.Task[Peer]] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def get(self, address: str) -> Peer:
        """The peer at ``address``; ``PeerError`` if it can't be reached.

        May be cancelled; others that wait for the same peer don't notice.
        """
        task = self._opening.get(address)
        if task is None:
            task = asyncio.create_task(self._open(address))
            self._opening[address] = task
            task.add_done_callback(lambda done: self._settle(address, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close all connections."""
        opening = list(self._opening.values())
        for task in opening:
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().channel.close()
            task.cancel()
        await asyncio.gather(*opening, *self._readers, return_exceptions=True)

    async def _open(self, address: str) -> Peer:
        channel = await connect(address, self._secret, name=self._name, kind="peer")
        reader = asyncio.create_task(self._read(address, channel))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        try:
            session = await asyncio.to_thread(self._transport.open, address, HANDSHAKE_S)
        except BaseException:
            await channel.close()
            raise
        return Peer(channel, session)

    async def _read(self, address: str, channel: Channel) -> None:
        """Read answers until the peer goes away; the next fetch then opens it anew."""
        try:
            with contextlib.suppress(asyncio.CancelledError, EvolvingInfraError):
                await channel.run(_refuse)
        finally:
            self._opening.pop(address, None)

    def _settle(self, address: str, task: "asyncio.Task[Peer]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._opening.pop(address, None)


async def _refuse(channel: Channel, op: str, fields: Fields) -> None:
    raise wrong("op", "an answer: a store asks its readers nothing", op)
