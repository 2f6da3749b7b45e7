"""What every route needs: the cluster, the settings, the metrics, and the edge's ids and clocks."""

from collections.abc import Callable
from dataclasses import dataclass

from evolving_infra.cluster.client import Cluster
from evolving_infra.gateway.metrics import GatewayMetrics
from evolving_infra.gateway.running import RunningRequests
from evolving_infra.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoor:
    """Shared by all handlers of one application."""

    cluster: Cluster
    settings: GatewaySettings
    metrics: GatewayMetrics
    running: RunningRequests
    new_id: Callable[[], str]
    """A fresh id, unlike any other of this cluster."""
    clock: Callable[[], float]
    """Monotonic seconds, for durations."""
    created: int
    """Unix time of the start, shown with the model."""
    unix_time: Callable[[], float]
    """Unix time now, shown with answers."""
