"""Draw the pictures in docs/: `hf-twell inspect` on the demo model in a headless Chromium (`make screenshots`).

Needs the sparse model of `make demo`, and Chromium (Debian: apt install chromium).
"""

import argparse
import sys
import tempfile
from pathlib import Path

from hf_twell.cli import main as hf_twell_main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.browser import Browser, find_chromium  # noqa: E402

# name: (width, height, colour scheme)
PICTURES = {
    "inspect-light": (1100, 1180, "light"),
    "inspect-dark": (1100, 1180, "dark"),
    "inspect-phone": (375, 1180, "light"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="out/demo/final", help="default: what make demo made")
    parser.add_argument("--text", default="recipes/demo/text/heldout.txt")
    args = parser.parse_args()
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium found; on Debian: apt install chromium, or name one in $CHROMIUM")
    if not Path(args.model).is_dir():
        sys.exit(f"no model in {args.model}; run `make demo` first, or give --model")
    with tempfile.TemporaryDirectory() as folder, Browser(executable) as browser:
        page = Path(folder) / "page.html"
        if status := hf_twell_main(["inspect", args.model, "--text", args.text, "--measure", "--html", str(page)]):
            sys.exit(status)
        for name, (width, height, scheme) in PICTURES.items():
            browser.resize(width, height)
            browser.use(scheme=scheme)
            browser.open(page)
            browser.screenshot(ROOT / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
