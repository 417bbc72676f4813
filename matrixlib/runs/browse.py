"""Runs, their curves and boards to look through: menus and buttons in JupyterLab, parameters everywhere else.

What is shown is a function of the values in the menus. Headless it is called once with the notebook's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from matrixlib import files, progress
from matrixlib.engine import metrics
from matrixlib.runs import figures, report
from matrixlib.runs import run as runs
from matrixlib.tasks import parse_config
from matrixlib.tasks.chess.config import SSL_CHANNELS

if TYPE_CHECKING:
    import chess
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from matrixlib.tasks.chess.evaluate.net import Evaluation, Net

NETS = 4  # kept in memory
SHOWN = 4  # moves in words
NONE = "none"
Draw = Callable[..., "Figure"]


@dataclass(frozen=True)
class Position:
    """A board with its title, and what somebody chose there: who, and UCI -> share of the moves."""

    board: chess.Board
    title: str
    who: str
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class Shelf:
    """What there is to look through, and what is looked at first.

    names: runs with metrics, newest first. run, against: two of them; `against` may be empty.
    """

    names: tuple[str, ...]
    run: str
    against: str
    checkpoint: str
    device: str
    game: str
    count: int
    position: int = 0

    def positions(self, run: str = "") -> Sequence[Position]:
        """Those of the game, else held-out ones of the run's data set."""
        return _of_game(self.game) if self.game else _held_out(run or self.run, self.count)

    def curves(self) -> None:
        """Show the curves of one run, or two beside each other."""
        others = (NONE, *self.names)
        show(curves_figure, {"run": (self.names, self.run), "against": (others, self.against or NONE)})

    def boards(self) -> None:
        """Show the positions one after the other, with what a checkpoint of a run says of them."""
        menus = {
            "run": (chess_runs(self.names), self.run),
            "checkpoint": (checkpoints(self.run), self.checkpoint),
        }
        show(self._board, menus, ("position", len(self.positions()), self.position))

    def _board(self, run: str, checkpoint: str, position: int) -> Figure:
        places = self.positions(run)
        return board_figure(_net(run, checkpoint, self.device), places[min(position, len(places) - 1)])

    def checks(self) -> list[tuple[str, bool, str]]:
        """What must hold of what was shown: name, whether, what it says."""
        net = _net(self.run, self.checkpoint, self.device)
        places = self.positions()
        seen = list(net.evaluate_boards([one.board for one in places]))
        sums = [abs(sum(one.moves.values()) - 1) < 1e-3 for one in seen if one.moves]
        legal = [
            set(a.moves) == {move.uci() for move in b.board.legal_moves}
            for a, b in zip(seen, places, strict=True)
        ]
        return [
            ("every update of the run can be read", bool(_rows(self.run)), "metrics.jsonl"),
            ("the policy is one over the legal moves", all(sums) and all(legal), f"{len(places)} positions"),
        ]


def open_shelf(
    run: str = "",
    against: str = "",
    checkpoint: str = "best",
    device: str = "auto",
    positions: int = 32,
    position: int = 0,
    game: str = "",
) -> Shelf:
    """All runs under the reports root, with `run` first: the newest complete chess run if empty, and where there is
    none, a demo with every self-supervised head that is trained now.

    game: path of a PGN file whose first game takes the place of `positions` held-out positions. ValueError for an
    unknown run, a position that is not there, or a file without a game.
    """
    found = runs.finished_run(run, overrides={"model": {"ssl": list(SSL_CHANNELS)}}).name
    names = tuple(known_runs())
    if against and against not in names:
        raise ValueError(f"no run '{against}'; runs: {', '.join(names)}")
    shelf = Shelf(names, found, against, checkpoint, device, game, positions, position)
    if not 0 <= position < len(shelf.positions()):
        raise ValueError(f"position {position} is not there: take one from 0 to {len(shelf.positions()) - 1}")
    return shelf


def known_runs() -> list[str]:
    """Names of the runs that have metrics, the one that began last first."""
    root = files.reports_root()
    found = [path.parent for path in root.glob("*/metrics.jsonl") if (path.parent / "run.json").exists()]
    started = {folder.name: files.read_json(folder / "run.json").get("started", "") for folder in found}
    return sorted(started, key=lambda name: (started[name], name), reverse=True)


def chess_runs(names: Sequence[str]) -> tuple[str, ...]:
    """Those with a network that plays chess and a checkpoint of it."""
    return tuple(name for name in names if _asked(name).get("task") == "chess" and checkpoints(name))


def checkpoints(run: str) -> tuple[str, ...]:
    """What `matrixlib.load` takes for a run, newest checkpoint first; empty where there is none yet."""
    steps = sorted((path.name for path in _folder(run).glob("checkpoints/step_*[0-9]")), reverse=True)
    return ("best", "newest", *steps) if steps else ()


def table(names: Sequence[str]) -> DataFrame:
    """A row a run: verdict, updates and result."""
    import pandas

    rows = {}
    for name in names:
        summary = files.read_json(_folder(name) / "summary.json")
        rows[name] = (report.outcome(summary), summary.get("steps", "?"), summary.get("headline", ""))
    return pandas.DataFrame.from_dict(rows, orient="index", columns=["verdict", "updates", "result"])


# Pictures


def curves_figure(run: str, against: str = NONE) -> Figure:
    """All curves of a run; or losses, gradient norms and speeds of two."""
    if against in (NONE, run):
        return figures.training_figure(_rows(run), run)
    return figures.comparison_figure({run: [_rows(run)], against: [_rows(against)]})


def board_figure(net: Net, position: Position) -> Figure:
    """The board with the network's moves as arrows, beside it those that were chosen, and a map for each head."""
    from matrixlib.tasks.chess import plots as chess_plots
    from matrixlib.tasks.chess.evaluate import analysis

    (seen,) = net.evaluate_boards([position.board])
    moves = {"network": seen.moves, position.who: position.chosen}
    figure = chess_plots.position_figure(position.board, moves, analysis.maps(seen))
    figure.suptitle(f"{position.title}\n{words(seen, position.board)}\n{position.board.fen()}", fontsize=11)
    return figure


def words(seen: Evaluation, board: chess.Board) -> str:
    """The network's opinion in a line."""
    side = "White" if board.turn else "Black"
    chances = "" if seen.wdl is None else "win {:.0%}, draw {:.0%}, loss {:.0%}; ".format(*seen.wdl)
    moves = ", ".join(f"{move} {share:.0%}" for move, share in list(seen.moves.items())[:SHOWN])
    return f"{side} to move, {seen.value:+.2f}: {chances}{moves or 'the game is over'}"


# In the front end


def show(
    draw: Draw, menus: Mapping[str, tuple[Sequence[str], str]], steps: tuple[str, int, int] | None = None
) -> None:
    """Show draw(**values); in JupyterLab below menus, and a slider with buttons, that draw it again in place.

    menus: name -> (choices, chosen one). steps: (name, how many, the first one).
    """
    from IPython.display import display

    values: dict[str, Any] = {name: chosen for name, (_, chosen) in menus.items()}
    if steps:
        values[steps[0]] = steps[2]
    if not progress.interactive():
        display(_image(draw(**values)))
        return
    import ipywidgets as widgets

    controls: dict[str, Any] = {
        name: widgets.Dropdown(options=list(choices), value=chosen, description=name)
        for name, (choices, chosen) in menus.items()
    }
    if "run" in controls and "checkpoint" in controls:
        _follow(controls["run"], controls["checkpoint"])
    rows = [widgets.HBox(list(controls.values()))]
    if steps:
        name, count, first = steps
        controls[name] = widgets.IntSlider(
            first,
            0,
            count - 1,
            description=name,
            continuous_update=False,
            layout=widgets.Layout(width="30rem"),
        )
        buttons = [_stepper(controls[name], -1, "previous"), _stepper(controls[name], 1, "next")]
        rows.append(widgets.HBox([controls[name], *buttons]))
    said = widgets.Label()
    display(widgets.VBox([*rows, said]))
    handle = display(_image(draw(**values)), display_id=True)

    def again(change: Any) -> None:
        chosen = {name: control.value for name, control in controls.items()}
        if None in chosen.values():  # a menu is being filled anew
            return
        said.value = "drawing ..."
        try:
            handle.update(_image(draw(**chosen)))
            said.value = ""
        except ValueError as error:  # nobody would see it elsewhere
            said.value = str(error)

    for control in controls.values():
        control.observe(again, "value")


def _follow(run: Any, checkpoint: Any) -> None:
    """Let the menu of checkpoints be that of the run."""

    def fill(change: Any) -> None:
        before, there = checkpoint.value, checkpoints(run.value)
        checkpoint.options = there
        checkpoint.value = before if before in there else there[0]

    run.observe(fill, "value")


def _stepper(slider: Any, by: int, text: str) -> Any:
    import ipywidgets as widgets

    button = widgets.Button(description=text, icon="arrow-left" if by < 0 else "arrow-right")

    def step(clicked: Any) -> None:
        slider.value = min(max(slider.value + by, slider.min), slider.max)

    button.on_click(step)
    return button


def _image(figure: Figure) -> Any:
    from IPython.display import Image

    return Image(data=figures.png(figure), format="png")


# What is looked at


def _folder(run: str) -> Path:
    return files.reports_root() / run


def _asked(run: str) -> dict[str, Any]:
    asked: dict[str, Any] = files.read_json(_folder(run) / "run.json").get("requested", {})
    return asked


def _rows(run: str) -> list[dict[str, Any]]:
    rows = metrics.read(_folder(run) / "metrics.jsonl")
    if not rows:
        raise ValueError(f"run '{run}' has made no update yet")
    return rows


@lru_cache(NETS)
def _net(run: str, checkpoint: str, device: str) -> Net:
    from matrixlib.tasks.chess.spec import load

    return load(_folder(run), checkpoint, device)


@cache
def _of_game(path: str) -> tuple[Position, ...]:
    from matrixlib.tasks.chess.evaluate import analysis

    boards = analysis.read_game(path)
    played = [{board.peek().uci(): 1.0} for board in boards[1:]]
    moves = [*played, {}]
    return tuple(
        Position(board, f"move {board.fullmove_number} of the game", "played", chosen)
        for board, chosen in zip(boards, moves, strict=True)
    )


@cache
def _held_out(run: str, count: int) -> tuple[Position, ...]:
    """The same held-out positions for every run of a data set, with the teacher's moves."""
    from matrixlib.tasks.chess.records import move_from_index
    from matrixlib.tasks.chess.task import boards_of

    if count < 1:
        raise ValueError(f"positions must be at least 1, not {count}")
    text = (_folder(run) / "config.yaml").read_text(encoding="utf-8")
    loader = runs.held_out_data(parse_config(yaml.safe_load(text), "config.yaml"))
    found: list[Position] = []
    for batch in loader.sequential(count, sample=count):
        index, weight = batch["policy_index"].numpy(), batch["policy_weight"].numpy()
        for row, board in enumerate(boards_of(batch)):
            known = (index[row] >= 0) & (weight[row] > 0)
            total = weight[row][known].sum()
            chosen = {
                move_from_index(int(move), board).uci(): float(share / total)
                for move, share in zip(index[row][known], weight[row][known], strict=True)
            }
            found.append(Position(board, f"held-out position {len(found)}", "teacher", chosen))
    return tuple(found)
