"""Ids to text, as they come: pieces that never change afterwards, and nothing of a stop string."""

from collections.abc import Iterable, Sequence
from typing import Any

from .errors import OptionError


class TextStream:
    """Turns tokens into text pieces; the join of all pieces is the whole text, cut before the first stop string.

    Text that may yet turn out to begin a stop string, or half a character, is held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise OptionError("a stop string is empty; leave it out")
        self._detokenizer = tokenizer.detokenizer
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became certain with `token`. Sets `stopped` when a stop string is complete."""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        self._detokenizer.finalize()
        text = self._release(self._detokenizer.last_segment)
        return text if self.stopped else text + self._held

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


def stop_tokens(tokenizer: Any, extra: Iterable[int | str] = ()) -> frozenset[int]:
    """The end-of-sequence ids of a tokenizer, and `extra` ones given as ids or as the text of single tokens."""
    ids = set(tokenizer.eos_token_ids)
    for token in extra:
        if isinstance(token, int):
            ids.add(token)
            continue
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1:
            raise OptionError(f"extra_eos_token {token!r} is {len(found)} tokens; give the text or id of one token")
        ids.add(found[0])
    return frozenset(ids)


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt as text, ids or an array -> ids; special tokens are added to text unless it brings its own."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))
    return [int(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
