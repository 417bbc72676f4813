"""The live panel in a Jupyter front end: curves by uPlot. Only made where somebody looks at it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from matrixlib.runs.figures import Chart, Mark

HERE = Path(__file__).parent
LIBRARY = HERE / "uplot"


class Panel(anywidget.AnyWidget):
    """progress: "step", "total", "text" and "line". view: what `view` gives."""

    _esm = (LIBRARY / "uPlot.iife.min.js").read_text("utf-8") + (HERE / "panel.js").read_text("utf-8")
    _css = (LIBRARY / "uPlot.min.css").read_text("utf-8") + (HERE / "panel.css").read_text("utf-8")
    progress = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)


def view(charts: Sequence[Chart], marks: Sequence[Mark]) -> dict[str, Any]:
    """Plain values and bytes for the front end: of each chart "steps" (float64) and "values" (float32, curve by curve,
    nan where there is none), which are the same for all of its curves."""
    shown = []
    for chart in charts:
        values = np.stack([curve.values for curve in chart.curves]).astype(np.float32)
        there = ~np.isnan(values).all(0)
        shown.append(
            {
                "label": chart.label,
                "held_out": chart.held_out,
                "log": chart.log,
                "curves": [{"name": one.name, "kind": one.kind, "colour": one.colour} for one in chart.curves],
                "levels": [level for level in chart.levels if math.isfinite(level[1])],
                "steps": chart.steps[there].tobytes(),
                "values": values[:, there].tobytes(),
            }
        )
    return {"charts": shown, "marks": [(mark.step, mark.text, mark.bad) for mark in marks]}
