"""Whether a drafter was made for a target: its tokenizer, and its sizes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PairingError

if TYPE_CHECKING:
    from ..target.model import Target

PADDING = 1024  # rows by which the vocabularies of one family may differ


class MadeFor(NamedTuple):
    """The target that a drafter's checkpoint was made for, or a target itself, as far as is known."""

    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    name: str | None = None


def check_sizes(drafter: str, made_for: MadeFor, target: "Target") -> None:
    """Raise PairingError, with both values, when `target` has another hidden size, number of layers or vocabulary."""
    compare(drafter, made_for, MadeFor(target.hidden, len(target.model.layers), target.vocab))


def compare(drafter: str, made_for: MadeFor, have: MadeFor) -> None:
    """Raise PairingError, with both values, when a target that is `have` is not what the drafter was made for.

    What either does not say is not compared. A vocabulary may be padded: up to 1024 rows more or less are the same one.
    """
    compared = (("hidden size", "hidden", 0), ("number of layers", "layers", 0), ("vocabulary", "vocab", PADDING))
    for what, field, slack in compared:
        wanted, found = getattr(made_for, field), getattr(have, field)
        if wanted is not None and found is not None and abs(wanted - found) > slack:
            name = f" ({made_for.name})" if made_for.name else ""
            raise PairingError(
                f"the drafter {drafter} was made for a target{name} whose {what} is {wanted} and this target's is "
                f"{found}; use a drafter made for this target"
            )


def made_for(kind: str, config: Mapping[str, Any]) -> MadeFor:
    """What the config of a drafter of `kind` (see checkpoints.drafter.kind_of) says of its target; None where it says
    nothing, or no whole number."""
    text = _table(config.get("text_config"))
    if kind == "gemma4_assistant":
        return _made_for(config.get("backbone_hidden_size"), None, text.get("vocab_size"))
    if kind == "mtp":
        return _sizes({**config, **text})
    if kind == "medusa":
        return _made_for(
            config.get("hidden_size"), None, config.get("vocab_size"), config.get("base_model_name_or_path")
        )
    layer = _table(config.get("transformer_layer_config")) or config
    verifier = _table(_table(config.get("speculators_config")).get("verifier"))
    inner = _table(config.get("dflash_config"))
    hidden = inner.get("target_hidden_size") or config.get("target_hidden_size") or layer.get("hidden_size")
    layers = (inner.get("num_target_layers") or config.get("num_target_layers")) if kind == "dflash" else None
    return _made_for(hidden, layers, layer.get("vocab_size"), verifier.get("name_or_path"))


def of_target(config: Mapping[str, Any]) -> MadeFor:
    """The sizes that a target's config says it has, or that of its language model."""
    return _sizes({**config, **_table(config.get("text_config"))})


def _sizes(config: Mapping[str, Any]) -> MadeFor:
    return _made_for(config.get("hidden_size"), config.get("num_hidden_layers"), config.get("vocab_size"))


def _made_for(hidden: Any, layers: Any, vocab: Any, name: Any = None) -> MadeFor:
    hidden, layers, vocab = (value if type(value) is int else None for value in (hidden, layers, vocab))
    return MadeFor(hidden, layers, vocab, name if isinstance(name, str) else None)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def check_tokenizers(target: Any, draft: Any, who: str = "draft model") -> None:
    """Raise PairingError, naming the first token that differs, unless every ordinary token has the same id in both.

    Added (special) tokens may have other names, and either vocabulary may go on further: text means the same.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    added = target.added_tokens_decoder.keys() & draft.added_tokens_decoder.keys()
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token] and token not in added:
            raise PairingError(
                f"the {who} has another tokenizer: token {token} is {ours[token]!r} in the target and "
                f"{theirs[token]!r} in the {who}; use a {who} of the target's family"
            )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab().items()}
