"""Transformers' own model tests pass on the custom classes. They are in its sources alone, not in its package:

TRANSFORMERS_SOURCE=~/transformers make test      # a checkout of the installed version; pip install parameterized
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = os.environ.get("TRANSFORMERS_SOURCE")


@pytest.mark.skipif(not SOURCE, reason="needs TRANSFORMERS_SOURCE, a checkout of the installed Transformers")
@pytest.mark.timeout(3600)
def test_model_and_generation_suites(tmp_path):
    pytest.importorskip("parameterized")
    shutil.copy(ROOT / "tests" / "transformers_suite.py", tmp_path / "test_suite.py")
    # Both repositories have a package `tests`; here it is theirs.
    path = os.pathsep.join([str(Path(SOURCE)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "--noconftest"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_suite.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
