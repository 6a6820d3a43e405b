"""The split patterns behind the names in `tokenizer.ggml.pre`, for byte-level BPE.

Text is cut by each pattern in turn: every match and every gap between matches becomes a piece, and merges
never cross from piece to piece. The patterns are facts of the published tokenizers (their `tokenizer.json`,
as Oniguruma reads it); which name stands for which, and the defaults that come with a name, follow
llama.cpp's `src/llama-vocab.cpp`.
"""

import re
from dataclasses import dataclass

from zllmc.zllm_ir.errors import ZllmcError


@dataclass(frozen=True)
class Pretokenizer:
    """`ignore_merges`: a piece that is a token as it stands isn't merged up. `add_bos`: the default."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{PUNCTUATION}|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{PUNCTUATION}|{SPACES}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{SPACES}"
)
# A word is a run of upper case followed by lower case, so that camelCase falls apart.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
GPT4O = rf"{_CASED[0]}(?:{CONTRACTION})?|{_CASED[1]}(?:{CONTRACTION})?|\p{{N}}{{1,3}}|{_CASED_REST}"


def _char_class(ranges: str) -> str:
    """An Oniguruma class from hexadecimal code points and ranges of them."""
    return "[" + "".join(re.sub("[0-9A-F]+", r"\\x{\g<0>}", part) for part in ranges.split()) + "]"


CJK = _char_class("4E00-9FA5 0800-4E00 AC00-D7FF")
CJK_AND_KANA = _char_class("4E00-9FA5 3040-309F 30A0-30FF")
# DeepSeek's first tokenizer lists the letters that have case, as of an old Unicode version, not \p{L}.
CASED_LETTERS = _char_class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
DEEPSEEK_PUNCTUATION = _char_class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
NOT_SENTENCE_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"

_KNOWN = {
    "default": Pretokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Pretokenizer(
        (LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Pretokenizer((LLAMA3,)),
    "minicpm5": Pretokenizer(
        (r"\p{N}{1,3}", rf"{CONTRACTION}|{WORD}|\p{{N}}+|{PUNCTUATION}|{SPACES}"), ignore_merges=True
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Pretokenizer((QWEN2,)),
    "qwen35": Pretokenizer((QWEN35,)),
    "laguna": Pretokenizer((r"[^\n]+|\n+", QWEN2)),
    "seed-coder": Pretokenizer((rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",)),
    "bailingmoe bailingmoe2 llada-moe": Pretokenizer(
        (rf"{CONTRACTION}|{WORD}|\p{{N}}|{PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum modern-bert a.x-4.0 "
    "jina-es jina-de jina-v2-es jina-v2-de": Pretokenizer((GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Pretokenizer((r"\p{N}", GPT2)),
    "falcon": Pretokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": Pretokenizer(
        (
            r"[\r\n]",
            rf"\s?{CASED_LETTERS}+",
            rf"\s?{DEEPSEEK_PUNCTUATION}+",
            r"\s+$",
            rf"{CJK}+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pretokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{CJK}+", r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": Pretokenizer((r"\p{N}{1,3}", rf"{CJK_AND_KANA}+", DEEPSEEK3)),
    "tekken": Pretokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Pretokenizer((GPT4O,)),
    "poro-chat bloom gpt3-finnish": Pretokenizer((NOT_SENTENCE_PUNCTUATION,)),
    "viking": Pretokenizer((NOT_SENTENCE_PUNCTUATION, r"\p{N}")),
    "superbpe": Pretokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
PRETOKENIZERS = {name: split for names, split in _KNOWN.items() for name in names.split()}


def pretokenizer(name: str) -> Pretokenizer:
    """The splits that `tokenizer.ggml.pre` = `name` stands for; a name that isn't known is an error.

    A wrong split still gives plausible text, only worse, so there is no default to fall back to.
    """
    try:
        return PRETOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRETOKENIZERS))
        raise ZllmcError(
            f"tokenizer.ggml.pre is {name!r}, which zllmc doesn't know; known names: {known}"
        ) from None
