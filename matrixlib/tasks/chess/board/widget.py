"""The board in JupyterLab: a thin view of a page of plain values. Only made where somebody looks at it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent
LIBRARY = HERE / "chessground"


class BoardWidget(anywidget.AnyWidget):
    """page: what is shown. hear: is given what the page asks for."""

    _esm = HERE / "board.js"
    _css = HERE / "board.css"
    page = traitlets.Dict().tag(sync=True)
    library = traitlets.Unicode().tag(sync=True)
    style_sheets = traitlets.Unicode().tag(sync=True)

    def __init__(self, page: dict[str, Any], hear: Callable[[dict[str, Any]], None] | None = None) -> None:
        sheets = [path.read_text("utf-8") for path in sorted(LIBRARY.glob("*.css"))]
        library = (LIBRARY / "chessground.min.js").read_text("utf-8")
        super().__init__(page=page, library=library, style_sheets="\n".join(sheets))
        if hear is not None:
            self.on_msg(lambda widget, message, buffers: hear(message))
