"""`python -m mlx_specdec COMMAND` and the console script `mlx-specdec`."""

import click

from .bench import command as bench
from .convert import command as convert
from .generate import command as generate
from .models import command as models
from .prove import command as prove


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-specdec")
def main() -> None:
    """Lossless speculative decoding for mlx-lm models."""


main.add_command(bench)
main.add_command(convert)
main.add_command(generate)
main.add_command(models)
main.add_command(prove)

if __name__ == "__main__":
    main(prog_name="python -m mlx_specdec")
