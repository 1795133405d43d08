"""`convert`: what it refuses and why, what a failure leaves behind, and the command."""

import mlx_specdec  # noqa: F401  # isort: skip

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mlx_specdec import CheckpointError, OptionError
from mlx_specdec.checkpoints import load
from mlx_specdec.checkpoints.conversion import convert
from mlx_specdec.checkpoints.conversion_options import Numbers
from mlx_specdec.convert import command
from tests import zoo
from tests.checkpoints import torch_files
from tests.test_convert import DRAFTERS, GOLDEN, checkpoint, config_of, edit, refusal


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "source", zoo.build("llama", vocab=300))


def test_a_truncated_shard(source: Path, tmp_path: Path) -> None:
    file = source / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} cannot be read" in refusal(source, tmp_path / "result")


def test_an_index_that_names_a_missing_file(source: Path, tmp_path: Path) -> None:
    (source / "model-00002-of-00002.safetensors").unlink()
    assert "names model-00002-of-00002.safetensors, which is missing" in refusal(source, tmp_path / "result")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_a_shard_outside_the_folder(source: Path, tmp_path: Path, name: str) -> None:
    edit(source / "model.safetensors.index.json", lambda index: {"weight_map": {"a": name}})
    assert "which is not in its folder" in refusal(source, tmp_path / "result")


@pytest.mark.parametrize("index", [[], {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {}])
def test_an_index_that_is_none(source: Path, tmp_path: Path, index: Any) -> None:
    edit(source / "model.safetensors.index.json", lambda _: index)
    assert "is not an index of shards" in refusal(source, tmp_path / "result")


def test_a_tensor_of_another_shape(source: Path, tmp_path: Path) -> None:
    edit(source / "config.json", lambda config: config | {"intermediate_size": 96})
    said = refusal(source, tmp_path / "result")
    assert "does not fit its config.json" in said
    assert "mlp." in said
    assert "(64, 32)" in said


def test_a_missing_and_a_superfluous_tensor(source: Path, tmp_path: Path) -> None:
    edit(source / "config.json", lambda config: config | {"mlp_bias": True})
    assert "model.layers.0.mlp.down_proj.bias" in refusal(source, tmp_path / "result")
    layers = ["full_attention"] * 2
    edit(source / "config.json", lambda config: config | {"mlp_bias": False, "layer_types": layers})
    assert "model.layers.2." in refusal(source, tmp_path / "result")


@pytest.mark.parametrize("kind", ["unheard_of", "base", "../llama", "", None, 7, "llama.Model"])
def test_an_unknown_architecture(source: Path, tmp_path: Path, kind: Any) -> None:
    edit(source / "config.json", lambda config: config | {"model_type": kind})
    assert f"has the model_type {kind!r}, for which mlx-lm" in refusal(source, tmp_path / "result")


def test_code_of_its_own_is_not_run(source: Path, tmp_path: Path) -> None:
    (source / "own.py").write_text("raise SystemExit")
    edit(source / "config.json", lambda config: config | {"model_file": "own.py"})
    assert "brings its own model code ('own.py'), which is not run" in refusal(source, tmp_path / "result")


def test_folders_without_weights_or_config(source: Path, tmp_path: Path) -> None:
    for file in source.glob("model*"):
        file.unlink()
    assert "holds no" in refusal(source, tmp_path / "result")
    (source / "config.json").unlink()
    assert "config.json" in refusal(source, tmp_path / "result")
    assert "does not exist" in refusal("./nowhere", tmp_path / "result")


def test_a_pickle_with_code(source: Path, tmp_path: Path) -> None:
    for file in source.glob("model*"):
        file.unlink()
    marker = tmp_path / "ran"
    program = b"\x80\x02cos\nsystem\n(" + torch_files.text(f"touch {marker}") + b"tR."
    torch_files.write(source / "pytorch_model.bin", program, {})
    assert "pytorch_model.bin" in refusal(source, tmp_path / "result")
    assert not marker.exists()


def test_a_quantisation_that_is_null(source: Path, tmp_path: Path) -> None:
    edit(source / "config.json", lambda config: config | {"quantization": None, "quantization_config": None})
    convert(str(source), tmp_path / "packed", Numbers(quantize=True, q_group_size=32))
    assert config_of(tmp_path / "packed")["quantization"] == {"bits": 4, "group_size": 32, "mode": "affine"}
    convert(str(source), tmp_path / "plain")
    assert "quantization" not in config_of(tmp_path / "plain")


def test_a_tokenizer_that_is_no_text(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}')
    assert "UnicodeDecodeError" in refusal(source, tmp_path / "result")


WRONG_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "text_config": ("mtp_qwen3_5", {"text_config": "text"}),
    "extra tensors as a list": ("mtp_qwen3_5", {"mlx_lm_extra_tensors": ["mtp_file"]}),
    "extra tensors as text": ("mtp_qwen3_5", {"mlx_lm_extra_tensors": "mtp.safetensors"}),
    "layers": ("mtp_glm4_moe", {"num_hidden_layers": -1}),
    "assistant without a text": ("gemma4_assistant_plain/assistant", {"text_config": {}}),
    "assistant of a negative width": ("gemma4_assistant_plain/assistant", {"backbone_hidden_size": -1}),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_configs_that_cannot_be(tmp_path: Path, case: str) -> None:
    name, wrong = WRONG_CONFIGS[case]
    source = shutil.copytree(GOLDEN / name, tmp_path / "source")
    edit(source / "config.json", lambda config: config | wrong)
    assert str(source) in refusal(source, tmp_path / "result")


def test_links_are_followed_within_a_checkpoint_only(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not of the checkpoint")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    assert f"LICENSE is a link to {tmp_path / 'secret'}" in refusal(source, tmp_path / "result")
    (source / "LICENSE").unlink()
    (source / "licence.md").write_text("a licence")
    (source / "LICENSE").symlink_to("licence.md")
    convert(str(source), tmp_path / "result")
    assert (tmp_path / "result" / "LICENSE").read_text() == "a licence"


def test_the_links_of_the_cache_are_followed(source: Path, tmp_path: Path) -> None:
    blobs, snapshot = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/0123"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    convert(str(snapshot), tmp_path / "result")
    assert (tmp_path / "result" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not any(file.is_symlink() for file in (tmp_path / "result").iterdir())


def test_names_of_any_length(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written \(File name too long"):
        convert(str(source), tmp_path / ("x" * 256))
    convert(str(source), tmp_path / ("x" * 255))
    assert load(tmp_path / ("x" * 255))


def test_folders_above_go_with_a_failure_and_others_stay(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_bytes(b"\xff")
    (tmp_path / "mine").mkdir()
    refusal(source, tmp_path / "mine" / "a" / "b" / "result")
    assert not list((tmp_path / "mine").iterdir())


def test_a_folder_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"result cannot be written \(.*file"):
        convert(str(source), tmp_path / "file" / "result")


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    result.mkdir()
    with pytest.raises(OptionError, match="exists and is never overwritten"):
        convert(str(source), result)
    assert not list(result.iterdir())
    result.rmdir()
    result.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="exists and is never overwritten"):
        convert(str(source), result)


def interrupting(error: BaseException, done: int, total: int) -> None:
    """Progress that fails in the middle of the second shard."""
    if done > total * 0.7:
        raise error


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_an_interrupted_run_leaves_nothing(
    source: Path, tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    result = tmp_path / "there" / "result"
    with pytest.raises(raised) as seen:
        convert(str(source), result, progress=partial(interrupting, error))
    assert not result.parent.exists()
    if raised is CheckpointError:
        assert f"{result} cannot be written (No space left on device)" in str(seen.value)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file can grow beyond 40 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    source = GOLDEN / DRAFTERS["dflash"]
    assert "cannot be written" in refusal(source, tmp_path / "result")


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10, used=10, free=0))
    said = refusal(source, tmp_path / "result")
    assert "0.0 GB are free" in said


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"quantize": True, "dequantize": True}, "exclude each other"),
    "bits": ({"quantize": True, "q_bits": 7}, "cannot quantise so"),
    "group": ({"quantize": True, "q_group_size": 48}, "cannot quantise so"),
    "no bits": ({"quantize": True, "q_bits": 0}, "--q-bits is 0"),
    "no group": ({"quantize": True, "q_group_size": 0}, "--q-group-size is 0"),
    "mode for nothing": ({"q_mode": "mxfp4"}, "--q-mode is mxfp4 and nothing is quantised"),
    "mode": ({"quantize": True, "q_mode": "int4"}, "--q-mode is 'int4'"),
    "bits for nothing": ({"q_bits": 8}, "--q-bits is 8 and nothing is quantised"),
    "recipe for nothing": ({"quant_predicate": "mixed_2_6"}, "nothing is quantised"),
    "recipe": ({"quantize": True, "quant_predicate": "mixed"}, "--quant-predicate is 'mixed'"),
    "recipe and mode": ({"quantize": True, "quant_predicate": "mixed_2_6", "q_mode": "mxfp4"}, "--q-mode is mxfp4"),
    "dtype": ({"dtype": "int8"}, "dtype is 'int8'"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_options_that_cannot_be(case: str) -> None:
    options, sentence = WRONG_OPTIONS[case]
    with pytest.raises(OptionError) as raised:
        Numbers(**options)
    assert sentence in str(raised.value)


def test_a_recipe_for_a_model_without_its_layers(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", zoo.build("mamba2", vocab=300, hidden_size=64))
    said = refusal(source, tmp_path / "result", OptionError, quantize=True, quant_predicate="mixed_2_6")
    assert "cannot be used here" in said


# the command


def test_the_command(source: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    run = CliRunner().invoke(command, ["--model", str(source), "--mlx-path", str(result), "-q", "--q-group-size", "32"])
    assert run.exit_code == 0, run.output
    assert f"{result}: 0.000 GB" in run.output
    assert config_of(result)["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    again = CliRunner().invoke(command, ["--hf-path", str(source), "--mlx-path", str(result)])
    assert again.exit_code == 2
    assert again.output.startswith(f"error: {result} exists and is never overwritten")
    assert len(again.output.splitlines()) == 1


STOPPED = """
import sys, time
from mlx_specdec.checkpoints import conversion
from mlx_specdec.convert import command

def wait(*_):
    print("writing", flush=True)
    time.sleep(60)

conversion.write_model = wait
command(sys.argv[1:])
"""


def test_sigterm_leaves_nothing(source: Path, tmp_path: Path) -> None:
    result = tmp_path / "there" / "result"
    arguments = [sys.executable, "-c", STOPPED, "--model", str(source), "--mlx-path", str(result)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert list(result.parent.iterdir())
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not result.parent.exists()


def test_the_command_gives_the_signal_back(source: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = CliRunner().invoke(command, ["--model", str(source), "--mlx-path", str(tmp_path / "result")])
    assert run.exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before
