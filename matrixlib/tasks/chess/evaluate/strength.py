"""Playing strength: match players, and Elo against fixed players, Stockfish and other networks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from matrixlib.config import OpeningOptions
from matrixlib.play.elo import Rating, rating
from matrixlib.play.game import Openings
from matrixlib.play.match import Choice, Match, Player, Turn, play_pairs, random_openings, random_player, search_player
from matrixlib.play.search import Evaluator, SearchOptions
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import captured_value
from matrixlib.tasks.chess.spec import TASK, load
from matrixlib.tasks.chess.stockfish.client import Stockfish
from matrixlib.tasks.chess.stockfish.player import HASH_MB, engine_player, running_engine

Names: TypeAlias = tuple[str, str]
# One leaf a tree: batches are filled by many games, and virtual loss costs strength
MATCH_SEARCH = SearchOptions(leaves=1)
OPENING_PLIES = 6
RESERVED_NAMES = ("network", "Stockfish")  # players are called "network 100", "Stockfish 1500"


def network_player(net: Net, simulations: int) -> Player:
    """Player of the best move of a search without noise; 0 simulations: the policy's best move, or a mate
    in one."""
    return search_player(ChessGame(), Evaluator(net), simulations, MATCH_SEARCH)


def capture_player(seed: int) -> Player:
    """Player that captures the most valuable piece (P1 N3 B3 R5 Q9, ties by index), else moves at random."""
    game = ChessGame()
    anything = random_player(game, seed)

    def play(turn: Turn) -> Choice:
        moves, offsets = game.legal(turn.states)
        pieces = np.repeat(turn.states["pieces"], np.diff(offsets), axis=0)
        gain = captured_value(pieces, moves[:, None])[:, 0]
        best = [start + gain[start:end].argmax() for start, end in pairwise(offsets)]
        return Choice(np.where(gain[best] > 0, moves[best], anything(turn).moves))

    return play


def check_engines(texts: Sequence[str], elos: Sequence[int] = ()) -> None:
    """Start every engine, and Stockfish with each UCI_Elo, and ask it for a first move; errors of `running_engine`."""
    for text in (*texts, *(f"stockfish nodes=1 UCI_LimitStrength=true UCI_Elo={elo}" for elo in elos)):
        with running_engine(text):
            pass


def load_opponents(paths: Sequence[str], device: str = "auto") -> dict[str, Net]:
    """Load chess networks (runs, checkpoints, files), keyed by the last part of the path, or by the whole path if that
    is ambiguous. ValueError for a duplicate and for anything but a chess network."""
    if wrong := [path for path in paths if not isinstance(path, str) or paths.count(path) > 1]:
        raise ValueError(f"opponents: {wrong[0]!r} is a duplicate or no path: give runs, checkpoints or files")
    last = [Path(path).name for path in paths]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]
    names = [f"opponent {name}" if name in RESERVED_NAMES else name for name in names]
    return {name: load(path, device=device) for name, path in zip(names, paths, strict=True)}


def match_openings(options: OpeningOptions, games: int, seed: int = 0) -> Openings:
    """An opening for every two games: of the options' book, else random ones. ValueError if there are fewer."""
    return TASK.game.openings(options, (games + 1) // 2, seed, OPENING_PLIES)


def gauntlet(
    net: Net,
    simulations: Sequence[int],
    games: int,
    engine_elo: Sequence[int] = (),
    engine_nodes: int = 20_000,
    seed: int = 0,
    plies: int = 300,
    opponents: Mapping[str, Net] | None = None,
    tournament: bool = False,
    openings: Openings | None = None,
    engines: Sequence[str] = (),
) -> Iterator[tuple[Names, Match]]:
    """Play matches of `games` games (two per opening); yields the players' names and the match.

    The network at each number of simulations plays a random player, the best capture, Stockfish at each UCI_Elo, each
    of `engines` (see `running_engine`), itself at the next smaller number, and each of `opponents` at the same number.
    tournament: all other pairs play too. openings: those of `match_openings`, default random ones.
    EngineError without Stockfish, for an Elo outside its range, and for engines that fail.
    """
    game, net = ChessGame(), net.with_workers()
    networks = {f"network {count}": network_player(net, count) for count in sorted(set(simulations))}
    starts = openings or match_openings(OpeningOptions(), games, seed)
    with ExitStack() as running:
        others: dict[str, Player] = {"random": random_player(game, seed), "best capture": capture_player(seed)}
        for elo in engine_elo:
            options = {"UCI_LimitStrength": True, "UCI_Elo": elo}
            stockfish = running.enter_context(Stockfish(hash_mb=HASH_MB, options=options))
            others[f"Stockfish {elo}"] = engine_player(stockfish, f"nodes {engine_nodes}")
        for number, text in enumerate(engines, 1):
            name, player = running.enter_context(running_engine(text))
            others[name if name not in others else f"{name} ({number})"] = player
        meetings = [(one, other) for one in networks for other in others]
        meetings += [(more, fewer) for fewer, more in pairwise(networks)]
        pairs = [(count, name) for count in sorted(set(simulations)) for name in opponents or {}]
        workers = {name: other.with_workers() for name, other in (opponents or {}).items()}
        rivals = {f"{name} {count}": network_player(workers[name], count) for count, name in pairs}
        meetings += [(f"network {count}", f"{name} {count}") for count, name in pairs]
        players = networks | others | rivals
        if tournament:
            meetings += [names for names in combinations(players, 2) if not {names, names[::-1]} & set(meetings)]
        for names in meetings:
            one, other = players[names[0]], players[names[1]]
            history, threads = starts.history, net.workers
            yield names, play_pairs(game, one, other, starts.states, plies, names, history=history, threads=threads)


def duel(
    first: Sequence[Net], second: Sequence[Net], games: int, simulations: tuple[int, int] = (0, 0), plies: int = 300
) -> Rating:
    """Elo of networks against the same number of others, pooled over one match per pair (two games per opening).
    simulations: per move, of the first and of the second side."""
    game, pairs = ChessGame(), np.zeros(5, np.int64)
    for number, nets in enumerate(zip(first, second, strict=True)):
        one, other = (net.with_workers() for net in nets)
        openings = random_openings(game, (games + 1) // 2, number, OPENING_PLIES)
        players = network_player(one, simulations[0]), network_player(other, simulations[1])
        pairs += play_pairs(game, *players, openings, plies, threads=one.workers).pairs()
    return rating(pairs)
