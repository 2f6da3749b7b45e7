"""Reading a trace file of any known format."""

import json
from pathlib import Path

from evolving_infra.errors import InputError, wrong
from evolving_infra.traces.agentic_mooncake import SCHEMA, read_agentic_mooncake
from evolving_infra.traces.mooncake import read_mooncake
from evolving_infra.traces.rows import OVERLONG
from evolving_infra.traces.weka import read_weka
from evolving_infra.traces.workload import Workload

FORMATS = "a Weka, Mooncake or agentic_mooncake trace"


def load(path: str | Path) -> Workload:
    """The workload of a file; its format is told by its first object.

    Raises:
        InputError: The file can't be read, is cut off, is foreign, or has a wrong field.
    """
    path = Path(path)
    try:
        return _workload(path, _text(path))
    except RecursionError:
        raise wrong(path.name, FORMATS, "JSON that is nested too deeply") from None


def _workload(path: Path, text: str) -> Workload:
    first_line, _, rest = text.partition("\n")
    try:
        head = json.loads(first_line)
    except ValueError:
        head = None
    if head is None or not rest.strip():
        head = _whole(path.name, text)
        if isinstance(head, dict) and "requests" in head:
            return read_weka(path.name, head)
    if isinstance(head, dict) and head.get("schema") == SCHEMA:
        return read_agentic_mooncake(path.name, text)
    if isinstance(head, dict) and "hash_ids" in head:
        return read_mooncake(path.name, text)
    got = list(head) if isinstance(head, dict) else head
    raise wrong(path.name, FORMATS, got)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise wrong(path.name, "UTF-8 text", f"byte {error.start} is not") from None
    if not text.strip():
        raise wrong(path.name, FORMATS, "an empty file")
    return text


def _whole(where: str, text: str) -> object:
    try:
        whole: object = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        got = "the end of the file" if cut else text[error.pos : error.pos + 20]
        place = f"{where}, line {error.lineno}, column {error.colno}"
        raise wrong(place, f"complete JSON of {FORMATS}", got) from None
    except ValueError:
        raise wrong(where, FORMATS, OVERLONG) from None
    return whole
