"""Copies the template library and the error pages, which a clone stores next to the package, into the wheel.

A clone installed with `pip install -e .` needs no copy: `forgather.project.locations` finds them in the clone.
Everything else about the build is in `pyproject.toml`.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {"templatelib": ("templatelib", "*.yaml"), "docs/errors": ("_errors", "FG*.md")}


class BuildWithLibrary(build_py):
    """Copies the shipped files into the package that is being built."""

    def run(self) -> None:
        """Builds the package, and its data unless it is an editable install."""
        super().run()
        if not self.editable_mode:
            for source, target in self._shipped_files():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def _shipped_files(self) -> list[tuple[Path, Path]]:
        here = Path(__file__).parent
        package = Path(self.build_lib) / "forgather"
        return [
            (source, package / folder / source.relative_to(here / top))
            for top, (folder, pattern) in SHIPPED.items()
            for source in sorted((here / top).rglob(pattern))
        ]


setup(cmdclass={"build_py": BuildWithLibrary})
