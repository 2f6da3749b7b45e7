"""Byte-level tokenizer of the embedded model: ids 0..255 are bytes, then four special tokens.

A chat message is ``<im_start>role\\ncontent<im_end>\\n``; the special tokens can't be written in
text, so content never breaks out of its message.
"""

import codecs
from collections.abc import Iterable, Sequence

from evolving_infra.errors import wrong

BOS = 256
EOS = 257
IM_START = 258
IM_END = 259


def encode(text: str, field: str = "text") -> list[int]:
    """UTF-8 bytes of ``text`` as token ids. O(bytes).

    Raises:
        InputError: ``text`` holds half of a surrogate pair; the text names ``field``.
    """
    try:
        return list(text.encode())
    except UnicodeEncodeError as error:
        raise wrong(field, "valid Unicode text", text[error.start : error.end]) from None


def decode(tokens: Iterable[int]) -> str:
    """Text of ``tokens``; special tokens have none, invalid UTF-8 becomes U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")


def chat_tokens(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Prompt of a chat: every ``(role, content)``, then the start of the assistant's turn.

    Raises:
        InputError: a message is not valid Unicode.
    """
    tokens: list[int] = []
    for index, (role, content) in enumerate(messages):
        tokens.append(IM_START)
        tokens += encode(f"{role}\n{content}", f"messages[{index}].content")
        tokens.append(IM_END)
        tokens += encode("\n")
    return [*tokens, IM_START, *encode("assistant\n")]


class StreamDecoder:
    """Incremental ``decode``: a character split over deltas is held back until it is whole."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Iterable[int]) -> str:
        """Text that became certain with ``tokens``."""
        return self._utf8.decode(bytes(token for token in tokens if token < BOS))

    def close(self) -> str:
        """What is left: U+FFFD if a character stayed unfinished."""
        return self._utf8.decode(b"", final=True)
