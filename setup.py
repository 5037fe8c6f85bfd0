"""Lets pip build the CPU kernels; everything else about the package stands in pyproject.toml."""

import runpy
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
BUILD = runpy.run_path(str(FOLDER / "build.py"))


class BuildKernels(build_ext):
    """Plain C libraries instead of Python extensions: beside the sources when editable, else in the wheel."""

    def run(self) -> None:
        """Builds what is not current; goes on without a compiler, with a notice."""
        try:
            BUILD["build_all"](BUILD["isas"](), self._folder())
        except BUILD["NoCompiler"] as error:
            self.warn(f"CPU kernels are not built, {error}; models will run on the slower reference backend")
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"CPU kernels could not be built:\n{error.stderr}") from error

    def get_outputs(self) -> list[str]:
        """The libraries."""
        return [str(path) for path in self._folder().glob("_perdure_*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is copied: an editable build lies where it is loaded from."""
        return {}

    def get_source_files(self) -> list[str]:
        """What a source distribution needs beside the package's data."""
        return [str(path) for path in sorted((FOLDER / "csrc").iterdir())]

    def _folder(self) -> Path:
        return FOLDER.resolve() if self.inplace or self.editable_mode else Path(self.build_lib) / FOLDER


setup(
    ext_modules=[Extension("kernels.cpu._perdure", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
