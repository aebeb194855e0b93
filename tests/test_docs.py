"""The documentation pages: code blocks compile, names exist, links lead to files."""

import importlib
import importlib.util
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compopt

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
)


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def test_python_blocks_compile():
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block, name(page), "exec")


def test_code_is_not_wider_than_the_page():
    """The site shows 105 letters at 1,280 pixels, and wraps `text`; definitions of the methods have a smaller font."""
    wide = {}
    for page in PAGES:
        for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S):
            lines = [line for line in block.splitlines() if len(line) > 105]
            if lines and language != "text":
                wide[name(page)] = lines
    for path in (ROOT / "compopt").rglob("*.py"):
        code = re.findall(r"^ *((?:>>>|\.\.\.) .+)$", path.read_text(), re.M)
        if lines := [line for line in code if len(line) > 105]:
            wide[str(path.relative_to(ROOT))] = lines
    assert not wide


ESTIMATORS = [
    name
    for name, value in vars(compopt).items()
    if inspect.isclass(value) and issubclass(value, compopt.ContrastiveEstimator)
]


@pytest.mark.parametrize("name", [*ESTIMATORS, "recommended"])
def test_help_shows_an_example_on_its_first_screen(name):
    """A terminal has 24 lines, of which the pager takes one."""
    screen = pydoc.plain(pydoc.render_doc(getattr(compopt, name))).splitlines()[:23]
    at = next(number for number, line in enumerate(screen) if line.lstrip("| ").startswith("Example:"))
    assert not all(line.strip("| ") for line in screen[at:])  # the example ends on the screen
    assert f"compopt.{name}(" in "\n".join(screen[at:])


def test_names_of_the_library_exist():
    for dotted in {
        found for page in PAGES for found in re.findall(r"\bcompopt((?:\.[A-Za-z_]\w*)+)", page.read_text())
    }:
        value = compopt
        for part in dotted.strip(".").split("."):
            if part in ("py", "md"):
                break
            if not hasattr(value, part):
                __import__(f"{value.__name__}.{part}")
            value = getattr(value, part)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and MyST form them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith("http"):
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append((name(page), link))
    assert wrong == []


def test_commands_name_modules_that_exist():
    for page in PAGES:
        for module in re.findall(r"-m ((?:recipes|benchmarks)[\w.]*\w)", page.read_text()):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (name(page), module)


def reached(page, found):
    """Return the page and those that its tables of contents lead to."""
    found.add(page)
    for entry in [line for block in blocks(page, "{toctree}") for line in block.splitlines()]:
        target = (page.parent / f"{entry}.md").resolve()
        if entry and target.exists() and target not in found:
            reached(target, found)
    return found


def test_every_page_is_in_a_table_of_contents():
    assert set((ROOT / "docs").rglob("*.md")) <= reached(ROOT / "docs" / "index.md", set())


def test_every_public_name_is_on_one_page_of_the_api():
    listed = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        module = ""
        for directive, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (.+)$", page.read_text(), re.M):
            if directive in ("currentmodule", "automodule"):
                module = name
            if directive != "currentmodule":
                listed.append(name if directive == "automodule" else f"{module}.{name}")
    for module in ("compopt", "compopt.data", "compopt.samplers", "compopt.integrations.sentence_transformers"):
        try:
            names = importlib.import_module(module).__all__
        except ImportError:  # an optional package
            continue
        assert {f"{module}.{name}" for name in names if f"{module}.{name}" not in sys.modules} <= set(listed)
    assert len(set(listed)) == len(listed)


def test_the_drawings_are_what_their_script_draws():
    drawings = sorted((ROOT / "docs" / "concepts").glob("*.svg"))
    before = [drawing.read_text() for drawing in drawings]
    subprocess.run([sys.executable, ROOT / "docs" / "drawings.py"], check=True)
    assert len(drawings) == 5 and [drawing.read_text() for drawing in drawings] == before


def test_the_notebook_of_a_page_has_its_blocks(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(ROOT / "docs")
    executed = importlib.import_module("extensions.executed")
    pages = [page for page in PAGES if page.read_text().startswith("---\nexecuted: true\n---")]
    for page in pages:
        cells = executed.notebook(page.read_text())["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert [cell for cell in code if cell in page.read_text()] == code
        assert {block.strip() for block in blocks(page, "python")} <= set(code)
        assert not any("executed: true" in cell["source"] or "<!---" in cell["source"] for cell in cells)
    assert len(pages) == 6


def test_every_picture_has_a_text_alternative():
    for page in PAGES:
        assert not re.findall(r"!\[\s*\]\(", page.read_text()), name(page)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_loop_of_the_index_runs():
    lines = blocks(ROOT / "docs" / "index.md", "diff")[0].splitlines(keepends=True)
    added = [line for line in lines if line.startswith("+")]
    assert len(added) == 5
    scope = {"DataLoader": torch.utils.data.DataLoader}
    exec("from tests.stand_ins import *", scope)
    before = [p.clone() for p in scope["model"].parameters()]
    exec("".join(line[2:] or "\n" for line in lines if not line.startswith("-")).replace("dim=512", "dim=DIM"), scope)
    assert scope["est"].t == 1 and isinstance(scope["est"], compopt.MemoryEstimator)
    assert not any(torch.equal(old, new) for old, new in zip(before, scope["model"].parameters(), strict=True))


def test_no_text_advises_to_install_a_package_that_is_not_published():
    """The package is installed from a checkout: ``pip install -e ".[recipes]"``."""
    files = [*PAGES, *(ROOT / "compopt").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert [name(file) for file in files if re.search(r"pip install\s+[\"']?compopt", file.read_text())] == []


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_normalizer_of_the_page_on_extending(mode):
    """Its first estimate is exact if the batch is the data set."""
    scope = {"__name__": "running_mean"}
    exec(blocks(ROOT / "docs" / "extending.md", "python")[0], scope)
    est = compopt.ContrastiveEstimator(scope["RunningMean"](12), compopt.FixedTemperature(0.3), mode=mode)
    z1, z2 = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0)).unbind()
    assert compopt.diagnostics.gradient_error(est, z1, z2, batch_size=12)["relative"] < 1e-5
    est(z1.requires_grad_(), z2, torch.arange(12)).backward()
    est.step()
    assert est.read(torch.arange(12))["count"].tolist() == [1] * 12


def test_the_page_on_extending_is_short_and_uses_public_names():
    text = (ROOT / "docs" / "extending.md").read_text()
    code = blocks(ROOT / "docs" / "extending.md", "python")
    assert len(text.splitlines()) < 120 and len(code[0].splitlines()) <= 40
    assert not [found for block in code for found in re.findall(r"\._[a-z]\w*", block)]


ADAPTERS = {
    "accelerate": ["attach", "register_for_checkpointing"],
    "lightning": ["EstimatorCallback"],  # on the page of transformers
    "sentence_transformers": [
        "EstimatorLoss", "CachedEstimatorLoss", "EstimatorCallback", "add_index", "guided_options", "ranking_options"
    ],
    "transformers": ["EstimatorCallback", "GradientCacheMixin"],
}  # fmt: skip


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in ADAPTERS for name in ADAPTERS[page]])
def test_the_guide_of_an_adapter_names_all_arguments(page, name):
    adapter = getattr(pytest.importorskip(f"compopt.integrations.{page}"), name)
    page = {"lightning": "transformers"}.get(page, page)
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
    assert [each for each in inspect.signature(adapter).parameters if not re.search(rf"\b{each}\b", text)] == []


def test_the_log_of_commands_has_every_command_of_the_pages():
    spec = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "commands.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    log = script.LOG.read_text()
    missing = [command for command, _ in script.commands() if f"`{command}`" not in log]
    assert not missing, "run docs/commands.py"
    assert "failed" not in log
