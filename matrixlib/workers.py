"""Worker processes that do not outlive the work they were started for."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """In a worker process: end with its parent, however that ends, so that no orphan goes on writing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process has a parent to end with"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
