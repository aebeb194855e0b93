"""The npm package ``@iconify/json``: its download, and the selection and captions of its icons.

The package contains one JSON file per icon set, with SVG bodies, names and a licence.  243 sets have 390,629 icons.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from recipes.cache import Unavailable
from recipes.icon_drawing import SIZE

PACKAGE, VERSION = "@iconify/json", "2.2.535"
DIGEST = "1a545f86fa224d6531d8fb101dcbe83aac2b28689a21cbed6fc68318a5af4d91"  # SHA-256 of the packed file
REMEDY = f"run `npm pack {PACKAGE}@{VERSION}` where that works, and pass the file with --icons FILE"
LARGEST = 60_000  # characters of a body; larger icons are illustrations and are left out

KINDS = ("interface", "logos", "emoji", "flags")

# Sets with a common design share artwork and are held out together.  Every other set is a separate family.
FAMILIES = {
    "boxicons": ("boxicons", "bx", "bxl", "bxs"),
    "coreui": ("cib", "cif", "cil"),
    "cryptocurrency": ("cryptocurrency*",),
    "devicon": ("devicon*",),
    "emojione": ("emojione*",),
    "entypo": ("entypo*",),
    "feather": ("feather", "lucide*"),
    "fluent-emoji": ("fluent-emoji*",),
    "fluent": ("fluent", "fluent-color", "fluent-mdl2"),
    "font-awesome": ("fa", "fa-*", "fa6-*", "fa7-*", "la"),
    "glyphs": ("glyphs*",),
    "heroicons": ("heroicons*", "sidekickicons"),
    "iconpark": ("icon-park*",),
    "ion": ("ion", "famicons"),
    "material": ("ic", "material-symbols*", "mdi", "mdi-light", "zmdi"),
    "noto": ("noto*",),
    "pepicons": ("pepicons*",),
    "solar": ("solar", "reicon"),
    "streamline": ("streamline*",),
    "thesvg": ("thesvg*",),
    "token": ("token*",),
    "unicons": ("uil", "uim", "uis", "uit"),
}
FLAGS = ("cif", "circle-flags", "flag", "flagpack")
EMOJI = ("fluent-emoji*",)
LOGOS = ("*-brands", "devicon-*")

# Final words of a name that denote a style in any set; the prefixes and suffixes of the set are removed first.
STYLES = ("duotone", "fill", "filled", "outline", "outlined", "regular", "rounded", "solid", "twotone")


class Icon(NamedTuple):
    """One icon as SVG."""

    name: str  # set:name, as in the package
    caption: str
    aliases: tuple[str, ...]  # captions of its other names
    family: str
    kind: str
    licence: str
    svg: str


@contextmanager
def package(file: Path | None) -> Iterator[Path]:
    """Yield the packed package: ``file``, or one that npm downloads into a temporary folder."""
    if file is not None:
        yield file
        return
    print(f"fetching {PACKAGE} {VERSION} with npm pack: 104 MB, removed again once the icons are drawn")
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--silent"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise Unavailable(f"the icons need npm, which is not installed: install Node.js, or {REMEDY}") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
            raise Unavailable(f"`{' '.join(command)}` failed ({last}); {REMEDY}") from error
        (packed,) = Path(folder).glob("*.tgz")
        if digest(packed) != DIGEST:
            raise Unavailable(f"npm delivered another {PACKAGE} {VERSION} than the pinned one; {REMEDY}")
        yield packed


def digest(file: Path) -> str:
    """Return the SHA-256 of a packed package."""
    if not file.is_file():
        raise Unavailable(f"there is no file {file}; {REMEDY}")
    with file.open("rb") as content:
        sha = hashlib.sha256()
        while block := content.read(1 << 20):
            sha.update(block)
        return sha.hexdigest()


def icons(packed: Path, left_out: Counter[str], coloured: bool = False) -> Iterator[Icon]:
    """Yield every selected icon, set by set in the order of the file; ``coloured``: only from sets in colour."""
    try:
        with tarfile.open(packed) as archive:
            members = [member for member in archive if re.fullmatch(r"package/json/[^/]+\.json", member.name)]
            for member in sorted(members, key=lambda member: member.offset):  # one pass through the file
                content = json.load(archive.extractfile(member))
                if content["info"].get("palette") or not coloured:
                    yield from _of_set(content, left_out)
    except (tarfile.TarError, EOFError, OSError, KeyError, json.JSONDecodeError) as error:
        raise Unavailable(f"{packed} is no complete {PACKAGE} package ({error}); {REMEDY}") from error
    if not members:
        raise Unavailable(f"{packed} has no icon sets in package/json; {REMEDY}")


def _of_set(content: Mapping[str, Any], left_out: Counter[str]) -> Iterator[Icon]:
    prefix, about = content["prefix"], content["info"]
    licence = about.get("license", {})
    licence = licence.get("spdx") or licence.get("title") or "unknown"
    if "-NC" in licence:
        left_out["non-commercial"] += len(content["icons"])
        return
    aliases = _aliases(content)
    for name, icon in content["icons"].items():
        if icon.get("hidden"):
            left_out["hidden"] += 1
        elif len(icon["body"]) > LARGEST:
            left_out["too large"] += 1
        else:
            caption = caption_of(name, content)
            others = tuple(sorted({caption_of(other, content) for other in aliases.get(name, ())} - {caption}))
            where = (family_of(prefix), kind_of(prefix, about.get("category")), licence)
            yield Icon(f"{prefix}:{name}", caption, others, *where, _svg(icon, content))


def _aliases(content: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the other names of each icon, without aliases that also rotate or mirror it."""
    names: dict[str, list[str]] = {}
    known = content.get("aliases", {})
    for name, alias in known.items():
        parent, seen = alias, {name}
        while set(parent) == {"parent"} and parent["parent"] in known and parent["parent"] not in seen:
            seen.add(parent["parent"])
            parent = known[parent["parent"]]
        if set(parent) == {"parent"}:
            names.setdefault(parent["parent"], []).append(name)
    return names


def _svg(icon: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    left, top = (icon.get(side, content.get(side, 0)) for side in ("left", "top"))
    width, height = (icon.get(side, content.get(side, 16)) for side in ("width", "height"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{SIZE}" '
        f'height="{SIZE}" viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def caption_of(name: str, content: Mapping[str, Any]) -> str:
    """Return the words of a name without its style: ``phone-tablet-20-regular`` becomes "phone tablet"."""
    for suffix in sorted(content.get("suffixes", {}), key=len, reverse=True):
        if suffix and name.endswith(f"-{suffix}"):
            name = name.removesuffix(f"-{suffix}")
            break
    for prefix in content.get("prefixes", {}):
        if prefix and name.startswith(f"{prefix}-"):
            name = name.removeprefix(f"{prefix}-")
            break
    words = [word for word in name.split("-") if word]
    while len(words) > 1 and words[-1] in STYLES:
        words.pop()
    return " ".join(words)


def family_of(prefix: str) -> str:
    return next((family for family, sets in FAMILIES.items() if _among(prefix, sets)), prefix)


def kind_of(prefix: str, category: str | None) -> str:
    """Return the kind of a set's icons, one of KINDS.  The names of logos, including file types, are not guessable."""
    if _among(prefix, FLAGS):
        return "flags"
    if category == "Emoji" or _among(prefix, EMOJI):
        return "emoji"
    if category in ("Logos", "Programming") or _among(prefix, LOGOS):
        return "logos"
    return "interface"


def _among(prefix: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(prefix, pattern) for pattern in patterns)
