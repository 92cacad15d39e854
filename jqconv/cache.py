"""What jqconv keeps on disk between processes: the choices it measured and the plans it built.

A new process that finds a convolution here measures and builds nothing. Nothing here needs
looking after: the least recently used entries make room for new ones, and what is missing or
damaged is built again. These functions are for looking at it, and for taking it elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

from jqconv import _policy
from jqconv._store import Store, Stored

__all__ = ["Entry", "clear", "entries", "export_to", "import_from", "path"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing that is kept for one convolution on one kind of device.

    Parameters
    ----------
    spec : str
        The convolution.
    kind : str
        ``"choice"``, the algorithm to use, or ``"plan"``, one algorithm built.
    device : str
        The kind of device, and the versions that it was measured or built with.
    algorithm : str
        The algorithm's text form.
    microseconds : float or None
        How long it took where it was measured; None where it was not.
    size : int
        Bytes on disk.
    last_used : float
        When it was last written or read, in seconds since the epoch.
    """

    spec: str
    kind: str
    device: str
    algorithm: str
    microseconds: float | None
    size: int
    last_used: float


def path() -> pathlib.Path | None:
    """Return the directory of the store, which may not exist yet, or None if it is off."""
    store = _policy.store()
    return None if store is None else store.root


def entries() -> list[Entry]:
    """Return what is kept, least recently used first; nothing if the store is off.

    Returns
    -------
    list of Entry
        The valid entries; damaged ones are left out.
    """
    store = _policy.store()
    return [] if store is None else [_entry(stored) for stored in store.entries()]


def clear() -> int:
    """Remove everything that is kept.

    Choices and plans that this process holds in memory stay; :func:`jqconv.clear_algorithms`
    forgets its choices.

    Returns
    -------
    int
        How many entries were removed; 0 if the store is off.
    """
    store = _policy.store()
    return 0 if store is None else store.clear()


def export_to(file: str | os.PathLike[str]) -> int:
    """Write everything that is kept into one zip file, for :func:`import_from` elsewhere.

    Parameters
    ----------
    file : path-like
        Where to; what is there is replaced, once the new file is whole.

    Returns
    -------
    int
        How many entries it holds.

    Raises
    ------
    OSError
        If the store cannot be read, or `file` not written.
    RuntimeError
        If the store is off.
    """
    return _required().export_to(file)


def import_from(file: str | os.PathLike[str]) -> int:
    """Add the entries of a file that :func:`export_to` wrote, in place of those here.

    They are of use where device and versions are the same. Plans contain compiled kernels, which
    run as they are: import only archives that you trust.

    Parameters
    ----------
    file : path-like
        The archive.

    Returns
    -------
    int
        How many entries were added.

    Raises
    ------
    ValueError
        If `file` is no such archive, something in it is no valid entry, or all of it is larger
        than the store may become. Then nothing of it is added.
    OSError
        If `file` cannot be read, or the store not written.
    RuntimeError
        If the store is off.
    """
    count = _required().import_from(file)
    _policy.choices_changed()
    return count


def _required() -> Store:
    store = _policy.store()
    if store is None:
        raise RuntimeError(
            "jqconv's store is off, so there is nothing to export from or import into; to switch "
            "it on, set JQCONV_CACHE_DIR or jqconv.config.update(cache_dir=...)"
        )
    return store


def _entry(stored: Stored) -> Entry:
    """Read what a record says; another version of jqconv may say less."""

    def text(name: str) -> str:
        return str(stored.record.get(name, ""))

    microseconds = stored.record.get("microseconds")
    return Entry(
        spec=text("spec"),
        kind=text("kind"),
        device=text("device"),
        algorithm=text("algorithm"),
        microseconds=float(microseconds) if isinstance(microseconds, int | float) else None,
        size=stored.size,
        last_used=stored.last_used,
    )
