"""Trains a recipe's network in PyTorch; compares its score and its time with those of our run.

python -m scripts.bench.score --config=configs/small.py:transformer --config.data_dir=DIR
python -m scripts.bench.score FLAGS OF main.py --workdir=DIR    beside the run in this workdir

It takes main.py's flags, and --device=cpu or cuda. Transformer, GNMT and NCF have such a peer: the
same network of PyTorch's layers (peers/torch_networks.py), run eagerly, trained by its optimizer.

Equal are the batches and their order, the network, its size and its loss, the probability of
dropout, the learning rates, the clipping, the moving average and the precision. The evaluation is
equal too: it is ours, with the peer's weights in our network. Different are the first weights,
drawn as programs in PyTorch draw them, and the random numbers. The peer trains for
config.train_steps: no target and no patience ends it earlier.

Seconds are of training alone, without compilation and evaluations; the peer's have its first step.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from etils import epath

import main as program
from benchmarks.base import HostBatch
from common import console, entry, keys
from common.errors import ConfigError, parse_json
from engine import compiler, environment
from engine import mesh as meshes
from engine.report.history import History
from engine.report.starts import training_seconds
from engine.run import Programs, Settings, make_plan, read_settings
from engine.step import CompiledStep
from scripts.bench.peers import on_torch

NAMES = ("transformer", "gnmt", "ncf")  # the networks whose weights fit ours
Row = dict[str, Any]  # of an evaluation: "step", "seconds" of training up to it, and the scores


def main(argv: Any) -> None:
    """Trains the peer and prints the comparison; UserError if it cannot be made."""
    del argv
    config, workdir = flags.FLAGS.config, flags.FLAGS.workdir
    torch = load_torch(config)
    if meshes.open_platform() == "cpu":
        environment.keep_freed_memory()
    settings = read_settings(config.lock())
    ours = read_run(workdir, settings.config) if workdir else []
    compiler.use_cache(settings.compilation_cache)
    peer = Peer(torch, settings, flags.FLAGS.device)
    print(table(peer.metric, [*peer.train()], ours))


def load_torch(config: Any) -> Any:
    """The module torch, for a recipe that has a peer; ConfigError if it has none."""
    if (name := config.benchmark) not in NAMES:
        raise ConfigError(f"config.benchmark={name!r} has no peer; {', '.join(NAMES)} have")
    for key, value in {"freeze": "", "init_from": ""}.items():
        if config[key] != value:
            raise ConfigError(f"config.{key}={config[key]!r}: the peer has only {value!r}")
    return on_torch.load(config)


class Peer:
    """A network in PyTorch that a recipe trains.

    Attributes:
      metric: the name of the recipe's score.
    """

    def __init__(self, torch: Any, settings: Settings, device: str | None):
        """Opens the data; `device` is "cpu", "cuda" or None, which takes a GPU if there is one."""
        has_gpu = torch.cuda.is_available()
        if device == "cuda" and not has_gpu:
            raise ConfigError("--device=cuda: PyTorch finds no GPU; use --device=cpu")
        self._torch, self._settings = torch, settings
        self._device = device or ("cuda" if has_gpu else "cpu")
        self._programs = programs = Programs.make(settings)
        self._benchmark = benchmark = programs.benchmark
        self._plan = make_plan(settings, benchmark, benchmark.num_examples("train"))
        self.metric = benchmark.targets[0].metric
        self._network = on_torch.open_network(torch, settings, benchmark, self._device)
        self._average = copy.deepcopy(self._network) if settings.moving_average_decay else None
        self._predict = CompiledStep(
            programs.lower_predict(programs.abstract_state(self._plan.recipe))
        )

    def train(self) -> Iterator[Row]:
        """Trains; prints and yields a row for each evaluation."""
        torch, settings, plan = self._torch, self._settings, self._plan
        total, seconds = plan.recipe.total_steps, 0.0
        rates = np.asarray(jax.jit(jax.vmap(plan.recipe.learning_rate))(np.arange(total)))
        optimizer = on_torch.make_optimizer(torch, settings, self._network, 0.0)
        device = f"the CPU, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name() if self._device == "cuda" else device
        size = sum(x.numel() for x in self._network.parameters())
        print(f"PyTorch {torch.__version__} on {device}: {size:,} parameters, {total:,} steps")
        batches = iter(self._benchmark.train_batches(settings.train_batch_size, 0, 1, 0))
        started = time.monotonic()
        for step, rate in enumerate(rates.tolist(), 1):
            loss = self._step(optimizer, rate, next(batches))
            self._update_average(step)
            if plan.log_every.due(step):
                value, spent = loss.item(), seconds + time.monotonic() - started
                left = console.duration(spent / step * (total - step))
                print(f"step {step:,} of {total:,}  loss {value:.3f}  {left} left", flush=True)
            if plan.eval_every.due(step) or step == total:
                loss.item()  # waits for the device
                seconds += time.monotonic() - started
                scores = self._scores()
                shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
                print(f"EVAL step {step:,}  {shown}  after {seconds:.1f} s", flush=True)
                yield {"step": step, "seconds": seconds, **scores}
                started = time.monotonic()

    def _step(self, optimizer: Any, rate: float, batch: HostBatch) -> Any:
        """Takes a step; returns the loss on the device."""
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch, network = self._torch, self._network
        inputs = on_torch.tensors(torch, network, batch, self._device)
        return on_torch.take_step(torch, self._settings, network, optimizer, inputs)

    def _update_average(self, step: int) -> None:
        """Updates the moving average of the weights, as `engine.step.update_average`."""
        settings, every = self._settings, self._settings.moving_average_every
        if self._average is None or step % every:
            return
        done = step // every - 1
        share = 1 - min(settings.moving_average_decay, (1 + done) / (10 + done))
        networks = self._average, self._network
        with self._torch.no_grad():
            for old, new in zip(*(x.parameters() for x in networks), strict=True):
                old.lerp_(new, share)

    def _scores(self) -> dict[str, float]:
        """The scores of the weights in our network, by our evaluation."""
        mesh, benchmark = self._programs.mesh, self._benchmark
        tree = (self._average or self._network).tree()
        params = jax.tree.map(lambda x: x.detach().float().cpu().numpy(), tree)
        params = jax.device_put(params, meshes.replicated(mesh))
        batches = benchmark.eval_batches(self._settings.eval_batch_size, 0, 1)
        rows = []
        for batch in meshes.Feed(batches, mesh):
            output = {name: np.asarray(x) for name, x in self._predict(params, {}, batch).items()}
            is_real = output.pop("mask") > 0
            rows.append({name: x[is_real] for name, x in output.items()})
        return dict(benchmark.headline(benchmark.score(iter(rows))))


def read_run(workdir: str, config: Mapping[str, Any]) -> list[Row]:
    """The evaluations of a run of ours; prints where its config is not the peer's.

    Raises:
      ConfigError: the folder has no evaluations.
    """
    rows = History(workdir, writes=False).rows
    evaluations = [row for row in rows if row["split"] == "eval"]
    timed = [row for row in rows if math.isfinite(row.get("step_seconds", math.nan))]
    if not evaluations or not timed:
        raise ConfigError(f"--workdir={workdir} has no run with evaluations; train it by main.py")
    theirs = keys.flat(parse_json((epath.Path(workdir) / "config.json").read_bytes()))
    for key, value in keys.flat(config).items():
        value = list(value) if isinstance(value, tuple) else value  # as in JSON
        if theirs.get(key) != value and key not in ("data_dir", "compilation_cache"):
            print(f"NOTE config.{key} is {value!r}, in {workdir} {theirs.get(key)!r}")
    steps, seconds = [row["step"] for row in timed], np.cumsum(training_seconds(timed, [0]))
    at = np.interp([row["step"] for row in evaluations], [0, *steps], [0, *seconds])
    return [row | {"seconds": float(x)} for row, x in zip(evaluations, at, strict=True)]


def table(metric: str, theirs: Sequence[Row], ours: Sequence[Row]) -> str:
    """Markdown: the score and the seconds at each evaluation, and at the highest score of both."""
    sides = {"PyTorch": theirs, "ours": ours} if ours else {"PyTorch": theirs}
    titles = ["step", *(f"{side}: {what}" for side in sides for what in (metric, "seconds"))]
    lines, ends = [titles, ["---"] * len(titles)], []
    for step in sorted({row["step"] for rows in sides.values() for row in rows}):
        at_step = [next((r for r in rows if r["step"] == step), None) for rows in sides.values()]
        pairs = [(f"{r[metric]:.4f}", f"{r['seconds']:.1f}") if r else ("", "") for r in at_step]
        lines.append([f"{step:,}", *(cell for pair in pairs for cell in pair)])
    goal = min(max(row[metric] for row in rows) for rows in sides.values())
    for side, rows in sides.items():
        row = next(row for row in rows if row[metric] >= goal)
        ends.append(
            f"{side}: {metric} {goal:.4f} after {row['seconds']:.1f} s, {row['step']:,} steps"
        )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *ends])


if __name__ == "__main__":
    flags.DEFINE_enum(
        "device", None, ["cpu", "cuda"], "Of PyTorch. Default: a GPU if there is one."
    )
    entry.run(lambda: app.run(main, flags_parser=program.parse_flags))
