"""Kernel sources and model cards lie at the top of the repository; a wheel carries them inside the package.

They are not in pyproject.toml's package-dir: an editable install (pip install -e) would then be an import hook, which
Python asks after the path. Started in the folder that holds a clone, it would take that, hf_twell/, for the package.

With $HF_TWELL_PREBUILT, a folder that kernels/release/prebuild.py made, the wheel carries compiled libraries, too, and
is for one kind of machine. `make wheel` sets it. PyTorch loads the libraries, so any Python will do.
"""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CARRIED = {"hf_twell.kernels": "kernels", "hf_twell.model_cards": "model_cards"}
PREBUILT = os.environ.get("HF_TWELL_PREBUILT")
if PREBUILT:
    CARRIED["hf_twell.prebuilt"] = PREBUILT


class CarryFolders(build_py):
    def finalize_options(self):
        super().finalize_options()
        self.package_dir = {**self.package_dir, **CARRIED}
        self.packages = [*self.packages, *CARRIED]


class Wheel(bdist_wheel):
    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if PREBUILT else tag


class MaybeCompiled(Distribution):
    def has_ext_modules(self):
        return bool(PREBUILT)


setup(cmdclass={"build_py": CarryFolders, "bdist_wheel": Wheel}, distclass=MaybeCompiled)
