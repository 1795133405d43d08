"""The model being accelerated, as the round loop sees it: any mlx-lm model, not forked."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..errors import OptionError, PairingError
from ..features import FeatureRequest, Features, KeysValues
from .ends import Ends
from .head_start import HeadStart
from .mixers import Mixers
from .rewind import Rewinder, SinkWindow, attends, leaves, recurrent
from .taps import Taps


@dataclass(frozen=True)
class CacheOptions:
    """How a sequence is remembered: mlx-lm's names, defaults and meaning. Raises OptionError."""

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prefill_step_size: int = 2048

    def __post_init__(self) -> None:
        if self.kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise OptionError(f"kv_bits is {self.kv_bits}; choose one of 2, 3, 4, 5, 6, 8")
        if self.kv_group_size not in (32, 64, 128):
            raise OptionError(f"kv_group_size is {self.kv_group_size}; choose one of 32, 64, 128")
        if self.max_kv_size is not None and self.max_kv_size < 8:
            raise OptionError(f"max_kv_size is {self.max_kv_size}; choose 8 or more")
        if self.quantized_kv_start < 0:
            raise OptionError(f"quantized_kv_start is {self.quantized_kv_start}; choose 0 or more")
        if self.prefill_step_size < 1:
            raise OptionError(f"prefill_step_size is {self.prefill_step_size}; choose 1 or more")
        if self.kv_bits and self.max_kv_size:
            raise OptionError(f"kv_bits {self.kv_bits} cannot be combined with max_kv_size {self.max_kv_size}: "
                              "a rotating cache is not quantised; leave one out")  # fmt: skip


class Target:
    """A model with what it takes to read features off it and to rewind its caches. Sequences and threads share it."""

    def __init__(
        self,
        model: nn.Module,
        options: CacheOptions | None = None,
        *,
        rewinds: bool = True,
    ):
        """`rewinds` False is for a model that only ever runs certain tokens: any kind of cache will do then.

        Raises UnsupportedModelError when the model's cache cannot be rewound exactly, OptionError when it cannot be
        kept as `options` say.
        """
        self.model, self.options, self.rewinds = model, options or CacheOptions(), rewinds
        self.context, self.hidden = context_length(model), hidden_size(model)
        evaluate(model)
        self.mixers: Mixers | None = None
        self.taps: Taps | None = None
        self._ends: Ends | None = None
        self.head_start = HeadStart(model)
        try:
            caches = self._make_caches()
            if rewinds and recurrent(caches):
                self.mixers = Mixers(model, caches, recurrent(caches))
            self.vocab = self._probe()
        except BaseException:
            self.close()
            raise

    def watch(self, wants: FeatureRequest) -> None:
        """Let passes from now on hand out the features of `wants`. Raises PairingError when the model lacks a layer."""
        caches = self._make_caches() if wants.keys_values else []
        for layer in wants.keys_values:
            if not (0 <= layer < len(caches) and attends(caches[layer])):
                raise PairingError(
                    f"the drafter reads the keys and values of layer {layer}, and the target has none there; "
                    "use a drafter made for this target"
                )
        if wants:
            self.taps = Taps(self.model, wants)

    @property
    def remembering(self) -> int:
        """How many of its layers have a cache: the first ones. Layers after them read what those remember."""
        return len(self._make_caches())

    @property
    def ends(self) -> Ends:
        """The model's own embedding and head. Raises PairingError when they cannot be told from its layers."""
        if self._ends is None:
            self._ends = Ends(self.model)
        return self._ends

    def close(self) -> None:
        """Take every hook out of the model. Its sequences must not be used after this."""
        for hooks in (self.mixers, self.taps, self._ends, self.head_start):
            if hooks is not None:
                hooks.release()

    def sequence(self) -> "Sequence":
        """An empty sequence, with caches of its own."""
        return Sequence(self, self.options, self._make_caches())

    def _make_caches(self) -> list:
        name = getattr(self.model, "model_type", type(self.model).__name__)
        caches = make_prompt_cache(self.model)
        if size := self.options.max_kv_size:
            # mlx-lm applies it only to models that leave their caches to it, llama not among them, and says nothing.
            if any(type(c) is not KVCache for c in caches):
                raise OptionError(f"max_kv_size is {size} and {name} has caches of its own kinds, which cannot be "
                                  "limited; leave it out")  # fmt: skip
            caches = [RotatingKVCache(size, keep=4) for _ in caches]
        if self.options.kv_bits and any(isinstance(c, RotatingKVCache) for c in leaves(caches)):
            raise OptionError(f"kv_bits is {self.options.kv_bits} and {name} has sliding windows, which are not "
                              "quantised; leave it out")  # fmt: skip
        if self.options.kv_bits and not any(hasattr(c, "to_quantized") for c in caches):
            raise OptionError(f"kv_bits is {self.options.kv_bits} and {name} has no cache that can be quantised; "
                              "leave it out")  # fmt: skip
        return caches

    def _probe(self) -> int:
        """Build, unevaluated, the kinds of pass that generating makes: what cannot work fails here, at load.

        Returns the number of logits, which padding can make larger than the tokenizer's vocabulary.
        """
        sequence = Sequence(self, replace(self.options, quantized_kv_start=0), self._make_caches())
        tokens = mx.zeros((3,), dtype=mx.int32)
        try:
            for rows, certain in ((2, 2), (3, 1 if self.rewinds else 3), (1, 1)):
                logits, _ = sequence.forward(tokens[:rows], certain=certain)
                sequence.settle(certain)
        except ValueError as error:
            if self.options.kv_bits is None:
                raise
            raise OptionError(f"kv_bits is {self.options.kv_bits} and this model cannot quantise its cache: {error}"
                              "; leave it out") from error  # fmt: skip
        return logits.shape[-1]


class Sequence:
    """One sequence in a model's memory."""

    def __init__(self, target: Target, options: CacheOptions, caches: list):
        self.target, self.options, self._caches = target, options, caches
        self._rewinder = Rewinder(caches if target.rewinds else [], target.mixers)
        self._quantized = options.kv_bits is None

    @property
    def offset(self) -> int:
        """How many tokens are in the cache."""
        return self._rewinder.offset

    @property
    def state(self) -> list:
        """The arrays of the cache. Evaluated together with what a pass was made for, nothing stays lazy: a lazy array
        can only be evaluated by the thread that built it."""
        return [c.state for c in self._caches]

    def room(self, rows: int) -> int:
        """The longest pass, at most `rows`, whose every row sees the cache as it would see it alone."""
        if self._quantized:
            return rows
        return min(rows, max(self.options.quantized_kv_start - self.offset, 1))

    def prefill(
        self, prompt: list[int], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[list[int], Features | None]]:
        """Run all but the last token of a prompt, in mlx-lm's chunks; yields each chunk with its features.

        `progress` is told how many tokens of how many are done.
        """
        body = prompt[:-1]
        for start in range(0, len(body), self.options.prefill_step_size):
            chunk = body[start : start + self.options.prefill_step_size]
            _, features = self.forward(mx.array(chunk), certain=len(chunk))
            self.settle(len(chunk))
            mx.eval(self.state)
            if progress:
                progress(self.offset, len(prompt))
            yield chunk, self.known(features, len(chunk))
            mx.clear_cache()
        self._keep_sinks()

    def forward(self, tokens: mx.array, certain: int = 1, begin: bool = False) -> tuple[mx.array, Features | None]:
        """One lazy pass over tokens int [n], the first `certain` of which will not be undone. `begin` lets the device
        start with it before it is built.

        Returns logits float32 [n, vocab] and the features asked for. Call `settle` before the sequence goes on,
        unless every row was certain.
        """
        taps = self.target.taps
        with (
            self._rewinder.advance(tokens.shape[0], certain),
            taps.reading() if taps else nullcontext() as features,
            self.target.head_start.given() if begin else nullcontext(),
        ):
            logits = self.target.model(tokens[None], cache=self._caches)
        return logits[0].astype(mx.float32), features() if features else None

    def settle(self, keep: int) -> None:
        """Of all rows since the last call the first `keep` stand; the others leave no trace."""
        self._rewinder.settle(keep)
        if not self._quantized and self.offset >= self.options.quantized_kv_start:
            self._replace(lambda c: hasattr(c, "to_quantized"), self._quantize)
            self._quantized = True

    def known(self, features: Features | None, keep: int, ahead: bool = False) -> Features | None:
        """What drafters observe of the first `keep` tokens of a pass that gave `features`, once they are settled: the
        keys and values are those of now.

        `ahead` says that the next pass will be built before anyone drafts: keys and values are then those of the `keep`
        tokens alone, and copies, since a slice of a cache that is still held when its next row comes has it copied.
        """
        if features is None or self.target.taps is None:
            return None
        layers = self.target.taps.wants.keys_values
        held = tuple(self._rewinder.keys_values(self._caches[layer]) for layer in layers)
        if ahead:
            held = tuple(KeysValues(*(mx.contiguous(x[:, -keep:]) for x in both)) for both in held)
        return features.head(keep)._replace(keys_values=held)

    def _quantize(self, cache: Any) -> Any:
        return cache.to_quantized(group_size=self.options.kv_group_size, bits=self.options.kv_bits)

    def _keep_sinks(self) -> None:
        if self.options.max_kv_size:
            self._replace(lambda c: type(c) is RotatingKVCache, lambda c: SinkWindow.from_state(c.state))

    def _replace(self, applies: Callable[[Any], bool], change: Callable[[Any], Any]) -> None:
        self._caches[:] = [change(c) if applies(c) else c for c in self._caches]
        if self.target.rewinds:
            self._rewinder.rebind(self._caches)


def evaluate(model: nn.Module) -> None:
    """Compute all arrays of a model, those that are no parameters (rotation frequencies) too: a lazy array belongs to
    the thread that made it, and another could not generate with it."""
    mx.eval([v for module in model.modules() for v in module.values() if isinstance(v, mx.array)])


def context_length(model: nn.Module) -> int | None:
    """The most tokens that the model was made for, if its configuration says."""
    return _configured(model, "max_position_embeddings")


def hidden_size(model: nn.Module) -> int | None:
    """The width of its hidden states, if its configuration says."""
    return _configured(model, "hidden_size")


def _configured(model: nn.Module, field: str) -> int | None:
    args = getattr(model, "args", None)
    for config in (args, getattr(args, "text_config", None)):
        known = config if isinstance(config, dict) else vars(config) if config is not None else {}
        if isinstance(known.get(field), int):
            return known[field]
    return None
