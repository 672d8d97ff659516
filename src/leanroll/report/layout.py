"""What all pages share: style, frame, tables, figures. One self-contained HTML file, readable on a phone and in print."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222;
  overflow-wrap: break-word; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } th { font-weight: 600; }
td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee; }
td.n, th.n { text-align: right; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; margin: 1em 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 1.6em 1.2em; }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; }
h3 { font-size: .92em; margin: 0 0 .2em; } figcaption { font-size: .8em; line-height: 1.35; color: #666; }
pre { background: #f6f6f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85em; }
small { color: #666; font-weight: normal; }
@media print {
  body { margin: 0; font-size: 11px; } .wide { overflow: visible; } h2 { break-after: avoid; }
  .plots { grid-template-columns: 1fr 1fr; } figure, tr { break-inside: avoid; }
}
"""

# Also "0.93 [0.91, 0.95]", "12 (all)", "496-991", "n/a" and an empty cell.
_NUMBER = re.compile(r"(-?[\d.,]+(e[-+]?\d+|-\d+)?( [\[(].*)?|n/a)?")


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    head = (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return f"{head}\n<body>\n{body}\n</body></html>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; cells are plain text, columns of numbers align right. Wide tables scroll sideways, not the page."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    kinds = [' class="n"' if any(column) and all(map(_NUMBER.fullmatch, column)) else "" for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line("th", head)}</tr>{body}</table></div>'


def figure(title: str, png: str, note: str = "") -> str:
    """A plot with its title above and a note, plain text, below. png: base64 text."""
    title, note = html.escape(title), html.escape(note)
    image = f'<img alt="{title}" src="data:image/png;base64,{png}">'
    return f"<figure><h3>{title}</h3>{image}<figcaption>{note}</figcaption></figure>"


def grid(figures: Sequence[str]) -> str:
    """Figures side by side where there is room, below each other on a phone."""
    return f'<div class="plots">{"".join(figures)}</div>'
