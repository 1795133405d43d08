"""Whether a draft model speaks the target's language."""

import mlx_specdec  # noqa: F401  # isort: skip

from typing import Any

import pytest

from mlx_specdec import PairingError, SpecDecoder
from mlx_specdec.drafters.pairing import MadeFor, check_tokenizers, compare, made_for, of_target
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


# Sizes, as configs say them

LAYER = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 1}
VERIFIER = {"verifier": {"name_or_path": "owner/target"}}
SAID: dict[str, tuple[str, dict[str, Any], MadeFor]] = {
    "EAGLE-3 by its authors": ("eagle3", LAYER | {"draft_vocab_size": 97}, MadeFor(64, None, 128)),
    "EAGLE-3 with another width": ("eagle3", LAYER | {"target_hidden_size": 96}, MadeFor(96, None, 128)),
    "EAGLE-3 by speculators": (
        "eagle3",
        {"transformer_layer_config": LAYER, "target_hidden_size": None, "speculators_config": VERIFIER},
        MadeFor(64, None, 128, "owner/target"),
    ),
    "DFlash": ("dflash", LAYER | {"num_target_layers": 36, "dflash_config": {}}, MadeFor(64, 36, 128)),
    "DFlash by speculators": ("dflash", {"transformer_layer_config": LAYER}, MadeFor(64, None, 128)),
    "Gemma 4 assistant": (
        "gemma4_assistant",
        {"backbone_hidden_size": 5376, "text_config": {"hidden_size": 1024, "vocab_size": 262144}},
        MadeFor(5376, None, 262144),
    ),
    "MTP heads": (
        "mtp",
        {"hidden_size": 1, "text_config": {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 97}},
        MadeFor(64, 4, 97),
    ),
    "Medusa": ("medusa", {"base_model_name_or_path": "lmsys/vicuna"}, MadeFor(name="lmsys/vicuna")),
    "nothing": ("eagle3", {}, MadeFor()),
    "nonsense": (
        "eagle3", {"hidden_size": "64", "vocab_size": True, "speculators_config": [], "transformer_layer_config": 3},
        MadeFor(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_configs_say_of_a_drafters_target(what: str) -> None:
    kind, config, made = SAID[what]
    assert made_for(kind, config) == made


def test_a_targets_config_or_that_of_its_language_model() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 128}
    assert of_target(sizes) == of_target({"hidden_size": 16, "text_config": sizes}) == MadeFor(64, 8, 128)
    assert of_target({}) == MadeFor()


@pytest.mark.parametrize(("wanted", "have", "said"), [
    (MadeFor(64), MadeFor(65), "whose hidden size is 64 and this target's is 65"),
    (MadeFor(64, 8, 128, "a/b"), MadeFor(64, 9, 128), "(a/b) whose number of layers is 8 and this target's is 9"),
    (MadeFor(vocab=1000), MadeFor(vocab=2025), "whose vocabulary is 1000 and this target's is 2025"),
    (MadeFor(vocab=2025), MadeFor(vocab=1000), "whose vocabulary is 2025 and this target's is 1000"),
    (MadeFor(vocab=2024), MadeFor(vocab=1000), None),
    (MadeFor(vocab=1000), MadeFor(vocab=2024), None),
    (MadeFor(64, None, 128), MadeFor(64, 8, None), None),
    (MadeFor(), MadeFor(64, 8, 128), None),
], ids=str)  # fmt: skip
def test_sizes_are_compared_as_far_as_they_are_known(wanted: MadeFor, have: MadeFor, said: str | None) -> None:
    if said is None:
        compare("some", wanted, have)
        return
    with pytest.raises(PairingError) as error:
        compare("some", wanted, have)
    assert said in str(error.value)
    assert str(error.value).startswith("the drafter some was made for a target")


def test_who_has_the_other_tokenizer_is_said() -> None:
    with pytest.raises(
        PairingError, match=r"^the drafter has another tokenizer: .* in the drafter; use a drafter of the"
    ):
        check_tokenizers(OURS, OTHER["other ids"], "drafter")
