"""How many tokens are worth drafting now: measured costs x measured acceptance, plain decoding included.

A round with k drafts gives 1 + a1 + a1 a2 + ... tokens, a_i the chance that draft i stands when those before it did
(with one a for all: (1 - a^(k+1)) / (1 - a), Leviathan 2023), and takes a verify pass over k + 1 rows and the drafting
of k tokens. The k with the most tokens per second is chosen, 0 included. What a pass costs by its rows and a draft by
its length is learned while running, since it is the same on no two machines; so are the chances, by drafter.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from .drafters.base import Draft, Drafter


class Outcome(NamedTuple):
    """One round: who drafted (None: nobody), what, how much of it stood, and the seconds that the round took."""

    drafter: Drafter | None
    draft: Draft
    accepted: int
    seconds: float


class DraftLength(Protocol):
    """What the round loop asks."""

    def limit(self, drafter: Drafter) -> int:
        """How many tokens `drafter` should propose now; 0 passes it over."""

    def cut(self, drafter: Drafter, draft: Draft) -> int:
        """How many of the tokens that it proposed are worth verifying."""

    def look_ahead(self) -> bool:
        """Whether, when nothing was drafted, the next pass should start before this one's token was looked at."""

    def record(self, outcome: Outcome) -> None:
        """What a round cost and gave."""

    def state(self) -> dict[str, Any]:
        """What it knows and does now, for the stats."""


class Fixed:
    """At most `k` drafts in every round; 0 is plain decoding."""

    def __init__(self, k: int):
        self.k = k

    def limit(self, drafter: Drafter) -> int:
        return self.k

    def cut(self, drafter: Drafter, draft: Draft) -> int:
        return len(draft.tokens)

    def look_ahead(self) -> bool:
        return self.k == 0

    def record(self, outcome: Outcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.k}


class Measured:
    """What streams of one decoder measured, shared by them: costs, chances, and the two accounts of `Auto`."""

    def __init__(self) -> None:
        self.costs: dict[str, Costs] = {}  # of a round by its rows; free drafters share one curve
        self.chances: dict[str, Chances] = {}
        self.plain = Costs()
        self.lost = 0.0  # seconds against plain decoding, negative where drafting won
        self.probed = 0.0  # seconds against the pace
        self.total = 0.0
        self.pace = 0.0  # seconds of a token, of late


class Auto:
    """Chooses by measurement, and never loses much by it. One for each stream.

    Two accounts are kept from the first round on, each of which may bear `START` plain rounds and `SHARE` of all the
    time so far: what drafting lost against plain decoding, and what probes lost against the pace of the time. A probe
    is one token of a drafter that does not promise to pay now; without probes nobody would see that it does again.
    """

    START, SHARE = 1.5, 0.01

    def __init__(self, measured: Measured | None = None) -> None:
        self._measured = Measured() if measured is None else measured
        self.chosen: dict[str, int] = {}  # by drafter, the newest choice
        self._probing = False  # the draft that is under way is a probe
        self._waiting = False  # nothing was drafted in the last round
        self._after_nothing = 1.0  # accepted tokens in rounds that follow one without a draft, on average

    def limit(self, drafter: Drafter) -> int:
        # What is drafted for nothing is judged when it is seen.
        return drafter.max_draft if drafter.free else self._choose(drafter, drafter.max_draft, None)

    def cut(self, drafter: Drafter, draft: Draft) -> int:
        return self._choose(drafter, len(draft.tokens), draft.confidence) if drafter.free else len(draft.tokens)

    def look_ahead(self) -> bool:
        # A draft that is found one token late gives one token less; not looking ahead costs the host's part of a pass.
        return self._after_nothing < 0.05

    def record(self, outcome: Outcome) -> None:
        known, drafter, drafted = self._measured, outcome.drafter, len(outcome.draft.tokens)
        known.total += outcome.seconds
        pace = outcome.seconds / (outcome.accepted + 1)
        known.pace += (pace - known.pace) / 16 if known.pace else pace
        if self._waiting:
            self._after_nothing += (outcome.accepted - self._after_nothing) / 16
        self._waiting = drafter is None
        if drafter is None:
            known.plain.add(1, outcome.seconds)
            return
        self._curve(drafter).add(drafted + 1, outcome.seconds)
        self._chances(drafter).add(drafted, outcome.accepted, outcome.draft.confidence)
        plain = known.plain.seconds(1)
        known.lost = max(known.lost + outcome.seconds - (outcome.accepted + 1) * plain, -8 * plain)
        if self._probing:
            known.probed += max(outcome.seconds - (outcome.accepted + 1) * known.pace, 0.0)

    def state(self) -> dict[str, Any]:
        known = self._measured
        curves, chances = list(known.costs.items()), list(known.chances.items())  # others may be adding to them
        return {
            "num_draft_tokens": "auto",
            "plain_seconds": known.plain.seconds(1) if known.plain.known else None,
            "lost_seconds": known.lost,
            "probed_seconds": known.probed,
            "chosen": dict(self.chosen),
            "seconds_by_rows": {
                name or "free": {str(rows): seconds for rows, seconds in costs.points} for name, costs in curves
            },
            "chances": {name: [round(of.at(place, None), 3) for place in range(1, 9)] for name, of in chances},
        }

    def _choose(self, drafter: Drafter, most: int, confidence: Sequence[float] | None) -> int:
        self.chosen[drafter.name] = chosen = self._best(drafter, most, confidence)
        return chosen

    def _curve(self, drafter: Drafter) -> "Costs":
        return self._measured.costs.setdefault("" if drafter.free else drafter.name, Costs())

    def _chances(self, drafter: Drafter) -> "Chances":
        return self._measured.chances.setdefault(drafter.name, Chances())

    def _best(self, drafter: Drafter, most: int, confidence: Sequence[float] | None) -> int:
        """The k with the most tokens per second, or a probe if that is 0 and the account can bear one."""
        known = self._measured
        if not known.plain.known:
            return 0  # the first round of all tells what plain decoding costs
        plain, curve, chances = known.plain.seconds(1), self._curve(drafter), self._chances(drafter)
        best, rate = 0, 1 / plain
        tokens = stands = 1.0
        # Never more than twice the rows that were measured: what is not known is approached step by step.
        for k in range(1, min(most, max(2 * curve.most, 2) - 1) + 1):
            stands *= chances.at(k, confidence)
            tokens += stands
            seconds = curve.seconds(k + 1, plain)
            if tokens / seconds > rate:
                best, rate = k, tokens / seconds
        account = self.START * plain + self.SHARE * known.total
        self._probing = best == 0
        if best > 0:
            return best if known.lost <= account else 0
        cost = curve.seconds(2, plain)
        affords = max(known.lost + cost - plain, known.probed + cost - known.pace) <= account
        return int(most > 0 and affords)


class Costs:
    """Seconds by size: the median of the last measurements, a straight line between and beyond the sizes measured."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self.points: list[tuple[int, float]] = []  # size and seconds, ascending

    @property
    def known(self) -> bool:
        return bool(self.points)

    @property
    def most(self) -> int:
        return self.points[-1][0] if self.points else 0

    def add(self, size: int, seconds: float) -> None:
        self._seen.setdefault(size, deque(maxlen=9)).append(seconds)
        rising, points = 0.0, []
        for known, measured in sorted(self._seen.items()):
            rising = max(rising, median(measured))  # more rows never cost less: noise says so now and then
            points.append((known, rising))
        self.points = points  # at once: requests of other threads look at any time

    def seconds(self, size: int, plain: float | None = None) -> float:
        """`plain`, if given, is a measurement of size 1 from elsewhere."""
        points = self.points if plain is None else [(1, plain), *self.points]
        place = bisect_left(points, (size,))
        if place < len(points) and points[place][0] == size:
            return points[place][1]
        if place == 0 or len(points) == 1:
            return points[0][1]
        (low, a), (high, b) = points[place - 1 : place + 1] if place < len(points) else points[-2:]
        return a + (b - a) * (size - low) / (high - low)


class Chances:
    """How often draft i of a drafter stands when those before it did: recent counts, by place or by confidence.

    A place that was rarely reached borrows from the drafter's other places.
    """

    KEEP, BORROW, HOPE = 0.9, 4.0, 0.6

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def at(self, place: int, confidence: Sequence[float] | None) -> float:
        stood, tried = self._counts.get(_bucket(place, confidence), (0.0, 0.0))
        all_stood, all_tried = self._counts.get(0, (0.0, 0.0))
        hope = self.HOPE if confidence is None else confidence[place - 1]
        overall = (all_stood + hope) / (all_tried + 1)
        return (stood + self.BORROW * overall) / (tried + self.BORROW)

    def add(self, drafted: int, accepted: int, confidence: Sequence[float] | None) -> None:
        for place in range(1, min(accepted + 1, drafted) + 1):
            stood = float(place <= accepted)
            for bucket in (0, _bucket(place, confidence)):
                before, tried = self._counts.get(bucket, (0.0, 0.0))
                self._counts[bucket] = (before * self.KEEP + stood, tried * self.KEEP + 1)


def _bucket(place: int, confidence: Sequence[float] | None) -> int:
    """Places 1, 2, ... for drafters that say nothing of their confidence; tenths of it, below 0, for the others."""
    return min(place, 16) if confidence is None else -1 - int(10 * confidence[place - 1])
