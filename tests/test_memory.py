"""Features of a prompt are never held whole: what a drafter keeps of a long prompt is its own cache."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.draft_length import Fixed
from mlx_specdec.drafters.base import Drafter, DrafterModel
from mlx_specdec.drafters.chain import Chain
from mlx_specdec.drafters.dflash import DFlashModel
from mlx_specdec.drafters.eagle3 import Eagle3Model
from mlx_specdec.drafters.mtp import MtpModel
from mlx_specdec.features import Features
from mlx_specdec.rounds import rounds
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target

GOLDEN = Path(__file__).parent / "golden"
STEP = 256


def paired(kind: str) -> tuple[Target, Drafter]:
    folder = {"eagle3": "target_llama", "dflash": "target_qwen3", "mtp": "mtp_qwen3_5"}[kind]
    target = Target(load_model(GOLDEN / folder)[0], CacheOptions(prefill_step_size=STEP))
    model: DrafterModel
    if kind == "eagle3":
        model = Eagle3Model(read_network(Folder(GOLDEN / "eagle3_safeailab_llama"), "eagle3"))  # type: ignore[arg-type]
    elif kind == "dflash":
        model = DFlashModel(read_network(Folder(GOLDEN / "dflash_zlab_qwen3"), "dflash"))  # type: ignore[arg-type]
    else:
        heads = read_heads(Folder(GOLDEN / folder), target.model)
        assert heads is not None
        model = MtpModel(heads)
    drafter = model.pair(target)()
    target.watch(drafter.wants)
    return target, drafter


class Hoarding:
    """The broken version: it keeps what it was shown."""

    def __init__(self, inner: Drafter):
        self._inner, self.hoard = inner, list[Features]()
        self.name, self.wants, self.max_draft, self.free = inner.name, inner.wants, inner.max_draft, inner.free
        self.start, self.propose, self.settle, self.close = inner.start, inner.propose, inner.settle, inner.close

    def observe(self, tokens: Sequence[int], features: Features | None) -> None:
        if features is not None:
            self.hoard.append(features)
        self._inner.observe(tokens, features)


def kept(target: Target, drafter: Drafter, tokens: int) -> int:
    """Bytes in use after a prompt was read and one round made, less the target's own cache."""
    prompt = [(7 * i * i + 3 * i + 5) % 90 for i in range(tokens)]
    sequence = target.sequence()
    emitting = rounds(sequence, prompt, Sampler(SamplingParams(), prompt), 8, Chain([drafter], Fixed(2)))
    next(emitting)
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory() - sum(x.nbytes for _, x in tree_flatten(sequence.state) if isinstance(x, mx.array))


CASES = [("eagle3", 8192, False), ("eagle3", 4096, True), ("dflash", 4096, False), ("mtp", 4096, False)]


@pytest.mark.parametrize(("kind", "tokens", "hoards"), CASES)
def test_what_is_kept_of_a_long_prompt(kind: str, tokens: int, hoards: bool) -> None:
    target, drafter = paired(kind)
    drafter = Hoarding(drafter) if hoards else drafter
    short, long = kept(target, drafter, 1024), kept(target, drafter, tokens)
    hidden = 64 * 4
    features = hidden * (len(drafter.wants.layers) + drafter.wants.final)  # of a token
    own = {"eagle3": 1, "dflash": 2, "mtp": 1}[kind] * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, float32
    more = long - short - (tokens - 1024) * own
    assert (more > STEP * features) == hoards, f"{more} bytes more; a chunk's features have {STEP * features}"
