"""Fields of messages, checked before use. ``InputError`` names the field that is wrong."""

from collections.abc import Sequence
from typing import Any

from evolving_infra.errors import wrong
from evolving_infra.kv.channel import Fields
from evolving_infra.kv.slots import BlockRef
from evolving_infra.types import KEY_BYTES, BlockKey


def keys_field(fields: Fields, name: str = "keys") -> tuple[BlockKey, ...]:
    """A list of 32-byte block keys."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise wrong(name, "a list of block keys", value)
    for key in value:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise wrong(name, f"{KEY_BYTES} bytes each", key)
    return tuple(value)


def text_field(fields: Fields, name: str) -> str:
    """A string."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def int_field(fields: Fields, name: str) -> int:
    """A non-negative integer."""
    value = fields.get(name)
    if not isinstance(value, int) or value < 0:
        raise wrong(name, "a non-negative integer", value)
    return value


def seconds_field(fields: Fields, name: str) -> float:
    """A positive number of seconds."""
    value = fields.get(name)
    if not isinstance(value, int | float) or not 0 < value < 1e9:
        raise wrong(name, "a positive number of seconds", value)
    return float(value)


def refs_value(refs: Sequence[BlockRef | None]) -> list[Any]:
    """``[slots, generations]`` or None per block; the asker knows the keys."""
    return [None if ref is None else [ref.slots, ref.generations] for ref in refs]


def refs_field(
    fields: Fields, keys: Sequence[BlockKey], name: str = "refs"
) -> list[BlockRef | None]:
    """The inverse of ``refs_value``: one entry per key."""
    value = fields.get(name)
    if not isinstance(value, list) or len(value) != len(keys):
        raise wrong(name, f"a list of {len(keys)}", value)
    return [_ref(key, entry, name) for key, entry in zip(keys, value, strict=True)]


def _ref(key: BlockKey, entry: Any, name: str) -> BlockRef | None:
    if entry is None:
        return None
    try:
        slots, generations = entry
        ref = BlockRef(key, tuple(map(int, slots)), tuple(map(int, generations)))
    except (TypeError, ValueError):
        raise wrong(name, "slots and generations", entry) from None
    numbers = (*ref.slots, *ref.generations)
    if len(ref.slots) != len(ref.generations) or not all(0 <= n < 2**63 for n in numbers):
        raise wrong(name, "as many slots as generations, none negative", entry)
    return ref
