"""Text files for a conversion of a coding model: books, textbooks, Python sources, and what is held out of each.

    python recipes/study/texts.py --text DIR --eval DIR --sources FOLDER --output out/texts

DIR of --text holds openstax.txt and gutenberg.txt (or .xz), that of --eval wikitext2_raw_test_documents.jsonl (or .xz).
FOLDER has Python packages, such as site-packages; of these, and of the documents of each text, every so many-th is held
out whole. OUTPUT gets openstax.txt, gutenberg.txt and code.txt to train on, and heldout/ with a part of each and of
WikiText-2. Documents end with a line <|endoftext|>.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from hf_twell.files.text import END_OF_TEXT, END_OF_TEXT_LINE, read_documents, read_text

HELD_OUT_EVERY = 50  # documents
PACKAGE_HELD_OUT_EVERY = 20
HELD_OUT_CHARACTERS = 600_000  # of each text: about 130,000 tokens
LEFT_OUT = re.compile(
    r"tests?|testing|test_.*|.*_tests?(\.py)?|_?vendor(ed)?|_vendored_.*|third_party|extern(als?|s)?", re.I
)
SOURCE_CHARACTERS = (800, 60_000)  # shorter files hold imports alone, longer ones tables and generated code


def packages(folder: Path) -> dict[str, list[str]]:
    """The Python sources of each package in a folder; tests and copies of other packages are left out."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if any(LEFT_OUT.fullmatch(part) for part in inside.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if SOURCE_CHARACTERS[0] <= len(text) <= SOURCE_CHARACTERS[1] and "\ufffd" not in text:
            found.setdefault(inside.parts[0], []).append(text)
    return found


def write(path: Path, documents: Iterable[str], characters: int | None = None) -> None:
    """Write documents, one of them beyond the first `characters` at most."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            if END_OF_TEXT_LINE.search(document):
                continue
            file.write(f"{document.strip()}\n{END_OF_TEXT}\n")
            written += len(document)
            if characters is not None and written >= characters:
                break
    print(f"{path}: {written / 1e6:.1f}M characters")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "eval", "sources", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--characters", type=int, help="of each text to train on, at most")
    args = parser.parse_args(argv)
    if (args.output / "heldout").exists():
        parser.error(f"{args.output} holds texts already; name another --output")
    if args.output.resolve() in (args.text.resolve(), args.eval.resolve()):
        parser.error(f"{args.output} is what is read, and would be written over; name another --output")
    (args.output / "heldout").mkdir(parents=True)
    shuffle = random.Random(0).shuffle

    def write_both(name: str, training: list[str], held: list[str]) -> None:
        shuffle(training), shuffle(held)
        write(args.output / f"{name}.txt", training, args.characters)
        write(args.output / "heldout" / f"{name}.txt", held, HELD_OUT_CHARACTERS)

    for name in ("openstax", "gutenberg"):
        documents = read_documents(found(args.text, f"{name}.txt"))
        write_both(name, [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY], documents[::HELD_OUT_EVERY])
    sources = packages(args.sources)
    names = sorted(sources)
    shuffle(names)
    held = set(names[::PACKAGE_HELD_OUT_EVERY])
    training = [text for name in names if name not in held for text in sources[name]]
    write_both("code", training, [text for name in names if name in held for text in sources[name]])
    lines = read_text(found(args.eval, "wikitext2_raw_test_documents.jsonl")).split("\n")
    pages = [json.loads(line)["page"] for line in lines if line.strip()]
    write(args.output / "heldout" / "wikitext.txt", pages, HELD_OUT_CHARACTERS)


def found(folder: Path, name: str) -> Path:
    """The file of that name in a folder, packed by xz or not."""
    packed = folder / f"{name}.xz"
    return packed if packed.is_file() else folder / name


if __name__ == "__main__":
    main()
