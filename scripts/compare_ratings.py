"""Compares a run on made-up ratings with the best possible score.

python -m scripts.compare_ratings data/ratings runs/ncf_synthetic
"""

import argparse
import json  # and not `errors`, so that `python scripts/compare_ratings.py` goes on working
import sys

from etils import epath

_METRICS = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}


def compare(data: str, workdir: str) -> list[str]:
    """Returns a line for each metric of the run's best evaluation by HR@10.

    Raises:
      OSError, ValueError: the files of `ratings` or of the run are missing.
    """
    baselines = json.loads((epath.Path(data) / "baselines.json").read_text())
    rows = map(json.loads, (epath.Path(workdir) / "metrics.jsonl").read_text().splitlines())
    evaluated = [row for row in rows if row["split"] == "eval"]
    if not evaluated:
        raise ValueError(f"{workdir} has not been evaluated yet")
    best = max(evaluated, key=lambda row: row["hr_at_10"])
    lines = []
    for metric, name in _METRICS.items():
        low, high = baselines[f"popularity_{metric}"], baselines[f"ceiling_{metric}"]
        share = (best[metric] - low) / (high - low)
        lines.append(
            f"{name}: popularity {low:.3f}, this run {best[metric]:.3f} (step {best['step']:,}), "
            f"best possible {high:.3f}: {share:.0%} of the way"
        )
    return lines


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_ratings", description=about)
    parser.add_argument("data", help="folder that `python -m scripts.prepare ratings` wrote")
    parser.add_argument("workdir", help="of a run on these data")
    args = parser.parse_args(argv)
    try:
        print("\n".join(compare(args.data, args.workdir)))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"compare_ratings: {error!r}; first scripts.prepare ratings, then main.py")


if __name__ == "__main__":
    main()
