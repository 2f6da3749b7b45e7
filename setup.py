"""Builds the native core ``evolving_infra._core``; everything else is in pyproject.toml."""

import shutil
import sys
from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

NEEDS = (
    "evolving_infra._core needs a C++20 compiler: install g++ 10 or newer (Debian: apt install g++)"
)


class BuildCore(build_ext):
    """Says in one sentence what is missing instead of a compiler driver's traceback."""

    def build_extensions(self) -> None:
        compiler = getattr(self.compiler, "compiler_cxx", ["c++"])[0]
        if shutil.which(compiler) is None:
            sys.exit(NEEDS)
        try:
            super().build_extensions()
        except CompileError:
            sys.exit(f"{NEEDS}; {compiler} failed, its words are above")


setup(
    ext_modules=[
        Pybind11Extension(
            "evolving_infra._core",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.hpp")),
            cxx_std=20,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
