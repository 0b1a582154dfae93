"""What every chart of the command line needs of matplotlib, which is the optional extra ``plot``.

Responsible for saying that it is missing, and for a figure without a display.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from kvist.errors import ConfigError


def require_matplotlib(command: str) -> None:
    """Raise unless a chart can be drawn.

    Args:
        command: Whose ``--plot`` it is.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"[{command}] --plot needs matplotlib, which is not installed; install it with pip install 'kvist[plot]'"
        )


def blank_figure(width: float, height: float, title: str) -> Any:  # noqa: ANN401  # matplotlib has no types
    """Return a figure of so many inches, to be saved as PNG."""
    # Optional and slow to import; without pyplot, so that nothing looks for a display or keeps figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure
