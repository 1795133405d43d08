"""Everything that drafts from text, alone and in chains, leaves the ids of every kind of cache as they were."""

import mlx_specdec  # noqa: F401  # isort: skip

from random import Random

import pytest

from mlx_specdec import SamplingParams, SpecDecoder
from mlx_specdec.draft_length import Auto, Fixed
from mlx_specdec.drafters import DrafterOptions, by_name
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.draft_model import DraftModel
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler
from tests import zoo
from tests.test_exactness import KINDS, VOCAB, answer_of, draft_target, prompt_of, target_of

TOKENS = 60
# Patterns so short that they are found in the outputs of tiny random models.
EAGER = DrafterOptions(ngram_n=2, ngram_m=8, ngram_n_match=2, ngram_n_min=0, ngram_n_max=8)
CHAINS = ("ngram_map", "ngram_mod", "ngram_cache", "suffix", "ngram_simple,suffix,ngram_map", "ngram_mod,draft_model")


def decoded(
    kind: str, names: str, prompt: list[int], length: Auto | Fixed, **sampling: object
) -> tuple[list[int], int]:
    """The ids, and how many tokens were drafted."""
    makers = by_name(names, EAGER)
    drafters = [DraftModel(draft_target(kind), VOCAB) if isinstance(make, str) else make() for make in makers]
    sampler = Sampler(SamplingParams(**sampling), prompt)  # type: ignore[arg-type]
    emitting = list(rounds(target_of(kind).sequence(), prompt, sampler, TOKENS, Chain(drafters, length)))
    return [t for emitted in emitting for t in emitted.tokens], sum(emitted.drafted for emitted in emitting)


@pytest.mark.parametrize("names", CHAINS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_plain_decoding(kind: str, names: str) -> None:
    drafted = 0
    for size in (1, 17):
        prompt = prompt_of(size) * 2
        answer = answer_of(kind, prompt, TOKENS)
        for length in (Fixed(1), Fixed(5), Auto()):
            ids, proposed = decoded(kind, names, prompt, length)
            assert ids == answer, (size, length)
            drafted += proposed
    assert drafted > 0, "nothing was ever drafted, so nothing was shown"


@pytest.mark.parametrize("names", CHAINS)
def test_coupled_ids_do_not_depend_on_what_was_drafted(names: str) -> None:
    for seed in range(5):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": seed}
        prompt = prompt_of(9) * 2
        answer, _ = decoded("kv", "ngram_simple", prompt, Fixed(0), **sampling)
        for length in (Fixed(3), Auto()):
            assert decoded("kv", names, prompt, length, **sampling)[0] == answer


@pytest.mark.parametrize("names", CHAINS[:-1])
def test_earlier_requests_change_speed_and_never_text(names: str) -> None:
    """The same requests five times and in shuffled order, with drafters that remember."""
    model, tokenizer, random = zoo.build("llama", vocab=300), zoo.tokenizer(), Random(0)
    prompts = [[(7 * i * i + k * i + 5) % 290 for i in range(12)] * 2 for k in (3, 4, 5)]
    with SpecDecoder(model, tokenizer, by_name(names, EAGER)) as decoder:
        alone = [[r.token for r in decoder.stream(p, max_tokens=40, num_draft_tokens=0)] for p in prompts]
        rounds_taken, drafted = [], 0
        for _ in range(5):
            for number in random.sample(range(3), 3):
                responses = list(decoder.stream(prompts[number], max_tokens=40, num_draft_tokens=8))
                assert [r.token for r in responses] == alone[number]
                rounds_taken.append(responses[-1].stats.rounds)
                drafted += responses[-1].stats.drafted
    assert drafted > 0, "nothing was ever drafted, so nothing was shown"
    if "suffix" in names or "mod" in names:
        assert sum(rounds_taken[-3:]) < sum(rounds_taken[:3]), "what was said before is remembered"
