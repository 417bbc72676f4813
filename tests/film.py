"""The animated picture of the front page: a game in play.ipynb, moved by the mouse in the system's Chromium.

    python tests/film.py [RUN]      `make film`; writes reports/play.gif

The person's moves are the policy's of the same network; from the fourth on its arrows are shown, then the search's, and
at last a map of a self-supervised head.
"""

import io
import sys
import tempfile
from pathlib import Path

import chess
from browser import ROOT, Lab, chromium, copy_notebook, laboratory
from PIL import Image
from playwright.sync_api import Page
from test_browser import answered, move, position, square

import matrixlib
from matrixlib import files
from matrixlib.runs import run as runs
from matrixlib.tasks.chess.evaluate.net import Net

MOVES = 10
WIDTH, COLOURS = 640, 128
SELECTED, ANSWERED = 700, 2200  # milliseconds that a frame stays
FILM = ROOT / "reports" / "play.gif"


def frame(page: Page) -> Image.Image:
    picture = Image.open(io.BytesIO(page.locator(".matrixlib-board").screenshot())).convert("RGB")
    return picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)


def play(page: Page, net: Net) -> list[tuple[Image.Image, int]]:
    frames = [(frame(page), ANSWERED)]
    board = position(page)
    for number in range(MOVES):
        (evaluation,) = net.evaluate_boards([board])
        uci = next(one for one in evaluation.moves if not chess.Move.from_uci(one).promotion)
        page.mouse.move(*square(page, uci[:2]))
        page.mouse.down()
        page.mouse.up()
        page.wait_for_selector("square.move-dest", state="attached")
        frames.append((frame(page), SELECTED))
        page.mouse.down()
        page.mouse.up()
        move(page, uci)
        board = answered(page, board, uci)
        page.wait_for_timeout(300)  # for the pieces to arrive
        if number == 3:  # what the network thinks, little by little
            page.locator("input.policy").check()
        if number == 5:
            page.locator("input.search").check()
        if number >= 5:
            page.get_by_role("button", name="search here").click()
            page.wait_for_function("() => document.querySelectorAll('svg.cg-shapes line').length > 5")
        if number == MOVES - 3:
            page.locator("select.map").select_option(index=1)
        if board.is_game_over():
            break
        frames.append((frame(page), ANSWERED))
    return frames


def main(arguments: list[str]) -> None:
    folder = runs.finished_run(*arguments[:1])
    net = matrixlib.load(folder, device="cpu")
    with tempfile.TemporaryDirectory() as place:
        copy_notebook("play", Path(place), run=folder.name, simulations=200)
        variables = {"MATRIXLIB_REPORTS": str(files.reports_root()), "MATRIXLIB_DEVICE": "cpu"}
        with laboratory(Path(place), variables) as address, chromium() as page:
            lab = Lab(page, address, "play", FILM.parent)
            lab.open()
            lab.run_all()
            lab.wait_until_run()
            page.locator("cg-board").scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            frames = play(page, net)
    both = Image.new("RGB", (WIDTH, 2 * frames[0][0].height))  # colours with a map, and without one
    both.paste(frames[len(frames) // 2][0])
    both.paste(frames[-1][0], (0, frames[0][0].height))
    palette = both.quantize(COLOURS, Image.Quantize.MAXCOVERAGE)  # also the few dots of a key
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture, _ in frames]
    durations = [duration for _, duration in frames]
    pictures[0].save(FILM, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True)
    print(
        f"{FILM.relative_to(ROOT)}: {len(frames)} frames, {sum(durations) / 1000:.0f} s, {FILM.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
