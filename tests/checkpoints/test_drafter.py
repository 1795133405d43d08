"""Which kind of drafter a folder is, told from its config, or from its tensors where that says nothing."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints.drafter import kind_of
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.errors import CheckpointError


def folder(path: Path, config: dict[str, Any], *names: str) -> Folder:
    (path / "config.json").write_text(json.dumps(config))
    if names:
        mx.save_safetensors(str(path / "model.safetensors"), {name: mx.ones((2, 2)) for name in names})
    return Folder(path)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TRUNK = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        (LLAMA, TRUNK, None),
        (LLAMA, (), None),
        ({"architectures": [None]}, TRUNK, None),
        ({"architectures": 5}, TRUNK, None),
        ({"architectures": "LlamaForCausalLMEagle3"}, (), "eagle3"),
        ({"speculators_model_type": "eagle3"}, (), "eagle3"),
        (LLAMA | {"draft_vocab_size": 9}, (), "eagle3"),
        (LLAMA, ("midlayer.hidden_norm.weight", "fc.weight"), "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, (), "dflash"),
        ({"dflash_config": {}}, (), "dflash"),
        ({"model_type": "gemma4_unified_assistant"}, (), "gemma4_assistant"),
        ({"medusa_num_heads": 3}, (), "medusa"),
        ({"model_type": "qwen3_5_mtp"}, (), "mtp"),
        (LLAMA, (*TRUNK, "fc.weight", "layers.0.mlp.gate_proj.weight"), None),  # heads beside a trunk
        (LLAMA, ("fc.weight", "pre_fc_norm_hidden.weight", "layers.0.mlp.gate_proj.weight"), None),
    ],
)
def test_kinds(config: dict[str, Any], names: tuple[str, ...], kind: str | None, tmp_path: Path) -> None:
    assert kind_of(folder(tmp_path, config, *names)) == kind


@pytest.mark.parametrize(
    ("config", "names", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, (), "DFlash 2"),
        ({"speculators_model_type": "dspark"}, (), "DSpark"),
        ({"architectures": ["Qwen3DSparkModel"]}, (), "DSpark"),
        (LLAMA, ("fc.weight", "layers.0.mlp.gate_proj.weight"), "EAGLE-1 or EAGLE-2"),
    ],
)
def test_what_is_known_and_not_supported(
    config: dict[str, Any], names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"is a {said} drafter, which is not supported"):
        kind_of(folder(tmp_path, config, *names))


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    files = folder(tmp_path, LLAMA, *TRUNK)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert kind_of(files) is None
