"""The embedding and head that drafters share, against the model's own pass, for every architecture of the zoo."""

import mlx_specdec  # noqa: F401  # isort: skip

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specdec.errors import PairingError
from mlx_specdec.features import FeatureRequest
from mlx_specdec.target.ends import Ends
from mlx_specdec.target.taps import Taps
from tests import zoo

TOKENS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n != "gemma3n"])
def test_head_and_embedding_are_the_models(name: str) -> None:
    model = zoo.build(name)
    taps = Taps(model, FeatureRequest(final=True))
    with taps.reading() as features:
        logits = model(mx.array([TOKENS]), cache=make_prompt_cache(model))[0]
    taps.release()
    before = type(model.layers[0])
    ends = Ends(model)
    final = features().final  # type: ignore[union-attr]
    assert mx.allclose(ends.head(final), logits.astype(mx.float32), rtol=1e-5, atol=1e-5)
    assert ends.embed(mx.array(TOKENS)).shape == final.shape
    after = model(mx.array([TOKENS]), cache=make_prompt_cache(model))[0]
    assert mx.array_equal(after, logits), "the model's own pass is as it was"
    ends.release()
    assert type(model.layers[0]) is before


def test_scaled_embedding() -> None:
    model = zoo.build("gemma2")
    embed = Ends(model).embed(mx.array(TOKENS))
    rows = model.model.embed_tokens(mx.array(TOKENS)) * model.args.hidden_size**0.5
    assert mx.allclose(embed, rows, rtol=1e-5)


def test_more_than_an_embedding_is_refused_and_nothing_stays_hooked() -> None:
    model = zoo.build("gemma3n")
    before = type(model.model), type(model.layers[0])
    with pytest.raises(PairingError, match="more than a token's embedding"):
        Ends(model)
    assert (type(model.model), type(model.layers[0])) == before
