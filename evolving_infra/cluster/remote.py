"""``RemoteCluster``: the front door's connection to a real cluster's controller."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from evolving_infra.cluster.client import Finish, Submission, TokenDelta
from evolving_infra.cluster.messages import timings_from_map
from evolving_infra.errors import InputError, PeerError, StateError
from evolving_infra.kv.channel import Channel, Fields, connect, error_from
from evolving_infra.types import Role

CALL_S = 30.0
RECONNECT_S = 3.0
RETRY_S = 0.1

Item = TokenDelta | Finish | Exception


class RemoteCluster:
    """Implements ``client.Cluster`` over one channel; reconnects by itself when it was lost."""

    def __init__(self, address: str, secret: str) -> None:
        self._address = address
        self._secret = secret
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._streams: dict[str, tuple[Channel, asyncio.Queue[Item]]] = {}
        self._opening = asyncio.Lock()
        self._aborting: set[asyncio.Task[None]] = set()

    async def submit(self, submission: Submission) -> AsyncGenerator[TokenDelta | Finish, None]:
        """See ``client.Cluster.submit``."""
        channel = await self._open()
        items: asyncio.Queue[Item] = asyncio.Queue()
        self._streams[submission.request] = (channel, items)
        ended = False
        try:
            try:
                await channel.call("submit", timeout=CALL_S, **_submission_to_map(submission))
            except (InputError, StateError):
                ended = True  # refused: nothing runs
                raise
            while not ended:
                item = await items.get()
                ended = not isinstance(item, TokenDelta)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            del self._streams[submission.request]
            if not ended:
                self._abort(channel, submission.request)

    def _abort(self, channel: Channel, request: str) -> None:
        """A call, because calls keep their order: it must not overtake the submit."""
        if not channel.closed:
            task = asyncio.create_task(_call_once(channel, "abort", request=request))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def end_branch(self, branch: str) -> None:
        """See ``client.Cluster.end_branch``."""
        await self._call("end_branch", branch=branch)

    async def set_role(self, node: str, role: Role) -> dict[str, Any]:
        """See ``client.Cluster.set_role``."""
        return await self._call("set_role", node=node, role=role.value)

    async def state(self) -> dict[str, Any]:
        """See ``client.Cluster.state``."""
        return await self._call("state")

    async def close(self) -> None:
        """Disconnect; running requests are aborted by the controller."""
        if self._channel is not None:
            await self._channel.close()
        if self._reading is not None:
            await self._reading

    async def _call(self, op: str, **fields: Any) -> Fields:
        channel = await self._open()
        return await channel.call(op, timeout=CALL_S, **fields)

    async def _open(self) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.closed:
                self._channel = await self._connect()
                self._reading = asyncio.create_task(self._read(self._channel))
            return self._channel

    async def _connect(self) -> Channel:
        """Try for a while: a controller that died is restarted within a second or two."""
        deadline = asyncio.get_running_loop().time() + RECONNECT_S
        while True:
            try:
                return await connect(self._address, self._secret, kind="client", name="gateway")
            except PeerError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _read(self, channel: Channel) -> None:
        await channel.run(self._told)
        gone = PeerError("the controller went away while the request was running")
        for used, items in self._streams.values():
            if used is channel:
                items.put_nowait(gone)

    async def _told(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        if fields["request"] not in self._streams:
            return None
        _, items = self._streams[fields["request"]]
        if op == "tokens":
            items.put_nowait(TokenDelta(tokens=tuple(fields["tokens"])))
        elif op == "finished":
            items.put_nowait(
                Finish(
                    reason=fields["reason"],
                    prompt_tokens=fields["prompt_tokens"],
                    output_tokens=fields["output_tokens"],
                    timings=timings_from_map(fields["timings"]),
                )
            )
        elif op == "failed":
            items.put_nowait(error_from(*fields["error"]))
        return None


async def _call_once(channel: Channel, op: str, **fields: Any) -> None:
    with contextlib.suppress(PeerError):
        await channel.call(op, timeout=CALL_S, **fields)


def _submission_to_map(submission: Submission) -> dict[str, Any]:
    fields = asdict(submission)
    fields["kind"] = submission.kind.value
    return fields


@contextlib.asynccontextmanager
async def remote_cluster(address: str, secret: str) -> AsyncIterator[RemoteCluster]:
    """A ``RemoteCluster`` that is closed at the end of the block."""
    cluster = RemoteCluster(address, secret)
    try:
        yield cluster
    finally:
        await cluster.close()
