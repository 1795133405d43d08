"""`python -m mlx_specdec models`: what is known by name, what is on this machine, and which drafters fit a target."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli import MODELS, Command

if TYPE_CHECKING:
    from .checkpoints.catalogue import Catalogue, Drafter
    from .fits import Described, Fit, Stored


@click.command("models", cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", required=False)
@MODELS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(target: str | None, models: Path | None, as_json: bool) -> None:
    """List targets and their drafters, and what of them is on this machine; for a TARGET (a folder, a .gguf file, a
    name or a Hub id), which drafters fit it and why others do not. Only configs are read, and no network is asked."""
    from .checkpoints.catalogue import read_catalogue
    from .fits import describe, fits, stored

    known = read_catalogue(models)
    if target is None:
        here = stored(known)
        click.echo(json.dumps(as_dict(known, here)) if as_json else "\n".join(listing(known, here)))
    else:
        described = describe(target, known, models)
        found = fits(described, known)
        click.echo(json.dumps(fits_as_dict(described, found)) if as_json else "\n".join(report(described, found)))


def as_dict(known: "Catalogue", here: "list[Stored]") -> dict[str, Any]:
    """What --json prints without a target."""
    from .checkpoints.hub import held
    from .choice import on_this_machine

    return {
        "models": [asdict(entry) | {"here": held(entry) is not None} for entry in known.models.values()],
        "targets": [asdict(family) for family in known.targets.values()],
        "drafters": [asdict(drafter) | {"here": on_this_machine(drafter)} for drafter in known.drafters.values()],
        "cached": [each._asdict() | {"folder": str(each.folder)} for each in here],
    }


def listing(known: "Catalogue", here: "list[Stored]") -> list[str]:
    """The catalogue, and the Hub's cache."""
    from .checkpoints.hub import held
    from .choice import on_this_machine

    lines = ["models by name (+ is on this machine)"]
    lines += [f"  {_mark(held(e) is not None)} {e.name}: {e.description}, {e.license}" for e in known.models.values()]
    lines += ["", "targets, and the drafters published for them (+ is on this machine)"]
    marks = {name: _mark(on_this_machine(drafter)) for name, drafter in known.drafters.items()}
    for family in known.targets:
        lines.append(f"  {family}")
        lines += [f"    {marks[d.name]} {d.name}: {_terms(d)}" for d in known.drafters_for([family])]
    lines += ["", "in the Hub's cache on this machine", *(f"  {each.name}: {_what(each)}" for each in here)]
    return lines if here else [*lines, "  nothing"]


def _mark(here: bool) -> str:
    return "+" if here else " "


def _terms(drafter: "Drafter") -> str:
    """How it drafts, and on which terms it may be used."""
    sizes = {"block": drafter.block, "depth": drafter.depth}
    parts = [drafter.method, *(f"{what} {size}" for what, size in sizes.items() if size)]
    parts += [drafter.license or "license on its page", *([drafter.note] if drafter.note else [])]
    return ", ".join(parts)


def _what(stored: "Stored") -> str:
    """What a repository in the Hub's cache is."""
    families = " and ".join(stored.families)
    if stored.wrong:
        what = stored.wrong
    elif stored.kind:
        what = f"a drafter ({stored.kind})" + (f" for {families}" if families else "")
    else:
        what = f"a target: {families}" if families else "a model that no drafter is known for"
    return f"{stored.bytes / 1e9:.2f} GB, {what}"


def fits_as_dict(target: "Described", found: "list[Fit]") -> dict[str, Any]:
    """What --json prints for a target."""
    return {
        "target": target.source,
        "path": None if target.path is None else str(target.path),
        "families": target.families,
        "known_by": target.by if target.families else None,
        "sizes": {name: getattr(target.sizes, name) for name in ("hidden", "layers", "vocab")},
        "drafters": [
            {"name": fit.name, "method": fit.method, "here": fit.here, "fits": fit.wrong is None, "wrong": fit.wrong}
            | {"entry": None if fit.entry is None else asdict(fit.entry)}
            for fit in found
        ],
    }


def report(target: "Described", found: "list[Fit]") -> list[str]:
    """Which drafters fit, and what is wrong with the others."""
    families = f"{' and '.join(target.families)}, known by {target.by}" if target.families else "not in the catalogue"
    sizes = [(target.sizes.hidden, "hidden size {}"), (target.sizes.layers, "{} layers"),
             (target.sizes.vocab, "{} tokens")]  # fmt: skip
    said = [text.format(size) for size, text in sizes if size is not None]
    lines = [f"{target.source}: {'; '.join([families, *said] if target.path else [families, 'not on this machine'])}"]
    fitting = [fit for fit in found if fit.wrong is None]
    lines += ["fit (+ is on this machine):" if fitting else "no drafter with weights is known to fit"]
    for fit in fitting:
        what = "the heads inside the checkpoint" if fit.entry is None and fit.name == fit.method else None
        lines.append(f"  {_mark(fit.here)} {fit.name}: {what or (_terms(fit.entry) if fit.entry else fit.method)}")
    others = [fit for fit in found if fit.wrong is not None]
    return lines + (["do not fit:"] if others else []) + [f"    {fit.name}: {fit.wrong}" for fit in others]


if __name__ == "__main__":
    command(prog_name="python -m mlx_specdec.models")
