"""The control plane's events and commands as JSON lines, and their replay.

    {"config": {...}}
    {"now": 1.5, "event": {"type": "NodeLost", "node": "n0"}, "commands": [...]}

Bytes are hex, enums their values. A journal is a bug report: the replay gives the same commands or
says where they differ. Rejected events are not in it: they change nothing.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TextIO, get_args, get_origin, get_type_hints

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands, events
from evolving_infra.control.commands import Command, FetchSource
from evolving_infra.control.events import Event
from evolving_infra.control.plane import ControlPlane
from evolving_infra.errors import EvolvingInfraError, InputError, StateError

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (*get_args(events.Event), *get_args(commands.Command), FetchSource)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One accepted event and what it caused. ``now`` in seconds."""

    now: float
    event: Event
    commands: tuple[Command, ...]


class Journal:
    """Appends to a text file. The caller owns the file and decides when to flush it."""

    def __init__(self, file: TextIO, config: ControlConfig) -> None:
        self._file = file
        file.write(json.dumps({"config": asdict(config)}) + "\n")

    def write(self, now: float, event: Event, wanted: Sequence[Command]) -> None:
        """Add one accepted event and its commands, in one line."""
        self._file.write(encode(Entry(now=now, event=event, commands=tuple(wanted))) + "\n")


def encode(entry: Entry) -> str:
    """One line without its newline."""
    line = {
        "now": entry.now,
        "event": _to_json(entry.event),
        "commands": _to_json(entry.commands),
    }
    return json.dumps(line, separators=(",", ":"))


def decode(line: str) -> Entry:
    """The entry of one line. ``InputError`` if it is not one."""
    try:
        found = json.loads(line)
        return Entry(
            now=found["now"],
            event=_from_json(events.Event, found["event"]),
            commands=tuple(_from_json(commands.Command, value) for value in found["commands"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"line: expected a journal entry, got {line[:80]!r} ({error})") from None


def replay(lines: Iterable[str]) -> ControlPlane:
    """Give a journal's events to a fresh plane and return the plane.

    Raises:
        InputError: a line is not of a journal; names the line.
        StateError: a command differs from the recorded one; names the line and both.
    """
    numbered = enumerate(lines, start=1)
    plane = ControlPlane(_config(next(numbered, (1, ""))[1]))
    for number, line in numbered:
        try:
            entry = decode(line)
            given = tuple(plane.handle(entry.event, entry.now))
        except EvolvingInfraError as error:
            raise type(error)(f"line {number}: {error}") from None
        if given != entry.commands:
            raise StateError(f"line {number}: expected {entry.commands}, got {given}")
    return plane


def _config(line: str) -> ControlConfig:
    try:
        return ControlConfig(**json.loads(line)["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"line 1: expected a journal's config, got {line[:80]!r} ({error})"
        ) from None


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if is_dataclass(value):
        named = {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    return value


def _from_json(hint: Any, value: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_from_json(get_args(hint)[0], item) for item in value)
    if hint is bytes:
        return bytes.fromhex(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(value, dict):
        named = dict(value)
        kind = KINDS[named.pop("type")]
        hints = get_type_hints(kind)
        return kind(**{name: _from_json(hints[name], item) for name, item in named.items()})
    return value
