"""The page of a demo, by NiceGUI. All that it loads comes from this machine."""

from __future__ import annotations

import base64
from typing import Any

from modes.demo.answers import Answer, Demo
from ops import limits


def serve(demo: Demo, host: str, port: int, opens: bool) -> None:
    """Serves the page until Ctrl-C; `opens` shows it in the person's browser."""
    from nicegui import ui  # pyright: ignore[reportMissingImports] (optional)

    ui.run(
        lambda: build(demo),
        host=host,
        port=port,
        title=demo.title,
        show=opens,
        reload=False,
        show_welcome_message=False,
        uvicorn_logging_level="warning",
    )


def build(demo: Demo) -> None:
    """Draws the page for one visitor."""
    from nicegui import run, ui  # pyright: ignore[reportMissingImports] (optional)

    ui.label(demo.title).classes("text-xl")

    async def show(*question: Any) -> None:
        shown.clear()
        with shown:
            ui.spinner()
        answer = await run.io_bound(demo.answer, *question)
        shown.clear()
        with shown:
            _show(answer)

    async def upload(event: Any) -> None:
        await show(await event.file.read())
        drop.reset()

    if demo.example:
        field = ui.input(demo.takes, value=demo.example).classes("w-full")
        field.on("keydown.enter", lambda: show(field.value))
        ui.button("Answer", on_click=lambda: show(field.value))
    else:
        drop = ui.upload(
            label=f"Drop {demo.takes} here",
            auto_upload=True,
            max_file_size=limits.IMAGE_BYTES,
            on_upload=upload,
            on_rejected=lambda: ui.notify(f"larger than {limits.IMAGE_BYTES:,} bytes"),
        )
    shown = ui.column().classes("w-full")


def _show(answer: Answer) -> None:
    from nicegui import ui  # pyright: ignore[reportMissingImports] (optional)

    if answer.error:
        ui.label(answer.error).classes("text-negative")
        return
    if answer.picture:
        data = base64.b64encode(answer.picture).decode()
        ui.image(f"data:image/jpeg;base64,{data}").classes("max-w-2xl")
    if not answer.rows:
        ui.label("nothing found")
        return
    columns = [
        {"name": name, "label": name, "field": name, "align": "left"} for name in answer.columns
    ]
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    ui.table(columns=columns, rows=rows)
