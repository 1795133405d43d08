"""How many tokens are worth drafting now: measured costs x measured acceptance, plain decoding included.

A round with k drafts gives 1 + a1 + a1 a2 + ... tokens, a_i the chance that draft i stands when those before it did
(with one a for all: (1 - a^(k+1)) / (1 - a), Leviathan 2023), and takes a verify pass over k + 1 rows and the drafting
of k tokens. The k with the most tokens per second is chosen, 0 included. What a pass costs by its rows and a draft by
its length is learned while running, since it is the same on no two machines; so are the chances, by drafter.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np

from .drafters.base import Draft, Drafter
from .measured import LONG, Chances, Costs, Measured


class Outcome(NamedTuple):
    """One round: who drafted (None: nobody), how many tokens, what the round emitted, and the seconds that it took."""

    drafter: Drafter | None
    drafted: int
    tokens: Sequence[int]
    seconds: float

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


class DraftLength(Protocol):
    """What the round loop asks."""

    def limit(self, drafter: Drafter) -> int:
        """How many tokens `drafter` should propose now; 0 passes it over."""

    def cut(self, drafter: Drafter, draft: Draft, others: Sequence[Drafter]) -> int:
        """How many of the tokens that it proposed, perhaps none, are worth verifying; with 0 the `others` are asked."""

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

    def cut(self, drafter: Drafter, draft: Draft, others: Sequence[Drafter]) -> int:
        return len(draft.tokens)

    def look_ahead(self) -> bool:
        return self.k == 0

    def record(self, outcome: Outcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"num_draft_tokens": self.k}


class Promise(NamedTuple):
    """Of a drafter: the best k, 0 where none beats plain decoding, the tokens that it gives in the time of a plain
    round, and what to probe with, 0 where nothing can be."""

    k: int = 0
    rate: float = 1.0
    probe: int = 0


class Auto:
    """Chooses by measurement, and never loses much by it. One for each stream.

    What a free drafter proposes is compared with what came, verified or not. Of one that takes time, that is known
    only by drafting; so there are probes of one that does not promise to pay now, as long as promises most. A free
    drafter is probed as well when what its drafts cost was not measured for `LONG` rounds, and so is a round without.
    A free drafter yields its turn to a later one that takes time if that promises more, and at most every `LONG`
    rounds for a probe.

    Two accounts are kept from the first round on, each of which may bear `START` plain rounds and `SHARE` of all the
    time so far: what drafting lost against plain decoding, and what probes lost against the pace of the time.
    """

    START, SHARE = 1.5, 0.01
    DEBT = 8.0  # plain rounds: what was won long ago pays for no more losses now, and an accident is owed no longer
    USUAL = 0.6, 1.6  # times its known cost; a round beyond that says that the machine is slower or faster now

    def __init__(self, measured: Measured | None = None) -> None:
        self._measured = Measured() if measured is None else measured
        self.chosen: dict[str, int] = {}  # by drafter, the newest choice
        self._proposed: list[tuple[Drafter, list[int], Sequence[float] | None]] = []  # in this round, for nothing
        self._silent: dict[str, int] = {}  # those that take time, and the round in which they last drafted nothing
        self._tried: Drafter | None = None  # the one for whose probe a free one yielded
        self._probing = False  # the draft that is under way is a probe
        self._waiting = False  # nothing was drafted in the last round
        self._after_nothing = 1.0  # accepted tokens in rounds that follow one without a draft, on average

    def limit(self, drafter: Drafter) -> int:
        if drafter.free:
            return drafter.max_draft  # what is drafted for nothing is judged when it is seen
        return self._choose(drafter, drafter.max_draft, None)

    def cut(self, drafter: Drafter, draft: Draft, others: Sequence[Drafter]) -> int:
        drafts, now = len(draft.tokens), self._measured.rounds
        if not drafter.free:
            if not drafts:
                self._silent[drafter.name] = now
            return drafts
        if not drafts:
            return 0
        self._proposed.append((drafter, np.array(draft.tokens).tolist(), draft.confidence))
        speaking = (o for o in others if not o.free and now - self._silent.get(o.name, -LONG) >= LONG)
        other = next((o for o in speaking if self._best(o, o.max_draft, None) > 0), None)  # whose turn it would be
        elsewhere = 1.0
        if other is not None:
            promise, elsewhere = self._promise(other, other.max_draft, None), math.inf
            if now - self._curve(other).newest >= LONG and self._affords(other, promise.k or promise.probe):
                self._tried = other
            else:
                elsewhere = promise.rate
        return self._choose(drafter, drafts, draft.confidence, elsewhere)

    def look_ahead(self) -> bool:
        # A draft that is found one token late gives one token less; not looking ahead costs the host's part of a pass.
        return self._after_nothing < 0.05

    def record(self, outcome: Outcome) -> None:
        known, drafter = self._measured, outcome.drafter
        probing, self._tried = self._probing or drafter is self._tried, None
        known.rounds += 1
        known.total += outcome.seconds
        pace = outcome.seconds / (outcome.accepted + 1)
        known.pace += (pace - known.pace) / 16 if known.pace else pace
        if self._waiting:
            self._after_nothing += (outcome.accepted - self._after_nothing) / 16
        self._waiting = drafter is None
        for who, proposed, confidence in self._proposed:
            right = [proposed == token for proposed, token in zip(proposed, outcome.tokens, strict=False)]
            self._chances(who).add(len(right), sum(accumulate(right, mul)), confidence)
        self._proposed.clear()
        if drafter is None:
            known.add_plain(outcome.seconds)
            return
        if not drafter.free:
            self._chances(drafter).add(outcome.drafted, outcome.accepted, None)
        plain, curve, rows = known.plain or outcome.seconds, self._curve(drafter), outcome.drafted + 1
        cost = outcome.seconds / plain
        # More than twice what it took before, or than its rows take one by one, is an accident.
        most = 2 * curve.of(rows) if curve.sure(rows) else rows if drafter.free else math.inf
        usual = curve.of(rows) if curve.sure(rows) else max(1.0, min(cost, most))
        if self.USUAL[0] < cost / usual < self.USUAL[1] or known.newest == known.rounds - 1:
            curve.add(rows, min(cost, most))
            curve.newest = known.rounds
        else:
            known.doubt_plain()
        seconds, debt = min(cost, most) * plain, self.DEBT * plain
        known.lost = min(max(known.lost + seconds - (outcome.accepted + 1) * plain, -debt), debt)
        if probing:
            known.probed += max(seconds - (outcome.accepted + 1) * known.pace, 0.0)

    def state(self) -> dict[str, Any]:
        known = self._measured
        curves, chances = list(known.costs.items()), list(known.chances.items())  # others may be adding to them
        return {
            "num_draft_tokens": "auto",
            "plain_seconds": known.plain,
            "lost_seconds": known.lost,
            "probed_seconds": known.probed,
            "chosen": dict(self.chosen),
            "cost_by_rows": {name or "free": of.state() for name, of in curves},
            "chances": {name: of.state() for name, of in chances},
        }

    def _choose(self, drafter: Drafter, most: int, confidence: Sequence[float] | None, elsewhere: float = 1.0) -> int:
        self.chosen[drafter.name] = chosen = self._best(drafter, most, confidence, elsewhere)
        return chosen

    def _curve(self, drafter: Drafter) -> Costs:
        return self._measured.costs.setdefault("" if drafter.free else drafter.name, Costs())

    def _chances(self, drafter: Drafter) -> Chances:
        return self._measured.chances.setdefault(drafter.name, Chances())

    def _best(self, drafter: Drafter, most: int, confidence: Sequence[float] | None, elsewhere: float = 1.0) -> int:
        """The k with the most tokens per second; if that is no better than `elsewhere`, 0, or a probe if the accounts
        can bear one."""
        known, curve = self._measured, self._curve(drafter)
        promise = self._promise(drafter, most, confidence)
        self._probing = promise.rate <= elsewhere
        if not self._probing:
            return promise.k
        if promise.probe == 0 or (drafter.free and curve.newest and known.rounds - curve.newest < LONG):
            return 0
        return promise.probe if self._affords(drafter, promise.probe) else 0

    def _affords(self, drafter: Drafter, k: int) -> bool:
        """Whether the accounts can bear a probe of k drafts of which none stands."""
        known = self._measured
        plain = known.plain or 0.0
        seconds = self._curve(drafter).of(k + 1) * plain
        return max(known.lost + seconds - plain, known.probed + seconds - known.pace) <= self._account(plain)

    def _promise(self, drafter: Drafter, most: int, confidence: Sequence[float] | None) -> Promise:
        """The k with the most tokens per second among those that the account can bear, and the one to probe."""
        known, curve, chances = self._measured, self._curve(drafter), self._chances(drafter)
        plain = known.plain
        if plain is None or known.rounds - known.newest >= LONG:
            return Promise()  # what plain decoding costs has to be known
        account = self._account(plain)
        best, rate = 0, 1.0
        probe, most_promised = 0, 0.0
        tokens = stands = 1.0
        # Never more than twice the rows that were measured: what is not known is approached step by step, and only
        # where the account can bear a pass that takes as long as its rows one by one, and as much again for each draft.
        for k in range(1, min(most, max(2 * curve.most, 2) - 1) + 1):
            stands *= chances.at(k, confidence)
            tokens += stands
            cost = curve.of(k + 1)
            if tokens / cost > most_promised:
                probe, most_promised = k, tokens / cost
            unknown = 0.0 if curve.sure(k + 1) else (k + 1 + k * (not drafter.free) - tokens) * plain
            if tokens / cost > rate and known.lost + unknown <= account:
                best, rate = k, tokens / cost
        return Promise(best, rate, probe)

    def _account(self, plain: float) -> float:
        """The seconds that drafting, and probes, may have lost."""
        return self.START * plain + self.SHARE * self._measured.total
