"""Builds a `tokenizers` library file from GGUF metadata or from a Hugging Face folder.

GGUF stores a vocabulary, token types, and merges (byte-level BPE, `tokenizer.ggml.model` "gpt2") or scores
(SentencePiece BPE, "llama"). What llama.cpp's `src/llama-vocab.cpp` does with them is the meaning of these
fields: the split patterns behind each `tokenizer.ggml.pre` name, the defaults of `add_bos_token`, and
which tokens end generation. Everything in the metadata is untrusted and checked here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from zllmc.frontends.pretokenizers import pretokenizer
from zllmc.zllm_ir.errors import ZllmcError


class TokenizerError(ZllmcError):
    """Tokenizer data that is missing, contradictory or of an unknown kind."""


class NoTokenizerError(TokenizerError):
    """A file that says that it has no tokenizer: its model takes and gives token ids only."""


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer as the artifact stores it.

    `json` is a `tokenizers` library file. `facts` is a JSON-ready dict of what that file has no place for:

    - `kind`: "bpe" (byte-level) or "spm" (SentencePiece pieces with `<0xNN>` byte tokens)
    - `pre`: the name of the pre-tokenizer, or None; `vocab_size`: largest id + 1
    - `bos_id`, `eos_id`, `eot_id`, `eom_id`, `unk_id`, `pad_id`, `fim_pre_id`, `fim_suf_id`, `fim_mid_id`:
      an id or None; `bos_token`, `eos_token`: their text ("" if there is none), for chat templates
    - `add_bos`, `add_eos`: what encoding with `add_special` adds
    - `add_space_prefix`: text is encoded as if a space stood before it
    - `control_ids`: tokens that text from a user must never become; `unused_ids`: tokens without text;
      `eog_ids`: every token that ends generation
    """

    json: str
    facts: dict[str, Any]


# Values in `tokenizer.ggml.token_type`.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)

SPECIAL_IDS = {
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "eot_id": "eot_token_id",
    "eom_id": "eom_token_id",
    "unk_id": "unknown_token_id",
    "pad_id": "padding_token_id",
    "fim_pre_id": "fim_pre_token_id",
    "fim_suf_id": "fim_suf_token_id",
    "fim_mid_id": "fim_mid_token_id",
}

# Files name one or two of the tokens that end a model's answer; models emit more. The names are llama.cpp's.
_END_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[ "
    # A code model pads, or turns to another file.
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
END_OF_GENERATION = frozenset(_END_NAMES.split())
FILL_IN_THE_MIDDLE = {
    "fim_pre_id": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>",
    "fim_suf_id": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>",
    "fim_mid_id": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerBundle:
    """The tokenizer of a GGUF file, from its metadata as plain Python values.

    Raises TokenizerError for an unknown `tokenizer.ggml.model` or `tokenizer.ggml.pre` (it names the known
    ones), for lists whose types or lengths are wrong, and for ids outside the vocabulary; NoTokenizerError if
    the file says that it has none.
    """
    model = _value(metadata, "model", str)
    if model in ("no_vocab", "none", "test"):
        raise NoTokenizerError(f"tokenizer.ggml.model is {model!r}: the file has no tokenizer")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}; zllmc knows gpt2 and llama")
    spm = model == "llama"
    tokens, types = _vocabulary(metadata)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        id, token = next((id, token) for id, token in enumerate(tokens) if vocab[token] != id)
        raise TokenizerError(f"tokenizer.ggml.tokens holds {token!r} twice, as ids {id} and {vocab[token]}")

    ids = {fact: _special_id(metadata, key, len(tokens)) for fact, key in SPECIAL_IDS.items()}
    if spm and len(tokens) > 2:  # files older than these keys follow LLaMA's vocabulary
        ids["bos_id"] = 1 if ids["bos_id"] is None else ids["bos_id"]
        ids["eos_id"] = 2 if ids["eos_id"] is None else ids["eos_id"]
    for fact, names in FILL_IN_THE_MIDDLE.items():
        if ids[fact] is None:
            ids[fact] = next((vocab[name] for name in names.split() if name in vocab), None)
    eog_ids = _end_of_generation(vocab, ids)
    control_ids = eog_ids.union(id for id, type in enumerate(types) if type in (UNKNOWN, CONTROL))

    pre = _value(metadata, "pre", str)
    if spm:
        add_bos, add_space_prefix = True, _value(metadata, "add_space_prefix", bool) is not False
        file = _sentencepiece(add_space_prefix)
        file["model"] = _bpe(vocab, _scored_merges(metadata, tokens, types))
        file["model"]["byte_fallback"] = True
        file["model"]["unk_token"] = None if ids["unk_id"] is None else tokens[ids["unk_id"]]
    else:
        split = pretokenizer(pre or "default")
        add_bos, add_space_prefix = split.add_bos, False
        file = _byte_level(split.patterns)
        file["model"] = _bpe(vocab, _listed_merges(metadata, vocab))
        file["model"]["ignore_merges"] = split.ignore_merges

    strips_right = spm and _is_phi3(metadata)
    file["added_tokens"] = [
        {
            "id": id,
            "content": tokens[id],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips_right and tokens[id] not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": id in control_ids,
        }
        for id, type in enumerate(types)
        if id in control_ids or type == USER_DEFINED
    ]
    facts = {
        "kind": "spm" if spm else "bpe",
        "pre": pre,
        "vocab_size": len(tokens),
        **ids,
        "bos_token": "" if ids["bos_id"] is None else tokens[ids["bos_id"]],
        "eos_token": "" if ids["eos_id"] is None else tokens[ids["eos_id"]],
        "add_bos": _adds(metadata, "bos", add_bos, ids),
        "add_eos": _adds(metadata, "eos", False, ids),
        "add_space_prefix": add_space_prefix,
        "control_ids": sorted(control_ids),
        "unused_ids": [
            id for id, type in enumerate(types) if type in (UNDEFINED, UNUSED) and id not in control_ids
        ],
        "eog_ids": sorted(eog_ids),
    }
    return TokenizerBundle(msgspec.json.encode(file).decode(), facts)


def _value(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    """`tokenizer.ggml.KEY`, checked to be exactly of `kind` (True is no int); None if it is missing."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and type(value) is not kind:
        raise TokenizerError(f"tokenizer.ggml.{key} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type, length: int | None = None) -> Any:
    """`tokenizer.ggml.KEY`, checked to be a list of exactly `kind`, and of `length` if given; or None."""
    values = _value(metadata, key, list)
    if values is None:
        return None
    if not {kind}.issuperset(map(type, values)):
        raise TokenizerError(f"tokenizer.ggml.{key} must be a list of {kind.__name__} only")
    if length is not None and len(values) != length:
        raise TokenizerError(f"tokenizer.ggml.{key} has {len(values)} entries for {length} tokens")
    return values


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Token texts and token types, of equal length."""
    tokens = _list(metadata, "tokens", str)
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is missing or empty: the file holds no vocabulary")
    # An empty text could match anywhere; llama.cpp gives such tokens a name too.
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        raise TokenizerError("tokenizer.ggml.tokens holds text that isn't valid Unicode") from None
    types = _list(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    return tokens, types


def _special_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    id: int | None = _value(metadata, key, int)
    if id is not None and not 0 <= id < vocab_size:
        raise TokenizerError(f"tokenizer.ggml.{key} is {id}, outside the vocabulary of {vocab_size} tokens")
    return id


def _adds(metadata: Mapping[str, Any], which: str, default: bool, ids: Mapping[str, int | None]) -> bool:
    given: bool | None = _value(metadata, f"add_{which}_token", bool)
    adds = default if given is None else given
    if adds and ids[f"{which}_id"] is None:
        raise TokenizerError(
            f"{which.upper()} is to be added, but tokenizer.ggml.{which}_token_id is missing"
        )
    return adds


def _end_of_generation(vocab: Mapping[str, int], ids: Mapping[str, int | None]) -> set[int]:
    names = {name for name in END_OF_GENERATION if name in vocab}
    if names >= {"<|return|>", "<|call|>"} or names >= {"<|calls|>", "<|flush|>"}:
        names.discard("<|end|>")  # in these formats it ends a message, and the answer goes on
    if "<|tool_response>" in names:
        names.discard("</s>")  # an ordinary HTML tag to Gemma 4
    stops = {ids[fact] for fact in ("eos_id", "eot_id", "eom_id")}
    return {vocab[name] for name in names} | {id for id in stops if id is not None}


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Phi-3's special tokens swallow the white space after them, which GGUF has no field for."""
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _listed_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[str]:
    """The merges of byte-level BPE, best first, each "LEFT RIGHT"; the library wants all three in `vocab`."""
    merges = _list(metadata, "merges", str)
    if merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing: a gpt2 tokenizer can't work without it")
    pairs = ((merge, *merge.partition(" ")) for merge in dict.fromkeys(merges))
    return [
        merge
        for merge, left, _, right in pairs
        if left in vocab and right in vocab and left + right in vocab and " " not in right
    ]


def _scored_merges(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[str]:
    """SentencePiece BPE as a list of merges, best first, each "LEFT RIGHT".

    SentencePiece joins whichever neighbours form the token of the highest score. As ranked merges: each
    token, in order of score, with every way to split it into two tokens. Text reaches the merges with its
    spaces replaced, and byte tokens only stand in for characters that are no token, so neither takes part.
    Of equal scores, SentencePiece takes the leftmost pair, and this list the lower id: in the vocabularies
    in use only runs of spaces share a score, and they come out the same.
    """
    scores = _list(metadata, "scores", float, len(tokens))
    if scores is None:
        raise TokenizerError("tokenizer.ggml.scores is missing: a llama tokenizer can't work without it")
    if not all(map(math.isfinite, scores)):
        raise TokenizerError("tokenizer.ggml.scores holds a value that isn't finite")
    parts = {token for token, type in zip(tokens, types, strict=True) if type != BYTE and " " not in token}
    best_first = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    return [  # one comprehension, because it takes most of the time that a large vocabulary costs
        f"{left} {right}"
        for token in map(tokens.__getitem__, best_first)
        if token in parts
        for cut in range(1, len(token))
        if (left := token[:cut]) in parts and (right := token[cut:]) in parts
    ]


def _bpe(vocab: Mapping[str, int], merges: list[str]) -> dict[str, Any]:
    # Strings load faster than pairs, but the library takes "#version" for the header of a file of merges.
    header = any(merge.startswith("#version") for merge in merges)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [merge.split(" ") for merge in merges] if header else merges,
    }


def _byte_level(patterns: Iterable[str]) -> dict[str, Any]:
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
    }


def _sentencepiece(add_space_prefix: bool) -> dict[str, Any]:
    prefix = [{"type": "Prepend", "prepend": "▁"}] if add_space_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if add_space_prefix else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
    }


def tokenizer_from_hf(folder: Path) -> TokenizerBundle:
    """The tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, which becomes the bundle's `json` as it is, and takes the facts from it and from
    `tokenizer_config.json` and `generation_config.json`, if they exist. Raises TokenizerError for files that
    can't be read and for tokenizers that aren't byte-level or SentencePiece.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        library = Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower class
        raise TokenizerError(f"{path}: {error}") from error
    config = _read_object(folder / "tokenizer_config.json")
    generation = _read_object(folder / "generation_config.json")

    decoders = _component_types(json.loads(text).get("decoder"))
    if not decoders & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise TokenizerError(
            f"{path}: its decoder is {sorted(decoders)}; zllmc knows byte-level and SentencePiece"
        )
    added = library.get_added_tokens_decoder()
    vocab = library.get_vocab(with_added_tokens=True)
    special = {token.content: id for id, token in added.items() if token.special}

    def named(key: str) -> int | None:
        name = config.get(key)
        name = name.get("content") if isinstance(name, dict) else name
        return vocab.get(name) if isinstance(name, str) else None

    ids: dict[str, int | None] = dict.fromkeys(SPECIAL_IDS)
    ids |= {fact: named(f"{fact[:3]}_token") for fact in ("bos_id", "eos_id", "unk_id", "pad_id")}
    for fact, names in FILL_IN_THE_MIDDLE.items():
        ids[fact] = next((vocab[name] for name in names.split() if name in vocab), None)
    stops = generation.get("eos_token_id")
    stops = {stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)}
    eog_ids = _end_of_generation(special, ids) | (stops & set(vocab.values()))

    # What the library adds around text, whatever its post-processor is made of.
    bare = library.encode("a", add_special_tokens=False).ids
    framed = library.encode("a", add_special_tokens=True).ids
    before = [ids["bos_id"]] if framed[:1] == [ids["bos_id"]] != bare[:1] else []
    after = [ids["eos_id"]] if framed[-1:] == [ids["eos_id"]] != bare[-1:] else []
    if framed != before + bare + after:
        raise TokenizerError(
            f"{path}: its post-processor adds {framed} around {bare}, which isn't BOS and EOS"
        )
    facts = {
        "kind": "bpe" if "ByteLevel" in decoders else "spm",
        "pre": None,
        "vocab_size": max(vocab.values()) + 1,
        **ids,
        "bos_token": "" if ids["bos_id"] is None else library.id_to_token(ids["bos_id"]),
        "eos_token": "" if ids["eos_id"] is None else library.id_to_token(ids["eos_id"]),
        "add_bos": bool(before),
        "add_eos": bool(after),
        "add_space_prefix": "Strip" in decoders or library.decode(bare) != "a",
        "control_ids": sorted({*special.values(), *eog_ids}),
        "unused_ids": [],
        "eog_ids": sorted(eog_ids),
    }
    return TokenizerBundle(text, facts)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _component_types(component: Any) -> set[str]:
    """The type names in a `tokenizers` component, which may be a sequence of others."""
    if not isinstance(component, dict):
        return set()
    return {str(component.get("type"))}.union(*map(_component_types, component.get("decoders", [])))
