"""The wheel with compiled kernels where there is no compiler: `make environments` makes it, with the CPU's alone."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

WHEELS = Path(sys.prefix, "cpu-wheel")
# What a user's first call takes beside PyTorch itself.
FIRST_CALL = """
import time, torch
start = time.perf_counter()
import hf_twell
y = hf_twell.ops.ffn(torch.ones(2, 8), torch.ones(4, 8), torch.ones(8, 4), backend="cpu")
print(time.perf_counter() - start)
assert y.tolist() == [[32.0] * 8] * 2
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS.exists(), reason="no wheel with kernels; `make environments` makes it on x86-64"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A fresh environment with this wheel, and beside it the packages of the one that runs."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    (wheel,) = WHEELS.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv", "install", "--no-deps", "--no-index", wheel]
    done = subprocess.run(pip, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder


def run(place: Path, *command) -> str:
    """What a command of the environment prints, where PATH has that alone; it warns of nothing and compiles nothing."""
    bin = place / "venv" / "bin"
    environment = {"PATH": str(bin), "HOME": str(place), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([bin / command[0], *command[1:]], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compil" not in done.stderr
    assert "Warning" not in done.stderr
    assert not (place / ".cache" / "hf_twell").exists()
    return done.stdout


def test_the_kernels_run_without_a_compiler(place):
    told = json.loads(run(place, "hf-twell", "doctor", "--json"))["backends"]["cpu"]
    assert told["available"]
    assert told["reason"].startswith(f"came with the package: {place}/venv/lib/")
    assert Path(told["reason"].partition(": ")[2]).with_name("compilers.txt").read_text().strip()
    options = "--device cpu --tokens 1 --l0 30 --hidden 512 --intermediate 2048 --no-compile --repeats 3 --json"
    (row,) = json.loads(run(place, "hf-twell", "bench", "ffn", *options.split()))["rows"]
    assert (row["backend"], row["took"]) == ("cpu", "kernels")


def test_the_first_call_waits_less_than_a_second(place):
    assert min(float(run(place, "python", "-c", FIRST_CALL)) for _ in range(3)) < 1
