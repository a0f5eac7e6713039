"""--mode=report: one page about a run, for readers who were not there.

The page is WORKDIR/report/report.html. It needs no network and no JavaScript; the other files of
that folder are for programs.
"""

import dataclasses

import jax
from etils import epath

from commands.report import page
from commands.report.record import Record, examine
from commands.scaling.summary import exhibits as more_data
from common.errors import visible
from engine.cluster import processes
from engine.plan import Settings
from engine.report.history import writing


def report(settings: Settings, checkpoint: str) -> None:
    """Evaluates a checkpoint, "latest", "best" or a step, and writes the report of its run."""
    examined, record = examine(settings, checkpoint), Record.read(settings)
    if jax.process_index() == 0:
        shown = [*examined.exhibits, *more_data(settings.workdir)]
        examined = dataclasses.replace(examined, exhibits=shown)
        files = {name: data for shown in examined.exhibits for name, data in shown.files.items()}
        html = page.render(record, examined).encode()
        folder = epath.Path(settings.workdir) / "report"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, data in {**files, "report.html": html}.items():
            with writing(folder / name):
                (folder / name).write_bytes(data)
        print(visible(f"report: {folder / 'report.html'}"), f"({len(html) / 1e6:.1f} MB)")
        if files:
            print(f"  more files: {', '.join(sorted(files))}")
    processes.barrier("waiting for host 0 to write the report")
