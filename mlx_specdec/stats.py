"""What is counted while a request runs."""

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Counts over one request. A round is one verify pass; accepted tokens are drafts that reached the output."""

    drafter: str | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of the output per round, the target's own included; 1 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
        }

    def __str__(self) -> str:
        if self.drafter is None:
            return f"none, {self.rounds} rounds"
        return (
            f"{self.drafter}, {self.rounds} rounds, {self.accepted}/{self.drafted} accepted, "
            f"{self.mean_accepted_length:.2f} tokens per round"
        )
