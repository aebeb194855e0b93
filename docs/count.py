"""Count the pages of the documentation, their words without code, their lines and their decimals.

python docs/count.py [FOLDER OR PAGE ...]    # without an argument: docs/
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"\A---\n.*?^---\n|^```.*?^```|<!--.*?-->", re.S | re.M)  # also front matter and comments


def count(page: Path) -> tuple[int, int, int]:
    """Return words outside of code, all lines, and decimals outside of code."""
    text = page.read_text()
    prose = re.sub(r"\]\([^)]*\)", "]", CODE.sub("", text))  # without the targets of links
    words = [word for word in prose.split() if re.search(r"\w", word)]
    return len(words), len(text.splitlines()), len(re.findall(r"\d\.\d", prose))


def main() -> None:
    given = [Path(each) for each in sys.argv[1:]] or [ROOT / "docs"]
    pages = sorted({page for each in given for page in ([each] if each.is_file() else each.rglob("*.md"))})
    counts = {page: count(page) for page in pages}
    words, lines, decimals = (sum(each) for each in zip(*counts.values(), strict=True))
    print(f"{len(pages)} pages, {words:,} words without code, {lines:,} lines, {decimals:,} decimals")
    print("ten longest:   words  lines  decimals")
    for page, (words, lines, decimals) in sorted(counts.items(), key=lambda item: -item[1][0])[:10]:
        print(f"{words:20,} {lines:6,} {decimals:9,}  {page.resolve().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
