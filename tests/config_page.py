"""Writes docs/config.md from the comments in configs/: python -m tests.config_page > docs/config.md

What a key is stands in the comment above it, else behind it. One after an empty line is a title.
"""

import importlib
import pathlib
import re

from common.keys import flat

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
SHARED = "several"
PARTS = {  # by recipe: the title of the keys that it adds to those of the recipes before it
    "_loop": "Training loop, for every benchmark",
    SHARED: "Several benchmarks",
    "resnet50": "ResNet",
    "_detection": "SSD and Mask R-CNN",
    "ssd": "SSD",
    "mask_rcnn": "Mask R-CNN",
    "transformer": "Transformer",
    "gnmt": "GNMT",
    "ncf": "NCF",
}
HEAD = """\
# Keys of the config

`--config.KEY=VALUE` changes a key. Durations are steps, `90 epochs` or `1e6 examples`. Comments in
`configs/` say more; `python -m tests.config_page > docs/config.md` makes this page of them.
"""


def notes(source: str) -> dict[str, str]:
    """{key: the first sentence of what the comments of a recipe say about it}."""
    found, note, is_title = {}, "", False
    for line in map(str.strip, source.splitlines()):
        if line.startswith("# "):
            note += "" if is_title else f" {line[2:]}"
            continue
        if key := re.match(r"config\.(\w[\w.]*) = .*?(?:  # (.*))?$", line):
            text = re.split(r"[.;](?: |$)", note.strip() or key[2] or "")[0]
            text = re.sub(r"^[A-Z](?=[a-z]* )", lambda letter: letter[0].lower(), text)
            found.setdefault(key[1], text.replace("|", r"\|"))
        note, is_title = "", not line
    return found


def rows() -> dict[str, dict[str, tuple[str, str]]]:
    """By part: {key: (its default, what it is)}; a key is in the first part that has it."""
    parts: dict[str, dict[str, tuple[str, str]]] = {part: {} for part in PARTS}
    for part in [part for part in PARTS if part != SHARED]:
        config = flat(importlib.import_module(f"configs.{part}").get_config())
        texts = notes((FOLDER / f"{part}.py").read_text())
        parts[part] = {
            key: (f"`{config[key]!r}`".replace(", ", ","), text)
            for key, text in texts.items()
            if key in config and (part == "_loop" or key not in parts["_loop"])
        }
    for key in {key: None for part in PARTS if part != "_loop" for key in parts[part]}:
        owners = [own for part, own in parts.items() if part != "_loop" and key in own]
        defaults, texts = ({*column} for column in zip(*(o[key] for o in owners), strict=True))
        if len(owners) > 1 and len(texts - {""}) < 2:
            parts[SHARED][key] = min(defaults) if len(defaults) == 1 else "", max(texts)
            for own in owners:
                own.pop(key)
    return parts


def page() -> str:
    """The page in Markdown."""
    lines = [HEAD]
    for part, own in rows().items():
        recipe = "" if part.startswith("_") or part == SHARED else f", `configs/{part}.py`"
        lines += [f"## {PARTS[part]}{recipe}", "", "key|default|meaning", "-|-|-"]
        lines += [f"`{key}`|{default}|{text}" for key, (default, text) in own.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
