"""JupyterLab in the system's Chromium: a server of its own, notebooks opened, run and looked at as a person would."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SIZE = {"width": 1300, "height": 900}
START, STEP = 60, 300  # seconds: until something is shown; until a notebook has run, on a busy machine
NO_NEWS = {"fetchNews": "false", "checkForUpdates": False}
RUNNING = "() => [...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"


@contextmanager
def chromium() -> Iterator[Page]:
    """A page of an empty browser of the system's; the test skips where there is none."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(1000 * START)
        yield page
        browser.close()


@contextmanager
def laboratory(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A JupyterLab over `folder`, with no settings but its own; yields the address to put a path behind."""
    variables = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    variables |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "work"}
    own = {name: str(folder / f".jupyter-{place}") for name, place in variables.items()}
    news = folder / ".jupyter-settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True, exist_ok=True)
    news.write_text(json.dumps(NO_NEWS))
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("JPY_", "JUPYTER", "MATRIXLIB_LIVE"))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=e2e"]
    command += [f"--ServerApp.root_dir={folder}"]
    log = folder / ".jupyter.log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=folder, env={**keep, **own, **environment}, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START
        while server.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            raise AssertionError(f"JupyterLab does not answer: {log.read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token=e2e&reset"
    finally:
        server.terminate()  # its kernels end with it
        server.wait(30)


def copy_notebook(name: str, folder: Path, **parameters: Any) -> Path:
    """A notebook without outputs, in a folder of the test's own; parameters are typed into their cell."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        if "parameters" in cell.metadata.get("tags", []):
            lines = cell.source.splitlines()
            for key, value in parameters.items():
                (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
                lines[at] = f"{lines[at].partition(' = ')[0]} = {value!r}"
            cell.source = "\n".join(lines)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


class Lab:
    """One notebook in the browser. pictures: folder of the screenshots, named after the notebook."""

    def __init__(self, page: Page, address: str, name: str, pictures: Path) -> None:
        self.page = page
        self.address = address.format(f"{name}.ipynb")
        self.name = name
        self.pictures = pictures

    def open(self) -> None:
        """Until the notebook is shown and its kernel waits."""
        self.page.goto(self.address)
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.wait_for_idle()

    def wait_for_idle(self) -> None:
        self.page.wait_for_selector("#jp-main-statusbar >> text=/\\| Idle/")

    def menu(self, menu: str, *items: str) -> None:
        """Choose from the menu bar; the label alone is looked for, since a shortcut stands behind it."""
        self.page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
        for item in items:
            self.page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()

    def theme(self, name: str) -> None:
        """`Light` or `Dark`."""
        self.menu("Settings", "Theme", f"JupyterLab {name}")
        self.page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {name}']", state="attached")

    def run_all(self) -> None:
        """Run > Run All Cells; comes back when it has begun."""
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(RUNNING)

    def wait_until_run(self) -> None:
        """Until no cell runs or waits."""
        self.page.wait_for_function(f"!({RUNNING})()", timeout=1000 * STEP)
        self.wait_for_idle()

    def save(self) -> None:
        """Save, until the file is no longer marked as changed."""
        self.menu("File", "Save Notebook")
        self.page.wait_for_selector(".jp-mod-current.jp-mod-dirty, .lm-mod-current.jp-mod-dirty", state="detached")

    def texts(self) -> list[str]:
        """Texts of the outputs in order, also of those out of sight."""
        return self.page.locator(".jp-OutputArea-output pre").all_text_contents()

    def picture(self, words: str) -> Path:
        """Screenshot of what is seen now."""
        path = self.pictures / f"{self.name}-{words}.png"
        self.page.wait_for_timeout(500)  # for what comes into sight
        self.page.screenshot(path=path)
        return path
