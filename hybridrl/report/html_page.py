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

RUN_SCRIPTS = (
    *("dom.js", "scale.js", "summary.js", "curves.js", "timeline.js"),
    *("tokens.js", "samples.js", "data.js", "tables.js", "live.js", "page.js"),
)
"""In the order in which they are read."""
RUN_TABLE_SCRIPTS = ("dom.js", "live.js", "runs.js")
"""Of the page of a folder of runs."""
_STYLE_FILE = "page.css"


def render_report_page(title: str, data: Mapping[str, Any], live: bool = False) -> str:
    """Render the report of a run as HTML.

    Args:
        data: By part, as `Content` makes it. All of it comes from runs, so nothing of it is markup.
        live: It asks the server that it came from for what is new, and for what is not in `data`.
    """
    return _render_html(title, data, RUN_SCRIPTS, live)


def render_run_table_page(title: str) -> str:
    """Render the table of runs as a live HTML page."""
    return _render_html(title, {}, RUN_TABLE_SCRIPTS, live=True)


def build_security_policy(scripts: tuple[str, ...], live: bool = True) -> str:
    """Build the content security policy, which allows only the page's own script and style by their
    hashes."""
    connect = "'self'" if live else "'none'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{_hash_source(_read_scripts(scripts))}'",
            f"style-src 'sha256-{_hash_source(_read_page_file(_STYLE_FILE))}'",
            f"connect-src {connect}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def escape_script_json(data: Any) -> str:
    """Serialize JSON so that no text in it can close the surrounding script element."""
    return to_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _render_html(title: str, data: Mapping[str, Any], scripts: tuple[str, ...], live: bool) -> str:
    parts = "\n".join(
        f'<script type="application/json" id="data-{name}">{escape_script_json(part)}</script>'
        for name, part in data.items()
    )
    return f"""<!doctype html>
<html lang="en" data-live="{"true" if live else "false"}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{build_security_policy(scripts, live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_read_page_file(_STYLE_FILE)}</style>
</head>
<body>
<noscript>This report draws itself by JavaScript, which is off in this browser.</noscript>
{parts}
<script>{_read_scripts(scripts)}</script>
</body>
</html>
"""


@cache
def _read_scripts(names: tuple[str, ...]) -> str:
    return "\n".join(_read_page_file(name) for name in names)


@cache
def _read_page_file(name: str) -> str:
    return (resources.files("hybridrl.report") / "page" / name).read_text(encoding="utf-8")


def _hash_source(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
