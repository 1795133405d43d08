"""The real model: its ids with a drafter equal plain decoding's, on 20 prompts of 128 tokens."""

import mlx_specdec  # isort: skip

from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.drafters.draft_model import DraftModel
from mlx_specdec.drafters.ngram_simple import NgramSimple
from mlx_specdec.generate import chat
from mlx_specdec.target.model import Target
from tests.scripted import drafted, plain, reference

pytestmark = pytest.mark.real

TOKENS = 128
PROMPTS = (
    "Write one paragraph about how bread is made.",
    "Count from 1 to 60, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, and call it for n = 10.",
    "Repeat this sentence ten times: The quick brown fox jumps over the lazy dog.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it travel? Think step by step.",
    "List ten animals in alphabetical order with one fact about each.",
    "Translate to German: The library opens at nine and closes at five on weekdays.",
    "Correct the spelling and repeat the whole text: I recieved teh package yesterday adn opend it.",
    "Explain what a hash table is to a ten-year-old.",
    "Write a haiku about the sea, and then explain each line.",
    "What are the advantages and disadvantages of living in a large city?",
    "Summarise in one sentence: Photosynthesis is how plants make sugar and oxygen of light, water and carbon dioxide.",
    "def quicksort(items):\n    # complete this function and add a test",
    "Write a letter to a friend who is moving to another country.",
    "Name the planets of the solar system from the sun outwards, one a line, with their order.",
    "日本の首都はどこですか。短く答えてください。",
    "Give me a recipe for pancakes as a numbered list.",
    "If I have 17 apples, give away 5 and buy 8 more, how many do I have? Show the sum.",
    "Write the JSON of a shopping cart with three items, each with name, price and quantity.",
    "Who wrote Romeo and Juliet, and what is it about? 🎭",
)


@cache
def loaded() -> tuple[Target, Any, Target]:
    """The float32 target, its tokenizer, and its own 4-bit form (computing in float32) as the draft model."""
    model, tokenizer = mlx_specdec.load("smollm2-135m", dtype="float32")
    quantised, _ = mlx_specdec.load("smollm2-135m")
    quantised.set_dtype(mx.float32)
    return Target(model), tokenizer, Target(quantised)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_ids_equal_plain_decoding(number: int) -> None:
    target, tokenizer, draft = loaded()
    prompt = chat(tokenizer, PROMPTS[number])
    answer = plain(target.model, prompt, TOKENS)
    assert drafted(target, NgramSimple(3, 8), prompt, TOKENS, 4) == answer
    assert drafted(target, DraftModel(draft, target.vocab), prompt, TOKENS, 8) == answer


def test_plain_decoding_is_mlx_lms() -> None:
    target, tokenizer, _ = loaded()
    prompt = chat(tokenizer, PROMPTS[2])
    assert plain(target.model, prompt, TOKENS) == reference(target.model, prompt, TOKENS)
