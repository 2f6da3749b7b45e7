"""The ops a store answers. Their meaning is in ``StoreClient``, which mirrors them."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from evolving_infra.errors import wrong
from evolving_infra.kv.channel import Fields
from evolving_infra.kv.fetch import Fetcher
from evolving_infra.kv.fields import int_field, keys_field, refs_value, seconds_field, text_field
from evolving_infra.kv.node_store import NodeStore


class StoreOps:
    """Calls by name. ``owner`` is the connection that asks."""

    def __init__(self, store: NodeStore, fetcher: Fetcher, clock: Callable[[], float]) -> None:
        self._store = store
        self._fetcher = fetcher
        self._clock = clock
        self._now_ops: dict[str, Callable[[str, Fields], Fields | None]] = {
            "reserve": self._reserve,
            "commit": self._commit,
            "abandon": self._abandon,
            "lease": self._lease,
            "release": self._release,
            "dropped": self._dropped,
            "cancel": self._cancel,
        }
        self._later_ops: dict[str, Callable[[str, Fields], Awaitable[Fields]]] = {
            "fetch": self._fetch,
        }

    async def answer(self, owner: str, op: str, fields: Fields) -> Fields | None:
        """Run one op. ``InputError`` for an unknown op or a field that is wrong."""
        if op in self._now_ops:
            return self._now_ops[op](owner, fields)
        if op in self._later_ops:
            return await self._later_ops[op](owner, fields)
        raise wrong("op", f"one of {', '.join([*self._now_ops, *self._later_ops])}", op)

    def _reserve(self, owner: str, fields: Fields) -> Fields:
        refs = self._store.reserve(keys_field(fields), owner, self._clock())
        return {"refs": refs_value(refs)}

    def _commit(self, owner: str, fields: Fields) -> None:
        self._store.commit(keys_field(fields), owner, self._clock())

    def _abandon(self, owner: str, fields: Fields) -> None:
        self._store.abandon(keys_field(fields), owner)

    def _lease(self, owner: str, fields: Fields) -> Fields:
        lease, refs = self._store.lease(keys_field(fields), owner, self._clock())
        return {"lease": lease, "refs": refs_value(refs)}

    def _release(self, owner: str, fields: Fields) -> None:
        self._store.release(int_field(fields, "lease"), owner)

    def _dropped(self, owner: str, fields: Fields) -> None:
        self._store.count_dropped(int_field(fields, "blocks"))

    async def _fetch(self, owner: str, fields: Fields) -> Fields:
        result = await self._fetcher.fetch(
            f"{owner} {text_field(fields, 'ticket')}",
            text_field(fields, "peer"),
            keys_field(fields),
            seconds_field(fields, "deadline_s"),
        )
        return {**asdict(result), "state": result.state.value}

    def _cancel(self, owner: str, fields: Fields) -> None:
        self._fetcher.cancel(f"{owner} {text_field(fields, 'ticket')}")
