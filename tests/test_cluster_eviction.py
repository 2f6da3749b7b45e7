"""A paused branch's blocks outlive unreferenced ones in a small host pool; plain LRU loses them."""

import pytest

from benchmarks.eviction import Outcome, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_counted_eviction_keeps_what_a_paused_branch_needs() -> None:
    found = {(row.case, row.subject): row.value for row in run()}
    counted, lru = (
        Outcome(*(int(found[case, policy]) for case in ("paused", "compacted", "superseded")))
        for policy in ("counted", "lru")
    )
    assert counted == Outcome(paused=640, compacted=320, superseded=64), "only the shared prefix"
    assert lru.paused < 640
    assert lru.compacted < 320
