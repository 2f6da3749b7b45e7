"""Meaning of writing and reading one record, on bytes."""

import numpy as np
from numpy.typing import NDArray

from evolving_infra.ops.reference.checksum import checksum
from evolving_infra.ops.wire_block import HEADER_BYTES, WireHeader, WireLayout, parse_header

Record = NDArray[np.uint8]


def write_record(record: Record, header: WireHeader, payload: Record, wire: WireLayout) -> None:
    """Publish a record in place: magic cleared first, header written last.

    Args:
        record: ``[slot_bytes]`` uint8, written up to the end of the checksum.
        payload: ``[num_layers * page_bytes]`` uint8.
    """
    record[:8] = 0
    record[HEADER_BYTES : wire.trailer_offset] = 0
    record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    head = np.frombuffer(header.pack(), dtype=np.uint8)
    total = checksum(head) + checksum(payload, HEADER_BYTES // 4)
    trailer = (total % 2**64).to_bytes(8, "little")
    record[wire.trailer_offset : wire.trailer_offset + 8] = np.frombuffer(trailer, dtype=np.uint8)
    record[8:HEADER_BYTES] = head[8:]
    record[:8] = head[:8]


def read_record(
    record: Record, expected: WireHeader, wire: WireLayout
) -> tuple[Record, int] | None:
    """Payload (``[num_layers * page_bytes]`` uint8, a copy) and token count; None is a miss.

    ``expected.token_count`` is not compared. The record is copied first and checked afterwards.
    """
    copied = record.copy()
    header = parse_header(record[:HEADER_BYTES].tobytes())
    if header is None or not _same_block(header, expected, wire):
        return None
    if copied[:HEADER_BYTES].tobytes() != header.pack():
        return None
    trailer = copied[wire.trailer_offset : wire.trailer_offset + 8].tobytes()
    payload_end = wire.layer_offset(wire.num_layers)
    if checksum(copied[:payload_end]) != int.from_bytes(trailer, "little"):
        return None
    return copied[HEADER_BYTES:payload_end], header.token_count


def _same_block(header: WireHeader, expected: WireHeader, wire: WireLayout) -> bool:
    identity = (header.digest, header.key, header.generation, header.shard)
    wanted = (expected.digest, expected.key, expected.generation, expected.shard)
    return identity == wanted and 1 <= header.token_count <= wire.page_size
