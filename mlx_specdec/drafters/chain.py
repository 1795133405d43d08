"""The drafters of one sequence, asked in the user's order: the first that has something to say drafts."""

from collections.abc import Sequence

from ..draft_length import DraftLength
from ..errors import OptionError
from ..features import FeatureRequest, Features
from ..sampling import Sampler
from .base import NOTHING, BlockDrafter, Draft, Drafter


class Chain:
    """All drafters observe everything; only the one whose draft was verified hears how it fared.

    How much each may draft, and whether its turn goes to the next one, is decided by `length` from what was measured.
    """

    def __init__(self, drafters: Sequence[Drafter], length: DraftLength):
        """Raises OptionError when two have one name, by which they are told apart."""
        names = [drafter.name for drafter in drafters]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise OptionError(f"the drafter {twice} is there twice; give it once")
        self.drafters, self.length = drafters, length
        self.winner: Drafter | None = None

    @property
    def wants(self) -> FeatureRequest:
        """What its drafters want to see. Raises OptionError when two want hidden states."""
        wanting = [d for d in self.drafters if d.wants]
        if len(wanting) > 1:
            names = " and ".join(d.name for d in wanting)
            raise OptionError(f"the drafters {names} both read the target's hidden states; keep one of them")
        return wanting[0].wants if wanting else FeatureRequest()

    def start(self, prompt: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.start(prompt)

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        for drafter in self.drafters:
            drafter.observe(tokens, features)

    def propose(self, last: int, room: int, sampler: Sampler) -> Draft:
        """At most `room` tokens to follow `last`, by `winner`."""
        self.winner = None
        for place, drafter in enumerate(self.drafters):
            draft = self._ask(place, last, room, sampler)
            if len(draft.tokens):
                self.winner = drafter
                return draft
        return NOTHING

    def would_draft(self, last: int, room: int, sampler: Sampler) -> bool:
        """Whether `propose` would draft, found out at no cost: a model that would be asked is not run."""
        for place, drafter in enumerate(self.drafters):
            costly = not drafter.free and min(room, self.length.limit(drafter)) > 0
            if costly or (drafter.free and len(self._ask(place, last, room, sampler).tokens)):
                return True
        return False

    def _ask(self, place: int, last: int, room: int, sampler: Sampler) -> Draft:
        drafter, others = self.drafters[place], self.drafters[place + 1 :]
        limit = min(room, self.length.limit(drafter))
        if limit <= 0:
            return NOTHING
        asked = min(room, drafter.max_draft) if isinstance(drafter, BlockDrafter) else limit
        draft = drafter.propose(last, max(asked, limit), sampler)
        most = min(limit, self.length.cut(drafter, draft, others))
        return draft.head(most) if len(draft.tokens) else NOTHING

    def close(self, unseen: Sequence[int]) -> None:
        """The sequence is over, after tokens that nobody observed; those who keep what they saw see them now."""
        for drafter in self.drafters:
            if drafter.free and unseen:
                drafter.observe(unseen, None)
            drafter.close()

    def settle(self, drafted: int, accepted: int) -> None:
        """How the draft of `winner` fared."""
        if self.winner is not None:
            self.winner.settle(drafted, accepted)
