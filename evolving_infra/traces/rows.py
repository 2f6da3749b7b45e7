"""The rows of a JSON-lines file, each with its line number for errors."""

import json
from collections.abc import Iterator

from evolving_infra.errors import wrong
from evolving_infra.traces.fields import Fields

OVERLONG = "an integer of thousands of digits"
"""All that the JSON reader refuses without it being wrong JSON."""


def rows(where: str, text: str) -> Iterator[Fields]:
    """One ``Fields`` a line; empty lines are skipped. ``InputError`` on a line that is not JSON."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            raise wrong(f"{place}, column {error.colno}", "a complete JSON object", line) from None
        except ValueError:
            raise wrong(place, "a JSON object", OVERLONG) from None
        yield Fields(place, raw)
