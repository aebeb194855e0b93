"""The pages: their code is code, their names exist, their links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

import compopt

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")])


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_of_the_library_exist(page):
    for dotted in set(re.findall(r"\bcompopt((?:\.[A-Za-z_]\w*)+)", page.read_text())):
        value = compopt
        for part in dotted.strip(".").split("."):
            if part in ("py", "md"):
                break
            if not hasattr(value, part):
                __import__(f"{value.__name__}.{part}")
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_name_modules_that_exist(page):
    for module in re.findall(r"-m ((?:recipes|benchmarks)[\w.]*\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(f"({page.name})" in index for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_new_normalizer_works():
    """The file that docs/extending.md tells to write: means of what a sample has seen, committed."""
    names: dict = {}
    exec(compile(blocks(ROOT / "docs" / "extending.md", "python")[0], "running_mean.py", "exec"), names)
    est = compopt.ContrastiveEstimator(names["RunningMean"](9), compopt.FixedTemperature(0.5), dtype=torch.float64)
    z1, z2 = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    control = compopt.DCLEstimator(0.5)
    for _ in range(3):  # the features stay, so their mean is the batch's own estimate
        a, b = (z.clone().requires_grad_() for z in (z1, z2))
        est(a, b, torch.arange(5)).backward()
        est.step()
        assert torch.allclose(torch.autograd.grad(control(b, a, torch.arange(5)), b)[0], b.grad)
    assert est.read(torch.arange(6))["count"].tolist() == [3, 3, 3, 3, 3, 0]


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_normalizer_of_the_page_on_extending(mode):
    """Where the batch is the data set, its first estimate is exact."""
    scope = {"__name__": "running_mean"}
    exec(blocks(ROOT / "docs" / "extending.md", "python")[0], scope)
    est = compopt.ContrastiveEstimator(scope["RunningMean"](12), compopt.FixedTemperature(0.3), mode=mode)
    z1, z2 = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0)).unbind()
    assert compopt.diagnostics.gradient_error(est, z1, z2, batch_size=12)["relative"] < 1e-5
    est(z1.requires_grad_(), z2, torch.arange(12)).backward()
    est.step()
    assert est.read(torch.arange(12))["count"].tolist() == [1] * 12
