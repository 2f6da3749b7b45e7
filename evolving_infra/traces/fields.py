"""Reading one JSON object field by field: every mistake names file, place, expected and got."""

import math
from collections.abc import Mapping
from typing import Any

from evolving_infra.errors import InputError, wrong

LARGEST = 2**53
"""Beyond it not every integer is a float; no count of tokens or milliseconds is that large."""


class Fields:
    """The fields of one JSON object at ``where``. Fields never asked for are unknown: ``finish``.

    All readers raise ``InputError``. A field that is absent or null gives None, or is an error if
    it is ``required``.
    """

    def __init__(self, where: str, raw: object) -> None:
        if not isinstance(raw, dict):
            raise wrong(where, "a JSON object", raw)
        self.where = where
        self._raw: Mapping[str, Any] = raw
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def ignore(self, *names: str) -> None:
        """Accept these fields whatever they hold."""
        self._asked.update(names)

    def any(self, name: str) -> Any:
        self._asked.add(name)
        return self._raw.get(name)

    def required(self, name: str, expected: str) -> Any:
        value = self.any(name)
        if value is None:
            raise self.wrong(name, expected, value)
        return value

    def text(self, name: str) -> str:
        value = self.required(name, "a string")
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a string that is not empty", value)
        return value

    def optional_text(self, name: str) -> str | None:
        self._asked.add(name)
        return self.text(name) if self.has(name) else None

    def integer(self, name: str, minimum: int = 0) -> int:
        value = self.required(name, "an integer")
        if type(value) is not int or value < minimum:
            raise self.wrong(name, f"an integer >= {minimum}", value)
        if value > LARGEST:
            raise self.wrong(name, "an integer of at most 2**53", value)
        return value

    def optional_integer(self, name: str, minimum: int = 0) -> int | None:
        self._asked.add(name)
        return self.integer(name, minimum) if self.has(name) else None

    def number(self, name: str) -> float:
        """A number from 0 to ``LARGEST``."""
        value = self.required(name, "a number")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.wrong(name, "a finite number >= 0", value)
        if value > LARGEST:
            raise self.wrong(name, "a number of at most 2**53", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        self._asked.add(name)
        return self.number(name) if self.has(name) else None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.required(name, f"one of {', '.join(choices)}")
        if value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}", value)
        return str(value)

    def items(self, name: str) -> list[Any]:
        value = self.required(name, "a list")
        if not isinstance(value, list):
            raise self.wrong(name, "a list", value)
        return value

    def objects(self, name: str) -> list["Fields"]:
        """The objects of a list, each named by its index."""
        rows = enumerate(self.items(name))
        return [Fields(f"{self.where}.{name}[{index}]", row) for index, row in rows]

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of different integers."""
        values = self.items(name)
        for value in values:
            if type(value) is not int:
                raise self.wrong(name, "a list of integers", value)
        if len(set(values)) != len(values):
            raise self.wrong(name, "ids that do not repeat", "a repeated id")
        return tuple(values)

    def finish(self) -> None:
        """Refuse fields that nobody asked for."""
        unknown = [name for name in self._raw if name not in self._asked]
        if unknown:
            raise wrong(self.where, "no unknown field", unknown[0])

    def wrong(self, name: str, expected: str, got: object) -> InputError:
        return wrong(f"{self.where}.{name}", expected, got)
