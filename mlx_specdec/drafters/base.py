"""What a drafter is: something that proposes tokens, and is told what became certain."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from ..features import FeatureRequest, Features
from ..sampling import Sampler

if TYPE_CHECKING:
    from ..target.model import Target


class Draft(NamedTuple):
    """Proposed tokens, int32 [k], and the distributions float32 [k, vocab] that they were drawn from.

    `probs` None says that each token was proposed with certainty (one-hot q). `confidence`, k values from 0 to 1, is
    the drafter's own guess that each stands if those before it do; it decides how many are verified, nothing else.
    """

    tokens: mx.array
    probs: mx.array | None = None
    confidence: tuple[float, ...] | None = None

    def within(self, vocab: int) -> "Draft":
        """Ids that the target does not know, which would read beyond its embedding, become 0: a bad guess as well."""
        known = (self.tokens >= 0) & (self.tokens < vocab)
        return self._replace(tokens=mx.where(known, self.tokens, 0).astype(mx.int32))

    def head(self, k: int) -> "Draft":
        """Its first `k` tokens."""
        return Draft(
            self.tokens[:k],
            None if self.probs is None else self.probs[:k],
            None if self.confidence is None else self.confidence[:k],
        )


NOTHING = Draft(mx.array([], dtype=mx.int32))  # a constant: a lazy array would belong to the importing thread


class Drafter(Protocol):
    """One per sequence: it keeps what it has observed.

    What is observed is exactly what entered the target's cache: the prompt (all but its last token) chunk by chunk,
    then after each round the old `last` and the accepted drafts. The new `last` comes with the next `propose`.
    """

    name: str
    wants: FeatureRequest
    max_draft: int  # how many tokens it proposes at most when the caller sets no number
    free: bool  # proposing costs next to nothing, next to a pass of the target

    def start(self, prompt: Sequence[int]) -> None:
        """A new sequence begins with `prompt`; everything from before is forgotten."""

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        """These tokens are now certain, in order, each once, with the features that were asked for."""

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens to follow `last`, unevaluated; an empty draft is fine."""

    def settle(self, drafted: int, accepted: int) -> None:
        """How its last draft fared, if that was verified: of `drafted` tokens the first `accepted` stood."""

    def close(self) -> None:
        """The sequence is over. What the drafter keeps for later ones, if anything, it keeps now."""


@runtime_checkable
class BlockDrafter(Protocol):
    """A drafter that makes its whole block at once: fewer tokens cost it no less, and are worse drafted in a shorter
    block. So it is asked for all that there is room for, and its draft is cut."""

    block_size: int


class DrafterModel(Protocol):
    """The weights of a drafter that has any: shared by the sequences, and by nothing but one target."""

    name: str

    def pair(self, target: "Target") -> Callable[[], Drafter]:
        """What makes its drafters for sequences of `target`. Raises PairingError, naming what was compared, when it
        was made for another."""


class Remembering(Protocol):
    """What makes drafters that share a memory of earlier sequences."""

    def __call__(self) -> Drafter:
        """A drafter for a sequence."""

    def keep(self) -> None:
        """Write the memory to where the user wants it kept, if anywhere. Raises CheckpointError."""
