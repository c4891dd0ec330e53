"""Colours of drawn pictures on a dark page, as a style within each SVG.

A browser applies it by the colour scheme of the element that shows the picture: on GitHub that is GitHub's theme, on
the site the one that the reader chose (docs/static/site.css). Elsewhere the picture keeps the colours it is drawn in.
"""

from __future__ import annotations

import re
from typing import Final

INK: Final = "#d8dbe0"  # text, and what is drawn in black
# Colours in use -> the same on a dark page.
DARK: Final = {
    "#000000": INK,
    "black": INK,
    "#cccccc": "#555b63",
    "#444444": "#aeb4bc",
    # Boxes: ours, others', granted, refused, a gap.
    "#eef4fb": "#16283b",
    "#33658a": "#6fa8d6",
    "#f4f4f4": "#24272c",
    "#666666": "#90969e",
    "#dcebdc": "#17321b",
    "#2e6b34": "#6fbb78",
    "#fbe3d6": "#43210f",
    "#a63d00": "#f0915a",
    "#f7d4d4": "#4a1c1c",
    "#8b0000": "#f08a8a",
    # Bars and lines.
    "#0072b2": "#4ba6dd",
    "#999999": "#868c94",
}
START: Final = re.compile(r"<svg\b[^>]*>\n")
USED: Final = re.compile(r'\b(fill|stroke)(="|: )(#[0-9a-f]{6}|black)\b')


def with_dark_colours(svg: str) -> str:
    """Return a picture with a style for dark pages. Raises: KeyError: a colour that DARK lacks."""
    rules = [f"text {{ fill: {INK}; }}"]
    for what, sign, colour in sorted(set(USED.findall(svg))):
        chosen = f'[{what}="{colour}"]' if sign == '="' else f'[style*="{what}: {colour}"]'
        rules.append(f"{chosen} {{ {what}: {DARK[colour]} !important; }}")
    style = "\n".join(["<style>@media (prefers-color-scheme: dark) {", *rules, "}</style>\n"])
    return START.sub(lambda start: start[0] + style, svg, count=1)
