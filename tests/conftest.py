"""Options of a test run."""

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drafters",
        type=Path,
        default=Path(__file__).parent / "real" / "drafters",
        metavar="FOLDER",
        help="--drafters=FOLDER (with the =): where the trained drafters for the real model lie, a folder each; they "
        "are too large for the repository",
    )


@pytest.fixture
def trained(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Where the trained drafter of a name lies; skips the test when it is not there."""

    def find(name: str) -> Path:
        folder: Path = pytestconfig.getoption("drafters") / name
        if not (folder / "config.json").is_file():
            pytest.skip(f"{folder} is not there; name the folder that holds {name} with --drafters=FOLDER")
        return folder

    return find
