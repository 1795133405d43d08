"""Whether a draft model speaks the target's language."""

from typing import Any

from ..errors import PairingError


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
