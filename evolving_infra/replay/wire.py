"""What goes over the wire between the replay and a gateway: bodies, headers, events, errors."""

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, fields
from typing import Any

from evolving_infra.errors import PeerError
from evolving_infra.types import BranchKind, RequestTimings, SamplingParams

Json = dict[str, Any]

TIMING_FIELDS = tuple(field.name for field in fields(RequestTimings))


class RequestError(PeerError):
    """The gateway refused or broke off. ``status`` is 0 if there was no HTTP answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class CompletionCall:
    """One request with its branch signal. ``parent`` is None exactly for a root."""

    branch: str
    version: int
    kind: BranchKind
    parent: str | None
    prompt: tuple[int, ...]
    sampling: SamplingParams


async def events(status: int, chunks: AsyncIterable[bytes]) -> AsyncIterator[Json]:
    """The JSON objects of an event stream. Lines may be of any length."""
    rest = b""
    async for data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                found = parsed(text.decode(errors="replace"))
                if not isinstance(found, dict):
                    raise RequestError(status, f"not a JSON event: {text[:80]!r}")
                yield found


def body(call: CompletionCall, model: str | None) -> Json:
    """The body of a completion request; tokens in, tokens out, with timings."""
    sampling = call.sampling
    body: Json = {
        "prompt": list(call.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_timings": True,
    }
    return body if model is None else {"model": model, **body}


def signal(call: CompletionCall) -> dict[str, str]:
    """The branch headers (design section 9)."""
    headers = {"X-Branch-Id": call.branch, "X-Context-Version": str(call.version)}
    if call.parent is not None:
        headers |= {"X-Parent-Branch-Id": call.parent, "X-Branch-Kind": call.kind.value}
    return headers


def cached(usage: Json) -> int:
    """Prompt tokens that were not computed."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def timings(event: Json) -> RequestTimings:
    """The timings of a last event; fields it lacks keep their defaults."""
    given = event.get("timings") or {}
    return RequestTimings(**{name: given[name] for name in TIMING_FIELDS if name in given})


def parsed(text: str) -> object:
    """The JSON value of ``text``, None if it is none."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value


def message(answer: object, otherwise: str = "an error without a message") -> str:
    """The text of an error body, or the first of ``otherwise``."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error) if error else otherwise[:200]


def named(error: BaseException) -> str:
    """The error's text, or its class where it has none."""
    return str(error) or type(error).__name__
