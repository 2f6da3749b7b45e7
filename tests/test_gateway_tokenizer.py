"""Byte tokenizer, incremental decoding and stop strings."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evolving_infra.errors import InputError
from evolving_infra.gateway.tokenizer import (
    EOS,
    IM_END,
    IM_START,
    StreamDecoder,
    chat_tokens,
    decode,
    encode,
)
from evolving_infra.gateway.transcript import StopFilter, Transcript

TEXT = st.text(st.characters(codec="utf-8"))
ANY_TOKENS = st.lists(st.integers(0, 319))


@given(TEXT)
def test_decoding_what_was_encoded_gives_the_text(text: str) -> None:
    assert decode(encode(text)) == text


@given(ANY_TOKENS, st.data())
def test_a_stream_decodes_to_the_same_text_however_it_is_cut(
    tokens: list[int], data: st.DataObject
) -> None:
    decoder = StreamDecoder()
    text = ""
    rest = tokens
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += decoder.feed(rest[:size])
        rest = rest[size:]
    assert text + decoder.close() == decode(tokens)


def test_a_split_character_is_held_back() -> None:
    decoder = StreamDecoder()
    assert [decoder.feed([token]) for token in encode("a€b")] == ["a", "", "", "€", "b"]


def test_invalid_and_unfinished_bytes_become_replacement_characters() -> None:
    decoder = StreamDecoder()
    assert decoder.feed([0xFF, 0x41, 0xE2, 0x82]) == "\ufffdA"
    assert decoder.close() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    assert decode([IM_START, 0x41, EOS, IM_END, 0x42]) == "AB"


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"prompt: expected valid Unicode text, got '\\ud800'"):
        encode("a\ud800b", "prompt")


def test_chat_template() -> None:
    tokens = chat_tokens([("user", "hi")])
    assert tokens == [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]


def test_content_cannot_close_its_message() -> None:
    assert chat_tokens([("user", "<im_end>")]).count(IM_END) == 1


def naive_cut(text: str, stops: list[str]) -> str:
    """Text before the stop string that is complete first, looking at one character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    st.text("abc"),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.integers(1, 4),
)
@example("cab", ["b", "ab"], 1)
def test_a_transcript_ends_where_the_first_stop_string_begins(
    text: str, stops: list[str], delta_tokens: int
) -> None:
    transcript = Transcript(stops)
    shown = ""
    tokens = encode(text)
    for start in range(0, len(tokens), delta_tokens):
        if transcript.stopped:
            break
        part, _ = transcript.feed(tokens[start : start + delta_tokens])
        shown += part
        assert naive_cut(text, stops).startswith(shown)
    if not transcript.stopped:
        shown += transcript.close()
    assert shown == naive_cut(text, stops)


def test_a_filter_holds_back_only_what_may_become_a_stop_string() -> None:
    stop = StopFilter(["END"])
    assert [stop.feed(part) for part in ("xE", "N", "x", "EN", "D")] == ["x", "", "ENx", "", ""]
    assert stop.stopped


def test_tokens_after_the_stop_string_are_not_taken() -> None:
    transcript = Transcript(["b"])
    assert transcript.feed((97, 98, 99)) == ("a", (97, 98))
    assert transcript.num_tokens == 2


def test_held_text_comes_out_at_the_end() -> None:
    transcript = Transcript(["abc"])
    assert transcript.feed(encode("xab")) == ("x", encode("xab"))
    assert transcript.close() == "ab"


def test_a_stop_string_may_end_in_the_last_replacement_character() -> None:
    transcript = Transcript(["\ufffd"])
    assert transcript.feed((0x41, 0xE2)) == ("A", (0x41, 0xE2))
    assert transcript.close() == ""
    assert transcript.stopped
