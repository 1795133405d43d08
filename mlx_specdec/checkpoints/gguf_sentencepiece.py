"""SentencePiece tokenizers of GGUF files: pairs are merged by their score, and what has no token becomes bytes.

The kinds are `llama`, which SentencePiece's BPE models are called, and `gemma4`, where the merges are listed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from .gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
_NEWLINES = r"\n+|[^\n]+"  # no merge goes across a line's end


def tokenizer(vocabulary: Vocabulary) -> "Tokenizer":
    """Raises CheckpointError for tokens without scores or merges that do not fit them."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    listed = vocabulary.kind == "gemma4"
    unknown = vocabulary.of_type(UNKNOWN)
    found = vocabulary.bpe(
        vocabulary.merges() if listed else merges_by_score(vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("ggml.add_space_prefix", not listed):
        found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        found.normalizer = spaces
    found.decoder = decoders.Sequence(steps)
    if listed:
        found.pre_tokenizer = pre_tokenizers.Split(Regex(_NEWLINES), "isolated")
    return vocabulary.finish(found, bos=True, strips=_strips(vocabulary))


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way in which two tokens make a third, those of the highest score first.

    SentencePiece merges the pair whose result scores highest, wherever it is; a list in that order does the same.
    """
    scores = vocabulary.scores()
    ranked = []
    for number, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == NORMAL:
            for cut in range(1, len(text)):
                left, right = vocabulary.ids.get(text[:cut]), vocabulary.ids.get(text[cut:])
                if left is not None and right is not None:
                    ranked.append((-scores[number], number, left, right))
    ranked.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in ranked]


def _strips(vocabulary: Vocabulary) -> Callable[[str], bool]:
    """Phi-3's control tokens swallow the spaces after them; its files do not say so."""
    if vocabulary.file.metadata.get("general.architecture") != "phi3":
        return lambda _: False
    control = set(vocabulary.of_type(CONTROL)) | {"</s>"}
    return lambda text: text in control and text not in ("<unk>", "<s>", "<|endoftext|>")
