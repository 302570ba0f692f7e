"""What the site has besides the pages of this folder, so that they are written once: README.md as
its first page, and each file of the repository that a page leads to, such as `../examples/x.py`, as
a page of its own under source/. A hook of mkdocs, named in mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash", ".sh": "bash"}
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
"""A link of a page in docs/ to what is not there."""
NAMED = re.compile(r"\[(?:docs/)?(\w+)\.md\]\(")
"""A link to a page by the name of its file, which readers of the site need not know."""
INSIDE = re.compile(r"\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")
"""A relative link of a page in the repository's root."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the first page, and those of files that are linked."""
    first = _of_root((ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=first))
    texts = [first]
    texts += [Path(file.abs_src_path).read_text() for file in files if _is_written(file)]
    linked = {match[1].rstrip("/") for text in texts for match in OUTSIDE.finditer(text)}
    for path in sorted(linked):
        page = File.generated(config, f"source/{path}.md", content=_shown(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Leads to the pages of source files, and calls pages by their names."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    found = NAMED.sub(lambda link: f"[{link[1].replace('_', ' ')}](", markdown)
    return OUTSIDE.sub(lambda link: f"](source/{link[1].rstrip('/')}.md{link[2] or ''})", found)


def _is_written(file: File) -> bool:
    return file.generated_by is None and file.src_uri.endswith(".md")


def _of_root(text: str) -> str:
    """A page of the root, as if it lay in docs/."""

    def link(found: re.Match[str]) -> str:
        path = found[1].removeprefix("docs/") if found[1].startswith("docs/") else f"../{found[1]}"
        return f"]({path}{found[2] or ''})"

    return INSIDE.sub(link, text)


def _shown(path: str) -> str:
    """The page of a file, or of a folder's files."""
    found = ROOT / path
    if found.is_dir():
        names = sorted(one.name for one in found.iterdir() if not one.name.startswith("_"))
        return "\n".join([f"# {path}/", "", *(f"* `{name}`" for name in names)])
    text = found.read_text(encoding="utf-8")
    if found.suffix == ".md":
        return text.replace("](docs/", "](../")
    return f"# {path}\n\n````{LANGUAGES.get(found.suffix, 'text')}\n{text}````\n"
