"""Elo of a network: against fixed players and Stockfish, and of more simulations against fewer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from matrixlib.hardware.openmp import considerate
from matrixlib.play.elo import Rating, rating, rating_table
from matrixlib.play.match import Match, Player, play_pairs, random_openings, random_player
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.players import capture_player, engine_player, network_player
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.spec import load
from matrixlib.tasks.chess.stockfish.client import Stockfish

Names: TypeAlias = tuple[str, str]
OPENING_PLIES = 6
PLAYERS = ("network", "Stockfish")  # names that a number follows
HASH_MB = 16  # of an engine, which is its own default


def load_opponents(paths: Sequence[str], device: str = "auto") -> dict[str, Net]:
    """Chess networks (runs, checkpoints, files) by the last part of a path, or the whole where it is not alone.

    ValueError for a path that stands twice, and where there is no network of chess.
    """
    if odd := [path for path in paths if not isinstance(path, str)]:
        raise ValueError(f"opponents: {odd[0]!r} is no name: give runs, checkpoints or files, in quotes")
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"opponents: '{twice[0]}' stands there twice")
    last = [Path(path).name for path in paths]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]
    names = [f"opponent {name}" if name in PLAYERS else name for name in names]
    return {name: load(path, device=device) for name, path in zip(names, paths, strict=True)}


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
) -> Iterator[tuple[Names, Match]]:
    """Matches of `games` games (two from each opening) one after the other, with the names of their players.

    The network with each number of simulations meets a random player, the best capture and Stockfish at each UCI_Elo
    with `engine_nodes` nodes a move; then itself with the next smaller number, and each of `opponents`, which has as
    many simulations. tournament: then all others meet each other, too. Raises EngineError without Stockfish, and for an
    Elo that it does not offer.
    """
    game = ChessGame()
    networks = {f"network {count}": network_player(net, count) for count in sorted(set(simulations))}
    openings = random_openings(game, (games + 1) // 2, seed, OPENING_PLIES)
    with ExitStack() as engines:
        others: dict[str, Player] = {"random": random_player(game, seed), "best capture": capture_player(seed)}
        for elo in engine_elo:
            options = {"UCI_LimitStrength": True, "UCI_Elo": elo}
            engine = engines.enter_context(Stockfish(hash_mb=HASH_MB, options=options))
            others[f"Stockfish {elo}"] = engine_player(engine, engine_nodes)
        meetings = [(one, other) for one in networks for other in others]
        meetings += [(more, fewer) for fewer, more in pairwise(networks)]
        rivals: dict[str, Player] = {}
        for count in sorted(set(simulations)):
            for name, opponent in (opponents or {}).items():
                rivals[f"{name} {count}"] = network_player(opponent, count)
                meetings.append((f"network {count}", f"{name} {count}"))
        players = networks | others | rivals
        if tournament:
            met = {frozenset(names) for names in meetings}
            meetings += [names for names in combinations(players, 2) if frozenset(names) not in met]
        for names in meetings:
            with considerate():  # of the engine, too
                match = play_pairs(game, players[names[0]], players[names[1]], openings, plies, names)
            yield names, match


def duel(
    first: Sequence[Net], second: Sequence[Net], games: int, simulations: tuple[int, int] = (0, 0), plies: int = 300
) -> Rating:
    """Elo of some networks against as many others, one match of `games` games for each pair of them, each from openings
    of its own that are played twice. simulations: of a move, by the first and by the others.
    """
    game, pairs = ChessGame(), np.zeros(5, np.int64)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        openings = random_openings(game, (games + 1) // 2, number, OPENING_PLIES)
        players = network_player(one, simulations[0]), network_player(other, simulations[1])
        pairs += play_pairs(game, *players, openings, plies).pairs()
    return rating(pairs)


def match_table(matches: Mapping[Names, Match]) -> pd.DataFrame:
    """A row a match: Elo of the first player against the second, with its 95 % interval."""
    rows = []
    for (one, other), match in matches.items():
        result = rating(match.pairs())
        elo = {"Elo": result.elo, "low": result.low, "high": result.high}
        rows.append({"player": one, "opponent": other, **elo, "games": result.games, "score": result.score})
    return pd.DataFrame(rows).round({"Elo": 0, "low": 0, "high": 0, "score": 3})


def ratings(matches: Mapping[Names, Match]) -> pd.DataFrame:
    """A row a player: Elo on the common scale of all, whose mean is 0, with its 95 % interval; best first."""
    frame = rating_table({names: match.pairs() for names, match in matches.items()})
    return frame[["elo", "low", "high", "games"]].rename(columns={"elo": "Elo"}).round(0)


def pgn(matches: Mapping[Names, Match]) -> str:
    """Every game of the matches."""
    game = ChessGame()
    return "".join(game.write(record) + "\n\n" for match in matches.values() for record in match.games)
