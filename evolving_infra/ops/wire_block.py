"""The wire block (design section 6): one 64-byte aligned record of one block of one shard.

    header 128 B | layer 0 page | layer 1 page | ... | checksum 8 B | padding

Header, little endian: magic u64, layout digest 16 B, key 32 B, generation u64, token count u32,
codec u32 (0 = native, bit exact), shard u32, zeros. The checksum is over the words of header and
pages: ``sum(x[i] * w(i)) mod 2**64`` with odd 64-bit weights (``reference/checksum.py``). It
starts at a multiple of 8 bytes; padding before and after it means nothing.
"""

import struct
from dataclasses import dataclass

from evolving_infra.errors import wrong
from evolving_infra.types import KEY_BYTES, BlockKey, KvLayout

MAGIC = int.from_bytes(b"EVINFRA1", "little")
NATIVE_CODEC = 0
HEADER = struct.Struct("<Q16s32sQIII52x")
HEADER_BYTES = HEADER.size
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLayout:
    """Where the parts of a record are, in bytes from its start."""

    digest: bytes
    shards: int
    num_layers: int
    page_size: int
    page_bytes: int

    @staticmethod
    def of(layout: KvLayout) -> "WireLayout":
        """Layout of the records of blocks of ``layout``.

        Raises:
            InputError: a page is not whole 32-bit words.
        """
        if layout.page_bytes % 4:
            raise wrong("layout.page_bytes", "a multiple of 4", layout.page_bytes)
        return WireLayout(
            digest=layout.digest(),
            shards=layout.shards,
            num_layers=layout.num_layers,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
        )

    @property
    def trailer_offset(self) -> int:
        end = HEADER_BYTES + self.num_layers * self.page_bytes
        return -(-end // 8) * 8

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of a host pool: one record, padded to 64."""
        return -(-(self.trailer_offset + 8) // ALIGNMENT) * ALIGNMENT

    def layer_offset(self, layer: int) -> int:
        return HEADER_BYTES + layer * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WireHeader:
    """What a record says it is."""

    digest: bytes
    key: BlockKey
    generation: int
    token_count: int
    shard: int

    def pack(self) -> bytes:
        """128 bytes, with the magic."""
        assert len(self.key) == KEY_BYTES, "a key has 32 bytes"
        return HEADER.pack(
            MAGIC,
            self.digest,
            self.key,
            self.generation,
            self.token_count,
            NATIVE_CODEC,
            self.shard,
        )


def parse_header(record: bytes) -> WireHeader | None:
    """The header at the start of ``record``; None if it is not a published native record."""
    magic, digest, key, generation, token_count, codec, shard = HEADER.unpack_from(record)
    if magic != MAGIC or codec != NATIVE_CODEC:
        return None
    return WireHeader(
        digest=digest, key=key, generation=generation, token_count=token_count, shard=shard
    )
