"""Which rooms of the package may import which: the contracts in pyproject.toml, and that they hold."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT

pytest.importorskip("importlinter")

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"


def lint(tree: Path) -> subprocess.CompletedProcess:
    """`lint-imports` in a checkout, of the package that lies there."""
    return subprocess.run([sys.executable, "-c", LINT], cwd=tree, capture_output=True, text=True)


def test_imports_point_down():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_every_room_has_its_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = {path.relative_to(ROOT / "hf_twell").parts[0] for path in (ROOT / "hf_twell").glob("*/**/*.py")}
    assert {room.strip(" ()") for layer in layers for room in layer.split("|")} == rooms


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        ("files/new.py", "import hf_twell.ops.api", "hf_twell.files is not allowed to import hf_twell.ops"),
        ("train/new.py", "def late():\n    import hf_twell.measure.activity", "import hf_twell.measure"),
        ("convert/new.py", "def late():\n    from hf_twell import train", "import hf_twell.train"),
        ("serving/vllm_plugin/new.py", "import hf_twell.serving.server", "import hf_twell.serving.server"),
        ("ops/new.py", "import transformers", "hf_twell.ops is not allowed to import transformers"),
        ("attic/__init__.py", "", "- hf_twell.attic"),
    ],
)
def test_what_breaks_a_contract_is_told(tmp_path, module, code, says):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "hf_twell", tmp_path / "hf_twell", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hf_twell" / module).parent.mkdir(exist_ok=True)
    (tmp_path / "hf_twell" / module).write_text(code)
    done = lint(tmp_path)
    assert done.returncode == 1
    assert says in done.stdout
