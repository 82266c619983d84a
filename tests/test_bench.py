"""`onesided bench`: the shape of what it writes, and that its figures are of the right things."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from onesided.cli import main

KEYS = {"op", "transport", "api", "size", "latency_us", "gbps", "limit_gbps", "ratio"}


@pytest.mark.parametrize(
    ("op", "sizes", "measured"),
    [("put", "8,65537", [8, 65537]), ("get", "1,4096", [1, 4096]), ("signal", "8", [8]), ("atomic", "16", [8])],
)
def test_rows(op: str, sizes: str, measured: list[int], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(main, ["bench", op, "--transport", "shm", "--sizes", sizes, "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["size"], row["api"]) for row in rows] == [
        (size, api) for size in measured for api in ("python", "core")
    ]
    for row in rows:
        assert set(row) == KEYS
        assert (row["op"], row["transport"]) == (op, "shm")
        assert row["latency_us"] > 0
        assert row["gbps"] > 0
        assert row["ratio"] == pytest.approx(row["gbps"] / row["limit_gbps"])


def test_plot(tmp_path: Path) -> None:
    picture = tmp_path / "put.png"
    done = CliRunner().invoke(main, ["bench", "put", "--sizes", "8,4096", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["push"], "push"),
        (["put", "--sizes", "8,x"], "whole numbers"),
        (["put", "--sizes", "0"], "begin at 1"),
        (["put", "--sizes", "-8"], "begin at 1"),
        (["put", "--transport", "pigeon"], "unknown transport 'pigeon'"),
        (["put", "--json", "/nowhere/rows.json"], "/nowhere"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    assert says in done.output
    assert "Traceback" not in done.output
