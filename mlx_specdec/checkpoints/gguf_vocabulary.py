"""The tokens of a GGUF file: their kinds, the named ones, and what frames and ends a text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
ELSE = "give the model as a Hugging Face or mlx-lm folder"

# Control tokens that end a turn: files made before there was a key for them name only the end of a sequence.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>")


class Vocabulary:
    """The `tokenizer.*` keys of one file."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises CheckpointError for tokens that are not distinct or have no types."""
        self.file = file
        self.kind = self.get("ggml.model")
        texts = self.strings("ggml.tokens")
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.types = self.get("ggml.token_type", [NORMAL] * len(texts))
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens) or not isinstance(self.types, list) or len(self.types) != len(self.tokens):
            raise file.fault("its tokens are not distinct, or have no type each")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get("tokenizer." + key, default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.file.fault(f"it has no list of strings tokenizer.{key}")
        return value

    def scores(self) -> list[float]:
        value = self.get("ggml.scores")
        if not isinstance(value, list) or len(value) != len(self.tokens) or isinstance(value[0], str):
            raise self.file.fault("its tokens have no score each (tokenizer.ggml.scores)")
        return value

    def merges(self) -> list[tuple[str, str]]:
        """What is merged, first things first. The first character of a pair may itself be a space."""
        pairs = ((text[:1], *text[1:].partition(" ")) for text in self.strings("ggml.merges"))
        return [(first + left, right) for first, left, _, right in pairs]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, each in zip(self.tokens, self.types, strict=True) if each == kind]

    def special(self, name: str) -> int | None:
        """The id of `bos`, `eos`, ..., None where the file names none."""
        value = self.get(f"ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.file.fault(f"tokenizer.ggml.{name}_token_id is {value!r}, outside {len(self.tokens)} tokens")
        return value

    def ends(self) -> list[int]:
        """The ids that end a text: end of sequence, of turn, of message."""
        named = (self.special(name) for name in ("eos", "eot", "eom"))
        turns = (self.ids.get(text) for text in _TURN_ENDS)
        by_text = (token for token in turns if token is not None and self.types[token] == CONTROL)
        return sorted({token for token in (*named, *by_text) if token is not None})

    def bpe(self, merges: list[tuple[str, str]], **options: Any) -> "Tokenizer":
        """A tokenizer that merges pairs of tokens. Raises CheckpointError for merges that do not fit the tokens."""
        from tokenizers import Tokenizer, models

        try:
            return Tokenizer(models.BPE(self.ids, merges, **options))
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise self.file.fault(f"its merges do not fit its tokens ({error})") from error

    def finish(self, tokenizer: "Tokenizer", bos: bool, strips: Callable[[str], bool] = lambda _: False) -> "Tokenizer":
        """Add what frames a text (`bos`: whether a text begins with that token unless the file says otherwise) and the
        tokens that are found in a text before anything else. `strips` tells those that swallow the spaces after."""
        from tokenizers import AddedToken, processors

        before, after = self._frame("bos", bos), self._frame("eos", False)
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=[*before, "$A", *after, *before, "$B:1", *after],
                special_tokens=[(token, self.ids[token]) for token in {*before, *after}],
            )
        for kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens(
                [
                    AddedToken(text, special=kind == CONTROL, normalized=False, rstrip=strips(text))
                    for text in self.of_type(kind)
                ]
            )
        return tokenizer

    def _frame(self, name: str, default: bool) -> list[str]:
        """What is put around a text: the one token, or nothing."""
        token = self.special(name)
        return [] if token is None or not self.get(f"ggml.add_{name}_token", default) else [self.tokens[token]]

    def config(self) -> dict[str, Any]:
        """The fields of tokenizer_config.json."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
            if (token := self.special(ours)) is not None:
                config[theirs + "_token"] = self.tokens[token]
        if isinstance(template := self.get("chat_template"), str):
            names = self.get("chat_templates", [])
            named = {name: self.get(f"chat_template.{name}") for name in names if name != "default"}
            others = [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]
            config["chat_template"] = [{"name": "default", "template": template}, *others] if others else template
        return config

    def unread(self, what: str) -> CheckpointError:
        """The error for a tokenizer that is not read here."""
        return CheckpointError(f"{self.file.path} {what}; {ELSE}")
