"""What a queued request needs before it can start: its KV in host memory that the engine can read.

On a prefill node missing blocks are fetched into the node's own pool. On a decode node nothing is
fetched: the KV is read where the prefill node has it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from evolving_infra.cluster.messages import split_keys
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.engine.request import EngineRequest
from evolving_infra.errors import EvolvingInfraError
from evolving_infra.kv.block_keys import BlockHasher
from evolving_infra.kv.handoff import open_handoff
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import BlockKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Host blocks of a request's first tokens, leased until ``release``; none: recompute.

    The last block holds ``tail_tokens`` tokens if that is positive. ``fetch_s``: seconds that
    reading from peers took; ``fetched_blocks``: what came.
    """

    blocks: HostBlocks | None = None
    tail_tokens: int = 0
    release: Callable[[], None] | None = None
    fetch_s: float = 0.0
    fetched_blocks: int = 0


class Preparer:
    """Prepares requests on one node. Trouble with stores is logged and means recomputing."""

    def __init__(self, link: StoreLink, hasher: BlockHasher, fetch_deadline_s: float) -> None:
        self._link = link
        self._hasher = hasher
        self._deadline_s = fetch_deadline_s

    async def prefill(
        self, request: EngineRequest, fetches: Sequence[tuple[str, bytes]]
    ) -> Prepared:
        """Fetch what the plan says (peer's address, joined keys), then lease what is here."""
        store = self._link.store
        if store is None:
            return Prepared()
        started = time.monotonic()
        fetched = await asyncio.gather(
            *(
                self._fetch(store, f"{request.request}/{i}", peer, split_keys(keys))
                for i, (peer, keys) in enumerate(fetches)
            )
        )
        fetch_s = time.monotonic() - started if fetches else 0.0
        try:
            blocks, lease = await store.host_blocks(request.keys)
        except EvolvingInfraError as error:
            log.info("%s: the own pool is away, recomputing: %s", request.request, error)
            return Prepared(fetch_s=fetch_s, fetched_blocks=sum(fetched))
        return Prepared(
            blocks=blocks,
            release=partial(store.release, lease),
            fetch_s=fetch_s,
            fetched_blocks=sum(fetched),
        )

    async def _fetch(
        self, store: StoreClient, ticket: str, peer: str, keys: tuple[BlockKey, ...]
    ) -> int:
        """Blocks that came. What did not is recomputed."""
        try:
            return (await store.fetch(ticket, peer, keys, self._deadline_s)).fetched_blocks
        except EvolvingInfraError as error:
            log.info("fetch %s: %s", ticket, error)
            return 0

    async def decode(self, request: EngineRequest, source: str | None) -> Prepared:
        """Lease the prompt's blocks, partial last one included, at the store ``source``."""
        if source is None:
            return Prepared()
        size = self._hasher.page_size
        tokens = (*request.prompt, *request.output)[:-1]  # the last one's KV is computed here
        tail_tokens = len(tokens) % size
        keys = request.keys[: len(tokens) // size]
        tail = None
        if tail_tokens:
            tail = self._hasher.tail_key(keys[-1] if keys else None, tokens[-tail_tokens:])
        try:
            peer = await self._link.peer(source)
            handoff = await open_handoff(peer, keys, tail)
        except EvolvingInfraError as error:
            log.info("%s: hand-off failed, recomputing: %s", request.request, error)
            return Prepared()
        return Prepared(
            blocks=handoff.blocks,
            tail_tokens=tail_tokens if handoff.has_tail else 0,
            release=partial(peer.release, handoff.lease),
        )
