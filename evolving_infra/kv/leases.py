"""Read leases: blocks whose slots must not be reused, each until a time."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from evolving_infra.types import BlockKey


@dataclass(frozen=True, slots=True)
class _Lease:
    owner: str
    keys: tuple[BlockKey, ...]
    expires: float


class Leases:
    """All leases of a store. They end by release, with their owner, or by themselves."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: OrderedDict[int, _Lease] = OrderedDict()
        self._count: Counter[BlockKey] = Counter()
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: object) -> bool:
        return key in self._count

    def add(self, owner: str, keys: Iterable[BlockKey], now: float) -> int:
        """A new lease; returns its id. O(keys)."""
        lease = _Lease(owner, tuple(keys), now + self._lease_s)
        number = self._next
        self._next += 1
        self._leases[number] = lease
        self._count.update(lease.keys)
        return number

    def release(self, number: int, owner: str) -> None:
        """End a lease; one that ended already, or of another owner, is left alone."""
        lease = self._leases.get(number)
        if lease is not None and lease.owner == owner:
            self._end(number)

    def drop_owner(self, owner: str) -> None:
        """End all leases of an owner. O(leases)."""
        for number in [n for n, lease in self._leases.items() if lease.owner == owner]:
            self._end(number)

    def expire(self, now: float) -> None:
        """End the leases whose time is up. All last equally long, so the oldest goes first."""
        while self._leases:
            number, lease = next(iter(self._leases.items()))
            if lease.expires > now:
                return
            self._end(number)

    def num_keys(self) -> int:
        """Leased blocks."""
        return len(self._count)

    def recount(self) -> Counter[BlockKey]:
        """The counts from scratch, for checks."""
        return Counter(key for lease in self._leases.values() for key in lease.keys)

    def check(self) -> None:
        """Every count agrees with a recount."""
        assert self._count == self.recount(), "lease counts agree with the leases"

    def _end(self, number: int) -> None:
        for key in self._leases.pop(number).keys:
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]
