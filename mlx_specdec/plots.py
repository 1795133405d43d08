"""Drawings of what was measured. Needs matplotlib, the extra `plot`."""

from importlib.util import find_spec
from pathlib import Path

from .errors import OptionError
from .measure import Report


def check(path: Path) -> None:
    """Raises OptionError for a file that `draw` could not write, before anything is measured for it."""
    if path.suffix.lower() != ".png":
        raise OptionError(f"the plot is {path}; give a name that ends in .png")
    if not path.parent.is_dir():
        raise OptionError(f"the plot is {path} and {path.parent} is no folder; make it first")
    if find_spec("matplotlib") is None:
        raise OptionError("a plot needs matplotlib, which is not installed; pip install 'mlx-specdec[plot]'")


def draw(report: Report, path: Path) -> None:
    """Write a PNG: the speed-up of every way by category, and how often drafts stand by their position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    shown = {name: result for name, result in report.ways.items() if name != "plain" and result.overall is not None}
    places = [*report.questions, "overall"]
    width = 0.8 / max(len(shown), 1)
    for number, (name, result) in enumerate(shown.items()):
        figures = [*(result.categories or {}).values(), result.overall]
        spreads = [(place, f.speedup) for place, f in enumerate(figures) if f is not None and f.speedup is not None]
        bars.bar(
            [place + (number + 0.5) * width - 0.4 for place, _ in spreads],
            [s.median for _, s in spreads],
            width,
            yerr=[[s.median - s.low for _, s in spreads], [s.high - s.median for _, s in spreads]],
            label=name,
            color=f"C{number}",
        )
        if result.overall is not None and result.overall.by_position:
            rates = result.overall.by_position
            lines.plot(range(1, len(rates) + 1), rates, marker=".", label=name, color=f"C{number}")
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_xticks(range(len(places)), places, rotation=30, ha="right")
    bars.set_ylabel("speed-up over plain decoding")
    lines.set_xlabel("position in the draft")
    lines.set_ylabel("share that stands")
    lines.set_ylim(0, 1.05)
    for axes in (bars, lines):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise OptionError(f"the plot {path} cannot be written: {error.strerror}; choose another place") from error
