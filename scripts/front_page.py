"""Joins a detector's picture and its learning curves: the picture on the front page.

bash scripts/quickstart.sh ssd
python -m scripts.front_page runs/ssd_digits docs/front_page.png
"""

import io
import sys

from etils import epath

from errors import parse_json
from ops import console

_HEIGHT, _COLOURS = 720, 96


def draw(workdir: epath.Path, out: epath.Path) -> None:
    """Writes a PNG of a few colours: eval/detections.png on the left, two curves on the right.

    Raises:
      OSError, ValueError: the run has no picture of detections or no evaluations yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    file = io.BytesIO((workdir / "eval" / "detections.png").read_bytes())
    scenes = Image.open(file).convert("RGB")
    scenes = scenes.crop((0, 0, scenes.width * 2 // 3, scenes.height))  # larger on a phone
    size = round(scenes.width * _HEIGHT / scenes.height), _HEIGHT
    scenes = scenes.resize(size, Image.Resampling.LANCZOS)
    rows = [parse_json(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(4.8, _HEIGHT / 100), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = (("train", "loss", "loss of the training"), ("eval", "mAP", "mAP of the evaluations"))
    for axes, (split, name, title) in zip(figure.subplots(2, 1), panels, strict=True):
        points = sorted((row["epoch"], row[name]) for row in rows if row["split"] == split)
        axes.plot(*zip(*points, strict=True), linewidth=2.5, marker="o" if split == "eval" else "")
        axes.set_title(title, fontsize=15)
        axes.set_xlabel("epoch", fontsize=13)
        axes.grid(alpha=0.3)
    canvas.draw()
    curves = Image.frombuffer(
        "RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())
    ).convert("RGB")
    page = Image.new("RGB", (scenes.width + curves.width, _HEIGHT), "white")
    page.paste(scenes, (0, 0))
    page.paste(curves, (scenes.width, 0))
    picture = io.BytesIO()
    page.quantize(_COLOURS).save(picture, "PNG", optimize=True)
    out.write_bytes(picture.getvalue())


def main(argv: list[str] | None = None) -> None:
    """The command line; argv without the program's name."""
    parser = console.Parser(
        prog="python -m scripts.front_page", description=console.summary(__doc__)
    )
    parser.add_argument("workdir", type=epath.Path, help="of a detector, after --mode=eval")
    parser.add_argument("out", type=epath.Path, help="the PNG file to write")
    args = parser.parse_args(argv)
    try:
        draw(args.workdir, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"front_page: {error}; first bash scripts/quickstart.sh ssd")
    print(f"wrote {args.out} ({args.out.stat().length / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
