"""A run's network at so many simulations a move against another network at one node, its most probable move.

    python tests/bench/bench_match.py reports/my-run maia-1900.pb.gz [--simulations 64] [--games 200]

Two games from each random opening of six plies; the score and the Elo with its 95 % interval, which counts pairs.
"""

import argparse


def main() -> None:
    import matrixlib
    from matrixlib.tasks.chess.evaluate.strength import duel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("other")
    parser.add_argument("--simulations", type=int, default=64)
    parser.add_argument("--games", type=int, default=200)
    options = parser.parse_args()
    one, other = ([matrixlib.load(path, device="cpu")] for path in (options.run, options.other))
    result = duel(one, other, options.games, (options.simulations, 0))
    print(f"{options.run} at {options.simulations} against {options.other} at one node: {result}")


if __name__ == "__main__":
    main()
