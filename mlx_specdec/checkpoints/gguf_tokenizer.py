"""The tokenizer inside a GGUF file, as mlx-lm's TokenizerWrapper; and byte-level BPE, the kind `gpt2`."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gguf_sentencepiece
from .gguf_file import GGUFFile
from .gguf_vocabulary import Vocabulary

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer

# tokenizer.ggml.pre -> the patterns that cut a text, as llama.cpp has them: one after the other, each inside
# the pieces that the one before left.
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_SINGLE_DIGITS = (r"\p{N}", *_GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_WORDS % r"\p{N}{1,3}",)
_QWEN2 = (_WORDS % r"\p{N}",)
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER_LOWER = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(after)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(after)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (_UPPER_LOWER % {"after": "", "digits": r"\p{N}"},)
_GPT4O = (_UPPER_LOWER % {"after": _CONTRACTIONS + "?", "digits": r"\p{N}{1,3}"},)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS = {
    "default": _DEFAULT,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "mellum", "gigachat", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "smaug-bpe", "dbrx", "glm4",
         "chatglm-bpe"),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
}  # fmt: skip
# Here a text begins with bos unless the file says otherwise,
_BOS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
# and a piece that is itself a token is taken whole; as in the tokenizer of SmolLM3, which llama.cpp calls smaug-bpe.
_WHOLE_FIRST = (*_BOS_FIRST, "smaug-bpe")
# Qwen composes characters first; the file does not say so.
_NFC = ("qwen2", "qwen35")


def load_tokenizer(file: GGUFFile, overrides: Mapping[str, Any] | None = None) -> "TokenizerWrapper":
    """The tokenizer of a GGUF file, with its chat template and the ids that end a text.

    It reaches mlx-lm as the files of a Hugging Face folder, so that streaming detokenizer, tool parser and
    thinking markers are those that mlx-lm picks for the same model elsewhere. `overrides` are fields of
    tokenizer_config.json. Raises CheckpointError for a tokenizer that is not read here.
    """
    from mlx_lm.tokenizer_utils import load

    vocabulary = Vocabulary(file)
    kinds = {"gpt2": byte_level, "llama": gguf_sentencepiece.tokenizer, "gemma4": gguf_sentencepiece.tokenizer}
    if vocabulary.kind not in kinds:
        raise vocabulary.unread(f"has a tokenizer of kind {vocabulary.kind!r}, and only {', '.join(kinds)} are read")
    with tempfile.TemporaryDirectory(prefix="mlx-specdec-") as folder:
        path = Path(folder)
        kinds[vocabulary.kind](vocabulary).save(str(path / "tokenizer.json"), pretty=False)
        (path / "tokenizer_config.json").write_text(json.dumps(vocabulary.config()), encoding="utf-8")
        return load(path, dict(overrides or {}), eos_token_ids=vocabulary.ends())


def byte_level(vocabulary: Vocabulary) -> "Tokenizer":
    """Byte-level BPE, cut as `tokenizer.ggml.pre` says. Raises CheckpointError for a cut that is not known."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    pre = vocabulary.get("ggml.pre")
    if pre not in _PATTERNS:
        raise vocabulary.unread(f"cuts text by the pre-tokenizer {pre!r}, which is not known here")
    if vocabulary.get("ggml.add_space_prefix", False):
        raise vocabulary.unread("puts a space before every text, which byte-level BPE here does not")
    found = vocabulary.bpe(vocabulary.merges(), ignore_merges=pre in _WHOLE_FIRST)
    if pre in _NFC:
        found.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    found.decoder = decoders.ByteLevel()
    return vocabulary.finish(found, bos=pre in _BOS_FIRST)
