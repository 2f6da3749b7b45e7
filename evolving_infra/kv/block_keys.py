"""Keys of token blocks: a SHA-256 chain (design section 5).

key[i] = SHA-256(key[i - 1] + tokens of block i as little-endian uint32),  key[-1] = namespace
"""

import hashlib
import struct
from collections.abc import Sequence

from evolving_infra.errors import wrong
from evolving_infra.types import BlockKey, KvLayout


def namespace_digest(model: str, weights_seed: int, layout: KvLayout, salt: str) -> bytes:
    """32 bytes; equal only where KV of equal tokens is equal and may be shared.

    ``salt`` separates tenants. Everything that changes KV bytes is part of it: model, weights,
    and the layout (dtype, page size, TP layout).
    """
    parts = ("evolving-infra/1", model, weights_seed, layout.digest().hex(), salt)
    return hashlib.sha256(repr(parts).encode()).digest()


class BlockHasher:
    """Hashes token blocks of one namespace. Stateless; O(tokens hashed)."""

    def __init__(self, namespace: bytes, page_size: int) -> None:
        if len(namespace) != 32:
            raise wrong("namespace", "32 bytes", len(namespace))
        if page_size < 1:
            raise wrong("page_size", "a positive number of tokens", page_size)
        self.page_size = page_size
        self._namespace = namespace

    def chain(
        self, tokens: Sequence[int], known: tuple[BlockKey, ...] = ()
    ) -> tuple[BlockKey, ...]:
        """Keys of all complete blocks of ``tokens``.

        ``known`` are the keys of its first blocks, computed before: only later ones are hashed.
        """
        page, keys = self.page_size, list(known)
        if len(keys) * page > len(tokens):
            raise wrong("known", f"at most {len(tokens) // page} keys", len(keys))
        previous = keys[-1] if keys else None
        for first in range(len(keys) * page, len(tokens) - page + 1, page):
            previous = self._link(previous, tokens[first : first + page])
            keys.append(previous)
        return tuple(keys)

    def extend(self, previous_key: BlockKey | None, block_tokens: Sequence[int]) -> BlockKey:
        """Key of the complete block that follows ``previous_key`` (None: the first block)."""
        if len(block_tokens) != self.page_size:
            raise wrong("block_tokens", f"{self.page_size} tokens", len(block_tokens))
        return self._link(previous_key, block_tokens)

    def tail_key(self, previous_key: BlockKey | None, tail_tokens: Sequence[int]) -> BlockKey:
        """Key of a last block that is not complete: ``1..page_size - 1`` tokens."""
        if not 1 <= len(tail_tokens) < self.page_size:
            raise wrong("tail_tokens", f"1 to {self.page_size - 1} tokens", len(tail_tokens))
        return self._link(previous_key, tail_tokens)

    def _link(self, previous_key: BlockKey | None, tokens: Sequence[int]) -> BlockKey:
        start = self._namespace if previous_key is None else previous_key
        try:
            body = struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error:
            raise wrong("tokens", "ids in [0, 2**32)", tuple(tokens)) from None
        return hashlib.sha256(start + body).digest()
