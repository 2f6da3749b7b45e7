"""Mooncake traces: JSON lines, one request a line, no sessions.

Blocks have 512 tokens and the partial last one has an id too; equal ids in different requests are
shared context. Every request is a branch of its own with an absolute arrival.
"""

from collections import Counter
from pathlib import PurePath

from evolving_infra.traces.fields import Fields
from evolving_infra.traces.rows import rows
from evolving_infra.traces.workload import (
    TraceRequest,
    Workload,
    count_notes,
    whole_microseconds,
)

BLOCK_TOKENS = 512


def read_mooncake(where: str, text: str) -> Workload:
    """The workload of one file's text. ``where`` names the file in errors.

    Raises:
        InputError: A line is not JSON, or a field is missing, unknown or of the wrong kind.
    """
    counts: Counter[str] = Counter()
    requests = [_request(index, row, counts) for index, row in enumerate(rows(where, text))]
    requests.sort(key=lambda request: request.not_before)
    return Workload(
        name=PurePath(where).stem,
        block_size=BLOCK_TOKENS,
        requests=tuple(requests),
        notes=count_notes(counts),
    )


def _request(index: int, row: Fields, counts: Counter[str]) -> TraceRequest:
    ids, tokens = row.ids("hash_ids"), row.integer("input_length", 1)
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        counts["rows whose ids do not cover their input"] += 1
    request = TraceRequest(
        request=f"row-{index}",
        branch=f"row-{index}",
        input_tokens=tokens,
        output_tokens=row.integer("output_length"),
        block_ids=ids,
        not_before=whole_microseconds(row.number("timestamp") / 1000.0),
    )
    row.finish()
    return request
