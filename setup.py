"""The fields of pyproject.toml that depend on the address of the repository: the long description and the links.

The address is ``repository`` in ``[tool.compopt]`` of pyproject.toml. While it is empty, the long description has no
links into the repository.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:)([^()]+)\)")


def setting(name: str) -> str:
    """Return a string of pyproject.toml by the name of its line (tomllib needs Python 3.11)."""
    return re.search(rf'^{name} = "(.*?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]


def long_description(readme: str, repository: str, version: str) -> str:
    """Return README with absolute links, or without links into the repository if that has no address."""

    def absolute(link: re.Match) -> str:
        picture, words, target = link.groups()
        if not repository:
            return "" if picture else words
        target = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return LINK.sub(absolute, readme)


def urls(repository: str, version: str) -> dict[str, str]:
    """Return the links of the project's page in a package index."""
    pages = {"Source": "", "Issues": "/issues", "Changelog": f"/blob/v{version}/CHANGELOG.md"}
    return {name: repository + page for name, page in pages.items()} if repository else {}


if __name__ == "__main__":
    address, number = setting("repository"), setting("version")
    setup(
        long_description=long_description((ROOT / "README.md").read_text(encoding="utf-8"), address, number),
        long_description_content_type="text/markdown",
        project_urls=urls(address, number),
    )
