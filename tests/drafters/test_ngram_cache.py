"""ngram_cache drafts what llama.cpp's ngram-cache drafts, and reads and writes its lookup files."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import struct
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from mlx_specdec.drafters.ngram_cache import Followers, Lookup, NgramCache, choose
from mlx_specdec.errors import CheckpointError, OptionError, PairingError

from .replay import PLENTY, golden, growth, propose, started, text

VECTORS = golden("ngram_cache")["vectors"]
CHUNKS = [case for case in VECTORS if len(case["steps"]) > 1]  # the only ones in which llama.cpp's chunks matter


def counted(*lists: list[int], shortest: int = 1, longest: int = 4) -> Lookup:
    lookup = Lookup()
    for tokens in lists:
        lookup.learn(tokens, len(tokens), shortest, longest)
    return lookup


def drafts(case: dict, compat: bool) -> list[list[int]]:
    drafter = NgramCache(
        case.get("n_draft", 8),
        static=counted(case.get("static_2gram_from", []), shortest=2, longest=2),
        dynamic=counted(*case.get("dynamic_from", [])),
        compat=compat,
    )
    steps = case["steps"]
    drafter.start([*steps[0]["history"], steps[0]["id_last"]])
    found, known = [], 0
    for step in steps:
        drafter.observe(step["history"][known:], None)
        known = len(step["history"])
        found.append(propose(drafter, step["id_last"])[: case.get("assert_prefix")])
    return found


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("case", VECTORS)
def test_vectors(case: dict, compat: bool):
    if compat or case not in CHUNKS:
        assert drafts(case, compat) == [step["draft"][: case.get("assert_prefix")] for step in case["steps"]]


def test_every_token_teaches():
    """Token by token, the default learns what it learns from all of them at once."""
    (case,) = CHUNKS
    assert drafts(case, compat=False) == [[], [], [], [4, 5, 1, 2, 3, 4, 5, 1]]
    tokens, at_once, drafter = text(500), NgramCache(), NgramCache()
    propose(started(at_once, tokens[:-1], tokens[-1]), tokens[-1])
    drafter.start(tokens)
    for at in range(499):
        if at % 3:
            propose(drafter, tokens[at])
        drafter.observe(tokens[at : at + 1], None)
    propose(drafter, tokens[-1])
    assert content(drafter.context) == content(at_once.context) == content(counted(tokens))


def content(lookup: Lookup) -> dict[bytes, dict[int, int]]:
    for _, followers in lookup:
        most = max(followers.counts.values())
        assert followers.total == sum(followers.counts.values())
        assert (followers.most, followers.best) == (most, min(t for t, c in followers.counts.items() if c == most))
    return {ngram: followers.counts for ngram, followers in lookup}


LAX, STRICT = {1: (2, 66), 2: (2, 50), 3: (1, 50), 4: (1, 50)}, {1: (4, 75), 2: (3, 66), 3: (2, 66), 4: (2, 66)}


def definition(history: list[int], static: list[int], dynamic: list[int], n_draft: int) -> list[int]:
    """The rule, word for word; `history` ends with the last token."""

    def following(tokens: list[int], ngram: list[int]) -> Counter:
        n = len(ngram)
        return Counter(tokens[i] for i in range(n, len(tokens)) if tokens[i - n : i] == ngram)

    def enough(counts: Counter, token: int, threshold: tuple[int, int]) -> bool:
        return counts.total() >= threshold[0] and 100 * counts[token] >= threshold[1] * counts.total()

    def following_token(tokens: list[int]) -> int | None:
        corpus = following(static, tokens[-2:])
        for source, thresholds in ((history, LAX), (dynamic, STRICT)):
            for n in range(min(4, len(tokens)), 0, -1):
                counts = following(source, tokens[-n:])
                weights = {t: c * (100 * corpus[t] if t in corpus else 1) for t, c in counts.items()}
                if weights:
                    token = min(weights, key=lambda t: (-weights[t], t))
                    if enough(counts, token, thresholds[n]):
                        return token
        if corpus:
            token = min(corpus, key=lambda t: (-corpus[t], t))
            if enough(corpus, token, LAX[2]):
                return token
        return None

    draft: list[int] = []
    while len(history) > 1 and len(draft) < n_draft:
        token = following_token([*history, *draft])
        if token is None:
            break
        draft.append(token)
    return draft


def test_definition():
    random, lengths = Random(0), Counter()
    for _ in range(300):
        size = random.choice([2, 3, 6, 12])
        history, static, dynamic = (
            [random.randrange(size) for _ in range(random.choice([0, 3, 20, 60]))] for _ in range(3)
        )
        n_draft = random.choice([1, 3, 8])
        lookups = counted(static, shortest=2, longest=2), counted(dynamic)
        drafter = NgramCache(n_draft, *lookups)
        drafter.start([*history, 0])
        known = 0
        for _ in range(5):
            last = random.randrange(size)
            drafter.observe(history[known:], None)
            want = definition([*history, last], static, dynamic, n_draft)
            limit = random.choice([0, 2, PLENTY])
            assert propose(drafter, last, limit) == want[:limit]
            lengths[len(want)] += 1
            known = len(history)
            history += [last, *(random.randrange(size) for _ in range(random.randint(0, 3)))]
    assert all(lengths[length] > 200 for length in (0, 1, 3, 8))


def test_of_equals_the_lowest():
    for a, b in ((3, 5), (5, 3)):
        drafter = NgramCache(1)
        assert propose(started(drafter, [1, 2, a, 1, 2, b, 8, 9, 1], 2), 2) == [3]
        static = counted([1, 2, a, 1, 2, b], shortest=2, longest=2)
        assert propose(started(NgramCache(1, static), [8, 1], 2), 2) == [3]
        assert propose(started(NgramCache(1, static), [1, 2, a, 1, 2, b, 8, 9, 1], 2), 2) == [3]


def test_a_static_count_weighs_a_hundred_times():
    static = Followers(4, 1)
    for count, want in ((99, (4, 1)), (100, (3, 100)), (101, (3, 101))):
        followers = Followers(4, 1)
        followers.add(3, count)
        assert choose(followers, static) == want
        assert choose(followers, None) == choose(followers, Followers(5, 1)) == (3, count)


def test_start_forgets():
    drafter = NgramCache()
    for _ in range(2):
        assert propose(started(drafter, [1, 2, 3, 4], 5), 5) == []
        drafter.observe([5, 1, 2], None)
        assert propose(drafter, 3) == [4, 5, 1, 2, 3, 4, 5, 1]
    drafter = NgramCache(compat=True)
    propose(started(drafter, [1, 2, 3, 4], 5), 5)
    assert propose(started(drafter, [1, 2], 3), 3) == [4, 5]


def test_shared_lookups_are_only_read():
    static, dynamic = counted([1, 2, 3], shortest=2, longest=2), Lookup()
    before = content(static)
    drafter = started(NgramCache(static=static, dynamic=dynamic), [1, 2, 3, 4, 1, 2], 3)
    propose(drafter, 3)
    assert content(static) == before
    assert content(dynamic) == {}
    for _ in range(3):
        dynamic.merge(drafter.context)
    other = started(NgramCache(dynamic=dynamic), [2], 3)
    assert propose(other, 3)[:1] == [4]


def test_merge_adds_counts():
    random = Random(0)
    a, b = ([random.randrange(3) for _ in range(50)] for _ in range(2))
    both = counted(a)
    both.merge(counted(b))
    assert content(both) == content(counted(a, b))


def record(ngram: list[int], *followers: tuple[int, int]) -> bytes:
    padded = ngram + [-1] * (4 - len(ngram))
    return struct.pack("<5i", *padded, len(followers)) + b"".join(struct.pack("<2i", *f) for f in followers)


def test_file_format(tmp_path: Path):
    path = tmp_path / "lookup"
    counted([1, 2, 3, 1, 2, 4]).save(path)
    assert sorted(path.read_bytes()[i : i + 4] for i in range(0, path.stat().st_size, 4)) == sorted(
        number
        for ngram in (
            record([1], (2, 2)),
            record([2], (3, 1), (4, 1)),
            record([3], (1, 1)),
            record([1, 2], (3, 1), (4, 1)),
            record([2, 3], (1, 1)),
            record([3, 1], (2, 1)),
            record([1, 2, 3], (1, 1)),
            record([2, 3, 1], (2, 1)),
            record([3, 1, 2], (4, 1)),
            record([1, 2, 3, 1], (2, 1)),
            record([2, 3, 1, 2], (4, 1)),
        )
        for number in (ngram[i : i + 4] for i in range(0, len(ngram), 4))
    )
    assert record([1, 2], (3, 1), (4, 1)) in path.read_bytes()


def test_a_file_comes_back(tmp_path: Path):
    lookup = counted(text(2000))
    lookup.save(tmp_path / "a")
    again = Lookup.load(tmp_path / "a")
    assert content(again) == content(lookup)
    again.save(str(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    Lookup().save(tmp_path / "a")
    assert len(Lookup.load(tmp_path / "a")) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_repeated_records_add_up(tmp_path: Path):
    (tmp_path / "lookup").write_bytes(record([1, 2], (3, 1)) + record([1, 2], (3, 4), (5, 2**31 - 1)))
    lookup = Lookup.load(tmp_path / "lookup")
    assert content(lookup) == {struct.pack("<2i", 1, 2): {3: 5, 5: 2**31 - 1}}
    lookup.merge(lookup)
    lookup.save(tmp_path / "lookup")
    assert list(content(Lookup.load(tmp_path / "lookup")).values()) == [{3: 10, 5: 2**31 - 1}]


WHOLE = record([1, 2], (3, 1), (4, 2))


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        *[(WHOLE + WHOLE[:cut], r"damaged at byte 36: it ends within") for cut in range(1, len(WHOLE))],
        (record([], (3, 1)), r"at byte 0: \[-1, -1, -1, -1\] is no n-gram"),
        (WHOLE + record([1, -2], (3, 1)), r"at byte 36: \[1, -2, -1, -1\] is no n-gram"),
        (record([1, -1, 2], (3, 1)), r"\[1, -1, 2, -1\] is no n-gram"),
        (record([1]), "has 0 followers"),
        (struct.pack("<5i", 1, -1, -1, -1, -7), "has -7 followers"),
        (record([1], (3, 0)), "token 3 follows .* 0 times"),
        (record([1], (-3, 1)), "token -3 follows .* 1 times"),
    ],
)
def test_damaged_files(tmp_path: Path, damaged: bytes, said: str):
    path = tmp_path / "lookup.bin"
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=said) as raised:
        Lookup.load(path)
    assert str(path) in str(raised.value)


def test_a_file_of_another_vocabulary(tmp_path: Path):
    path = tmp_path / "lookup"
    path.write_bytes(record([9, 2], (3, 1), (4, 2)))
    lookup = Lookup.load(path)
    lookup.check(5, path)
    with pytest.raises(PairingError, match=f"{path} was made for another model: it has token 4,"):
        lookup.check(4, path)


def test_files_that_cannot_be(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match=f"cannot read the lookup file {path} "):
            Lookup.load(path)
    for path in (tmp_path / "none" / "lookup", tmp_path):
        with pytest.raises(CheckpointError, match=f"cannot write the lookup file {path} "):
            counted([1, 2]).save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lookup"
    counted([1, 2]).save(path)
    old = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        counted([1, 2, 3]).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [0, -1, 1025, 2.5])
def test_bad_options(value: int):
    with pytest.raises(OptionError, match=rf"ngram_n_draft is {value};"):
        NgramCache(value)


def test_a_long_history_costs_no_more():
    assert growth(NgramCache) < 2


def test_many_followers_cost_no_more():
    """A token that 50,000 others followed, with and without a static lookup that knows some of them."""
    history = [token for other in range(1, 50_001) for token in (0, other)]
    static = counted([7, 0, 5, 7, 0, 6], shortest=2, longest=2)
    drafter = started(NgramCache(static=static), history, 7)
    propose(drafter, 7)
    followers = drafter.context.get(struct.pack("<i", 0))
    assert followers is not None
    followers.counts = OnlyAsked(followers.counts)
    drafter.observe([7, 60_000], None)
    propose(drafter, 0)


class OnlyAsked(dict):
    """Counts that must not be gone through one by one."""

    def __iter__(self):
        raise AssertionError("every follower is looked at")

    items = values = __iter__
