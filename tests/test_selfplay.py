"""Self-play: results of every game against the game replayed, independence of the batch, resignation, records."""

from collections import Counter
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import chess
import numpy as np
import pytest
from scipy.special import rel_entr

from matrixlib.config import ConfigError
from matrixlib.data.shards import check
from matrixlib.play.game import Game, Moves, Offsets, States, Trace, Values, uniform
from matrixlib.play.search import SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions, play_games, tally
from matrixlib.runs.cycle_games import judges, load_cycle
from matrixlib.tasks.chess import spec
from matrixlib.tasks.chess.game import ChessGame, training_batch
from matrixlib.tasks.chess.records import LAYOUT, from_boards, legal_indices
from matrixlib.tasks.tictactoe.spec import TicTacToe

GAME = TicTacToe()
OPTIONS = SelfPlayOptions(parallel=7, num_simulations=24, num_quick_simulations=6, full_share=0.5)


def changed(options: SelfPlayOptions, **changes: Any) -> SelfPlayOptions:
    return SelfPlayOptions(**{**options.model_dump(), **changes})


def by_number(traces: list[Trace]) -> dict[int, Trace]:
    assert len({t.number for t in traces}) == len(traces), "no game twice"
    return {t.number: t for t in traces}


def same(a: Trace, b: Trace) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Trace))


def replayed(game: Game, trace: Trace) -> float:
    """The result for the side to move first, by playing the moves again; checks every row on the way."""
    state = trace.states[:1]
    past: Counter[int] = Counter()
    for row, move in enumerate(trace.line):
        assert trace.states[row].tobytes() == state[0].tobytes(), row
        moves, offsets = game.legal(state)
        assert np.isnan(game.terminal(state, np.diff(offsets))).all()
        span = slice(trace.offsets[row], trace.offsets[row + 1])
        assert (trace.moves[span] == moves).all()
        assert move in moves
        assert trace.policy[span].sum() == pytest.approx(1, abs=1e-5)
        past[int(game.key(state)[0])] += 1
        after = game.play(state, np.array([move], np.int32))
        state = game.repeat(after, np.array([past[int(game.key(after)[0])]], np.int32))
    value = game.terminal(state, np.diff(game.legal(state)[1]))[0]
    return float(value if len(trace.line) % 2 == 0 else -value)


@pytest.mark.parametrize(("gumbel", "plies"), [(0, (0, 0)), (4, (0, 0)), (0, (2, 4))])
def test_every_result_is_that_of_its_own_game(gumbel: int, plies: tuple[int, int]) -> None:
    options = changed(OPTIONS, random_plies=plies)
    traces = list(play_games(GAME, uniform, range(60), options, SearchOptions(max_num_considered_actions=gumbel)))
    starts = {int(np.bitwise_count(t.states["ours"][0] | t.states["theirs"][0])) for t in traces}
    assert starts == set(range(plies[0], plies[1] + 1))
    assert sorted(by_number(traces)) == list(range(60))
    for trace in traces:
        result = replayed(GAME, trace)
        assert (trace.result, trace.ending) == (result, "normal")
        assert trace.results().tolist() == [result * (-1) ** i for i in range(len(trace.line))]
        budget = np.where(trace.full, OPTIONS.num_simulations, OPTIONS.num_quick_simulations)
        assert (trace.simulations <= budget).all()
    assert len({t.result for t in traces}) > 1, "later games have results of their own"
    assert len({tuple(t.line.tolist()) for t in traces}) > 30, "games differ"
    assert 0.35 < np.concatenate([t.full for t in traces]).mean() < 0.65


def test_games_do_not_depend_on_how_many_are_played_at_once() -> None:
    together = by_number(list(play_games(GAME, uniform, range(20), OPTIONS)))
    for parallel in (1, 20):
        for trace in play_games(GAME, uniform, range(5, 12), changed(OPTIONS, parallel=parallel)):
            assert same(trace, together[trace.number])
    other = by_number(list(play_games(GAME, uniform, range(20), OPTIONS, seed=1)))
    assert not all(same(other[n], together[n]) for n in range(20))


@pytest.mark.parametrize("gumbel", [0, 4])
def test_temperature(gumbel: int) -> None:
    """0 plays the best move in every game, so all are equal; a high one draws among the tried moves, early and late."""
    quiet = SearchOptions(max_num_considered_actions=gumbel, maxvisit_init=0.0)

    def first_moves_and_lines(**changes: Any) -> dict[int, set[tuple[int, ...]]]:
        lines: dict[int, set[tuple[int, ...]]] = {}
        options = changed(OPTIONS, full_share=1e-9, **changes)  # quick searches, without noise
        for trace in play_games(GAME, uniform, range(60), options, quiet):
            lines.setdefault(int(trace.line[0]), set()).add(tuple(trace.line[1:].tolist()))
        return lines

    cold = first_moves_and_lines(temperature=0.0)
    assert [len(lines) for lines in cold.values()] == [1]
    early = first_moves_and_lines(temperature_plies=1)
    assert len(early) > 5
    assert all(len(lines) == 1 for lines in early.values()), "from the second ply on the best move"
    late = first_moves_and_lines(temperature=0.0, temperature_plies=1, late_temperature=1.0)
    assert [len(lines) > 20 for lines in late.values()] == [True]


@pytest.mark.parametrize("full_share", [1e-9, 1.0], ids=["quick", "full"])
def test_late_temperature_under_gumbel(full_share: float) -> None:
    """Noise draws the search's own choice in full searches: 0 must play the policy's best move there too, and a higher
    temperature more different ones, after quick searches as well."""
    gumbel, shares = SearchOptions(max_num_considered_actions=4, maxvisit_init=4.0), list[float]()
    for warm in (0.0, 0.3, 1.0):
        options = changed(OPTIONS, full_share=full_share, temperature_plies=2, late_temperature=warm)
        traces = list(play_games(GAME, uniform, range(40), options, gumbel))
        assert all(map(same, traces, play_games(GAME, uniform, range(40), options, gumbel))), "same seed, same games"
        rows = [(t, row, t.offsets[row], t.offsets[row + 1]) for t in traces for row in range(2, len(t.line))]
        best = [t.moves[begin:end][t.policy[begin:end].argmax()] == t.line[row] for t, row, begin, end in rows]
        shares.append(float(np.mean(best)))
    assert shares[0] == 1 > shares[1] > shares[2]


def test_surprising_positions_become_more_rows() -> None:
    def play(share: float) -> list[Trace]:
        options = changed(OPTIONS, surprise_share=share)
        return list(play_games(GAME, uniform, range(80), options, SearchOptions(dirichlet_fraction=0.0)))

    def surprise(trace: Trace) -> np.ndarray:
        """KL divergence of each policy from the uniform one."""
        parts = zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
        return np.array([rel_entr(trace.policy[a:b], 1 / (b - a)).sum() for a, b in parts])

    plain, half, whole = play(0.0), play(0.5), play(1.0)
    for trace in plain:
        assert trace.copies.tolist() == trace.full.tolist()
    for share, traces in ((0.5, half), (1.0, whole)):
        assert [trace.line.tolist() for trace in traces] == [trace.line.tolist() for trace in plain], "the same games"
        wanted, got, full = [], [], 0
        for trace in traces:
            gain = surprise(trace)[trace.full]
            wanted += ((1 - share) + share * gain / gain.mean()).tolist() if gain.any() else [1.0] * len(gain)
            got += trace.copies[trace.full].tolist()
            assert not trace.copies[~trace.full].any()
            full += len(gain)
        assert (np.abs(np.array(got) - wanted) < 1).all(), "rounded up or down"
        assert sum(got) == pytest.approx(full, rel=0.05), "as many rows in all"
        assert max(got) > 1
    spread = [np.var(np.concatenate([trace.copies[trace.full] for trace in traces])) for traces in (plain, half, whole)]
    assert spread[0] == 0 < spread[1] < spread[2]


@pytest.mark.parametrize("plies", [0.0, 1.0, 6.0])
def test_value_targets_average_later_values(plies: float) -> None:
    """By the definition: value k plies later, seen from here, weighs (1 - s) s^k, and the result the rest."""
    share = plies / (plies + 1)
    for trace in play_games(GAME, uniform, range(20), changed(OPTIONS, value_plies=plies)):
        count = len(trace.line)
        for i in range(count):
            later = [(-1) ** k * trace.values[i + k] for k in range(count - i)]
            total = sum((1 - share) * share**k * value for k, value in enumerate(later))
            assert trace.targets[i] == pytest.approx(total + share ** (count - i) * trace.results()[i], abs=1e-5)


def gloomy(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
    """An evaluator that finds the side lost that does not start the game, whatever happens."""
    prior, _ = uniform(states, moves, offsets)
    return prior, np.where(states["side"] == 1, -0.99, 0.99).astype(np.float32)


def test_resignation_and_the_share_that_plays_on() -> None:
    options = SelfPlayOptions(
        parallel=10, num_simulations=2, temperature_plies=9, resign_below=-0.7, resign_moves=2, play_out=0.4
    )
    plain = SearchOptions(leaves=1, look_ahead=False)
    traces = list(play_games(GAME, gloomy, range(100), options, plain))
    resigned = [t for t in traces if t.ending == "resignation"]
    out = [t for t in traces if t.ending == "normal" and t.gave_up >= 0]
    assert 40 <= len(resigned) <= 80
    assert 10 <= len(out) <= 60
    for trace in resigned:
        assert (trace.gave_up, trace.states["side"][trace.gave_up]) == (len(trace.line) - 1, 1)
        assert trace.result == 1, "the starting side wins, and it was to move first"
        assert (trace.values[[trace.gave_up, trace.gave_up - 2]] < -0.7).all()
        assert trace.wrongly_given_up is None
    for trace in out:
        assert trace.result == replayed(GAME, trace)
        assert trace.wrongly_given_up == (trace.result <= 0)
    assert len({t.wrongly_given_up for t in out}) == 2


PLAIN = SearchOptions(leaves=1, look_ahead=False)


def test_values_that_agree_end_a_game_and_a_share_plays_on() -> None:
    """With odd openings too, where the side that starts is the second to move; what is played on shows the errors."""
    options = SelfPlayOptions(
        parallel=10, num_simulations=2, temperature_plies=9, adjudicate_plies=3, play_out=0.4, random_plies=(0, 1)
    )
    traces = list(play_games(GAME, gloomy, range(100), options, PLAIN))
    ended = [t for t in traces if t.ending == "adjudicated"]
    out = [t for t in traces if t.ending == "normal" and t.adjudged >= 0]
    assert 40 <= len(ended) <= 80
    assert 10 <= len(out) <= 60
    for trace in ended:
        assert trace.adjudged == len(trace.line) - 1 >= 2
        assert trace.result == (1 if trace.states["side"][0] == 0 else -1), "the side that starts the game wins"
        assert trace.wrongly_adjudged is None
    for trace in out:
        result = replayed(GAME, trace)
        assert (trace.result, trace.wrongly_adjudged) == (result, result != (1 if trace.states["side"][0] == 0 else -1))
    counts = tally(GAME, traces)
    assert (counts["by adjudicated"], counts["played_on"]) == (len(ended), len(out))
    assert 0 < counts["misjudged"] == sum(bool(t.wrongly_adjudged) for t in out) < len(out)
    assert counts["played_out"] == 0 == counts["unknown"]
    off = changed(options, adjudicate_plies=0)
    assert not any(t.adjudged >= 0 for t in play_games(GAME, gloomy, range(10), off, PLAIN))


def test_draws_are_adjudicated_late_and_only_where_asked_for() -> None:
    options = SelfPlayOptions(
        num_simulations=2, adjudicate_plies=2, adjudicate_draw=0.1, adjudicate_draw_ply=4, play_out=0
    )
    traces = list(play_games(GAME, uniform, range(40), options, PLAIN))
    drawn = [t for t in traces if t.ending == "adjudicated" and t.result == 0]
    assert len(drawn) > 20
    assert min(len(t.line) for t in drawn) == 5
    never = play_games(GAME, uniform, range(40), changed(options, adjudicate_draw=0.0), PLAIN)
    assert not any(t.ending == "adjudicated" and t.result == 0 for t in never)


@pytest.mark.parametrize(
    ("fen", "material", "ending", "result"),
    [
        ("4k3/8/8/8/8/8/4P3/R3K2R w - - 9 60", 3, "material", 1),
        ("4k3/8/8/8/8/8/4P3/R3K2R b - - 9 60", 3, "material", -1),
        ("r3k3/8/8/8/8/8/8/R3K2R w - - 9 60", 20, "material", 0),
        ("r3k3/8/8/8/8/8/8/R3K2R w - - 9 60", 0, "ply limit", None),
        ("8/8/8/4k3/8/8/8/R3K3 b - - 9 60", 3, "tables", -1),  # though the clock runs
    ],
)
def test_a_game_that_is_cut_off_is_judged(
    fen: str, material: float, ending: str, result: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tables, then by material, and from the side of whoever was first to move."""
    tables = SimpleNamespace(wdl={"KRvK": 0}, get_wdl=lambda board: 2 if board.turn == chess.WHITE else -2)
    monkeypatch.setattr(spec, "open_tablebases", lambda folder: tables)
    game, start = ChessGame(), from_boards([chess.Board(fen)])
    monkeypatch.setattr(game, "initial", partial(np.repeat, start))
    judges = spec.ChessGameSpec().judges("anywhere", material)
    for plies in (1, 2):
        options = SelfPlayOptions(num_simulations=2, plies=plies, syzygy="anywhere", material=material)
        (trace,) = play_games(game, uniform, [0], options, PLAIN, judges=judges)
        assert (trace.ending, trace.result) == (ending, result)
        assert tally(game, [trace])["unknown"] == (result is None)


def test_what_a_game_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="adjudicate_plies is 1, which asks one side"):
        SelfPlayOptions(adjudicate_plies=1)
    for preset, selfplay, refusal in (
        ("demo", {"syzygy": "no/such/folder"}, r"selfplay: no Syzygy tables.*no/such/folder"),
        ("tictactoe", {"material": 1.0}, "for chess, and tic-tac-toe has neither"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            judges(load_cycle(preset, {"selfplay": selfplay}))


def test_chess_games_become_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games from near their end, cut at 60 plies: results, legality and targets in a shard's batch."""
    fens = [
        chess.STARTING_FEN,
        "8/8/8/4k3/8/8/8/QQ2K3 b - - 0 60",
        "4k3/8/8/8/8/8/8/4K2R w K - 0 1",
        "8/8/4k3/8/8/4K3/8/7R b - - 96 99",
    ]
    options = SelfPlayOptions(parallel=6, num_simulations=12, num_quick_simulations=4, full_share=0.6, plies=60)
    game, traces = ChessGame(), list[Trace]()
    for number, fen in enumerate(fens):
        late, start = ChessGame(), from_boards([chess.Board(fen)])
        monkeypatch.setattr(late, "initial", partial(np.repeat, start))
        traces += play_games(late, uniform, range(4 * number, 4 * number + 4), options)
    for trace in traces:
        if trace.ending == "normal":
            assert trace.result == replayed(game, trace)
        else:
            assert (trace.result, trace.ending, len(trace.line)) == (None, "ply limit", 60)
    assert len({t.result for t in traces}) >= 3, "wins or losses, draws and unknown"
    ids = {trace.number: (1 << 40) + trace.number for trace in traces}
    batch = training_batch(traces, ids, source=2)
    check(batch, LAYOUT)
    records = batch["records"]
    for name, legal in zip(("policy_index", "policy_offset"), legal_indices(records), strict=True):
        assert np.array_equal(batch[name], legal)
    sums = np.add.reduceat(batch["policy_weight"].astype(np.int64), batch["policy_offset"][:-1])
    assert (np.abs(sums - 65535) < 200).all()
    assert len(records) == sum(t.full.sum() for t in traces)
    for trace in traces:
        rows = records[records["game"] == ids[trace.number]]
        win, draw, loss = rows["wdl"].astype(float).T / 65535
        assert win - loss == pytest.approx(trace.targets[trace.full], abs=1e-4)
        assert win + draw + loss == pytest.approx(1)
        assert not (win * loss).any(), "the draw has all that the value leaves"
        result = trace.results()[trace.full]
        assert rows["result"].tolist() == np.where(np.isnan(result), 2, result).tolist()
        assert (rows["pieces"] == trace.states["pieces"][trace.full]).all()
        if trace.result is not None:  # one winner, whoever is to move
            white = np.where(rows["side"] == 0, rows["result"], -rows["result"])
            assert len(set(white.tolist())) <= 1
