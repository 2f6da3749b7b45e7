"""Keys of token blocks: the chain, its increments and its namespaces."""

import dataclasses
import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra.errors import InputError
from evolving_infra.kv.block_keys import BlockHasher, namespace_digest
from tests.test_ops_samples import GQA, MLA

NAMESPACE = namespace_digest("tiny", 20, MLA, "")
HASHER = BlockHasher(NAMESPACE, 4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_key_is_the_written_formula() -> None:
    first = hashlib.sha256(NAMESPACE + struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 2**32 - 1)).digest()
    assert HASHER.chain([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9]) == (first, second)


@given(TOKENS, st.data())
def test_growing_a_chain_is_hashing_it_whole(tokens: list[int], data: st.DataObject) -> None:
    whole = HASHER.chain(tokens)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert HASHER.chain(tokens, known) == whole
    previous = None
    for block, key in enumerate(whole):
        previous = HASHER.extend(previous, tokens[4 * block : 4 * block + 4])
        assert previous == key


@given(TOKENS)
def test_known_blocks_are_not_hashed_again(tokens: list[int]) -> None:
    known = tuple(bytes([i]) * 32 for i in range(len(tokens) // 4))
    assert HASHER.chain(tokens, known) == known


def test_a_key_depends_on_everything_before_it() -> None:
    one, other = HASHER.chain(range(8)), HASHER.chain([9, *range(1, 8)])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_a_tail_key_is_none_of_a_full_block() -> None:
    key = HASHER.chain(range(4))[0]
    tails = {HASHER.tail_key(key, [4]), HASHER.tail_key(key, [4, 5]), HASHER.tail_key(None, [4])}
    assert len(tails) == 3
    assert HASHER.extend(key, [4, 5, 6, 7]) not in tails


def test_namespaces_differ() -> None:
    namespaces = [
        NAMESPACE,
        namespace_digest("tiny", 20, MLA, "tenant"),
        namespace_digest("tiny", 21, MLA, ""),
        namespace_digest("other", 20, MLA, ""),
        namespace_digest("tiny", 20, GQA, ""),
        namespace_digest("tiny", 20, dataclasses.replace(MLA, page_size=32), ""),
    ]
    keys = {BlockHasher(namespace, 4).chain(range(4)) for namespace in namespaces}
    assert len(keys) == len(namespaces)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_tokens_are_checked(token: float) -> None:
    with pytest.raises(InputError, match=r"tokens: expected ids in \[0, 2\*\*32\)"):
        HASHER.chain([1, 2, 3, token])  # type: ignore[list-item]


def test_lengths_are_checked() -> None:
    with pytest.raises(InputError, match="block_tokens: expected 4 tokens, got 3"):
        HASHER.extend(None, [1, 2, 3])
    with pytest.raises(InputError, match="tail_tokens: expected 1 to 3 tokens, got 4"):
        HASHER.tail_key(None, [1, 2, 3, 4])
    with pytest.raises(InputError, match="known: expected at most 1 keys, got 2"):
        HASHER.chain(range(7), (b"", b""))
