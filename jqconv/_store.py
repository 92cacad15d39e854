r"""A directory of small entries that many processes share.

It keeps what was measured and built, so that a new process loads it in milliseconds. An entry is
one file, named after its key::

    jqconv-store 1\n                                    the format and its version
    {"key": ..., "record": {...}, "blob": length}\n     JSON
    blob
    SHA-256 of all of the above, 32 bytes

There are no locks. A file is written beside its place and then renamed into it, so a reader sees
all of it or nothing, and every file may vanish at any moment. Nothing is synced to the disk
either: what a crash leaves half-written fails its digest, and is built again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
import stat
import tempfile
import time
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO

FORMAT = 1

_MAGIC = f"jqconv-store {FORMAT}\n".encode()
_ANY_MAGIC = re.compile(rb"jqconv-store (\d{1,9})\n")
_DIGEST_SIZE = hashlib.sha256().digest_size

_ENTRY = re.compile(r"[0-9a-f]{32}\.jqc", re.ASCII)
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.jqc\.[0-9a-f]{16}\.tmp", re.ASCII)

#: Seconds after which a temporary file was left behind by a process that died.
_STALE = 3600


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept under one key.

    Parameters
    ----------
    key : str
        What the entry is found by.
    record : mapping
        What JSON can hold, and as JSON gives it back (tuples as lists).
    blob : bytes
        The rest.
    """

    key: str
    record: Mapping[str, Any]
    blob: bytes


@dataclasses.dataclass(frozen=True)
class Stored:
    """An entry as a listing shows it.

    Parameters
    ----------
    key : str
        What the entry is found by.
    record : mapping
        Its record.
    size : int
        Bytes on disk.
    last_used : float
        When it was last written or read, in seconds since the epoch.
    """

    key: str
    record: Mapping[str, Any]
    size: int
    last_used: float


class Store:
    """Entries in a directory, the least recently used of which make room for new ones.

    Nothing is touched before the first call. A run never fails because of its store: `get`, `put`,
    `entries` and `clear` warn, once for each store, where its directory cannot be used.

    Parameters
    ----------
    root : Path
        The directory; the first entry creates it, for its user alone.
    limit : int
        Most bytes that all entries together may take.
    """

    def __init__(self, root: pathlib.Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._reported = False

    def get(self, key: str) -> Entry | None:
        """Return the entry of `key`, now the most recently used one, or None.

        A damaged file is removed, with a warning; one of another format's version is left to be
        overwritten.
        """
        path = self.root / _file_name(key)
        try:
            entry = _decode(path.read_bytes(), path.name)
            if entry.key != key:
                raise ValueError(f"it holds the entry of {entry.key!r}")
        except (FileNotFoundError, _OtherFormat):
            return None
        except ValueError as error:
            _discard(path, error)
            return None
        except OSError as error:
            self._report(error)
            return None
        with contextlib.suppress(OSError):  # read-only, or removed just now
            os.utime(path)
        return entry

    def put(self, key: str, record: Mapping[str, Any], blob: bytes = b"") -> None:
        """Keep an entry, in place of what `key` had, and evict others where the limit asks for it.

        An entry that is larger than the limit all by itself is not written.

        Raises
        ------
        TypeError
            If JSON cannot hold `record`.
        """
        content = _encode(Entry(key, record, blob))
        if len(content) > self.limit:
            return
        name = _file_name(key)
        try:
            self._write(name, content)
            self._evict(keep={name})
        except OSError as error:
            self._report(error)

    def entries(self) -> list[Stored]:
        """Return all valid entries, least recently used first."""
        listed = []
        try:
            for entry, content, last_used in self._valid():
                listed.append(Stored(entry.key, entry.record, len(content), last_used))
        except OSError as error:
            self._report(error)
        return listed

    def clear(self) -> int:
        """Remove all entries, valid or not, and return how many there were."""
        removed = 0
        try:
            for path, _ in self._files(_ENTRY):
                removed += _remove(path)
        except OSError as error:
            self._report(error)
        return removed

    def obstacle(self) -> OSError | None:
        """Return why no entry can be written, or None where one can; writes none."""
        try:
            self._make_root()
            with tempfile.TemporaryFile(dir=self.root):
                return None
        except OSError as error:
            return error

    def export_to(self, file: str | os.PathLike[str]) -> int:
        """Write all valid entries into one zip file, whole or not at all.

        Returns
        -------
        int
            How many entries it holds.

        Raises
        ------
        OSError
            If the store cannot be read, or `file` not written.
        """
        count = 0
        with (
            _replacing(pathlib.Path(file)) as target,
            zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for entry, content, _ in self._valid():
                archive.writestr(_file_name(entry.key), content)
                count += 1
        return count

    def import_from(self, file: str | os.PathLike[str]) -> int:
        """Add the entries of a file that :meth:`export_to` wrote, in place of those here.

        Plans contain compiled kernels, which run as they are, and the digests only tell damage, not
        who wrote them: import only archives that you trust.

        Returns
        -------
        int
            How many entries were added.

        Raises
        ------
        ValueError
            If `file` is no such archive, something in it is no valid entry, or all of it is larger
            than the limit. Then nothing of it is added.
        OSError
            If `file` cannot be read, or the store not written.
        """
        contents = _check_archive(pathlib.Path(file), self.limit)
        for name, content in contents.items():
            self._write(name, content)
        self._evict(keep=contents)
        return len(contents)

    def _files(self, names: re.Pattern[str]) -> list[tuple[pathlib.Path, os.stat_result]]:
        """Return the files with such names, least recently used first."""
        try:
            listing = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = []
        for path in (self.root / name for name in listing if names.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append((path, status))
        return sorted(found, key=lambda file: file[1].st_mtime_ns)

    def _valid(self) -> Iterator[tuple[Entry, bytes, float]]:
        """Yield each valid entry, its file's content and when it was last used."""
        for path, status in self._files(_ENTRY):
            try:
                content = path.read_bytes()
                entry = _decode(content, path.name)
            except (FileNotFoundError, ValueError):
                continue
            yield entry, content, status.st_mtime

    def _make_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        self._make_root()
        with _replacing(self.root / name) as file:
            file.write(content)

    def _evict(self, keep: Collection[str]) -> None:
        """Remove the least recently used entries but `keep` while all exceed the limit."""
        files = self._files(_ENTRY)
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self.limit:
                break
            if path.name not in keep:
                _remove(path)
                total -= status.st_size
        for path, status in self._files(_TEMPORARY):
            if time.time() - status.st_mtime > _STALE:
                _remove(path)

    def _report(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            warnings.warn(
                f"jqconv cannot use its store in {self.root} ({error}); what it does not find or "
                "keep there, each process measures and builds again",
                RuntimeWarning,
                stacklevel=3,
            )


class _OtherFormat(ValueError):
    """The file is of another version of the format."""


def _file_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] + ".jqc"


def _encode(entry: Entry) -> bytes:
    header = {"key": entry.key, "record": dict(entry.record), "blob": len(entry.blob)}
    body = _MAGIC + json.dumps(header).encode() + b"\n" + entry.blob
    return body + hashlib.sha256(body).digest()


def _decode(content: bytes, name: str) -> Entry:
    """Return the entry in a file of that name and content.

    Raises
    ------
    _OtherFormat
        If it is of another version of the format.
    ValueError
        If it is anything else than a whole entry in its place; the message says what is wrong.
    """
    magic = _ANY_MAGIC.match(content)
    if magic is None:
        raise ValueError("it does not begin as an entry of a jqconv store")
    if magic[0] != _MAGIC:
        raise _OtherFormat(f"it has format {int(magic[1])}; this jqconv reads format {FORMAT}")
    body, digest = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("its digest does not match: it was changed or cut short")
    header, _, blob = body[len(_MAGIC) :].partition(b"\n")
    entry, length = _parse_header(header, blob)
    if length != len(blob):
        raise ValueError(f"it holds {len(blob)} bytes after its header, which says {length!r}")
    if _file_name(entry.key) != name:
        raise ValueError(f"it holds the entry of {entry.key!r}, whose file has another name")
    return entry


def _parse_header(header: bytes, blob: bytes) -> tuple[Entry, Any]:
    """Return the entry and the length of its blob as the header says it."""
    try:
        fields = json.loads(header)
        key, record, length = fields["key"], fields["record"], fields["blob"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is not readable: {error!r}") from error
    if not isinstance(key, str) or not isinstance(record, dict):
        raise ValueError("its header's key is no text, or its record no mapping")
    return Entry(key, record, blob), length


def _check_archive(file: pathlib.Path, limit: int) -> dict[str, bytes]:
    """Return the names and contents of an archive's entries; raise where one is not valid."""
    contents: dict[str, bytes] = {}
    for member, content in _read_archive(file, limit):
        name = pathlib.PurePosixPath(member).name  # whatever folders it was packed in
        try:
            _decode(content, name)
            if name in contents:
                raise ValueError("it is there twice")
        except ValueError as error:
            raise ValueError(
                f"{member!r} in {file} is no valid entry of a jqconv store: {error}; nothing of "
                "the archive was added"
            ) from error
        contents[name] = content
    return contents


def _read_archive(file: pathlib.Path, limit: int) -> list[tuple[str, bytes]]:
    """Return the names and contents of an archive's members, at most `limit` bytes of them."""
    with file.open("rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                total = sum(member.file_size for member in members)
                if total <= limit:  # asked before anything is unpacked
                    return [(member.filename, archive.read(member)) for member in members]
        except Exception as error:  # zipfile has a dozen kinds for what is damaged or exotic
            raise ValueError(
                f"{file} is no readable archive of a jqconv store ({error}); expected a file that "
                "jqconv.cache.export_to wrote"
            ) from error
    raise ValueError(
        f"{file} holds {total} bytes of entries, more than the store's limit of {limit}; raise the "
        "limit to import it"
    )


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Give a new file that becomes `path` at the end of the block, or vanishes if that raises."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error to report is the first
            temporary.unlink()
        raise


def _remove(path: pathlib.Path) -> bool:
    """Remove a file; False where another process was faster."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _discard(path: pathlib.Path, reason: ValueError) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    warnings.warn(
        f"{path} in jqconv's store is damaged ({reason}); it is ignored, and what it held is "
        "measured and built again",
        RuntimeWarning,
        stacklevel=3,
    )
