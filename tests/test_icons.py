"""The icon data set, built from a package of a few hand-written icons without network."""

import io
import json
import subprocess
import tarfile

import pytest
import torch

from recipes import cache, icon_sets, icons
from recipes.icon_task import IconNames

pytest.importorskip("resvg")

SQUARE, DOT = '<path d="M2 2h20v20H2z"/>', '<circle cx="12" cy="12" r="5"/>'
BAR, CORNER = '<path d="M10 0h4v24h-4z"/>', '<path d="M0 0h12v12H0z"/>'
RING = '<circle cx="12" cy="12" r="8" fill="none" stroke="currentColor" stroke-width="3"/>'
WHITE = '<path fill="#fff" d="M0 12h24v12H0z"/>'


def icon_set(prefix, bodies, licence="MIT", category="UI 24px", **more):
    content = {name: {"body": body} | ({"hidden": True} if "gone" in name else {}) for name, body in bodies.items()}
    about = {"name": prefix, "license": {"spdx": licence}, "category": category}
    return {"prefix": prefix, "info": about, "icons": content, "width": 24, "height": 24, **more}


SETS = [
    icon_set(
        "fluent",
        {
            "phone-tablet-20-regular": SQUARE,
            "phone-tablet-24-regular": SQUARE + DOT,  # renders to the same picture
            "home-20-regular": DOT,
            "home-24-regular": BAR,
            "gone-20-regular": DOT,
            "huge-20-regular": "x" * (icon_sets.LARGEST + 1),
            "empty-20-regular": "<g/>",
            "broken-20-regular": "<path",
        },
        suffixes={"20-regular": "20", "24-regular": "24"},
    ),
    icon_set(
        "tabler",
        {"home-filled": CORNER, "moon": RING, "snow": WHITE},
        licence="CC0-1.0",
        aliases={
            "house": {"parent": "home-filled"},
            "casa": {"parent": "house"},
            "moon-turned": {"parent": "moon", "rotate": 1},
            "moon-filled": {"parent": "moon"},
        },
    ),
    icon_set(
        "ph",
        {"house-fill": CORNER, "moon-bold": DOT, "home": BAR},
        suffixes={"bold": "Bold"},
        aliases={"villa": {"parent": "house-fill"}, "house": {"parent": "moon-bold"}},
    ),
    icon_set("f7", {"moon-fill": CORNER, "snow": DOT}),
    icon_set("logos", {"acme": BAR}, category="Logos"),
    icon_set("noto", {"grinning-face": DOT}, category="Emoji"),
    icon_set("ps", {"home": DOT, "moon": RING}, licence="CC-BY-NC-4.0"),
]


def pack(path, sets=tuple(SETS)):
    with tarfile.open(path, "w:gz") as archive:
        for content in sets:
            text = json.dumps(content).encode()
            member = tarfile.TarInfo(f"package/json/{content['prefix']}.json")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("npm") / "icons.tgz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(packed, folder):
    return icons.load(folder, packed, progress=False)


def test_which_icons_are_shown_and_what_they_are_called(data):
    """ph:home has the same picture and name as fluent:home-24-regular and is left out."""
    captions = dict(zip(data.sources, [data.names[position] for position in data.caption], strict=True))
    assert captions == {
        "fluent:phone-tablet-20-regular": "phone tablet",
        "fluent:home-20-regular": "home",
        "fluent:home-24-regular": "home",
        "tabler:home-filled": "home",
        "tabler:moon": "moon",
        "tabler:snow": "snow",
        "ph:house-fill": "house",
        "ph:moon-bold": "moon",
        "f7:moon-fill": "moon",
        "f7:snow": "snow",
        "logos:acme": "acme",
        "noto:grinning-face": "grinning face",
    }


# -- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["none", "cut", "other version"])
def test_a_cache_is_read_again_and_a_damaged_one_is_built_anew(data, packed, folder, tmp_path, monkeypatch, damage):
    content = (folder / "icons.npz").read_bytes()
    (tmp_path / "icons.npz").write_bytes(content[:-99] if damage == "cut" else content)
    if damage == "other version":
        monkeypatch.setattr(icons, "FORMAT", icons.FORMAT + 1)
    built = []
    monkeypatch.setattr(icons, "build", lambda *args, build=icons.build: built.append(1) or build(*args))
    again = icons.load(tmp_path, packed, progress=False)
    assert again.sources == data.sources and again.aliases == data.aliases and torch.equal(again.images, data.images)
    assert bool(built) == (damage != "none") and not list(tmp_path.glob("*.tmp"))


# -- errors --------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    def load(file=None):
        icons.load(tmp_path, file, progress=False)

    with pytest.raises(cache.Unavailable, match="there is no file .*npm pack @iconify/json"):
        load(tmp_path / "none.tgz")
    (tmp_path / "text.tgz").write_text("no archive")
    with pytest.raises(cache.Unavailable, match="no complete @iconify/json package"):
        load(tmp_path / "text.tgz")
    with pytest.raises(cache.Unavailable, match="no icon sets"):
        load(pack(tmp_path / "empty.tgz", ()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(cache.Unavailable, match="npm, which is not installed.*--icons FILE"):
        load()
    failed = subprocess.CalledProcessError(1, "npm", stderr="npm error network\n")
    monkeypatch.setattr(icon_sets.subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(failed))
    with pytest.raises(cache.Unavailable, match="npm error network.*--icons FILE"):
        load()


# -- the task ------------------------------------------------------------------------------------------------------


def test_the_task_measures_held_out_families(data):
    task = IconNames(data)
    assert task.n == 6 and len(task.held_out_images) == 2
    assert [task.names[k] for k in task.candidates] == ["house", "moon"]
    assert [data.names[k] for k in task.classes] == ["home", "moon", "phone tablet", "snow"]
    assert task.classified.tolist() == [1] and task.label.tolist() == [1], "a house is none of them"
    assert IconNames(data, part="validation").right.tolist() == [0, 1]
    with pytest.raises(ValueError, match="part must be one of test, validation"):
        IconNames(data, part="train")
