"""The chess board widget of JupyterLab, a view of page data (`session.position_page`); never created headless."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HERE = Path(__file__).parent
LIBRARY = HERE / "chessground"


class BoardWidget(anywidget.AnyWidget):
    """Board widget. page: data shown. on_message: called with each message of the front end."""

    _esm = HERE / "board.js"
    _css = HERE / "board.css"
    page = traitlets.Dict().tag(sync=True)
    library = traitlets.Unicode().tag(sync=True)
    style_sheets = traitlets.Unicode().tag(sync=True)

    def __init__(self, page: dict[str, Any], on_message: Callable[[dict[str, Any]], None] | None = None) -> None:
        sheets = [path.read_text("utf-8") for path in sorted(LIBRARY.glob("*.css"))]
        library = (LIBRARY / "chessground.min.js").read_text("utf-8")
        super().__init__(page=page, library=library, style_sheets="\n".join(sheets))
        if on_message is not None:
            self.on_msg(lambda widget, message, buffers: on_message(message))
