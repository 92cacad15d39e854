"""The examples' code, for tests."""

import pathlib
import runpy
import types

DIRECTORY = pathlib.Path(__file__).parents[1] / "examples"


def load(name):
    """Return what examples/<name>.py defines."""
    return types.SimpleNamespace(**runpy.run_path(str(DIRECTORY / f"{name}.py")))
