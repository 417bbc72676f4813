"""Positions for tests: random playouts and hand-picked hard ones. Nothing here knows matrixlib."""

import random

import chess

KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1"

HARD = (
    chess.STARTING_FEN,
    KIWIPETE,
    "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1",
    # en passant: plain, for Black, two capturers
    "rnbqkbnr/ppp1p1pp/8/3pPp2/8/8/PPPP1PPP/RNBQKBNR w KQkq f6 0 3",
    "rnbqkbnr/pppp1ppp/8/8/3Pp3/8/PPP1PPPP/RNBQKBNR b KQkq d3 0 3",
    "4k3/8/8/2PpP3/8/8/8/4K3 w - d6 0 2",
    # en passant: both pawns leave the rank of the king; the same for Black
    "8/8/8/1KPp3r/8/8/8/7k w - d6 0 50",
    "7K/8/8/8/1kpP3R/8/8/8 b - d3 0 50",
    "8/8/8/r1PpPK2/8/8/8/7k w - d6 0 50",
    # en passant: the victim shields the king on a diagonal; a capturer pinned on a file or on its diagonal
    "8/8/1k6/8/2pP4/8/5B2/4K3 b - d3 0 1",
    "4r1k1/8/8/3pP3/8/8/8/4K3 w - d6 0 2",
    "6kb/8/8/3pP3/8/2K5/8/8 w - d6 0 2",
    "8/8/8/8/k2Pp2Q/8/8/3K4 b - d3 0 1",
    # en passant captures the checking pawn; does not help against a discovered check
    "8/8/8/2k5/3Pp3/8/8/4K3 b - d3 0 1",
    "8/8/8/6k1/3Pp3/8/8/2B1K3 b - d3 0 1",
    # castling: free, through attack, attacked rook and b-file (allowed), in check, half the rights, blocked
    "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1",
    "r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 1",
    "r3k2r/8/8/8/8/5r2/8/R3K2R w KQkq - 0 1",
    "r3k2r/8/3R4/8/8/8/8/R3K2R b KQkq - 0 1",
    "1r2k2r/8/8/8/8/8/8/R3K2R w KQk - 0 1",
    "r3k1r1/8/8/8/8/8/8/R3K2R w KQq - 0 1",
    "r3k2r/8/8/8/4R3/8/8/4K2R b Kkq - 0 1",
    "r3k2r/8/8/8/8/8/6p1/R3K2R w KQkq - 0 1",
    "r3k2r/8/8/8/8/8/8/R3K2R b Qk - 99 130",
    "rn2k1nr/8/8/8/8/8/8/RN2K1NR w KQkq - 0 1",
    # promotions: every piece, with captures and check, capture of a castling rook, pinned pawn
    "1n1q2k1/P1P5/8/8/8/8/5PPP/6K1 w - - 0 40",
    "6k1/5ppp/8/8/8/8/p1p4P/1N1Q2K1 b - - 3 41",
    "r3k2r/1P4P1/8/8/8/8/1p4p1/R3K2R w KQkq - 0 1",
    "r3k2r/1P4P1/8/8/8/8/1p4p1/R3K2R b KQkq - 0 1",
    "8/PPPPPPPP/8/k7/8/7K/pppppppp/8 w - - 0 60",
    "8/PPPPPPPP/8/k7/8/7K/pppppppp/8 b - - 0 60",
    "2kr4/2P5/8/8/8/8/8/2K5 w - - 0 1",
    "7k/r1P1K3/8/8/8/8/8/8 w - - 0 1",
    "2b4k/3P4/4K3/8/8/8/8/8 w - - 0 1",
    # check, double check, mate, stalemate
    "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3",
    "4k3/8/5N2/8/8/8/8/4RK2 b - - 0 1",
    "4k3/8/8/8/4r3/3n4/8/4K3 w - - 0 1",
    "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1",
    "8/8/8/8/8/6k1/5q2/7K w - - 5 90",
    # pins on every line, a pinned knight, two kings close
    "4r1k1/8/8/b6b/8/2P1N1P1/4BP2/r2QK2R w K - 10 70",
    "4k2R/3nnp2/4q3/1B5B/8/2N5/4R3/4K3 b - - 10 70",
    "3r3k/8/8/3B4/8/8/3K4/8 w - - 20 90",
    "8/8/8/3k4/8/3K4/8/8 w - - 49 200",
    # many queens: long lists of moves
    "R6R/3Q4/1Q4Q1/4Q3/2Q4Q/Q4Q2/pp1Q4/kBNN1KB1 w - - 0 1",
    "3Q4/1Q4Q1/4Q3/2Q4R/Q4Q2/3Q4/1Q4Rp/1K1BBNNk w - - 0 1",
)


def hard_positions() -> list[chess.Board]:
    """The hand-picked positions, each with its mirror image for the other side."""
    boards = [chess.Board(fen) for fen in HARD]
    return boards + [board.mirror() for board in boards]


def random_positions(n: int, seed: int) -> list[chess.Board]:
    """n positions (without move stacks) out of random games, the same for the same seed.

    A third of the games start from a hard position, so that en passant, promotions and pins come up often.
    """
    rng = random.Random(seed)
    boards: list[chess.Board] = []
    while len(boards) < n:
        board = chess.Board(rng.choice(HARD) if rng.random() < 1 / 3 else chess.STARTING_FEN)
        for _ in range(rng.randrange(10, 160)):
            moves = list(board.generate_legal_moves())
            if not moves or board.is_insufficient_material():
                break
            board.push(rng.choice(moves))
            if rng.random() < 0.4:
                boards.append(board.copy(stack=False))
    return boards[:n]
