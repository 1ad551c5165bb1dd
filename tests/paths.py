"""Places that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "recipes" / "demo"  # a small model, and text of its kind
MODEL = DEMO / "model"
HELDOUT = DEMO / "text" / "heldout.txt"
