"""Bodies of answers: chunks of a stream or one whole object. The routes differ in their shape."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from evolving_infra.gateway import sse
from evolving_infra.gateway.generation import Ended, Piece
from evolving_infra.gateway.requests import GenerationRequest

Tokens = Sequence[int]
Json = dict[str, Any]


class Shape(Protocol):
    """How one route writes its choices. Token ids are None unless the client asked for them."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int, prompt: Tokens | None) -> Json | None:
        """Fields of the chunk before the first text of a choice, None if there is none."""

    def part(self, index: int, text: str, tokens: Tokens | None, reason: str | None) -> Json:
        """One choice of a chunk."""

    def whole(self, index: int, text: str, tokens: Tokens | None, reason: str) -> Json:
        """One choice of a whole answer."""

    def add_prompts(self, body: Json, prompts: Sequence[Tokens]) -> None:
        """Put the prompts' token ids into a whole answer."""


class Answer:
    """Builds what is sent for one request. ``head`` are the fields every body has."""

    def __init__(self, asked: GenerationRequest, shape: Shape, head: Json) -> None:
        self._asked = asked
        self._shape = shape
        self._head = head
        self._opened: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._texts: list[list[str]] = [[] for _ in asked.prompts]
        self._tokens: list[list[int]] = [[] for _ in asked.prompts]

    def chunk(self, index: int, item: Piece | Ended) -> bytes:
        """Events for one item; empty if it holds nothing the client would see."""
        data = b"" if index in self._opened else self._open(index)
        if isinstance(item, Ended):
            self._ended[index] = item
            return data + self._part(index, item.text, (), item.reason)
        if not item.text and not self._asked.return_token_ids:
            return data
        return data + self._part(index, item.text, item.tokens, None)

    def tail(self) -> bytes:
        """The last events of a stream: usage if asked for, then ``[DONE]``."""
        if not self._asked.include_usage and not self._asked.return_timings:
            return sse.DONE
        return sse.event({**self._head, "choices": [], **self._totals()}) + sse.DONE

    def add(self, index: int, item: Piece | Ended) -> None:
        """Keep one item for the whole answer."""
        self._texts[index].append(item.text)
        if isinstance(item, Ended):
            self._ended[index] = item
        elif self._asked.return_token_ids:
            self._tokens[index] += item.tokens

    def whole(self) -> Json:
        """The answer of a request that is not streamed, after its last item."""
        choices = [
            self._shape.whole(
                index, "".join(text), self._shown(self._tokens[index]), self._ended[index].reason
            )
            for index, text in enumerate(self._texts)
        ]
        body = {**self._head, "choices": choices, **self._totals()}
        if self._asked.return_token_ids:
            self._shape.add_prompts(body, self._asked.prompts)
        return body

    def _open(self, index: int) -> bytes:
        self._opened.add(index)
        opening = self._shape.opening(index, self._shown(self._asked.prompts[index]))
        return sse.event({**self._head, **opening}) if opening is not None else b""

    def _part(self, index: int, text: str, tokens: Tokens, reason: str | None) -> bytes:
        choice = self._shape.part(index, text, self._shown(tokens), reason)
        return sse.event({**self._head, "choices": [choice]})

    def _shown(self, tokens: Tokens) -> Tokens | None:
        return tokens if self._asked.return_token_ids else None

    def _totals(self) -> Json:
        ended = [self._ended[index] for index in range(len(self._asked.prompts))]
        totals: Json = {"usage": usage(ended)}
        if self._asked.return_timings:
            timings = ended[0].timings
            totals["timings"] = asdict(timings) if timings is not None else None
        return totals


def usage(ended: Sequence[Ended]) -> Json:
    """OpenAI's usage. Without timings (ended at a stop string) the cached share is not known."""
    prompt = sum(one.prompt_tokens for one in ended)
    output = sum(one.output_tokens for one in ended)
    cached = [one.timings.cached_tokens for one in ended if one.timings is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": (
            {"cached_tokens": sum(cached)} if len(cached) == len(ended) else None
        ),
    }
