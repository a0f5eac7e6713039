"""predict.py with a model of random weights, which it opens whatever the workdir is."""

import io
import sys
from typing import Any

import jax
import numpy as np
import pytest

import predict
from engine.checkpoint import model_source
from engine.checkpoint.model_source import Weights
from tests.conftest import opened

DRAWN: dict[str, Any] = {}


def weights_of(benchmark, name, noise):
    """(params, model_state), drawn once for a name: it takes seconds."""
    if name not in DRAWN:
        params, state = benchmark.init(jax.random.key(3))
        draw = np.random.default_rng(1)  # so that predictions differ
        params = jax.tree.map(lambda x: x + draw.normal(0, noise, x.shape).astype(x.dtype), params)
        DRAWN[name] = params, state
    return DRAWN[name]


@pytest.fixture
def opens(monkeypatch):
    """Makes such a model of a benchmark whose keys are `values`, and `changes` where it is used."""

    def opens(benchmark, values, noise, **changes):
        opened(benchmark)
        params, state = jax.tree.map(lambda x: x, weights_of(benchmark, f"{values} {noise}", noise))
        manifest = {"benchmark": values["benchmark"], "config": values | changes}
        manifest |= {"num_train_examples": 97, **benchmark.metadata}
        config, weights = (
            model_source.config_of(manifest).lock(),
            Weights(values["benchmark"], params, state),
        )
        model = model_source.Model(values["benchmark"], 1, config, manifest, lambda: (1, weights))
        monkeypatch.setattr(model_source, "load", lambda *_, **__: model)
        return model

    return opens


@pytest.fixture
def call(capsysbinary, monkeypatch):
    """Calls predict.py; returns (exit code, stdout, stderr)."""

    def call(*argv, stdin=b"", is_typed=False):
        file = io.TextIOWrapper(io.BytesIO(stdin))
        file.isatty = lambda: is_typed
        monkeypatch.setattr(sys, "stdin", file)
        code = predict.main([*map(str, argv), "--workdir=any"])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return call
