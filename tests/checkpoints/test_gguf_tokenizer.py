"""The tokenizer of a tiny GGUF file: cuts, special tokens, what frames a text, what ends it."""

from typing import Any

import pytest

from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.checkpoints.gguf_tokenizer import load_tokenizer
from mlx_specdec.errors import CheckpointError

from .tiny_gguf import TOKENS, TinyGGUF


def tokenizer(tmp_path, **keys: Any) -> Any:
    extra = {f"tokenizer.{key}".replace("__", "."): value for key, value in keys.items()}
    TinyGGUF(extra=extra).write(tmp_path / "m.gguf")
    return load_tokenizer(GGUFFile(tmp_path / "m.gguf"))


def pieces(found: Any, text: str) -> list[str]:
    return [TOKENS[i] for i in found.encode(text, add_special_tokens=False)]


def test_merges_special_tokens_and_round_trip(tmp_path):
    found = tokenizer(tmp_path)
    assert pieces(found, "hello world") == ["hello", "Ġwo", "r", "l", "d"]
    assert pieces(found, "<|im_start|>hello<|im_end|>") == ["<|im_start|>", "hello", "<|im_end|>"]
    assert pieces(found, "h<tool>e") == ["h", "<tool>", "e"]
    for text in ("hello  world 12 <|im_end|>\n\n\tx = 'é日本👋'", "", " ", "isn't , ok ."):
        assert found.decode(found.encode(text, add_special_tokens=False)) == text
    assert found.decode(found.encode("<|im_start|>hello<tool>"), skip_special_tokens=True) == "hello<tool>"


@pytest.mark.parametrize(
    ("pre", "digits", "lines"),
    [
        ("smollm", ["1", "2", "1", "2"], ["ĊĊ"]),
        ("gpt-2", ["12", "12"], ["ĊĊ"]),
        ("default", ["12", "1", "2"], ["ĊĊ"]),
        ("llama-bpe", ["12", "1", "2"], ["ĊĊ"]),
        ("qwen2", ["1", "2", "1", "2"], ["ĊĊ"]),
        ("tekken", ["1", "2", "1", "2"], ["ĊĊ"]),
        ("deepseek-coder", ["1", "2", "1", "2"], ["Ċ", "Ċ"]),
    ],
)
def test_each_pre_tokenizer_cuts_digits_and_lines_in_its_way(tmp_path, pre, digits, lines):
    found = tokenizer(tmp_path, ggml__pre=pre, ggml__add_bos_token=False)
    assert pieces(found, "1212") == digits
    assert pieces(found, "\n\n") == lines


def test_a_whole_token_wins_over_merges_where_llama3_says_so(tmp_path):
    """'hello' cannot be merged without 'hell o'; as a whole piece it is still one token of the vocabulary."""
    merges = ["h e", "l l", "he ll", "Ġ w", "Ġw o", "Ċ Ċ", "1 2"]
    assert pieces(tokenizer(tmp_path, ggml__merges=merges), "hello") == ["hell", "o"]
    assert pieces(tokenizer(tmp_path, ggml__merges=merges, ggml__pre="llama-bpe"), "hello") == ["hello"]


def test_qwen_composes_characters(tmp_path):
    decomposed = "e\u0301"
    assert tokenizer(tmp_path).decode(tokenizer(tmp_path).encode(decomposed)) == decomposed
    found = tokenizer(tmp_path, ggml__pre="qwen2")
    assert found.decode(found.encode(decomposed)) == "é"


def test_what_frames_a_text(tmp_path):
    hello = TOKENS.index("hello")
    assert tokenizer(tmp_path).encode("hello") == [hello]
    assert tokenizer(tmp_path, ggml__add_bos_token=True).encode("hello") == [1, hello]
    assert tokenizer(tmp_path, ggml__pre="llama-bpe").encode("hello") == [1, hello]
    assert tokenizer(tmp_path, ggml__pre="llama-bpe", ggml__add_bos_token=False).encode("hello") == [hello]
    both = tokenizer(tmp_path, ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert both.encode("hello") == [1, hello, 2]
    assert both.encode("hello", add_special_tokens=False) == [hello]


def test_named_ids_the_ends_of_a_text_and_the_chat_template(tmp_path):
    found = tokenizer(tmp_path, ggml__eot_token_id=0, ggml__eom_token_id=5, ggml__padding_token_id=0)
    assert (found.bos_token, found.eos_token, found.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert found.eos_token_ids == {0, 2, 5}
    ids = found.apply_chat_template([{"role": "user", "content": "hello"}])
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "hello", "<|im_end|>"]
    assert tokenizer(tmp_path).eos_token_ids == {2}
    assert not tokenizer(tmp_path, chat_template=None).has_chat_template


def test_a_turn_ends_where_only_the_token_says_so(tmp_path):
    """Older files name the end of a sequence and no other; a token that looks like one but is text ends nothing."""
    assert tokenizer(tmp_path, ggml__eos_token_id=0).eos_token_ids == {0, TOKENS.index("<|im_end|>")}
    types = [3, 3, 1, 4] + [1] * (len(TOKENS) - 4)
    assert tokenizer(tmp_path, ggml__eos_token_id=0, ggml__token_type=types).eos_token_ids == {0}


def test_named_chat_templates(tmp_path):
    found = tokenizer(tmp_path, chat_templates=["tool_use"], chat_template__tool_use="{{ tools[0]['name'] }}hello")
    said = [{"role": "user", "content": "d"}]
    assert found.decode(found.apply_chat_template(said, tools=[{"name": "ok"}])) == "okhello"
    assert found.decode(found.apply_chat_template(said)) == "<|im_start|>d<|im_end|>"


def test_the_streaming_detokenizer_is_the_fast_one(tmp_path):
    found = tokenizer(tmp_path)
    detokenizer = found.detokenizer
    assert type(detokenizer).__name__ == "BPEStreamingDetokenizer"
    for token in found.encode("hello 日本 world"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "hello 日本 world"


def test_a_chat_template_cannot_leave_its_sandbox(tmp_path):
    found = tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(Exception, match=r"unsafe|access to attribute"):
        found.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ggml__model": "bert"}, "tokenizer of kind 'bert', and only gpt2, llama, gemma4 are read"),
        ({"ggml__model": None}, "tokenizer of kind None"),
        ({"ggml__model": "llama"}, "no score each"),
        ({"ggml__model": "llama", "ggml__scores": [1.0]}, "no score each"),
        ({"ggml__model": "gemma4", "ggml__merges": None}, "no list of strings tokenizer.ggml.merges"),
        ({"ggml__pre": "klingon"}, "pre-tokenizer 'klingon'"),
        ({"ggml__pre": None}, "pre-tokenizer None"),
        ({"ggml__add_space_prefix": True}, "a space before every text"),
        ({"ggml__tokens": None}, "no list of strings tokenizer.ggml.tokens"),
        ({"ggml__tokens": ["a", "a"]}, "not distinct"),
        ({"ggml__tokens": [1, 2]}, "no list of strings"),
        ({"ggml__token_type": [1]}, "have no type each"),
        ({"ggml__merges": None}, "no list of strings tokenizer.ggml.merges"),
        ({"ggml__merges": ["zz top"]}, "merges do not fit"),
        ({"ggml__eos_token_id": 99999}, "eos_token_id is 99999, outside"),
    ],
)
def test_what_is_not_read_is_refused_in_one_sentence(tmp_path, keys, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        tokenizer(tmp_path, **keys)
    assert "\n" not in str(caught.value)
