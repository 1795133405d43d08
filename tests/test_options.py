"""Options of drafters: each is known to belong to some, given without them it is refused, and with any of them not."""

import mlx_specdec  # noqa: F401  # isort: skip

from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlx_specdec.cli import Command, ModelOptions, model_options
from mlx_specdec.drafters import TEXT_DRAFTERS, USED_BY, DrafterOptions

GIVEN = {
    "ngram_n": "5", "ngram_m": "9", "ngram_min_hits": "2", "ngram_mode": "k4v", "ngram_n_match": "20",
    "ngram_n_min": "7", "ngram_n_max": "60", "suffix_max_tree_depth": "20", "suffix_max_cached_requests": "9",
    "suffix_max_spec_factor": "3", "suffix_max_spec_offset": "1", "suffix_min_token_prob": "0.3",
}  # fmt: skip


def refused(option: str, value: str, drafters: str) -> str:
    """The sentence, or nothing."""

    @click.command(cls=Command)
    @model_options
    def command(models: ModelOptions) -> None:
        models.makers(str(models.drafter))

    name = f"--{option.replace('_', '-')}"
    done = CliRunner().invoke(command, ["--drafter", drafters, name, value], catch_exceptions=False)
    assert done.exit_code == (2 if done.stderr else 0)
    return done.stderr


@pytest.mark.parametrize("option", USED_BY)
def test_an_option_is_for_its_drafters(option: str, tmp_path: Path) -> None:
    value, users = GIVEN.get(option, str(tmp_path / "file")), USED_BY[option]
    if option == "lookup_cache_static":
        Path(value).touch()  # it has to be there
    for drafter in TEXT_DRAFTERS:
        for drafters in (drafter, f"mtp, {drafter}"):
            said = refused(option, value, drafters)
            assert ("uses that" in said) == (drafter not in users), (drafters, said)
    assert "auto" in refused(option, value, "auto") or "suffix" in users
    assert not refused(option, value, " none "), "plain decoding is compared with"


def test_all_options_are_somebody_s() -> None:
    assert set(USED_BY) == {field.name for field in fields(DrafterOptions)} - {"keeps"}
    assert set(GIVEN) <= set(USED_BY)
    assert {user for users in USED_BY.values() for user in users} == set(TEXT_DRAFTERS)
