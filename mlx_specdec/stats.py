"""What is counted while a request runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rounds import Round

ENOUGH = 20  # rounds that show whether a drafter fits at all


@dataclass
class DrafterStats:
    """One drafter's part. `reached[i]` counts drafts that got as far as place i, all before having stood; `stood[i]`
    those of them that stood; `seconds` are of its rounds."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    reached: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)

    def add(self, emitted: Round) -> None:
        self.rounds += 1
        self.drafted += emitted.drafted
        self.seconds += emitted.drafting + emitted.verifying + emitted.host
        self.reached += [0] * (emitted.drafted - len(self.reached))
        self.stood += [0] * (emitted.drafted - len(self.stood))
        for place in range(min(emitted.accepted + 1, emitted.drafted)):
            self.reached[place] += 1
            self.stood[place] += place < emitted.accepted

    @property
    def by_position(self) -> list[float]:
        """The share of drafts that stood at each place, of those that got there."""
        return [s / r for s, r in zip(self.stood, self.reached, strict=True) if r]

    def hopeless(self, over: bool) -> bool:
        """After `ENOUGH` rounds hardly a first token stood, or when a request is `over` none of half as many did: a
        drafter that was made for this target does better."""
        enough = ENOUGH // 2 if over and self.rounds and not self.stood[0] else ENOUGH
        return self.rounds >= enough and self.stood[0] < 0.05 * self.reached[0]


@dataclass
class Stats:
    """Counts over one request. A round is one pass of the target; accepted tokens are drafts that reached the output.

    Seconds: `drafting` until a draft's graph is built, `verifying` the wait for the device, `host` the rest.
    """

    drafter: str | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    drafting: float = 0.0
    verifying: float = 0.0
    host: float = 0.0
    plain_rounds: int = 0
    plain_seconds: float = 0.0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    draft_length: dict[str, Any] | None = None  # what chose the draft length knew at the end; None before it

    def add(self, emitted: Round) -> None:
        """A round was made."""
        self.rounds += 1
        self.drafted += emitted.drafted
        self.drafting += emitted.drafting
        self.verifying += emitted.verifying
        self.host += emitted.host
        if emitted.drafter is None:
            self.plain_rounds += 1
            self.plain_seconds += emitted.drafting + emitted.verifying + emitted.host
        else:
            self.drafters.setdefault(emitted.drafter, DrafterStats()).add(emitted)

    def emit(self, drafter: str | None) -> None:
        """A token was handed out, drafted by `drafter` or the target's own."""
        self.tokens += 1
        if drafter is not None:
            self.accepted += 1
            self.drafters[drafter].accepted += 1

    def copy(self) -> Stats:
        return deepcopy(self)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of the output per round, the target's own included; 1 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def predicted(self, drafter: str) -> dict[str, float] | None:
        """What Leviathan's formulas (2023) give for a drafter's rounds from its measured acceptance a, mean draft k and
        cost c of a drafted token (its share of the verify pass included) in plain rounds, beside what was measured.

        tokens (1 - a^(k+1)) / (1 - a) a round, speed-up (1 - a^(k+1)) / ((1 - a)(k c + 1)). None while there are no
        plain rounds to compare with.
        """
        of = self.drafters[drafter]
        if not self.plain_rounds or not of.rounds:
            return None
        plain = self.plain_seconds / self.plain_rounds
        a, k = sum(of.stood) / sum(of.reached), of.drafted / of.rounds
        c = max(of.seconds / of.rounds / plain - 1, 0.0) / k
        tokens = k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
        measured = 1 + sum(of.stood) / of.rounds
        return {
            "acceptance": a,
            "draft_length": k,
            "cost": c,
            "predicted_tokens": tokens,
            "measured_tokens": measured,
            "predicted_speedup": tokens / (k * c + 1),
            "measured_speedup": measured * plain / (of.seconds / of.rounds),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a response or a file."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "by_position": {name: of.by_position for name, of in self.drafters.items()},
            "predicted": {name: self.predicted(name) for name in self.drafters},
        }

    def __str__(self) -> str:
        if self.drafter is None:
            return f"none, {self.rounds} rounds"
        return (
            f"{self.drafter}, {self.rounds} rounds, {self.accepted}/{self.drafted} accepted, "
            f"{self.mean_accepted_length:.2f} tokens per round"
        )

    def block(self) -> str:
        """Where the time went, and each drafter's rounds beside what is predicted for them, line by line."""
        lines = [f"Time: drafting {self.drafting:.2f} s, verifying {self.verifying:.2f} s, host {self.host:.2f} s"]
        for name, of in self.drafters.items():
            positions = " ".join(f"{rate:.2f}" for rate in of.by_position[:8])
            lines.append(f"{name}: {of.rounds} rounds, {of.accepted}/{of.drafted} accepted, by position {positions}")
            if p := self.predicted(name):
                lines.append(
                    f"{name}: {p['measured_tokens']:.2f} tokens a round (predicted {p['predicted_tokens']:.2f}), "
                    f"{p['measured_speedup']:.2f} x plain (predicted {p['predicted_speedup']:.2f})"
                )
        silent = [name for name in (self.drafter or "").split(",") if name and name not in self.drafters]
        lines += [f"{name}: drafted nothing" for name in silent]
        if self.draft_length:
            chosen = (self.draft_length.get("chosen") or {}).items()
            latest = ", ".join(f"{name} {k}" for name, k in chosen)
            length = self.draft_length["num_draft_tokens"]
            lines.append(f"Draft length: {length} (last: {latest})" if latest else f"Draft length: {length}")
        return "\n".join(lines)
