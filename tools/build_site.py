"""Build the documentation and fail on anything that a reader would find broken: `make docs`.

Zensical builds `site/` in its strict mode, which stops on dead links between pages, on dead anchors and on missing references.
It does not look at images, at raw HTML, at the navigation, nor at what griffe says of docstrings; this script does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

import unfading
from unfading import tasks

ROOT = Path(__file__).resolve().parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "site"


class Page(HTMLParser):
    """The links, images and anchors of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.targets += [value for name in ("href", "src") if (value := attributes.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}


def main() -> None:
    problems = build()
    if not problems:
        pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
        problems = [*unlisted_pages(), *dead_links(pages), *undocumented_names(pages)]
        print(f"{len(pages)} pages, {sum(len(page.targets) for page in pages.values())} links and images")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


def build() -> list[str]:
    """Run Zensical; its complaints and griffe's are problems."""
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = result.stdout + result.stderr
    print(output)
    warnings = [line for line in output.splitlines() if line.startswith(("griffe:", "mkdocstrings:"))]
    return warnings or ([] if result.returncode == 0 else ["zensical build --strict failed"])


def unlisted_pages() -> Iterator[str]:
    """Pages that the navigation does not list, and entries of the navigation without a page."""
    listed = set(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    existing = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    yield from (f"mkdocs.yml: docs/{name} is not in the navigation" for name in sorted(existing - listed))
    yield from (f"mkdocs.yml: the navigation lists docs/{name}, which does not exist" for name in sorted(listed - existing))


def entries(nav: object) -> Iterator[str]:
    """The files of a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from entries(value)
    elif isinstance(nav, list):
        for value in nav:
            yield from entries(value)


def dead_links(pages: dict[Path, Page]) -> Iterator[str]:
    """Links and images inside the site that lead nowhere."""
    for page in pages.values():
        if page.path.name == "404.html":
            continue
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            path = path / "index.html" if path.is_dir() else path
            name = page.path.relative_to(SITE)
            if not path.is_file():
                yield f"{name}: {target} does not exist"
            elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors | {"__top"}:
                yield f"{name}: {target} has no such anchor"


def undocumented_names(pages: dict[Path, Page]) -> Iterator[str]:
    """Public names without an entry in the reference."""
    anchors = set().union(*(page.anchors for page in pages.values()))
    names = [f"{package.__name__}.{name}" for package in (unfading, tasks) for name in package.__all__]
    yield from (f"docs/reference has no entry for {name}" for name in names if name not in anchors)


if __name__ == "__main__":
    main()
