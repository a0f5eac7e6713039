"""Waiting for checkpoints, not for hosts; tests/test_train.py has evaluations of whole runs."""

import types
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from common.errors import DataError
from engine import evaluate, sharding
from engine.cluster import preemption


@pytest.mark.parametrize(
    ("appears", "found", "asked"), [(0, 6, 0), (2, 6, 10), (4, 6, 20), (99, -1, 30)]
)
def test_a_newer_step_is_waited_for(appears, found, asked, monkeypatch):
    """It looks every two seconds, and a last time after the timeout of 4 s; it can be stopped."""
    now, stops = types.SimpleNamespace(tenths=1000), []

    def sleep(seconds):
        now.tenths += round(10 * seconds)

    clock = types.SimpleNamespace(monotonic=lambda: now.tenths / 10, sleep=sleep)
    monkeypatch.setattr(evaluate, "time", clock)
    stop = types.SimpleNamespace(raise_if_requested=lambda: stops.append(None))
    monkeypatch.setattr(evaluate, "preemption", stop)
    steps = lambda: [3, 5] + [6, 7] * (now.tenths >= 1000 + 10 * appears)  # noqa: E731
    checkpoints: Any = types.SimpleNamespace(steps=steps)
    assert evaluate.next_step(checkpoints, 5, 4.0) == found
    assert len(stops) == asked and now.tenths == 1000 + 2 * asked


@pytest.mark.parametrize("stops_at", [None, 0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_hosts_vote_on_each_batch_and_none_waits_for_it(processes, stops_at, monkeypatch):
    """The answer is read after the next batch is dispatched, together with the rows.

    With two processes it goes through the devices, all of which are this process's here.
    """
    events: list[Any] = []
    mesh = sharding.make(("a", "b"), 1)
    mask = {"mask": np.array([1.0, 0.0])}
    ask = sharding.ask_processes

    def asked(mesh, answers):
        number = sum(event[0] == "dispatch" for event in events) - 1
        answer = ask(mesh, lambda: (*answers(), number == stops_at))
        return lambda: events.append(("read", number)) or answer()

    def gather(*_):
        raise AssertionError("a host waits for the others")

    def predict(params, model_state, batch):
        events.append(("dispatch", batch))
        return {**mask, "x": np.array([batch, -1])}

    predict.batch_size = 2  # type: ignore[attr-defined]
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(sharding, "ask_processes", asked)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(evaluate, "Feed", lambda batches, mesh: batches)
    monkeypatch.setattr(evaluate, "evaluated_weights", lambda state: (None, None))
    monkeypatch.setattr(preemption, "_requested", None)
    benchmark = types.SimpleNamespace(eval_rows=4, eval_batches=lambda *_: range(4))
    run: Any = types.SimpleNamespace(benchmark=benchmark, mesh=mesh)
    step, state = cast(Any, predict), cast(Any, None)
    rows = evaluate.predict_all(run, step, state)
    if stops_at is None:
        assert [row["x"].tolist() for row in rows] == [[0], [1], [2], [3]]
    else:
        with pytest.raises(preemption.Preempted) as stopped:
            list(rows)
        assert stopped.value.agreed
    order = [
        *(("dispatch", 0), ("dispatch", 1), ("read", 0), ("dispatch", 2), ("read", 1)),
        *(("dispatch", 3), ("read", 2), ("read", 3)),
    ]
    last = len(order) if stops_at is None else order.index(("read", stops_at)) + 1
    assert events == order[:last]


def test_a_row_and_a_line_of_scores():
    """Step 120 of batches of 32, of 320 examples in an epoch."""
    rows, names = [], []
    reporter: Any = types.SimpleNamespace(eval=lambda *row: rows.append(row))
    reporter.quantity = lambda name, value, count: names.append(name) or f"{name} {value} {count}"
    benchmark = types.SimpleNamespace(unit="pairs", num_examples=lambda split: 2300)
    benchmark.headline = lambda scores: {"ter": scores["ter"]}
    settings = types.SimpleNamespace(train_batch_size=32)
    run: Any = types.SimpleNamespace(benchmark=benchmark, settings=settings, metrics=("bleu", "x"))
    evaluate.report_scores(run, reporter, 120, 320, {"bleu": 0.3, "ter": 0.5, "y": 1.0}, 12.34)
    ((row, text),) = rows
    assert row == {
        **{"step": 120, "epoch": 12.0, "bleu": 0.3, "ter": 0.5, "y": 1.0},
        **{"examples": 2300, "seconds": 12.34},
    }
    assert text == "EVAL step 120  ter 0.5 2300  bleu 0.3 2300  (2,300 pairs in 12.3 s)"
    assert names == ["ter", "bleu"]


@pytest.mark.parametrize("counted", [3, 5])
def test_every_example_is_predicted_once(counted, monkeypatch):
    monkeypatch.setattr(evaluate, "Feed", lambda batches, mesh: batches)
    monkeypatch.setattr(evaluate, "evaluated_weights", lambda state: (None, None))
    monkeypatch.setattr(preemption, "_requested", None)
    benchmark = types.SimpleNamespace(eval_rows=4, eval_batches=lambda *_: range(1))
    run: Any = types.SimpleNamespace(benchmark=benchmark, mesh=sharding.make(("a", "b"), 1))
    predict: Any = lambda *_: {"mask": np.arange(8) < counted}  # noqa: E731
    predict.batch_size = 8
    state: Any = None
    with pytest.raises(DataError, match=f"saw {counted} examples, the data hold 4"):
        list(evaluate.predict_all(run, predict, state))


@pytest.mark.parametrize("step", [-1, 0, 7])
def test_a_checkpoint_before_the_first_step_is_one(step, monkeypatch):
    monkeypatch.setattr(evaluate, "model_items", lambda state: "asked")
    asked: list[Any] = []
    restored = types.SimpleNamespace(
        read=lambda choose, model, known: asked.append(known) or (step, model(step)),
        restore=lambda step, items: {"model": {"params": (step, items["model"])}},
    )
    abstract = types.SimpleNamespace(_replace=lambda **items: items)
    self: Any = types.SimpleNamespace(checkpoints=restored, abstract=abstract, step=step)
    found = evaluate.Examination.restore(self)
    assert found == (None if step < 0 else (step, {"params": (step, "asked")}))
    evaluate.Examination.restore(self, after=0)  # a newer one than that of step 0
    assert asked == [step, None]
