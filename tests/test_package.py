"""The package as a whole: who imports whom, what an import costs, what is public, and that it works alone."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import onesided

ROOT = Path(__file__).resolve().parent.parent

# ---- The rooms and the arrows between them (ARCHITECTURE.md) -------------------------------------------------------

# Each room, and the rooms that its modules may import besides itself and onesided.errors. A room that is not built
# yet is no error; a folder that is neither here nor in NOT_INSTALLED is.
ARROWS: dict[str, set[str]] = {
    "transport": {"_core"},
    "rpc": set(),
    "windows": {"_core", "transport"},  # reaches rpc through a Protocol only
    "collectives": {"_core", "windows"},
    "state": {"windows", "rpc"},
    "onesided": {"_core", "transport", "rpc", "windows", "collectives", "state"},
}
NOT_INSTALLED = {"benchmarks", "build", "csrc", "dist", "docs", "examples", "scripts", "tests"}


def python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_rooms(file: Path, room: str) -> Iterator[tuple[int, str]]:
    """Every import of ours in `file`, in functions too, as (line, room)."""
    package = ["onesided", *([] if room == "onesided" else [room]), *file.relative_to(ROOT / room).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            # `from onesided import windows` names a room only in its last word.
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "onesided":
                part = rest[0] if rest else ""
                yield node.lineno, part if part in {"_core", "errors", *ARROWS} else "onesided"


def test_arrows_hold() -> None:
    """A room imports only the rooms above it in the table."""
    broken = [
        f"{file.relative_to(ROOT)}:{line} imports onesided.{target}"
        for room, allowed in ARROWS.items()
        for file in python_files(room)
        for line, target in imported_rooms(file, room)
        if target not in {room, "errors"} | allowed
    ]
    assert not broken, "\n".join(broken)


def test_arrows_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk finds each way to write an import; without this, a test that sees nothing would pass."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "transport" / "shm" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import onesided.windows.window\nfrom onesided import rpc, BoundsError\nfrom ..errors import BoundsError\n"
        "from ... import errors\ndef late():\n    from ...state import publish\nfrom . import sibling\nimport os\n"
    )
    seen = [target for _, target in sorted(imported_rooms(file, "transport"))]
    assert seen == ["windows", "onesided", "rpc", "transport", "errors", "state", "transport"]


def test_arrows_know_every_folder() -> None:
    """A new folder at the root gets its place in the table first."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    unknown = {name for name in folders - set(ARROWS) - NOT_INSTALLED if not name.endswith(".egg-info")}
    assert not unknown, f"folders without a place in the table of rooms: {sorted(unknown)}"
    assert not any(python_files("csrc")), "csrc/ holds the data plane, no Python"


def test_arrows_of_the_data_plane() -> None:
    """The core knows no torch, and Python only in its bindings."""
    broken = []
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix not in {".cpp", ".h"}:
            continue
        banned = r"torch/|ATen/|c10/"
        if file.relative_to(ROOT / "csrc").parts[0] != "python":
            banned += r"|Python\.h|nanobind/|pybind11/|python/"
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.match(rf'\s*#\s*include\s*[<"]({banned})', line):
                broken.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not broken, "\n".join(broken)


def test_no_machine_paths() -> None:
    """Nothing in the repository depends on, or tells of, the machine that it was written on."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: " + listed.stderr.decode().strip())
    broken = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = ROOT / name
        try:
            text = file.read_text()
        except (UnicodeDecodeError, OSError):
            continue  # not text, or removed but not yet from the index
        broken += [f"{name}: {path}" for path in re.findall(r"(?<![\w.~-])/(?:work|root)/[\w./-]*", text)]
    assert not broken, "\n".join(broken)


# ---- What an import costs ------------------------------------------------------------------------------------------


def run_python(code: str, *options: str) -> str:
    """What `code` prints in a new interpreter with warnings as errors; fails unless it exits with 0."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", textwrap.dedent(code)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def test_import_loads_nothing_heavy() -> None:
    """torch, grpc and the like are imported where they are first needed."""
    loaded = run_python(
        """
        import sys
        import onesided
        heavy = {"torch", "grpc", "google", "numpy", "cuda", "click", "rich", "asyncio", "matplotlib"}
        print(*sorted(heavy & set(sys.modules)))
        """
    )
    assert not loaded.split()


def test_import_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """Under 150 ms of CPU time beyond the bare interpreter (the best of several: the machine may be busy)."""
    cost = "import resource as r; u = r.getrusage(r.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
    bare_s = min(float(run_python(cost)) for _ in range(3))
    import_s = min(float(run_python("import onesided; " + cost)) for _ in range(5)) - bare_s
    with capsys.disabled():
        print(f"[import onesided: {1000 * import_s:.0f} ms] ", end="")
    assert import_s < 0.150


def test_works_in_a_bare_environment() -> None:
    """Import, a put with a signal, and exit, without torch, rdma-core and CUDA: exit status 0."""
    said = run_python(
        f"""
        import runpy
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {{"torch", "cuda", "pyverbs"}}:
                    raise ImportError(f"{{name}} is blocked")

        sys.meta_path.insert(0, Blocked())
        runpy.run_path({str(ROOT / "scripts" / "installed_use.py")!r}, run_name="__main__")
        """
    )
    assert said == "received: hello\n"


# ---- What is public ------------------------------------------------------------------------------------------------


def public_packages() -> list[str]:
    return ["onesided"] + [
        f"onesided.{room}" for room in ARROWS if room != "onesided" and (ROOT / room / "__init__.py").exists()
    ]


@pytest.mark.parametrize("name", public_packages())
def test_all_is_sorted_and_documented(name: str) -> None:
    """`__all__` is sorted and complete, and each name in it says what it is."""
    module = importlib.import_module(name)
    assert module.__doc__
    assert list(module.__all__) == sorted(module.__all__), f"{name}.__all__ is not sorted"
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or callable(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"
    assert set(module.__all__) <= set(dir(module)), f"dir({name}) hides public names"


def test_version_and_typing_marker() -> None:
    """The version is the one that pip shows, and type checkers are told that the package has types."""
    assert onesided.__version__ == importlib.metadata.version("onesided")
    assert (ROOT / "onesided" / "py.typed").exists()
    assert (ROOT / "onesided" / "_core.pyi").exists()
