"""A network in a search: the same opinion as `Net.evaluate`, for any batch; players made of it, and fixed ones."""

from typing import Any

import chess
import numpy as np
import pytest
from networks import MATRIX0, material_net, random_net
from positions import hard_positions, random_positions

from matrixlib.play.evaluator import Evaluator
from matrixlib.play.match import Turn, play_pairs, random_player
from matrixlib.play.search import Search
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.tasks.chess.evaluate.strength import capture_player, engine_player, network_player
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards, move_from_index
from matrixlib.tasks.chess.stockfish.client import Stockfish

GAME = ChessGame()
MATES = (
    "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1",
    "4rkr1/4p1p1/8/8/8/8/8/4K2R w K - 0 1",
    "3rkr2/5p2/8/3pP3/8/7Q/8/K3R3 w - d6 0 1",
    "7k/P7/6K1/8/8/8/8/8 w - - 0 1",
)


def positions(count: int) -> list[chess.Board]:
    """With castling, en passant and promotions, half of them Black's."""
    boards = hard_positions() + random_positions(count, seed=3)
    return [board for board in boards if any(board.legal_moves)]


def question(boards: list[chess.Board]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    states = from_boards(boards)
    return states, *GAME.legal(states)


def turn(boards: list[chess.Board]) -> Turn:
    none = [np.zeros(0, np.uint64)] * len(boards), [from_boards([])] * len(boards)
    return Turn(np.arange(len(boards)), from_boards(boards), *none, [[]] * len(boards))


@pytest.mark.parametrize("model", [{}, MATRIX0], ids=["oriented", "matrix0"])
def test_the_search_hears_what_evaluate_says(model: dict[str, object]) -> None:
    net, boards = random_net(**model), positions(150)
    states, moves, offsets = question(boards)
    priors, values = Evaluator(net)(states, moves, offsets)
    for i, (board, evaluation) in enumerate(zip(boards, net.evaluate_boards(boards), strict=True)):
        row = slice(offsets[i], offsets[i + 1])
        priors_by_move = {move_from_index(int(m), board).uci(): p for m, p in zip(moves[row], priors[row], strict=True)}
        assert priors_by_move == pytest.approx(evaluation.moves, abs=1e-5), board.fen()
        assert values[i] == pytest.approx(evaluation.value, abs=1e-5), board.fen()
        assert priors[row].sum() == pytest.approx(1, abs=1e-5)


def test_the_rest_of_the_batch_does_not_matter_nor_does_there_need_to_be_one() -> None:
    boards = positions(40)
    evaluate = Evaluator(random_net())
    states, moves, offsets = question(boards)
    priors, values = evaluate(states, moves, offsets)
    for i in range(0, len(boards), 7):
        alone, value = evaluate(*question([boards[i]]))
        np.testing.assert_allclose(alone, priors[offsets[i] : offsets[i + 1]], atol=1e-5)
        assert value[0] == pytest.approx(values[i], abs=1e-5)
    assert [len(part) for part in evaluate(states[:0], moves[:0], offsets[:1])] == [0, 0]


def test_a_network_with_dropout_says_the_same_twice_and_must_not_be_training() -> None:
    net = random_net(dropout=0.5, droppath=0.5)
    evaluate, inputs = Evaluator(net), question(positions(20))
    for first, second in zip(evaluate(*inputs), evaluate(*inputs), strict=True):
        assert (first == second).all()
    net.model.train()
    with pytest.raises(AssertionError, match="eval mode"):
        evaluate(*inputs)
    with pytest.raises(AssertionError, match="eval mode"):
        Evaluator(net)
    net.model.eval()
    next(net.model.children()).train()
    with pytest.raises(AssertionError, match="eval mode"):
        Evaluator(net)


@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
def test_a_won_position_is_good_for_the_side_to_move(encoding: str) -> None:
    won = chess.Board("4k3/8/8/8/8/8/3Q4/4K3 w - - 0 1")
    lost = chess.Board("4k3/8/8/8/8/8/3Q4/4K3 b - - 0 1")
    boards = [won, lost, won.mirror(), lost.mirror()]
    assert [board.turn for board in boards] == [True, False, False, True]
    _, values = Evaluator(material_net(encoding))(*question(boards))
    assert (values[[0, 2]] > 0.7).all()
    assert (values[[1, 3]] < -0.7).all()


@pytest.mark.parametrize("model", [{}, MATRIX0], ids=["oriented", "matrix0"])
def test_a_random_network_mates_in_one(model: dict[str, object]) -> None:
    boards = [chess.Board(fen) for fen in MATES]
    boards += [board.mirror() for board in boards]
    choice = network_player(random_net(**model), 32)(turn(boards))
    for board, move, comment in zip(boards, choice.moves, choice.comments, strict=True):
        board.push(move_from_index(int(move), board))
        assert board.is_checkmate()
        assert comment.startswith("+1.000")


def test_a_search_with_material_takes_the_queen() -> None:
    free = chess.Board("4k3/8/8/3q4/4P3/2N5/8/4K3 w - - 0 1")
    choice = network_player(material_net(), 100)(turn([free, free.mirror()]))
    for board, move in zip((free, free.mirror()), choice.moves, strict=True):
        captured = board.piece_at(move_from_index(int(move), board).to_square)
        assert captured.piece_type == chess.QUEEN


def test_the_capture_player_takes_the_best_piece() -> None:
    boards = [
        chess.Board("4k3/8/8/3q1r2/4P3/2N5/8/4K3 w - - 0 1"),
        chess.Board(),
        chess.Board("4k3/8/8/3q1r2/4P3/2N5/8/4K3 w - - 0 1").mirror(),
    ]
    player = capture_player(seed=1)
    moves = player(turn(boards)).moves
    assert move_from_index(int(moves[0]), boards[0]).uci() in ("e4d5", "c3d5")
    assert move_from_index(int(moves[2]), boards[2]).uci() in ("e5d4", "c6d4")
    assert (moves == player(turn(boards)).moves).all()


def test_games_between_players_and_of_a_network_with_itself() -> None:
    """The plumbing of a cycle: a tiny network in self-play and in a match."""
    net = random_net()
    options = SelfPlayOptions(parallel=4, num_simulations=8, plies=12)
    traces = list(play_games(GAME, Evaluator(net), range(4), options))
    assert [len(trace.states) for trace in traces] == [12] * 4
    match = play_pairs(GAME, network_player(net, 16), capture_player(0), GAME.initial(2), plies=16)
    assert match.pairs().sum() == 2
    assert match.games[0].moves != match.games[1].moves


def test_stockfish_as_a_player(engine: Stockfish) -> None:
    player = engine_player(engine, 50)
    boards = [chess.Board(MATES[0]), chess.Board(MATES[0]).mirror(), chess.Board()]
    moves = player(turn(boards)).moves
    assert [move_from_index(int(m), b).uci() for m, b in zip(moves[:2], boards, strict=False)] == ["d1d8", "d8d1"]
    match = play_pairs(GAME, player, random_player(GAME, 0), GAME.initial(1), plies=10)
    assert len(match.games) == 2


def test_a_search_needs_a_finite_network() -> None:
    net = random_net()
    for parameter in net.model.parameters():
        parameter.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        Search(GAME, Evaluator(net)).run(4)


def test_an_engine_is_told_the_game_so_far_that_it_sees_repetitions() -> None:
    asked: list[str] = []

    class Engine:
        def new_game(self) -> None:
            asked.append("new")

        def best_move(self, position: str, limit: str) -> str:
            asked.append(position)
            return board_of(position).legal_moves.__iter__().__next__().uci()

    def board_of(position: str) -> chess.Board:
        start, _, moves = position.removeprefix("fen ").partition(" moves ")
        board = chess.Board(start)
        for uci in moves.split():
            board.push_uci(uci)
        return board

    player: Any = engine_player(Engine(), 50)  # type: ignore[arg-type]
    match = play_pairs(GAME, player, random_player(GAME, 0), GAME.initial(1), plies=4)
    told = [board_of(text) for text in asked if text != "new"]
    assert [len(board.move_stack) for board in told] == [0, 1, 2, 3]
    assert {board.root().fen() for board in told} == {chess.STARTING_FEN}
    played = [[move_from_index(i, chess.Board()) for i in game.moves[:1]] for game in match.games]
    assert told[1].move_stack == played[1], "the second game's first move is the other player's"
    assert asked[::2] == ["new"] * 4, "its answer is of this game alone"
