"""The tokenizer inside a GGUF file, as mlx-lm's TokenizerWrapper."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .gguf_file import GGUFFile

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# tokenizer.ggml.pre -> the patterns that cut a text, as llama.cpp has them: one after the other, each inside
# the pieces that the one before left.
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_SINGLE_DIGITS = (r"\p{N}", *_GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_WORDS % r"\p{N}{1,3}",)
_QWEN2 = (_WORDS % r"\p{N}",)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_PATTERNS = {
    "default": _DEFAULT,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("gpt-2", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}
# Here a piece that is itself a token is taken whole, and a text begins with bos unless the file says
# otherwise.
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
# Qwen composes characters first; the file does not say so.
_NFC = ("qwen2",)


def load_tokenizer(file: GGUFFile, overrides: Mapping[str, Any] | None = None) -> "TokenizerWrapper":
    """The tokenizer of a GGUF file, with its chat template and the ids that end a text.

    It reaches mlx-lm as the files of a Hugging Face folder, so that streaming detokenizer, tool parser and
    thinking markers are those that mlx-lm picks for the same model elsewhere. `overrides` are fields of
    tokenizer_config.json. Raises CheckpointError for a tokenizer that is not read here.
    """
    from mlx_lm.tokenizer_utils import load

    vocabulary = _Vocabulary(file)
    with tempfile.TemporaryDirectory(prefix="mlx-specdec-") as folder:
        path = Path(folder)
        vocabulary.tokenizer().save(str(path / "tokenizer.json"), pretty=False)
        (path / "tokenizer_config.json").write_text(json.dumps(vocabulary.config()), encoding="utf-8")
        return load(path, dict(overrides or {}), eos_token_ids=vocabulary.ends())


class _Vocabulary:
    """The `tokenizer.*` keys of one file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        if (model := self.get("ggml.model")) != "gpt2":
            raise CheckpointError(
                f"{file.path} has a tokenizer of kind {model!r} and only byte-level BPE ('gpt2') is read; "
                "give the model as a Hugging Face or mlx-lm folder."
            )
        self.pre = self.get("ggml.pre")
        if self.pre not in _PATTERNS:
            raise CheckpointError(
                f"{file.path} cuts text by the pre-tokenizer {self.pre!r}, which is not known here; "
                "give the model as a Hugging Face or mlx-lm folder."
            )
        if self.get("ggml.add_space_prefix", False):
            raise CheckpointError(
                f"{file.path} puts a space before every text, which byte-level BPE here does not; "
                "give the model as a Hugging Face or mlx-lm folder."
            )
        texts = self.strings("ggml.tokens")
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.types = self.get("ggml.token_type", [1] * len(texts))
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens) or not isinstance(self.types, list) or len(self.types) != len(self.tokens):
            raise file.fault("its tokens are not distinct, or have no type each")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get("tokenizer." + key, default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.file.fault(f"it has no list of strings tokenizer.{key}")
        return value

    def special(self, name: str) -> int | None:
        """The id of `bos`, `eos`, ..., None where the file names none."""
        value = self.get(f"ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.file.fault(f"tokenizer.ggml.{name}_token_id is {value!r}, outside {len(self.tokens)} tokens")
        return value

    def ends(self) -> list[int]:
        """The ids that end a text: end of sequence, of turn, of message."""
        ids = (self.special(name) for name in ("eos", "eot", "eom"))
        return sorted({token for token in ids if token is not None})

    def tokenizer(self) -> "Tokenizer":
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )

        merges = [self.merge(text) for text in self.strings("ggml.merges")]
        try:
            bpe = models.BPE(self.ids, merges, ignore_merges=self.pre in _WHOLE_FIRST)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise self.file.fault(f"its merges do not fit its tokens ({error})") from error
        tokenizer = Tokenizer(bpe)
        if self.pre in _NFC:
            tokenizer.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[self.pre]]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        before = self.frame("bos", self.pre in _WHOLE_FIRST)
        after = self.frame("eos", False)
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=[*before, "$A", *after, *before, "$B:1", *after],
                special_tokens=[(token, self.ids[token]) for token in {*before, *after}],
            )
        for kind in (_CONTROL, _USER_DEFINED):
            added = [token for token, each in zip(self.tokens, self.types, strict=True) if each == kind]
            tokenizer.add_tokens([AddedToken(t, special=kind == _CONTROL, normalized=False) for t in added])
        return tokenizer

    def merge(self, text: str) -> tuple[str, str]:
        left, _, right = text[1:].partition(" ")  # the first character may itself be a space
        return text[:1] + left, right

    def frame(self, name: str, default: bool) -> list[str]:
        """What is put around a text: the one token, or nothing."""
        token = self.special(name)
        return [] if token is None or not self.get(f"ggml.add_{name}_token", default) else [self.tokens[token]]

    def config(self) -> dict[str, Any]:
        """The fields of tokenizer_config.json."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
            if (token := self.special(ours)) is not None:
                config[theirs + "_token"] = self.tokens[token]
        if isinstance(template := self.get("chat_template"), str):
            config["chat_template"] = template
        return config
