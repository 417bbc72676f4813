"""A run's network at so many simulations a move against another network at one node, its most probable move.

    python tests/bench/bench_match.py reports/my-run maia-1900.pb.gz [--simulations 64] [--games 200] [--seed 0]

Two games from each random opening of six plies; the score and the Elo with its 95 % interval, which counts pairs.
"""

import argparse


def main() -> None:
    import matrixlib
    from matrixlib.play.elo import rating
    from matrixlib.play.match import play_pairs, random_openings
    from matrixlib.tasks.chess.evaluate.players import network_player
    from matrixlib.tasks.chess.evaluate.strength import OPENING_PLIES
    from matrixlib.tasks.chess.game import ChessGame

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("other")
    parser.add_argument("--simulations", type=int, default=64)
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    game = ChessGame()
    one, other = (matrixlib.load(path, device="cpu") for path in (options.run, options.other))
    openings = random_openings(game, (options.games + 1) // 2, options.seed, OPENING_PLIES)
    match = play_pairs(game, network_player(one, options.simulations), network_player(other, 0), openings, 300)
    result = rating(match.pairs())
    print(
        f"{options.run} at {options.simulations} against {options.other} at one node: {result.score:.1%} of "
        f"{result.games} games, {result.elo:+.0f} Elo [{result.low:+.0f}, {result.high:+.0f}]"
    )


if __name__ == "__main__":
    main()
