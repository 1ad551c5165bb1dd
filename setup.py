"""Kernel sources and model cards lie at the top of the repository; a wheel carries them inside the package.

They are not in pyproject.toml's package-dir: an editable install (pip install -e) would then be an import hook, which
Python asks after the path. Started in the folder that holds a clone, it would take that, hf_twell/, for the package.
"""

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = {"hf_twell.kernels": "kernels", "hf_twell.model_cards": "model_cards"}


class CarryFolders(build_py):
    def finalize_options(self):
        super().finalize_options()
        self.package_dir = {**self.package_dir, **CARRIED}
        self.packages = [*self.packages, *CARRIED]


setup(cmdclass={"build_py": CarryFolders})
