"""What a cluster says about itself: ``GET /v1/cluster/state``, the metrics and the replay report.

Keys: ``ready, model, page_size, max_context_tokens, split, config, requests, branches,
prefetch{count, blocks, seconds}, role_changes[],
nodes[{name, role, up, store_up, pid, store_pid, ...counters of engine and store}]``.
"""

import asyncio
import json
from typing import Any

from evolving_infra.cluster.controller import Controller
from evolving_infra.errors import PeerError
from evolving_infra.kv.channel import Channel

STATS_S = 2.0

PUBLIC_NAMES = {
    "free_pages": "device_pages_free",
    "cached_pages": "device_pages_cached",
    "held_pages": "device_pages_held",
    "capacity": "host_blocks",
    "committed": "host_blocks_used",
    "counted": "host_blocks_counted",
    "evicted": "evicted_blocks",
}
"""Counters whose names say too little outside their process."""


async def cluster_state(controller: Controller) -> dict[str, Any]:
    """Ask every process for its counters; one that does not answer in 2 s is shown without them."""
    config = controller.config
    names = list(config.roles)
    engines = await asyncio.gather(*(_stats(controller.engines.get(n)) for n in names))
    stores = await asyncio.gather(*(_stats(controller.stores.get(n)) for n in names))
    nodes = [
        {
            "name": name,
            "role": (controller.plane.known_role(name) or config.roles[name]).value,
            "up": name in controller.engines,
            "store_up": name in controller.stores,
            "pid": _pid(controller.engines.get(name)),
            "store_pid": _pid(controller.stores.get(name)),
            **_public(store, engine),
        }
        for name, engine, store in zip(names, engines, stores, strict=True)
    ]
    return {
        "ready": all(node["up"] and node["store_up"] for node in nodes),
        "model": config.engine.model,
        "page_size": config.engine.page_size,
        "max_context_tokens": config.engine.max_context_tokens,
        "split": config.split,
        "config": json.loads(config.to_json()),
        "requests": len(controller.ledger),
        "branches": controller.plane.branch_count(),
        "prefetch": dict(controller.prefetch),
        "role_changes": controller.roles.to_list(),
        "nodes": nodes,
    }


def _public(store: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Counters of both processes of a node; blocks not written count wherever that happened."""
    dropped = store.get("write_dropped", 0) + engine.get("write_dropped", 0)
    merged = {**store, **engine, "write_dropped": dropped}
    return {PUBLIC_NAMES.get(name, name): value for name, value in merged.items()}


async def _stats(channel: Channel | None) -> dict[str, Any]:
    if channel is None:
        return {}
    try:
        answer = await channel.call("stats", timeout=STATS_S)
    except PeerError:
        return {}
    answer.pop("id", None)
    return answer


def _pid(channel: Channel | None) -> int | None:
    return None if channel is None else channel.peer.get("pid")
