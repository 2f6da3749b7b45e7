"""Who talks to the controller: engines, stores and the front door; one class for each."""

import asyncio
import logging
from typing import Any

from evolving_infra.cluster.client import Submission
from evolving_infra.cluster.controller import Controller
from evolving_infra.cluster.ledger import Entry
from evolving_infra.cluster.messages import sampling_from_map, split_keys
from evolving_infra.cluster.state import cluster_state
from evolving_infra.control import events as ev
from evolving_infra.errors import InputError, PeerError, wrong
from evolving_infra.kv.channel import Channel, Fields
from evolving_infra.types import VOCAB_USED, BranchKind, Phase, Role, Tier

log = logging.getLogger(__name__)

PING_EVERY_S = 1.0
SILENCE_S = 10.0
"""A stopped or stuck process counts as lost after this time; it may come back."""


async def accept(controller: Controller, channel: Channel) -> None:
    """Serve one connection until it closes."""
    kind = KINDS.get(channel.peer.get("kind", ""))
    if kind is None:
        log.warning("a connection of unknown kind %r was closed", channel.peer.get("kind"))
        await channel.close()
        return
    connection = kind(controller, channel)
    connection.opened()
    watching = asyncio.create_task(_watch(channel)) if kind is not ClientConnection else None
    try:
        await channel.run(connection.handle)
    finally:
        if watching is not None:
            watching.cancel()
        connection.closed()


async def _watch(channel: Channel) -> None:
    """End the connection of a process that is there but silent: its work goes elsewhere."""
    while not channel.closed:
        await asyncio.sleep(PING_EVERY_S)
        try:
            await channel.call("ping", timeout=SILENCE_S)
        except PeerError as error:
            log.warning("%s %s: %s", channel.peer.get("kind"), channel.peer.get("name"), error)
            await channel.abort()


class EngineConnection:
    """An engine. Its loss loses L1 copies and moves its requests."""

    def __init__(self, controller: Controller, channel: Channel) -> None:
        self._controller = controller
        self._channel = channel
        self._node: str = channel.peer.get("name", "")

    def opened(self) -> None:
        controller, config = self._controller, self._controller.config
        stale = controller.engines.pop(self._node, None)
        if stale is not None:
            controller.apply_from_node(ev.NodeLost(node=self._node))
        controller.engines[self._node] = self._channel
        role = controller.plane.known_role(self._node) or config.roles[self._node]
        controller.apply_from_node(
            ev.NodeJoined(
                node=self._node,
                role=role,
                page_size=config.engine.page_size,
                l1_blocks=config.engine.device_pages,
                l2_blocks=config.store.blocks,
            )
        )
        controller.tell_counts(self._node, self._channel)

    def closed(self) -> None:
        controller = self._controller
        if controller.engines.get(self._node) is self._channel:
            del controller.engines[self._node]
            log.warning("engine of %s is gone", self._node)
            controller.apply_from_node(ev.NodeLost(node=self._node))

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        if op == "l1":
            self._directory(fields)
        elif op == "measured":
            self._measured(fields)
        else:
            self._about_request(op, fields)
        return None

    def _directory(self, fields: Fields) -> None:
        for kind, name in ((ev.BlocksRemoved, "removed"), (ev.BlocksStored, "stored")):
            if fields[name]:
                keys = split_keys(fields[name])
                self._controller.apply_from_node(kind(node=self._node, tier=Tier.L1, keys=keys))

    def _measured(self, fields: Fields) -> None:
        for sample in fields["prefill"]:
            self._controller.apply_from_node(ev.PrefillMeasured(node=self._node, **sample))
        for sample in fields["decode"]:
            self._controller.apply_from_node(ev.DecodeMeasured(node=self._node, **sample))

    def _about_request(self, op: str, fields: Fields) -> None:
        controller = self._controller
        entry = controller.ledger.current(fields["request"], fields["attempt"], self._node)
        if entry is None:
            return
        if op == "started":
            self._started(entry, fields["timings"])
        elif op == "tokens":
            if not entry.output:
                entry.note(prefill=fields["since_admitted"])
            controller.tokens_out(entry, fields["tokens"], fields["finish"])
        elif op == "prefill_done":
            controller.apply_from_node(
                ev.PrefillDone(
                    request=entry.request,
                    node=self._node,
                    cached_tokens=fields["cached_tokens"],
                    restored_tokens=fields["restored_tokens"],
                )
            )
        elif op == "failed":
            controller.give_up(entry, InputError(fields["text"]))

    def _started(self, entry: Entry, timings: dict[str, Any]) -> None:
        entry.started = True
        if entry.phase is Phase.PREFILL:
            entry.prefill_started(**timings)
            entry.note(prefill_node=self._node)
            self._controller.fetched(self._node, timings["fetched_blocks"], timings["fetch"])
        else:
            entry.note(decode_node=self._node, **timings)
        self._controller.apply_from_node(
            ev.RequestStarted(request=entry.request, node=self._node, phase=entry.phase)
        )


class StoreConnection:
    """A node's store. It brings its inventory; its loss loses the node's L2 copies."""

    def __init__(self, controller: Controller, channel: Channel) -> None:
        self._controller = controller
        self._channel = channel
        self._node: str = channel.peer.get("name", "")

    def opened(self) -> None:
        if self._controller.stores.pop(self._node, None) is not None:
            self._controller.apply_from_node(ev.StoreLost(node=self._node))
        self._controller.stores[self._node] = self._channel
        self._controller.tell_counts(self._node, self._channel)

    def closed(self) -> None:
        if self._controller.stores.get(self._node) is self._channel:
            del self._controller.stores[self._node]
            log.warning("store of %s is gone", self._node)
            self._controller.apply_from_node(ev.StoreLost(node=self._node))

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        if op == "l2":
            for kind, name in ((ev.BlocksRemoved, "removed"), (ev.BlocksStored, "stored")):
                if fields[name]:
                    keys = split_keys(fields[name])
                    self._controller.apply_from_node(kind(node=self._node, tier=Tier.L2, keys=keys))
        elif op == "prefetched":
            self._prefetched(fields["blocks"], fields["seconds"])
        return None

    def _prefetched(self, blocks: int, seconds: float) -> None:
        if blocks:
            done = self._controller.prefetch
            done["count"] += 1
            done["blocks"] += blocks
            done["seconds"] += seconds
        self._controller.fetched(self._node, blocks, seconds)


class ClientConnection:
    """A front door. Its requests are aborted when it goes away."""

    def __init__(self, controller: Controller, channel: Channel) -> None:
        self._controller = controller
        self._channel = channel

    def opened(self) -> None:
        """Nothing to announce."""

    def closed(self) -> None:
        for entry in self._controller.ledger.of_client(self._channel):
            self._controller.abort(entry.request)

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        controller = self._controller
        if op == "submit":
            self._submit(fields)
        elif op == "abort":
            controller.abort(fields["request"])
        elif op == "end_branch":
            controller.apply(ev.BranchEnded(branch=fields["branch"]))
        elif op == "set_role":
            return await self._set_role(fields["node"], Role(fields["role"]))
        elif op == "state":
            return await cluster_state(controller)
        else:
            raise PeerError(f"op: expected an operation of the controller, got {op!r}")
        return None

    def _submit(self, fields: Fields) -> None:
        controller = self._controller
        submission = submission_from_map(fields)
        check_submission(submission, controller.config.engine.max_context_tokens)
        controller.submit(
            Entry(
                submission=submission,
                client=self._channel,
                prompt_keys=controller.prompt_keys(submission.tokens),
                arrived=controller.clock(),
            )
        )

    async def _set_role(self, node: str, role: Role) -> Fields:
        controller = self._controller
        if node not in controller.config.roles:
            raise wrong("node", f"one of {', '.join(controller.config.roles)}", node)
        change = await controller.set_role(node, role)
        if change is None:
            return {"node": node, "from": role.value, "to": role.value, "control_s": 0.0}
        return change.to_map()


KINDS: dict[str, type[EngineConnection] | type[StoreConnection] | type[ClientConnection]] = {
    "engine": EngineConnection,
    "store": StoreConnection,
    "client": ClientConnection,
}


def submission_from_map(fields: Fields) -> Submission:
    """Raises ``PeerError`` if a field is missing or of another type."""
    try:
        return Submission(
            request=fields["request"],
            branch=fields["branch"],
            version=fields["version"],
            kind=BranchKind(fields["kind"]),
            parent=fields["parent"],
            anonymous=fields["anonymous"],
            tokens=tuple(fields["tokens"]),
            sampling=sampling_from_map(fields["sampling"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"submit: {error!r}") from None


def check_submission(submission: Submission, max_context_tokens: int) -> None:
    """Raise ``InputError`` unless prompt and output fit and every token exists."""
    prompt, asked = len(submission.tokens), submission.sampling.max_tokens
    if prompt == 0:
        raise wrong("prompt", "at least one token", "an empty prompt")
    if asked < 1:
        raise wrong("max_tokens", "a positive number", asked)
    if prompt + asked > max_context_tokens:
        raise InputError(
            f"prompt: expected prompt and max_tokens within {max_context_tokens} tokens, "
            f"got {prompt} + {asked}"
        )
    worst = max(submission.tokens)
    if worst >= VOCAB_USED or min(submission.tokens) < 0:
        raise wrong("prompt", f"token ids in [0, {VOCAB_USED})", worst)
