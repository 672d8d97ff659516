"""What all pages share: style, frame, tables. One self-contained HTML file, readable on a phone and in print."""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #eee; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } img { max-width: 100%; }
.wide { overflow-x: auto; }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; white-space: pre-wrap; } small { color: #666; }
@media print { body { margin: 0; } .wide { overflow: visible; } h2 { break-after: avoid; } img, table { break-inside: avoid; } }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    head = (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return f"{head}\n<body>\n{body}\n</body></html>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; cells are plain text. Wide tables scroll sideways instead of the page."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
