"""The record of role changes: how long each took and whether it cost any KV or request."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from evolving_infra.types import Role


@dataclass(kw_only=True)
class RoleChange:
    """One change. ``drain_s`` is None until the last request of the old phase has left the node.

    ``blocks_lost``: of the blocks readable there before, how many its store lacks after the switch.
    """

    node: str
    before: Role
    after: Role
    asked_at: float
    control_s: float = 0.0
    drain_s: float | None = None
    blocks_lost: int = 0
    failed_requests: int = 0
    moved_requests: int = 0
    draining: set[str] = field(default_factory=set)

    def to_map(self) -> dict[str, Any]:
        """The public keys, in the words of the report."""
        fields = asdict(self)
        for private in ("draining", "asked_at"):
            del fields[private]
        fields["from"], fields["to"] = fields.pop("before").value, fields.pop("after").value
        return fields


class RoleLog:
    """All changes of this run, in order."""

    def __init__(self) -> None:
        self._changes: list[RoleChange] = []

    def begin(
        self,
        node: str,
        before: Role,
        after: Role,
        now: float,
        draining: Iterable[str],
    ) -> RoleChange:
        """Open a record. ``draining``: requests on the node in a phase it gives up."""
        change = RoleChange(
            node=node,
            before=before,
            after=after,
            asked_at=now,
            draining=set(draining),
        )
        self._changes.append(change)
        return change

    def switched(self, change: RoleChange, now: float, moved: Iterable[str]) -> None:
        """The router has switched and the queued requests ``moved`` run elsewhere."""
        change.control_s = now - change.asked_at
        for request in moved:
            change.moved_requests += 1
            change.draining.discard(request)

    def left(self, request: str, *, failed: bool) -> None:
        """``request`` no longer runs where it did."""
        for change in self._changes:
            if request in change.draining:
                change.draining.discard(request)
                change.failed_requests += failed

    def settle(self, now: float) -> None:
        """Close the record of every change that has drained."""
        for change in self._changes:
            if change.drain_s is None and not change.draining:
                change.drain_s = now - change.asked_at

    def to_list(self) -> list[dict[str, Any]]:
        return [change.to_map() for change in self._changes]
