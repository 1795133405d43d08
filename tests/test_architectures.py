"""Every architecture of the zoo, through random patterns of acceptance: the ids of plain decoding, or a refusal."""

import mlx_specdec  # noqa: F401  # isort: skip

from random import Random

import pytest

from mlx_specdec.errors import UnsupportedModelError
from mlx_specdec.target.model import Target
from tests import zoo
from tests.scripted import Scripted, drafted, plain, reference

# Its attention keeps recurrent arrays and a key-value cache in one module, and replaying it would write both.
REFUSED = ("baichuan_m1",)
REWOUND = [name for name in zoo.ARCHITECTURES if name not in REFUSED]


@pytest.mark.parametrize("name", REWOUND)
def test_random_patterns(name: str) -> None:
    target = Target(zoo.build(name))
    for seed, length in enumerate((1, 7, 40)):
        prompt = [(7 * i * i + 3 * i + 5) % 64 for i in range(length)]
        answer = reference(target.model, prompt, 60)
        for k in (1, 3, 5):
            random = Random(100 * seed + k)
            rate = random.choice((0.2, 0.5, 0.8))

            def script(place: int, token: int, random: Random = random, rate: float = rate) -> int:
                return token if random.random() < rate else random.randrange(64)

            assert drafted(target, Scripted(answer, script), prompt, 60, k) == answer, (length, k)
    target.close()


def test_enough_architectures() -> None:
    assert len(REWOUND) >= 25


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load_with_the_reason(name: str) -> None:
    model = zoo.build(name)
    kinds = {id(m): type(m) for m in model.modules()}
    with pytest.raises(UnsupportedModelError, match="cannot be rewound"):
        Target(model)
    assert kinds == {id(m): type(m) for m in model.modules()}, "a refusal leaves no hook behind"
    prompt = [1, 2, 3]
    assert plain(model, prompt, 20) == reference(model, prompt, 20)
