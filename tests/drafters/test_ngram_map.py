"""ngram_map drafts what llama.cpp's ngram-map-k and -k4v draft if told to, and what its definition says if not."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from random import Random

import numpy as np
import pytest

from mlx_specdec.drafters.ngram_map import NARROW, RECENT, SLOTS, NgramMap
from mlx_specdec.drafters.ngrams import hashes
from mlx_specdec.errors import OptionError

from .replay import PLENTY, golden, growth, propose, replay, started, text

GOLDEN = golden("ngram_map")
MODES = ("k", "k4v")


@pytest.mark.parametrize("case", GOLDEN["vectors"])
def test_vectors(case: dict):
    drafter = NgramMap(case["n"], case["m"], case["min_hits"], case["mode"], compat=True)
    steps = case["steps"]
    known = 0
    for i, step in enumerate(steps):
        if "begin" in step:
            known = len(step["begin"])
            drafter.start([*step["begin"], steps[i + 1]["history"][known]])
            drafter.observe(step["begin"], None)
            assert len(drafter._rule._keys) == step.get("keys_after", 0)
            assert drafter._rule._hashed == step.get("key_map_last_idx", 0)
        elif "accept" in step:
            drafter.settle(len(steps[i - 1]["draft"]), step["accept"])
        else:
            drafter.observe(step["history"][known:], None)
            known = len(step["history"])
            assert propose(drafter, step["id_last"]) == step["draft"]


@pytest.mark.parametrize("trace", GOLDEN["traces"])
def test_traces(trace: dict):
    drafter = NgramMap(trace["n"], trace["m"], trace["min_hits"], trace["mode"], compat=True)
    assert replay(drafter, trace) == [step["draft"] for step in trace["steps"]]


@pytest.mark.parametrize("case", GOLDEN["hashes"])
def test_hash(case: dict):
    h = hashes(np.array(case["tokens"], dtype=np.int32), len(case["tokens"]), NARROW)
    assert h.tolist() == [case["hash32"]]
    assert (h % SLOTS).tolist() == [case["index_mod_262144"]]


class Definition:
    """The rule, word for word and from the beginning at every call; only what stood is remembered."""

    def __init__(self, n: int, m: int, min_hits: int, mode: str):
        self.n, self.m, self.min_hits, self.mode = n, m, min_hits, mode
        self.stood: dict[tuple, tuple[int, int]] = {}  # by key and value: how often it was there then, what stood

    def propose(self, history: list[int], last: int) -> list[int]:
        n, m = self.n, self.m
        key = (*history[len(history) - n + 1 :], last)
        values = [
            tuple(history[j + n : j + n + m])
            for j in range(len(history) - n - m + 1)
            if tuple(history[j : j + n]) == key
        ]
        if len(values) < self.min_hits:
            return []
        if self.mode == "k":
            value = values[-1]
            self.drafted, self.seen = (key, value), len(values)
        else:
            first_four = list(dict.fromkeys(values))[:4]
            counts = [values.count(value) for value in first_four]
            if max(counts) < 2 * (sum(counts) - max(counts)):
                return []
            value = first_four[counts.index(max(counts))]
            self.drafted, self.seen = (key, value), max(counts)
        seen, stood = self.stood.get(self.drafted, (0, m))
        return list(value[: stood if seen == self.seen else m])

    def settle(self, drafted: int, accepted: int) -> None:
        self.stood[self.drafted] = self.seen, self.m if accepted == drafted else accepted


@pytest.mark.parametrize("mode", MODES)
def test_definition(mode: str):
    """Random sequences over few tokens, random successes, random limits; drafts are asked for in two rounds of three.

    The histories are short enough for no key to be there RECENT times before it is first looked at.
    """
    random, drafts, shortened = Random(0), 0, 0
    for _ in range(150):
        n, m, min_hits = random.randint(1, 4), random.randint(1, 5), random.choice([1, 1, 2, 3])
        tokens, past = random.choice([2, 3, 5]), random.randint(0, RECENT)
        drafter, definition = NgramMap(n, m, min_hits, mode), Definition(n, m, min_hits, mode)
        history = [random.randrange(tokens) for _ in range(past)]
        last = random.randrange(tokens)
        started(drafter, history, last)
        for _ in range(40):
            accepted: list[int] = []
            if random.random() < 2 / 3 and len(history) >= n + m:
                limit = random.choice([1, 3, PLENTY])
                want = definition.propose(history, last)
                draft = propose(drafter, last, limit)
                assert draft == want[:limit]
                if draft:
                    accepted = draft[: random.randint(0, len(draft))]
                    drafter.settle(len(draft), len(accepted))
                    definition.settle(len(draft), len(accepted))
                drafts += bool(draft)
                shortened += len(want) < m
            drafter.observe([last, *accepted], None)
            history += [last, *accepted]
            last = random.randrange(tokens)
    assert drafts > 400
    assert shortened > 50


P = [9, 1, 2, 3, 4, 5]  # after it, the key 1 2 was at place 1


def test_every_place_is_found():
    """Place 0, and the last place that three known tokens follow, in the prompt and right after it."""
    for history in ([1, 2, 3, 4, 5, 6, 7, 8, 1], [9, 9, 9, 9, 1, 2, 3, 4, 1], [9, 9, 9, 9, 9, 9, 1, 2, 3, 4, 1]):
        assert propose(started(NgramMap(2, 3), history, 2), 2) == [3, 4, history[history.index(3) + 2]]
        assert propose(started(NgramMap(2, 3, compat=True), history, 2), 2) == []
    drafter = started(NgramMap(2, 3), [7] * 10, 1)
    drafter.observe([1, 2, 3, 4, 5, 1], None)  # where the prompt ended
    assert propose(drafter, 2) == [3, 4, 5]


def test_the_newest_place_is_drafted_from():
    for compat, want in ((False, [6, 7, 8]), (True, [3, 4, 5])):
        drafter = started(NgramMap(2, 3, compat=compat), [*P, 0, 0, 1], 2)
        assert propose(drafter, 2) == [3, 4, 5]
        drafter.settle(3, 3)
        drafter.observe([2, 3, 4, 5, 1, 2, 6, 7, 8, 0, 0, 0, 0, 1], None)
        assert propose(drafter, 2) == want


@pytest.mark.parametrize("mode", MODES)
def test_min_hits_counts_occurrences(mode: str):
    for occurrences in range(1, 6):
        history = [9, *[1, 2, 3, 4, 5] * occurrences, 0, 0, 1]
        for min_hits in range(1, 6):
            want = [3, 4, 5] if occurrences >= min_hits else []
            drafter = started(NgramMap(2, 3, min_hits, mode), history, 2)
            assert propose(drafter, 2) == propose(drafter, 2) == want


def test_a_vote_counts_an_occurrence_once_and_drafts_the_winner():
    tie = [9, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 0, 0, 1]
    drafter = started(NgramMap(2, 2, mode="k4v"), tie, 2)
    assert [propose(drafter, 2) for _ in range(5)] == [[]] * 5
    drafter = started(NgramMap(2, 2, mode="k4v"), [9, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 0, 0, 1], 2)
    assert propose(drafter, 2) == [3, 4]  # llama.cpp drafts 5 6


@pytest.mark.parametrize("mode", MODES)
def test_what_failed_is_drafted_no_further_than_it_stood(mode: str):
    history = [*P, 0, 0, 1]
    for accepted in range(4):
        drafter = started(NgramMap(2, 3, mode=mode), history, 2)
        assert propose(drafter, 2) == [3, 4, 5]
        drafter.settle(3, accepted)
        assert propose(drafter, 2) == [3, 4, 5][:accepted]
        drafter.observe([2, 3, 4, 5, 1], None)
        assert propose(drafter, 2) == [3, 4, 5]  # seen again


def test_a_limit_shortens_one_draft():
    for compat, want in ((False, [3, 4, 5]), (True, [3])):
        drafter = started(NgramMap(2, 3, compat=compat), [*P, 0, 0, 1], 2)
        assert [propose(drafter, 2, limit) for limit in (0, 1)] == [[], [3]]
        drafter.settle(1, 1)
        assert propose(drafter, 2) == want


def test_compat_with_a_shorter_prompt():
    """Places beyond the shared beginning are forgotten, and looked through again as far as the new prompt allows."""
    drafter = started(NgramMap(2, 3, compat=True), [*range(11, 21)], 1)
    drafter.observe([1, *[0] * 20], None)
    propose(drafter, 0)
    started(drafter, [*range(11, 21), *range(1, 11), 1], 2)
    assert propose(drafter, 2) == [3, 4, 5]
    started(drafter, [*range(11, 21), *range(1, 6)], 6)  # ends too early after place 10
    drafter.observe([6, 7, 8, 1], None)
    assert propose(drafter, 2) == []


def test_compat_that_is_asked_twice():
    """The last place of all is found by looking through the tokens, and not in its slot."""
    drafter = started(NgramMap(2, 3, compat=True), [9], 9)
    drafter.observe([9, 1, 2, 3, 4, 5, 1], None)
    assert [propose(drafter, 2) for _ in range(2)] == [[3, 4, 5], []]


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_short_histories(mode: str, compat: bool):
    for n in (1, 2, 5):
        for length in range(2 * n + 9):
            assert len(propose(started(NgramMap(n, 8, mode=mode, compat=compat), [3] * length, 3), 3)) in (0, 8)
    assert propose(started(NgramMap(2, 50, mode=mode, compat=compat), [], 3), 3) == []
    late = started(NgramMap(2, 50, mode=mode, compat=compat), [], 3)  # a prompt far shorter than a match
    late.observe([1, 2, *range(10, 70), 1], None)
    assert propose(late, 2) == ([] if compat else list(range(10, 60)))


@pytest.mark.parametrize("mode", MODES)
def test_start_forgets(mode: str):
    drafter = NgramMap(2, 3, mode=mode)
    for _ in range(2):
        assert propose(started(drafter, [1, 2, 3], 4), 2) == []
        drafter.observe([4, 5, 1], None)
        assert propose(drafter, 2) == [3, 4, 5]
        drafter.settle(3, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[
            ({option: value}, rf"ngram_{option} is {value};")
            for option in ("n", "m", "min_hits")
            for value in (0, -1, 1025, 2.5)
        ],
        ({"mode": "v"}, "ngram_mode is 'v'; choose 'k' or 'k4v'"),
    ],
)
def test_bad_options(options: dict, said: str):
    with pytest.raises(OptionError, match=said):
        NgramMap(**options)


@pytest.mark.parametrize("mode", MODES)
def test_a_long_history_costs_no_more(mode: str):
    assert growth(lambda: NgramMap(mode=mode)) < 2


@pytest.mark.parametrize("mode", MODES)
def test_a_monotonous_history_costs_no_more(mode: str):
    """A key that was there 100,000 times: one look takes in RECENT of them."""
    drafter = started(NgramMap(mode=mode), [7] * 100_000, 7)
    assert propose(drafter, 7) == [7] * 48
    (key,) = drafter._rule._keys.values()
    assert key.hits == RECENT
    drafter.observe([7] * 5, None)
    assert propose(drafter, 7) == [7] * 48
    assert key.hits == RECENT + 5


def test_other_occurrences_of_long_text():
    """Among 50,000 uneven tokens, whatever is repeated is drafted as it went on."""
    tokens = text(50_000)
    drafter = started(NgramMap(), tokens, 0)
    for at in range(0, 49_000, 1000):
        drafter.observe(tokens[at : at + 11], None)
        assert propose(drafter, tokens[at + 11]) == tokens[at + 12 : at + 60]
