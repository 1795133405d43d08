"""The figures of a request: counts that agree with each other, and formulas that agree with the textbook."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from functools import cache, partial
from typing import Any

import pytest
from mlx import nn

from mlx_specdec import SamplingParams, SpecDecoder
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.rounds import Round
from mlx_specdec.stats import DrafterStats, Stats
from tests import zoo

VOCAB, TOKENS = 300, 40
PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(20)] * 2
PREDICTED = {
    "acceptance", "draft_length", "cost", "predicted_tokens", "measured_tokens", "predicted_speedup",
    "measured_speedup",
}  # fmt: skip


def made(
    drafter: str | None, drafted: int, accepted: int, seconds: tuple[float, float, float] = (0.0, 1.0, 0.0)
) -> Round:
    return Round([0] * (accepted + 1), [], drafter, drafted, accepted, *seconds)


def counted(*rounds: Round) -> Stats:
    """As a decoder counts them, all their tokens handed out."""
    stats = Stats("a,b")
    for emitted in rounds:
        stats.add(emitted)
        for place in range(len(emitted.tokens)):
            stats.emit(emitted.drafter if place < emitted.accepted else None)
    return stats


def test_counts_by_hand() -> None:
    stats = counted(
        made(None, 0, 0, (0.0, 0.5, 0.25)),
        made("a", 4, 2, (1.0, 2.0, 0.5)),
        made("b", 1, 1, (0.0, 1.0, 0.5)),
        made("a", 2, 2, (1.0, 2.0, 0.5)),
        made("a", 3, 0, (1.0, 2.0, 0.5)),
        made(None, 0, 0, (0.0, 0.5, 0.75)),
    )
    assert (stats.rounds, stats.drafted, stats.accepted, stats.tokens) == (6, 10, 5, 11)
    assert (stats.drafting, stats.verifying, stats.host) == (3.0, 8.0, 3.0)
    assert (stats.plain_rounds, stats.plain_seconds) == (2, 2.0)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_accepted_length == 11 / 6
    assert stats.drafters == {
        "a": DrafterStats(3, 9, 4, 10.5, reached=[3, 2, 1, 0], stood=[2, 2, 0, 0]),
        "b": DrafterStats(1, 1, 1, 1.5, reached=[1], stood=[1]),
    }
    assert stats.drafters["a"].by_position == [2 / 3, 1.0, 0.0]  # nothing got to the fourth place
    assert stats.as_dict()["by_position"] == {"a": [2 / 3, 1.0, 0.0], "b": [1.0]}


def test_tokens_that_are_not_handed_out_do_not_count_as_accepted() -> None:
    """Where the output ends in the middle of a round; what was verified is still what the drafter is judged by."""
    stats = Stats("a")
    stats.add(made("a", 4, 4))
    stats.emit("a")
    stats.emit("a")
    assert (stats.tokens, stats.accepted, stats.drafted) == (2, 2, 4)
    assert stats.drafters["a"].accepted == 2
    assert stats.drafters["a"].by_position == [1.0] * 4


def test_of_nothing() -> None:
    stats = Stats()
    assert (stats.acceptance_rate, stats.mean_accepted_length) == (0.0, 0.0)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()
    assert stats.as_dict()["predicted"] == stats.as_dict()["by_position"] == stats.as_dict()["drafters"] == {}
    assert str(stats) == "none, 0 rounds"


def test_a_copy_stays_as_it_is() -> None:
    stats = counted(made("a", 2, 1))
    copy, before = stats.copy(), stats.as_dict()
    for emitted in (made("a", 5, 5), made("b", 1, 0), made(None, 0, 0)):
        stats.add(emitted)
    stats.emit("a")
    assert copy.as_dict() == before != stats.as_dict()


# Leviathan's formulas


def test_predicted_by_hand() -> None:
    """10 rounds of 3 drafts, 9, 6 and 3 of which stand, at 2.5 times a plain round."""
    depths = [3] * 3 + [2] * 3 + [1] * 3 + [0]
    stats = counted(*(made("a", 3, depth, (0.5, 1.5, 0.5)) for depth in depths), *(made(None, 0, 0),) * 4)
    found = stats.predicted("a")
    assert found is not None
    assert found.keys() == PREDICTED
    a = 18 / (10 + 9 + 6)  # of 25 drafts that were reached
    tokens = 1 + a + a**2 + a**3
    assert found["acceptance"] == pytest.approx(a)
    assert found["draft_length"] == 3
    assert found["cost"] == pytest.approx(1.5 / 3)
    assert found["predicted_tokens"] == pytest.approx(tokens)
    assert found["measured_tokens"] == pytest.approx(1 + 18 / 10)
    assert found["predicted_speedup"] == pytest.approx(tokens / 2.5)
    assert found["measured_speedup"] == pytest.approx(2.8 / 2.5)


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
def test_predicted_where_all_or_none_stand(k: int, seconds: float) -> None:
    """There the formula is exact; drafting that seems to cost nothing, or less, is not taken to speed a round up."""
    for accepted in (0, k):
        found = counted(made("a", k, accepted, (0.0, seconds, 0.0)), made(None, 0, 0)).predicted("a")
        assert found is not None
        assert found["predicted_tokens"] == found["measured_tokens"] == accepted + 1
        assert found["predicted_speedup"] == pytest.approx((accepted + 1) / max(seconds, 1.0))
        assert found["measured_speedup"] == pytest.approx((accepted + 1) / seconds)


def test_nothing_is_predicted_without_plain_rounds() -> None:
    assert counted(made("a", 2, 1)).predicted("a") is None
    assert counted(made("a", 2, 1)).as_dict()["predicted"] == {"a": None}


# What a decoder counts


@cache
def model() -> nn.Module:
    return zoo.build("llama", vocab=VOCAB)


@cache
def draft() -> nn.Module:
    return zoo.draft_of("llama", noise=zoo.NOISE[1], vocab=VOCAB)


CHAIN = (partial(NgramSimple, 1, 8), "draft_model")
WAYS: dict[str, tuple[Any, bool, Any]] = {  # drafters, whether there is a draft model, num_draft_tokens
    "plain": (None, False, None),
    "draft_model": (None, True, 4),
    "self-chosen": (CHAIN, True, "auto"),
    "chain": (CHAIN, True, 4),
    "ngram": (CHAIN[:1], False, 8),
    "drafters that may not draft": (CHAIN, True, 0),
}


SAMPLED = {"temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("params", [{}, SAMPLED, {**SAMPLED, "acceptance": "block"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_figures_of_a_request_agree(way: str, params: dict[str, Any]) -> None:
    drafter, drafted, most = WAYS[way]
    with SpecDecoder(model(), zoo.tokenizer(VOCAB), drafter, draft_model=draft() if drafted else None) as decoder:
        responses = list(decoder.stream(PROMPT, SamplingParams(**params), max_tokens=TOKENS, num_draft_tokens=most))
    for response in responses:
        agree(response.stats)
    stats = responses[-1].stats
    assert stats.tokens == len(responses)
    assert stats.accepted == sum(r.from_draft for r in responses)
    assert all(getattr(stats, name) > 0 for name in ("verifying", "host"))
    if way in ("plain", "drafters that may not draft"):
        assert stats.drafter is None
        assert (stats.plain_rounds, stats.drafted, stats.drafters) == (stats.rounds, 0, {})
    if way in ("draft_model", "chain"):
        assert 0 < stats.accepted < stats.drafted
        assert stats.drafting > 0


def agree(stats: Stats) -> None:
    assert 0 <= stats.accepted <= stats.drafted
    assert stats.accepted <= stats.tokens <= stats.rounds + stats.accepted
    parts = list(stats.drafters.values())
    for name in ("drafted", "accepted"):
        assert sum(getattr(part, name) for part in parts) == getattr(stats, name)
    assert sum(part.rounds for part in parts) + stats.plain_rounds == stats.rounds
    seconds = sum(part.seconds for part in parts) + stats.plain_seconds
    assert seconds == pytest.approx(stats.drafting + stats.verifying + stats.host)
    assert stats.drafters.keys() <= set((stats.drafter or "").split(","))
    for part in parts:
        assert 0 < part.rounds <= part.drafted
        assert part.reached == sorted(part.reached, reverse=True)
        assert part.reached[0] == part.rounds
        assert all(later <= stood <= at for at, stood, later in zip(part.reached, part.stood, [*part.reached[1:], 0],
                                                                    strict=True))  # fmt: skip
        assert part.accepted <= sum(part.stood) <= part.drafted
        assert all(0 <= share <= 1 for share in part.by_position)
    said = stats.as_dict()
    assert json.loads(json.dumps(said)) == said
    assert said["acceptance_rate"] == stats.acceptance_rate
    assert said["mean_accepted_length"] == stats.mean_accepted_length
    assert said["drafters"].keys() == said["by_position"].keys() == said["predicted"].keys() == stats.drafters.keys()
    for name, found in said["predicted"].items():
        if stats.plain_rounds == 0:
            assert found is None
            continue
        assert found.keys() == PREDICTED
        assert 0 <= found["acceptance"] <= 1
        assert found["draft_length"] == stats.drafters[name].drafted / stats.drafters[name].rounds
        assert 1 <= found["predicted_tokens"] <= found["draft_length"] + 1
        assert found["cost"] >= 0
        assert found["measured_speedup"] > 0


def test_a_drafter_that_does_not_fit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Over requests, each too short to tell; and where the length is chosen, drafting stops costing time."""
    stranger = zoo.build("llama", seed=99, vocab=VOCAB)
    with SpecDecoder(model(), zoo.tokenizer(VOCAB), draft_model=stranger) as decoder:
        for _ in range(6):
            list(decoder.stream(PROMPT, max_tokens=8, num_draft_tokens=2))
        said = [record.message for record in caplog.records]
        assert len(said) == 1
        assert "drafts of draft_model" in said[0]
        list(decoder.stream(PROMPT, max_tokens=100))
        last = list(decoder.stream(PROMPT, max_tokens=100))[-1]
    assert last.stats.drafted < 20, "probes alone: 1.5 rounds and 1 % pay for so many that cost a fifth of a round"


def test_a_drafter_that_fits_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    with SpecDecoder(model(), zoo.tokenizer(VOCAB), draft_model=draft()) as decoder:
        list(decoder.stream(PROMPT, max_tokens=100, num_draft_tokens=3))
    assert not caplog.records
