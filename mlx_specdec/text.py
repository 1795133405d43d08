"""Ids to text, as they come: pieces that never change afterwards, and nothing of a stop string."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from .errors import OptionError


class TextStream:
    """Turns tokens into text pieces; the join of all pieces is what the tokenizer makes of all tokens, cut before the
    first stop string. Text that may yet begin a stop string, and half a character, are held back.

    mlx-lm's streaming detokenizers are not used: they drop a space that the text begins with, and some a space after
    a line break.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        if isinstance(stop, str):
            stop = (stop,)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise OptionError(f"a stop string is {text!r}; give a text that is not empty, or leave it out")
        self._decode, self._stop = tokenizer.decode, stop
        # The tokens of the last piece, whose text is known, and those after it. A token is decoded after another one,
        # because some tokenizers write the first of a text without its space.
        self._before: list[int] = []
        self._after: list[int] = []
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became certain with `token`. Sets `stopped` when a stop string is complete."""
        self._after.append(token)
        segment = self._segment()
        if not segment or segment.endswith("\ufffd"):  # nothing yet, or a character that may not be complete
            return ""
        self._before, self._after = self._after, []
        return self._release(segment)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._release(self._segment())
        return text if self.stopped else text + self._held

    def _segment(self) -> str:
        return self._decode(self._before + self._after)[len(self._decode(self._before)) :] if self._after else ""

    def _release(self, segment: str) -> str:
        text = self._held + segment
        found = [place for place in (text.find(s) for s in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`, not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def stop_tokens(tokenizer: Any, extra: Iterable[int | str] = (), vocab: int | None = None) -> frozenset[int]:
    """The end-of-sequence ids of a tokenizer, and `extra` ones as ids, also in digits, or as the text of one token.

    Raises OptionError for what is no token, or none of `vocab`.
    """
    extra = [extra] if isinstance(extra, str) else extra
    ids = set(tokenizer.eos_token_ids)
    for token in extra:
        if isinstance(token, bool) or not isinstance(token, int | str):
            raise OptionError(f"extra_eos_token is {token!r}; give the text or id of one token")
        if isinstance(token, int) or token.isdecimal():
            if int(token) < 0 or (vocab is not None and int(token) >= vocab):
                known = "" if vocab is None else f" and the model knows 0 to {vocab - 1}"
                raise OptionError(f"extra_eos_token is {token}{known}; give the text or id of one token")
            ids.add(int(token))
            continue
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1:
            raise OptionError(f"extra_eos_token {token!r} is {len(found)} tokens; give the text or id of one token")
        ids.add(found[0])
    return frozenset(ids)


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt as text, ids or an array -> ids; special tokens are added to text unless it brings its own.

    Raises OptionError for what is none of these.
    """
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return encode_text(tokenizer, prompt, special=bos is None or not prompt.startswith(bos))
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    whole = isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray)
    if not whole or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise OptionError(f"the prompt is {str(prompt)[:60]!r}; give text, token ids or a one-dimensional array of ids")
    return [int(token) for token in ids]


def encode_text(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Text -> ids, with the tokenizer's own first (and last) tokens if `special`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: bytes on a command line that are not UTF-8
        raise OptionError(f"the prompt is not text at character {error.start}; give UTF-8") from error
    return list(tokenizer.encode(text, add_special_tokens=special))
