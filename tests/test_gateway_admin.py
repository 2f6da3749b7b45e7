"""Branch ends, roles, cluster state, probes and metrics."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from evolving_infra.errors import PeerError
from evolving_infra.types import Role
from tests.test_gateway_fake import SETTINGS, EchoCluster, run, serving


async def call(
    client: aiohttp.ClientSession, method: str, path: str | URL, body: Any = None
) -> tuple[int, Any]:
    """Status and JSON of one call."""
    async with client.request(method, path, json=body) as response:
        return response.status, await response.json()


async def samples(client: aiohttp.ClientSession) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        text = await response.text()
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["a%2Fb%23c:1", "a/b%23c:1"])
def test_a_branch_ends_once(path: str) -> None:
    async def main() -> None:
        cluster = EchoCluster(branches={"a/b#c:1": True})
        async with serving(cluster) as client:
            url = URL(f"/v1/branches/{path}/end", encoded=True)
            assert await call(client, "POST", url) == (200, {"id": "a/b#c:1", "ended": True})
            assert cluster.branches == {"a/b#c:1": False}
            status, body = await call(client, "POST", url)
            assert status == 409
            assert body["error"]["message"] == "branch a/b#c:1 has already ended"

    run(main())


def test_an_unknown_branch_is_not_found_and_a_wrong_id_is_refused() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            status, body = await call(client, "POST", "/v1/branches/nobody/end")
            assert (status, body["error"]["code"]) == (404, "branch_not_found")
            status, body = await call(client, "POST", "/v1/branches/a%20b/end")
            assert (status, body["error"]["param"]) == (400, "id")
            status, _ = await call(client, "GET", "/v1/branches/nobody/end")
            assert status == 405

    run(main())


def test_roles() -> None:
    async def main() -> None:
        cluster = EchoCluster()
        async with serving(cluster) as client:
            path = "/v1/cluster/nodes/node0/role"
            status, body = await call(client, "POST", path, {"role": "decode"})
            assert (status, body["from"], body["to"]) == (200, "prefill", "decode")
            assert cluster.roles == {"node0": Role.DECODE}
            for bad in ("fast", None, ["decode"], 1):
                status, body = await call(client, "POST", path, {"role": bad})
                assert status == 400
                sentence = f"role: expected one of prefill, decode, both, got {bad!r}"
                assert body["error"]["message"] == sentence
            other = "/v1/cluster/nodes/node9/role"
            status, body = await call(client, "POST", other, {"role": "both"})
            assert (status, body["error"]["code"]) == (404, "node_not_found")

    run(main())


def test_cluster_state() -> None:
    async def main() -> None:
        cluster = EchoCluster()
        async with serving(cluster) as client:
            assert await call(client, "GET", "/v1/cluster/state") == (200, await cluster.state())
            cluster.state_error = PeerError("the controller went away")
            status, body = await call(client, "GET", "/v1/cluster/state")
            assert (status, body["error"]["message"]) == (502, "the controller went away")

    run(main())


def test_health_and_readiness() -> None:
    async def main() -> None:
        cluster = EchoCluster(ready=False)
        async with serving(cluster) as client:
            assert await call(client, "GET", "/healthz") == (200, {"status": "ok"})
            assert await call(client, "GET", "/readyz") == (503, {"ready": False})
            cluster.ready = True
            assert await call(client, "GET", "/readyz") == (200, {"ready": True})
            cluster.state_error = PeerError("the controller went away")
            assert await call(client, "GET", "/readyz") == (503, {"ready": False})
            assert await call(client, "GET", "/healthz") == (200, {"status": "ok"})

    run(main())


class SilentCluster(EchoCluster):
    """A cluster whose controller never answers."""

    async def state(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}


def test_probes_and_metrics_do_not_wait_for_a_silent_controller() -> None:
    async def main() -> None:
        async with serving(SilentCluster(), replace(SETTINGS, state_s=0.01)) as client:
            assert await call(client, "GET", "/readyz") == (503, {"ready": False})
            assert (await samples(client))["evolving_infra_cluster_up"] == 0

    run(main())


def test_metrics_of_requests() -> None:
    async def main() -> None:
        cluster = EchoCluster(branches={"a": True})
        async with serving(cluster) as client:
            await call(client, "POST", "/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 4})
            await call(client, "POST", "/v1/completions", {"prompt": 1})
            await call(client, "GET", "/v1/nowhere/at/all")
            await call(client, "POST", "/v1/branches/a/end")
            await call(client, "POST", "/v1/branches/a/end")
            await call(client, "POST", "/v1/cluster/nodes/node0/role", {"role": "both"})
            got = await samples(client)
        prefix = "evolving_infra_"
        requests = f"{prefix}requests_total route="
        assert got[f"{requests}/v1/completions status=200"] == 1
        assert got[f"{requests}/v1/completions status=400"] == 1
        assert got[f"{requests}unmatched status=404"] == 1
        assert got[f"{requests}/v1/branches/{{branch}}/end status=409"] == 1
        assert got[f"{prefix}requests_in_flight route=/v1/completions"] == 0
        assert got[f"{prefix}requests_in_flight route=/metrics"] == 1
        assert got[f"{prefix}prompt_tokens_total"] == 3
        assert got[f"{prefix}cached_tokens_total"] == 6
        assert got[f"{prefix}output_tokens_total"] == 8
        assert got[f"{prefix}ttft_seconds_count"] == 1
        assert got[f"{prefix}e2e_seconds_count"] == 1
        assert got[f"{prefix}branch_ends_total"] == 1
        assert got[f"{prefix}role_changes_total"] == 1

    run(main())


def test_metrics_of_nodes() -> None:
    async def main() -> dict[str, float]:
        async with serving(EchoCluster()) as client:
            return await samples(client)

    got = run(main())
    assert got["evolving_infra_cluster_up"] == 1
    assert got["evolving_infra_node_queued node=node0 role=prefill"] == 4
    assert got["evolving_infra_node_up node=node0 role=prefill"] == 1
    assert got["evolving_infra_node_evicted_blocks_total node=node0"] == 7
    assert not any("host_blocks_used" in name for name in got)


def test_metrics_of_a_broken_stream_and_of_a_client_that_left() -> None:
    async def main() -> None:
        cluster = EchoCluster(fail_after=(2, PeerError("node0 died")))
        async with serving(cluster) as client:
            body = {"prompt": "a", "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                await response.read()
            assert (await samples(client))["evolving_infra_stream_errors_total"] == 1
            cluster.fail_after = None
            cluster.steps = asyncio.Semaphore(1)
            async with client.post("/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                name = "evolving_infra_requests_in_flight route=/v1/completions"
                assert (await samples(client))[name] == 1
                response.close()
            await cluster.idle.wait()
            got = await samples(client)
            assert got["evolving_infra_requests_total route=/v1/completions status=499"] == 1
            assert got[name] == 0

    run(main())
