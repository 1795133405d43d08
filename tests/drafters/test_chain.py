"""A chain asks in order, all observe, and only the drafter whose draft was verified hears how it fared."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_specdec import SpecDecoder
from mlx_specdec.draft_length import Auto, Fixed, Outcome
from mlx_specdec.drafters import DrafterOptions, by_name
from mlx_specdec.drafters.base import NOTHING, Draft
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.ngram_cache import Lookup
from mlx_specdec.drafters.suffix import Suffix, SuffixMemory
from mlx_specdec.errors import CheckpointError, OptionError, PairingError
from mlx_specdec.features import FeatureRequest, Features
from mlx_specdec.sampling import Sampler, SamplingParams
from tests import zoo

ANY = Sampler(SamplingParams(), [0])


class Saying:
    """Always proposes the same tokens."""

    wants, max_draft = FeatureRequest(), 8

    def __init__(self, name: str, tokens: Sequence[int], free: bool = True):
        self.name, self.tokens, self.free = name, list(tokens), free
        self.heard: list[object] = []

    def start(self, prompt: Sequence[int]) -> None:
        self.heard.append(("start", list(prompt)))

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        self.heard.append(("observe", list(tokens)))

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        self.heard.append(("propose", limit))
        return Draft(mx.array(self.tokens[:limit])) if self.tokens else NOTHING

    def settle(self, drafted: int, accepted: int) -> None:
        self.heard.append(("settle", drafted, accepted))

    def close(self) -> None:
        self.heard.append("close")


def test_the_first_with_something_to_say_drafts() -> None:
    silent, first, second = Saying("silent", []), Saying("first", [1, 2, 3]), Saying("second", [4])
    chain = Chain([silent, first, second], Fixed(2))
    chain.start([7])
    chain.observe([7, 8], None)
    assert chain.propose(9, 5, ANY).tokens.tolist() == [1, 2]
    assert chain.winner is first
    chain.settle(2, 1)
    chain.close([9, 1, 5])
    begun, over = [("start", [7]), ("observe", [7, 8])], [("observe", [9, 1, 5]), "close"]
    assert silent.heard == [*begun, ("propose", 2), *over]
    assert first.heard == [*begun, ("propose", 2), ("settle", 2, 1), *over]
    assert second.heard == [*begun, *over]


class Blocks(Saying):
    block_size = 4


def test_a_block_is_drafted_whole_and_cut() -> None:
    """A shorter block drafts worse and costs no less."""
    drafter = Blocks("block", [1, 2, 3])
    chain = Chain([drafter], Fixed(1))
    assert chain.propose(9, 5, ANY).tokens.tolist() == [1]
    assert chain.propose(9, 2, ANY).tokens.tolist() == [1]
    assert len(Chain([drafter], Fixed(0)).propose(9, 5, ANY).tokens) == 0
    asked = [heard[1] for heard in drafter.heard if heard[0] == "propose"]
    assert asked == [min(5, drafter.max_draft), min(2, drafter.max_draft)]


def test_nobody_says_anything() -> None:
    chain = Chain([Saying("silent", [])], Fixed(2))
    assert len(chain.propose(9, 5, ANY).tokens) == 0
    assert chain.winner is None
    chain.settle(0, 0)
    assert len(Chain([], Fixed(0)).propose(9, 5, ANY).tokens) == 0
    assert len(Chain([Saying("first", [1])], Fixed(4)).propose(9, 0, ANY).tokens) == 0, "no room"


def test_a_drafter_that_keeps_failing_yields_its_turn() -> None:
    wrong, right = Saying("wrong", [1, 2, 3]), Saying("right", [4, 5, 6])
    length = Auto()
    chain = Chain([wrong, right], length)
    length.record(Outcome(None, 0, [4], 1.0))
    turns = []
    for _ in range(60):
        draft = chain.propose(9, 8, ANY)
        turns.append(chain.winner.name if chain.winner else "")
        k = len(draft.tokens)
        tokens = [4, 5, 6, 7][: k + 1] if chain.winner is right else [4]
        length.record(Outcome(chain.winner, k, tokens, 1 + k / 6))
    assert turns[30:].count("right") >= 25
    assert turns[30:].count("wrong") <= 4


def test_a_weak_free_drafter_yields_to_a_later_model_but_not_to_an_earlier_one() -> None:
    """The free ones draft one right token of three, the model all; each round takes as long as a plain one and a
    tenth for each token of the model."""

    def turns(*names: str) -> list[str]:
        weak, weaker = Saying("weak", [4, 1, 1]), Saying("weaker", [4, 2, 2])
        model, slow = Saying("model", [4, 5, 6, 7], free=False), Saying("slow", [4, 5, 6, 7], free=False)
        length, found = Auto(), []
        chain = Chain([{d.name: d for d in (weak, weaker, model, slow)}[name] for name in names], length)
        length.record(Outcome(None, 0, [4], 1.0))
        for _ in range(200):
            chain.would_draft(9, 8, ANY)  # which changes nothing
            draft = chain.propose(9, 8, ANY)
            k, name = len(draft.tokens), chain.winner.name if chain.winner else ""
            right = k if name in ("model", "slow") else min(k, 1)
            each = {"model": 0.1, "slow": 0.8}.get(name, 0.0)
            length.record(Outcome(chain.winner, k, [4, 5, 6, 7, 8][: right + 1], 1 + each * k))
            found.append(name)
        return found[100:]

    assert turns("weak", "model").count("model") > 90
    assert turns("weak", "weaker", "model").count("model") > 90
    assert turns("model", "weak").count("model") > 90
    assert turns("weak", "slow").count("weak") > 90
    assert turns("slow", "weak").count("slow") > 90, "the user's order: what is asked first and pays drafts"
    assert turns("weak", "slow", "model").count("weak") > 90, "its turn would be the slow one's"
    assert turns("weak", "model", "slow").count("model") > 90
    assert turns("weak", "weaker").count("weak") > 90


def test_a_model_is_not_run_to_find_out_whether_it_would_draft() -> None:
    model = Saying("model", [1], free=False)
    assert Chain([model], Fixed(2)).would_draft(9, 5, ANY)
    assert model.heard == []
    assert Chain([Saying("first", [1])], Fixed(2)).would_draft(9, 5, ANY)
    assert not Chain([Saying("silent", [])], Fixed(2)).would_draft(9, 5, ANY)


def test_names() -> None:
    makers = by_name("ngram_map, suffix,ngram_simple")
    assert [make().name for make in makers] == ["ngram_map", "suffix", "ngram_simple"]
    assert by_name("ngram_mod,draft_model")[1] == "draft_model"
    first, second = by_name("ngram_mod")[0], by_name("suffix")[0]
    assert first().table is first().table, "drafters of one maker share their memory"
    assert second().memory is second().memory


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        ("magic", {}, "no drafter 'magic'"),
        ("", {}, "no drafter ''"),
        ("suffix,suffix", {}, "suffix is named twice"),
        ("ngram_map,suffix,ngram_map", {}, "ngram_map is named twice"),
        ("ngram_simple", {"ngram_n": 0}, "ngram_n is 0"),
        ("ngram_simple", {"ngram_m": 1025}, "ngram_m is 1025"),
        ("ngram_map", {"ngram_mode": "v"}, "ngram_mode is 'v'"),
        ("ngram_mod", {"ngram_n_match": 0}, "ngram_n_match is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(names: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        by_name(names, DrafterOptions(**options))


def test_a_lookup_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.bin"):
        by_name("ngram_cache", DrafterOptions(lookup_cache_static=tmp_path / "nothing.bin"))


def test_a_memory_is_kept_in_its_file(tmp_path) -> None:
    """What one decoder saw drafts for the next one: the whole output, its last round included."""
    model, tokenizer = zoo.build("llama", vocab=300), zoo.tokenizer()
    prompt = [(7 * i * i + 3 * i + 5) % 290 for i in range(12)]
    for names, options in (
        ("suffix", {"suffix_cache": tmp_path / "memory"}),
        ("ngram_cache", {"lookup_cache_dynamic": tmp_path / "lookup"}),
    ):
        accepted, ids = [], []
        for _ in range(3):
            with SpecDecoder(model, tokenizer, by_name(names, DrafterOptions(**options))) as decoder:
                responses = list(decoder.stream(prompt, max_tokens=40, num_draft_tokens=8))
            accepted.append(responses[-1].stats.accepted)
            ids.append([r.token for r in responses])
        assert ids[0] == ids[1] == ids[2]
        assert accepted[2] > accepted[0], names
    memory = SuffixMemory()
    memory.load(tmp_path / "memory")
    assert list(memory._tree.text[-40:]) == ids[0]


def test_a_memory_that_cannot_be_written_loses_no_other(tmp_path, monkeypatch) -> None:
    options = DrafterOptions(suffix_cache=tmp_path / "memory", lookup_cache_dynamic=tmp_path / "lookup")
    decoder = SpecDecoder(zoo.build("llama", vocab=300), zoo.tokenizer(), by_name("suffix,ngram_cache", options))
    list(decoder.stream([5, 6, 7, 5, 6], max_tokens=8, num_draft_tokens=2))
    save = SuffixMemory.save

    def full(self, path) -> None:
        raise CheckpointError(f"cannot write the suffix memory {path}")

    monkeypatch.setattr(SuffixMemory, "save", full)
    with pytest.raises(CheckpointError, match="cannot write the suffix memory"):
        decoder.close()
    assert len(Lookup.load(tmp_path / "lookup")) > 0
    monkeypatch.setattr(SuffixMemory, "save", save)
    decoder.close()  # tries again
    assert (tmp_path / "memory").exists()


@pytest.mark.parametrize("option", ["suffix_cache", "lookup_cache_dynamic"])
def test_a_folder_that_cannot_be_written_to_is_said_at_once(tmp_path, option: str) -> None:
    options = {option: tmp_path / "none" / "memory"}
    with pytest.raises(CheckpointError, match="its folder is missing or read-only"):
        by_name("suffix,ngram_cache", DrafterOptions(**options))
    by_name("suffix,ngram_cache", DrafterOptions(**options, keeps=False))  # which writes nothing


def test_a_suffix_memory_of_another_model_is_refused(tmp_path) -> None:
    memory = SuffixMemory()
    memory.add([1, 2, 900])
    memory.save(tmp_path / "memory")
    drafter = by_name("suffix", DrafterOptions(suffix_cache=tmp_path / "memory"))
    with pytest.raises(PairingError, match="it has token 900, and the target has 300 tokens"):
        SpecDecoder(zoo.build("llama", vocab=300), zoo.tokenizer(), drafter)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(OptionError, match="the drafter suffix is there twice"):
        SpecDecoder(zoo.build("llama", vocab=300), zoo.tokenizer(), [Suffix, Suffix])


def test_a_lookup_file_of_another_vocabulary_is_refused(tmp_path) -> None:
    lookup = Lookup()
    lookup.learn([1, 2, 900], 3)
    lookup.save(tmp_path / "lookup")
    drafter = by_name("ngram_cache", DrafterOptions(lookup_cache_static=tmp_path / "lookup"))
    with pytest.raises(PairingError, match="it has token 900, and the target has 300 tokens"):
        SpecDecoder(zoo.build("llama", vocab=300), zoo.tokenizer(), drafter)
