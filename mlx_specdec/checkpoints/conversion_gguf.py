"""A GGUF file to an MLX folder: what MLX has a form for stays to the bit, heads and drafters included."""

from pathlib import Path

from ..errors import CheckpointError
from .conversion_drafter import convert_drafter
from .conversion_heads import take_along
from .conversion_model import write_model
from .conversion_options import Numbers
from .drafter import kind_of
from .gguf import model_and_config
from .gguf_drafter import SUFFIX, GGUFFolder
from .mtp import read_heads
from .mtp_layout import declared
from .writing import SHARD, Progress


def convert_gguf(file: Path, result: Path, numbers: Numbers, progress: Progress | None) -> None:
    """Convert a target with its heads, or a drafter. Raises CheckpointError for a file that cannot be read."""
    from .gguf_tokenizer import load_tokenizer

    if file.suffix != SUFFIX:
        raise CheckpointError(f"{file} is a file and neither a .gguf nor a .onnx one; give one of these, or a folder")
    folder = GGUFFolder(file)
    if kind := kind_of(folder):
        convert_drafter(folder, folder, kind, result, numbers, SHARD, progress)
        return
    model, config = model_and_config(  # in the numbers asked for: a float16 that is cast up is not the file's number
        folder.file, dtype=numbers.dtype, requantise=_packing(numbers), dense=numbers.dequantize
    )
    tokenizer = load_tokenizer(folder.file, None)
    ends = sorted(tokenizer.eos_token_ids)
    tokenizer.save_pretrained(result)
    declares = bool(declared(folder.config))
    entries = take_along(read_heads(folder, model) if declares else None, model, numbers, numbers.dtype, result)
    write_model(result, model, {**config, "eos_token_id": ends}, entries, numbers, numbers.dtype, SHARD, progress)


def _packing(numbers: Numbers) -> dict[str, int] | None:
    """How the loader packs, tensor by tensor, what MLX has no form for, if all is to be packed alike."""
    if not numbers.quantize or numbers.q_mode != "affine" or numbers.quant_predicate:
        return None
    return {"bits": numbers.form["bits"], "group_size": numbers.form["group_size"]}
