"""Folders at the top of the repository that a wheel carries inside the package."""

from pathlib import Path


def carried_folder(name: str, holds: str) -> Path:
    """The folder of this name, kernels say, of the installed package or else of the checkout, whichever `holds` this
    file; a FileNotFoundError where neither does."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if (folder / holds).is_file():
            return folder
    raise FileNotFoundError(f"{name}/{holds} is neither in {package} nor in {package.parent}; install hf_twell again")
