"""Transformers' own model tests pass on the custom classes.

They are in its source distribution, which `make test` fetches once into the environment. Its generation tests are in
its repository alone: TRANSFORMERS_SOURCE=~/transformers, a checkout of the installed version, runs these too;
`test_generation.py` has what they have not: that each way of generating gives what the stock model gives.
"""

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.conftest import finished
from tests.paths import ROOT

CHECKOUT = os.environ.get("TRANSFORMERS_SOURCE")
ARCHIVE = Path(sys.prefix, "transformers-source", f"transformers-{transformers.__version__}.tar.gz")
# What the tests in the source distribution import, and the distribution lacks.
ABSENT = {"generation/test_utils.py": "GenerationTesterMixin", "exporters/test_export.py": "ExportTesterMixin"}


def unpack(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        # Python up to 3.11.3 (Debian 12 has 3.11.2) takes no `filter`, and leaves this attribute alone.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder, [m for m in archive if m.name.split("/")[1:2] == ["tests"]])
    (source,) = folder.iterdir()
    for name, mixin in ABSENT.items():
        path = source / "tests" / name
        path.parent.mkdir()
        path.write_text(f"class {mixin}:\n    pass\n")
    for package in ("", "generation", "exporters"):
        (source / "tests" / package / "__init__.py").touch()
    return source


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT and not ARCHIVE.is_file(), reason="needs Transformers' source, see above")
@pytest.mark.timeout(3600 if CHECKOUT else 300)
def test_model_and_generation_suites(tmp_path):
    pytest.importorskip("parameterized")
    source = Path(CHECKOUT) if CHECKOUT else unpack(tmp_path / "source")
    shutil.copy(ROOT / "tests" / "transformers_suite.py", tmp_path / "test_suite.py")
    # Both repositories have a package `tests`; here it is theirs.
    path = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "--noconftest"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "test_suite.py"]
    done = finished(*command, cwd=tmp_path, env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 300, "three classes, a hundred tests each at the least"
