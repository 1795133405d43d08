"""Questions: Spec-Bench's form, bad lines, which are chosen."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import OptionError
from mlx_specdec.questions import BUILT_IN, Question, choose, read_questions

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []},
    {"question_id": 111, "category": "math", "turns": ["c"]},
    {"question_id": 160, "category": "humanities", "turns": ["d"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["e"]},
    {"question_id": "x", "category": "mine", "turns": ["f"]},
]


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_questions_are_read_in_spec_bench_s_form(tmp_path: Path) -> None:
    questions = read_questions(written(tmp_path / "q.jsonl", SPEC_BENCH))
    assert [q.question_id for q in questions] == [81, 111, 160, 401, "x"]
    assert [q.group for q in questions] == ["multi-turn"] * 3 + ["math_reasoning", "mine"]
    assert questions[0].turns == ("a", "b")


@pytest.mark.parametrize(("line", "says"), [
    (b'{"question_id": 1', "is not JSON"),
    (b'{"question_id": 1, "category": "caf\xe9", "turns": ["a"]}', "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b"[1]", "[1]"),
    (b'{"category": "qa", "turns": ["a"]}', "question_id None"),
    (b'{"question_id": true, "category": "qa", "turns": ["a"]}', "question_id True"),
    (b'{"question_id": 1, "turns": ["a"]}', "category None"),
    (b'{"question_id": 1, "category": "", "turns": ["a"]}', "category ''"),
    (b'{"question_id": 1, "category": "qa", "turns": "a"}', "turns 'a'"),
    (b'{"question_id": 1, "category": "qa", "turns": []}', "turns '[]'"),
    (b'{"question_id": 1, "category": "qa", "turns": [1]}', "turns '[1]'"),
    (b'{"question_id": 1, "category": "qa", "turns": [""]}', "turns"),
], ids=lambda value: value[:50].decode("latin-1") if isinstance(value, bytes) else "")  # fmt: skip
def test_a_bad_line_is_named(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(json.dumps(SPEC_BENCH[0]).encode() + b"\r\n\r\n" + line + b"\n")
    with pytest.raises(OptionError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path} line 3 ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_questions_are_distinct_and_evenly_spaced() -> None:
    qa = [Question(i, "qa", (f"question {i // 2}",)) for i in range(20)]  # ten texts, each twice
    others = [Question(81, "writing", ("a", "b")), Question(91, "roleplay", ("c",)), Question("mine", "poems", ("d",))]
    chosen = choose([*qa, *others], 4)
    assert [q.question_id for q in chosen] == [0, 4, 10, 14, 81, 91, "mine"]
    assert choose(qa, 100) == qa[::2]
    with pytest.raises(OptionError, match="per_category is 0"):
        choose(qa, 0)


def test_the_built_in_questions_cover_spec_bench_s_groups() -> None:
    assert len({q.turns[0] for q in BUILT_IN}) == len({q.question_id for q in BUILT_IN})
    groups = {"multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"}
    assert {q.group for q in choose(BUILT_IN, 1)} == groups
