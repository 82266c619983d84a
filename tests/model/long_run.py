"""Random programs against the memory model, a million steps of them:

python tests/model/long_run.py [--steps 1000000] [--kind shm] [--threads] [--seed 1]
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import KINDS, kind_named  # noqa: E402
from model.runner import Team, long_run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs against the memory model.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--kind", default="shm", choices=[kind.name for kind in KINDS])
    parser.add_argument("--threads", action="store_true", help="ranks as threads of one process")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    team = Team(kind_named(options.kind), separate=not options.threads)

    def tell(steps: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{steps} steps", end="\r", file=sys.stderr, flush=True)

    try:
        done = long_run(team, options.steps, options.seed, tell)
    finally:
        team.close()
    print(
        f"{team}, seed {options.seed}: {done.steps} steps in {done.programs} programs, "
        f"no outcome that the model does not allow, in {done.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
