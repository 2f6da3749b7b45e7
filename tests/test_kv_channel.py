"""Channels: only who knows the secret gets in, every call is answered, errors keep their class."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import pytest

from evolving_infra.errors import InputError, PeerError, StateError
from evolving_infra.kv.channel import Channel, Fields, connect, proof, serve, split_address


async def answering(channel: Channel, op: str, fields: Fields) -> Fields | None:
    """The server of these tests."""
    if op == "double":
        return {"value": 2 * fields["value"]}
    if op == "refuse":
        raise StateError("not now")
    if op == "break":
        raise ZeroDivisionError("a bug in a handler")
    if op == "hang":
        await asyncio.Event().wait()
    return None


@contextlib.asynccontextmanager
async def server(folder: Path, heard: list[Fields] | None = None) -> AsyncIterator[str]:
    """A listening server; ``heard`` collects what its clients said they are."""
    channels: list[Channel] = []

    async def accept(channel: Channel) -> None:
        channels.append(channel)
        if heard is not None:
            heard.append(channel.peer)
        await channel.run(answering)

    address = f"unix:{folder / 'channel.sock'}"
    listening = await serve(address, "secret", accept, name="server")
    try:
        yield address
    finally:
        listening.close()
        for channel in channels:
            await channel.close()


async def raw_connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(address.removeprefix("unix:"))


def frame(message: object) -> bytes:
    body = msgpack.packb(message)
    return len(body).to_bytes(4, "big") + body


@contextlib.asynccontextmanager
async def client(address: str, secret: str = "secret") -> AsyncIterator[Channel]:
    channel = await connect(address, secret, name="client")
    reading = asyncio.create_task(channel.run(answering))
    try:
        yield channel
    finally:
        await channel.close()
        await reading


def test_calls_are_answered_and_both_ends_know_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[Fields] = []
        async with server(tmp_path, heard) as address, client(address) as channel:
            answers = await asyncio.gather(*(channel.call("double", value=i) for i in range(50)))
            assert [answer["value"] for answer in answers] == [2 * i for i in range(50)]
            assert channel.peer == {"name": "server"}
        assert heard == [{"name": "client"}]

    asyncio.run(main())


def test_errors_arrive_as_their_own_class(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path) as address, client(address) as channel:
            with pytest.raises(StateError, match="not now"):
                await channel.call("refuse")

    asyncio.run(main())


def test_a_bug_in_a_handler_is_answered_and_the_channel_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with server(tmp_path) as address, client(address) as channel:
            with pytest.raises(PeerError, match="break: an internal error"):
                await channel.call("break")
            assert (await channel.call("double", value=3))["value"] == 6

    asyncio.run(main())


def test_a_silent_peer_costs_the_call_its_timeout(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path) as address, client(address) as channel:
            with pytest.raises(PeerError, match="no answer"):
                await channel.call("hang", timeout=0.05)
            assert (await channel.call("double", value=4))["value"] == 8

    asyncio.run(main())


def test_a_call_ends_when_the_channel_closes(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path) as address, client(address) as channel:
            call = asyncio.create_task(channel.call("hang"))
            await asyncio.sleep(0)
            await channel.close()
            with pytest.raises(PeerError, match="closed"):
                await call
            with pytest.raises(PeerError, match="closed"):
                await channel.call("double", value=1)

    asyncio.run(main())


def test_another_secret_is_refused_on_both_ends(tmp_path: Path) -> None:
    async def main() -> None:
        heard: list[Fields] = []
        async with server(tmp_path, heard) as address:
            with pytest.raises(PeerError, match="secret"):
                await connect(address, "guess")
        assert heard == []

    asyncio.run(main())


NONCE = frame({"nonce": bytes(32)})


@pytest.mark.parametrize(
    "sent",
    [
        (1 << 20).to_bytes(4, "big"),
        NONCE + (1025).to_bytes(4, "big"),
        frame({"nonce": 7}),
        frame({"nonce": b"short"}),
        frame([]),
        *(NONCE + frame({"proof": p, "hello": {}}) for p in (None, 7, "é", [1], bytes(32))),
        *(NONCE + frame({"proof": bytes(32), "hello": h}) for h in (None, 7, "x", [])),
    ],
)
def test_a_stranger_is_refused_at_once(tmp_path: Path, sent: bytes) -> None:
    """Frames too long for a handshake are not waited for; nonsense breaks nothing."""

    async def main() -> None:
        heard: list[Fields] = []
        broken: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: broken.append(context))
        async with server(tmp_path, heard) as address:
            reader, writer = await raw_connection(address)
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 5)  # to the end: the server closed
            writer.close()
            await writer.wait_closed()
        assert heard == []
        assert broken == []

    asyncio.run(main())


@pytest.mark.parametrize("hello", [None, 7, []])
def test_a_server_that_knows_the_secret_but_says_nonsense_is_refused(
    tmp_path: Path, hello: object
) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = int.from_bytes(await reader.readexactly(4), "big")
            nonce = msgpack.unpackb(await reader.readexactly(size))["nonce"]
            shown = proof("secret", b"server", nonce)
            writer.write(NONCE + frame({"proof": shown, "hello": hello}))
            await reader.read()
            writer.close()

        path = tmp_path / "odd.sock"
        listening = await asyncio.start_unix_server(answer, path)
        with pytest.raises(PeerError, match="sent no proof and hello"):
            await connect(f"unix:{path}", "secret")
        listening.close()

    asyncio.run(main())


def test_a_call_begins_before_the_note_that_follows_it(tmp_path: Path) -> None:
    async def main() -> None:
        begun: list[str] = []

        async def note(channel: Channel, op: str, fields: Fields) -> None:
            begun.append(op)

        address = f"unix:{tmp_path / 'order.sock'}"
        listening = await serve(address, "secret", lambda channel: channel.run(note))
        async with client(address) as channel:
            call = asyncio.create_task(channel.call("call"))
            await asyncio.sleep(0)
            channel.tell("note")
            await call
            await channel.call("last")
        listening.close()
        assert begun == ["call", "note", "last"]

    asyncio.run(main())


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="can't connect"):
        asyncio.run(connect(f"unix:{tmp_path / 'none.sock'}", "secret"))


@pytest.mark.parametrize("address", ["", "unix:", "http://x", "udp:1"])
def test_a_bad_address_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="address: expected unix:PATH or tcp:HOST:PORT"):
        split_address(address)
