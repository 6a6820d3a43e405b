"""Streams of text: never part of a character, and the same text however it is cut."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllmc.frontends.tokenizer import tokenizer_from_gguf
from zllmc.runtime.text import StopMatcher, TextError, Tokenizer

CONTROL, UNUSED = 0, 1


@functools.cache
def tokenizer(add_space_prefix: bool) -> Tokenizer:
    """All bytes, a control token, an unused one, and pieces that begin with a space."""
    tokens = ["<|end|>", "<unused>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "é", "日本"]
    bundle = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [3, 5] + [6] * 256 + [1] * 4,
            "tokenizer.ggml.bos_token_id": CONTROL,
            "tokenizer.ggml.eos_token_id": CONTROL,
            "tokenizer.ggml.add_space_prefix": add_space_prefix,
        }
    )
    return Tokenizer.from_json(bundle.json, bundle.facts)


def byte_ids(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


# Bytes of an emoji are likely, so that characters are often begun, and sometimes completed.
IDS = st.lists(st.integers(0, 261) | st.sampled_from([CONTROL, UNUSED, *byte_ids("😀é ")]), max_size=30)


@given(IDS, st.booleans(), st.booleans(), st.booleans())
def test_a_stream_gives_what_decoding_at_once_gives(
    ids: list[int], add_space_prefix: bool, skip_special: bool, continues: bool
) -> None:
    decoder = tokenizer(add_space_prefix)
    for cut in range(len(ids) + 1):  # generation may end anywhere
        stream = decoder.stream(skip_special=skip_special, continues=continues)
        streamed = [stream.push(id) for id in ids[:cut]]
        whole = decoder.decode(ids[:cut], skip_special=skip_special, continues=continues)
        assert "".join([*streamed, stream.flush()]) == whole
    shown = b"".join(decoder.token_bytes(id) for id in ids if not (skip_special and id == CONTROL))
    if add_space_prefix and not continues:
        shown = shown.removeprefix(b" ")
    assert decoder.decode(ids, skip_special=skip_special, continues=continues) == shown.decode(
        errors="replace"
    )


@given(st.text(max_size=12))
def test_characters_come_out_whole(text: str) -> None:
    stream = tokenizer(False).stream()
    for char in text:
        *unfinished, last = byte_ids(char)
        assert [stream.push(id) for id in unfinished] == [""] * len(unfinished)
        assert stream.push(last) == char
    assert stream.flush() == ""


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    stream = tokenizer(False).stream()
    assert [stream.push(id) for id in byte_ids("😀")[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"


def test_the_space_before_a_text_goes_unless_other_text_came_before() -> None:
    decoder = tokenizer(True)
    ids = [CONTROL, 259, 259]
    assert decoder.decode(ids) == "a a"
    assert decoder.decode(ids, continues=True) == " a a"


TEXT = st.text(alphabet="ab<>", max_size=20)
STOPS = st.lists(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=3)


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first place where the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(1, 5), min_size=1))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    given_out, stopped, at, turn = "", False, 0, 0
    while at < len(text) and not stopped:
        size = sizes[turn % len(sizes)]
        part, stopped = matcher.push(text[at : at + size])
        at, turn, given_out = at + size, turn + 1, given_out + part
        if not stopped:
            held = text[len(given_out) : at]
            assert text[:at] == given_out + held
            # What is held may become a stop string, and nothing more is held than that.
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
            seen = text[:at]
            longest = max(
                (n for stop in stops for n in range(len(stop)) if n and seen.endswith(stop[:n])), default=0
            )
            assert len(held) == longest
    given_out += matcher.flush()
    assert (given_out, stopped) == until_stop(text, stops)


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("hi</") == ("hi", False)
    assert matcher.push("s>rest") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(TextError, match="empty"):
        StopMatcher(["x", ""])
