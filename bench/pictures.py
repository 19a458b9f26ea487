"""What all pictures share: matplotlib, which is optional, a look, and files that come out the same each time."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# of Okabe and Ito: told apart with any colour vision, and on white as well as on black
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, LINE, PAPER = "#1f2329", "#c9ced6", "#fefefe"
WIDTH = 4.6  # inches: in a phone's width its letters still have their size

_STYLE = {
    "text.hinting": "none",
    "text.parse_math": False,  # a $ in a name is a $
    "svg.fonttype": "none",  # letters, not outlines: small, and can be searched
    "svg.hashsalt": "eagle_kernels",  # else its ids differ from run to run
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "axes.titley": 1.0,  # looking for a free place takes longer than drawing
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.6,
    "grid.color": LINE,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
}


class MissingMatplotlib(ImportError):
    """The message is one line."""


def matplotlib_for(command: str) -> Any:
    """The module, or who needs it and how to get it."""
    try:
        import matplotlib
    except ImportError:
        hint = "pip install matplotlib"
        raise MissingMatplotlib(f"{command} needs the package matplotlib, which is not installed: {hint}") from None
    return matplotlib


def in_style(draw: Callable) -> Callable:
    """Of a function that makes a figure, or writes one: whatever settings the user has, ours hold."""

    @functools.wraps(draw)
    def styled(*arguments, **options):
        matplotlib = matplotlib_for("bench.report")
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            return draw(*arguments, **options)

    return styled


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """No pyplot: nothing global, and no screen is asked for."""
    from matplotlib.figure import Figure

    return Figure((width, height))


@in_style
def svg_text(figure: Figure) -> str:
    """The same text for the same figure."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return file.getvalue()


@in_style
def write_png(figure: Figure, path: Path, dpi: int = 130) -> None:
    figure.savefig(path, dpi=dpi, metadata={"Software": None}, pil_kwargs={"compress_level": 4})
