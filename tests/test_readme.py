"""The README's example is the file that it names, and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_is_the_file() -> None:
    code = re.search(r"```python\n(\"\"\"Two processes.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None, "the README has lost its example"
    assert code[1].strip() == (ROOT / "examples/hello_window.py").read_text().strip()
    assert len(code[1].strip().splitlines()) <= 20


def test_the_example_runs(tmp_path: Path) -> None:
    """From another folder, as a new user would."""
    example = tmp_path / "hello.py"
    example.write_text((ROOT / "examples/hello_window.py").read_text())
    done = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "received: hello\n", "")


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{page} links to {target}"
