"""Build backend (PEP 517): scikit-build-core, plus the packages whose headers the extension needs.

They are asked for here and not in pyproject.toml for two reasons. A package without the extension
(``-C cmake.define.JQCONV_CUDA=OFF``) needs none of them. And cuDNN's headers come in a package that
requires nvidia-cublas, 420 MB that no compiler reads: an empty package of that name takes its
place, and only a backend can say where that lies.
"""

import sys
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_HERE = Path(__file__).resolve().parent
_OPTION = "cmake.define.JQCONV_CUDA"
_DEFAULT = "ON" if sys.platform == "linux" else "OFF"  # the header packages exist for Linux
_FALSE = {"", "0", "OFF", "NO", "N", "FALSE"}
_PURE = {"wheel.cmake": "false", "wheel.py-api": "py3"}


def _has_extension(settings):
    return str(settings.get(_OPTION, _DEFAULT)).upper() not in _FALSE


def _completed(settings):
    """Without the extension there is nothing to configure or compile: a py3-none-any wheel."""
    settings = settings or {}
    return settings if _has_extension(settings) else settings | _PURE


def _headers(settings):
    if not _has_extension(settings or {}):
        return []
    lines = (_HERE / "headers.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    return [*packages, f"nvidia-cublas @ {(_HERE / 'stubs' / 'nvidia-cublas').as_uri()}"]


def get_requires_for_build_wheel(config_settings=None):
    others = build.get_requires_for_build_wheel(_completed(config_settings))
    return others + _headers(config_settings)


def get_requires_for_build_editable(config_settings=None):
    others = build.get_requires_for_build_editable(_completed(config_settings))
    return others + _headers(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return build.prepare_metadata_for_build_wheel(metadata_directory, _completed(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return build.prepare_metadata_for_build_editable(
        metadata_directory, _completed(config_settings)
    )


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return build.build_wheel(wheel_directory, _completed(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return build.build_editable(wheel_directory, _completed(config_settings), metadata_directory)
