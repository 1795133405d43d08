"""suffix counts, scores and chooses as the definition says; its memory keeps what it should and no more."""

import mlx_specdec  # noqa: F401  # isort: skip  # before mlx.core

import struct
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.drafters import by_name
from mlx_specdec.drafters.suffix import Suffix, SuffixMemory
from mlx_specdec.drafters.suffix_tree import Rule, SuffixTree
from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.sampling import Sampler, SamplingParams

ANY = Sampler(SamplingParams(), [0])  # what this drafter proposes does not depend on how tokens are chosen


def propose(drafter: Suffix, last: int, limit: int = 24) -> list[int]:
    draft = drafter.propose(last, limit, ANY)
    assert draft.probs is None
    assert (draft.confidence is None) == (draft.tokens.size == 0)
    assert all(0 < chance <= 1 for chance in draft.confidence or ())
    assert len(draft.confidence or ()) == draft.tokens.size
    assert draft.tokens.dtype == mx.int32
    return draft.tokens.tolist()


def after(history: Sequence[int], last: int, limit: int = 24, depth: int = 24, **options: float) -> list[int]:
    drafter = Suffix(SuffixMemory(max_tree_depth=depth), **options)
    drafter.start([*history, last])
    drafter.observe(history, None)
    return propose(drafter, last, limit)


def enumerate_strings(texts: Sequence[Sequence[int]], depth: int) -> dict[tuple, tuple[int, int]]:
    """Each string of up to `depth` tokens: how often it occurs, and when it began last."""
    seen: dict[tuple, tuple[int, int]] = {}
    now = 0
    for text in texts:
        for start in range(len(text)):
            now += 1
            for stop in range(start + 1, min(start + depth, len(text)) + 1):
                string = tuple(text[start:stop])
                seen[string] = (seen.get(string, (0, 0))[0] + 1, now)
    return seen


def definition(texts: Sequence[Sequence[int]], depth: int, context: list[int], limit: int, rule: Rule) -> tuple:
    """The rule, word for word."""
    seen = enumerate_strings(texts, depth)
    children: dict[tuple, list[tuple]] = {}
    for string in seen:
        children.setdefault(string[:-1], []).append(string)
    best: tuple[list[int], float, list[float], int] = ([], 0.0, [], 0)
    for matched in range(1, len(context)):
        string = tuple(context[-matched:])
        if string not in seen:
            break
        most = min(limit, int(matched * rule.max_spec_factor + rule.max_spec_offset + 1e-6))
        tokens, chances, score, prob = [], [], 0.0, 1.0
        while len(tokens) < most and string in children:
            child = max(children[string], key=seen.__getitem__)
            chance = seen[child][0] / seen[string][0]
            prob *= chance
            if prob < rule.min_token_prob:
                break
            tokens.append(child[-1])
            chances.append(chance)
            score += prob
            string = child
        if score >= best[1]:
            best = tokens, score, chances, matched
    return best


def some_text(random: Random, alphabet: int, length: int) -> list[int]:
    """Half of it repeats something, so that long strings match."""
    text: list[int] = []
    while len(text) < length:
        if text and random.random() < 0.5:
            start = random.randrange(len(text))
            text += text[start : start + random.randint(1, 30)]
        else:
            text += [random.randrange(alphabet) for _ in range(random.randint(1, 8))]
    return text[:length]


def random_rule(random: Random) -> Rule:
    return Rule(
        random.choice([0.5, 1.0, 2.0]), random.choice([0.0, 1.0, 3.0, -0.5]), random.choice([0.0, 0.1, 0.4, 1.0])
    )


def test_a_longer_match_drafts_more():
    history = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert after([*history], 1) == [2]
    assert after([*history, 1], 2) == [3, 4]
    assert after([*history, 1, 2], 3) == [4, 5, 6]
    assert after([*history, 1, 2], 9) == [1]  # 2, 9 never occurred
    assert after(history, 10) == []


def test_the_most_frequent_token_follows():
    assert after([1, 2, 1, 3, 1, 3, 1, 2, 1, 2, 0], 1) == [2]
    assert after([1, 2, 1, 3, 1, 3, 1, 2, 1, 3, 0], 1) == [3]


def test_of_equals_the_one_seen_last_follows():
    assert after([1, 2, 1, 3, 0], 1) == [3]
    assert after([1, 3, 1, 2, 0], 1) == [2]
    assert after([1, 3, 1, 2, *[0] * 40], 1) == [2]  # the same where the tree knows and not the last tokens


@pytest.mark.parametrize("filler", [0, 40])
def test_probabilities_and_score(filler: int):
    """After 1 comes 2 in 3 of 4 places, then 5 in 2 of 3; in the tree and in the text that is not there yet."""
    drafter = Suffix(max_spec_offset=2)
    drafter.start([])
    drafter.observe([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 7, *range(100, 100 + filler)], None)
    context = array("i", [*drafter._tree.text[-23:], 1])
    for floor, tokens, score in [
        (0.1, [2, 5, 1], 3 / 4 + 1 / 2 + 1 / 2),  # both 5 are followed by 1
        (0.5, [2, 5, 1], 3 / 4 + 1 / 2 + 1 / 2),
        (0.51, [2], 3 / 4),
        (0.76, [], 0),
    ]:
        guess = drafter._tree.guess(context, 24, Rule(1.0, 2.0, floor), recent=True)
        assert guess.tokens == tokens
        assert guess.score == pytest.approx(score)
        assert guess.chances == pytest.approx([3 / 4, 2 / 3, 1][: len(tokens)])
    confidence = drafter.propose(1, 24, ANY).confidence
    assert confidence == pytest.approx((3 / 4 * 1 / 3, 2 / 3 * 2 / 4, 1 * 3 / 5)), "less after shorter strings"


def test_the_best_score_chooses_the_match():
    # After 8 always 9: 1 token is sure. After 7, 8 (once each 9, 5 and 9, 6): 9 and then one of two, 1.5 tokens.
    assert after([7, 8, 9, 5, 7, 8, 9, 6, 7], 8) == [9, 6]
    # One token: a match of 2 gives it 1/2, one of 1 gives it 9/11. Two tokens: the longer match expects 1 in all.
    history = [7, 8, 1, 7, 8, 2, *[8, 3] * 9, 7]
    assert after(history, 8, limit=1) == [3]
    assert after(history, 8) == [2, 8]


def test_of_equal_scores_the_longer_match_is_taken():
    # limit 1: a match of 1 says 3 with certainty 1/2 (2 of 4), one of 2 says 4 with 1/2.
    history = [2, 3, 2, 3, 1, 2, 4, 1, 2, 5, 1]
    assert after(history, 2, limit=1) == [5]


def test_depth_bounds_match_and_draft_together():
    for depth in (2, 3, 8, 24, 31):
        assert after([*range(100), *range(49)], 49, depth=depth) == list(range(50, 50 + depth // 2))
    assert Suffix().max_draft == 12
    assert Suffix(max_spec_factor=3).max_draft == 18
    assert Suffix(max_spec_offset=5).max_draft == 14


@pytest.mark.parametrize("limit", range(6))
def test_limit(limit: int):
    assert after([*range(10), *range(4)], 4, limit=limit) == [5, 6, 7, 8, 9][:limit]


def test_random_texts():
    random, drafts = Random(0), 0
    for _ in range(400):
        depth, alphabet = random.choice([2, 3, 5, 8, 24]), random.choice([1, 2, 3, 5, 9])
        text, limit, rule = (
            some_text(random, alphabet, random.randrange(70)),
            random.choice([1, 3, 24]),
            random_rule(random),
        )
        drafter = Suffix(SuffixMemory(max_tree_depth=depth))
        drafter.start([0])
        known = 0
        while known < len(text):  # in pieces of many sizes
            piece = text[known : known + random.choice([0, 1, 2, 30])]
            drafter.observe(piece, None)
            known += len(piece)
        for _ in range(3):  # and proposing changes nothing
            context = [*text, random.randrange(alphabet)][-depth:]
            guess = drafter._tree.guess(array("i", context), limit, rule, recent=True)
            assert guess == definition([text], depth, context, limit, rule)
            assert sum(accumulate(guess.chances, mul)) == pytest.approx(guess.score)
            assert len(guess.chances) == len(guess.tokens)
            drafts += bool(guess.tokens)
    assert drafts > 500


def canonical(tree: SuffixTree) -> dict[tuple, tuple[int, int]]:
    """Each node's string with its count and the length of its label, by way of the edges."""
    nodes = {}
    waiting = [(0, ())]
    while waiting:
        node, string = waiting.pop()
        for key, child in tree.edges.items():
            if key >> 32 == node:
                label = tree.text[tree.starts[child] : tree.starts[child] + tree.lengths[child]]
                nodes[(*string, *label)] = tree.counts[child], tree.lengths[child]
                waiting.append((child, (*string, *label)))
    return nodes


def test_random_memories():
    """With outputs coming and going the tree is that of the kept outputs alone, to the node."""
    random, drafts = Random(1), 0
    for _ in range(120):
        depth, alphabet = random.choice([2, 3, 5, 8, 24]), random.choice([1, 2, 3, 5])
        most, room = random.randint(1, 4), random.randint(1, 120)
        memory = SuffixMemory(max_tree_depth=depth, max_cached_requests=most, max_cached_tokens=room)
        kept: list[list[int]] = []
        for _ in range(random.randint(1, 8)):
            output = some_text(random, alphabet, random.randrange(60))
            memory.add(output)
            kept = [*kept, output[-room:]][-most if output else None :] if output else kept
            while sum(map(len, kept)) > room:
                kept.pop(0)
            assert (memory.requests, memory.tokens) == (len(kept), sum(map(len, kept)))
            assert memory._tree.nodes <= 2 * memory.tokens
            context, rule = [random.randrange(alphabet) for _ in range(depth)], random_rule(random)
            guess = memory.guess(array("i", context), 24, rule)
            assert guess == definition(kept, depth, context, 24, rule)
            assert sum(accumulate(guess.chances, mul)) == pytest.approx(guess.score)
            drafts += bool(guess.tokens)
        fresh = SuffixMemory(max_tree_depth=depth)
        for output in kept:
            fresh.add(output)
        assert canonical(memory._tree) == canonical(fresh._tree)
    assert drafts > 200


def test_nodes_of_what_has_gone_are_used_again():
    random, memory = Random(2), SuffixMemory(max_cached_requests=3)
    for _ in range(300):
        memory.add([random.randrange(50) for _ in range(100)])
    assert memory.requests == 3
    assert memory.tokens == 300
    assert len(memory._tree.text) <= 700
    assert len(memory._tree.counts) <= 2 * 400  # and not 300 outputs' worth


def test_an_output_that_is_too_long_keeps_its_end():
    memory = SuffixMemory(max_cached_tokens=5)
    memory.add(range(20))
    assert (memory.requests, memory.tokens) == (1, 5)
    assert memory.guess(array("i", [15, 16]), 9, Rule()).tokens == [17]
    assert memory.guess(array("i", [3, 4]), 9, Rule()).tokens == []


@pytest.mark.parametrize("options", [{"max_cached_requests": 0}, {"max_cached_tokens": 0}])
def test_a_memory_of_nothing(options: dict[str, int]):
    memory = SuffixMemory(**options)
    memory.add([1, 2, 3])
    assert (memory.requests, memory.tokens) == (0, 0)


def test_outputs_and_not_prompts_go_to_the_memory():
    drafter = Suffix()
    drafter.start([1, 2, 3])
    drafter.observe([1, 2], None)
    assert propose(drafter, 3) == []
    drafter.observe([3], None)
    drafter.observe([4, 5], None)
    drafter.observe([6], None)
    drafter.start([1, 2, 9, 4])  # the request is over
    drafter.observe([1, 2, 9], None)
    assert propose(drafter, 4) == [5]
    assert propose(drafter, 5) == [6]
    assert propose(drafter, 2) == [9]  # its own
    assert propose(drafter, 3) == []
    assert (drafter.memory.requests, drafter.memory.tokens) == (1, 3)


def test_closing_hands_over_once():
    drafter = Suffix()
    drafter.close()  # nothing was begun
    drafter.start([1])
    drafter.close()  # nothing came
    assert drafter.memory.requests == 0
    drafter.start([1])
    drafter.observe([1, 2, 3], None)
    drafter.close()
    drafter.close()
    drafter.start([5])
    assert (drafter.memory.requests, drafter.memory.tokens) == (1, 2)


def test_drafters_share_a_memory():
    memory = SuffixMemory()
    one, two = Suffix(memory), Suffix(memory)
    one.start([1])
    two.start([2, 3])
    two.observe([2], None)
    one.observe([1, 7, 8], None)
    assert propose(two, 7) == []
    one.close()
    assert propose(two, 7) == [8]
    other = Suffix()
    other.start([2, 3])
    other.observe([2], None)
    assert propose(other, 7) == []


def test_the_better_of_own_and_earlier_is_drafted():
    memory = SuffixMemory()
    memory.add([8, 7, 1, 2, 3, 4, 5])
    drafter = Suffix(memory)
    drafter.start([])
    drafter.observe([2, 9, 0, 8, 7, 1], None)
    assert propose(drafter, 2) == [3, 4, 5]  # a match of 4 against one of 1
    assert drafter.propose(2, 24, ANY).confidence == pytest.approx((4 / 10, 5 / 11, 6 / 12)), "less than of its own"
    drafter.observe([2, 9, 0, 5, 7, 1], None)
    assert propose(drafter, 2) == [9, 0, 5]  # 3 against 3
    drafter.observe([2, 9, 0, 5, 8, 7, 1], None)
    assert propose(drafter, 2) == [9, 0, 5, 7]  # 4 against 4, and its own is believed more


def test_memory_persists(tmp_path: Path):
    random, memory, path = Random(3), SuffixMemory(max_cached_requests=5), tmp_path / "memory"
    for length in (4, 30, 20, 1, 50, 60, 7):
        memory.add(some_text(random, 4, length))
    memory.save(path)
    memory.save(path)  # over itself
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    again = SuffixMemory(max_cached_requests=5)
    again.load(path)
    assert (again.requests, again.tokens) == (5, 138)
    assert canonical(again._tree) == canonical(memory._tree)
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    small = SuffixMemory(max_cached_requests=2)
    small.load(path)
    assert (small.requests, small.tokens) == (2, 67)
    assert path.read_bytes()[:16] == b"specdec suffix 1"
    assert struct.unpack_from("<6i", path.read_bytes(), 20) == (5, 20, 1, 50, 60, 7)


def test_an_empty_memory_persists(tmp_path: Path):
    SuffixMemory().save(tmp_path / "memory")
    memory = SuffixMemory()
    memory.load(tmp_path / "memory")
    assert memory.requests == 0


def test_a_damaged_file_is_refused(tmp_path: Path):
    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.add([1, 2, 3])
    memory.add([4])
    memory.save(path)
    whole = path.read_bytes()
    changed = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole))]
    for data in [*changed, *(whole[:size] for size in range(len(whole))), whole + bytes(4), whole[:16] + bytes(4)]:
        path.write_bytes(data)
        fresh = SuffixMemory()
        with pytest.raises(CheckpointError, match=r"memory .*/memory is damaged"):
            fresh.load(path)
        assert fresh.requests == 0


def test_files_that_cannot_be(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"cannot read the suffix memory .*/none \(No such file"):
        SuffixMemory().load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot write the suffix memory .*/none/memory \(No such file"):
        SuffixMemory().save(tmp_path / "none" / "memory")


@pytest.mark.parametrize("put", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(put: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    memory, path = SuffixMemory(), tmp_path / "memory"
    memory.save(path)
    old = path.read_bytes()
    memory.add([1, 2])
    monkeypatch.setattr(f"mlx_specdec.files.os.{put}", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        memory.save(path)
    assert path.read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1


def test_threads(tmp_path: Path):
    """Several requests at once: nothing fails, and in the end the tree is that of the kept outputs."""
    memory, failures = SuffixMemory(max_cached_requests=6), []

    def work(seed: int) -> None:
        random, drafter = Random(seed), Suffix(memory)
        try:
            for _ in range(12):
                text = some_text(random, 5, 60)
                drafter.start(text[:10])
                for place in range(0, 60, 5):
                    drafter.observe(text[place : place + 5], None)
                    assert len(propose(drafter, random.randrange(5))) <= 12
                drafter.close()
                memory.save(tmp_path / "memory")
        except BaseException as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert (memory.requests, memory.tokens) == (6, 300)
    again = SuffixMemory()
    again.load(tmp_path / "memory")
    memory.save(tmp_path / "last")
    again.load(tmp_path / "last")
    fresh = SuffixMemory()
    fresh.load(tmp_path / "last")
    assert canonical(fresh._tree) == canonical(memory._tree)


@pytest.mark.parametrize("use", ["add", "guess", "save"])
def test_one_thread_at_a_time(use: str, tmp_path: Path):
    memory = SuffixMemory()
    arguments: dict[str, tuple] = {
        "add": ([1, 2],),
        "guess": (array("i", [1, 2]), 1, Rule()),
        "save": (tmp_path / "m",),
    }
    thread = threading.Thread(target=getattr(memory, use), args=arguments[use])
    with memory._lock:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_the_same_calls_give_the_same_drafts():
    text, drafts = some_text(Random(4), 6, 3000), []
    for size in (1, 7, 3000):  # however the text comes
        drafter = Suffix()
        for _ in range(2):
            drafter.start(text[:100])
            for place in range(0, len(text), size):
                drafter.observe(text[place : place + size], None)
        drafts.append([propose(drafter, last) for last in text[:50]])
    assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("make", [Suffix, by_name("suffix")[0]], ids=["vLLM's options", "ours"])
def test_proposing_does_not_grow_with_the_text(make: Any):
    text = some_text(Random(5), 3000, 100_000)
    drafters = {1000: make(), 100_000: make()}
    took: dict[int, list[float]] = {1000: [], 100_000: []}
    for size, drafter in drafters.items():
        drafter.start(text[:size])
        drafter.observe(text[:size], None)
    for last in text[:300]:
        for size, drafter in drafters.items():  # in turn, for the machine is not as fast all the time
            began = time.perf_counter()
            drafter.propose(last, 24, ANY)
            took[size].append(time.perf_counter() - began)
    assert median(took[100_000]) < 2 * median(took[1000])


@pytest.mark.parametrize(("alphabet", "length"), [(1, 20_000), (2, 20_000), (50_000, 20_000)])
def test_a_token_costs_two_nodes_at_most(alphabet: int, length: int):
    text = some_text(Random(6), alphabet, length)
    drafter = Suffix()
    drafter.start(text)
    began = time.perf_counter()
    drafter.observe(text, None)
    assert time.perf_counter() - began < 4  # about 0.1
    assert drafter._tree.nodes <= 2 * length
    drafter.start([])
    assert drafter._tree.nodes == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_spec_factor", -1.0),
        ("max_spec_factor", float("nan")),
        ("max_spec_factor", float("inf")),
        ("max_spec_factor", 0.0),
        ("max_spec_offset", float("nan")),
        ("max_spec_offset", -23.0),
        ("min_token_prob", -0.1),
        ("min_token_prob", 1.1),
        ("min_token_prob", float("nan")),
    ],
)
def test_drafter_options_out_of_range(option: str, value: float):
    with pytest.raises(OptionError, match=rf"{option} is {value}\b"):
        Suffix(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tree_depth", 1),
        ("max_tree_depth", 256),
        ("max_tree_depth", 2.5),
        ("max_cached_requests", -1),
        ("max_cached_tokens", -1),
        ("max_cached_tokens", 2**27 + 1),
    ],
)
def test_memory_options_out_of_range(option: str, value: Any):
    with pytest.raises(OptionError, match=rf"{option} is {value}\b"):
        SuffixMemory(**{option: value})


def test_options_at_the_ends():
    for options in ({"max_spec_factor": 1e308}, {"max_spec_offset": 1e308}, {"min_token_prob": 1.0}):
        assert after([1, 2, 3, 1], 2, **options)[:1] == [3]
    for depth in (2, 255):
        assert after([1, 2, 3, 1], 2, depth=depth)[:1] == [3]
    assert after([1, 2, 3, 1], 2, depth=2, min_token_prob=0.0) == [3]
