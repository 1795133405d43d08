"""Any cache goes back to any row of any run of passes, and then goes on as if the rest had never been."""

import mlx_specdec  # noqa: F401  # isort: skip

from random import Random

import mlx.core as mx
import pytest
from mlx import nn

from mlx_specdec.errors import OptionError
from mlx_specdec.target.model import CacheOptions, Sequence, Target
from tests import zoo

# What a draft model does: certain tokens, then drafts one by one or several at once, kept up to anywhere.
PASSES = [(3, 3), (1, 0), (1, 0), (2, 0), (1, 0)]


def feed(sequence: Sequence, tokens: list[int], certain: int) -> mx.array:
    logits, _ = sequence.forward(mx.array(tokens), certain=certain)
    mx.eval(logits, sequence.state)
    return logits


@pytest.mark.parametrize("kind", zoo.CACHE_KINDS)
def test_several_passes_back_to_any_row(kind: str) -> None:
    target = Target(zoo.CACHE_KINDS[kind]())
    random = Random(1)
    history = [random.randrange(64) for _ in range(30)]
    alone, drafting = target.sequence(), target.sequence()
    for sequence in (alone, drafting):
        feed(sequence, history, certain=30)
        sequence.settle(30)
    for keep in (3, 4, 5, 6, 7, 8):
        tokens = [random.randrange(64) for _ in range(8)]
        start = 0
        for rows, certain in PASSES:
            feed(drafting, tokens[start : start + rows], certain)
            start += rows
        drafting.settle(keep)
        for token in tokens[:keep]:
            feed(alone, [token], certain=1)
            alone.settle(1)
        assert drafting.offset == alone.offset
        probe = [random.randrange(64) for _ in range(2)]
        right, got = (feed(sequence, probe, certain=0) for sequence in (alone, drafting))
        for sequence in (alone, drafting):
            sequence.settle(0)
        assert mx.allclose(got, right, rtol=1e-3, atol=1e-3 * mx.abs(right).max().item()), keep
    target.close()


def test_a_replay_reads_no_projection_weights() -> None:
    """The point of remembering projections: only the state is computed again."""
    model = zoo.CACHE_KINDS["gated_delta"]()
    target = Target(model)
    sequence = target.sequence()
    feed(sequence, [1, 2, 3], certain=3)
    sequence.settle(3)
    feed(sequence, [4, 5, 6], certain=1)
    calls: list[nn.Module] = []
    linear = {id(m) for m in model.modules() if isinstance(m, nn.Linear)}
    multiply = nn.Linear.__call__

    def counted(self: nn.Linear, x: mx.array) -> mx.array:
        calls.append(self)
        return multiply(self, x)

    nn.Linear.__call__ = counted  # type: ignore[method-assign]
    try:
        sequence.settle(2)
    finally:
        nn.Linear.__call__ = multiply  # type: ignore[method-assign]
    assert linear
    assert calls == [], "every projection of the kept rows was remembered"
    target.close()


def test_two_targets_on_one_model_do_not_disturb_each_other() -> None:
    model = zoo.CACHE_KINDS["gated_delta"]()
    first, second = Target(model), Target(model)
    sequences = [first.sequence(), second.sequence()]
    outputs = []
    for sequence in sequences:
        feed(sequence, [1, 2, 3, 4], certain=1)
        sequence.settle(2)
        outputs.append(feed(sequence, [9], certain=1))
    first.close()
    assert mx.array_equal(*outputs)
    feed(sequences[1], [5, 6, 7], certain=1)
    sequences[1].settle(4 - 1)  # the row before was certain and not settled yet
    second.close()
    assert all("hooks" not in vars(type(m)) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"kv_group_size": 48}, "kv_group_size is 48"),
        ({"max_kv_size": 2}, "max_kv_size is 2"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"kv_bits": 4, "max_kv_size": 64}, "cannot be combined"),
    ],
)
def test_options_that_cannot_be(options: dict[str, int], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        CacheOptions(**options)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("window8", {"kv_bits": 8}, "kv_bits is 8 and gemma3_text has sliding windows"),
        ("window8", {"max_kv_size": 64}, "max_kv_size is 64 and gemma3_text has caches of its own"),
        ("kv", {"kv_bits": 4}, "kv_bits is 4 and this model cannot quantise its cache"),  # heads of 16
    ],
)
def test_options_that_do_not_fit_the_model(kind: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Target(zoo.CACHE_KINDS[kind](), CacheOptions(**options))
