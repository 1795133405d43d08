"""Whether a draft model speaks the target's language."""

import mlx_specdec  # noqa: F401  # isort: skip

from typing import Any

import pytest

from mlx_specdec import PairingError, SpecDecoder
from mlx_specdec.drafters.pairing import check_tokenizers
from tests import zoo

VOCAB = 300
OURS = zoo.tokenizer(VOCAB)

FITTING = {
    "the same": zoo.tokenizer(VOCAB),
    "more special tokens": zoo.tokenizer(VOCAB, extra=("<x>", "<y>")),
    "special tokens of other names": zoo.tokenizer(VOCAB, rename={"<eos>": "</s>", "<user>": "<human>"}),
    "other names and more": zoo.tokenizer(VOCAB, rename={"<eos>": "</s>"}, extra=("<x>",)),
}
OTHER = {
    "other ids": zoo.tokenizer(VOCAB, shuffle=3),
    "other ids, other seed": zoo.tokenizer(VOCAB, shuffle=4),
    "fewer merges": zoo.tokenizer(VOCAB - 30),
    "more merges": zoo.tokenizer(VOCAB + 30),
    "no merges": zoo.tokenizer(259),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_valid_pair_is_accepted(name: str) -> None:
    check_tokenizers(OURS, FITTING[name])
    check_tokenizers(FITTING[name], OURS)
    model = zoo.build("llama", vocab=VOCAB)
    with SpecDecoder(model, OURS, draft_model=model, draft_tokenizer=FITTING[name]) as decoder:
        assert len(list(decoder.stream("hi", max_tokens=3))) == 3


@pytest.mark.parametrize("name", OTHER)
def test_another_tokenizer_is_refused_by_the_first_token_that_differs(name: str) -> None:
    for ours, theirs in ((OURS, OTHER[name]), (OTHER[name], OURS)):
        first = first_difference(ours, theirs)
        mine, other = (tokenizer.convert_ids_to_tokens(first) for tokenizer in (ours, theirs))
        with pytest.raises(PairingError) as error:
            check_tokenizers(ours, theirs)
        said = str(error.value)
        assert f"token {first} is {mine!r} in the target and {other!r} in the draft model" in said
        assert "\n" not in said


def first_difference(ours: Any, theirs: Any) -> int:
    """The first id that both have, with another text, and that is not an added (special) token in both."""
    special = set(ours.get_added_vocab().values()) & set(theirs.get_added_vocab().values())
    both = range(min(len(ours), len(theirs)))
    return next(
        t for t in both if t not in special and ours.convert_ids_to_tokens(t) != theirs.convert_ids_to_tokens(t)
    )


def test_a_decoder_refuses_such_a_draft_model_and_leaves_the_models_alone() -> None:
    model, draft = zoo.build("qwen3_5", vocab=VOCAB), zoo.build("qwen3_5", vocab=VOCAB, seed=1)
    before = [[type(m) for m in each.modules()] for each in (model, draft)]
    with pytest.raises(PairingError, match="another tokenizer"):
        SpecDecoder(model, OURS, draft_model=draft, draft_tokenizer=OTHER["other ids"])
    assert [[type(m) for m in each.modules()] for each in (model, draft)] == before
