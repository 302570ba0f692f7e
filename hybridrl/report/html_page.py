"""A report as one HTML file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from hybridrl.system.storage import to_json

SCRIPTS = (
    *("dom.js", "scale.js", "summary.js", "curves.js", "timeline.js"),
    *("tokens.js", "samples.js", "data.js", "tables.js", "live.js", "page.js"),
)
"""In the order in which they are read."""
OF_RUNS = ("dom.js", "live.js", "runs.js")
"""Of the page of a folder of runs."""
STYLE = "page.css"


def page(title: str, data: Mapping[str, Any], live: bool = False) -> str:
    """Render the report of a run as HTML.

    Args:
        data: By part, as `Content` makes it. All of it comes from runs, so nothing of it is markup.
        live: It asks the server that it came from for what is new, and for what is not in `data`.
    """
    return _html(title, data, SCRIPTS, live)


def page_of_runs(title: str) -> str:
    """Render the table of runs as a live HTML page."""
    return _html(title, {}, OF_RUNS, live=True)


def policy(scripts: tuple[str, ...] = SCRIPTS, live: bool = True) -> str:
    """Build the content security policy, which allows only the page's own script and style by their
    hashes."""
    connect = "'self'" if live else "'none'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_sum(_script(scripts))}'",
            f"style-src 'sha256-{_sum(_file(STYLE))}'",
            f"connect-src {connect}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def in_script(data: Any) -> str:
    """Serialize JSON so that no text in it can close the surrounding script element."""
    return to_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _html(title: str, data: Mapping[str, Any], scripts: tuple[str, ...], live: bool) -> str:
    parts = "\n".join(
        f'<script type="application/json" id="data-{name}">{in_script(part)}</script>'
        for name, part in data.items()
    )
    return f"""<!doctype html>
<html lang="en" data-live="{"true" if live else "false"}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(scripts, live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_file(STYLE)}</style>
</head>
<body>
<noscript>This report draws itself by JavaScript, which is off in this browser.</noscript>
{parts}
<script>{_script(scripts)}</script>
</body>
</html>
"""


@cache
def _script(names: tuple[str, ...]) -> str:
    return "\n".join(_file(name) for name in names)


@cache
def _file(name: str) -> str:
    return (resources.files("hybridrl.report") / "page" / name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
