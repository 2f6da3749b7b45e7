"""Base vocabulary: roles, tiers, branches, and what one token's KV looks like. Stdlib only."""

import hashlib
from dataclasses import dataclass
from enum import Enum

BlockKey = bytes
"""32-byte SHA-256 chain digest of one block of tokens (design section 5)."""

KEY_BYTES = 32

EOS_TOKEN = 257
"""Ends a generation. Ids 0..255 are bytes, 256 to 259 special tokens (begin, end, chat marks)."""

VOCAB_USED = 260
"""Ids from here on only pad the model's vocabulary and are never generated."""


class Phase(str, Enum):
    """One half of a request's life."""

    PREFILL = "prefill"
    DECODE = "decode"


class Role(str, Enum):
    """What the router sends to a node. An engine can always do both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, phase: Phase) -> bool:
        """True if the router may send requests of ``phase`` to a node of this role."""
        return self is Role.BOTH or self.value == phase.value


class Tier(str, Enum):
    """Where a copy of a block is: device memory of the engine, or host memory of the node."""

    L1 = "l1"
    L2 = "l2"


class BranchKind(str, Enum):
    """How a branch started (design section 4)."""

    ROOT = "root"
    FORK = "fork"
    SUBAGENT = "subagent"


class Attention(str, Enum):
    """KV kind. ``MLA`` is replicated over TP ranks, ``GQA`` is sharded by KV heads."""

    MLA = "mla"
    GQA = "gqa"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What one block of KV looks like, in bytes. Decides which copies are interchangeable.

    A device pool is, per rank and layer, a tensor ``[num_pages, page_size, row]`` of ``dtype``;
    one page of one layer is ``page_bytes`` contiguous bytes. ``shards`` is the number of
    different contents a block has over the ranks: 1 if replicated (MLA), ``tp_size`` if sharded.
    """

    attention: Attention
    num_layers: int
    page_size: int
    row: int
    """Elements per token, layer, rank. MLA: latent + rope; GQA: 2 * KV heads of the rank * dim."""
    dtype: str
    dtype_bytes: int
    tp_size: int

    @property
    def shards(self) -> int:
        return 1 if self.attention is Attention.MLA else self.tp_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer on one rank."""
        return self.page_size * self.row * self.dtype_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block of one shard, all layers."""
        return self.num_layers * self.page_bytes

    def digest(self) -> bytes:
        """16 bytes; equal only for layouts whose blocks are interchangeable."""
        parts = (
            *(self.attention.value, self.num_layers, self.page_size),
            *(self.row, self.dtype, self.tp_size),
        )
        return hashlib.sha256(repr(parts).encode()).digest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are picked. ``temperature`` 0 is greedy; a seed makes sampling repeatable."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Where one request's time went, in seconds, and where its prompt's KV came from, in tokens."""

    queue: float = 0.0
    fetch: float = 0.0
    exposed: float = 0.0
    """Part of ``fetch`` during which the engine could have started the request."""
    prefill: float = 0.0
    handoff: float = 0.0
    cached_tokens: int = 0
    fetched_blocks: int = 0
    prefill_node: str = ""
    decode_node: str = ""
