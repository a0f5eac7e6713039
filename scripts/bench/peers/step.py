"""The train step of a peer, as flax's examples write it: a gradient, averaged over devices.

As a program it compiles the step for a slice, as the child process of `commands.preflight.inspect`.
"""

import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from benchmarks.base import HostBatch
from benchmarks.resnet.classifier import ImageClassifier
from commands import preflight
from common.layers import space_to_depth
from engine import compiler, pace, sharding
from engine import step as ours
from engine.forecast import kernels
from engine.plan import Plan, Programs
from scripts.bench import peers
from scripts.bench.peers import Peer


class State(NamedTuple):
    """The state of training, replicated on every device."""

    step: jax.Array  # i32[], the number of steps done
    params: Any
    model_state: Any
    opt_state: Any


def first(peer: Peer, key: jax.Array) -> State:
    """The state before the first step."""
    params, model_state = peer.init(key)
    return State(jnp.int32(0), params, model_state, peer.optimizer.init(params))


def make(peer: Peer, mesh: Mesh, compiler_options: Mapping[str, str] | None = None) -> Any:
    """The jitted step (state, batch) -> (state, {name: metric f32[]}); the state is donated."""
    axes = mesh.axis_names

    def on_device(state: State, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0, impl="rbg"), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        gradient = jax.value_and_grad(peer.loss, has_aux=True)
        (value, (metrics, model_state)), gradients = gradient(
            state.params, state.model_state, batch, key
        )
        gradients, metrics, model_state = jax.lax.pmean(
            (gradients, {**metrics, "loss": value}, model_state), axes
        )
        updates, opt_state = peer.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, model_state, opt_state), metrics

    everywhere, shared = PartitionSpec(), PartitionSpec(axes)
    sharded = jax.shard_map(
        on_device, mesh=mesh, in_specs=(everywhere, shared), out_specs=everywhere, check_vma=False
    )
    options = dict(compiler_options) if compiler_options else None
    return jax.jit(sharded, donate_argnums=0, compiler_options=options)


def lower(programs: Programs, plan: Plan | None = None) -> list[Any]:
    """The peer's step, lowered for each shape of its batches, with our step's compiler options.

    `preflight.work` also gives the `plan` of our step, from which nothing follows here.
    """
    settings, benchmark, mesh = programs.settings, programs.benchmark, programs.mesh
    peer = peers.load(settings.config, benchmark)
    state = jax.eval_shape(lambda: first(peer, jax.random.key(0)))
    state = sharding.abstract(state, sharding.replicated(mesh))
    placement, specs = sharding.batch_sharding(mesh), peer.specs(settings.train_batch_size)
    batches = tuple(sharding.abstract(spec, placement) for spec in specs)
    options = compiler.options(mesh, benchmark.larger_windows)
    return ours.lower(make(peer, mesh, options), (state,), batches)


def make_step(programs: Programs, batch: HostBatch) -> Callable[[], None]:
    """A function that takes a step of the peer on our batch and waits for the devices."""
    settings, mesh = programs.settings, programs.mesh
    benchmark = programs.benchmark
    peer = peers.load(settings.config, benchmark)
    batch = dict(batch)
    if settings.benchmark == "mask_rcnn":
        batch["image"] = space_to_depth.restore(batch["image"])
    elif isinstance(benchmark, ImageClassifier):  # its pixels come normalised
        spec = benchmark.input_spec
        mean, std = (np.array(values, np.float32) for values in (spec.mean, spec.std))
        batch["image"] = (batch["image"] - mean) / std
    lowered = lower(programs)
    compiled = pace.alike(lowered, batch)[0][1].compile()
    state = jax.jit(
        lambda: first(peer, jax.random.key(0)), out_shardings=sharding.replicated(mesh)
    )()
    leaves = lowered[0][0]
    arrays = {name: batch[name].astype(leaf.dtype) for name, leaf in leaves.items()}
    arrays = jax.device_put(arrays, sharding.batch_sharding(mesh))

    def step() -> None:
        nonlocal state
        state, metrics = compiled(state, arrays)
        metrics["loss"].block_until_ready()

    return step


if __name__ == "__main__":
    kernels.ask_for_bundles()
    with Connection(int(sys.argv[1])) as connection:
        preflight.work(connection, lower)
