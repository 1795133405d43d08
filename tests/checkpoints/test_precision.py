"""Making models dense: layers of every kind, and those that must be left alone."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_specdec  # noqa: F401  (before mlx.core, for the BLAS)
from mlx_specdec.checkpoints.precision import to_dtype
from mlx_specdec.errors import CheckpointError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.experts = SwitchLinear(64, 32, 4)
        self.out = nn.Linear(32, 8)
        self.decay = mx.array([0.1], dtype=mx.float32)
        self.steps = mx.array([3])

    def __call__(self, ids: mx.array) -> mx.array:
        return self.out(self.experts(self.embed(ids)[:, None, None], (ids % 4)[:, None])[:, 0, 0])


@pytest.mark.parametrize(("mode", "group", "bits"), [("affine", 32, 4), ("affine", 32, 8), ("mxfp4", 32, 4)])
def test_linear_embedding_and_experts(mode, group, bits):
    mx.random.seed(0)
    net = Net()
    nn.quantize(net, group, bits, mode=mode)
    ids = mx.arange(8)
    expected = np.array(net(ids).astype(mx.float32))
    dense = to_dtype(net, "float32")
    assert isinstance(dense.experts, SwitchLinear)
    assert dense.experts.weight.dtype == mx.float32
    np.testing.assert_allclose(np.array(dense(ids)), expected, atol=1e-5 if mode == "affine" else 2e-2)


def test_integers_and_what_the_model_protects_keep_their_dtype():
    net = Net()
    net.cast_predicate = lambda name: name != "decay"
    to_dtype(net, "bfloat16")
    assert (net.decay.dtype, net.steps.dtype, net.out.bias.dtype) == (mx.float32, mx.int32, mx.bfloat16)


class Odd(nn.Module):
    def __init__(self, **parts: mx.array) -> None:
        super().__init__()
        self.weight, self.scales = mx.zeros((2, 4), dtype=mx.uint32), mx.ones((2, 1))
        for name, value in parts.items():
            setattr(self, name, value)


@pytest.mark.parametrize(("parts", "words"), [({}, "Odd"), ({"global_scale": mx.array(2.0)}, "whole tensor")])
def test_a_layer_that_cannot_be_made_dense_is_named(parts, words):
    net = Net()
    net.odd = Odd(**parts)
    with pytest.raises(CheckpointError, match=f"odd.*{words}.*leave dtype out"):
        to_dtype(net, "float16")
