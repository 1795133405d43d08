"""Whether a drafter was made for a target: its tokenizer, and its sizes."""

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PairingError

if TYPE_CHECKING:
    from ..target.model import Target


class MadeFor(NamedTuple):
    """The target that a drafter's checkpoint was made for, as far as it says."""

    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    name: str | None = None


def check_sizes(drafter: str, made_for: MadeFor, target: "Target") -> None:
    """Raise PairingError, with both values, when `target` has another hidden size, number of layers or vocabulary.

    A vocabulary may be padded: up to 1024 rows more or less are the same one.
    """
    have = MadeFor(target.hidden, len(target.model.layers), target.vocab)
    slack = {"vocab": 1024}
    for what, field in (("hidden size", "hidden"), ("layers", "layers"), ("vocabulary", "vocab")):
        wanted, found = getattr(made_for, field), getattr(have, field)
        if wanted is not None and found is not None and abs(wanted - found) > slack.get(field, 0):
            name = f" ({made_for.name})" if made_for.name else ""
            raise PairingError(
                f"the drafter {drafter} was made for a target{name} whose {what} is {wanted} and this target's is "
                f"{found}; use a drafter made for this target"
            )


def check_tokenizers(target: Any, draft: Any) -> None:
    """Raise PairingError, naming the first token that differs, unless every ordinary token has the same id in both.

    Added (special) tokens may have other names, and either vocabulary may go on further: text means the same.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    added = target.added_tokens_decoder.keys() & draft.added_tokens_decoder.keys()
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token] and token not in added:
            raise PairingError(
                f"the draft model has another tokenizer: token {token} is {ours[token]!r} in the target and "
                f"{theirs[token]!r} in the draft model; use a draft model of the target's family"
            )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab().items()}
