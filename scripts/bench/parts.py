"""Says what each part of a train step costs on a TPU slice, by the compiler's estimate.

    python -m scripts.bench.parts --config=mlperf_mask_rcnn:128 --tpu=v3-8 --batch_per_device=4 \\
        --parts=backbone,pyramid,roi_align

A part is all operations with its name in their path of scopes, such as "stage2_block1" for "stage":
modules of flax and jax.named_scope give these names. An operation with several of the names belongs
to the first one of --parts. A fusion has the name of its last operation. With batches of several
shapes, all figures are the mean over the shapes. The table says how much of a part is fused with
convolutions or matrix products. Needs libtpu (requirements-tpu.txt) and takes minutes for each
slice; docs/check.md says how far measured runs were from such estimates.
"""

import argparse
import re
from collections.abc import Iterable, Sequence

from commands import preflight
from common import cli, entry
from engine.forecast import topology
from engine.forecast.operations import Operation
from engine.plan import read_settings
from scripts.bench.step import config_of

_REST = "other"
Costs = dict[str, tuple[float, float]]  # part -> ms (all, with products)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of each slice, and returns the exit code."""
    flags = _flags(argv)
    parts, failed = flags.parts.split(","), False
    for one in topology.parse_slices(flags.tpu):
        settings = read_settings(config_of(flags, one.devices))
        outcome = preflight.inspect(settings, one, ("train",))
        if outcome.train is None:
            print(f"{one.name}: {outcome.error}")
            failed = True
            continue
        costs = split(outcome.train.operations, parts)
        if nowhere := [part for part in parts if not costs[part][0]]:
            print(f"no operation has a name with {', '.join(nowhere)}: is it misspelled?")
        print(f"{one.name}, {flags.batch_per_device} per device:\n\n{table(costs)}\n")
    return int(failed)


def split(operations: Iterable[Operation], parts: Sequence[str]) -> Costs:
    """The cost of each part, which is a name of scopes, and of the rest."""
    # A number may follow: "stage" is a part of which "stage2_block1" is one.
    patterns = {p: re.compile(rf"(?<![a-zA-Z_]){re.escape(p)}(?![a-zA-Z])") for p in parts}
    costs = dict.fromkeys([*parts, _REST], (0.0, 0.0))
    for operation in operations:
        found = (p for p, pattern in patterns.items() if pattern.search(operation.scopes))
        part, own = next(found, _REST), 1e3 * operation.times * operation.seconds
        total, products = costs[part]
        costs[part] = total + own, products + own * (operation.flops > 0)
    return costs


def table(costs: Costs) -> str:
    """Markdown: a row for each part, and one for the step."""
    step = tuple(map(sum, zip(*costs.values(), strict=True)))
    lines = ["| part | ms | share | with products, ms | rest, ms |", "|---|---|---|---|---|"]
    for part, (total, products) in [*costs.items(), ("step", step)]:
        share = f"{total / step[0]:.1%}"
        lines.append(
            f"| {part} | {total:.1f} | {share} | {products:.1f} | {total - products:.1f} |"
        )
    lines.append(f"\nwithout products: {1 - step[1] / step[0]:.1%} of the step")
    return "\n".join(lines)


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(prog="parts", description=cli.summary(__doc__))
    add = parser.add_argument
    add("--config", required=True, metavar="NAME", help="a file in configs/, with :ARGUMENT")
    add("--tpu", required=True, help="slices, named as for --mode=preflight")
    add("--batch_per_device", type=cli.integer(1), required=True, metavar="N")
    add("--parts", required=True, metavar="NAMES", help="scopes, separated by commas")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config")
    return parser.parse_args(argv)


if __name__ == "__main__":
    entry.run(main)
