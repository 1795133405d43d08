"""Write tests/golden/onnx_*: tiny random models as onnxruntime-genai's builder and optimum export them, with logits.

Run in an environment of its own, once for each of the exporters (their versions ask for different transformers):

    pip install torch onnx onnxruntime onnx_ir onnxscript transformers==4.57.6 optimum-onnx==0.1.0
    python scripts/golden/onnx_exports.py optimum onnx_optimum_{llama,qwen2,gemma3,phi3}
    pip install onnxruntime-genai==0.11.4
    python scripts/golden/onnx_exports.py genai onnx_genai_{gemma2,gemma3}
    pip install onnxruntime-genai==0.18.0 transformers==5.24.0
    python scripts/golden/onnx_exports.py genai onnx_genai_{llama,qwen2_int4,qwen3_int4,phi3}

The logits are transformers' for float32 exports, from which onnxruntime's differ by at most `difference`, and
onnxruntime's for blocks of 4 bits.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# A width whose square root, by which embeddings are multiplied, every exporter and mlx-lm (bfloat16) have exactly.
WINDOWED = {"hidden_size": 16, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
# The class in transformers, the config, and the precision of the export
MODELS = {
    "onnx_optimum_llama": ("Llama", {"tie_word_embeddings": False}, "fp32"),
    "onnx_optimum_qwen2": ("Qwen2", {"tie_word_embeddings": True}, "fp32"),
    "onnx_optimum_gemma3": ("Gemma3", {**WINDOWED, "sliding_window_pattern": 2}, "fp32"),
    "onnx_optimum_phi3": ("Phi3", {"original_max_position_embeddings": 64}, "fp32"),
    "onnx_genai_llama": ("Llama", {"tie_word_embeddings": True, "rope_theta": 5e5, "rope_scaling": LLAMA3}, "fp32"),
    "onnx_genai_qwen3_int4": ("Qwen3", {"head_dim": 16, "hidden_size": 64, "tie_word_embeddings": False}, "int4"),
    "onnx_genai_qwen2_int4": ("Qwen2", {"hidden_size": 64, "tie_word_embeddings": True}, "int4"),
    "onnx_genai_gemma2": ("Gemma2", {**WINDOWED, "sliding_window": 64}, "fp32"),
    "onnx_genai_gemma3": ("Gemma3", {**WINDOWED, "num_hidden_layers": 6}, "fp32"),
    "onnx_genai_phi3": ("Phi3", {"original_max_position_embeddings": 64}, "fp32"),
}


def model(family: str, settings: dict) -> transformers.PreTrainedModel:
    """Random weights of a trained model's size, so that every layer tells in the logits."""
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    made = (
        getattr(transformers, f"{family}ForCausalLM")(kind(**COMMON | settings, attn_implementation="eager"))
        .float()
        .eval()
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in made.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(
                value + 0.1 * noise if "norm" in name or value.ndim == 1 else noise * 2 / value.shape[-1] ** 0.5
            )
    return made


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, 97)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def export(exporter: str, source: Path, result: Path, precision: str) -> None:
    if exporter == "genai":
        arguments = ["-i", source, "-o", result, "-p", precision, "-e", "cpu", "-c", source.parent / "cache"]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, arguments)], check=True)
    else:
        from optimum.exporters.onnx import main_export

        main_export(str(source), output=str(result), task="text-generation-with-past", do_validation=False)


def logits(folder: Path, ids: np.ndarray, head_dim: int) -> np.ndarray:
    """float32 [1, n, vocab] of onnxruntime, computing blocks of 4 bits in float32 rather than with rounded inputs."""
    read = onnx.load(str(folder / "model.onnx"))
    for node in read.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    session = onnxruntime.InferenceSession(read.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    for entry in session.get_inputs():
        if entry.name.startswith("past"):
            given[entry.name] = np.zeros((1, entry.shape[1], 0, head_dim), np.float32)
    known = {entry.name for entry in session.get_inputs()}
    return session.run(["logits"], {k: v for k, v in given.items() if k in known})[0]


def main(exporter: str, names: list[str]) -> None:
    for name in names:
        family, settings, precision = MODELS[name]
        result = GOLDEN / name
        shutil.rmtree(result, ignore_errors=True)
        with tempfile.TemporaryDirectory() as workshop:
            made, source = model(family, settings), Path(workshop) / "hf"
            made.save_pretrained(source)
            tokenizer().save_pretrained(source)
            export(exporter, source, result, precision)
        ids = np.random.default_rng(0).integers(3, 97, (1, 24))
        expected = logits(result, ids, made.model.layers[0].self_attn.head_dim)
        about = {"exporter": exporter, "transformers": transformers.__version__, "onnxruntime": onnxruntime.__version__}
        if precision == "fp32":
            with torch.no_grad():
                exact = made(torch.tensor(ids)).logits.numpy()
            about["difference"] = float(f"{np.abs(exact - expected).max():.1g}")
            assert about["difference"] < 1e-4
            expected = exact
        np.savez(result / "expected.npz", ids=ids, logits=expected)
        (result / "made_with.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
