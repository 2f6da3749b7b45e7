"""Authenticated message channels between the processes of a cluster.

A frame is a 4-byte big-endian length and a msgpack map. Both ends prove that they know the
cluster secret before the first message: each sends a random nonce and answers the other's with
``HMAC-SHA256(secret, side + nonce)``. Messages are of three kinds: a call (``op``, ``id``) that is
answered by (``re``, fields) or (``re``, ``error``); and a note (``op``) that is not answered.
Addresses are ``unix:PATH`` or ``tcp:HOST:PORT``.
"""

import asyncio
import contextlib
import hmac
import itertools
import secrets as random_secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from evolving_infra import errors
from evolving_infra.errors import EvolvingInfraError, PeerError, wrong

MAX_FRAME_BYTES = 64 << 20
MAX_HANDSHAKE_BYTES = 1 << 10
"""Of a frame from who has not shown yet that it knows the secret."""
HANDSHAKE_S = 10.0
NONCE_BYTES = 32

Fields = dict[str, Any]
Handler = Callable[["Channel", str, Fields], Awaitable[Fields | None]]


class Channel:
    """One ordered, authenticated stream of messages. ``peer`` is what the other end said it is."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Fields
    ) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Fields]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def tell(self, op: str, **fields: Any) -> None:
        """Queue a note. Notes to a closed channel are dropped: the reader learns of the close."""
        self._write({"op": op, **fields})

    async def call(self, op: str, *, timeout: float | None = None, **fields: Any) -> Fields:
        """Call and wait for the answer.

        Raises the error class the other end raised, or ``PeerError`` if it went away or is silent.
        """
        if self.closed:
            raise PeerError(
                f"{op}: the connection to {self.peer.get('name', 'the peer')} is closed"
            )
        number = next(self._ids)
        future: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._write({"op": op, "id": number, **fields})
            # not wait_for: before Python 3.12 it can swallow a cancellation
            done, _ = await asyncio.wait([future], timeout=timeout)
            if not done:
                raise PeerError(f"{op}: no answer from {self.peer.get('name')} in {timeout} s")
            return future.result()
        finally:
            self._waiting.pop(number, None)

    async def run(self, handler: Handler) -> None:
        """Read until the other end closes; ``handler`` gets calls and notes.

        Calls begin, and notes are handled, in the order in which they came.
        """
        try:
            while True:
                message = await _read_frame(self._reader)
                if "re" in message:
                    self._settle(message)
                elif "id" in message:
                    task = asyncio.create_task(self._answer(handler, message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    await asyncio.sleep(0)  # the task begins before the next message is read
                else:
                    await handler(self, message.pop("op"), message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await self.close()

    async def abort(self) -> None:
        """Close and drop what is not sent yet, which a stopped peer would never take."""
        self._writer.transport.abort()
        await self.close()

    async def close(self) -> None:
        """Close. Calls that wait for an answer raise ``PeerError``."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    PeerError(f"the connection to {self.peer.get('name', 'the peer')} was closed")
                )
        await _shut(self._writer)

    async def _answer(self, handler: Handler, message: Fields) -> None:
        number, op = message.pop("id"), message.pop("op")
        answer: Fields = {"error": [PeerError.__name__, f"{op}: an internal error, see the log"]}
        try:
            answer = await handler(self, op, message) or {}
        except EvolvingInfraError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        finally:  # also after an unexpected error, which asyncio logs: the caller must not wait
            self._write({"re": number, **answer})

    def _settle(self, message: Fields) -> None:
        future = self._waiting.get(message.pop("re"))
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(error_from(*message["error"]))
        else:
            future.set_result(message)

    def _write(self, message: Fields) -> None:
        if not self.closed:
            self._writer.write(_frame(message))


async def connect(address: str, secret: str, **hello: Any) -> Channel:
    """Open a channel. ``hello`` (name, kind, ...) is what the other end sees as ``peer``.

    Raises ``PeerError`` if nobody listens there or the secret differs.
    """
    kind, place = split_address(address)
    try:
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(place)
        else:
            host, port = place.rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise PeerError(f"can't connect to {address}: {error.strerror or error}") from None
    return await _handshake(reader, writer, secret, b"client", b"server", hello, address)


async def serve(
    address: str, secret: str, on_channel: Callable[[Channel], Awaitable[None]], **hello: Any
) -> asyncio.AbstractServer:
    """Listen. ``on_channel`` runs once per authenticated connection; others are closed."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await _handshake(
                reader, writer, secret, b"server", b"client", hello, "a client"
            )
        except PeerError:
            return
        await on_channel(channel)

    kind, place = split_address(address)
    if kind == "unix":
        return await asyncio.start_unix_server(accept, place)
    host, port = place.rsplit(":", 1)
    return await asyncio.start_server(accept, host, int(port))


def split_address(address: str) -> tuple[str, str]:
    """``("unix", path)`` or ``("tcp", "host:port")``."""
    kind, _, place = address.partition(":")
    if kind not in ("unix", "tcp") or not place:
        raise wrong("address", "unix:PATH or tcp:HOST:PORT", address)
    return kind, place


def proof(secret: str, side: bytes, nonce: bytes) -> bytes:
    """What shows knowledge of the secret without sending it."""
    return hmac.digest(secret.encode(), side + nonce, "sha256")


async def _handshake(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: str,
    me: bytes,
    other: bytes,
    hello: Fields,
    who: str,
) -> Channel:
    nonce = random_secrets.token_bytes(NONCE_BYTES)
    try:
        async with _deadline(HANDSHAKE_S):
            writer.write(_frame({"nonce": nonce}))
            theirs = (await _read_frame(reader, MAX_HANDSHAKE_BYTES)).get("nonce")
            if not isinstance(theirs, bytes) or len(theirs) != NONCE_BYTES:
                raise PeerError(f"{who} sent no nonce")
            writer.write(_frame({"proof": proof(secret, me, theirs), "hello": hello}))
            answer = await _read_frame(reader, MAX_HANDSHAKE_BYTES)
            shown, peer = answer.get("proof"), answer.get("hello")
            if not isinstance(shown, bytes) or not isinstance(peer, dict):
                raise PeerError(f"{who} sent no proof and hello")
            if not hmac.compare_digest(shown, proof(secret, other, nonce)):
                raise PeerError(f"{who} does not know this cluster's secret")
            return Channel(reader, writer, peer)
    except (asyncio.IncompleteReadError, ConnectionError):
        await _shut(writer)
        raise PeerError(f"{who} closed the connection: is the secret right?") from None
    except (asyncio.TimeoutError, TimeoutError):
        await _shut(writer)
        raise PeerError(f"{who} did not finish the handshake in {HANDSHAKE_S} s") from None
    except PeerError:
        await _shut(writer)
        raise


async def _shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError, OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> Any:
    """``asyncio.timeout`` for Python 3.10."""
    task = asyncio.current_task()
    assert task is not None, "a deadline needs a task"
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    handle = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if expired:
            raise asyncio.TimeoutError from None
        raise
    finally:
        handle.cancel()


def _frame(message: Fields) -> bytes:
    body: bytes = msgpack.packb(message)
    return len(body).to_bytes(4, "big") + body


async def _read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> Fields:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > limit:
        raise ConnectionError(f"a frame of {size} bytes exceeds {limit}")
    body = await reader.readexactly(size)
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException):
        raise ConnectionError("a frame is not msgpack") from None
    if not isinstance(message, dict):
        raise ConnectionError("a frame is not a map")
    return message


def error_from(name: str, text: str) -> EvolvingInfraError:
    """The error another process raised, as the same class here."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, EvolvingInfraError):
        error: EvolvingInfraError = kind(text)
        return error
    return PeerError(f"{name}: {text}")
