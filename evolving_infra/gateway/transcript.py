"""Turns the tokens of one output into text, and ends it at a stop string."""

from collections.abc import Sequence

from evolving_infra.gateway.tokenizer import StreamDecoder


class StopFilter:
    """Passes text on, but never any part of a stop string.

    Text that may turn out to be the start of a stop string is held back. Cost per call:
    O(stops * held text), and text is held only while it matches.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that can go out now. After a stop string was seen, ``stopped`` is true."""
        assert not self.stopped, "a stopped filter was fed"
        text = self._held + text
        starts = [text.find(stop) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        hold = self._held_length(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def close(self) -> str:
        """What was held back; the output ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Transcript:
    """One output as it grows: text certain so far goes out, the tokens are counted."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder()
        self._filter = StopFilter(stops)
        self._by_token = bool(stops)
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """True once a stop string was seen; nothing may be fed then."""
        return self._filter.stopped

    def feed(self, tokens: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Certain text, and the tokens taken: all of them, or up to the end of a stop string."""
        if not self._by_token:
            self.num_tokens += len(tokens)
            return self._decoder.feed(tokens), tokens
        text = ""
        for taken, token in enumerate(tokens, start=1):
            self.num_tokens += 1
            text += self._filter.feed(self._decoder.feed((token,)))
            if self.stopped:
                return text, tokens[:taken]
        return text, tokens

    def close(self) -> str:
        """Text left at the end. A stop string may end in it."""
        text = self._filter.feed(self._decoder.close())
        return text if self.stopped else text + self._filter.close()
