"""Charts on stdout: announced once, pure JSON, finite, train and evaluation apart."""

import json
import math

from engine.report.writers import Reporter


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_become_points(tmp_path, capsys):
    reporter = Reporter(str(tmp_path), charts=True)
    row = {"epoch": 0.1, "loss": 3.23, "learning_rate": 0.1, "gradient_norm": 1.0}
    more = {"images_per_second": 9.0, "images_per_second_per_chip": 3.0, "step_seconds": 1.0}
    reporter.train({"step": 98, **row, **more}, "text")
    announced = [{"chart": n, "axis": "Iteration"} for n in ("loss", "learning_rate")]
    rate = {"chart": "images_per_second"}
    assert lines(capsys) == [
        *(announced[0], {"chart": "loss", "x": 98, "y": 3.23}),
        *(announced[1], {"chart": "learning_rate", "x": 98, "y": 0.1}),
        *({**rate, "axis": "Iteration"}, {**rate, "x": 98, "y": 9.0}),
    ]
    reporter.train({"step": 99, "epoch": 0.1, "loss": math.nan, "learning_rate": 0.2}, "text")
    assert lines(capsys) == [{"chart": "learning_rate", "x": 99, "y": 0.2}]
    reporter.eval({"step": 99, "epoch": 0.1, "loss": 2.0, "examples": 7, "seconds": 1.0}, "text")
    assert lines(capsys) == [
        {"chart": "eval_loss", "axis": "Iteration"},
        {"chart": "eval_loss", "x": 99, "y": 2.0},
    ]
    reporter.close()
    again = Reporter(str(tmp_path), charts=True)  # a resumed run
    again.train({"step": 100, "epoch": 0.1, "loss": 1.0}, "text")
    assert lines(capsys) == [announced[0], {"chart": "loss", "x": 100, "y": 1.0}]
    again.close()


def test_only_when_asked_and_only_on_process_0(tmp_path, capsys, monkeypatch):
    import jax

    for charts, index in ((False, 0), (True, 1)):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        reporter = Reporter(str(tmp_path / str(index)), charts=charts)
        reporter.train({"step": 1, "epoch": 0.1, "loss": 1.0}, "text")
        reporter.close()
    assert capsys.readouterr().out == ""
