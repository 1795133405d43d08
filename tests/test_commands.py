"""The commands: text and figures out, one sentence for what cannot be used, and a proof that notices a broken rule."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from mlx import nn

from mlx_specdec import acceptance, decoder
from mlx_specdec.__main__ import main
from mlx_specdec.generate import command as generate_command
from mlx_specdec.sampling import Sampler
from tests import zoo
from tests.scripted import reference

VOCAB, PROMPT = 300, "the rain in spain stays mainly in the plain"
CHOSEN = "drafter suffix: no drafter with weights is known for this model\n"  # what auto says of a tiny model


def save(model: nn.Module, tokenizer: Any, folder: Path) -> Path:
    """Write a model and its tokenizer as mlx-lm does."""
    folder.mkdir()
    model.save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(asdict(model.args)))
    tokenizer._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, draft models that fit and do not, and folders that hold no model."""
    root = tmp_path_factory.mktemp("models")
    model, tokenizer = zoo.build("llama", vocab=VOCAB), zoo.tokenizer(VOCAB)
    draft = zoo.draft_of("llama", noise=zoo.NOISE[1], vocab=VOCAB)
    made = {
        "model": save(model, tokenizer, root / "model"),
        "draft": save(draft, tokenizer, root / "draft"),
        "stranger": save(draft, zoo.tokenizer(VOCAB, shuffle=3), root / "stranger"),
        "windowed": save(zoo.build("gemma3_text", vocab=VOCAB), tokenizer, root / "windowed"),
        "silent": save(model, tokenizer, root / "silent"),
        "empty": root / "empty",
        "torn": root / "torn",
        "odd": root / "odd",
    }
    (root / "silent" / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    made["empty"].mkdir()
    shutil.copytree(made["model"], made["torn"])
    weights = made["torn"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(made["model"], made["odd"])
    (made["odd"] / "config.json").write_text('{"model_type": "no-such-model"}')
    return {name: str(path) for name, path in made.items()}


def run(arguments: Sequence[str], folders: dict[str, str], **more: Any) -> Result:
    """Run a command; {name} in an argument stands for a folder."""
    return CliRunner().invoke(main, [a.format_map(folders) for a in arguments], **more)


GENERATE = ("generate", "--model", "{model}", "-p", PROMPT, "--ignore-chat-template", "-m", "20")


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], str]:
    """What the model on disk says after the prompt."""
    tokenizer = zoo.tokenizer(VOCAB)
    ids = reference(zoo.build("llama", vocab=VOCAB), tokenizer.encode(PROMPT), 20)
    return ids, tokenizer.decode(ids)


@pytest.mark.parametrize("drafter", [
    (), ("--num-draft-tokens", "auto"), ("--drafter", "none"), ("--num-draft-tokens", "0"),
    ("--drafter", "ngram_simple", "--ngram-n", "1", "--ngram-m", "4", "--num-draft-tokens", "4"),
    ("--draft-model", "{draft}"), ("--drafter", "draft_model", "--draft-model", "{draft}", "--num-draft-tokens", "6"),
    ("--draft-model", "{model}", "--num-draft-tokens", "3"), ("--draft-model", "{windowed}", "--num-draft-tokens", "3"),
    ("--drafter", "suffix,draft_model,ngram_map", "--draft-model", "{draft}", "--num-draft-tokens", "4"),
    ("--drafter", "ngram_mod,ngram_cache", "--ngram-n-match", "2", "--ngram-n-min", "1", "--ngram-n-max", "8"),
], ids=" ".join)  # fmt: skip
def test_generate_says_what_the_model_says(
    drafter: tuple[str, ...], folders: dict[str, str], expected: tuple[list[int], str]
) -> None:
    done = run([*GENERATE, *drafter, "--json"], folders)
    assert done.exit_code == 0
    named = dict(zip(drafter[::2], drafter[1::2], strict=True))
    auto = "--drafter" not in named and "--draft-model" not in named
    assert done.stderr == (CHOSEN if auto else "") or "{windowed}" in drafter  # a stranger, which is said
    said = json.loads(done.stdout)
    assert said.keys() == {
        "text", "tokens", "finish_reason", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps",
        "peak_memory", "stats",
    }  # fmt: skip
    assert (said["tokens"], said["text"]) == expected
    assert said["finish_reason"] == "length"
    assert said["prompt_tokens"] == len(zoo.tokenizer(VOCAB).encode(PROMPT))
    assert said["generation_tokens"] == said["stats"]["tokens"] == 20
    stats = said["stats"]
    assert stats.keys() == {
        "drafter", "rounds", "drafted", "accepted", "tokens", "drafting", "verifying", "host", "plain_rounds",
        "plain_seconds", "drafters", "acceptance_rate", "mean_accepted_length", "by_position", "predicted",
        "draft_length",
    }  # fmt: skip
    assert stats["rounds"] + stats["accepted"] == 20
    default = "draft_model" if "--draft-model" in named else "suffix"
    plain = named.get("--drafter") == "none" or named.get("--num-draft-tokens") == "0"
    assert stats["drafter"] == (None if plain else named.get("--drafter", default))
    if "{model}" in drafter:
        assert stats["acceptance_rate"] == 1.0
    if "draft_model" in (stats["drafter"] or "") and named.get("--num-draft-tokens", "auto") != "auto":
        assert stats["drafters"]["draft_model"]["drafted"] > 0


def test_generate_prints_text_and_figures_as_mlx_lm_does(
    folders: dict[str, str], expected: tuple[list[int], str]
) -> None:
    done = run([*GENERATE, "--draft-model", "{draft}"], folders)
    assert done.exit_code == 0
    head, body, tail = done.stdout.split("=" * 10)
    assert (head, body) == ("", "\n" + expected[1] + "\n")
    names = [line.split(":")[0] for line in tail.strip().splitlines()]
    assert names == ["Prompt", "Generation", "Peak memory", "Drafter"]
    assert "draft_model" in tail


def test_generate_prints_the_text_alone_when_it_is_not_to_be_verbose(
    folders: dict[str, str], expected: tuple[list[int], str]
) -> None:
    done = run([*GENERATE, "--verbose", "False"], folders)
    assert (done.exit_code, done.stdout, done.stderr) == (0, expected[1] + "\n", CHOSEN)


def test_generate_reads_standard_input(folders: dict[str, str], expected: tuple[list[int], str]) -> None:
    arguments = ["-" if a == PROMPT else a for a in GENERATE]
    assert tuple(json.loads(run([*arguments, "--json"], folders, input=PROMPT).stdout).values())[:2] == expected[::-1]


def test_generate_uses_the_chat_template(folders: dict[str, str]) -> None:
    tokenizer = zoo.tokenizer(VOCAB)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    plain = reference(zoo.build("llama", vocab=VOCAB), ids, 5)
    arguments = ("generate", "--model", "{model}", "-p", r"a\nb", "--system-prompt", "Be brief.", "-m", "5", "--json")
    said = json.loads(run(arguments, folders).stdout)
    assert said["tokens"] == plain
    assert said["prompt_tokens"] == len(ids)
    assert json.loads(run([*arguments, "--chat-template-config", "{{}}"], folders).stdout)["tokens"] == plain


def test_generate_ends_where_it_is_told_to(folders: dict[str, str], expected: tuple[list[int], str]) -> None:
    ids, text = expected
    tokenizer = zoo.tokenizer(VOCAB)
    stop = next(s for s in (text[i : i + 2] for i in range(4, len(text))) if "\ufffd" not in s)
    end = next(t for t in ids[3:] if tokenizer.encode(tokenizer.decode([t])) == [t] and t not in ids[:3])
    said = json.loads(run([*GENERATE, "--json", "--stop", stop, "--stop", "never said"], folders).stdout)
    assert (said["text"], said["finish_reason"]) == (text[: text.index(stop)], "stop")
    said = json.loads(run([*GENERATE, "--json", "--extra-eos-token", tokenizer.decode([end])], folders).stdout)
    assert (said["tokens"], said["finish_reason"]) == (ids[: ids.index(end) + 1], "stop")


def test_generate_of_no_tokens(folders: dict[str, str]) -> None:
    assert json.loads(run([*GENERATE, "-m", "0", "--json"], folders).stdout)["tokens"] == []
    done = run([*GENERATE, "-m", "0"], folders)
    assert done.exit_code == 0
    assert "No text generated" in done.stdout


def test_a_seed_fixes_the_text(folders: dict[str, str]) -> None:
    sampled = [*GENERATE, "--temp", "1", "--json", "--draft-model", "{draft}"]
    first, again, other = (
        json.loads(run([*sampled, "--seed", seed], folders).stdout)["tokens"] for seed in ("1", "1", "2")
    )
    assert first == again != other
    plain = json.loads(run([*sampled, "--seed", "1", "--num-draft-tokens", "0"], folders).stdout)["tokens"]
    assert first == plain  # coupled, which a seed chooses: the text does not depend on what was drafted
    sampled += ["--acceptance", "token", "--num-draft-tokens", "3"]
    first, again, other = (
        json.loads(run([*sampled, "--seed", seed], folders).stdout)["tokens"] for seed in ("1", "1", "2")
    )
    assert first == again != other


def refused(done: Result, *says: str) -> None:
    """One sentence, no traceback, exit code 2."""
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    assert done.stdout == ""
    *usage, sentence = done.stderr.removeprefix(CHOSEN).strip().splitlines()
    assert not usage or usage[0].startswith("Usage:")  # click's own, for what it can judge by itself
    assert sentence.startswith("Error: " if usage else "error: ")
    for part in says:
        assert part in sentence


BAD_GENERATE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--model", "{model}-not"), ("model-not", "does not exist")),
    (("--model", "./nothing.gguf"), ("nothing.gguf", "does not exist")),
    (("--model", ""), ("does not exist",)),
    (("--model", "{empty}"), ("empty", "config.json")),
    (("--model", "{torn}"), ("torn",)),
    (("--model", "{odd}"), ("odd", "no-such-model")),
    (("--dtype", "int3"), ("--dtype",)),
    (("--drafter", "magic"), ("no drafter 'magic'", "ngram_simple", "draft_model")),
    (("--drafter", "suffix,magic"), ("no drafter 'magic'",)),
    (("--drafter", "suffix,none"), ("none alone",)),
    (("--drafter", "suffix,,ngram_map"), ("no drafter ''",)),
    (("--drafter", "ngram_mod,suffix,ngram_mod"), ("ngram_mod is named twice",)),
    (("--drafter", "draft_model"), ("draft_model takes a model", "--draft-model")),
    (("--drafter", "suffix,draft_model"), ("draft_model takes a model", "--draft-model")),
    (("--drafter", "ngram_simple", "--draft-model", "{draft}"), ("ngram_simple", "draft")),
    (("--drafter", "none", "--draft-model", "{draft}"), ("none",)),
    (("--draft-model", "{model}-not"), ("model-not", "does not exist")),
    (("--draft-model", "{stranger}"), ("another tokenizer", "token 0 ")),
    (("--drafter", "ngram_simple", "--ngram-n", "0"), ("ngram_n is 0", "from 1")),
    (("--drafter", "suffix,ngram_simple", "--ngram-m", "0"), ("ngram_m is 0", "from 1")),
    (("--drafter", "ngram_map", "--ngram-min-hits", "0"), ("ngram_min_hits is 0", "from 1")),
    (("--drafter", "ngram_map", "--ngram-mode", "v"), ("ngram_mode is 'v'",)),
    (("--drafter", "ngram_mod", "--ngram-n-match", "0"), ("ngram_n_match is 0",)),
    (("--drafter", "ngram_mod", "--ngram-n-min", "9", "--ngram-n-max", "8"), ("ngram_n_min is 9", "ngram_n_max is 8")),
    (("--drafter", "ngram_cache", "--lookup-cache-static", "{model}-not"), ("model-not", "No such file")),
    (("--ngram-n", "many"), ("--ngram-n", "many")),
    (("--ngram-n", "4"), ("--ngram-n is 4", "auto", "only ngram_simple or ngram_map uses that")),
    (("--drafter", "suffix", "--ngram-mode", "k4v"), ("--ngram-mode is k4v", "suffix", "only ngram_map uses that")),
    (("--drafter", "ngram_map", "--ngram-n-max", "9"), ("--ngram-n-max is 9", "only ngram_mod uses that")),
    (("--drafter", "ngram_simpel", "--ngram-n", "4"), ("there is no drafter 'ngram_simpel'",)),
    (("--drafter", "suffix,auto", "--ngram-n", "4"), ("auto alone",)),
    (("--kv-bits", "7"), ("kv_bits is 7",)),
    (("--kv-bits", "0"), ("kv_bits is 0",)),
    (("--kv-bits", "4"), ("kv_bits is 4", "leave it out")),  # heads of 16 cannot be quantised in groups of 64
    (("--kv-group-size", "10"), ("kv_group_size is 10",)),
    (("--quantized-kv-start", "-1"), ("quantized_kv_start is -1",)),
    (("--max-kv-size", "2"), ("max_kv_size is 2",)),
    (("--max-kv-size", "64", "--kv-bits", "4"), ("kv_bits 4", "max_kv_size 64")),
    (("--prefill-step-size", "0"), ("prefill_step_size is 0",)),
    (("--max-tokens", "-5"), ("max_tokens is -5",)),
    (("--max-tokens", "few"), ("--max-tokens", "few")),
    (("--num-draft-tokens", "-1"), ("num_draft_tokens is -1", "auto")),
    (("--num-draft-tokens", "many"), ("--num-draft-tokens", "many", "auto")),
    (("--num-draft-tokens", "1.5"), ("--num-draft-tokens", "1.5")),
    (("--temp", "-0.1"), ("temperature is -0.1",)),
    (("--temp", "nan"), ("temperature is nan",)),
    (("--temp", "inf"), ("temperature is inf",)),
    (("--top-p", "1.5"), ("top_p is 1.5",)),
    (("--top-p", "nan"), ("top_p is nan",)),
    (("--top-k", "-1"), ("top_k is -1",)),
    (("--min-p", "2"), ("min_p is 2",)),
    (("--repetition-penalty", "-1"), ("repetition_penalty is -1",)),
    (("--repetition-penalty", "nan"), ("repetition_penalty is nan",)),
    (("--repetition-penalty", "inf"), ("repetition_penalty is inf",)),
    (("--presence-penalty", "nan"), ("presence_penalty is nan",)),
    (("--frequency-penalty", "inf"), ("frequency_penalty is inf",)),
    (("--acceptance", "sometimes"), ("--acceptance", "sometimes")),
    (("--stop", ""), ("stop string is ''",)),
    (("--extra-eos-token", "ab cd"), ("'ab cd' is 4 tokens",)),
    (("--chat-template-config", "{{"), ("--chat-template-config", "JSON")),
    (("--chat-template-config", "[1]"), ("--chat-template-config", "object")),
    (("--prompt", ""), ("prompt is empty",)),
    (("--prompt", "\udcff"), ("prompt",)),
    (("--prompt", "word " * 3000), ("context is 4096",)),
    (("--seed", "x"), ("--seed", "x")),
    (("--no-such-option",), ("--no-such-option",)),
    (("stray",), ("stray",)),
)


@pytest.mark.parametrize(("arguments", "says"), BAD_GENERATE, ids=lambda value: " ".join(value)[:40])
def test_generate_says_in_one_sentence_what_cannot_be_used(
    arguments: tuple[str, ...], says: tuple[str, ...], folders: dict[str, str]
) -> None:
    refused(run([*GENERATE, *arguments], folders), *says)


def test_generate_refuses_input_that_is_not_utf8(folders: dict[str, str]) -> None:
    refused(run([*GENERATE[:3], "-p", "-"], folders, input=b"caf\xe9 "), "standard input")


def test_a_chat_template_that_refuses(folders: dict[str, str]) -> None:
    refused(run(["generate", "--model", "{silent}", "--system-prompt", "x"], folders), "no system message, please")


@pytest.mark.parametrize("arguments", [("-h",), ("generate", "--help"), ("prove", "-h"), ("--version",)], ids=" ".join)
def test_help_and_version(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert done.stdout


def test_as_a_process_of_its_own(folders: dict[str, str], expected: tuple[list[int], str]) -> None:
    arguments = [a.format_map(folders) for a in GENERATE[1:]]
    python = [sys.executable, "-m", "mlx_specdec.generate"]
    done = subprocess.run([*python, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, CHOSEN)
    assert json.loads(done.stdout)["text"] == expected[1]
    done = subprocess.run([*python, *arguments, "-m", "-5"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(CHOSEN + "error: max_tokens is -5")
    assert done.stderr.count("\n") == 2


def test_the_command_of_the_module_is_that_of_the_group() -> None:
    assert main.commands["generate"] is generate_command


# prove

PROVE = (
    "prove",
    "--model",
    "{model}",
    "-p",
    PROMPT,
    "-p",
    "another one, one more",
    "--ignore-chat-template",
    "-m",
    "48",
)
DRAFTS = ("--draft-model", "{draft}", "--num-draft-tokens", "4")
NGRAMS = ("--drafter", "ngram_simple", "--ngram-n", "1", "--ngram-m", "4")


@pytest.mark.parametrize("drafter", [DRAFTS, NGRAMS], ids=["draft_model", "ngram"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_prove_holds_for_a_right_drafter(drafter: tuple[str, ...], rule: str, folders: dict[str, str]) -> None:
    done = run([*PROVE, *drafter, "--acceptance", rule, "--json"], folders)
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found.keys() == {"prompts", "arithmetic", "law", "drafted", "holds"}
    assert found["holds"] is True
    assert [(p["tokens"], p["difference"]) for p in found["prompts"]] == [(48, None)] * 2
    assert found["drafted"] == sum(p["drafted"] for p in found["prompts"]) > 0
    assert all(a["flips"] == 0 and 0 <= a["largest"] < 1e-3 for a in found["arithmetic"])
    if rule == "coupled":
        assert found["law"] is None
    else:
        assert found["law"]["tokens"] > 48
        assert found["law"]["p_value"] > 1e-3


def test_prove_prints_a_line_for_each_prompt(folders: dict[str, str]) -> None:
    done = run([*PROVE, *DRAFTS], folders)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    for number in (1, 2):
        assert re.fullmatch(rf"prompt {number}: 48 tokens, \d+/\d+ accepted, identical", lines[number - 1])
    assert lines[2].startswith("passes of 5 rows against passes of one")
    assert lines[3].startswith("distribution at temperature 0.8: p-value")
    assert lines[4:] == ["holds"]


def test_prove_shows_nothing_where_nothing_was_drafted(folders: dict[str, str]) -> None:
    done = run([*PROVE, "--drafter", "ngram_simple", "--ngram-n", "64", "--temp", "0"], folders)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith("nothing was drafted, so nothing was shown")


def test_prove_writes_no_memory(folders: dict[str, str], tmp_path: Path) -> None:
    done = run([*PROVE, "--drafter", "suffix", "--suffix-cache", str(tmp_path / "memory")], folders)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "memory").exists()


def accept_all(picks: mx.array, draft: mx.array) -> mx.array:
    return mx.array(draft.shape[0])


def accept_one_more(picks: mx.array, draft: mx.array) -> mx.array:
    agree = (picks[: draft.shape[0]] == draft).astype(mx.int32)
    return mx.minimum(mx.cumprod(agree).sum() + 1, draft.shape[0]).astype(mx.int32)


class Skewed(Sampler):
    """Every row of a pass but the first is judged a little wrongly."""

    def scores(self, logits: mx.array, fed: mx.array, start: int = 0) -> mx.array:
        logits = logits + mx.arange(logits.shape[0])[:, None] * mx.sin(mx.arange(logits.shape[1]))
        return super().scores(logits, fed, start)


@pytest.mark.parametrize("broken", [accept_all, accept_one_more])
def test_prove_notices_a_broken_match(broken: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "match", broken)
    done = run([*PROVE, *DRAFTS], folders)
    assert (done.exit_code, done.stderr) == (1, "")
    assert "different from token" in done.stdout
    assert "plain decoding gives" in done.stdout
    assert done.stdout.splitlines()[-1] == "does not hold"
    found = json.loads(run([*PROVE, *DRAFTS, "--temp", "0", "--json"], folders).stdout)
    assert found["holds"] is False
    assert found["law"] is None
    difference = next(p["difference"] for p in found["prompts"] if p["difference"])
    assert difference.keys() == {"place", "plain", "drafted", "plain_logit", "drafted_logit"}
    assert difference["plain"] != difference["drafted"]
    assert difference["plain_logit"] > difference["drafted_logit"]


def test_prove_notices_rows_that_are_not_what_they_would_be_alone(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "Sampler", Skewed)
    assert run([*PROVE, *DRAFTS, "--temp", "0"], folders).exit_code == 1


def all_stand(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Accepts every draft: the draft model's law instead of the target's."""
    return mx.array(draft.shape[0]), p[draft.shape[0]]


def no_residual(p: mx.array, q: mx.array, draft: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """Draws from p where max(0, p - q) is right."""
    accepted, _ = RIGHT_TOKEN(p, q, draft, uniforms)
    return accepted, p[accepted] * p[accepted]


RIGHT_TOKEN = acceptance.token


@pytest.mark.parametrize("broken", [all_stand, no_residual])
def test_prove_notices_another_distribution(
    broken: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "token", broken)
    arguments = [*PROVE, "--model", "{model}", "--draft-model", "{windowed}", "-m", "100", "--num-draft-tokens", "2"]
    done = run(arguments, folders)
    assert done.exit_code == 1
    assert "identical" in done.stdout
    assert "p-value 0.000" in done.stdout
    assert done.stdout.splitlines()[-1] == "does not hold"


BAD_PROVE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--drafter", "none"), ("nothing to prove",)),
    (("--num-draft-tokens", "0"), ("--num-draft-tokens", "0 is not in the range x>=1")),
    (("--num-draft-tokens", "-2"), ("--num-draft-tokens", "-2 is not in the range x>=1")),
    (("--num-draft-tokens", "auto"), ("--num-draft-tokens", "auto")),
    (("--drafter", "suffix,draft_model"), ("draft_model takes a model",)),
    (("-m", "0"), ("max_tokens is 0",)),
    (("-m", "-1"), ("max_tokens is -1",)),
    (("--temp", "-1"), ("temperature is -1",)),
    (("--temp", "nan"), ("temperature is nan",)),
    (("-p", ""), ("prompt is empty",)),
    (("--model", "{model}-not"), ("does not exist",)),
    (("--draft-model", "{stranger}"), ("another tokenizer", "token 0 ")),
)


@pytest.mark.parametrize(("arguments", "says"), BAD_PROVE, ids=lambda value: " ".join(value)[:40])
def test_prove_says_in_one_sentence_what_cannot_be_used(
    arguments: tuple[str, ...], says: tuple[str, ...], folders: dict[str, str]
) -> None:
    refused(
        run([*(a for a in PROVE if a not in ("-p", PROMPT, "another one, one more")), "-m", "4", *arguments], folders),
        *says,
    )
