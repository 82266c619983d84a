"""Builds the data plane (`onesided._core`) and maps the repository's rooms to subpackages.

Everything declarative is in pyproject.toml; only what needs code is here.
"""

import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# The folder at the root, and the name it is installed under.
ROOMS = {
    "onesided": "onesided",
    "transport": "onesided.transport",
    "rpc": "onesided.rpc",
    "windows": "onesided.windows",
    "collectives": "onesided.collectives",
}

NANOBIND = Path(nanobind.source_dir()).parent

# Portable on purpose: code for newer processors is chosen at run time, never by a -march here.
FLAGS = [
    *("-std=c++20", "-O3", "-g1", "-pthread", "-Wall", "-Wextra"),
    *("-fvisibility=hidden", "-fno-strict-aliasing", "-fno-math-errno"),
    "-MMD",  # writes the names of the headers that were read, for is_current()
]


def packages() -> dict[str, str]:
    """Maps every installed package, nested ones too, to its folder."""
    found = {}
    for folder, package in ROOMS.items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            where = init.parent.relative_to(ROOT / folder)
            found[".".join([package, *where.parts])] = str(Path(folder, where))
    return found


def core() -> Extension:
    """The nanobind extension: every source of csrc/ but its own tests."""
    if shutil.which(shlex.split(os.environ.get("CXX", "g++"))[0]) is None:
        raise SystemExit("onesided needs a C++20 compiler: install g++ (apt-get install g++) or set CXX")
    sources = [path.relative_to(ROOT) for path in sorted((ROOT / "csrc").rglob("*.cpp"))]
    return Extension(
        "onesided._core",
        sources=[str(path) for path in sources if path.parts[1] != "tests"],
        include_dirs=["csrc", nanobind.include_dir(), str(NANOBIND / "ext" / "robin_map" / "include")],
        define_macros=[("NB_COMPACT_ASSERTIONS", None), ("NDEBUG", None)],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-ldl"],
        language="c++",
    )


class BuildCore(build_ext):
    """Compiles the translation units side by side, and only those of which something changed.

    Objects stay in build/core/, for an installation into site-packages and for an editable one alike.
    """

    def finalize_options(self) -> None:
        """Lets the objects decide what is out of date, not setuptools, which does not know the headers."""
        super().finalize_options()
        self.build_temp = str(Path("build", "core", str(sys.implementation.cache_tag)))
        self.force = True

    def build_extensions(self) -> None:
        """Replaces the compiler's loop over its sources, as pybind11's ParallelCompile does."""
        compiler = self.compiler
        # Not among the extension's sources: setuptools puts those into the sdist, and takes no absolute path there.
        nanobind_source = str(NANOBIND / "src" / "nb_combined.cpp")

        def compile_changed(
            sources,
            output_dir=None,
            macros=None,
            include_dirs=None,
            debug=False,
            extra_preargs=None,
            extra_postargs=None,
            depends=None,
        ):
            macros, objects, extra, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, [*sources, nanobind_source], depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            said = shlex.join([*compiler.compiler_so_cxx, *cc_args, *extra])

            def compile_one(obj: str) -> None:
                stamp = Path(obj).with_suffix(".flags")
                if not is_current(Path(obj), stamp, said):
                    stamp.unlink(missing_ok=True)
                    compiler._compile(obj, *build[obj], cc_args, extra, pp_opts)
                    stamp.write_text(said)

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(compile_one, objects))
            return objects

        compiler.compile = compile_changed
        super().build_extensions()


def is_current(obj: Path, stamp: Path, said: str) -> bool:
    """True if `obj` was compiled with the command `said`, after all that its dependency file names was written."""
    deps = obj.with_suffix(".d")
    if not (obj.exists() and deps.exists() and stamp.exists() and stamp.read_text() == said):
        return False
    names = shlex.split(deps.read_text().replace("\\\n", " ").partition(":")[2])
    built = obj.stat().st_mtime
    return all(os.path.exists(name) and os.path.getmtime(name) < built for name in names)


if __name__ == "__main__":
    mapped = packages()
    setup(
        packages=list(mapped),
        package_dir=mapped,
        package_data={name: ["py.typed", "*.pyi", "*.proto"] for name in mapped},
        ext_modules=[core()],
        cmdclass={"build_ext": BuildCore},
    )
