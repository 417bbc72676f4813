"""Reader of PGN: each position of a game with the move played as policy target.

Words are parsed to integers, which `bitboard.replay` matches with the legal moves.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, NamedTuple

import chess
import numpy as np

from matrixlib.data.imports import ParseResult, Part
from matrixlib.data.shards import Batch, select
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.game import insufficient_material
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN, game_id
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE
from matrixlib.tasks.chess.stockfish.labels import wdl_of_score

PART_GAMES = 500
PART_BYTES = 4_000_000  # parts of long games have fewer
MAX_WORDS = 200_000  # in the cache of `parse_word`
FULL_WEIGHT = 65535

NOTHING, NULL_MOVE, UNKNOWN_WORD = "", "null move", "foreign"  # words other than moves, evaluations and results
RESULTS = {
    **dict.fromkeys((b"1-0", b"1:0"), "1-0"),
    **dict.fromkeys((b"0-1", b"0:1"), "0-1"),
    **dict.fromkeys((b"1/2-1/2", b"1/2", "½-½".encode(), "½-½".encode("latin-1")), "1/2-1/2"),
    b"*": "*",
}
POINTS = {"1-0": 1, "0-1": -1, "1/2-1/2": 0, "*": UNKNOWN}
NAMES = {points: name for name, points in POINTS.items()}
CONTRADICTED = "result contradicts the board"
NULL_MOVES = (b"--", b"Z0", b"0000", b"@@@@")
ANNOTATIONS = (b"e.p.", b"ep", b"N", b"D")  # en passant, novelty, diagram
STANDARD_VARIANTS = ("", "standard", "from position", "normal", "chess")  # values of the Variant tag

MAX_GAME_BYTES = 16 << 20

MOVE = re.compile(
    rb"(?:([PNBRQK])?([a-h])?([1-8])?[-x:]?([a-h])([1-8])(?:=?([NBRQnbrq]))?|[Oo0]-[Oo0](-[Oo0])?)"
    rb"(?:e\.?p\.?)?[+#!?=]*"
)
NUMBER = re.compile(rb"(?:\d+(?:\.+|\xe2\x80\xa6|\Z)|\.+|\xe2\x80\xa6)+")  # also repeated: 1.1...
GLYPH = re.compile(rb"(?:\$\d+)+\Z")
SPELLED = re.compile(rb"[A-Za-z0-9]")
MARKED = re.compile(rb"[{}();%]")  # comments, variations, escapes
TOKEN = re.compile(rb"\{[^}]*\}?|;[^\n]*|^%[^\n]*|[(){}]|[^\s{}();]+", re.MULTILINE)
COMMENT = re.compile(rb"\{[^}]*\}")
UNUSUAL = (b"(", b")", b";", b"\n%")  # more than words and brace comments
REMARK = re.compile(rb"\{[^}]*\}|;[^\n]*")
TAG = re.compile(rb'^[ \t]*\[[ \t]*(FEN|SetUp|Variant|Result)[ \t]+"([^"\r\n]*)"', re.MULTILINE | re.IGNORECASE)
# A comment with an evaluation
EVALUATION = re.compile(rb"\{[^{}\[]*(?:\[(?!%eval)[^{}\[]*)*\[%eval\s+(#?[-+]?\d*\.?\d+)[^}]*\}")
SCORE = re.compile(rb"%(#?)([-+]?\d*\.?\d+)")
GAME = re.compile(rb'^[ \t]*\[[ \t]*\w+[ \t]+"|\b1[ \t]*\.[ .]*[a-hNBRQKO]', re.MULTILINE)
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
REMARKS = b"{;($)%"  # first bytes of lines that continue a game after its result


def decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def split_games(lines: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Split lines into games: (tag section, move text), all bytes but byte order marks.

    A game ends when a tag follows move text, or moves follow a result; inside an unclosed comment, when an Event tag
    follows an empty line. EOFError for one of more than MAX_GAME_BYTES.
    """
    tags: list[bytes] = []
    moves: list[bytes] = []
    inside = over = False  # in a comment; after a result
    tagged = gap = False  # after a tag; after a tag and an empty line
    depth = size = 0  # of variations; of the game
    for line in lines:
        if (size := size + len(line)) > MAX_GAME_BYTES:
            raise EOFError(f"it has a game of more than {MAX_GAME_BYTES >> 20} MiB, so it is no PGN")
        if inside and line.startswith(b'[Event "') and moves[-1].isspace():
            inside = False
        if not inside:
            line = line.removeprefix(BOM)
            first = line[:1]
            if first in BLANKS:
                first = line.lstrip()[:1]
            if not first or first == b"%" or (first == b";" and not moves):
                (moves or tags).append(line)
                gap = tagged
                continue
            another = gap and line.lstrip().startswith(b"[Event ")
            if (moves and (first == b"[" or (over and first not in REMARKS))) or another:
                yield b"".join(tags), b"".join(moves)
                tags, moves, over, tagged, depth, size = [], [], False, False, 0, len(line)
            if first == b"[":
                tags.append(line)
                tagged, gap = True, False
                continue
        moves.append(line)
        bare = line
        if inside or MARKED.search(line):
            bare, inside = _outside(line, inside)
            depth += bare.count(b"(") - bare.count(b")")
        if bare := bare.rstrip():
            over = depth <= 0 and (bare.endswith(tuple(RESULTS)) or (over and bare.lstrip().startswith(b"$")))
    if moves or any(map(bytes.strip, tags)):
        yield b"".join(tags), b"".join(moves)


def _outside(line: bytes, inside: bool) -> tuple[bytes, bool]:
    """(line without comments, whether a comment is open at its end). inside: one is open at its start."""
    if inside:
        _, closed, line = line.partition(b"}")
        if not closed:
            return b"", True
    bare, opening, _ = REMARK.sub(b"", line).partition(b"{")
    return bare, bool(opening)


def main_line(text: bytes) -> tuple[list[bytes], str]:
    """Words of move text without comments and variations, and its fault ("" for none). Evaluations in comments become
    words: "%" and the number."""
    if not MARKED.search(text):
        return text.split(), ""
    if not (text.startswith(b"%") or any(mark in text for mark in UNUSUAL)) and text.count(b"{") == text.count(b"}"):
        pieces = EVALUATION.split(text)  # fast path: words and brace comments only
        pieces[1::2] = [b" %" + number + b" " for number in pieces[1::2]]
        bare = COMMENT.sub(b" ", b"".join(pieces))
        if b"{" not in bare and b"}" not in bare:
            return bare.split(), ""
    words: list[bytes] = []
    depth = 0
    for token in TOKEN.findall(text):
        first = token[:1]
        if first == b"{":
            if not token.endswith(b"}"):
                return words, "a comment is not closed"
            if not depth and (evaluation := EVALUATION.fullmatch(token)):
                words.append(b"%" + evaluation[1])
        elif first == b"(":
            depth += 1
        elif first == b")":
            depth -= 1
            if depth < 0:
                return words, "a variation is closed that was never opened"
        elif first == b"}":
            return words, "a comment is closed that was never opened"
        elif first not in b";%" and not depth:
            words.append(token)
    return words, "a variation is not closed" if depth else ""


@lru_cache(MAX_WORDS)
def parse_word(word: bytes) -> int | float | str:
    """Parse a word, ignoring move numbers before and glyphs after it.

    int: a move, see `bitboard.replay`. float: White's evaluation, see `client.MATE`. str: a result (POINTS), NULL_MOVE,
    UNKNOWN_WORD or NOTHING.
    """
    if word in RESULTS:
        return RESULTS[word]
    if word in NULL_MOVES:
        return NULL_MOVE
    if score := SCORE.fullmatch(word):
        value = float(score[2])
        if score[1]:
            return float(MATE if value > 0 else -MATE)
        return float(round(min(max(100 * value, -CENTIPAWN_LIMIT), CENTIPAWN_LIMIT)))
    bare = GLYPH.sub(b"", word)
    if bare in ANNOTATIONS or not SPELLED.search(bare):
        return NOTHING
    if number := NUMBER.match(bare):
        return parse_word(bare[number.end() :])
    move = MOVE.fullmatch(bare)
    if not move:
        return UNKNOWN_WORD
    piece, file, rank, target_file, target_rank, promotion, long = move.groups()
    if target_file is None:
        return bitboard.CASTLING | (2 if long else 6) << 3
    target = target_file[0] - ord("a") + 8 * (target_rank[0] - ord("1"))
    kind = b"PNBRQK".index(piece) if piece else bitboard.ANY_PIECE if file and rank else bitboard.PAWN
    if kind == bitboard.PAWN and not file:
        file = target_file
    origin = (file[0] - ord("a") if file else 8) << 9 | (rank[0] - ord("1") if rank else 8) << 13
    return kind | target << 3 | origin | (b"NBRQ".index(promotion.upper()) + 1 if promotion else 0) << 17


class _Game(NamedTuple):
    """A parsed game. points: White's. moves, evaluated (all words, if there are evaluations): see `parse_word`."""

    number: int
    fen: str
    points: int
    moves: list[int]
    evaluated: list[int | float | str]


def parse_game(number: int, tags: bytes, text: bytes, warned: Counter[str]) -> _Game:
    """Parse one game's text. Raises SkippedEntry and QuarantinedEntry."""
    tag = {name.lower(): value.strip() for name, value in TAG.findall(tags)}
    variant = decode_text(tag.get(b"variant", b""))
    if variant.lower() not in STANDARD_VARIANTS:
        raise notation.SkippedEntry(f"variant {variant}")
    words, fault = main_line(text)
    meanings = list(map(parse_word, words))
    moves = [word for word in meanings if type(word) is int]
    special = [word for word in meanings if type(word) is str and word]
    if NULL_MOVE in special:
        raise notation.SkippedEntry("null move")
    if not fault and UNKNOWN_WORD in special:
        fault = f"'{decode_text(words[meanings.index(UNKNOWN_WORD)])}' is no move"
    if not fault and not moves:
        raise notation.SkippedEntry("no moves")
    if not fault and special and any(type(word) is int for word in meanings[meanings.index(special[0]) :]):
        fault = "moves go on after the result"
    if fault:
        raise notation.QuarantinedEntry("broken move text", fault, len(moves))
    by_tag = POINTS[RESULTS.get(tag.get(b"result", b"*"), "*")]
    by_text = POINTS[special[0]] if special else UNKNOWN
    points = by_text if by_tag == UNKNOWN else by_tag
    if UNKNOWN not in (by_tag, by_text) and by_tag != by_text:
        warned["header and move text give different results: taken as unknown"] += 1
        points = UNKNOWN
    fen = decode_text(tag[b"fen"]) if b"fen" in tag and tag.get(b"setup", b"1") != b"0" else chess.STARTING_FEN
    return _Game(number, fen, points, moves, meanings if b"%eval" in text else [])


def final_results(pieces: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Results by the rules, without claims, of last positions (N, 32) with their `Replay.ends` (N, 4): points (N,) of
    the side to move, 2 if undecided, and the reasons."""
    castling, file, clock, earlier = ends.T
    _, _, offsets = bitboard.legal_moves(pieces, castling.astype(np.uint8), file.astype(np.int8))
    stuck, check = np.diff(offsets) == 0, bitboard.in_check(pieces)
    reasons = {
        "fivefold repetition": earlier >= 4,
        "seventy-five moves": clock >= 150,
        "insufficient material": insufficient_material(pieces),
        "stalemate": stuck & ~check,
        "mate": stuck & check,
    }
    points, why = np.full(len(ends), UNKNOWN), np.full(len(ends), "", object)
    for name, mask in reasons.items():  # later reasons override
        points[mask], why[mask] = -1 if name == "mate" else 0, name
    return points, why


@dataclass(frozen=True)
class Pgn:
    """PGN. repair: a result that contradicts the last position is replaced, with a warning; else it is quarantined."""

    source: ClassVar[str] = "pgn"
    repair: bool = False

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.open_compressed(path) as file:
            games = (tags + text for tags, text in split_games(notation.read_lines(file)))
            for part in notation.split_parts(games, PART_BYTES, PART_GAMES):
                if not part.number and (b"\0" in part.data or not GAME.search(part.data)):
                    raise ValueError(f"{path} holds no PGN games in UTF-8 or Latin-1: is it another format?")
                if not part.number and b"\r" in part.data and b"\n" not in part.data:
                    raise ValueError(f"{path}: its lines end with CR alone; convert it, `tr '\\r' '\\n'` does")
                yield part

    def read(self, part: Part) -> ParseResult:
        texts, entries = list(split_games(io.BytesIO(part.data))), ParseResult(part)

        def refuse(game: _Game, reason: str, detail: str) -> None:
            entries.refuse(game.number, reason, detail, decode_text(b"".join(texts[game.number])), len(game.moves))

        found = notation.parse_entries(
            [(number, *text) for number, text in enumerate(texts)],
            lambda text: parse_game(*text, entries.warned),
            entries,
            lambda text: decode_text(b"".join(text[1:])),
        )
        games = [game for _, game in found]
        start, faults = notation.read_fens([game.fen for game in games], self.source)
        bounds = np.array([0, *accumulate(len(game.moves) for game in games)])
        moves = np.array([code for game in games for code in game.moves], np.int32)
        columns = [start[name] for name in ("castling", "en_passant", "halfmove", "side")]
        replay = bitboard.replay(start["pieces"], np.stack(columns, axis=1), moves, bounds)
        for row in np.flatnonzero(replay.failed >= 0).tolist():
            game, move = games[row], int(replay.failed[row])
            if faults[row]:  # the board is empty
                refuse(game, "start that can't be played", f"{faults[row]}: {game.fen}")
                continue
            words = [word for word in main_line(texts[game.number][1])[0] if type(parse_word(word)) is int]
            ply, count = int(start["ply"][row]) + move, int(replay.matches[row])
            fits = f"fits {count} legal moves" if count else "is not legal"
            detail = f"{ply // 2 + 1}.{'..' * (ply % 2)} {decode_text(words[move])} {fits}"
            refuse(game, "ambiguous move" if count else "illegal move", detail)
        legal = np.flatnonzero(replay.failed < 0)
        games, start = [games[row] for row in legal], start[legal]
        claims = np.array([game.points for game in games], np.int64)
        points, why = final_results(replay.end_pieces[legal], replay.ends[legal])
        rows = np.array([len(game.moves) for game in games], np.int64)
        black = (start["side"] + rows) % 2 == 1  # to move at the end
        shown = np.where(black & (points != UNKNOWN), -points, points)
        wrong = (shown != UNKNOWN) & (claims != UNKNOWN) & (shown != claims)
        batch = assemble(games, start, replay, np.where(shown == UNKNOWN, claims, shown))
        if self.repair:
            entries.warned[CONTRADICTED + ": taken from the board"] += int(wrong.sum())
            return entries.result(batch, len(texts), len(rows), rows)
        for row in np.flatnonzero(wrong).tolist():
            detail = f"claimed result {NAMES[claims[row]]}, on the board {NAMES[shown[row]]}: {why[row]}"
            refuse(games[row], CONTRADICTED, detail)
        if wrong.any():
            batch = select(batch, np.flatnonzero(np.repeat(~wrong, rows)), LAYOUT)
        return entries.result(batch, len(texts), int((~wrong).sum()), rows[~wrong])


def assemble(games: list[_Game], start: np.ndarray, replay: bitboard.Replay, points: np.ndarray) -> Batch:
    """Shard batch of completely replayed games. points: White's result (N,), 2 unknown."""
    rows = np.array([len(game.moves) for game in games], np.int64)
    first = np.cumsum(rows) - rows
    records = notation.empty_records(len(replay.moves), "pgn")
    records["pieces"], records["repetition"] = replay.pieces, np.minimum(replay.state[:, 3], 2)
    for column, name in enumerate(("castling", "en_passant", "halfmove")):
        records[name] = replay.state[:, column]
    plies = np.arange(len(records)) - np.repeat(first, rows)
    records["side"] = (np.repeat(start["side"], rows) + plies) % 2
    records["ply"] = np.minimum(np.repeat(start["ply"].astype(np.int64), rows) + plies, 65535)
    white = np.repeat(points, rows)
    records["result"] = np.where(records["side"] & (white != UNKNOWN), -white, white)
    moves = replay.moves.astype("<u2")
    board = [start[name] for name in ("pieces", "castling", "en_passant", "side")]
    ids = [
        game_id(*(column[row].tobytes() for column in board), moves[begin : begin + length].tobytes())
        for row, (begin, length) in enumerate(zip(first, rows, strict=True))
    ]
    records["game"] = np.repeat(np.array(ids, "<u8"), rows)
    places, scores = list[int](), list[float]()
    for game, begin, length in zip(games, first.tolist(), rows.tolist(), strict=True):
        ply = 0
        for word in game.evaluated:
            if type(word) is float and ply < length:  # the last position is not stored
                places.append(begin + ply)
                scores.append(word)
            ply += type(word) is int
    score = np.array(scores)
    records["wdl"][places] = wdl_of_score(np.where(records["side"][places], -score, score))
    weight = np.zeros(len(replay.indices), "<u2")
    weight[replay.choice] = FULL_WEIGHT
    return notation.LegalMoves(moves, replay.indices, replay.offsets).batch(records, weight)
