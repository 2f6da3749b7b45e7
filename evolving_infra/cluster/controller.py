"""The controller: hears nodes and clients, drives the pure ``ControlPlane``, does what it says.

It owns the clock and the connections and decides nothing: every placement, fetch, eviction hint
and role change comes from ``control``. A message about a placement that is no longer valid is
dropped (``Ledger.current``), so a node that comes back late can't corrupt a request.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.ledger import Entry, Ledger
from evolving_infra.cluster.messages import join_keys, sampling_to_map, timings_to_map
from evolving_infra.cluster.role_log import RoleChange, RoleLog
from evolving_infra.config import ClusterConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.journal import Journal
from evolving_infra.control.plane import ControlPlane
from evolving_infra.errors import EvolvingInfraError, PeerError
from evolving_infra.kv.channel import Channel
from evolving_infra.types import BlockKey, Phase, Role

log = logging.getLogger(__name__)

WITHDRAW_S = 5.0
"""A node has this long to answer about a role change."""


class Controller:
    """Real-time driver of one ``ControlPlane``. ``clock`` is seconds, never going back."""

    def __init__(
        self,
        config: ClusterConfig,
        store_address: Callable[[str], str],
        clock: Callable[[], float],
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.ledger = Ledger()
        self.roles = RoleLog()
        self.engines: dict[str, Channel] = {}
        self.stores: dict[str, Channel] = {}
        self.prefetch = {"count": 0, "blocks": 0, "seconds": 0.0}
        self.plane = ControlPlane(config.control)
        self._hasher = block_hasher(config.engine)
        self._store_address = store_address
        self._clock = clock
        self._journal = journal
        self._timer_moved = asyncio.Event()
        self._withdrawals: set[asyncio.Task[str | None]] = set()

    # -- the plane ---------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Tell the plane and do what it wants. What the plane raises has changed nothing."""
        now = self._clock()
        wanted = self.plane.handle(event, now)
        if self._journal is not None:
            self._journal.write(now, event, wanted)
        for command in wanted:
            self._do(command)
        self._timer_moved.set()

    def apply_from_node(self, event: ev.Event) -> None:
        """``apply`` for what nodes report: an event no longer legal is logged and dropped."""
        try:
            self.apply(event)
        except EvolvingInfraError as error:
            log.warning("dropped %s: %s", type(event).__name__, error)

    async def run_timers(self, stop: asyncio.Event) -> None:
        """Deliver ``TimerDue`` when the plane asks for it, until ``stop``."""
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            self._timer_moved.clear()
            due = self.plane.next_timer()
            moved = asyncio.create_task(self._timer_moved.wait())
            delay = None if due is None else max(0.0, due - self._clock())
            await asyncio.wait([moved, stopping], timeout=delay, return_when="FIRST_COMPLETED")
            moved.cancel()
            if due is not None and self._clock() >= due:
                self.apply(ev.TimerDue())
        stopping.cancel()

    # -- commands ----------------------------------------------------------------------------

    @singledispatchmethod
    def _do(self, command: do.Command) -> None:
        raise AssertionError(f"no way to carry out {command}")

    @_do.register
    def _(self, command: do.StartPrefill) -> None:
        entry = self._entry(command.request)
        self.roles.left(command.request, failed=False)
        attempt = entry.place(command.node, Phase.PREFILL, self._clock())
        fetches = [
            [
                self._store_address(source.node),
                join_keys(entry.prompt_keys[source.first : source.first + source.count]),
            ]
            for source in command.fetches
        ]
        self._start(entry, "prefill", attempt, fetches=fetches)

    @_do.register
    def _(self, command: do.StartDecode) -> None:
        entry = self._entry(command.request)
        self.roles.left(command.request, failed=False)
        attempt = entry.place(command.node, Phase.DECODE, self._clock())
        source = None if command.source is None else self._store_address(command.source)
        self._start(entry, "decode", attempt, source=source)

    @_do.register
    def _(self, command: do.Withdraw) -> None:
        entry = self._entry(command.request)
        task = asyncio.create_task(
            self._withdraw(entry, entry.attempt, command.node, command.phase)
        )
        self._withdrawals.add(task)

    @_do.register
    def _(self, command: do.Cancel) -> None:
        if command.node in self.engines:
            self.engines[command.node].tell("cancel", request=command.request)

    @_do.register
    def _(self, command: do.Prefetch) -> None:
        if command.node in self.stores:
            self.stores[command.node].tell(
                "prefetch", source=self._store_address(command.source), keys=join_keys(command.keys)
            )

    @_do.register
    def _(self, command: do.SetCounted) -> None:
        for channel in (self.engines.get(command.node), self.stores.get(command.node)):
            if channel is not None:
                channel.tell(
                    "counted",
                    counted=join_keys(command.counted),
                    uncounted=join_keys(command.uncounted),
                    reset=False,
                )

    @_do.register
    def _(self, command: do.RoleChanged) -> None:
        log.info("%s: %s -> %s", command.node, command.before.value, command.after.value)

    @_do.register
    def _(self, command: do.BranchExpired) -> None:
        log.info("branch %s was idle for its whole lease: ended", command.branch)

    def tell_counts(self, node: str, channel: Channel) -> None:
        """Tell an engine or store that connects which blocks active branches need there."""
        counted = join_keys(self.plane.counted_at(node))
        channel.tell("counted", counted=counted, uncounted=b"", reset=True)

    def _start(self, entry: Entry, op: str, attempt: int, **more: Any) -> None:
        assert entry.node is not None, "a placed request has a node"
        channel = self.engines.get(entry.node)
        if channel is None:
            return  # its NodeLost is on the way and places the request again
        submission = entry.submission
        channel.tell(
            op,
            request=entry.request,
            attempt=attempt,
            prompt=submission.tokens,
            output=entry.output,
            sampling=sampling_to_map(submission.sampling),
            **more,
        )

    def _entry(self, request: str) -> Entry:
        entry = self.ledger.get(request)
        assert entry is not None, f"the plane knows request {request}, the ledger does not"
        return entry

    async def _withdraw(self, entry: Entry, attempt: int, node: str, phase: Phase) -> str | None:
        """Id of the request if it was moved, None if it stays and finishes in place.

        An engine that does not answer may withdraw it later: the request is taken from it, and
        what it then says about this attempt is stale.
        """
        channel = self.engines.get(node)
        if channel is None:
            return None
        try:
            answer = await channel.call(
                "withdraw", timeout=WITHDRAW_S, request=entry.request, attempt=attempt
            )
            withdrawn = bool(answer["withdrawn"])
        except PeerError as error:
            log.warning("withdraw: %s", error)
            withdrawn = not entry.started
            if withdrawn:
                channel.tell("cancel", request=entry.request)
        if not withdrawn or self.ledger.current(entry.request, attempt, node) is None:
            return None
        try:
            self.apply(ev.RequestBounced(request=entry.request, node=node, phase=phase))
        except EvolvingInfraError as error:
            self.give_up(entry, error)
        return entry.request

    def fetched(self, node: str, blocks: int, seconds: float) -> None:
        """A fetch or prefetch is over; one that brought blocks teaches the router its cost."""
        if blocks:
            self.apply_from_node(ev.FetchMeasured(node=node, seconds=seconds, blocks=blocks))

    # -- requests ----------------------------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Place a new request. Raises what the plane raises."""
        submission = entry.submission
        self.ledger.check_new(submission.request)
        self.ledger.add(entry)
        try:
            self.apply(
                ev.RequestArrived(
                    request=submission.request,
                    branch=submission.branch,
                    version=submission.version,
                    kind=submission.kind,
                    parent=submission.parent,
                    prompt_keys=entry.prompt_keys,
                    prompt_tokens=len(submission.tokens),
                    max_tokens=submission.sampling.max_tokens,
                )
            )
        except EvolvingInfraError:
            self.ledger.remove(submission.request)
            raise

    def prompt_keys(self, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        return self._hasher.chain(tokens)

    def clock(self) -> float:
        return self._clock()

    def tokens_out(self, entry: Entry, tokens: list[int], finish: str | None) -> None:
        """Pass tokens on; on the last ones close the request."""
        entry.output += tokens
        entry.client.tell("tokens", request=entry.request, tokens=tokens)
        if finish is None:
            return
        self._close(entry, failed=False)
        produced = (*entry.submission.tokens, *entry.output[:-1])
        self.apply_from_node(
            ev.RequestFinished(
                request=entry.request,
                keys=self._hasher.chain(produced),
                output_tokens=len(entry.output),
            )
        )
        entry.client.tell(
            "finished",
            request=entry.request,
            reason=finish,
            prompt_tokens=len(entry.submission.tokens),
            output_tokens=len(entry.output),
            timings=timings_to_map(entry.timings),
        )
        self._end_anonymous(entry)

    def give_up(self, entry: Entry, error: EvolvingInfraError) -> None:
        """Fail a request for good and say why to its client."""
        self._close(entry, failed=True)
        self.apply_from_node(ev.RequestAborted(request=entry.request))
        entry.client.tell("failed", request=entry.request, error=[type(error).__name__, str(error)])
        self._end_anonymous(entry)

    def abort(self, request: str) -> None:
        """The client does not want it any more. Unknown ids are fine: it may just have finished."""
        entry = self.ledger.get(request)
        if entry is not None:
            self._close(entry, failed=False)
            self.apply_from_node(ev.RequestAborted(request=request))
            self._end_anonymous(entry)

    def _close(self, entry: Entry, *, failed: bool) -> None:
        self.ledger.remove(entry.request)
        self.roles.left(entry.request, failed=failed)
        self.roles.settle(self._clock())

    def _end_anonymous(self, entry: Entry) -> None:
        if entry.submission.anonymous:
            self.apply_from_node(ev.BranchEnded(branch=entry.submission.branch))

    # -- roles -------------------------------------------------------------------------------

    async def set_role(self, node: str, role: Role) -> RoleChange | None:
        """Switch the router and move what is queued. None if the node has this role already."""
        before = self.plane.role(node)
        if before is role:
            return None
        draining = [entry.request for entry in self.ledger.at(node) if not role.serves(entry.phase)]
        keys = self.plane.keys_at(node)
        change = self.roles.begin(node, before, role, self._clock(), draining)
        self.apply(ev.RoleAsked(node=node, role=role))
        moved: list[str] = []
        while self._withdrawals:
            task = self._withdrawals.pop()
            request = await task
            if request is not None:
                moved.append(request)
        self.roles.switched(change, self._clock(), moved)
        change.blocks_lost = await self._missing(node, keys)
        self.roles.settle(self._clock())
        return change

    async def _missing(self, node: str, keys: frozenset[BlockKey]) -> int:
        """How many of ``keys`` the node's store lacks; all of them if it does not answer."""
        store = self.stores.get(node)
        if store is None:
            return len(keys)
        try:
            joined = join_keys(sorted(keys))
            answer = await store.call("missing", timeout=WITHDRAW_S, keys=joined)
        except PeerError as error:
            log.warning("role change of %s: %s", node, error)
            return len(keys)
        missing: int = answer["missing"]
        return missing
