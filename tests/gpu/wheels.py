"""Packages that a machine lacks, from a folder of wheels: unpacked beside the check, nothing is installed.

Needs the standard library alone.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {"jupyterlab", "papermill", "ipywidgets", "nbval"}
"""Dependencies that nothing in the check imports."""
SYSTEMS = {"linux": "linux", "darwin": "macosx", "win32": "win"}


def normal(name: str) -> str:
    """A distribution's name as it is compared: lower case, with single dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> bool:
    """Whether a distribution of this name can be imported here."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def missing() -> list[str]:
    """Dependencies of the package that are not here, without those of the notebooks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.match(r"[\w.-]+", line) for line in project["dependencies"]]
    return [m[0] for m in names if m and m[0] not in NOTEBOOKS and not installed(m[0])]


def fits(wheel: Path) -> bool:
    """Whether a wheel is for this Python and machine, by the tags in its name."""
    python, abi, system = wheel.stem.split("-")[-3:]
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    versions = [int(tag[3:]) for tag in python.split(".") if re.fullmatch(r"cp3\d+", tag)]
    stable = "abi3" in abi and any(version <= sys.version_info.minor for version in versions)
    if not ({"py3", ours} & set(python.split(".")) or stable):
        return False
    name = SYSTEMS.get(sys.platform, sys.platform)
    return system == "any" or (name in system and platform.machine().lower() in system.lower())


def unpack(folder: Path, target: Path) -> list[str]:
    """Unpack into `target` every wheel of `folder` that fits and whose distribution is not here; their names.

    A wheel with compiled modules cannot be imported as the archive that it is. `target` then comes after what is
    installed on sys.path, and stands in PYTHONPATH for the processes that are started. Raises ValueError where the
    folder holds no wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"no wheel in {folder}; give the folder that `pip wheel` or `pip download` wrote to")
    names = []
    for wheel in wheels:
        name = normal(wheel.name.split("-")[0])
        if fits(wheel) and not installed(name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            names.append(name)
    add_path(target)
    return names


def add_path(*folders: Path) -> None:
    """Let this process and those that it starts import from these folders too."""
    words = [str(folder) for folder in folders]
    sys.path += [word for word in words if word not in sys.path]
    known = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    os.environ["PYTHONPATH"] = os.pathsep.join([*known, *(word for word in words if word not in known)])
