"""Ids to text: the pieces join to the whole text, and nothing of a stop string is ever among them."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
)

from mlx_specdec import OptionError, SpecDecoder, generate
from mlx_specdec.decoder import GenerationResponse
from mlx_specdec.text import TextStream, encode, stop_tokens
from tests import zoo
from tests.scripted import Scripted, scripts

VOCAB = 300
TOKENIZER = zoo.tokenizer(VOCAB)
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("say: ")
# The two ways of mlx-lm to decode ids one by one.
TOKENIZERS = {
    name: TokenizerWrapper(TOKENIZER._tokenizer, detokenizer)
    for name, detokenizer in (("bpe", BPEStreamingDetokenizer), ("naive", NaiveStreamingDetokenizer))
}


class Speaker(nn.Module):
    """Says `answer` after `prompt`, and token 0 as soon as its cache holds anything else: it reads all of it."""

    model_type = "speaker"

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], vocab: int = VOCAB):
        super().__init__()
        self.layers = [nn.Identity()]  # one cache
        self._script = mx.array([*prompt, *answer])
        self._next = mx.array([*prompt[1:], *answer, 0])
        self._vocab = vocab

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        (memory,) = cache
        start, rows = memory.offset, tokens.shape[1]
        said = tokens.astype(mx.float32)[:, None, :, None]
        keys, _ = memory.update_and_fetch(said, said)
        keys = keys[0, 0, :, 0]
        length = min(start + rows, self._script.shape[0])
        faithful = mx.cumprod((keys[:length] == self._script[:length]).astype(mx.int32))
        following = mx.where(faithful[start:] == 1, self._next[start:length], 0)
        following = mx.pad(following, (0, rows - following.shape[0]))
        return 9.0 * (following[None, :, None] == mx.arange(self._vocab))


def spoken(
    answer: Sequence[int],
    tokenizer: Any = TOKENIZER,
    k: int = 0,
    script: str = "right",
    vocab: int = VOCAB,
    **request: Any,
) -> list[GenerationResponse]:
    """What comes of a model that says `answer`; with k drafts a round, proposed as `script` says, or plain (0)."""
    mx.eval((model := Speaker(PROMPT, answer, vocab)).state)
    drafter = None if k == 0 else lambda: Scripted(answer, scripts(VOCAB)[script])
    with SpecDecoder(model, tokenizer, drafter) as decoder:
        return list(decoder.stream(PROMPT, num_draft_tokens=k, **{"max_tokens": len(answer), **request}))


def join(responses: Sequence[GenerationResponse]) -> str:
    return "".join(r.text for r in responses)


TEXTS = (
    "plain words, and a line\nbreak\n\n",
    "ďábelské 😀🎉 日本語",
    "👩‍👩‍👧‍👦🏳️‍🌈 é ß ½ \u200b\u00ad\ufeff",
    "日本語で話す。한국어 العربية עברית",
    " a leading space",
    "  two, and  two  inside  and after  ",
    "\n first a line",
    "tabs\tand\x00nothing\x7f",
    "ends within <user>special<assistant> tokens",
    "a replacement character of its own: \ufffd.",
    "\ufffd",
    " ",
)


@pytest.mark.parametrize("way", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_the_pieces_join_to_the_whole_text(text: str, way: str) -> None:
    tokenizer = TOKENIZERS[way]
    answer = tokenizer.encode(text)
    assert tokenizer.decode(answer) == text
    plain = spoken(answer, tokenizer)
    assert [r.token for r in plain] == answer
    assert join(plain) == text
    pieces = [r.text for r in plain]
    for piece, place in zip(pieces, range(1, len(pieces) + 1), strict=True):
        assert text.startswith("".join(pieces[:place]))  # nothing is taken back
        assert "\ufffd" not in piece or "\ufffd" in text
    for script in ("right", "mixed"):
        for k in (1, 2, 3, 4, 8):
            drafted = spoken(answer, tokenizer, k, script)
            assert [r.token for r in drafted] == answer
            assert [r.text for r in drafted] == pieces


@pytest.mark.parametrize("way", TOKENIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_at_all(seed: int, way: str) -> None:
    random, tokenizer = Random(seed), TOKENIZERS[way]
    answer = [random.choice([t for t in range(VOCAB) if t != EOS]) for _ in range(500)]
    plain = spoken(answer, tokenizer)
    assert join(plain) == tokenizer.decode(answer)
    drafted = spoken(answer, tokenizer, 8, "mixed")
    assert [(r.token, r.text) for r in drafted] == [(r.token, r.text) for r in plain]


@pytest.mark.parametrize("way", TOKENIZERS)
def test_ids_beyond_the_tokenizer(way: str) -> None:
    answer = [*TOKENIZER.encode("ab"), VOCAB + 20, *TOKENIZER.encode("cd"), VOCAB + 55]
    assert join(spoken(answer, TOKENIZERS[way], vocab=VOCAB + 56)) == TOKENIZER.decode(answer) == "abcd"


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    answer = TOKENIZER.encode("ok 😀")[:-1]
    assert join(spoken(answer)) == TOKENIZER.decode(answer) == "ok \ufffd"
    assert join(spoken([*answer, EOS])) == "ok \ufffd"
    assert join(spoken([*answer, EOS], k=8)) == "ok \ufffd"


# text, stop strings, what is said, whether a stop ended it
STOPS: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
    ("one STOP two", ("STOP",), "one ", True),
    ("one STOP two", ("one",), "", True),
    ("one STOP two", ("two",), "one STOP ", True),
    ("one STO two", ("STOP",), "one STO two", False),
    ("one two STO", ("STOP",), "one two STO", False),
    ("one STSTSTOP two", ("STOP",), "one STST", True),
    ("aabaabaac", ("aabaac",), "aab", True),
    ("abcabd", ("abcabe", "cabd"), "ab", True),
    ("xxabcdyy", ("abcd", "bc"), "xxa", True),
    ("xxabcdyy", ("ab", "abcd"), "xx", True),
    ("xxabcdyy", ("abcd", "ab"), "xx", True),
    ("xxabceyy", ("abcd", "zz", "qq", "ey"), "xxabc", True),
    ("xxabcyy", ("abcd",), "xxabcyy", False),
    ("日本語です", ("本語",), "日", True),
    ("日本語です", ("本を",), "日本語です", False),
    ("😀😁😂", ("😂",), "😀😁", True),
    ("😀😁😂", ("😁", "😀😀"), "😀", True),
    ("two lines\n\nand more", ("\n\n",), "two lines", True),
    ("a: b. c", (": ",), "a", True),
    ("a b. c", (" ",), "a", True),
    ("words <user> more", ("<user>",), "words ", True),
    ("end", ("the end of all",), "end", False),
)


@pytest.mark.parametrize("way", TOKENIZERS)
@pytest.mark.parametrize(("text", "stop", "said", "stopped"), STOPS)
def test_stop_strings(text: str, stop: tuple[str, ...], said: str, stopped: bool, way: str) -> None:
    tokenizer = TOKENIZERS[way]
    answer = tokenizer.encode(text)
    needed = next(
        (n for n in range(1, len(answer) + 1) if any(s in tokenizer.decode(answer[:n]) for s in stop)), len(answer)
    )
    for end, whole in (((), answer), ((EOS,), [*answer, EOS])):
        for k in range(0, 10, 1):
            responses = spoken(whole, tokenizer, k, stop=stop)
            assert join(responses) == said
            assert [r.token for r in responses] == whole[: needed if stopped else None], k
            reason = "stop" if stopped or end else "length"
            assert [r.finish_reason for r in responses] == [None] * (len(responses) - 1) + [reason]
            assert all(said.startswith("".join(r.text for r in responses[:n])) for n in range(len(responses)))


def test_a_stop_string_complete_with_the_last_token_allowed_is_a_stop() -> None:
    for text, stop in (("one STOP", "STOP"), ("one ", "e ")):
        for k in (0, 1, 4, 8):
            responses = spoken(TOKENIZER.encode(text), k=k, stop=[stop])
            assert join(responses) == text.removesuffix(stop)
            assert responses[-1].finish_reason == "stop", text


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    given = [stream.add(token) for token in TOKENIZER.encode("aSbSTOb")]
    assert given == ["a", "", "Sb", "", "", "", "STOb"]
    assert stream.finish() == ""
    stream = TextStream(TOKENIZER, ["STOP"])
    assert [stream.add(token) for token in TOKENIZER.encode("aST")] == ["a", "", ""]
    assert stream.finish() == "ST"
    assert not stream.stopped


def test_one_stop_string_need_not_be_in_a_list() -> None:
    assert join(spoken(TOKENIZER.encode("one two"), stop="tw")) == "one "


def test_random_texts_against_a_plain_reading() -> None:
    random = Random(0)
    for _ in range(400):
        answer = TOKENIZER.encode("x" + "".join(random.choices("ab é\n", k=random.randrange(1, 14))))
        stop = ["".join(random.choices("ab é", k=random.randrange(1, 4))) for _ in range(random.randrange(5))]
        expected = TOKENIZER.decode(answer)
        for n in range(1, len(answer) + 1):
            text = TOKENIZER.decode(answer[:n])
            found = [text.find(s) for s in stop if s in text]
            if found:
                expected = text[: min(found)]
                break
        stream, said = TextStream(TOKENIZER, stop), ""
        for token in answer:
            said += stream.add(token)
            assert expected.startswith(said)
            if stream.stopped:
                break
        assert said + stream.finish() == expected


@pytest.mark.parametrize("stop", [(), ("STOP",)], ids=["", "stop"])
def test_generate_gives_the_join_of_the_stream(stop: tuple[str, ...]) -> None:
    answer = TOKENIZER.encode("ďábelské 😀🎉 STOP 日本語")
    mx.eval((model := Speaker(PROMPT, answer)).state)
    for drafter in (None, lambda: Scripted(answer, scripts(VOCAB)["right"])):
        text = generate(model, TOKENIZER, PROMPT, max_tokens=len(answer), drafter=drafter, stop=stop)
        assert text == ("ďábelské 😀🎉 " if stop else TOKENIZER.decode(answer))


def test_the_end_of_sequence_set() -> None:
    tokenizer = TokenizerWrapper(TOKENIZER._tokenizer, BPEStreamingDetokenizer, eos_token_ids=[5, 7])
    assert stop_tokens(tokenizer) == {5, 7, EOS}
    tokenizer.add_eos_token("<user>")
    user = TOKENIZER.convert_tokens_to_ids("<user>")
    assert stop_tokens(tokenizer) == {5, 7, EOS, user}
    assert stop_tokens(TOKENIZER, [11, "<assistant>", "a"]) == {
        11, EOS, *TOKENIZER.convert_tokens_to_ids(["<assistant>", "a"]),
    }  # fmt: skip
    for wrong in ("two words", ""):
        with pytest.raises(OptionError, match="extra_eos_token"):
            stop_tokens(TOKENIZER, [wrong])


def test_a_prompt_may_be_text_ids_or_an_array() -> None:
    ids = TOKENIZER.encode("hello")
    assert encode(TOKENIZER, "hello") == encode(TOKENIZER, ids) == encode(TOKENIZER, mx.array(ids)) == ids
    assert encode(TOKENIZER, tuple(ids)) == ids


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(OptionError, match="prompt"):
        encode(TOKENIZER, "half a pair: \ud83d")


def test_special_tokens_are_not_added_twice() -> None:
    class Starting:
        bos_token = "<s>"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * add_special_tokens + [len(text)]

    assert encode(Starting(), "abc") == [1, 3]
    assert encode(Starting(), "<s>abc") == [6]
