"""The numbers of the closing table and of the JSON file."""

import json

import pytest

pytest.importorskip("rich")
from io import StringIO

from rich.console import Console
from rl_report import Record, Report, summarize

NBYTES = 1_000_000


def record(version, *, copies=3, seconds=0.003, memcpy=0.0024, answers=3, vectors=3, digests=3):
    return Record(version, 1.0 / version, copies, seconds, memcpy, answers, vectors, digests)


def test_rates_are_medians():
    got = summarize([record(1, seconds=9.0), record(2), record(3, memcpy=5.0), record(4), record(5)], 3, NBYTES)
    assert got.publish_seconds_median == 0.003
    assert got.gbps == pytest.approx(1.0)
    assert got.memcpy_gbps == pytest.approx(1.25)
    assert got.ratio == pytest.approx(0.8)
    assert got.verified
    assert (got.versions, got.workers, got.bytes_per_version) == (5, 3, NBYTES)


def test_a_lost_worker_does_not_look_like_speed():
    alone = [record(v, copies=1, seconds=0.001, answers=1, vectors=1, digests=1) for v in (2, 3, 4)]
    got = summarize([record(1), *alone], 3, NBYTES)
    assert got.publish_seconds_median == 0.003
    assert got.ratio == pytest.approx(0.8)
    assert got.verified


def test_a_worker_lost_before_the_first_version_is_left_out_of_the_rate():
    got = summarize([record(1, copies=2, seconds=0.002, answers=2, vectors=2, digests=2)], 3, NBYTES)
    assert got.gbps == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{"vectors": 2}, {"digests": 2}, {"answers": 0, "vectors": 0, "digests": 0}])
def test_one_difference_is_enough(wrong):
    assert not summarize([record(1), record(2, **wrong), record(3)], 3, NBYTES).verified


def test_nothing_published_is_not_verified():
    got = summarize([], 3, NBYTES)
    assert not got.verified
    assert (got.publish_seconds_median, got.ratio) == (0.0, 0.0)  # and not NaN, which JSON does not know


def test_the_report_tells_differences_and_losses(tmp_path):
    text = StringIO()
    report = Report(Console(file=text, width=100), workers=3, steps=2)
    report.add(record(1))
    report.lost("worker 2 lost at version 2: killed by SIGKILL")
    report.add(record(2, copies=2, answers=2, vectors=2, digests=1))
    assert not report.close(NBYTES, 7, "plain", tmp_path / "out.json")
    said = text.getvalue()
    assert "worker 2 lost at version 2: killed by SIGKILL; the others go on" in said
    assert "NOT VERIFIED: answers differ at version 2" in said
    assert "4 of 5" in said
    assert json.loads((tmp_path / "out.json").read_text())["verified"] is False
