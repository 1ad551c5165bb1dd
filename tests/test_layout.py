"""How large the parts of the tree may grow before a newcomer no longer finds the way."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != "__pycache__"]


def test_the_package_has_few_rooms():
    assert len(entries(ROOT / "hf_twell")) <= 16, sorted(entries(ROOT / "hf_twell"))


def test_no_module_is_long():
    modules = [path for folder in ("hf_twell", "recipes") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert {path: count for path, count in lines.items() if count > 300} == {}


def test_no_folder_of_kernels_holds_many_files():
    folders = [path for path in (ROOT / "kernels").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    files = {str(path.relative_to(ROOT)): sum((path / name).is_file() for name in entries(path)) for path in folders}
    assert {path: count for path, count in files.items() if count > 30} == {}
