"""What is measured of drafting while it runs: what a round costs by its rows, and how often a draft stands."""

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median_low

NEWEST = 9  # so many measurements of a cost are remembered,
LONG = 64  # rounds after which a measurement is old
NOW = 3  # and so many of a plain round, which tell how fast the machine is at this length of text


class Measured:
    """What streams of one decoder measured, shared by them: costs, chances, and the two accounts of `Auto`.

    Requests of other threads look at any time and add at any time: what is looked at is replaced as a whole, and of two
    measurements that come together one may be lost.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.plain: float | None = None  # seconds of a round without a draft, the median of the last of them
        self.newest = 0  # the last of them
        self._plain: tuple[float, ...] = ()
        self.costs: dict[str, Costs] = {}  # free drafters share one curve
        self.chances: dict[str, Chances] = {}
        self.lost = 0.0  # seconds against plain decoding, negative where drafting won
        self.probed = 0.0  # seconds against the pace
        self.total = 0.0
        self.pace = 0.0  # seconds of a token, of late

    def add_plain(self, seconds: float) -> None:
        """This round, without a draft, took so long."""
        self.newest = self.rounds
        self._plain = (*self._plain[1 - NOW :], seconds)
        self.plain = median_low(self._plain)

    def doubt_plain(self) -> None:
        """The machine seems to be slower or faster now: what was measured before counts no more."""
        self.newest, self._plain = self.rounds - LONG, ()


class Costs:
    """Of a round by its rows, a plain round being 1: the median of the last measurements, straight lines between.

    So it stays what it is where text grows longer or the machine has other work, which all rounds feel. What seems
    worth a try is tried: beyond the rows measured only half the last rise is expected (curves flatten, and have dips: a
    matrix product of 16 rows can take less than one of 12), and what was measured once, perhaps in a slow moment or
    while a kernel was built, is not believed to cost more than the line says.
    """

    FLATTENS = 0.5

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, ...]] = {}
        self._points: list[tuple[int, float]] = []  # rows and median cost, ascending
        self.newest = 0  # the round of the newest measurement

    @property
    def most(self) -> int:
        """The most rows measured."""
        return max(self._seen, default=0)

    def sure(self, rows: int) -> bool:
        """Whether it was measured more than once."""
        return len(self._seen.get(rows, ())) > 1

    def add(self, rows: int, cost: float) -> None:
        seen = {**self._seen, rows: (*self._seen.get(rows, ())[1 - NEWEST :], cost)}
        self._seen, self._points = seen, sorted((n, median_low(of)) for n, of in seen.items())

    def of(self, rows: int) -> float:
        """The cost of a round with `rows` rows, at least 2."""
        once = len(self._seen.get(rows, ())) == 1
        points = [(1, 1.0), *(point for point in self._points if not (once and point[0] == rows))]
        after = bisect_left(points, (rows,))
        if after < len(points):
            (low, a), (high, b) = points[after - 1 : after + 1]
            line = b - (b - a) * (high - rows) / (high - low)
        else:
            (low, a), (high, b) = points[-2:] if len(points) > 1 else 2 * points
            line = b + self.FLATTENS * max(b - a, 0.0) * (rows - high) / max(high - low, 1)
        return min(line, self._seen[rows][0]) if once else line

    def state(self) -> dict[str, float]:
        return {str(rows): round(cost, 3) for rows, cost in self._points}


class Chances:
    """How often draft i of a drafter stands when those before it did: recent counts, by place or by confidence.

    What is seldom counted leans on what is guessed: the drafter's confidence, or `HOPE` where it says nothing of it,
    times how much oftener or more seldom its drafts stand than that.
    """

    KEEP, LEAN, HOPE = 0.9, 8.0, 0.6

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # by bucket, how many stood of how many
        self._stood = self._guessed = 0.0  # of all, and as many as were guessed to stand

    def at(self, place: int, confidence: Sequence[float] | None) -> float:
        stood, tried = self._counts.get(_bucket(place, confidence), (0.0, 0.0))
        guess = min(self._guess(place, confidence) * (self._stood + 1) / (self._guessed + 1), 1.0)
        return (stood + self.LEAN * guess) / (tried + self.LEAN)

    def add(self, drafted: int, accepted: int, confidence: Sequence[float] | None) -> None:
        for place in range(1, min(accepted + 1, drafted) + 1):
            stood, bucket = float(place <= accepted), _bucket(place, confidence)
            before, tried = self._counts.get(bucket, (0.0, 0.0))
            self._counts[bucket] = (before * self.KEEP + stood, tried * self.KEEP + 1)
            self._stood = self._stood * self.KEEP + stood
            self._guessed = self._guessed * self.KEEP + self._guess(place, confidence)

    def state(self) -> dict[str, float]:
        """The share that stood, by place ("1" to "16") or by confidence ("0.0" to "1.0"), as far as it was counted."""
        counts = self._counts.copy()  # others may be adding
        return {
            str(bucket) if bucket > 0 else str((-1 - bucket) / 10): round(stood / tried, 3)
            for bucket, (stood, tried) in sorted(counts.items(), key=lambda item: abs(item[0]))
        }

    def _guess(self, place: int, confidence: Sequence[float] | None) -> float:
        return self.HOPE if confidence is None else _share(confidence[place - 1])


def _bucket(place: int, confidence: Sequence[float] | None) -> int:
    """Places 1, 2, ... for drafters that say nothing of their confidence; tenths of it, below 0, for the others."""
    return min(place, 16) if confidence is None else -1 - int(10 * _share(confidence[place - 1]))


def _share(confidence: float) -> float:
    """What a drafter says, whatever it is, as a number from 0 to 1; NaN is 0."""
    return min(1.0, max(0.0, confidence))
