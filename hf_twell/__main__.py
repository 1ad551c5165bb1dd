"""`python -m hf_twell` is the command `hf-twell`."""

import sys

from hf_twell.cli import main

if __name__ == "__main__":
    sys.exit(main())
