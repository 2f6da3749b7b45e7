"""How frozen values travel between processes: key chains as one byte string, the rest as maps.

Controller to engine: ``prefill``, ``decode``, ``cancel``, ``counted``; calls ``withdraw, stats``.
Engine to controller: ``started``, ``tokens``, ``prefill_done``, ``failed``, ``l1``, ``measured``.
Controller to store: ``counted``, ``prefetch``; call ``stats``. Store to controller: ``l2``,
``prefetched``. Front door to controller: calls ``submit``, ``end_branch``, ``set_role``, ``state``
and ``abort``; it is told ``tokens``, ``finished``, ``failed``. The controller calls ``ping`` on
engines and stores, and ``missing`` on a store after a role change.

Every message about a request carries ``attempt``: the number of the placement it belongs to, so
that what a node says about a request it has lost is recognised and dropped.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from evolving_infra.errors import PeerError
from evolving_infra.types import KEY_BYTES, BlockKey, RequestTimings, SamplingParams


def join_keys(keys: Iterable[BlockKey]) -> bytes:
    """A chain as one byte string."""
    return b"".join(keys)


def split_keys(joined: bytes) -> tuple[BlockKey, ...]:
    """The chain again. Raises ``PeerError`` unless it is a whole number of keys."""
    if len(joined) % KEY_BYTES:
        raise PeerError(f"keys: expected a multiple of {KEY_BYTES} bytes, got {len(joined)}")
    return tuple(joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES))


def sampling_to_map(sampling: SamplingParams) -> dict[str, Any]:
    return asdict(sampling)


def sampling_from_map(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})


def timings_to_map(timings: RequestTimings) -> dict[str, Any]:
    return asdict(timings)


def timings_from_map(fields: dict[str, Any]) -> RequestTimings:
    return RequestTimings(**fields)
