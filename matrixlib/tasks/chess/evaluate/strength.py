"""Elo of a network: against fixed players and Stockfish, and of more simulations against fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from matrixlib.play.elo import rating, rating_table
from matrixlib.play.match import Match, Player, play_pairs, random_openings, random_player
from matrixlib.tasks.chess.evaluate.players import EnginePlayer, capture_player, network_player
from matrixlib.tasks.chess.game import ChessGame

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

Names: TypeAlias = tuple[str, str]
OPENING_PLIES = 6


def gauntlet(
    net: Net,
    simulations: Sequence[int],
    games: int,
    engine_elo: Sequence[int] = (),
    engine_nodes: int = 20_000,
    seed: int = 0,
    plies: int = 300,
) -> Iterator[tuple[Names, Match]]:
    """Matches of `games` games (two from each opening) one after the other, with the names of their players.

    The network with each number of simulations meets a random player, the best capture and Stockfish at each UCI_Elo
    (of `engine_nodes` nodes a move), and itself with the next lower number. Raises EngineError without a Stockfish.
    """
    game = ChessGame()
    networks = {f"network {count}": network_player(net, count) for count in sorted(set(simulations))}
    start = random_openings(game, (games + 1) // 2, seed, OPENING_PLIES)
    with ExitStack() as engines:
        others: dict[str, Player] = {
            "random": random_player(game, seed),
            "best capture": capture_player(seed),
        }
        for elo in engine_elo:
            options = {"UCI_LimitStrength": True, "UCI_Elo": elo}
            others[f"Stockfish {elo}"] = engines.enter_context(EnginePlayer("", engine_nodes, options))
        meetings = [(one, other) for one in networks for other in others]
        meetings += [(more, fewer) for fewer, more in pairwise(networks)]
        players = networks | others
        for names in meetings:
            yield names, play_pairs(game, players[names[0]], players[names[1]], start, plies, names)


def match_table(matches: Sequence[tuple[Names, Match]]) -> str:
    """Text table of matches, and the common scale of all players where there are two matches or more."""
    lines = [f"{one:14} - {other:16} {rating(match.pairs())}" for (one, other), match in matches]
    if len(matches) > 1:
        table = rating_table({names: match.pairs() for names, match in matches})
        lines += [""] + [
            f"{s.name:16}{s.elo:+7.0f} [{s.low:+.0f}, {s.high:+.0f}], {s.games} games" for s in table
        ]
    return "".join(line + "\n" for line in lines)


def pgn(matches: Sequence[tuple[Names, Match]]) -> str:
    """Every game of the matches."""
    game = ChessGame()
    return "".join(game.write(played) + "\n\n" for _, match in matches for played in match.games)
