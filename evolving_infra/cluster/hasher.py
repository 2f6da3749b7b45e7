"""The block hasher of a cluster: every process keys blocks of its one model alike."""

from evolving_infra.config import EngineConfig
from evolving_infra.kv.block_keys import BlockHasher, namespace_digest


def block_hasher(config: EngineConfig) -> BlockHasher:
    """Namespace: model, weights (their seed), layout; no tenant salt."""
    namespace = namespace_digest(config.model, config.model_config.seed, config.layout, "")
    return BlockHasher(namespace, config.page_size)
