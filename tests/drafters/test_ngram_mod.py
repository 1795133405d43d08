"""ngram_mod drafts what llama.cpp's ngram-mod drafts, and shares its table well."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from mlx_specdec.drafters.ngram_mod import MULTIPLIER, NgramMod, Table
from mlx_specdec.drafters.ngrams import hashes
from mlx_specdec.errors import OptionError

from .replay import PLENTY, golden, growth, propose, replay, started

GOLDEN = golden("ngram_mod")
COMPAT = pytest.mark.parametrize("compat", [False, True])


@COMPAT
@pytest.mark.parametrize("case", [case for case in GOLDEN["vectors"] if len(case["steps"]) > 1])
def test_vectors(case: dict, compat: bool):
    table = Table(case["size"])
    drafter = NgramMod()
    prompt, history, draft = case["steps"][0]["begin"], None, []
    for step in case["steps"][1:]:
        if "accept" in step:
            drafter.settle(len(draft), step["accept"])
            assert (table.used == 0) == step["reset"]
            continue
        if step["history"] != history:  # not what the one before became: another sequence
            history = step["history"]
            drafter = NgramMod(case["n"], case["n_min"], case["n_max"], table, compat)
            drafter.start([*prompt, history[len(prompt)]])
            drafter.observe(history, None)
        draft = propose(drafter, step["id_last"])
        assert len(draft) == step.get("draft_len", len(draft))
        assert draft == step.get("draft", draft)


@pytest.mark.parametrize("case", [case for case in GOLDEN["vectors"] if len(case["steps"]) == 1])
def test_a_prompt_that_overfills_the_table(case: dict):
    """llama.cpp empties the table of it; the default is to make room for it before."""
    (step,) = case["steps"]
    for compat, used in ((True, step["used_after"]), (False, 6)):
        table = Table(case["size"])
        drafter = started(NgramMod(case["n"], case["n_min"], case["n_max"], table, compat), step["begin"], 0)
        for _ in range(2):
            propose(drafter, 0)
            assert table.used == used
    drafter = started(NgramMod(case["n"], case["n_min"], case["n_max"], table), [21, 22, 23, 24], 0)
    propose(drafter, 0)
    assert table.used == 1


@COMPAT
@pytest.mark.parametrize("trace", GOLDEN["traces"])
def test_traces(trace: dict, compat: bool):
    drafter = NgramMod(trace["n"], trace["n_min"], trace["n_max"], Table(trace["size"]), compat)
    assert replay(drafter, trace) == [step["draft"] for step in trace["steps"]]


@pytest.mark.parametrize("case", GOLDEN["hashes"])
def test_slots(case: dict):
    h = hashes(np.array(case["index_of"], dtype=np.int32), len(case["index_of"]), MULTIPLIER)
    assert (h % np.uint64(case["size"])).tolist() == [case["index"]]


class Definition:
    """The rule, word for word."""

    def __init__(self, n: int, n_min: int, n_max: int, slots: list[int | None], compat: bool):
        self.n, self.n_min, self.n_max, self.slots, self.compat = n, n_min, n_max, slots, compat
        self.low = 0

    def slot(self, ngram: list[int]) -> int:
        h = 0
        for token in ngram:
            h = (h * 6364136223846793005 + token) % 2**64
        return h % len(self.slots)

    def empty(self) -> None:
        self.slots[:] = [None] * len(self.slots)

    def make_room(self) -> None:
        if len(self.slots) - self.slots.count(None) > len(self.slots) / 4:
            self.empty()

    def learn(self, history: list[int]) -> None:
        for i in range(self.learnt, len(history) - self.n):
            self.slots[self.slot(history[i : i + self.n])] = history[i + self.n]
        self.learnt = len(history) - self.n

    def begin(self, history: list[int]) -> None:
        self.learnt = 0
        if not self.compat:
            self.low = 0
            self.make_room()
        if len(history) >= self.n:
            self.learn(history)
        if self.compat:
            self.make_room()

    def propose(self, history: list[int], last: int) -> list[int]:
        self.found: list[int] = []
        if len(history) < self.n:
            return []
        if self.learnt + 32 < len(history):
            self.learn(history)
        window = [*history[len(history) - self.n + 1 :], last]
        while len(self.found) < self.n_max:
            token = self.slots[self.slot([*window, *self.found][-self.n :])]
            if token is None:
                break
            self.found.append(token)
        return self.found if len(self.found) >= self.n_min else []

    def settle(self, drafted: int, accepted: int) -> None:
        if accepted / (len(self.found) if self.compat else drafted) >= 0.25:
            self.low = 0
            return
        self.low += 1
        if self.low == 5:
            self.empty()
            self.low = self.learnt = 0


@COMPAT
def test_definition(compat: bool):
    """Sequences that share a small table, one after the other and at the same time."""
    random, drafts, emptied = Random(1), 0, 0
    for _ in range(40):
        n, n_min, size = random.randint(1, 4), random.randint(0, 3), random.choice([64, 256, 1024])
        table, slots = Table(size), [None] * size
        pairs = []
        for _ in range(2):
            options = n, n_min, random.randint(n_min, 8)
            pairs.append((NgramMod(*options, table, compat), Definition(*options, slots, compat)))
        for _ in range(3):
            histories, lasts = [], []
            for drafter, definition in pairs:
                history = [random.randrange(5) for _ in range(random.randint(0, 150))]
                started(drafter, history, 0)
                propose(drafter, 0)
                definition.begin(history)
                definition.propose(history, 0)
                histories.append(history)
                lasts.append(0)
            for _ in range(60):
                which = random.randrange(2)
                (drafter, definition), history, last = pairs[which], histories[which], lasts[which]
                limit = random.choice([0, 1, 4, PLENTY])
                want = definition.propose(history, last)
                draft = propose(drafter, last, limit)
                assert draft == want[:limit]
                accepted = draft[: random.choice([0, 0, random.randint(0, len(draft))])]
                if draft:
                    drafts += 1
                    emptied -= table.used == 0
                    drafter.settle(len(draft), len(accepted))
                    definition.settle(len(draft), len(accepted))
                    emptied += table.used == 0
                assert table.used == size - slots.count(None)
                drafter.observe([last, *accepted], None)
                history += [last, *accepted]
                lasts[which] = random.randrange(5)
    assert drafts > 1000
    assert emptied > 10


def test_sequences_share_what_they_learn():
    table = Table()
    prompt = list(range(100))
    assert propose(started(NgramMod(table=table), prompt, 5), 5) == []
    other = [7, 7, *range(10, 39)]
    assert propose(started(NgramMod(table=table), other, 39), 39) == list(range(40, 100))
    assert propose(started(NgramMod(), other, 39), 39) == []  # a table of its own


def test_a_draft_is_measured_by_what_was_asked_for():
    """With a limit of 4 of 64, llama.cpp's measure calls a draft low of which all stood."""
    for compat in (False, True):
        drafter = started(NgramMod(compat=compat), [*range(100), *range(30)], 30)
        for _ in range(5):
            assert propose(drafter, 30, 4) == [31, 32, 33, 34]
            drafter.settle(4, 4)
        assert (drafter.table.used == 0) == compat


def test_a_new_sequence_has_no_low_drafts():
    for compat in (False, True):
        drafter = NgramMod(compat=compat)
        for accepted in (0, 0, 0, 0, 15):
            started(drafter, [*range(100), *range(30)], 30)
            assert len(propose(drafter, 30)) == 64
            drafter.settle(64, accepted)
        assert (drafter.table.used == 0) == compat


@pytest.mark.parametrize("limit", [0, 1, 8, 48, 63, 64, 65])
def test_limit(limit: int):
    """It cuts the draft, and has no say in whether there is one."""
    drafter = started(NgramMod(), [*range(100), *range(30)], 30)
    assert propose(drafter, 30, limit) == list(range(31, 95))[:limit]


def test_start_forgets():
    """What the sequence was, not what the table learnt."""
    drafter = NgramMod(3, 0, 4)
    for prompt in (range(10, 20), range(20, 30), range(30, 40)):
        assert propose(started(drafter, prompt, 0), 0) == []
        drafter.observe([0, *prompt[:2]], None)
        assert propose(drafter, prompt[2]) == list(prompt[3:7])
    assert propose(started(drafter, [10, 11], 12), 12) == []  # too short


def test_threads():
    """Eight threads learn, draft and empty at once: no error, and the count of used slots stays right."""
    table = Table(4096)

    def work(seed: int) -> int:
        random, drafts = Random(seed), 0
        for _ in range(30):
            tokens = [random.randrange(50) for _ in range(60)]
            drafter = started(NgramMod(2, 0, 8, table), tokens, tokens[0])
            for at in range(40):
                draft = propose(drafter, tokens[at])
                drafts += bool(draft)
                assert all(0 <= token < 50 for token in draft)
                if draft:
                    drafter.settle(len(draft), 0 if at % 20 else len(draft))
                drafter.observe([tokens[at]], None)
        return drafts

    with ThreadPoolExecutor(8) as pool:
        assert min(pool.map(work, range(8))) > 0
    assert table.used == np.count_nonzero(table._next)


def test_the_table_is_16_mib():
    assert Table()._next.nbytes == 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[({"n_match": value}, rf"ngram_n_match is {value}; choose a whole number from 1") for value in (0, 1025, 2.5)],
        *[({"n_min": value}, rf"ngram_n_min is {value}; choose a whole number from 0") for value in (-1, 1025)],
        *[({"n_max": value}, rf"ngram_n_max is {value}; choose a whole number from 0") for value in (-1, 1025)],
        ({"n_max": 47}, "ngram_n_min is 48 and ngram_n_max is 47"),
    ],
)
def test_bad_options(options: dict, said: str):
    with pytest.raises(OptionError, match=said):
        NgramMod(**options)


def test_a_long_history_costs_no_more():
    """n_min is 0, as 100,000 n-grams overwrite each other now and then, and a draft that meets one ends early."""
    assert growth(lambda: NgramMod(n_min=0)) < 2
