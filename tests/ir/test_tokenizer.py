"""Tokenizers from GGUF metadata and Hugging Face folders, against llama.cpp's ids for the same strings."""

import functools
import heapq
import itertools
import json
import os
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllmc.frontends.gguf import read_gguf
from zllmc.frontends.pretokenizers import PRETOKENIZERS
from zllmc.frontends.tokenizer import (
    NoTokenizerError,
    TokenizerBundle,
    tokenizer_from_gguf,
    tokenizer_from_hf,
)
from zllmc.runtime.text import TextError, Tokenizer
from zllmc.zllm_ir.errors import ZllmcError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODELS = pathlib.Path(os.environ.get("ZLLMC_MODELS", REPOSITORY / "models"))

VECTORS = [
    "vocab-deepseek-llm",
    "vocab-falcon",
    "vocab-gpt-2",
    "vocab-gpt-neox",
    "vocab-llama-bpe",
    "vocab-llama-spm",
    "vocab-phi-3",
    "vocab-qwen2",
    "vocab-starcoder",
    "model-SmolLM2-135M-Instruct.Q4_1",
    "model-gemma-3-270m-q4_k_m",
    "model-qwen2.5-coder-0.5b-instruct-q4_k_m",
]


@functools.cache
def built(path: pathlib.Path) -> tuple[TokenizerBundle, Tokenizer]:
    bundle = tokenizer_from_gguf(read_gguf(path).metadata)
    facts = json.loads(json.dumps(bundle.facts))  # as it comes back from an artifact
    return bundle, Tokenizer.from_json(bundle.json, facts)


def of(conformance: pathlib.Path, name: str) -> Tokenizer:
    kind, _, rest = name.partition("-")
    path = conformance / "vocabs" / f"ggml-vocab-{rest}.gguf" if kind == "vocab" else MODELS / f"{rest}.gguf"
    if not path.exists():
        pytest.skip(f"{path} isn't here: set ZLLMC_MODELS")
    return built(path)[1]


def cases(conformance: pathlib.Path, name: str) -> list[dict[str, Any]]:
    return json.loads((conformance / "tokenizers" / f"{name}.json").read_text())["cases"]


@pytest.mark.parametrize("name", VECTORS)
def test_gives_the_ids_of_llama_cpp(conformance: pathlib.Path, name: str) -> None:
    tokenizer = of(conformance, name)
    strings = [case for case in cases(conformance, name) if "invalid_utf8" not in case]
    assert len(strings) > 80
    for case in strings:
        for special in (0, 1):
            for parse in (0, 1):
                ids = tokenizer.encode(case["text"], add_special=bool(special), parse_special=bool(parse))
                assert ids == case[f"special{special}_parse{parse}"], (case["text"], special, parse)


@pytest.mark.parametrize("name", VECTORS)
def test_gives_the_pieces_and_the_text_of_llama_cpp(conformance: pathlib.Path, name: str) -> None:
    tokenizer = of(conformance, name)
    for case in cases(conformance, name):
        ids = case["special0_parse1"]
        assert [tokenizer.token_bytes(id).hex() for id in ids] == case["pieces_hex"], case
        expected = bytes.fromhex(case["detok_hex"]).decode(errors="replace")
        assert tokenizer.decode(ids, skip_special=False) == expected, case


def test_lone_surrogates_become_replacement_characters(conformance: pathlib.Path) -> None:
    tokenizer = of(conformance, "vocab-gpt-2")
    assert tokenizer.encode("a\ud83db") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


@pytest.mark.parametrize("name", ["vocab-llama-spm", "vocab-llama-bpe", "vocab-qwen2"])
def test_a_prompt_has_bos_once_if_the_model_wants_it(conformance: pathlib.Path, name: str) -> None:
    tokenizer = of(conformance, name)
    bos, text = tokenizer.facts["bos_id"], tokenizer.facts["bos_token"]
    wanted = 1 if tokenizer.facts["add_bos"] else 0
    assert tokenizer.encode_prompt("Hello").count(bos) == wanted
    if wanted:
        assert tokenizer.encode_prompt(f"{text}Hello").count(bos) == 1
        assert tokenizer.encode(f"{text}Hello", add_special=False, parse_special=True).count(bos) == 1


def test_control_tokens_in_text_stay_text(conformance: pathlib.Path) -> None:
    tokenizer = of(conformance, "vocab-qwen2")
    ids = tokenizer.encode("<|im_end|>")
    assert not tokenizer.eog_ids & set(ids)
    assert tokenizer.decode(ids) == "<|im_end|>"
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    assert tokenizer.eog_ids >= set(end) and tokenizer.decode(end) == ""


@pytest.mark.parametrize(
    ("name", "end"),
    [("vocab-llama-bpe", "<|eot_id|>"), ("vocab-phi-3", "<|end|>"), ("vocab-starcoder", "<|endoftext|>")],
)
def test_every_end_of_generation_is_known(conformance: pathlib.Path, name: str, end: str) -> None:
    tokenizer = of(conformance, name)
    assert tokenizer.eog_ids.issuperset(tokenizer.encode(end, add_special=False, parse_special=True))
    assert tokenizer.facts["eos_id"] in tokenizer.eog_ids


def test_an_id_outside_the_vocabulary_is_an_error(conformance: pathlib.Path) -> None:
    tokenizer = of(conformance, "vocab-gpt-2")
    for id in (-1, 50257, 2**40):
        with pytest.raises(TextError, match=f"token id {id} "):
            tokenizer.decode([id])


# Small vocabularies, made here.

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "▁ab"
# In LLaMA's vocabulary the runs of spaces share one score, and come in this order.
SPACES = ["▁▁", "▁▁▁▁", "▁▁▁"]
WORDS = ["aa", "ab", "▁a", "aaa", "aab", "ba", "▁aab", "bb", "aaaa", "abab", "▁▁a"]


def spm_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *LETTERS, *WORDS, *SPACES]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (3 + 256) + [-1.0 - place for place in range(len(tokens) - 262)] + [-1e9] * 3,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "Ġ", "Ġab", "<|end|>"],
        "merges": ["a b", "Ġ ab"],
        "token_type": [1, 1, 1, 1, 1, 3],
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def load(metadata: dict[str, Any]) -> Tokenizer:
    bundle = tokenizer_from_gguf(metadata)
    return Tokenizer.from_json(bundle.json, bundle.facts)


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE, written out: join the neighbours that form the best token, leftmost first."""
    vocab = {token: id for id, token in enumerate(tokens)}
    parts = list(text)
    while True:
        pairs = [
            (-scores[vocab[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in vocab
        ]
        if not pairs:
            break
        _, at = heapq.nsmallest(1, pairs)[0]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in vocab else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [vocab[token] for tokens_of_part in spelled for token in tokens_of_part]


@functools.cache
def small_spm(add_space_prefix: bool) -> Tokenizer:
    return load(spm_metadata(add_space_prefix=add_space_prefix))


@given(st.text(alphabet=" ab\nß😀", max_size=24), st.booleans())
def test_scores_merge_as_in_sentencepiece(text: str, add_space_prefix: bool) -> None:
    metadata = spm_metadata()
    spaced = f" {text}" if add_space_prefix and text else text
    expected = sentencepiece_ids(
        spaced.replace(" ", "▁"), metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    )
    tokenizer = small_spm(add_space_prefix)
    assert tokenizer.encode(text, add_special=False) == expected
    assert tokenizer.decode(expected) == text


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    assert load(spm_metadata()).encode("a")[0] == 1
    assert load(spm_metadata(add_bos_token=False)).encode("a")[0] != 1
    assert load(spm_metadata(add_eos_token=True)).encode("a")[-1] == 2
    assert load(bpe_metadata()).encode("ab ab") == [2, 4]


def test_a_merge_that_looks_like_the_header_of_a_file_works() -> None:
    word = "#versionx"
    prefixes = [word[:end] for end in range(1, len(word) + 1)]
    merges = [f"{left} {char}" for left, char in zip(prefixes, word[1:], strict=False)]
    assert "#version x" in merges
    metadata = bpe_metadata(pre="bloom", tokens=[*prefixes, *word[1:]], merges=merges, token_type=None)
    assert load(metadata).encode(word) == [len(word) - 1]


def test_merges_without_tokens_are_passed_over() -> None:
    tokenizer = load(bpe_metadata(merges=["b b", "a b", "nonsense", "", " a", "a b c", "a b"]))
    assert tokenizer.encode("ab") == [2]


@pytest.mark.parametrize("name", sorted(PRETOKENIZERS))
def test_every_known_pretokenizer_builds(name: str) -> None:
    tokenizer = load(bpe_metadata(pre=name, bos_token_id=5))
    assert tokenizer.encode("ab ab", add_special=False) in ([2, 4], [2, 3, 2])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "it's 12345 CamelCase\n\n x", ["it", "'s", "Ġ", "123", "45", "ĠCamelCase", "ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 12", ["IT", "'S", "Ġ", "1", "2"]),
        ("gpt-2", "IT'S 12  x", ["IT", "'", "S", "Ġ12", "Ġ", "Ġx"]),
        ("starcoder", "a12", ["a", "1", "2"]),
        ("tekken", "camelCase 12", ["camel", "Case", "Ġ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234東京b", ["a", "123", "4", "æĿ±äº¬", "b"]),
        ("qwen35", "हिन्दी", ["à¤¹à¤¿à¤¨à¥įà¤¦à¥Ģ"]),
    ],
)
def test_text_is_cut_into_these_words(name: str, text: str, words: list[str]) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer_from_gguf(bpe_metadata(pre=name, bos_token_id=5)).json)
    assert [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)] == words


def test_a_file_without_a_tokenizer_is_told_apart() -> None:
    with pytest.raises(NoTokenizerError, match="'no_vocab'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "no_vocab"})


def test_unknown_kinds_are_named_with_the_known_ones() -> None:
    with pytest.raises(ZllmcError, match=r"pre is 'qwen9'.*known names: .*llama-bpe.*qwen2"):
        tokenizer_from_gguf(bpe_metadata(pre="qwen9"))
    with pytest.raises(ZllmcError, match=r"model is 'bert'.*gpt2"):
        tokenizer_from_gguf(bpe_metadata(model="bert"))
    with pytest.raises(ZllmcError, match="model is None"):
        tokenizer_from_gguf({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": "abc"}, "tokens must be a list"),
        ({"tokens": ["a", 1]}, "tokens must be a list of str"),
        ({"tokens": ["a", "b", "a"], "token_type": None, "scores": [0.0] * 3}, "'a' twice, as ids 0 and 2"),
        ({"tokens": ["\udcff"], "scores": [0.0], "token_type": [1]}, "valid Unicode"),
        ({"scores": None}, "scores is missing"),
        ({"scores": [1.0]}, "scores has 1 entries for 276 tokens"),
        ({"scores": [float("nan")] * 276}, "isn't finite"),
        ({"scores": ["x"] * 276}, "scores must be a list of float"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"token_type": [True] * 276}, "token_type must be a list of int"),
        ({"bos_token_id": 276}, "bos_token_id is 276, outside"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "2"}, "eos_token_id must be a int"),
        ({"add_bos_token": 1}, "add_bos_token must be a bool"),
        ({"model": ["llama"]}, "model must be a str"),
        ({"pre": 3}, "pre must be a str"),
    ],
)
def test_contradictory_metadata_is_a_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ZllmcError, match=message):
        tokenizer_from_gguf(spm_metadata(**changes))


def test_bpe_needs_merges_and_the_bos_that_it_adds() -> None:
    with pytest.raises(ZllmcError, match="merges is missing"):
        tokenizer_from_gguf(bpe_metadata(merges=None))
    with pytest.raises(ZllmcError, match="bos_token_id is missing"):
        tokenizer_from_gguf(bpe_metadata(add_bos_token=True))


SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.lists(st.text(max_size=3), max_size=6)


@given(
    st.sampled_from([spm_metadata, bpe_metadata]),
    st.dictionaries(
        st.sampled_from(["tokens", "scores", "token_type", "merges", "pre", "bos_token_id"]), VALUES
    ),
)
def test_damaged_metadata_loads_or_is_refused(make: Any, changes: dict[str, Any]) -> None:
    try:
        tokenizer = load(make(**changes))
    except ZllmcError:
        return
    tokenizer.decode(tokenizer.encode("a ab\n", parse_special=True))


# Hugging Face folders.


def test_a_hugging_face_folder_gives_the_same_tokenizer(
    conformance: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bundle, from_gguf = built(conformance / "vocabs" / "ggml-vocab-starcoder.gguf")
    (tmp_path / "tokenizer.json").write_text(bundle.json, encoding="utf-8")
    config = {"bos_token": None, "eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 17]}))
    folder = tokenizer_from_hf(tmp_path)
    tokenizer = Tokenizer.from_json(folder.json, folder.facts)
    assert folder.facts["kind"] == "bpe" and not folder.facts["add_bos"]
    assert folder.facts["eos_token"] == "<|endoftext|>" and folder.facts["bos_id"] is None
    assert tokenizer.eog_ids >= {0, 17}
    for text in ("<fim_prefix>user\nhi é<|endoftext|>\n", "def f(x):\n\treturn 12"):
        for parse in (False, True):
            ids = tokenizer.encode(text, parse_special=parse)
            assert ids == from_gguf.encode(text, parse_special=parse)
            assert tokenizer.decode(ids, skip_special=False) == text


def test_a_hugging_face_folder_says_what_it_adds(tmp_path: pathlib.Path) -> None:
    file = json.loads(tokenizer_from_gguf(spm_metadata()).json)
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    facts = tokenizer_from_hf(tmp_path).facts
    assert (facts["kind"], facts["add_bos"], facts["add_eos"]) == ("spm", True, False)
    assert facts["add_space_prefix"] and facts["eog_ids"] == [2] and facts["control_ids"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{"), ("tokenizer.json", None), ("tokenizer_config.json", "[]")],
)
def test_unreadable_folders_are_refused(tmp_path: pathlib.Path, name: str, content: str | None) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(spm_metadata()).json, encoding="utf-8")
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ZllmcError, match=name.replace(".", r"\.")):
        tokenizer_from_hf(tmp_path)


def test_the_runtime_refuses_a_broken_file() -> None:
    facts = tokenizer_from_gguf(spm_metadata()).facts
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        Tokenizer.from_json('{"version": "1.0"}', facts)
