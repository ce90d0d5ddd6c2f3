"""Hook of mkdocs: the README as the home page, files outside of docs/ that pages link to, and lists as on GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, its style, and the targets of links that begin with ``../``."""
    readme = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "wide.css", abs_src_path=str(ROOT / "docs" / "site" / "wide.css")))
    for page in list(files.documentation_pages()):
        for name in OUTSIDE.findall(page.content_string):
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Make the links to these files relative to the home page, and indent lists as Python-Markdown needs them."""
    return "\n".join(_indented(markdown.replace("](../", "](").split("\n")))


def _indented(lines: list[str]) -> Iterator[str]:
    """Yield the lines; what belongs to a list item gets two more spaces: GitHub needs two, Python-Markdown four."""
    in_fence = in_item = False
    for line in lines:
        in_fence ^= line.startswith("```")
        if line and not line.startswith("  "):
            in_item = not in_fence and re.match(r"- |\d+\. ", line) is not None
        yield f"  {line}" if in_item and line.startswith("  ") else line
