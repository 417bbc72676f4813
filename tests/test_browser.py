"""JupyterLab in a real browser: a training, menus, a game; what nbval cannot see.

`make e2e` runs it and keeps the screenshots in reports/e2e/.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import chess
import nbformat
import pytest

pytest.importorskip("playwright", reason="playwright is not installed (extra: dev)")

from browser import SIZE, STEP, Lab, chromium, copy_notebook, laboratory
from networks import random_net, save_run
from playwright.sync_api import Page
from test_browse import make_run

from matrixlib.runs.run import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "reports" / "e2e"
WIDGET = "application/vnd.jupyter.widget-view+json"
IN_SIGHT = """() => {
  const bar = document.querySelector('.matrixlib-panel progress').getBoundingClientRect();
  return bar.top > 0 && bar.bottom < window.innerHeight;
}"""
CURVES = ".jupyter-widgets .jp-OutputArea img"
ROLLBACK = """
import itertools
from matrixlib.runs import live, notebook, run as runs
from torch.optim.optimizer import register_optimizer_step_pre_hook

notebook.prepare()
often = {"checkpoint": {"interval": 20}, "validation": {"interval": 20}}
current = runs.open_run("demo", "cpu", run="rollback", steps=300, overrides=often)
updates = itertools.count()

def raise_it(optimizer, args, kwargs):
    for group in optimizer.param_groups if 60 <= next(updates) < 65 else ():
        group["lr"] *= 1000

register_optimizer_step_pre_hook(raise_it)
with live.LivePlot(current.steps, title="rollback") as panel:
    for stats in current.train():
        panel.update(stats)
"""
STEPS = 600  # of the training that is interrupted: enough to watch it, on a fast machine and on a slow one


@pytest.fixture
def lab(tmp_path: Path, reports: Path) -> Iterator[tuple[Path, str, Page]]:
    """A folder with a JupyterLab over it, whose runs go to the test's own reports, its address, and a browser."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    variables = {"MATRIXLIB_REPORTS": str(reports), "MATRIXLIB_DEVICE": "cpu"}
    with chromium() as page, laboratory(tmp_path, variables) as address:
        yield tmp_path, address, page


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]


def watch(lab: Lab, count: int) -> None:
    """Look at the live panel, which comes into sight by itself, until its bar has moved so many times."""
    lab.page.locator(".matrixlib-panel .uplot").first.wait_for()
    lab.page.wait_for_function(IN_SIGHT)
    pace = lab.page.locator(".matrixlib-panel .pace")
    another = "before => document.querySelector('.matrixlib-panel .pace')?.textContent !== before"
    for _ in range(count):
        lab.page.wait_for_function(another, arg=pace.text_content(), timeout=1000 * STEP)


def zoom(page: Page) -> None:
    """Drag over a part of the first chart, and go back."""
    box = page.locator(".matrixlib-panel .u-over").first.bounding_box()
    assert box is not None
    for at, act in ((0.3, page.mouse.down), (0.7, page.mouse.up)):
        page.mouse.move(box["x"] + at * box["width"], box["y"] + box["height"] / 2, steps=5)
        act()
    back = page.get_by_text("reset zoom")
    back.click()
    back.wait_for(state="hidden")


def look_at_html(page: Page, path: Path) -> list[int]:
    """Open a page without any network and keep screenshots of it: light, dark, and as wide as a phone. Returns the
    widths of its pictures as they were loaded."""
    page.context.set_offline(True)
    size = page.viewport_size
    for words, scheme, width in (("light", "light", 1300), ("dark", "dark", 1300), ("phone", "light", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_timeout(500)
        page.screenshot(path=PICTURES / f"{path.stem}-{words}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path.name} is wider than {words}"
    page.context.set_offline(False)
    page.emulate_media(color_scheme=None)
    page.set_viewport_size(size)
    return list(page.evaluate("() => [...document.images].map(image => image.naturalWidth)"))


def test_a_training_is_watched_interrupted_and_resumed(lab: tuple[Path, str, Page], reports: Path) -> None:
    folder, address, page = lab
    path = copy_notebook("train", folder, steps=STEPS)
    train = Lab(page, address, "train", PICTURES)
    train.open()
    train.run_all()
    watch(train, 3)
    train.picture("10")
    page.locator(".matrixlib-panel label input").check()
    train.picture("10-whole-plan")
    page.locator(".matrixlib-panel label input").uncheck()
    line = page.locator(".matrixlib-panel .pace").inner_text()
    assert re.search(rf"^step [\d,]+/{STEPS} \(\d+%\) \| .* a step \| .* left$", line)
    assert "positions/s" in page.locator(".matrixlib-panel .numbers").inner_text()
    zoom(page)
    bar = "document.querySelector('.matrixlib-panel progress')"
    page.wait_for_function(f"() => 2 * {bar}.value > {bar}.max", timeout=1000 * STEP)
    train.picture("50")
    train.theme("Dark")
    train.picture("50-dark")
    page.set_viewport_size({"width": 760, "height": 900})
    train.picture("50-narrow")
    page.set_viewport_size(SIZE)
    train.theme("Light")
    train.menu("Kernel", "Interrupt Kernel")
    train.wait_until_run()
    (run,) = (folder.name for folder in reports.glob("demo-*"))
    text = page.locator(".jp-OutputArea-output pre", has_text="KeyboardInterrupt").inner_text()
    stopped = re.fullmatch(
        r"KeyboardInterrupt: stopped after (\d+) updates; rerun the same command or notebook to resume from the "
        r"checkpoint of update (\d+); curves and report: .+",
        text.strip(),
    )
    assert stopped, text
    assert stopped[1] == stopped[2]
    assert (reports / run / "checkpoints" / f"step_{int(stopped[1]):08d}").is_dir()
    assert page.locator(".matrixlib-panel").count() == 0

    train.run_all()
    watch(train, 1)
    assert any("resumed" in text and f"run          {run}" in text for text in train.texts())
    train.wait_until_run()
    assert [folder.name for folder in reports.glob("demo-*")] == [run]
    assert len((reports / run / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert page.locator(".matrixlib-panel").count() == 0
    assert any("VERDICT: PASS" in text for text in train.texts())
    page.locator(".jp-RenderedImage img[width='900']").scroll_into_view_if_needed()
    train.picture("100")
    train.theme("Dark")
    train.picture("100-dark")
    train.theme("Light")
    train.save()
    kinds = [kind for output in outputs(path) for kind in output.get("data", {})]
    assert (kinds.count("image/png"), kinds.count(WIDGET)) == (3, 0)

    train.open()
    page.wait_for_selector(".jp-RenderedImage img")
    assert page.get_by_text("Error displaying widget").count() == 0
    assert look_at_html(page, reports / run / "report.html") == [1800], "the curves"
    look_at_html(page, reports / "index.html")


def test_a_rollback_is_seen(lab: tuple[Path, str, Page], reports: Path) -> None:
    """Learning rate times 1000 for five updates, in a cell of one's own."""
    folder, address, page = lab
    notebook = nbformat.read(copy_notebook("train", folder), as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell(ROLLBACK)]
    nbformat.write(notebook, folder / "rollback.ipynb")
    rollback = Lab(page, address, "rollback", PICTURES)
    rollback.open()
    rollback.run_all()
    page.locator(".matrixlib-panel .bad", has_text="rolled back").wait_for()
    watch(rollback, 2)
    step = page.locator(".matrixlib-panel .bad").inner_text()
    mark = int(re.findall(r"update (\d+): rolled back", step)[-1])
    chart = page.locator(".matrixlib-panel .u-over").first
    box = chart.bounding_box()
    assert box is not None
    last = page.evaluate("() => document.querySelector('.matrixlib-panel progress').value")
    page.mouse.move(box["x"] + box["width"] * mark / last, box["y"] + box["height"] / 2)
    rollback.picture("live")
    rollback.wait_until_run()
    rollback.picture("end")


def test_menus_draw_again(lab: tuple[Path, str, Page], reports: Path) -> None:
    folder, address, page = lab
    make_run(reports, "other", "2026-01-01T00:00:00Z", complete=False)
    for _ in open_run("demo", "cpu").train():
        pass
    path = copy_notebook("browse", folder)
    browse = Lab(page, address, "browse", PICTURES)
    browse.open()
    browse.run_all()
    browse.wait_until_run()
    position = page.locator(".jupyter-widgets input[type=number]")
    position.scroll_into_view_if_needed()
    before = str(page.evaluate(SHOWN))
    position.press("ArrowUp")
    second = wait_for_another(page, before)
    position.press("ArrowDown")
    assert wait_for_another(page, second) == before
    newest = page.locator("select:has(option[value='newest'])")
    (oldest,) = newest.locator("option").all_inner_texts()[-1:]
    newest.select_option(oldest)
    wait_for_another(page, before)
    page.locator("select:has(option[value='none'])").last.select_option("other")
    page.wait_for_function("() => document.querySelectorAll('.matrixlib-board').length == 2")
    page.locator(".matrixlib-board").first.scroll_into_view_if_needed()
    browse.picture("boards")
    browse.save()
    before = page.locator(CURVES).get_attribute("src")
    page.locator(".jupyter-widgets select").first.select_option("other")
    page.wait_for_function(f"before => document.querySelector('{CURVES}')?.src !== before", arg=before)
    page.locator("select:has(option[value='none'])").first.select_option(index=1)
    page.locator(CURVES).scroll_into_view_if_needed()
    browse.picture("curves")
    kinds = [kind for output in outputs(path) for kind in output.get("data", {})]
    assert kinds.count(WIDGET) == 2, "curves and boards"


def square(page: Page, name: str) -> tuple[float, float]:
    """Where the middle of a square of the board is, on the side that is turned to the person."""
    board = page.locator("cg-board")
    box = board.bounding_box()
    assert box is not None
    file, rank = "abcdefgh".index(name[0]), int(name[1]) - 1
    if page.locator(".cg-wrap.orientation-black").count():
        file, rank = 7 - file, 7 - rank
    return box["x"] + (file + 0.5) * box["width"] / 8, box["y"] + (7.5 - rank) * box["height"] / 8


def move(page: Page, uci: str, drag: bool = False) -> None:
    """A move by the mouse: two clicks, or dragged."""
    page.mouse.move(*square(page, uci[:2]))
    page.mouse.down()
    if not drag:
        page.mouse.up()
    page.mouse.move(*square(page, uci[2:4]), steps=5)
    if not drag:
        page.mouse.down()
    page.mouse.up()


def position(page: Page) -> chess.Board:
    """What the page shows, once the network has answered."""
    page.wait_for_selector(".matrixlib-board[data-thinking=false]")
    return chess.Board(page.locator(".matrixlib-board").get_attribute("data-fen"))


def answered(page: Page, before: chess.Board, uci: str) -> chess.Board:
    """The position after a move by the mouse and the network's answer, which both have to be legal."""
    before.push_uci(uci)
    wanted = [before.fen()] if before.is_game_over() else []
    for answer in list(before.legal_moves):
        before.push(answer)
        wanted.append(before.fen())
        before.pop()
    page.wait_for_function(
        "wanted => wanted.includes(document.querySelector('.matrixlib-board').dataset.fen)", arg=wanted
    )
    return position(page)


def test_a_game_is_played_with_the_mouse(lab: tuple[Path, str, Page], reports: Path) -> None:
    """Six moves that are answered, the network's arrows and maps, a move taken back, a promotion, the other side."""
    folder, address, page = lab
    save_run(reports / "demo-tiny", random_net(ssl=["threat", "control"]))
    (reports / "demo-tiny" / "summary.json").write_text('{"complete": true}')
    (reports / "demo-tiny" / "run.json").write_text('{"requested": {"task": "chess"}}')
    copy_notebook("play", folder, run="demo-tiny", simulations=32)
    page.context.route(lambda url: "127.0.0.1" not in url, lambda route: route.abort())  # nothing may be fetched
    play = Lab(page, address, "play", PICTURES)
    play.open()
    play.run_all()
    play.wait_until_run()
    page.locator("cg-board").scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # for what comes into sight
    page.mouse.move(*square(page, "e2"))
    page.mouse.down()
    page.mouse.up()
    page.wait_for_function("() => document.querySelectorAll('square.move-dest').length == 2")  # e3 and e4
    page.mouse.down()
    page.mouse.up()
    board = position(page)
    for number in range(6):
        uci = min(str(one) for one in board.legal_moves if not one.promotion)
        move(page, uci, drag=number % 2 == 0)
        board = answered(page, board, uci)
        assert board.fullmove_number == number + 2
        assert page.locator("svg.chances rect").count() == 3 * (2 * number + 3)
    page.locator("input.policy").check()
    assert page.locator("svg.cg-shapes line").count() == 5, "arrows of the policy"
    play.picture("arrows")
    page.locator("select.map").select_option("threat")
    play.picture("map")
    play.theme("Dark")
    play.picture("map-dark")
    play.theme("Light")
    assert page.locator("svg.cg-custom-below rect").count() == 64
    assert page.locator(".key").inner_text().split() == ["0%", "50%", "100%"]
    page.get_by_role("button", name="search here").click()
    page.locator("input.search").check()
    page.wait_for_function("() => document.querySelectorAll('svg.cg-shapes line').length > 5")
    page.locator("select.map").select_option("control")
    assert page.locator(".key").inner_text().split() == ["theirs", "even", "ours"]
    page.locator("select.map").select_option("")
    page.get_by_role("button", name="take back").click()
    page.wait_for_function("() => document.querySelectorAll('svg.chances rect').length == 33")
    assert position(page).fullmove_number == 6

    page.locator("input.start").fill("8/4P1k1/8/8/8/8/1p4K1/8 w - - 0 1")
    page.get_by_role("button", name="new game").click()
    page.wait_for_selector(".matrixlib-board[data-fen^='8/4P1k1']")
    move(page, "e7e8")
    page.locator(".promotion button[title=rook]").wait_for()
    page.locator(".promotion button[title=rook]").click()
    answered(page, chess.Board("8/4P1k1/8/8/8/8/1p4K1/8 w - - 0 1"), "e7e8r")

    page.get_by_role("button", name="resign").click()
    page.locator(".status", has_text="0-1, resigned").wait_for()
    page.locator("summary", has_text="PGN").click()
    assert '[Result "0-1"]' in page.locator(".matrixlib-board textarea").input_value()


SHOWN = """() => {
  const board = document.querySelector('.matrixlib-board');
  return board.dataset.fen + board.querySelector('.line').textContent;
}"""


def wait_for_another(page: Page, before: str) -> str:
    """Until the board shows another position, or another network's words; these."""
    page.wait_for_function(f"before => ({SHOWN})() !== before", arg=before)
    return str(page.evaluate(SHOWN))
