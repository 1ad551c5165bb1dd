"""The package as a wheel, away from its repository: what it holds, and that its commands run."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.paths import DEMO, HELDOUT, ROOT

pytest.importorskip("setuptools", minversion="77")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    tree, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("hf_twell", "kernels", "model_cards", "recipes", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory) -> Path:
    """A folder of packages with this one's wheel, built from the source distribution, unpacked."""
    tree, site = sdist, tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", tree / "dist", tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning" not in done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def run(installed, *arguments, cwd):
    env = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "hf_twell", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_no_recipe_comes_without_its_data(installed):
    package = installed / "hf_twell"
    assert (package / "model_cards" / "model.md").is_file()
    assert not (package / "recipes").exists()


def test_every_module_comes_along(installed):
    """Packages are listed by hand in pyproject.toml."""
    modules = [path.relative_to(ROOT) for path in (ROOT / "hf_twell").rglob("*.py")]
    assert [path for path in modules if not (installed / path).is_file()] == []


def test_kernels_come_whole_and_without_their_tests_notes_and_rows(installed):
    kernels = installed / "hf_twell" / "kernels"
    kinds = tomllib.loads((kernels / "build.toml").read_text())
    listed = {*kinds["torch"]["src"], *(file for kernel in kinds["kernel"].values() for file in kernel["src"])}
    here = {str(path.relative_to(kernels)) for path in kernels.rglob("*") if path.is_file()}
    assert here == {"build.toml", *listed}


def test_the_source_distribution_has_no_tests_that_cannot_run(sdist):
    assert not (sdist / "tests").exists()
    assert (sdist / "LICENSE").is_file()


@pytest.mark.slow
def test_an_editable_install_is_found_beside_the_clone(sdist, tmp_path):
    """Where Python starts in the folder that holds the clone, whose own folder has the package's name."""
    clone, site = tmp_path / "hf_twell", tmp_path / "site"
    shutil.copytree(sdist, clone)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", site]
    done = subprocess.run([*pip, "--editable", clone], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning" not in done.stderr
    code = f"import site; site.addsitedir({str(site)!r}); import hf_twell; print(hf_twell.__version__)"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_train_runs_from_it(installed, tmp_path):
    done = run(installed, "train", "recipes/demo.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "give the path of a YAML file, such as recipes/demo.yaml of a checkout"
    )
    text = re.sub(r"<\|endoftext\|>\n", "", HELDOUT.read_text()[:3000])
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {DEMO / 'model'}\noutput_dir: out\ntrain: text.txt\nheldout: text.txt\nsequence_length: 32\n"
        "l1_weight: 0\ntraining: {max_steps: 1, per_device_train_batch_size: 2, use_cpu: true, save_strategy: 'no'}\n"
    )
    done = run(installed, "train", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "final" / "config.json").is_file()
