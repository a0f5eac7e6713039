"""Draws where the time of a program goes, as an SVG."""

from collections.abc import Sequence
from html import escape

from engine.forecast.forecasts import Forecast, Group

_COLOURS = {"products": "#3b6ea5", "other work": "#d08c2f", "collectives": "#8a4f7d"}
_LABEL, _BAR, _ROW, _WIDTH = 330, 380, 20, 860  # pixels


def draw(forecasts: Sequence[Forecast], count: int = 10) -> str:
    """A panel for each forecast: a bar for each of its dearest operations, and one for the rest."""
    parts, y = [], 24
    for i, (name, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<rect x="{20 + 130 * i}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{38 + 130 * i}" y="22">{name}</text>')
    for one in forecasts:
        if one.program is None:
            continue
        y += 34
        least, most = (f"{1e3 * seconds:.3g}" for seconds in one.seconds_interval)
        title = f"{one.slice}: {1e3 * one.seconds:.3g} ms ({least} to {most})"
        parts.append(f'<text x="20" y="{y}" font-weight="bold">{escape(title)}</text>')
        groups = one.dearest(count)
        rest = max(0.0, one.seconds - sum(group.seconds for group in groups))
        rows = [(_label(group), group.seconds, _COLOURS[group.kind]) for group in groups]
        rows.append(("all others", rest, "#999999"))
        longest = max(seconds for _, seconds, _ in rows) or 1.0
        for label, seconds, colour in rows:
            y += _ROW
            width = _BAR * seconds / longest
            share = f"{1e3 * seconds:.3g} ms, {seconds / one.seconds:.0%}"
            parts.append(f'<text x="{_LABEL}" y="{y}" text-anchor="end">{escape(label)}</text>')
            parts.append(
                f'<rect x="{_LABEL + 8}" y="{y - 11}" width="{width:.1f}" height="13" '
                f'fill="{colour}"/>'
            )
            parts.append(f'<text x="{_LABEL + 14 + width:.0f}" y="{y}">{share}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 20}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _label(group: Group) -> str:
    """What a bar is: the line of code and the end of jax's name."""
    text = f"{group.place.split('/')[-1]} {group.scopes.split('/')[-1]}".strip() or group.name
    text += ", backward" * ("transpose(" in group.scopes)
    return text if len(text) <= 48 else f"{text[:47]}…"
