"""Prompts to measure on: a file in Spec-Bench's form, or a few built in."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import OptionError

MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Question:
    """In Spec-Bench's form: the turns are what a user says one after another, each after the answer to the last."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """What it is reported under: MT-bench's eight categories are one group, "multi-turn"."""
        return "multi-turn" if self.category in MULTI_TURN else self.category


def read_questions(path: Path) -> list[Question]:
    """A file of one JSON object a line, with question_id, category and turns. Raises OptionError naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}; give a file of questions") from error
    questions = [_question(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise OptionError(f"{path} holds no questions; give one JSON object a line")
    return questions


def _question(line: bytes, place: str) -> Question:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{place} is not JSON: {error}; give question_id, category and turns") from error
    if not isinstance(row, dict):
        raise OptionError(f"{place} is {str(row)[:40]!r}; give an object with question_id, category and turns")
    number, category, turns = (row.get(key) for key in ("question_id", "category", "turns"))
    if not isinstance(number, int | str) or isinstance(number, bool):
        raise OptionError(f"{place} has the question_id {number!r}; give a number or text")
    if not (isinstance(category, str) and category):
        raise OptionError(f"{place} has the category {category!r}; give a text")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise OptionError(f"{place} has the turns {str(turns)[:40]!r}; give a list of texts")
    return Question(number, category, tuple(turns))


def choose(questions: Sequence[Question], each: int) -> list[Question]:
    """`each` questions of every group, or all if it has fewer: distinct from the first turn on, evenly spaced, in the
    order of the file."""
    if each < 1:
        raise OptionError(f"per_category is {each}; choose 1 or more")
    distinct: dict[str, Question] = {}
    for question in questions:
        distinct.setdefault(question.turns[0], question)
    groups: dict[str, list[Question]] = {}
    for question in distinct.values():
        groups.setdefault(question.group, []).append(question)
    return [
        group[place * len(group) // min(each, len(group))]
        for group in groups.values()
        for place in range(min(each, len(group)))
    ]


PASSAGES = (
    "The lighthouse at Marren Point was built in 1871 after three cargo ships were lost on the reef in a single "
    "winter. Its lamp burned rape oil at first, then paraffin, and was visible for fourteen miles in clear weather."
    " A keeper and two assistants lived in the cottages below the tower and took turns to wind the clockwork that "
    "rotated the lens. In 1934 the lamp was electrified, and in 1988 the last keeper left when the light was "
    "automated. The cottages stood empty for ten years until a local trust turned them into a museum. About nine "
    "thousand visitors climb the 142 steps of the tower every summer, and the entrance fees pay for the upkeep of "
    "the lens, which is still the original one.",
    "The town council of Eastbrook voted on Tuesday to close the central market square to cars from the first of "
    "May. Delivery vans may still enter between six and ten in the morning, and residents of the square will "
    "receive permits. Shop owners were divided: the bakery and the two cafes welcomed the plan and hope to put "
    "tables outside, while the furniture shop fears that customers will not carry heavy goods to the car park on "
    "Mill Lane. The council promised to review the decision after one year and to publish the number of visitors, "
    "which is counted by cameras, every month. A similar plan in the neighbouring town of Westbrook raised the "
    "number of visitors by a fifth.",
)

BUILT_IN = (
    Question(1, "writing", ("Write a letter about a walk in the rain.", "Write it again as if it had snowed.")),
    Question(2, "coding", ("Write a Python function that finds the n-th Fibonacci number.", "Now with a docstring.")),
    Question(3, "extraction", ("List ten animals with a fact about each.", "Which can fly? Repeat their lines.")),
    Question(4, "translation", ("Translate to German: The library opens at nine and closes at five on weekdays.",)),
    Question(5, "translation", ("Translate to French: We missed the last train, so we walked home along the river.",)),
    Question(6, "translation", ("Translate to Spanish: My sister paints the old boats in the harbour every spring.",)),
    Question(7, "summarization", (f"Summarize: {PASSAGES[0]}",)),
    Question(8, "summarization", (f"Summarize: {PASSAGES[1]}",)),
    Question(9, "qa", ("Why is the sky blue during the day and red at sunset?",)),
    Question(10, "qa", ("What does a conductor do during a concert?",)),
    Question(11, "qa", ("How is bread made, and why does the dough rise?",)),
    Question(12, "math_reasoning", ("A train leaves at 9:40 and arrives at 12:15. How long does it travel?",)),
    Question(13, "math_reasoning", ("Tom buys 3 pens at 2 dollars and 4 books at 7 dollars. What does he pay?",)),
    Question(14, "math_reasoning", ("A tank holds 240 litres and loses 5 litres an hour. When is it half empty?",)),
    Question(15, "rag", (f"{PASSAGES[0]}\n\nHow was the lamp lit over the years? Quote the sentences that say so.",)),
    Question(16, "rag", (f"{PASSAGES[1]}\n\nWhat do the shop owners think? Quote the sentences that say so.",)),
)
