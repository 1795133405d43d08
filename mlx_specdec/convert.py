"""`python -m mlx_specdec.convert`: a checkpoint in, an MLX folder out."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .cli import DTYPES, Command


@click.command("convert", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hf-path", "--model", required=True, help="A folder, .gguf or .onnx file, name or Hub id.")
@click.option("--mlx-path", default="mlx_model", show_default=True, type=click.Path(path_type=Path),
              help="The folder to make; it must not exist.")  # fmt: skip
@click.option("--quantize", "-q", is_flag=True, help="Quantise the weights.")
@click.option("--q-bits", type=int, help="Bits per weight. Default: 4; with mxfp8 8.")
@click.option("--q-group-size", type=int, help="Weights that share a scale. Default: 64; mxfp4 and mxfp8 32, nvfp4 16.")
@click.option("--q-mode", default="affine", show_default=True,
              type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="How weights are quantised.")  # fmt: skip
@click.option("--quant-predicate", type=click.Choice(["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]),
              help="Give the layers that matter more bits than the others.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES),
              help="Type of the weights that are not quantised. Default: the config's, else their own.")  # fmt: skip
@click.option("--dequantize", "-d", is_flag=True, help="Make all weights dense.")
@click.option("--revision", help="A branch, tag or commit of the Hub repository.")
@click.option("--offline", is_flag=True, help="Take only what is on this machine.")
def command(hf_path: str, mlx_path: Path, revision: str | None, offline: bool, **numbers: Any) -> None:
    """Convert a model, with its MTP heads, or a drafter to a folder that this package and mlx-lm load."""
    from .checkpoints.conversion import convert
    from .checkpoints.conversion_options import Numbers

    with _terminable(), _bar() as bar:
        folder = convert(hf_path, mlx_path, Numbers(**numbers), revision=revision, offline=offline, progress=bar)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    click.echo(f"{folder}: {size / 1e9:.3f} GB")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, so that nothing half-written is left; a second one does not disturb the clearing up."""

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _bar() -> Iterator[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label="Writing", file=sys.stderr, update_min_steps=1 << 20) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


if __name__ == "__main__":
    command(prog_name="python -m mlx_specdec.convert")
