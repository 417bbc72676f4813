"""Puts presets and notebooks, which lie beside the package in a checkout, into what is built; see pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = [*Path("params").rglob("*.yaml"), *Path("notebooks").glob("*.ipynb")]


class BuildWithData(build_py):
    """Copies them to matrixlib/params and matrixlib/notebooks, where matrixlib/files.py looks for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for file in FILES:
                target = Path(self.build_lib, "matrixlib", file)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(file), str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, FILES)]


setup(cmdclass={"build_py": BuildWithData})
