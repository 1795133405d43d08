"""The two ends of a model that drafters share: how it embeds tokens, and its head over the vocabulary."""

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import PairingError
from .hooks import hook
from .taps import trunk


class Ends:
    """`embed` and `head` of any mlx-lm model, whatever it scales, ties or caps: both checked once against its own pass.

    The head is the model itself with its trunk left out, so no family needs code of its own.
    """

    def __init__(self, model: nn.Module):
        """Raises PairingError for a model whose ends cannot be told from its layers."""
        self._model = model
        self._local = threading.local()
        self._release = hook(trunk(model), self._stand_in)
        try:
            self._check()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._release()

    def embed(self, tokens: mx.array, scaled: bool = True) -> mx.array:
        """What the first layer is given for tokens int [n]: [n, hidden]. Not `scaled`: the embedding's own rows."""
        rows = self._embedding(tokens)
        return rows * self._scale if scaled else rows

    @property
    def caps(self) -> bool:
        """Whether `head` squeezes its logits through a tanh, as the model's configuration says."""
        places = [vars(module) for module in self._model.modules()]
        places += [vars(place["args"]) for place in places if hasattr(place.get("args"), "__dict__")]
        return any(place.get("final_logit_softcapping") for place in places)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits float32 [n, vocab] of hidden states [n, hidden] after the final norm."""
        self._local.hidden = hidden[None]
        try:
            return self._model(mx.zeros((1, hidden.shape[0]), dtype=mx.int32))[0].astype(mx.float32)
        finally:
            self._local.hidden = None

    def _stand_in(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = getattr(self._local, "hidden", None)
        return forward(*args, **kwargs) if hidden is None else hidden

    def _check(self) -> None:
        tokens = mx.array([1, 2, 0], dtype=mx.int32)
        entering, leaving = [], []

        def enters(module: nn.Module, forward: Callable[..., Any], x: mx.array, *args: Any, **kwargs: Any) -> Any:
            entering.append(x[0])
            return forward(x, *args, **kwargs)

        def leaves(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            leaving.append(output)
            return output

        releases = [hook(self._model.layers[0], enters), hook(trunk(self._model), leaves)]
        try:
            logits = self._model(tokens[None], cache=make_prompt_cache(self._model))[0].astype(mx.float32)
        finally:
            for release in releases:
                release()
        self._embedding, self._scale = self._find_embedding(tokens, entering[0])
        if not isinstance(leaving[0], mx.array) or not _close(self.head(leaving[0][0]), logits):
            raise PairingError(
                f"the head of {type(self._model).__name__} cannot be used apart from its layers; use a drafter with a "
                "head of its own"
            )

    def _find_embedding(self, tokens: mx.array, entering: mx.array) -> tuple[nn.Module, mx.array]:
        """The embedding whose rows, all times one number, enter the first layer; and that number."""
        for module in self._model.modules():
            if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                rows = module(tokens)
                if rows.shape != entering.shape:
                    continue
                scale = (rows * entering).astype(mx.float32).sum() / (rows * rows).astype(mx.float32).sum()
                scale = scale.astype(rows.dtype)
                mx.eval(scale)
                if _close(rows * scale, entering):
                    return module, scale
        raise PairingError(
            f"what enters the first layer of {type(self._model).__name__} is more than a token's embedding; "
            "use a drafter with an embedding of its own"
        )


def _close(a: mx.array, b: mx.array) -> bool:
    """Equal but for the rounding of the dtype they were computed in."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return bool((mx.abs(a - b).max() <= 2e-2 * mx.abs(b).max()).item())
