"""The catalogue: rows, order, quarantine, and repair of all that can happen to it."""

import os
import shutil
import sqlite3
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from toy_shards import LAYOUT, META, toy_batch, toy_shards

from matrixlib.data import catalogue as catalogues
from matrixlib.data import shards
from matrixlib.data.catalogue import MISSING, NAME, Catalogue, CatalogueError
from matrixlib.data.shards import write_shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def filled(folder: Path) -> Catalogue:
    """Shards b, a (train) and v (validation) in a catalogue, added in that order."""
    catalogue = Catalogue(folder)
    for info in reversed(toy_shards(folder, [30, 20], quality={"records": 7})):
        catalogue.add(info)
    catalogue.add(write_shard(folder / "v.npz", LAYOUT, toy_batch(10), META | {"split": "validation"}))
    return catalogue


def names(catalogue: Catalogue, **chosen: str | None) -> list[str]:
    return [row.name for row in catalogue.shards(**chosen)]  # type: ignore[arg-type]


def edit(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / NAME) as db:
        db.execute(statement)
    db.close()


def test_rows_in_a_fixed_order(tmp_path: Path) -> None:
    catalogue = filled(tmp_path)
    assert catalogue.messages == []
    assert not any(isinstance(value, sqlite3.Connection) for value in vars(catalogue).values()), "none survives a fork"
    assert names(catalogue) == ["a.npz", "b.npz", "v.npz"]
    assert names(catalogue, split="train") == ["a.npz", "b.npz"]
    row = catalogue.shards("train")[0]
    assert (row.count, row.source, row.quality, row.path) == (30, "made", {"records": 7}, tmp_path / "a.npz")
    assert catalogue.verify() == {}
    again = Catalogue(tmp_path)
    assert again.messages == []
    assert again.shards() == catalogue.shards()
    assert again.hash() == catalogue.hash()
    with pytest.raises(CatalogueError, match="unknown split"):
        catalogue.shards("test")


def test_quarantine_and_release(tmp_path: Path) -> None:
    catalogue = filled(tmp_path)
    before = catalogue.hash()
    catalogue.quarantine("a.npz", "skewed labels")
    assert names(catalogue) == ["b.npz", "v.npz"]
    assert catalogue.hash() != before
    (row,) = Catalogue(tmp_path).shards(state="quarantined")
    assert (row.name, row.reason) == ("a.npz", "skewed labels")
    catalogue.release("a.npz")
    assert catalogue.hash() == before
    with pytest.raises(CatalogueError, match=r"no shard 'x\.npz'"):
        catalogue.quarantine("x.npz", "?")


def test_add_refuses(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (info,) = toy_shards(tmp_path, [5])
    with pytest.raises(CatalogueError, match="outside"):
        Catalogue(tmp_path / "in").add(info)
    with pytest.raises(CatalogueError, match="no such folder"):
        Catalogue(tmp_path / "nowhere")
    (tmp_path / "in" / NAME).mkdir()
    with pytest.raises(CatalogueError, match=r"catalogue\.sqlite is a folder.*move it, "):
        Catalogue(tmp_path / "in")


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated", "half", "other table", "a changed row"])
def test_rebuilt_from_the_shards(tmp_path: Path, damage: str) -> None:
    before, path = filled(tmp_path).hash(), tmp_path / NAME
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other table":
        edit(tmp_path, "ALTER TABLE shards ADD COLUMN colour TEXT")
    elif damage == "a changed row":
        edit(tmp_path, "UPDATE shards SET count = 31, split = 'validation' WHERE name = 'a.npz'")
    else:
        middle = len(whole) // 2
        overwritten = whole[:middle] + b"\xff" * (len(whole) - middle)
        path.write_bytes({"garbage": b"x" * 5000, "truncated": whole[:700], "half": overwritten}[damage])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        catalogue = Catalogue(tmp_path)
    assert len(warned) == (damage != "missing"), "shards copied without their catalogue are no fault"
    assert len(catalogue.messages) == 1
    assert "rebuilt from 3 shards" in catalogue.messages[0]
    assert catalogue.hash() == before
    assert (tmp_path / f"{NAME}.damaged").exists() == (damage != "missing")
    assert Catalogue(tmp_path).messages == []


def test_locked_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "database is locked" is a DatabaseError too: it must not throw the catalogue away."""
    filled(tmp_path)
    monkeypatch.setattr("matrixlib.data.catalogue.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(tmp_path / NAME)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(CatalogueError, match="locked"):
            Catalogue(tmp_path)
    finally:
        holder.close()
    assert names(Catalogue(tmp_path)) == ["a.npz", "b.npz", "v.npz"]


def test_tampering_does_not_lift_a_quarantine_or_leave_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = filled(tmp_path)
    catalogue.quarantine("a.npz", "bad")
    edit(tmp_path, "UPDATE shards SET state = 'quarintined', reason = '' WHERE name = 'a.npz'")
    edit(tmp_path, "UPDATE shards SET name = '../../etc/x.npz' WHERE name = 'b.npz'")
    opened = Catalogue(tmp_path)
    assert names(opened) == ["b.npz", "v.npz"]
    assert names(opened, state="quarantined") == ["a.npz"]
    monkeypatch.setattr(catalogues, "_digest", lambda columns: "as if somebody had made it fit")
    edit(tmp_path, "UPDATE shards SET digest = 'as if somebody had made it fit'")
    edit(tmp_path, "UPDATE shards SET name = '../b.npz' WHERE name = 'b.npz'")
    assert names(Catalogue(tmp_path)) == ["b.npz", "v.npz"]


def test_orphans(tmp_path: Path) -> None:
    filled(tmp_path)
    write_shard(tmp_path / "c.npz", LAYOUT, toy_batch(7), META)  # as after a crash before add()
    (tmp_path / "d.npz").write_bytes(b"no shard at all")
    (tmp_path / "e.npz.tmp").write_bytes(b"half a shard")
    (tmp_path / "v.npz").write_bytes((tmp_path / "v.npz").read_bytes()[:-100])
    taken = Catalogue(tmp_path)
    assert names(taken) == ["a.npz", "b.npz", "c.npz"]
    assert "instead of" in taken.shards(state="quarantined")[0].reason
    assert any("c.npz: was not in the catalogue" in message for message in taken.messages)
    assert any("d.npz" in message and "left out" in message for message in taken.messages)


def test_file_lost_and_found(tmp_path: Path) -> None:
    before = filled(tmp_path).hash()
    (tmp_path / "a.npz").rename(tmp_path / "elsewhere")
    lost = Catalogue(tmp_path)
    assert names(lost) == ["b.npz", "v.npz"]
    assert lost.shards(state="quarantined")[0].reason == MISSING
    (tmp_path / "elsewhere").rename(tmp_path / "a.npz")
    found = Catalogue(tmp_path)
    assert found.hash() == before
    assert "back and whole" in found.messages[0]


def test_verify_finds_changed_bytes_and_a_rebuild_quarantines_them(tmp_path: Path) -> None:
    catalogue, path = filled(tmp_path), tmp_path / "b.npz"
    data = bytearray(path.read_bytes())
    data[200] ^= 1  # in the records
    path.write_bytes(data)
    problems = catalogue.verify()
    assert list(problems) == ["b.npz"]
    catalogue.quarantine("b.npz", problems["b.npz"])
    with pytest.raises(CatalogueError, match="restore the file"):
        catalogue.release("b.npz")
    (tmp_path / NAME).unlink()
    (row,) = Catalogue(tmp_path).shards(state="quarantined")
    assert (row.name, row.reason) == ("b.npz", "'records' is damaged (zip checksum)")


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = filled(tmp_path).hash()
    write_shard(tmp_path / "c.npz", LAYOUT, toy_batch(7), META)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write anywhere
    catalogue = Catalogue(tmp_path)
    assert names(catalogue) == ["a.npz", "b.npz", "c.npz", "v.npz"]
    catalogue.quarantine("c.npz", "for this process")
    assert catalogue.hash() == before
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files


def test_a_quarantine_outlives_the_database(tmp_path: Path) -> None:
    catalogue = filled(tmp_path)
    catalogue.quarantine("a.npz", "its games are from a broken engine")
    (tmp_path / NAME).unlink()
    rebuilt = Catalogue(tmp_path)
    assert [(row.name, row.reason) for row in rebuilt.shards(state="quarantined")] == [
        ("a.npz", "its games are from a broken engine")
    ]
    rebuilt.release("a.npz")
    rebuilt.quarantine("b.npz", "damaged")
    rebuilt.add(write_shard(tmp_path / "b.npz", LAYOUT, toy_batch(20), META))  # what was wrong with the old one is past
    (tmp_path / NAME).unlink()
    assert names(Catalogue(tmp_path)) == ["a.npz", "b.npz", "v.npz"]


def test_opening_takes_back_nothing_that_another_process_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard lies there before its row does: whoever opens the folder in that moment must not overwrite the row."""
    catalogue = filled(tmp_path)
    info = write_shard(tmp_path / "n.npz", LAYOUT, toy_batch(7), META)
    find_damage = catalogues.find_damage

    def meanwhile(path: Path) -> str:
        catalogue.add(info)
        catalogue.set_quality("n.npz", {"entropy": 1.5})
        catalogue.quarantine("n.npz", "dull")
        return find_damage(path)

    monkeypatch.setattr(catalogues, "find_damage", meanwhile)
    row = {row.name: row for row in Catalogue(tmp_path).shards(state=None)}["n.npz"]
    assert (row.state, row.reason, row.quality) == ("quarantined", "dull", {"entropy": 1.5})


def test_a_backup_is_put_back_checked_and_reconciled(tmp_path: Path) -> None:
    """What shards alone cannot say comes back, but no quarantine is lifted; a damaged one is rebuilt."""
    folder, copy = tmp_path / "data", tmp_path / "copy.sqlite"
    folder.mkdir()
    catalogue = filled(folder)
    catalogue.set_quality("b.npz", {"entropy": 1.5})
    catalogue.backup(copy)
    catalogue.quarantine("a.npz", "dull")
    before = catalogue.hash()
    write_shard(folder / "new.npz", LAYOUT, toy_batch(5), META)
    shutil.copy(copy, folder / NAME)
    restored = Catalogue(folder)
    assert {row.name: row.quality for row in restored.shards()}["b.npz"] == {"entropy": 1.5}
    assert names(restored, state="quarantined") == ["a.npz"]
    assert [text for text in restored.messages if "new.npz" in text]
    (folder / "new.npz").unlink()
    (folder / NAME).write_bytes(b"x" * 5000)
    assert Catalogue(folder).hash() == before
    with pytest.raises(CatalogueError, match="cannot be written"):
        catalogue.backup(tmp_path / "none" / "copy.sqlite")


def test_what_imports_did_is_logged_with_their_shards_or_not_at_all(tmp_path: Path) -> None:
    catalogue, (info,) = filled(tmp_path), toy_shards(tmp_path, [30], quality={"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        catalogue.add(info, log=("one", 0, {"no JSON": {1}}))
    assert (catalogue.shards()[0].quality, catalogue.imports()) == ({"records": 7}, [])
    for step in (0, 1):
        catalogue.add(info, log=("one", step, {"rows": 1}))
    catalogue.add(log=("two", 0, {}))
    assert catalogue.imports("one") == [("one", 0, {"rows": 1}), ("one", 1, {"rows": 1})]
    edit(tmp_path, "UPDATE imports SET data = '{}' WHERE step = 1")
    edit(tmp_path, "UPDATE shards SET count = 31 WHERE name = 'b.npz'")
    assert Catalogue(tmp_path).imports() == [("one", 0, {"rows": 1}), ("two", 0, {})], "also after a rebuild"


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_flipped_bits_of_the_catalogue_lose_nothing(tmp_path: Path, flips: int) -> None:
    """Whatever bit of the database is wrong, the same shards are used as before, and none that was kept out."""
    catalogue = filled(tmp_path)
    catalogue.quarantine("a.npz", "dull")
    before, whole = catalogue.hash(), (tmp_path / NAME).read_bytes()
    stream = np.random.default_rng(3)
    for bit in stream.integers(0, len(whole) * 8, flips):
        for path in tmp_path.glob(f"{NAME}*"):
            path.unlink()
        data = bytearray(whole)
        data[bit // 8] ^= 1 << int(bit % 8)
        (tmp_path / NAME).write_bytes(data)
        opened = Catalogue(tmp_path)
        assert opened.hash() == before, bit
        assert names(opened, state="quarantined") == ["a.npz"], bit


def put(catalogue: Catalogue, **facts: object) -> None:
    """A row as a stranger would write it: its digest fits, as that is no secret."""
    row = catalogue.shards()[0]
    columns = [{**asdict(row), "quality": "{}", **facts}[name] for name in catalogues.COLUMNS]
    with sqlite3.connect(catalogue.path) as db:
        db.execute(catalogues.PUT, [*columns, catalogues._digest(columns)])
    db.close()


@pytest.mark.parametrize(
    "facts",
    [
        *(
            {"name": name}
            for name in ("../victim.npz", "link/victim.npz", "{outside}/victim.npz", "a\0b.npz", "", b"x")
        ),
        {"name": "n.npz", "count": "many"},
        {"name": "n.npz", "quality": "[" * 100_000},
        {"name": "n.npz", "quality": "[1]"},
        {"name": "n.npz", "count": 0},
        {"name": "n.npz", "count": -5},
        {"name": "n.npz", "count": 10**15},
        {"name": "n.txt"},
    ],
    ids=str,
)
def test_a_strange_row_is_left_out_and_nothing_outside_is_touched(tmp_path: Path, facts: dict[str, object]) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    folder.mkdir()
    for place in (tmp_path, outside):
        (place / "victim.npz").write_bytes(b"mine")
    catalogue = filled(folder)
    (folder / "link").symlink_to(outside)
    name = facts.get("name")
    put(catalogue, **facts | ({"name": name.format(outside=outside)} if isinstance(name, str) else {}))
    opened = Catalogue(folder)
    assert names(opened, state=None) == ["a.npz", "b.npz", "v.npz"]
    for path in ("../victim.npz", "link/victim.npz", str(outside / "victim.npz")):
        with pytest.raises(CatalogueError, match="inside"):
            opened.remove(["a.npz", path])
        with pytest.raises(CatalogueError, match="no shard"):
            opened.quarantine(path, "wrong")
    assert (folder / "a.npz").exists()
    assert [path.read_bytes() for path in (tmp_path / "victim.npz", outside / "victim.npz")] == [b"mine", b"mine"]
    assert [path.name for path in outside.iterdir()] == ["victim.npz"]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER late AFTER INSERT ON shards BEGIN DELETE FROM shards; END",
        "CREATE VIEW more AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "ALTER TABLE shards ADD COLUMN more GENERATED ALWAYS AS (zeroblob(9)) VIRTUAL",
    ],
    ids=lambda statement: statement.split()[1],
)
def test_a_catalogue_with_somebody_elses_code_is_made_anew(tmp_path: Path, statement: str) -> None:
    before = filled(tmp_path).hash()
    edit(tmp_path, statement)
    catalogue = Catalogue(tmp_path)
    assert catalogue.hash() == before
    assert any("the catalogue has" in message for message in catalogue.messages)
    assert Catalogue(tmp_path).messages == []


@pytest.mark.parametrize(
    "facts",
    [
        {"split": ["train"]},
        {"split": None},
        {"source": "a\ud800"},
        {"count": "9"},
        {"count": 10**15},
        {"count": 0},
        {"sizes": 3},
        {"sizes": {"target": 10**15}},
        {"quality": [1]},
    ],
    ids=str,
)
def test_a_shard_of_strange_meta_data_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, object]
) -> None:
    filled(tmp_path)
    full = shards._full_meta
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_full_meta", lambda layout, batch, meta: full(layout, batch, meta) | facts)
        (tmp_path / "n.npz").write_bytes(shards.pack_shard(LAYOUT, toy_batch(9), META))
    assert names(Catalogue(tmp_path), state=None) == ["a.npz", "b.npz", "v.npz"]


def test_looking_at_a_folder_of_something_else_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "games.pgn").write_text("1. e4 *\n")
    (tmp_path / "foreign.npz").write_bytes(b"no shard")
    os.mkfifo(tmp_path / "pipe.npz")  # opening one waits for a writer
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / os.fsdecode(b"\xff.npz")).write_bytes(b"no text")
    catalogue = Catalogue(tmp_path)
    assert catalogue.shards(state=None) == []
    assert catalogue.hash() == Catalogue(tmp_path).hash()
    assert len(list(tmp_path.iterdir())) == 5
    (info,) = toy_shards(tmp_path, [5])
    catalogue.add(info)
    assert (tmp_path / NAME).is_file()
    assert names(Catalogue(tmp_path)) == names(catalogue) == [info.path.name]
