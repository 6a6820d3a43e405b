"""Text in, tokens out, and back: whole, as a stream, and up to a stop string.

Decoding joins the bytes of the tokens and reads them as UTF-8. The library's own decoder isn't used: it works
on whole sequences, so that a stream would have to decode everything again for each token.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from zllmc.zllm_ir.errors import ZllmcError


class TextError(ZllmcError):
    """A tokenizer file that can't be used, a token id that doesn't exist, or an empty stop string."""


def _gpt2_bytes() -> dict[str, bytes]:
    """GPT-2's alphabet for bytes: visible Latin-1 stands for itself, the others move to U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): bytes([byte]) for byte in visible} | {
        chr(0x100 + place): bytes([byte]) for place, byte in enumerate(moved)
    }


_BYTE_OF = _gpt2_bytes()


class Tokenizer:
    """The tokenizer of an artifact: `tokenizer.json` and the facts that belong to it.

    `facts` is the dict that `zllmc.frontends.tokenizer.TokenizerBundle` describes. Instances may be shared
    between threads.
    """

    def __init__(self, library: LibraryTokenizer, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.eog_ids = frozenset(facts["eog_ids"])
        self._library = library
        self._lock = Lock()
        self._control_ids = frozenset(facts["control_ids"])
        self._bytes_of = {
            id: token.content.encode() for id, token in library.get_added_tokens_decoder().items()
        }
        self._bytes_of |= dict.fromkeys(facts["unused_ids"], b"")

    @classmethod
    def from_json(cls, json: str, facts: Mapping[str, Any]) -> "Tokenizer":
        """Raises TextError if the library refuses the file."""
        try:
            library = LibraryTokenizer.from_str(json)
        except Exception as error:  # the library raises no narrower class
            raise TextError(f"tokenizer.json can't be read: {error}") from error
        return cls(library, facts)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS where the model wants them. `parse_special` turns the names of control
        tokens in the text into these tokens: only for rendered templates, never for text from a user.
        """
        # JSON lets lone surrogates through; they are no characters, and the library refuses them.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self._lock:  # the switch belongs to the library's object
            self._library.encode_special_tokens = not parse_special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if add_special and self.facts["add_bos"]:
            ids.insert(0, self.facts["bos_id"])
        if add_special and self.facts["add_eos"]:
            ids.append(self.facts["eos_id"])
        return ids

    def encode_prompt(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template, which begin with BOS once if the model wants BOS.

        Most templates write BOS themselves, so that `add_special` would give two; some leave it out.
        """
        ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.facts["add_bos"] and ids[:1] != [self.facts["bos_id"]]:
            ids.insert(0, self.facts["bos_id"])
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; not always whole characters."""
        known = self._bytes_of.get(id)
        if known is not None:
            return known
        piece = self._library.id_to_token(id) if 0 <= id < self.facts["vocab_size"] else None
        if piece is None:
            raise TextError(f"token id {id} isn't in the vocabulary of {self.facts['vocab_size']} tokens")
        if self.facts["kind"] == "bpe":
            known = b"".join(_BYTE_OF.get(char) or char.encode() for char in piece)
        elif byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
            known = bytes.fromhex(byte[1])
        else:
            known = piece.replace("▁", " ").encode()
        self._bytes_of[id] = known
        return known

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of `ids`; bytes that aren't UTF-8 become U+FFFD. Options as in `stream`."""
        stream = self.stream(skip_special=skip_special, continues=continues)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, skip_special: bool = True, continues: bool = False) -> "StreamDecoder":
        """A decoder for ids that arrive one by one.

        `skip_special` leaves out control tokens. `continues` says that the ids follow other text: then the
        space that `add_space_prefix` puts before a text isn't taken off again.
        """
        hidden = self._control_ids if skip_special else frozenset[int]()
        return StreamDecoder(self, hidden, strip_space=self.facts["add_space_prefix"] and not continues)


class StreamDecoder:
    """Gives out text as soon as its characters are complete; never part of a character.

    Whatever was pushed, all that `push` and the final `flush` returned is what `Tokenizer.decode` gives.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], *, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that token `id` completes, which may be empty."""
        data = self._tokenizer.token_bytes(id)  # checks hidden ids as well
        if id in self._hidden or not data:
            return ""
        if self._strip_space:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left of an unfinished character at the end: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text before the first stop string that is completed in it.

    The result doesn't depend on how the text was cut into pieces. Of stop strings that end at the same
    place, the longest counts. Text is held back only while it may be the beginning of a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if not all(self._stops):
            raise TextError("a stop string is empty")
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text to give out now, and whether a stop string was met: after that nothing comes any more."""
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """At the end of generation: the text held back, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next(length for length in range(longest, -1, -1) if text.endswith(stop[:length]))
