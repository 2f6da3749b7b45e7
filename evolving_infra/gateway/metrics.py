"""Prometheus metrics of one gateway, and of the cluster's nodes as its state shows them."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evolving_infra.gateway.generation import Ended

PREFIX = "evolving_infra"
TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

NODE_GAUGES = {
    "up": "1 if the node's engine is up",
    "queued": "Requests waiting on the node",
    "running": "Requests running on the node",
    "device_pages_free": "Free pages of device memory per rank",
    "host_blocks_used": "Blocks in the node's host pool",
    "host_blocks_counted": "Blocks of the host pool that an active branch needs",
}
"""Keys of a node in the cluster's state that go up and down."""

NODE_COUNTERS = {
    "prefill_tokens": "Prompt tokens computed",
    "decode_tokens": "Tokens decoded",
    "fetched_blocks": "Blocks fetched from peers",
    "evicted_blocks": "Blocks evicted from the host pool",
    "write_dropped": "Blocks not written because the host pool could not keep up",
}
"""Keys of a node in the cluster's state that only rise while its processes live."""


class NodeCollector(Collector):
    """Shows the nodes of the last state it was given; a key that a node lacks is left out."""

    def __init__(self) -> None:
        self.state: Mapping[str, Any] | None = None

    def collect(self) -> Iterator[Metric]:
        """One family a key, one sample a node."""
        state = self.state
        reachable = GaugeMetricFamily(f"{PREFIX}_cluster_up", "1 if the cluster gave its state")
        reachable.add_metric([], 0 if state is None else 1)
        yield reachable
        nodes = [] if state is None else state.get("nodes", [])
        for key, text in NODE_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_node_{key}", text, labels=["node", "role"])
            for node in nodes:
                if key in node:
                    gauge.add_metric([node["name"], node["role"]], float(node[key]))
            yield gauge
        for key, text in NODE_COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_node_{key}", text, labels=["node"])
            for node in nodes:
                if key in node:
                    counter.add_metric([node["name"]], float(node[key]))
            yield counter


class GatewayMetrics:
    """One gateway's metrics in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._nodes = NodeCollector()
        registry.register(self._nodes)
        self.requests = _counter(registry, "requests", "Requests answered", ("route", "status"))
        self.in_flight = Gauge(
            f"{PREFIX}_requests_in_flight", "Requests being handled", ["route"], registry=registry
        )
        self.ttft = _histogram(registry, "ttft", "To the first tokens of a request", TTFT_BUCKETS_S)
        self.e2e = _histogram(registry, "e2e", "To the last token of a request", E2E_BUCKETS_S)
        self.prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens of ended requests")
        self.cached_tokens = _counter(registry, "cached_tokens", "Prompt tokens not recomputed")
        self.output_tokens = _counter(registry, "output_tokens", "Tokens generated")
        self.branch_ends = _counter(registry, "branch_ends", "Branches ended by a harness")
        self.role_changes = _counter(registry, "role_changes", "Role changes asked for here")
        self.stream_errors = _counter(registry, "stream_errors", "Streams that ended in an error")

    def add_output(self, ended: Ended) -> None:
        """Count the tokens of an output."""
        self.prompt_tokens.inc(ended.prompt_tokens)
        self.output_tokens.inc(ended.output_tokens)
        if ended.timings is not None:
            self.cached_tokens.inc(ended.timings.cached_tokens)

    def render(self, state: Mapping[str, Any] | None) -> bytes:
        """Text exposition; ``state`` is the cluster's, None if it did not answer."""
        self._nodes.state = state
        return generate_latest(self._registry)


def _counter(
    registry: CollectorRegistry, name: str, text: str, labels: tuple[str, ...] = ()
) -> Counter:
    return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets_s: tuple[float, ...]
) -> Histogram:
    return Histogram(f"{PREFIX}_{name}_seconds", text, buckets=buckets_s, registry=registry)
