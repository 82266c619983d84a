"""The shortest example, as a user runs it."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "hello_window.py"


def test_hello_window():
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "received: hello\n", "")


def test_hello_window_is_short():
    assert len(PROGRAM.read_text().splitlines()) <= 20
