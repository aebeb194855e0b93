"""Data for the tests of this folder; without open_clip there are no tests."""

from importlib.util import find_spec

import pytest

from tests.open_clip import tiny

collect_ignore_glob = [] if find_spec("open_clip") else ["test_*.py"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A csv file of pairs."""
    return tiny.write_csv(tmp_path_factory.mktemp("csv"))
