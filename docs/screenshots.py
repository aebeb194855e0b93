"""Pictures of the built site at two widths, in light and in dark, and a list of what is wider than the window.

python docs/screenshots.py FOLDER        # needs chromium and `make docs`
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "build" / "docs" / "docs"
MAIN = ("index", "start", "which", "evidence", "guides/index", "guides/accelerate", "concepts/index", "papers/sogclr")
MAIN += ("guides/own_data", "guides/working", "coming_from/index", "api/index", "results", "costs", "papers/index")
WIDTHS = (1280, 390)
# chromium has a least width of its own; a frame of the wanted one does not
FRAME = """<body style="margin:0;overflow:hidden">
<iframe src="{page}" style="border:0;width:{width}px;height:{height}px"></iframe>"""
MEASURE = """<body><script>
const frame = document.createElement("iframe");
frame.style = "border:0;width:{width}px;height:900px"; frame.src = "{page}";
frame.onload = () => {{
  const page = frame.contentDocument, wide = [];
  for (const each of page.querySelectorAll("article *")) {{
    if (each.closest(".table-wrapper, pre, .equation, .math")) continue;
    if (each.getBoundingClientRect().right > {width} + 1) wide.push(each.tagName + " " + each.textContent.slice(0, 40));
  }}
  const pictures = [...page.querySelectorAll("article img")].filter(each => !each.alt).length;
  document.body.innerText = JSON.stringify([page.documentElement.scrollWidth, wide.slice(0, 5), pictures]);
}};
document.body.append(frame);
</script>"""


def chromium(*options: str) -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("no chromium; install it to look at the site")
    command = [
        found,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
    ]
    command += ["--virtual-time-budget=20000", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", nargs="*", default=MAIN)
    parser.add_argument("--height", type=int, default=1400)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--all", action="store_true", help="measure every page, take no pictures")
    args = parser.parse_args()
    if not SITE.is_dir():
        raise SystemExit("there is no site yet: make docs")
    args.folder.mkdir(parents=True, exist_ok=True)
    pages = (
        [path.relative_to(SITE).with_suffix("").as_posix() for path in SITE.rglob("*.html")] if args.all else args.pages
    )
    for page in sorted(pages):
        for width in WIDTHS:
            wrapper = args.folder / "frame.html"
            values = {"page": (SITE / f"{page}.html").as_uri(), "width": width, "height": args.height}
            if not args.all:
                wrapper.write_text(FRAME.format(**values))
                picture = args.folder / f"{page.replace('/', '-')}-{width}{'-dark' if args.dark else ''}.png"
                theme = ["--blink-settings=preferredColorScheme=0"] if args.dark else []
                chromium(*theme, f"--window-size={width},{args.height}", f"--screenshot={picture}", wrapper.as_uri())
            wrapper.write_text(MEASURE.format(**values))
            said = chromium(f"--window-size={width},900", "--dump-dom", wrapper.as_uri())
            print(f"{page:40s} {width:5d}  {said.split('<body>')[-1].split('</body>')[0].strip()}", flush=True)


if __name__ == "__main__":
    main()
