"""Opens an HTML page in headless Chromium: what it looks like, and whether everything on it is there.

The page is put, unchanged, into a frame as wide as the screen in question, because Chromium's own window is never narrower
than 500 pixels. Its content security policy forbids everything but what is inside the file; what it stops is counted.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "LEANROLL_TEST_BROWSER"
"""Environment variable: set to 1, a missing Chromium is a failure instead of a skip."""

PHONE, DESKTOP = 390, 1280
"""Widths in CSS pixels."""

_HEIGHT = 6000
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_GUARD = (
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    "<script>window.stopped = []; addEventListener('securitypolicyviolation', e => stopped.push(e.blockedURI))</script>"
)
_INSPECT = """
addEventListener("load", () => {
  const inside = document.querySelector("iframe").contentWindow, root = inside.document.documentElement;
  // A picture that was drawn has more than one colour; shrunk, so that a thin line still counts.
  const drawn = image => {
    if (!image.naturalWidth) return false;
    const canvas = Object.assign(document.createElement("canvas"), {width: 64, height: 64});
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, 64, 64);
    return new Set(new Uint32Array(context.getImageData(0, 0, 64, 64).data.buffer)).size > 1;
  };
  const result = {
    images: [...inside.document.images].map(image => ({
      title: image.alt, width: image.naturalWidth, height: image.naturalHeight, shown: image.getBoundingClientRect().width,
      drawn: drawn(image),
    })),
    page_width: root.scrollWidth, screen_width: root.clientWidth, stopped: inside.stopped,
  };
  const out = document.createElement("pre");
  out.id = "result";
  out.textContent = JSON.stringify(result);
  document.body.append(out);
});
"""


@dataclass(frozen=True, slots=True)
class Opened:
    """A page as the browser shows it.

    images: of each its title (alt), natural `width` and `height`, the width it is `shown` at, whether something is `drawn`.
    page_width: of the content; wider than screen_width means that the page scrolls sideways.
    stopped: addresses outside the file that the page asked for. screenshot: PNG of the page's top.
    """

    images: list[dict[str, Any]]
    page_width: int
    screen_width: int
    stopped: list[str]
    screenshot: Path

    @property
    def titles(self) -> list[str]:
        return [image["title"] for image in self.images]


def find_browser() -> str:
    """Path of Chromium. Skips the test where there is none, or fails it under LEANROLL_TEST_BROWSER=1."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path is not None), None)
    if found is None:
        message = f"needs Chromium (Debian's package `chromium`); none of {', '.join(names)} is on PATH"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{message}, and {REQUIRED} is 1")
        pytest.skip(message)
    return found


def open_page(page: Path, width: int, folder: Path) -> Opened:
    """Open an HTML file on a screen of `width` CSS pixels; temporary files and the screenshot go to `folder`."""
    browser = find_browser()
    text = page.read_text(encoding="utf-8")
    guarded = re.sub("<head>|(?=<meta)", lambda match: match[0] + _GUARD, text, count=1)
    assert guarded != text
    frame = f'<iframe style="border:0; width:{width}px; height:{_HEIGHT}px" srcdoc="{html.escape(guarded)}"></iframe>'
    outer = folder / f"{page.stem}-{width}.html"
    outer.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frame}<script>{_INSPECT}</script>', "utf-8"
    )
    screenshot = folder / f"{page.stem}-{width}.png"
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},{_HEIGHT}", f"--screenshot={screenshot}", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result is not None, f"{browser} gave no result (exit code {done.returncode}): {done.stderr[-2000:]}"
    facts = json.loads(html.unescape(result[1]))
    return Opened(
        images=facts["images"],
        page_width=facts["page_width"],
        screen_width=facts["screen_width"],
        stopped=facts["stopped"],
        screenshot=screenshot,
    )
