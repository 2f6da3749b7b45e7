"""Typed reading of a JSON body. ``null`` counts as absent, a wrong type is an ``InputError``."""

import json
from collections.abc import Mapping
from typing import NoReturn

from evolving_infra.errors import wrong

Body = Mapping[str, object]


def parse_json(data: bytes) -> Body:
    """The JSON object in ``data``.

    Raises:
        InputError: not UTF-8, not JSON (NaN and Infinity are not), or not an object.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise wrong("body", "UTF-8 text", got) from None
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise wrong("body", "a JSON object", str(error)) from None
    if not isinstance(body, dict):
        raise wrong("body", "a JSON object", body)
    return body


def flag(body: Body, name: str, default: bool = False) -> bool:
    """A boolean."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def text(body: Body, name: str) -> str | None:
    """A string, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    """An integer in ``[low, high]``, or None. ``2.0`` is not an integer."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise wrong(name, f"an integer from {low} to {high}", value)
    return value


def number(body: Body, name: str, low: float, high: float) -> float | None:
    """A number in ``[low, high]``, or None."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, f"a number from {low} to {high}", value)
    if not low <= value <= high:
        raise wrong(name, f"a number from {low} to {high}", value)
    return float(value)


def mapping(body: Body, name: str) -> Body:
    """An object; empty if absent."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def refuse(body: Body, name: str, allowed: tuple[object, ...]) -> None:
    """Refuse what the embedded model can't do, rather than ignore it.

    Raises:
        InputError: ``name`` is present, not null, and not one of ``allowed`` (same type too).
    """
    value = body.get(name)
    if value is None:
        return
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        shown = " or ".join(["nothing", *(json.dumps(choice) for choice in allowed)])
        raise wrong(name, f"{shown} (not supported by the embedded model)", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
