"""The drawings of docs/concepts: python docs/drawings.py writes them as SVG.

Figures come from a table of a page, or from a file in benchmarks/results.

Each drawing brings its own background, light or dark as the reader's system is, so that it can be read on any page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "concepts"
STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de }
    text { font: 15px system-ui, sans-serif; fill: #1f2328 }
    .small { font-size: 13px; fill: #57606a }
    .title { font-weight: 600 }
    .box { fill: #f3f5f8; stroke: #8c959f }
    .line { stroke: #57606a; fill: #57606a }
    .pull { stroke: #1a7f37; fill: #1a7f37 }
    .push { stroke: #bc4c00; fill: #bc4c00 }
    .state { fill: #ddf4ff; stroke: #0969da }
    .soft { stroke: #d0d7de; stroke-width: 1; fill: none }
    .ours { stroke: #0969da; fill: #0969da }
    @media (prefers-color-scheme: dark) {
      .card { fill: #16191d; stroke: #3d444d }
      text { fill: #e6edf3 }
      .small { fill: #a8b3bf }
      .box { fill: #22272e; stroke: #768390 }
      .line { stroke: #a8b3bf; fill: #a8b3bf }
      .pull { stroke: #57ab5a; fill: #57ab5a }
      .push { stroke: #e0823d; fill: #e0823d }
      .state { fill: #0b2a4a; stroke: #539bf5 }
      .soft { stroke: #3d444d }
      .ours { stroke: #539bf5; fill: #539bf5 }
    }
"""


def svg(width: int, height: int, title: str, description: str, parts: list[str]) -> str:
    """A whole file; the title and the description are what a screen reader says."""
    body = "\n  ".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-labelledby="title description" width="{width}" height="{height}">
  <title id="title">{escape(title)}</title>
  <desc id="description">{escape(description)}</desc>
  <style>{STYLE}  </style>
  <rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>
  {body}
</svg>
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, lines: list[str], kind: str = "box") -> str:
    """A rectangle with centred lines; the first is its title."""
    middle, first = x + width / 2, y + height / 2 - 9 * (len(lines) - 1) + 5
    words = [text(middle, first + 19 * i, line, "small" if i else "title") for i, line in enumerate(lines)]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>' + "".join(words)


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line", width: float = 1.6) -> str:
    """A line with a head of its own colour."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy, size = (x2 - x1) / length, (y2 - y1) / length, 5 + width
    back_x, back_y = x2 - size * ux, y2 - size * uy
    head = f"{x2},{y2} {back_x - 0.5 * size * uy:.1f},{back_y + 0.5 * size * ux:.1f} "
    head += f"{back_x + 0.5 * size * uy:.1f},{back_y - 0.5 * size * ux:.1f}"
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{back_x:.1f}" y2="{back_y:.1f}"'
    line = f'<line class="{kind}" {ends} style="stroke-width: {width}"/>'
    return f'{line}<polygon class="{kind}" points="{head}" style="stroke: none"/>'


def dot(x: float, y: float, kind: str, radius: float = 7) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{radius}" class="{kind}" stroke="none"/>'


def pair_weights() -> str:
    """Draw the weights of an anchor's negatives: from the batch alone, and with state for the whole data set."""
    parts = [
        text(190, 34, "the batch alone", "title"),
        text(190, 54, "weights sum to one, whatever the batch is", "small"),
        text(570, 34, "with an estimated normalizer", "title"),
        text(570, 54, "a batch of easy negatives weighs little", "small"),
        '<line class="soft" x1="380" y1="24" x2="380" y2="316"/>',
    ]
    negatives = ((40, 100), (130, 92), (286, 96), (60, 236), (300, 250))
    for left, widths in ((0, (2.6, 5.0, 3.4, 2.2, 2.8)), (380, (1.0, 2.2, 1.4, 0.9, 1.1))):
        anchor, positive = (left + 190, 180), (left + 262, 174)
        parts.append(arrow(anchor[0] + 12, anchor[1] - 1, positive[0] - 10, positive[1] + 1, "pull", 3))
        for (x, y), width in zip(negatives, widths, strict=True):
            x += left
            dx, dy = anchor[0] - x, anchor[1] - y
            far = (dx * dx + dy * dy) ** 0.5
            start = (x + 12 * dx / far, y + 12 * dy / far)
            end = (anchor[0] - 14 * dx / far, anchor[1] - 14 * dy / far)
            parts += [arrow(*start, *end, "push", width), dot(x, y, "push")]
        parts += [dot(*positive, "pull"), f'<circle cx="{anchor[0]}" cy="{anchor[1]}" r="9" class="state"/>']
        parts += [
            text(anchor[0], anchor[1] + 30, "anchor i"),
            text(positive[0] + 14, positive[1] + 5, "positive", "", "start"),
        ]
    parts += [
        text(190, 290, "w = exp(h / tau) / sum over the batch", "small"),
        text(570, 290, "w = exp(h / tau - alpha) / |N|", "small"),
        text(190, 310, "DCL; InfoNCE with the positive in the sum", "small"),
        text(570, 310, "SogCLR, iSogCLR, NeuCLIP, ...", "small"),
    ]
    description = (
        "Two panels. In both an anchor is pulled to its positive and pushed away by five negatives of the "
        "batch. On the left, where the batch alone is the normalizer, the pushes are strong. On the right an "
        "estimated normalizer of the whole data set scales them: here the batch has easy negatives only, and "
        "all pushes are weak."
    )
    return svg(760, 330, "Pair weights", description, parts)


def read_deposit_commit() -> str:
    """Draw how a call reads rows and deposits proposals, and how a step writes them."""
    parts = [
        box(30, 40, 150, 62, ["features z1, z2", "and index"]),
        box(260, 30, 240, 82, ["est(z1, z2, index)", "reads rows, deposits proposals"]),
        box(580, 40, 150, 62, ["loss", "with gradients"]),
        arrow(180, 71, 258, 71),
        arrow(500, 71, 578, 71),
        box(90, 200, 210, 72, ["rows", "one per sample, committed"], "state"),
        box(470, 200, 180, 72, ["proposals", "wait for the step"], "box"),
        arrow(215, 198, 320, 114),
        text(236, 150, "read", "", "end"),
        arrow(440, 114, 545, 198),
        text(512, 150, "deposit", "", "start"),
        arrow(468, 236, 304, 236),
        text(386, 226, "commit"),
        text(386, 258, "est.step(), by way of", "small"),
        text(386, 275, "optimizer.step()", "small"),
        text(560, 300, "a skipped step: discarded", "small"),
    ]
    description = (
        "A call of the estimator reads the committed rows of the batch's samples and returns a loss with "
        "gradients. The new values are deposited as proposals. est.step(), which runs after optimizer.step(), "
        "commits the proposals to the rows. If the step is skipped, the proposals are discarded."
    )
    return svg(760, 320, "Read, deposit, commit", description, parts)


def row(x: float, y: float, cells: list[tuple[str, float]]) -> str:
    """Columns of a table, side by side: name and width of each."""
    drawn = []
    for words, width in cells:
        drawn.append(f'<rect class="state" x="{x}" y="{y}" width="{width}" height="38"/>')
        drawn.append(text(x + width / 2, y + 24, words))
        x += width
    return "".join(drawn)


def one_call() -> str:
    """Draw the steps of a call, the objects of a container with their tables, and the commit."""
    steps = (
        ("read", "Batch", "samples, rows"),
        ("pairs", "Pairs", "one or more Blocks"),
        ("estimate", "alpha, tau", "and new rows"),
        ("deposit", "proposals", "wait for the step"),
        ("gradients", "Objective", "loss, gradients"),
    )
    parts = [text(30, 34, "one call", "title", "start")]
    for number, lines in enumerate(steps):
        x = 30 + 143 * number
        parts.append(box(x, 50, 128, 76, list(lines)))
        if number:
            parts.append(arrow(x - 15, 88, x - 2, 88))
    parts += [
        '<rect class="box" x="30" y="190" width="556" height="124" rx="8"/>',
        text(308, 214, "ContrastiveEstimator, a container", "title"),
        box(46, 228, 254, 72, ["normalizer", "an Estimator: groups, rows, t"], "card"),
        box(316, 228, 254, 72, ["temperature", "an Estimator: groups, rows, t"], "card"),
        arrow(94, 188, 94, 130),
        text(104, 164, "committed rows", "small", "start"),
        arrow(523, 126, 523, 186),
        text(513, 164, "proposals", "small", "end"),
        box(620, 221, 110, 62, ["optimizer", "step()"]),
        arrow(618, 252, 590, 252),
        text(675, 306, "commits, or", "small"),
        text(675, 323, "discards", "small"),
        arrow(173, 300, 173, 348),
        arrow(443, 300, 443, 348),
        text(183, 334, "commit", "small", "start"),
        text(453, 334, "commit", "small", "start"),
        row(73, 350, [("log_u", 130), ("count", 70)]),
        row(343, 350, [("tau, m", 130), ("count", 70)]),
        text(308, 412, "each object has a table of its own", "small"),
    ]
    description = (
        "The steps of a call: read the batch with the committed rows, compute the pairs in one or more blocks, "
        "estimate alpha and tau, deposit the proposals, compute the loss and its gradients. Below, a "
        "ContrastiveEstimator is a container of two estimators, a normalizer and a temperature, each with a table of "
        "its own. The call reads their rows and leaves proposals in them. The optimizer's step commits: each object "
        "writes its own table. A skipped step discards the proposals."
    )
    return svg(760, 430, "One call", description, parts)


SHOWN = {
    "InfoNCE": ("InfoNCE, tuned", "push"), "DCL": ("DCL, tuned", "pull"),
    "`compopt.recommended(candidates=None)`": ("recommended, not tuned", "state"),
    "`recommended(candidates=None, momentum=True)`": ("with a momentum encoder", "ours"),
}  # fmt: skip


def main_result() -> str:
    """The table of README as bars, from zero."""
    page = (FOLDER.parent.parent / "README.md").read_text()
    table = page.split("<!-- python -m benchmarks.summary -->")[1].split("<!-- end -->")[0]
    head, _, *lines = table.strip().splitlines()
    tasks, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    bars = {named: [float(cell.split()[0]) for cell in cells] for first, *cells in rows if (named := _shown(first))}
    parts, base, scale = [], 232, 2.5
    for task, name in enumerate(tasks[1:]):
        left = 60 + 195 * task
        parts += [
            text(left + 72, base + 22, name, "title"),
            f'<path class="soft" d="M{left - 8} {base}H{left + 152}"/>',
        ]
        for place, ((_, kind), values) in enumerate(bars.items()):
            x, height = left + 37 * place, scale * values[task]
            parts.append(f'<rect class="{kind}" x="{x}" y="{base - height:.1f}" width="30" height="{height:.1f}"/>')
            parts.append(text(x + 15, round(base - height - 5, 1), f"{values[task]:.0f}", "small"))
    for place, (words, kind) in enumerate(bars):
        x = (40, 190, 320, 560)[place]
        parts += [f'<rect class="{kind}" x="{x}" y="20" width="14" height="14"/>', text(x + 22, 33, words, "", "start")]
    parts.append(text(420, base + 48, "recall at 1 in per cent, batch 16, mean of three seeds", "small"))
    description = (
        "Four groups of bars, one per data set: recall at batch 16 of InfoNCE, DCL, compopt.recommended, and that with "
        "a momentum encoder. The last two are 3 to 23 points above InfoNCE."
    )
    return svg(840, 296, "Recall at batch 16", description, parts)


def _shown(row: str) -> tuple[str, str] | None:
    """Return the name and the class of a row of the table that is drawn."""
    return next((shown for start, shown in SHOWN.items() if row.startswith(start)), None)


def methods_on_glyphs() -> str:
    """The first table of results.md: mean and standard deviation of each method, from zero."""
    table = (FOLDER.parent / "results.md").read_text().split("| method | R@1 (%) |")[1].split("\n\n")[0]
    rows = [[cell.replace("*", "").strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    bottom = 50 + 26 * len(rows)
    parts = [text(20, 34, "R@1 on held-out glyphs, per cent, mean and standard deviation", "title", "start")]
    for recall in (0, 10, 20, 30, 40, 50):
        x = 290 + 6 * recall
        parts += [f'<path class="soft" d="M{x} 50V{bottom}"/>', text(x, bottom + 18, str(recall), "small")]
    for number, (method, recall, *_) in enumerate(rows):
        mean, deviation = (float(part) for part in recall.split(" ± "))
        x, y = 290 + 6 * mean, 64 + 26 * number
        kind = {"InfoNCE": "push", "DCL, the stateless control": "pull"}.get(method, "ours")
        parts.append(text(275, y + 5, method.replace("`", "").split(" (")[0], "", "end"))
        parts.append(f'<path class="{kind}" d="M290 {y}H{x:.1f}" style="stroke-width: 6"/>')
        ends = f"M{x - 6 * deviation:.1f} {y}H{x + 6 * deviation:.1f}"
        parts.append(f'<path class="line" d="{ends}" style="stroke-width: 1.6"/>')
        parts.append(text(640, y + 5, recall, "", "start"))
    description = (
        "Recall by method. SogCLR, iSogCLR without the positive as reference, NeuCLIP and Residual are level with DCL. "
        "InfoNCE, CLIP, FastCLIP and EMC2 are four to five points lower."
    )
    return svg(740, bottom + 36, "Methods on glyphs", description, parts)


def main() -> None:
    drawings = (
        pair_weights,
        read_deposit_commit,
        one_call,
        main_result,
        methods_on_glyphs,
    )
    for draw in drawings:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main()
