"""Where a request runs: the prefill node of least predicted TTFT, then a decode node.

Predicted TTFT of a prefill node (equation 7 of the paper, design section 7):

    rest of the running batch + service of its queue + own service
    + the part of the fetch that this wait does not hide + cost of the copy the fetch leaves

Ties go to the smaller node id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evolving_infra.control.commands import FetchSource
from evolving_infra.control.counts import BranchCounts
from evolving_infra.control.directory import Directory, Match
from evolving_infra.control.fetch_plan import Reuse, plan_reuse
from evolving_infra.control.iteration_time import IterationTimes
from evolving_infra.control.nodes import Node, Request
from evolving_infra.types import Phase, Tier

RECOMPUTE_SHARE = 0.5
"""Recompute instead of fetching below this share of the fetch's time: a fetch leaves the device
to others, so recomputing must be clearly cheaper, not just by the error of the model."""
NEAR_TIE_SHARE = 0.05
"""Decode nodes within this share of the fastest are as good: then locality decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """A prefill node for one request, and what it costs in seconds.

    ``ttft_seconds`` is the routed-by sum; ``service_seconds`` the part that others queue behind.
    """

    node: str
    fetches: tuple[FetchSource, ...]
    ttft_seconds: float
    service_seconds: float


class Router:
    """Reads the directory, the counts and the iteration times; changes nothing."""

    def __init__(self, directory: Directory, counts: BranchCounts, times: IterationTimes) -> None:
        self._directory = directory
        self._counts = counts
        self._times = times

    def prefill(self, request: Request, nodes: Sequence[Node], now: float) -> PrefillChoice:
        """The node of least predicted TTFT. O(nodes · prompt blocks). Needs a node."""
        usable = (request.prompt_tokens - 1) // nodes[0].page_size  # the last token is computed
        match = self._directory.match(request.prompt_keys[:usable])
        choices = [self._predict(request, match, node, now) for node in nodes]
        return min(choices, key=lambda choice: (choice.ttft_seconds, choice.node))

    def decode(
        self, request: Request, nodes: Sequence[Node], *, home: str | None, source: str | None
    ) -> str:
        """The node of least predicted iteration time after joining. Needs a node.

        Nodes whose device memory would overflow are left out; if all would, the one with most
        free blocks is taken. Among near ties ``source`` (no hand-off) wins, then ``home`` (only
        missing blocks are handed over), then time, then id.
        """
        fitting = [node for node in nodes if node.free_blocks() >= node.blocks(request)]
        if not fitting:
            return min(nodes, key=lambda node: (-node.free_blocks(), node.name)).name
        seconds = {
            node.name: self._times.decode_seconds(node.name, len(node.of_phase(Phase.DECODE)) + 1)
            for node in fitting
        }
        limit = min(seconds.values()) * (1 + NEAR_TIE_SHARE)
        near = [name for name in seconds if seconds[name] <= limit]
        return min(near, key=lambda name: (name != source, name != home, seconds[name], name))

    def wait_seconds(self, node: Node, now: float) -> float:
        """Until a request that joins ``node``'s queue now would start."""
        seconds = self._times.decode_seconds(
            node.name, sum(r.running for r in node.of_phase(Phase.DECODE))
        )
        for request in node.of_phase(Phase.PREFILL):
            passed = now - request.since if request.running else 0.0
            seconds += max(0.0, request.service_seconds - passed)
        return seconds

    def _predict(self, request: Request, match: Match, node: Node, now: float) -> PrefillChoice:
        reuse = plan_reuse(match, node.name)
        wait = self.wait_seconds(node, now)
        fetching = self._service(request, node, reuse.pool_blocks, reuse.device_blocks)
        exposed = max(0.0, self._times.fetch_seconds(reuse.fetch_blocks) - wait)
        computing = self._service(request, node, reuse.local_blocks, reuse.device_blocks)
        if computing < RECOMPUTE_SHARE * (fetching + exposed):
            return PrefillChoice(
                node=node.name,
                fetches=(),
                ttft_seconds=wait + computing,
                service_seconds=computing,
            )
        return PrefillChoice(
            node=node.name,
            fetches=reuse.fetches,
            ttft_seconds=wait + fetching + exposed + self._copy_cost(node, reuse),
            service_seconds=fetching,
        )

    def _service(self, request: Request, node: Node, blocks: int, device_blocks: int) -> float:
        """Prefill seconds if ``blocks`` are reused, of which ``device_blocks`` need no restore."""
        cached = blocks * node.page_size
        return self._times.prefill_seconds(
            node.name,
            request.prompt_tokens - cached,
            cached,
            (blocks - device_blocks) * node.page_size,
        )

    def _copy_cost(self, node: Node, reuse: Reuse) -> float:
        """Prefill seconds of the needed blocks that the fetched copies would push out of L2.

        An estimate: counted blocks are taken to be in L2, and each to cost one block's prefill.
        """
        held = self._directory.count(node.name, Tier.L2)
        unneeded = max(0, held - self._counts.num_counted(node.name))
        room = max(0, node.l2_blocks - held) + unneeded
        displaced = max(0, reuse.fetch_blocks - room)
        if displaced == 0:
            return 0.0
        return self._times.prefill_seconds(node.name, displaced * node.page_size, 0, 0)
