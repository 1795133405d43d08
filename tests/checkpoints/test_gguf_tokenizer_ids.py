"""Ids of whole texts against the libraries that the tokenizers come from: `tokenizers` and `sentencepiece`."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.gguf_tokenizer import load_tokenizer
from mlx_specdec.checkpoints.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

from .tiny_gguf import add_metadata

TEXTS = (
    "",
    " ",
    "Hello, world! It's 2026, isn't it? I'LL say 12345678 WE'RE fine.",
    "def fib(n):\n    if n < 2:\n        return n\n\treturn fib(n - 1) + fib(n-2)  # O(2**n)\n\n\n\n",
    "SELECT * FROM t WHERE a >= 10.5 AND b != 'x';\r\n\r\n   -- done",
    "日本語のテキスト、漢字とカタカナ。 中文文本也在这里。 한국어",
    "👋🏽 emoji 👩‍👩‍👧 and 🇯🇵 flags",
    "e\u0301te\u0301 naïve Ünïcödé संस्कृतम् ไทย",
    "  two  spaces,   three;\ttabs\t\tand trailing   ",
    "x1y22z333 0x1F 1e-5 ½ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<tool> after<tool>",
    "CamelCaseAndSHOUTINGWords MixedUP snake_case",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
INSENSITIVE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = INSENSITIVE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(after)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(after)s"
    r"|%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = INSENSITIVE + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cut(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


# How the tokenizer.json of each family cuts a text before its bytes, whether it composes characters, and whether a
# piece that is a token is taken whole.
FAMILIES: dict[str, tuple[list[Any], bool, bool]] = {
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False, False),
    "smollm": ([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)], False, False),
    "llama-bpe": (cut(WORDS % r"\p{N}{1,3}"), False, True),
    "smaug-bpe": (cut(WORDS % r"\p{N}{1,3}"), False, True),
    "dbrx": (cut(WORDS % r"\p{N}{1,3}"), False, False),
    "qwen2": (cut(WORDS % r"\p{N}"), True, False),
    "qwen35": (cut(QWEN35), True, False),
    "gpt-4o": (cut(CASED % {"after": INSENSITIVE + "?", "digits": r"\p{N}{1,3}"}), False, False),
    "tekken": (cut(CASED % {"after": "", "digits": r"\p{N}"}), False, True),
    "deepseek-v3": (cut(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK), False, False),  # noqa: RUF001
}


def load(path: Path, keys: dict[str, Any], arch: str = "llama") -> Any:
    writer = GGUFWriter(path / "m.gguf", arch)
    add_metadata(writer, {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_tokenizer(GGUFFile(path / "m.gguf"))


def trained(pre: str) -> Tokenizer:
    """A tokenizer as the family's tokenizer.json describes it, of merges learnt from the texts."""
    cuts, composed, whole = FAMILIES[pre]
    found = Tokenizer(models.BPE(ignore_merges=whole))
    if composed:
        found.normalizer = normalizers.NFC()
    by_bytes = [] if isinstance(cuts[-1], pre_tokenizers.ByteLevel) else [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]  # fmt: skip
    found.pre_tokenizer = pre_tokenizers.Sequence([*cuts, *by_bytes])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([*TEXTS, *TEXTS], trainer)
    found.add_tokens([AddedToken("<tool>", normalized=False)])
    return found


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_bpe(tmp_path: Path, pre: str) -> None:
    theirs = trained(pre)
    vocab = theirs.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [CONTROL if t in SPECIAL else USER_DEFINED if t == "<tool>" else NORMAL for t in tokens]
    merges = [" ".join(pair) for pair in json.loads(theirs.to_str())["model"]["merges"]]
    assert len(merges) > 250
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges, "eos_token_id": 0}
    ours = load(tmp_path, keys)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False), text


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    """Without a space before the text as Gemma has it, with one as Llama has it. Texts without tokens of their own: the
    spaces around these are the model family's affair."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text.strip()] * 3), model_writer=written, model_type="bpe",
        vocab_size=700, byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
        normalization_rule_name="identity", minloglevel=2, character_coverage=0.98, split_digits=True,
        user_defined_symbols=["<tool>"], control_symbols=["<start>"], num_threads=1,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    size = theirs.get_piece_size()
    tests = (theirs.is_unknown, theirs.is_control, theirs.is_unused, theirs.is_byte)
    kinds = [
        next((kind for kind, test in zip((UNKNOWN, CONTROL, UNUSED, BYTE), tests, strict=True) if test(i)), NORMAL)
        for i in range(size)
    ]
    tool = theirs.piece_to_id("<tool>")
    kinds[tool] = USER_DEFINED
    keys = {"model": "llama", "pre": "default", "tokens": [theirs.id_to_piece(i) for i in range(size)],
            "scores": [theirs.get_score(i) for i in range(size)], "token_type": kinds, "add_space_prefix": prefix,
            "bos_token_id": theirs.bos_id(), "eos_token_id": theirs.eos_id(),
            "unknown_token_id": theirs.unk_id()}  # fmt: skip
    ours = load(tmp_path, keys)
    for text in (text for text in TEXTS if "<tool>" not in text):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [theirs.bos_id(), *ids], text
        assert ours.decode(ids) == theirs.decode(ids), text
        if text == text.lstrip():  # mlx-lm's streaming takes the spaces that a text begins with for the one before it
            detokenizer = ours.detokenizer
            for token in ids:
                detokenizer.add_token(token)
            detokenizer.finalize()
            assert detokenizer.text == theirs.decode(ids), text
    assert type(ours.detokenizer).__name__ == "SPMStreamingDetokenizer"
    start = theirs.piece_to_id("<start>")
    assert ours.encode("<start>", add_special_tokens=False) == [start]
    assert ours.encode("<tool>hi", add_special_tokens=False)[0] == tool


def test_phi3_control_tokens_swallow_the_space_after_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<|user|>", *[f"<0x{i:02X}>" for i in range(256)], "▁", "h", "i", "▁h", "▁hi"]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5]
    keys = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": [-float(i) for i in range(len(tokens))],
            "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip

    def pieces(arch: str, text: str) -> list[str]:
        return [tokens[i] for i in load(tmp_path, keys, arch).encode(text, add_special_tokens=False)]

    assert pieces("phi3", "<|user|> \n hi") == pieces("phi3", "<|user|>hi")
    assert pieces("llama", "<|user|> \n hi") != pieces("llama", "<|user|>hi")
    assert pieces("phi3", "<s> hi") != pieces("phi3", "<s>hi")


GEMMA_TEXTS = [text for text in TEXTS if "<" not in text]


def test_gemma4(tmp_path: Path) -> None:
    """Merges are listed, spaces become a letter of their own, lines are merged apart; against `tokenizers`."""
    found = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    found.normalizer = normalizers.Replace(" ", "▁")
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *[f"<0x{i:02X}>" for i in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, limit_alphabet=60)
    found.train_from_iterator(GEMMA_TEXTS * 3, trainer)
    saved = json.loads(found.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    # The reference cuts nothing before it merges.
    theirs = Tokenizer(
        models.BPE(
            saved["vocab"], [tuple(m) for m in saved["merges"]], byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    kinds = [{0: CONTROL, 1: CONTROL, 2: CONTROL, 3: UNKNOWN, 4: CONTROL}.get(i, BYTE if i < 261 else NORMAL)
             for i in range(len(tokens))]  # fmt: skip
    keys = {"model": "gemma4", "tokens": tokens, "token_type": kinds, "scores": [0.0] * len(tokens),
            "merges": [" ".join(m) for m in saved["merges"]], "bos_token_id": 2, "eos_token_id": 1,
            "unknown_token_id": 3, "add_space_prefix": False, "add_bos_token": True}  # fmt: skip
    ours = load(tmp_path, keys, "gemma4")
    assert ours.eos_token_ids == {1, 4}
    for text in GEMMA_TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == [2, *ids], text
        assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.encode("a<turn|>b", add_special_tokens=False)[1] == 4
