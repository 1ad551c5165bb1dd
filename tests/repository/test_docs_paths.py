"""Files, modules and names that pages and comments speak of are there."""

import pkgutil
import re
from pathlib import Path

import pytest

from tests.paths import ROOT

ROOMS = {path.name for path in (ROOT / "hf_twell").iterdir() if any(path.glob("*.py"))}
KINDS = "py|md|yaml|toml|sh|cpp|cu|cuh|h|jsonl|txt"
FOLDERS = ("hf_twell", "kernels", "recipes", "docs", "tests", "model_cards")
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CUDA = ROOT / "kernels" / "twell_cuda"
KERNEL_PAGES = sorted([*ROOT.glob("kernels/*/DESIGN.md"), *ROOT.glob("kernels/*/LOG.md")])
# Measured rows name files as they were.
HISTORY = [*ROOT.glob("kernels/*/bench/**/*")]


def named(text: str, folders: str) -> set[str]:
    """Paths below one of the folders; `*` in them stands for any name."""
    return set(re.findall(rf"(?<![\w/.<-])(?:{folders})/(?:[\w.*-]+/)*[\w.*-]+\.(?:{KINDS})\b", text))


def missing(paths: set[str], *roots: Path) -> list[str]:
    return sorted(path for path in paths if not any(next(root.glob(path), None) for root in roots))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS)
def test_paths_from_the_root(folder):
    """In every source and page; the CUDA kernels' own includes start from their folder."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix[1:] in KINDS.split("|") and path not in HISTORY]
    wrong = {relative(path): missing(named(path.read_text(), "|".join(FOLDERS)), ROOT, CUDA) for path in files}
    assert not {path: paths for path, paths in wrong.items() if paths}


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_guides(page):
    """Files from the root or, as CONTRIBUTING.md names them, from the package; and folders."""
    text = page.read_text()
    rooms = "|".join(sorted(ROOMS))
    assert not missing(named(text, "|".join(FOLDERS)), ROOT)
    assert not missing(named(text, rooms), ROOT / "hf_twell", ROOT)
    folders = re.findall(r"`((?:[\w*-]+/)+)`", text)
    assert [folder for folder in folders if not next(ROOT.glob(folder), None) and folder[:-1] not in ROOMS] == []


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_names(page):
    """`hf_twell.ROOM.MODULE.NAME`, in text and examples."""
    for name in sorted(set(re.findall(r"\bhf_twell(?:\.\w+)+", page.read_text()))):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", KERNEL_PAGES, ids=relative)
def test_kernel_pages(page):
    """Kernel sources: from the backend's folder, or by their name alone, which some file below it has."""
    in_backticks = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    paths = set(re.findall(rf"[\w./*-]+\.(?:{KINDS})\b", in_backticks))
    alone = {path for path in paths if "/" not in path}
    assert not missing({f"**/{path}" for path in alone}, page.parent)
    assert not missing(paths - alone, page.parent, ROOT)


def test_the_map_names_every_room():
    assert {path.name for path in (ROOT / "hf_twell").glob("*.py")} == {"__init__.py", "__main__.py"}
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| folder |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)/`", table)) == ROOMS
