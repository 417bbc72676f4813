"""What became of every entry of an import: accounts beside the shards, the quarantine, and the report of a call.

An account is one step of an import, `imports/<name>/part_000003.json`. It is written after its shards, so a step that
has a whole account is done. Where rows were merged, the new shards say which ones they replace.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from matrixlib.data.catalogue import NAME, REMOTE, Catalogue, ShardRow, replaced_by
from matrixlib.data.entries import Refused
from matrixlib.data.remote import local_path
from matrixlib.data.shards import Layout, Shard, is_shard
from matrixlib.files import exclusive, make_folder, write_text, writing

FOLDER = "imports"
MERGED = "merged_"  # how the name of a folder of merged shards begins


class ImportStopped(RuntimeError):
    """An import that could not go on; what was finished stays, and the same call goes on from there."""


@dataclass(frozen=True)
class Account:
    """What one step did. parts: numbers of its first part and of the one after its last. positions: by split.
    shards: name -> SHA-256."""

    source: str
    file: str
    sha256: str
    reader: Mapping[str, Any]
    step: int
    parts: tuple[int, int]
    last: bool
    entries: int
    stored: int
    positions: Mapping[str, int]
    skipped: Mapping[str, int]
    warned: Mapping[str, int]
    refused: Sequence[Refused]
    shards: Mapping[str, str]


@dataclass(frozen=True)
class ImportReport:
    """What the files of a call hold: entries = stored + sum(refused) + sum(skipped); fresh_*: done by this call.

    outliers: figures of new shards that are far from those of the other shards of their source. remarks: what the
    catalogue repaired when it was opened.
    """

    entries: int = 0
    stored: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    warned: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)
    shards: Sequence[str] = ()
    fresh_entries: int = 0
    fresh_positions: int = 0
    seconds: float = 0.0
    outliers: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def text(self, rows: str = "positions") -> str:
        """A few lines for people. rows: what the task calls them."""
        train, validation = (self.positions.get(split, 0) for split in ("train", "validation"))
        lines = [
            f"{self.entries:,} entries: {self.stored:,} stored, {sum(self.refused.values()):,} in quarantine, "
            f"{sum(self.skipped.values()):,} left out",
            f"{train:,} training and {validation:,} validation {rows} in {len(self.shards)} shards",
        ]
        for title, counts in (
            ("in quarantine", self.refused),
            ("left out", self.skipped),
            ("stored, but", self.warned),
        ):
            lines += [f"  {title}: {count:,} {reason}" for reason, count in sorted(counts.items())]
        lines += [f"  outlier: {outlier}" for outlier in self.outliers]
        lines += [f"  {remark}" for remark in self.remarks]
        if not self.fresh_entries:
            lines.append("nothing new: all of it had been imported before")
        else:
            before = self.entries - self.fresh_entries
            rate = f"{self.fresh_entries / self.seconds:,.0f} entries/s, {self.fresh_positions / self.seconds:,.0f}"
            had = f", {before:,} had been imported before" if before else ""
            lines.append(f"{self.fresh_entries:,} read in {self.seconds:.1f} s ({rate} {rows}/s){had}")
        return "\n".join(lines)


def report_of(
    whole: Sequence[Account], fresh: Sequence[Account], seconds: float, outliers: Sequence[str], remarks: Sequence[str]
) -> ImportReport:
    """The report of a call: accounts of its files, and those of them that are new."""
    sums = {name: Counter[str]() for name in ("skipped", "warned", "positions")}
    for account in whole:
        for name, counts in sums.items():
            counts.update(getattr(account, name))
    return ImportReport(
        entries=sum(account.entries for account in whole),
        stored=sum(account.stored for account in whole),
        refused=dict(Counter(entry.reason for account in whole for entry in account.refused)),
        **{name: dict(counts) for name, counts in sums.items()},
        shards=[name for account in whole for name in account.shards],
        fresh_entries=sum(account.entries for account in fresh),
        fresh_positions=sum(sum(account.positions.values()) for account in fresh),
        seconds=seconds,
        outliers=outliers,
        remarks=tuple(remarks),
    )


# On disk


def write_account(path: Path, account: Account) -> None:
    """Written whole or not at all, with a digest of itself."""
    text = json.dumps(asdict(account), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(path, json.dumps({"digest": digest, "account": json.loads(text)}, indent=1))


def read_account(path: Path) -> Account | None:
    """The account in a file; None if it is missing or not what was written."""
    try:
        data = json.loads(path.read_bytes())
        text = json.dumps(data["account"], sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != data["digest"]:
            return None
        facts = data["account"]
        refused = tuple(Refused(**entry) for entry in facts["refused"])
        return Account(**{**facts, "parts": tuple(facts["parts"]), "refused": refused})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def accounts(folder: Path | str) -> list[Account]:
    """All whole accounts of a folder of shards, by import and step."""
    read = (read_account(path) for path in sorted(Path(folder).glob(f"{FOLDER}/*/part_*.json")))
    return [account for account in read if account is not None]


def quarantined(folder: Path | str) -> list[tuple[str, Refused]]:
    """What was refused, with the name of the file it came from. Its text, mended, can be imported like any other."""
    return [(account.file, entry) for account in accounts(folder) for entry in account.refused]


def replaced_shards(rows: Iterable[ShardRow], layout: Layout) -> set[str]:
    """Names of the shards whose rows others of the folder hold since a merge, as those say themselves."""
    names: set[str] = set()
    for row in rows:
        if row.state == "healthy" and row.name.startswith(MERGED):
            names.update(replaced_by(Shard(local_path(row), layout).meta, row.name))
    return names


def check_inside(path: Path, folder: Path) -> None:
    """ValueError where a link leads from a folder of shards out of it, to files that an import would clear away."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link out of {folder}: remove it, or import into another folder")


def is_ours(file: Path, folder: Path) -> bool:
    """Whether a file of a folder, which may be one of shards, is what imports and the catalogue keep there."""
    if file.name.startswith(NAME) or file.name.endswith((".npz.quarantined", ".npz.merged", ".npz.tmp")):
        return True
    if file.relative_to(folder).parts[0] == FOLDER:
        return (folder / FOLDER / "lock").exists() or (folder / NAME).exists()
    return file.suffix == ".npz" and is_shard(file)


def quiet_catalogue(folder: Path) -> Catalogue:
    """A folder's catalogue; what it repairs, as after a kill, is in its `messages` alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Catalogue(folder)


@contextmanager
def locked(folder: Path) -> Iterator[Catalogue]:
    """The catalogue of a folder, made if it is not there, that no other import or merge writes meanwhile.

    ImportStopped where one does, ValueError where the folder cannot be written, its accounts lie elsewhere, or are of a
    merge as it was before 2026-11-22.
    """
    if (folder / REMOTE).exists():
        raise ValueError("shards that lie elsewhere are only read: import and merge where they are")
    if (unfinished := folder / FOLDER / "merge.json").exists():
        raise ValueError(f"{unfinished}: an older version did not end its merge: import the sources into a new folder")
    if (folder / FOLDER / "counts").exists():
        raise ValueError(
            f"{folder} was merged by an older version: train with it, or import its sources into a new folder"
        )
    make_folder(folder / FOLDER)
    check_inside(folder / FOLDER, folder)
    busy = ImportStopped(f"another import into {folder} is running; wait until it has ended")
    with ExitStack() as held:
        with writing(folder):
            held.enter_context(exclusive(FileLock(folder / FOLDER / "lock"), busy))
        yield quiet_catalogue(folder)
