"""What mkdocs is told beyond mkdocs.yml: pages and files from outside of docs/, and where the
examples of docstrings are.

The pages are written to be read in the repository, where a link names a file beside the page. On
the site, files outside of docs/ that a page links to get an address of their own: README,
CONTRIBUTING, SECURITY and notebooks become pages, everything else a file under source/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Examples(griffe.Extension):
    """Lets griffe see the section "Example:" of our docstrings, which it knows as "Examples:"
    alone, so that it is shown as code.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )


ROOT = Path(__file__).resolve().parent.parent
#: where pages of the top of the repository are on the site
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_TOPS = {address: path for path, address in PAGES.items() if "/" not in path}
_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)")


def address_of(path: str) -> str:
    """The address on the site, from its root, of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return path if path.startswith("notebooks/") else f"source/{path}"


def linked(page: Path) -> list[str]:
    """The files of the repository that a page links to, by their paths from its root."""
    found = {
        os.path.relpath((page.parent / target).resolve(), ROOT)
        for _, target in _LINK.findall(page.read_text())
    }
    return sorted(path for path in found if (ROOT / path).exists() and not path.startswith(".."))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are outside of docs/."""
    written = [*(ROOT / path for path in _TOPS.values()), *sorted((ROOT / "docs").rglob("*.md"))]
    wanted = {*_TOPS.values(), *(path for page in written for path in linked(page))} - {
        "docs/README.md"
    }
    for path in sorted(wanted):
        address = address_of(path)
        if files.get_file_from_path(address) is None:
            is_file = (ROOT / path).is_file()
            listing = (
                None
                if is_file
                else "\n".join(sorted(p.name for p in (ROOT / path).iterdir())) + "\n"
            )
            source = {"abs_src_path": str(ROOT / path)} if is_file else {"content": listing}
            files.append(File.generated(config, address if is_file else f"{address}.txt", **source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their addresses on the site."""
    here = page.file.src_uri
    in_repository = _TOPS.get(here, here if here.startswith("notebooks/") else f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        path = os.path.relpath(((ROOT / in_repository).parent / match[2]).resolve(), ROOT)
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        address = address_of(path) + ("" if (ROOT / path).is_file() else ".txt")
        return match[1] + os.path.relpath(address, os.path.dirname(here) or ".")

    return _LINK.sub(link, markdown)
