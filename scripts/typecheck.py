#!/usr/bin/env python3
"""Runs mypy --strict over onesided as it is laid out when installed: scripts/typecheck.py [FOLDER]

FOLDER holds an installed `onesided`. Without it, one is laid out from this checkout with links, since type checkers do
not follow the import hook of an editable installation.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from setup import packages  # noqa: E402


def lay_out(folder: Path) -> None:
    """Links every file of every package to where an installation would put it."""
    shutil.rmtree(folder, ignore_errors=True)
    for package, source in packages().items():
        target = folder.joinpath(*package.split("."))
        target.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / source).iterdir():
            if file.suffix in {".py", ".pyi", ".typed"}:
                (target / file.name).symlink_to(file)


def main() -> int:
    """Returns mypy's exit status; the paths that it prints are those of the checkout."""
    folder = ROOT / "build" / "typecheck"
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).resolve()
    else:
        lay_out(folder)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *config, "-p", "onesided"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = ran.stdout
    for package, source in packages().items():
        if package != source:
            said = said.replace(package.replace(".", "/") + "/", source + "/")
    sys.stdout.write(said)
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
