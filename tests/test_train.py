"""Whole runs in this process: train, stop at any moment, resume, evaluate, refuse."""

import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import benchmarks
import train
from benchmarks.resnet import ImageClassifier
from common.errors import RESTART, CheckpointError, DataError, UserError
from engine import evaluate, sharding
from engine.checkpoint import model_source
from engine.checkpoint.saver import Diverged, Position, Saver
from engine.cluster import guard, preemption, processes
from engine.evaluate import Evaluator
from engine.intervals import Intervals
from engine.plan import read_settings
from engine.report.history import History
from tests.conftest import make_programs, make_tiny_config, plan_of


def never(code, reason):
    raise AssertionError(f"the main thread should have raised by now: {code}, {reason}")


@pytest.fixture(autouse=True)
def fresh_signals(monkeypatch):
    """Each test starts unasked to stop, and leaves the handlers as they were."""
    monkeypatch.setattr(preemption, "_requested", None)
    monkeypatch.setattr(preemption, "_leave", preemption._leave)  # its thread outlives the test
    before = {s: signal.getsignal(s) for s in preemption.stop_signals()}
    preemption.listen(never)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def state_on_disk(workdir, step):
    """Every saved array of a step, read by Orbax alone, without the program's own reader."""
    items = {k: ocp.args.StandardRestore() for k in ("model", "optimizer")}
    with ocp.CheckpointManager(os.path.join(workdir, "checkpoints")) as manager:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    leaves = jax.tree_util.tree_leaves_with_path({k: restored[k] for k in items})
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in leaves}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


def rows(workdir):
    with open(os.path.join(workdir, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def timeless(metrics):
    """Rows without what depends on the clock."""
    clock = ("per_second", "seconds", "input_wait", "input_transfer", "decode_busy")
    return [{k: v for k, v in row.items() if not any(c in k for c in clock)} for row in metrics]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, calm_run):
    """(workdir, scores) of a run that nobody disturbed; a copy, which tests may write to."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return str(shutil.copytree(calm_run[0], workdir)), calm_run[1]


def at_batch(monkeypatch, number, act, method="train_batches", of: Any = ImageClassifier):
    """Calls `act` when the benchmark hands out batch `number` of a stream."""
    original = getattr(of, method)

    def batches(self, *args):
        for i, batch in enumerate(original(self, *args)):
            if i == number:
                act()
            yield batch

    monkeypatch.setattr(of, method, batches)


def stop_at_batch(monkeypatch, method, number, signum=signal.SIGTERM, of: Any = ImageClassifier):
    """Sends this process a signal then."""
    at_batch(monkeypatch, number, lambda: os.kill(os.getpid(), signum), method, of)


# The loop and its parts, without a run.


def at(step: int, totals: Any = 0) -> Position:
    """A position whose state is the number of steps."""
    state: Any = step
    return Position(step, state, totals)


class Stopped(Exception):
    """What a vote says, if the run is to stop."""


@pytest.fixture
def loop(monkeypatch):
    """Makes a trainer of 7 steps whose parts note what they do; the state is the number of steps.

    It logs every 3 steps, saves every 4, and evaluates after the steps `due`. An evaluation takes 2
    seconds and its score 3 more.
    """

    known = types.SimpleNamespace

    def make(due=(5, 7), ready=(), stops=(), over=(), background=True, lacks=False):
        events: list[Any] = []
        votes = iter(range(1, 99))

        def vote(is_ready):
            number = next(votes)
            stop = Stopped() if number in stops else None
            return known(stop=stop, score_ready=number in ready)

        def start(predict, step, state):
            assert step == state
            events.append(("evaluate", step))
            evaluator.pending = step
            return 2.0

        def finish():
            events.append(("score", evaluator.pending))
            evaluator.newest, evaluator.pending = evaluator.pending, None
            return 3.0

        def save(position):
            saver.saved = position.step
            events.append(("save", *position))
            return 1.0

        evaluator = known(pending=None, newest=0, is_ready=False, start=start, finish=finish)
        saver = known(
            saved=0,
            check=lambda totals: None,
            save=save,
            restore=lambda step: ("restored", step),
            checkpoints=known(wait=lambda: events.append(("wait",))),
        )
        intervals = known(
            report=lambda: None,
            show_progress=lambda step: None,
            close=lambda step, totals: events.append(("log", step, totals)),
            pause=lambda seconds, evaluated=False: events.append(("pause", seconds, evaluated)),
        )
        stopping = known(
            lacks_evaluation=lambda step, saved: lacks,
            evaluates=lambda step: step in due,
            is_over=lambda step: step in over,
        )
        benchmark = known(
            scores_in_background=background,
            train_batches=lambda size, process, processes, step: iter(range(step + 1, 99)),
        )
        run = known(settings=known(train_batch_size=1), benchmark=benchmark, mesh=None)
        plan = known(
            total_steps=7, logs=lambda step: step in (3, 6, 7), saves=lambda step: step in (4, 7)
        )

        def one_step(state, totals, batch):
            assert batch == state + 1
            return state + 1, totals + 1, f"step {batch}"

        monkeypatch.setattr(train, "Feed", lambda batches, mesh: batches)
        monkeypatch.setattr(train, "Intervals", lambda *_: intervals)
        monkeypatch.setattr(jax, "block_until_ready", lambda done: events.append(done))
        nothing: Any = known(vote=vote, before=lambda step: None, after=lambda step, done: "")
        compiled = train.Compiled(one_step, lambda: 0, None)
        reporter = known(say=lambda text: events.append(("say", text)))
        parts: Any = nothing, None, reporter, nothing, plan, saver, stopping, evaluator
        trainer = train.Trainer(run, True, *parts)  # type: ignore[arg-type]
        return trainer, functools.partial(trainer.train, compiled), events

    return make


def test_the_loop_logs_saves_and_evaluates(loop):
    """It waits for the step before the last; a score is finished once all hosts know of it."""
    _, run, events = loop(ready=(5, 6), lacks=True)
    assert run(at(0)) == (7, 7, 0)
    assert events == [
        *(("evaluate", 0), ("score", 0), ("pause", 5.0, False), "step 1", "step 1", "step 2"),
        *(("log", 3, 3), "step 3", ("save", 4, 4, 1), ("pause", 1.0, False), "step 4"),
        *(("save", 5, 5, 2), ("pause", 1.0, False), ("evaluate", 5), ("pause", 2.0, True)),
        *("step 5", ("log", 6, 3), ("score", 5), ("pause", 3.0, True), "step 6", ("log", 7, 1)),
        *(("save", 7, 7, 0), ("pause", 1.0, False)),
        *(("evaluate", 7), ("score", 7), ("pause", 5.0, True)),
    ]


@pytest.mark.parametrize(
    ("options", "scored_after"),
    [
        ({"due": (2,)}, "step 3"),  # before the save of step 4
        ({"due": (1, 3)}, "step 2"),  # before the next evaluation
        ({"due": (5,), "background": False}, "step 4"),  # at once
    ],
)
def test_when_a_score_is_finished(options, scored_after, loop):
    _, run, events = loop(**options)
    run(at(0))
    scored = next(i for i, event in enumerate(events) if event[0] == "score")
    assert [event for event in events[:scored] if isinstance(event, str)][-1] == scored_after


def test_the_loop_stops_at_the_step_after_the_vote_and_saves(loop):
    _, run, events = loop(stops=(2,))
    with pytest.raises(Stopped):
        run(at(0))
    assert events[-5:] == [
        *(("log", 3, 3), ("save", 3, 3, 0), ("pause", 1.0, False), ("wait",)),
        ("say", "saved step 3; the same command continues from here"),
    ]


def test_an_evaluation_that_waits_for_its_score_is_done_again(loop):
    """Its step is saved: a run that stops does not wait for the score."""
    _, run, events = loop(due=(1,), stops=(1,))
    with pytest.raises(Stopped):
        run(at(0))
    assert events[-2:] == [("wait",), ("say", "saved step 1; the same command continues from here")]


def test_later_steps_do_not_count_after_the_target(loop):
    _, run, _ = loop(due=(2,), over=(2,), background=False)
    assert run(at(0)) == (2, 2, 2)
    trainer, run, events = loop(due=(2,), ready=(3,), over=())
    trainer.stopping.is_over = lambda step: step == 2 and trainer.evaluator.newest == 2
    assert run(at(0)) == ("restored", 2)
    assert events[-3:] == ["step 3", ("score", 2), ("pause", 3.0, True)]


def test_garbage_is_collected_after_the_same_steps_on_all_hosts(loop, monkeypatch):
    """And after evaluations; Python does not collect by itself before the loop ends."""
    _, run, events = loop(due=(5, 7), background=False)
    collections = []

    def collect():
        steps = sum(isinstance(event, str) for event in events)
        collections.append((steps, gc.isenabled()))

    monkeypatch.setattr(train, "_GARBAGE_STEPS", 3)
    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: collections.append(name))
    run(at(0))
    in_steps = [(3, False), (5, False), (6, False), (7, False)]
    assert collections == [(0, True), "freeze", *in_steps, "unfreeze"]
    assert gc.isenabled()


def test_no_garbage_is_sought_while_a_score_is_computed(loop, monkeypatch):
    """Its thread may hold millions of objects; the save after step 4 waits for the score."""
    _, run, events = loop(due=(2,))
    collections = []
    monkeypatch.setattr(train, "_GARBAGE_STEPS", 1)
    monkeypatch.setattr(
        gc, "collect", lambda: collections.append(sum(isinstance(x, str) for x in events))
    )
    run(at(0))
    assert collections == [1, 4, 5, 6, 7]


def test_garbage_does_not_grow_and_python_collects_again_after_a_failure(loop, monkeypatch):
    class Node:
        def __init__(self):
            self.itself = self

    trainer, run, _ = loop(due=(), stops=(6,))
    nodes, alive, frozen = [], [], gc.get_freeze_count()

    def vote(is_ready, asked=trainer.guard.vote):
        nodes.append(weakref.ref(Node()))
        alive.append(sum(node() is not None for node in nodes))
        return asked(is_ready)

    monkeypatch.setattr(train, "_GARBAGE_STEPS", 2)
    monkeypatch.setattr(trainer.guard, "vote", vote)
    with pytest.raises(Stopped):
        run(at(0))
    assert alive == [1, 2, 1, 2, 1, 2, 1]
    assert gc.isenabled() and gc.get_freeze_count() > frozen / 2  # what others froze stays


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_parts_are_closed_unless_other_hosts_do_not_know_of_a_failure(joined, error, monkeypatch):
    closed: list[bool] = []
    monkeypatch.setattr(processes, "is_joined", lambda: joined)
    with contextlib.suppress(ValueError, KeyboardInterrupt), contextlib.ExitStack() as exits:
        exits.callback(train._close, lambda: closed.append(True))
        if error:
            raise error
    assert bool(closed) == (not joined or error is not ValueError)


# Runs.


@pytest.mark.long
def test_a_run_leaves_what_people_look_for(uninterrupted):
    workdir, scores = uninterrupted
    metrics = rows(workdir)
    assert [r["step"] for r in metrics if r["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    evals = [r for r in metrics if r["split"] == "eval"]
    assert [r["step"] for r in evals] == [4, 8, 12]
    assert all(r["examples"] == 23 for r in evals)
    assert scores["top_1_accuracy"] == evals[-1]["top_1_accuracy"]
    assert round(23 * scores["top_1_accuracy"]) == pytest.approx(23 * scores["top_1_accuracy"])
    first = metrics[0]
    assert {"loss", "top_1_accuracy", "top_5_accuracy", "learning_rate", "epoch"} <= first.keys()
    assert {"images_per_second", "images_per_second_per_chip", "step_seconds"} <= first.keys()
    assert {"input_wait", "eta_seconds", "gradient_norm"} <= first.keys()
    assert first["images_per_second_per_chip"] == pytest.approx(first["images_per_second"] / 8)
    assert first["epoch"] == pytest.approx(2 * 16 / 90)
    for name in ("config.json", "parameters.txt", "learning_curves.png"):
        assert os.path.getsize(os.path.join(workdir, name)) > 100, name
    assert any("tfevents" in name for name in os.listdir(workdir))
    steps = sorted(int(s) for s in os.listdir(os.path.join(workdir, "checkpoints")))
    # The best one when step 12 was saved: step 12 was evaluated after that.
    best = max(evals[:-1], key=lambda r: (r["top_1_accuracy"], -r["step"]))["step"]
    assert steps == sorted({8, 9, 12} | {best})


class HiddenCopy(AssertionError):
    """The main thread reads an array of the devices where nobody expects it to wait."""


@pytest.fixture
def no_hidden_copies(monkeypatch):
    """A context for the main thread: no copy to the devices that jax makes by itself, none back.

    jax's own guard knows only the first kind on CPUs, where the second one copies nothing. Within
    it, a context with `may_read` allows the second kind.
    """
    array: Any = type(jax.numpy.zeros(()))
    readers: list[bool] = []
    value = array._value

    def read(self):
        if readers == [False] and threading.current_thread() is threading.main_thread():
            raise HiddenCopy(f"{self.dtype.name}{list(self.shape)}")
        return value.fget(self)

    monkeypatch.setattr(array, "_value", property(read))

    @contextlib.contextmanager
    def guarded(may_read=False):
        before = readers[:]
        readers[:] = [may_read]
        try:
            with jax.transfer_guard("disallow"):
                yield
        finally:
            readers[:] = before

    return guarded


@pytest.mark.parametrize(
    "hidden",
    [
        float,
        np.asarray,
        jax.device_get,
        lambda x: f"{x}",
        lambda x: 1 if x else 0,
        lambda x: x + 1,
        lambda x: jax.numpy.add(x, np.float32(1)),
        lambda x: jax.jit(jax.numpy.square)(np.zeros(3)),
    ],
)
def test_a_hidden_copy_is_an_error(hidden, no_hidden_copies):
    everywhere = sharding.replicated(sharding.make(("a", "b"), 1))
    x = jax.device_put(np.float32(1), everywhere)
    with no_hidden_copies(), pytest.raises((HiddenCopy, jax.errors.JaxRuntimeError)):
        hidden(x)
    with no_hidden_copies(), no_hidden_copies(may_read=True):
        assert float(jax.block_until_ready(jax.device_put(np.float32(2), everywhere))) == 2.0
    hidden(x)


@pytest.mark.long
def test_the_loop_copies_nothing_by_itself(tiny_records, tmp_path, no_hidden_copies, monkeypatch):
    """The parts that may read from the devices have names; what they read has been computed."""

    def within(owner, name, **options):
        method = getattr(owner, name)

        def guarded(*args, **kwargs):
            with no_hidden_copies(**options):
                return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    within(train.Trainer, "train")
    within(Intervals, "report", may_read=True)  # the sums of the last interval
    within(Saver, "save", may_read=True)  # whether a step was not finite, and the state
    within(Evaluator, "start", may_read=True)  # the predictions
    scores = train.train_and_evaluate(read_settings(make_tiny_config(tiny_records), str(tmp_path)))
    assert scores


@pytest.mark.parametrize("batch", [5, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 9))])
def test_sigterm_while_training_and_resume_changes_nothing(
    batch, uninterrupted, tiny_records, tmp_path, monkeypatch
):
    """Nor do rows of later steps in metrics.jsonl, as kill -9 leaves them, the last cut short."""
    workdir, scores = uninterrupted
    config = make_tiny_config(tiny_records)
    with monkeypatch.context() as patch:
        stop_at_batch(patch, "train_batches", batch)
        with pytest.raises(preemption.Preempted) as stopped:
            train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert stopped.value.code == 143
    saved = [int(s) for s in os.listdir(tmp_path / "checkpoints")]
    assert 0 < max(saved) < 12
    monkeypatch.setattr(preemption, "_requested", None)
    late = {"split": "train", "step": 12, "epoch": 1.0, "loss": 99.0}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(late) + "\n" + json.dumps(late)[:20])
    assert train.train_and_evaluate(read_settings(config, str(tmp_path))) == scores
    assert_same_state(state_on_disk(workdir, 12), state_on_disk(str(tmp_path), 12))
    keys = [(r["split"], r["step"]) for r in rows(tmp_path)]
    assert len(set(keys)) == len(keys)
    assert all(row["loss"] < 99 for row in rows(tmp_path))

    def means(folder):
        return [r for r in timeless(rows(folder)) if r["split"] == "eval"]

    assert means(workdir) == means(str(tmp_path))


@pytest.mark.long
def test_sigterm_while_evaluating_evaluates_again(
    uninterrupted, tiny_records, tmp_path, monkeypatch
):
    workdir, scores = uninterrupted
    config = make_tiny_config(tiny_records)
    with monkeypatch.context() as patch:
        stop_at_batch(patch, "eval_batches", 1, signal.SIGINT)
        with pytest.raises(preemption.Preempted) as stopped:
            train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert stopped.value.code == 130
    assert History(str(tmp_path), writes=False).scores() == {}
    monkeypatch.setattr(preemption, "_requested", None)
    assert train.train_and_evaluate(read_settings(config, str(tmp_path))) == scores
    assert timeless(rows(workdir)) == timeless(rows(str(tmp_path)))
    assert_same_state(state_on_disk(workdir, 12), state_on_disk(str(tmp_path), 12))


@pytest.mark.usefixtures("nothing_held_out")
def test_without_evaluation_the_same_steps_are_trained(
    uninterrupted, tiny_records, tmp_path, caplog, monkeypatch
):
    """Stopped and resumed, with keys that count evaluations; nothing of the eval split is read."""
    caplog.set_level("INFO")
    keys = {"patience": 2, "stop_at_target": True, "steps_per_eval": "", "best_by": "no_such"}
    job = read_settings(make_tiny_config(tiny_records, **keys), str(tmp_path))
    with monkeypatch.context() as patch:
        stop_at_batch(patch, "train_batches", 7)
        with pytest.raises(preemption.Preempted):
            train.train_and_evaluate(job)
    monkeypatch.setattr(preemption, "_requested", None)
    assert train.train_and_evaluate(job) == {}
    assert_same_state(state_on_disk(uninterrupted[0], 12), state_on_disk(tmp_path, 12))
    trained = [row for row in rows(uninterrupted[0]) if row["split"] == "train"]
    assert timeless(rows(tmp_path)) == timeless(trained)
    (told,) = {text for text in caplog.messages if "config.hold_out=0" in text}
    assert "NOTE" in told and all(key in told for key in ("patience", "stop_at_target", "best_by"))
    assert not (tmp_path / "learning_curves.png").exists()
    assert "finished: step 12 of 12" in caplog.messages
    train.train_and_evaluate(job)
    assert "already finished: step 12 of 12" in caplog.messages
    with pytest.raises(DataError, match="config.hold_out=0.* nothing to evaluate"):
        evaluate.evaluate(job, "latest", 0.0)
    with pytest.raises(CheckpointError, match="best, of a run without evaluations, .* latest or"):
        model_source.load(str(tmp_path), "best")


def test_a_finished_run_says_so_and_does_nothing(uninterrupted, tiny_records, monkeypatch, caplog):
    workdir, scores = uninterrupted
    before = sorted(os.listdir(workdir)), rows(workdir)
    monkeypatch.setattr(train.Trainer, "start", None)
    with caplog.at_level("INFO", logger="tpu_suite"):
        again = train.train_and_evaluate(read_settings(make_tiny_config(tiny_records), workdir))
    assert again["top_1_accuracy"] == scores["top_1_accuracy"]
    assert "already finished: step 12 of 12" in caplog.text
    assert (sorted(os.listdir(workdir)), rows(workdir)) == before


BAD = 5  # the step with the poisoned example; in the first epoch, in which all are different


@pytest.mark.long
def test_the_batch_of_a_step_that_is_not_finite_is_named(tiny_records, tmp_path, monkeypatch):
    """The loss is nan wherever one example comes; the newest checkpoint is good."""
    config = make_tiny_config(tiny_records, steps_per_eval="12", steps_per_checkpoint="1")
    stream = ImageClassifier.train_batches
    benchmark: Any = benchmarks.load(config, str(tmp_path / "index"))
    benchmark.open("train")
    batches = stream(benchmark, 16, 0, 1, 0)
    seen = [set(next(batches)["id"].tolist()) for _ in range(BAD)]
    (example, *_) = sorted(seen[BAD - 1] - set().union(*seen[: BAD - 1]))
    loss = ImageClassifier.loss

    def poison(self, params, model_state, batch, rng):
        terms, metrics, state = loss(self, params, model_state, batch, rng)
        bad = jax.numpy.where((batch["id"] == example).any(), np.nan, 1.0)
        return {k: (v * bad, w) for k, (v, w) in terms.items()}, metrics, state

    monkeypatch.setattr(ImageClassifier, "loss", poison)
    workdir = str(tmp_path / "run")
    with pytest.raises(Diverged) as caught:
        train.train_and_evaluate(read_settings(config, workdir))
    message = str(caught.value)
    assert f"step {BAD} is not finite (nan or inf), its examples are " in message
    assert "checkpoint 4 is the last good one" in message and len(message.splitlines()) == 1
    assert max(int(step) for step in os.listdir(f"{workdir}/checkpoints")) == 4
    for name, value in state_on_disk(workdir, 4).items():
        assert np.isfinite(value).all(), name
    with open(f"{workdir}/hosts/host-000.step-{BAD}.json") as file:
        record = json.load(file)
    assert set(record["ids"]) == seen[BAD - 1] and len(record["places"]) == 16
    assert all("train-0000" in place and "record" in place for place in record["places"])


@pytest.mark.long
def test_full_memory_saves_and_stops(tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_MEMORY_PERIOD", 0.0)
    looks = iter(range(1000))
    monkeypatch.setattr(guard, "memory_used", lambda: 0.99 if next(looks) >= 4 else 0.1)
    config = make_tiny_config(tiny_records)
    with pytest.raises(guard.MemoryFull, match="config.host_memory_limit") as caught:
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert caught.value.code == RESTART
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == 5 and state_on_disk(str(tmp_path), saved)


@pytest.mark.long
def test_stops_at_the_target(tiny_records, tmp_path, caplog):
    config = make_tiny_config(tiny_records, stop_at_target=True, target=0.01, train_steps="40")
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert max(int(s) for s in os.listdir(tmp_path / "checkpoints")) == 4
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(read_settings(config, str(tmp_path)))
    assert "already finished: step 4 of 40" in caplog.text


def test_another_model_is_refused_before_anything_is_compiled(
    uninterrupted, tiny_records, monkeypatch
):
    """Also where the run is finished; nothing of it changes."""
    workdir, _ = uninterrupted
    files = [Path(workdir, name) for name in ("config.json", "parameters.txt", "metrics.jsonl")]
    before, texts = state_on_disk(workdir, 12), [path.read_text() for path in files]
    monkeypatch.setattr(train.Trainer, "_compile", None)
    stem = "model_state/batch_stats/bn_stem/mean"
    for steps in ("12", "20"):
        config = make_tiny_config(tiny_records, num_filters=8, train_steps=steps)
        with pytest.raises(CheckpointError, match="holds another model") as refused:
            train.train_and_evaluate(read_settings(config, workdir))
        message = f"{stem}: the checkpoint has float32[4], the config wants float32[8]"
        assert message in str(refused.value)
    assert_same_state(before, state_on_disk(workdir, 12))
    assert [path.read_text() for path in files] == texts


def test_a_changed_config_is_told(uninterrupted, tiny_records, tmp_path, caplog, monkeypatch):
    class Ready(Exception):
        """All is said: compiling and training would only take time."""

    def ready(*_):
        raise Ready

    monkeypatch.setattr(train.Trainer, "_compile", lambda trainer: (None, trainer.run.programs))
    monkeypatch.setattr(train.Trainer, "train", ready)
    workdir, _ = uninterrupted
    shutil.copytree(workdir, tmp_path / "copy")
    config = make_tiny_config(tiny_records, train_steps="14", bn_span=4)
    config.warmup_steps = "99"
    with caplog.at_level("INFO", logger="tpu_suite"), pytest.raises(Ready):
        train.train_and_evaluate(read_settings(config, str(tmp_path / "copy")))
    assert "NOTE BatchNorm averaged over 2 images before and averages over 8 now" in caplog.text
    assert "NOTE config.train_steps was '12', is now '14'" in caplog.text
    assert "NOTE the warm-up of 99 steps does not end within the run" in caplog.text
    assert "resuming at step 12" in caplog.text


@pytest.mark.long
def test_lost_metrics_come_back_from_the_checkpoint(uninterrupted, tiny_records, tmp_path, caplog):
    """Damaged lines are dropped like these; tests/engine/report/test_history.py has them."""
    workdir = str(tmp_path / "copy")
    shutil.copytree(uninterrupted[0], workdir)
    earlier = {r["step"]: r["top_1_accuracy"] for r in rows(workdir) if r["split"] == "eval"}
    os.remove(f"{workdir}/metrics.jsonl")
    config = make_tiny_config(tiny_records, train_steps="14")
    with caplog.at_level("INFO", logger="tpu_suite"):
        train.train_and_evaluate(read_settings(config, workdir))
    scores = {r["step"]: r["top_1_accuracy"] for r in rows(workdir) if r["split"] == "eval"}
    assert (scores[4], scores[8]) == (earlier[4], earlier[8]) and 14 in scores
    assert "scores that it lacked are from checkpoint 12" in caplog.text
    assert "NOTE metrics.jsonl lacks the training of steps 2 to 12" in caplog.text


def test_all_seeds_share_the_compiled_programs(tiny_records):
    texts = []
    for seed in (1, 2):
        config = make_tiny_config(tiny_records, seed=seed)
        programs, plan = make_programs(config), plan_of(config, 90)
        assert int(programs.seed()) == seed
        state = programs.abstract_state(plan)
        ((_, lowered),) = programs.lower_train(plan, state, programs.abstract_totals(plan, state))
        texts.append(lowered.as_text())
    assert texts[0] == texts[1]


def test_jax_traces_the_initial_state_and_the_loss_once(tiny_records, monkeypatch):
    """A trace takes seconds of a start."""
    config = make_tiny_config(tiny_records)
    programs, plan = make_programs(config), plan_of(config, 90)
    calls = []

    def traced(name, plain, *arguments):
        calls.append(name)
        return plain(*arguments)

    for name in ("init", "loss"):
        plain = getattr(programs.benchmark, name)
        monkeypatch.setattr(programs.benchmark, name, functools.partial(traced, name, plain))
    state = programs.abstract_state(plan)
    programs.lower_train(plan, state, programs.abstract_totals(plan, state))
    programs.initial_state(plan)
    assert calls == ["init", "loss"]


@pytest.mark.long
def test_evaluation_of_named_checkpoints(uninterrupted, tiny_records):
    workdir, scores = uninterrupted
    config = make_tiny_config(tiny_records)
    for size in (8, 16, 24):  # 23 examples: with padding, and with more than one batch
        config.eval_batch_size = size
        actual = evaluate.evaluate(read_settings(config, workdir), "latest", 0.0)
        assert actual == pytest.approx(scores, rel=1e-5)
    config.train_batch_size = 12  # 8 devices cannot share it, but no device trains
    assert evaluate.evaluate(read_settings(config, workdir), "latest", 0.0) == actual
    by_step = {r["step"]: r for r in rows(workdir) if r["split"] == "eval"}
    at_8 = evaluate.evaluate(read_settings(config, workdir), "8", 0.0)
    assert at_8["loss"] == pytest.approx(by_step[8]["loss"], rel=1e-5)
    best = evaluate.evaluate(read_settings(config, workdir), "best", 0.0)
    top = max(r["top_1_accuracy"] for r in by_step.values())
    assert best["top_1_accuracy"] == pytest.approx(top)
    for wrong in ("5", "newest"):
        with pytest.raises(CheckpointError, match=f"--checkpoint={wrong} is not in"):
            evaluate.evaluate(read_settings(config, workdir), wrong, 0.0)


@pytest.mark.long
def test_watching_evaluates_each_new_checkpoint(tiny_records, tmp_path, monkeypatch):
    config = make_tiny_config(tiny_records, train_steps="6", steps_per_checkpoint="3")
    original, evaluated = evaluate.begin_evaluation, []

    def evaluate_and_train_on(*arguments):
        # The other process goes on while this one evaluates.
        evaluated.append(len(evaluated))
        if len(evaluated) == 1:
            train.train_and_evaluate(read_settings(config, str(tmp_path)), evaluating=False)
        return original(*arguments)

    with monkeypatch.context() as patch:
        stop_at_batch(patch, "train_batches", 3)
        with pytest.raises(preemption.Preempted):
            train.train_and_evaluate(read_settings(config, str(tmp_path)), evaluating=False)
    monkeypatch.setattr(preemption, "_requested", None)
    monkeypatch.setattr(evaluate, "begin_evaluation", evaluate_and_train_on)
    evaluate.evaluate(read_settings(config, str(tmp_path)), "latest", 60.0)
    steps = [row["step"] for row in rows(tmp_path / "eval")]
    assert len(steps) == 3 and steps[1:] == [3, 6]  # the first is where the signal came
    assert not [r for r in rows(tmp_path) if r["split"] == "eval"]


@pytest.mark.long
def test_averaged_weights_are_what_is_evaluated(tiny_records, tmp_path):
    config = make_tiny_config(
        tiny_records, moving_average_decay=0.5, train_steps="4", keep_checkpoints=4
    )
    config.steps_per_checkpoint = config.steps_per_eval = "1"
    train.train_and_evaluate(read_settings(config, str(tmp_path)))
    states = [state_on_disk(str(tmp_path), step) for step in (1, 2, 3, 4)]
    kernel = "['params']['head']['kernel']"
    for number, (before, after) in enumerate(zip(states, states[1:], strict=False), 1):
        decay = min(0.5, (1 + number) / (10 + number))
        old = before[f"['model']['ema']{kernel}"]
        new = after[f"['model']{kernel}"]
        expected = decay * old + (1 - decay) * new
        assert after[f"['model']['ema']{kernel}"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    scores = History(str(tmp_path), writes=False).scores()[4]
    actual = evaluate.evaluate(read_settings(config, str(tmp_path)), "latest", 0.0)
    assert actual == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("key", ["optimizer", "steps_per_eval", "profile_steps"])
def test_slips_are_found_before_the_data_are_read(key, tiny_records, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageClassifier, "num_examples", lambda self, split: 1 / 0)
    with pytest.raises(UserError, match=f"{key}='abc'"):
        settings = read_settings(make_tiny_config(tiny_records, **{key: "abc"}), str(tmp_path))
        train.train_and_evaluate(settings)
