"""The block directory against plain sets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.control.directory import Directory
from evolving_infra.types import Tier

NODES = ["a", "b", "c"]
CHAIN = tuple(bytes([i]) for i in range(8))
PLACE = st.tuples(st.sampled_from(NODES), st.sampled_from(list(Tier)))


def prefix(keys, held) -> int:
    length = 0
    while length < len(keys) and keys[length] in held:
        length += 1
    return length


def expected_holders(keys, copies) -> tuple:
    l1_reach = max(prefix(keys, copies.get((n, Tier.L1), set())) for n in NODES)
    found = []
    for index, key in enumerate(keys):
        names = tuple(n for n in NODES if key in copies.get((n, Tier.L2), set()))
        if not names and index >= l1_reach:
            break
        found.append(names)
    return tuple(found)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "drop"]),
            PLACE,
            st.sets(st.sampled_from(CHAIN)),
        ),
        max_size=30,
    )
)
def test_match_counts_and_holders_equal_plain_sets(steps) -> None:
    directory = Directory()
    copies: dict = {}
    for name, place, keys in steps:
        held = copies.setdefault(place, set())
        if name == "store":
            directory.store(place[0], place[1], sorted(keys))
            held |= keys
        elif name == "remove":
            directory.remove(place[0], place[1], sorted(keys))
            held -= keys
        else:
            assert directory.drop_node_tier(*place) == len(held)
            held.clear()
        directory.check()
        match = directory.match(CHAIN)
        for node in NODES:
            assert match.l1.get(node, 0) == prefix(CHAIN, copies.get((node, Tier.L1), set()))
            assert match.l2.get(node, 0) == prefix(CHAIN, copies.get((node, Tier.L2), set()))
        assert match.holders == expected_holders(CHAIN, copies)
        for (node, tier), held in copies.items():
            assert directory.count(node, tier) == len(held)
            assert directory.keys_at(node, tier) == held
            assert all(directory.holds(node, tier, key) == (key in held) for key in CHAIN)
        for key in CHAIN:
            names = [n for n in NODES if key in copies.get((n, Tier.L2), set())]
            assert directory.holders(key) == tuple(names)


def test_an_empty_chain_matches_nothing() -> None:
    directory = Directory()
    directory.store("a", Tier.L2, CHAIN)
    match = directory.match(())
    assert (match.l1, match.l2, match.holders) == ({}, {}, ())


def test_copies_beyond_a_gap_are_no_prefix() -> None:
    directory = Directory()
    directory.store("a", Tier.L2, CHAIN[:2] + CHAIN[3:])
    directory.store("b", Tier.L2, CHAIN[2:3])
    match = directory.match(CHAIN)
    assert match.l2 == {"a": 2}
    assert match.holders[2] == ("b",)
    assert len(match.holders) == len(CHAIN)
