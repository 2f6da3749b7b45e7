"""Requests in time: disconnects abort, a slow reader bounds what waits, stopping is graceful."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from evolving_infra.errors import (
    BackendError,
    CapacityError,
    EvolvingInfraError,
    InputError,
    PeerError,
    StateError,
)
from evolving_infra.gateway.generation import generate, interleave
from evolving_infra.gateway.running import RunningRequests
from evolving_infra.gateway.server import GatewayServer, serve
from tests.conftest import free_port
from tests.test_gateway_fake import SETTINGS, EchoCluster, listening, run, serving, submission_of

ENDLESS = {"prompt": "abc", "max_tokens": 190}


@asynccontextmanager
async def stepping(permits: int) -> AsyncIterator[tuple[EchoCluster, aiohttp.ClientSession]]:
    """A cluster that gives ``permits`` tokens and then waits, and a client of its gateway."""
    cluster = EchoCluster(steps=asyncio.Semaphore(permits))
    settings = replace(SETTINGS, shutdown_s=0.0)
    async with serving(cluster, settings) as client:
        yield cluster, client


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]], ids=["one", "two"])
def test_a_client_that_leaves_a_stream_aborts_its_requests(prompt: Any) -> None:
    async def main() -> None:
        async with stepping(4) as (cluster, client):
            body = {**ENDLESS, "prompt": prompt, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                assert cluster.aborted == set()
                response.close()
            await cluster.idle.wait()
            assert cluster.aborted == {one.request for one in cluster.submissions}

    run(main())


def test_a_client_that_leaves_while_waiting_aborts_its_request() -> None:
    async def main() -> None:
        async with stepping(0) as (cluster, client):
            asking = asyncio.create_task(client.post("/v1/completions", json=ENDLESS))
            await cluster.started.wait()
            asking.cancel()
            await cluster.idle.wait()
            assert cluster.aborted == {cluster.submissions[0].request}

    run(main())


def test_one_failing_prompt_aborts_the_others() -> None:
    async def main() -> None:
        cluster = EchoCluster(fail_after=(3, PeerError("node0 died")))
        async with serving(cluster) as client:
            body = {**ENDLESS, "prompt": ["a", "b", "c"]}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 502
        assert cluster.running == set()
        assert len(cluster.aborted) == 3

    run(main())


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_closing_interleaved_outputs_aborts_every_one(num_outputs: int) -> None:
    async def main() -> None:
        cluster = EchoCluster()
        # Held here, so that only interleave closes them.
        outputs = [
            generate(cluster, replace(submission_of((1,), 9), request=str(i)), ())
            for i in range(num_outputs)
        ]
        items = interleave(outputs)
        await anext(items)
        await items.aclose()
        assert cluster.aborted == {str(i) for i in range(len(outputs))}

    run(main())


def test_a_connection_lost_while_writing_is_a_client_that_left() -> None:
    async def main() -> None:
        cluster = EchoCluster(fail_after=(0, ConnectionResetError("Cannot write")))
        async with serving(cluster) as client:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await client.post("/v1/completions", json={"prompt": "a"})
            async with client.get("/metrics") as response:
                text = await response.text()
        line = 'evolving_infra_requests_total{route="/v1/completions",status="499"} 1.0'
        assert line in text.splitlines()

    run(main())


def test_a_client_that_does_not_read_stops_the_cluster_from_being_read() -> None:
    async def main() -> None:
        settings = replace(SETTINGS, max_context_tokens=400_000, shutdown_s=0.0)
        cluster = EchoCluster()
        async with listening(cluster, settings) as server:
            where = urlsplit(server.url)
            # The reader's protocol pauses its socket after a few KiB.
            _, writer = await asyncio.open_connection(where.hostname, where.port, limit=1024)
            body = b'{"prompt": "abc", "max_tokens": 300000, "stream": true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await cluster.started.wait()
            # The echo never waits: unless writing does, it is done before anyone else gets a turn.
            async with aiohttp.ClientSession(server.url) as other:
                answer = await other.post("/v1/completions", json={"prompt": "a"})
                assert answer.status == 200
            assert 16 < cluster.produced < 300_000
            assert cluster.aborted == set()
            writer.close()
            await cluster.idle.wait()
            assert cluster.aborted == {cluster.submissions[0].request}

    run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (InputError("version: expected 3 or more, got 2"), 400, None, "invalid_request_error"),
        (StateError("branch a has ended"), 409, "conflict", "invalid_request_error"),
        (CapacityError("no node is up"), 503, "unavailable", "server_error"),
        (PeerError("the controller went away"), 502, "cluster_failed", "server_error"),
        (BackendError("the device broke"), 500, "internal_error", "server_error"),
    ],
    ids=["input", "state", "capacity", "peer", "backend"],
)
def test_an_error_before_the_first_token_has_its_status(
    error: EvolvingInfraError, status: int, code: str | None, kind: str, stream: bool
) -> None:
    async def main() -> None:
        async with serving(EchoCluster(fail_before=error)) as client:
            body = {"prompt": "a", "stream": stream}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == status
                assert ("Retry-After" in response.headers) is (status == 503)
                answer = (await response.json())["error"]
        param = "version" if status == 400 else None
        assert answer == {"message": str(error), "type": kind, "param": param, "code": code}

    run(main())


def test_an_error_later_ends_the_stream_with_an_event() -> None:
    async def main() -> bytes:
        cluster = EchoCluster(fail_after=(1, PeerError("node0 died")))
        async with serving(cluster) as client:
            body = {"prompt": "a", "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
                return await response.read()

    *_, last, end = run(main()).split(b"\n\n")
    assert last.startswith(b'data: {"error":{"message":"node0 died","type":"server_error"')
    assert end == b""


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (EchoCluster(forget_finish=True), "the cluster ended the request without finishing it"),
        (EchoCluster(lose_tokens=1), "expected 17 output tokens, got 16"),
    ],
    ids=["no-finish", "lost-token"],
)
def test_an_output_with_a_gap_is_never_passed_off_as_whole(
    cluster: EchoCluster, sentence: str
) -> None:
    async def main() -> None:
        async with (
            serving(cluster) as client,
            client.post("/v1/completions", json={"prompt": "a"}) as response,
        ):
            assert response.status == 502
            assert sentence in (await response.json())["error"]["message"]

    run(main())


async def until_refused(client: aiohttp.ClientSession) -> None:
    """Open connections until the server takes no more."""
    while True:
        async with client.get("/healthz", headers={"Connection": "close"}) as response:
            await response.read()


def test_stopping_lets_a_running_stream_finish_and_takes_no_more() -> None:
    async def main() -> None:
        cluster = EchoCluster(steps=asyncio.Semaphore(1))
        server = GatewayServer(cluster, SETTINGS)
        await server.start()
        async with aiohttp.ClientSession(server.url) as client:
            body = {"prompt": "abc", "stream": True, "max_tokens": 5}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                stopping = asyncio.create_task(server.stop())
                with pytest.raises(aiohttp.ClientConnectorError):
                    await until_refused(client)
                assert not stopping.done()
                assert cluster.steps is not None
                for _ in range(4):
                    cluster.steps.release()
                text = await response.read()
            assert await stopping == 0
        assert text.endswith(b"data: [DONE]\n\n")
        assert cluster.aborted == set()

    run(main())


def test_stopping_aborts_what_is_late() -> None:
    async def main() -> None:
        cluster = EchoCluster(steps=asyncio.Semaphore(1))
        server = GatewayServer(cluster, replace(SETTINGS, shutdown_s=0.0))
        await server.start()
        async with aiohttp.ClientSession(server.url) as client:
            body = {"prompt": "abc", "stream": True, "max_tokens": 5}
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                assert await server.stop() == 1
                assert cluster.aborted == {cluster.submissions[0].request}
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()

    run(main())


def test_a_kept_connection_is_told_that_the_server_stops() -> None:
    async def main() -> None:
        cluster = EchoCluster(steps=asyncio.Semaphore(1))
        server = GatewayServer(cluster, SETTINGS)
        await server.start()
        async with aiohttp.ClientSession(server.url) as client:
            kept = [client.get("/healthz") for _ in range(3)]
            for response in await asyncio.gather(*kept):
                await response.read()
            body = {"prompt": "abc", "stream": True, "max_tokens": 2}
            async with client.post("/v1/completions", json=body) as stream:
                await stream.content.readuntil(b"\n\n")
                stopping = asyncio.create_task(server.stop())
                async with client.post("/v1/completions", json=body) as response:
                    assert response.status == 503
                    assert response.headers["Retry-After"] == "1"
                async with client.get("/readyz") as response:
                    assert response.status == 503
                async with client.get("/healthz") as response:
                    assert response.status == 200
                assert cluster.steps is not None
                cluster.steps.release()
                await stream.read()
            await stopping
        assert len(cluster.submissions) == 1

    run(main())


def test_draining_waits_until_an_aborted_request_has_unwound() -> None:
    async def main() -> list[str]:
        running = RunningRequests()
        steps: list[str] = []

        async def handle() -> None:
            running.enter()
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)
                running.leave()
                steps.append("unwound")

        task = asyncio.create_task(handle())
        await asyncio.sleep(0)
        assert await running.drain(0.0) == 1
        assert task.cancelled()
        assert len(running) == 0
        return steps

    assert run(main()) == ["unwound"]


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        async with listening(EchoCluster()) as server:
            port = int(server.url.rsplit(":", 1)[1])
            with pytest.raises(OSError, match="in use"):
                await GatewayServer(EchoCluster(), replace(SETTINGS, port=port)).start()

    run(main())


def test_serve_runs_until_it_is_told_to_stop() -> None:
    async def main() -> None:
        stopping = asyncio.Event()
        settings = replace(SETTINGS, port=free_port())
        serving = asyncio.create_task(serve(EchoCluster(), settings, stopping))
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{settings.port}/healthz"
            while not serving.done():
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(url) as response:
                        assert response.status == 200
                        break
                await asyncio.sleep(0)
            assert not serving.done()
            stopping.set()
            await serving
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(url)

    run(main())
