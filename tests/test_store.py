"""The directory that processes share: what is put is got, and damage, races and full disks pass."""

import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import stat
import subprocess
import sys
import time
import warnings
import zipfile

import pytest


def load_alone(name):
    """The module without its package, which would bring JAX into every process started below."""
    path = pathlib.Path(importlib.util.find_spec("jqconv").origin).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_store = load_alone("_store")
Entry, Store = _store.Entry, _store.Store

RECORD = {"kind": "plan", "spec": "direction=fprop", "microseconds": 7.5, "knobs": [1, None]}
BLOB = bytes(range(256))
MIB = 2**20


@pytest.fixture
def root(tmp_path):
    return tmp_path / "parent" / "store"


@pytest.fixture
def store(root):
    return Store(root, MIB)


def path_of(store, key):
    return store.root / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".jqc")


def put_file(store, key="key"):
    store.put(key, RECORD, BLOB)
    return path_of(store, key)


def set_age(store, key, seconds):
    then = time.time() - seconds
    os.utime(path_of(store, key), (then, then))


def keys(store):
    return [stored.key for stored in store.entries()]


def total_size(store):
    return sum(path.stat().st_size for path in store.root.iterdir())


def test_the_module_needs_the_standard_library_alone():
    command = [sys.executable, "-I", "-S", "-W", "error", _store.__file__]
    subprocess.run(command, check=True, timeout=60)


class TestRoundTrip:
    @pytest.mark.parametrize("key", ["key", "", "two\nlines", "ключ", "../../key", "k" * 5000])
    @pytest.mark.parametrize("blob", [b"", b"\n", BLOB, b"\n{}\n" + bytes(100_000)])
    def test_what_is_put_is_got(self, store, key, blob):
        store.put(key, RECORD, blob)
        assert store.get(key) == Entry(key, RECORD, blob)

    def test_another_store_of_the_directory_gets_it(self, store, root):
        store.put("key", RECORD)
        assert Store(root, MIB).get("key") == Entry("key", RECORD, b"")

    def test_the_last_put_is_got(self, store):
        store.put("key", {"first": 1}, BLOB)
        store.put("key", {"second": 2}, b"")
        assert store.get("key") == Entry("key", {"second": 2}, b"")
        assert len(store.entries()) == 1

    def test_a_missing_key_is_none(self, store):
        assert store.get("key") is None
        store.put("other", RECORD)
        assert store.get("key") is None

    def test_a_record_that_json_cannot_hold_is_refused(self, store, root):
        with pytest.raises(TypeError, match="bytes"):
            store.put("key", {"field": b""})
        assert not root.exists()


class TestDirectory:
    def test_only_put_creates_it(self, store, root):
        assert store.get("key") is None
        assert store.entries() == []
        assert store.clear() == 0
        assert not root.parent.exists()

    def test_it_is_for_its_user_alone(self, store, root):
        store.put("key", RECORD)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700

    def test_it_holds_one_file_for_each_key(self, store, root):
        paths = {put_file(store, key) for key in ("a", "b", "a")}
        assert set(root.iterdir()) == paths

    def test_entries_are_listed_least_recently_used_first(self, store):
        for age, key in enumerate("abc"):
            put_file(store, key)
            set_age(store, key, 100 * (age + 1))
        before = time.time()
        assert keys(store) == ["c", "b", "a"]
        (oldest, *_) = store.entries()
        assert oldest.record == RECORD
        assert oldest.size == path_of(store, "c").stat().st_size
        assert oldest.last_used == pytest.approx(before - 300, abs=50)

    def test_invalid_entries_are_not_listed(self, store):
        put_file(store, "good")
        put_file(store, "bad").write_bytes(b"bad")
        assert keys(store) == ["good"]

    def test_clear_removes_every_entry(self, store):
        put_file(store, "good")
        put_file(store, "bad").write_bytes(b"bad")
        assert store.clear() == 2
        assert store.entries() == []
        assert store.get("good") is None

    def test_files_of_other_names_are_left_alone(self, store, root, tmp_path):
        root.mkdir(parents=True)
        names = ["README", "key.jqc", "0" * 31 + ".jqc", "A" * 32 + ".jqc", "0" * 32 + ".jqc.tmp"]
        for name in names:
            (root / name).write_bytes(bytes(MIB))
            os.utime(root / name, (0, 0))
        (root / ("0" * 32 + ".jqc")).mkdir()
        store.put("key", RECORD)
        assert keys(store) == ["key"]
        assert store.export_to(tmp_path / "archive.zip") == 1
        assert store.clear() == 1
        assert {path.name for path in root.iterdir()} == {*names, "0" * 32 + ".jqc"}


def places(content):
    """One index into every part of a file."""
    magic, header = content.index(b"\n"), content.index(b"\n", content.index(b"\n") + 1)
    return {
        "first byte": 0,
        "magic": 5,
        "version": magic - 1,
        "end of magic": magic,
        "header": (magic + header) // 2,
        "end of header": header,
        "blob": header + 100,
        "end of blob": len(content) - 33,
        "digest": len(content) - 32,
        "last byte": len(content) - 1,
    }


PLACES = list(places(b"\n\n"))


class TestDamage:
    def assert_ignored(self, store, path):
        """With one warning that names the file; then the key is as good as new."""
        with pytest.warns(RuntimeWarning, match="ignored, and what it held") as caught:
            assert store.get("key") is None
        (warning,) = caught
        assert str(path) in str(warning.message)
        assert warning.filename == __file__
        assert not path.exists()
        assert store.get("key") is None
        store.put("key", RECORD, BLOB)
        assert store.get("key") == Entry("key", RECORD, BLOB)

    @pytest.mark.parametrize("place", PLACES)
    def test_a_changed_byte(self, store, place):
        path = put_file(store)
        content = bytearray(path.read_bytes())
        content[places(content)[place]] ^= 0x80
        path.write_bytes(content)
        self.assert_ignored(store, path)

    @pytest.mark.parametrize("place", PLACES)
    def test_a_file_cut_short(self, store, place):
        path = put_file(store)
        content = path.read_bytes()
        path.write_bytes(content[: places(content)[place]])
        self.assert_ignored(store, path)

    def test_a_file_with_more_at_its_end(self, store):
        path = put_file(store)
        path.write_bytes(path.read_bytes() + b"\0")
        self.assert_ignored(store, path)

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b"\xff",
            b"[]",
            b"null",
            b"[" * 100_000,
            b'{"key": "key", "blob": 0}',
            b'{"key": "key", "record": [], "blob": 0}',
            b'{"key": 1, "record": {}, "blob": 0}',
            b'{"key": "key", "record": {}, "blob": 1}',
            b'{"key": "key", "record": {}, "blob": "0"}',
            b'{"key": "\\ud800", "record": {}, "blob": 0}',
        ],
    )
    def test_a_header_that_says_something_else(self, store, header):
        path = put_file(store)
        body = b"jqconv-store 1\n" + header + b"\n"
        path.write_bytes(body + hashlib.sha256(body).digest())
        self.assert_ignored(store, path)

    def test_the_file_of_another_key(self, store):
        path = path_of(store, "key")
        put_file(store, "other").rename(path)
        self.assert_ignored(store, path)

    def test_two_keys_of_one_name(self, store, monkeypatch):
        monkeypatch.setattr(_store, "_file_name", lambda key: "0" * 32 + ".jqc")
        store.put("other", RECORD)
        self.assert_ignored(store, store.root / ("0" * 32 + ".jqc"))

    @pytest.mark.parametrize("version", [b"0", b"2", b"17"])
    def test_another_version_is_ignored_silently(self, store, version):
        path = put_file(store)
        content = path.read_bytes().replace(b"jqconv-store 1", b"jqconv-store " + version, 1)
        path.write_bytes(content)
        assert store.get("key") is None
        assert store.entries() == []
        assert path.read_bytes() == content
        store.put("key", RECORD, BLOB)
        assert store.get("key") == Entry("key", RECORD, BLOB)


class TestUnusableDirectory:
    def assert_reported_once(self, root, call):
        with pytest.warns(RuntimeWarning, match="cannot use its store") as caught:
            call()
        (warning,) = caught
        assert str(root) in str(warning.message)
        assert warning.filename == __file__
        call()

    @pytest.mark.parametrize("below", ["", "below"])
    def test_a_file_in_its_place(self, tmp_path, below):
        (tmp_path / "file").write_bytes(b"mine")
        root = tmp_path / "file" / below
        calls = {
            "get": lambda store: store.get("key") is None,
            "put": lambda store: store.put("key", RECORD, BLOB) is None,
            "entries": lambda store: store.entries() == [],
            "clear": lambda store: store.clear() == 0,
        }
        for call in calls.values():
            store = Store(root, MIB)
            self.assert_reported_once(root, functools.partial(call, store))
            assert all(other(store) for other in calls.values())
        assert (tmp_path / "file").read_bytes() == b"mine"

    def test_the_obstacle_is_told_and_nothing_kept(self, tmp_path, store, root):
        assert store.obstacle() is None
        assert list(root.iterdir()) == []
        (tmp_path / "file").write_bytes(b"mine")
        obstacle = Store(tmp_path / "file" / "below", MIB).obstacle()
        assert isinstance(obstacle, OSError)
        assert "file" in str(obstacle)

    def test_what_a_user_asks_for_fails_aloud(self, store, root, tmp_path):
        put_file(store)
        archive = tmp_path / "archive.zip"
        store.export_to(archive)
        shutil.rmtree(root)
        root.write_bytes(b"mine")
        with pytest.raises(OSError, match=root.name):
            store.import_from(archive)
        before = archive.read_bytes()
        with pytest.raises(OSError, match=root.name):
            store.export_to(archive)
        assert archive.read_bytes() == before
        assert {path.name for path in tmp_path.iterdir()} == {"parent", "archive.zip"}

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everywhere")
    @pytest.mark.parametrize(("mode", "readable"), [(0o500, True), (0o000, False)])
    def test_no_permission(self, store, root, mode, readable):
        put_file(store)
        root.chmod(mode)
        try:
            self.assert_reported_once(root, lambda: store.put("new", RECORD))
            assert (store.get("key") is not None) == readable
            assert keys(store) == ["key"] * readable
            assert store.get("new") is None
        finally:
            root.chmod(0o700)
        assert keys(store) == ["key"]

    def test_a_full_disk(self, store, root, monkeypatch):
        put_file(store)

        def full(path, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pathlib.Path, "replace", full)
        self.assert_reported_once(root, lambda: store.put("new", RECORD))
        assert list(root.iterdir()) == [path_of(store, "key")]
        assert store.get("key") == Entry("key", RECORD, BLOB)


class TestEviction:
    @pytest.fixture
    def size(self, tmp_path):
        """Of the file of an entry with a key of one letter."""
        return put_file(Store(tmp_path / "scratch", MIB), "x").stat().st_size

    def test_the_least_recently_put_goes_first(self, root, size):
        store = Store(root, 3 * size)
        for age, key in enumerate("abc"):
            put_file(store, key)
            set_age(store, key, 100 - age)
        put_file(store, "d")
        assert keys(store) == ["b", "c", "d"]

    def test_a_get_is_a_use(self, root, size):
        store = Store(root, 3 * size)
        for age, key in enumerate("abc"):
            put_file(store, key)
            set_age(store, key, 100 - age)
        assert store.get("a")
        put_file(store, "d")
        assert set(keys(store)) == {"a", "c", "d"}

    def test_the_new_entry_stays_even_where_the_others_are_from_the_future(self, root, size):
        store = Store(root, 2 * size)
        for key in "abc":
            put_file(store, key)
            set_age(store, key, -1000)
        assert "c" in keys(store)
        assert len(keys(store)) == 2

    def test_several_go_where_one_needs_their_room(self, root, size):
        store = Store(root, 3 * size)
        for age, key in enumerate("abc"):
            put_file(store, key)
            set_age(store, key, 100 - age)
        store.put("d", RECORD, BLOB + bytes(size))
        assert keys(store) == ["c", "d"]

    def test_all_entries_together_keep_to_the_limit(self, store, root):
        store.limit = 5000
        lengths = random.Random(0)
        for i in range(100):
            store.put(f"key {i}", RECORD, bytes(lengths.randrange(2000)))
            assert store.get(f"key {i}")
            assert total_size(store) <= 5000
        assert len(keys(store)) > 1

    def test_what_is_larger_than_the_limit_is_not_written(self, root, size):
        store = Store(root, size)
        put_file(store, "a")
        store.put("b", RECORD, BLOB + b"\0")
        assert keys(store) == ["a"]

    def test_damaged_entries_take_part(self, root, size):
        store = Store(root, 2 * size)
        put_file(store, "a").write_bytes(bytes(size))
        set_age(store, "a", 100)
        put_file(store, "b")
        put_file(store, "c")
        assert not path_of(store, "a").exists()

    def test_temporary_files_go_once_they_are_stale(self, store, root):
        path = put_file(store, "a")
        stale, fresh = (path.with_name(f"{path.name}.{c * 16}.tmp") for c in "ab")
        for temporary, age in ((stale, 3700), (fresh, 3500)):
            temporary.write_bytes(b"half")
            os.utime(temporary, (time.time() - age,) * 2)
        put_file(store, "b")
        assert not stale.exists()
        assert fresh.exists()

    def test_an_entry_may_vanish_at_any_moment(self, root, size, monkeypatch):
        """Between the listing of the directory and each step after it."""
        store = Store(root, 2 * size)
        for key in "ab":
            put_file(store, key)
        listdir = os.listdir

        def list_then_remove(path):
            names = listdir(path)
            path_of(store, "a").unlink(missing_ok=True)
            return names

        monkeypatch.setattr(os, "listdir", list_then_remove)
        assert keys(store) == ["b"]
        put_file(store, "c")
        put_file(store, "a")
        assert store.clear() == 2


WORKERS, OPERATIONS, SHARED_KEYS, SHARED_LIMIT = 4, 50, 8, 20_000


def set_barrier(barrier):
    global together
    together = barrier


def blob_for(record):
    seed = hashlib.sha256(json.dumps(record).encode()).digest()
    return seed * (1 + seed[0])


def use_store(root, worker):
    """Put and get at random; return how many entries were found and how many were not."""
    warnings.simplefilter("error")
    store, choices = Store(root, SHARED_LIMIT), random.Random(worker)
    hits = misses = 0
    together.wait(timeout=100)
    for operation in range(OPERATIONS):
        key = f"key {choices.randrange(SHARED_KEYS)}"
        record = {"key": key, "worker": worker, "operation": operation}
        store.put(key, record, blob_for(record))
        key = f"key {choices.randrange(SHARED_KEYS)}"
        entry = store.get(key)
        if entry is None:
            misses += 1
        else:
            hits += 1
            assert (entry.key, entry.record["key"]) == (key, key)
            assert entry.blob == blob_for(entry.record)
        store.entries()
    assert "jax" not in sys.modules
    return hits, misses


def test_processes_read_and_write_at_once(root):
    context = multiprocessing.get_context("spawn")
    arguments = [(root, worker) for worker in range(WORKERS)]
    with context.Pool(WORKERS, set_barrier, (context.Barrier(WORKERS),)) as pool:
        counts = pool.starmap(use_store, arguments, chunksize=1)
    hits, misses = (sum(column) for column in zip(*counts, strict=True))
    assert hits + misses == WORKERS * OPERATIONS
    assert hits
    assert misses, "nothing was evicted: lower SHARED_LIMIT"
    store = Store(root, SHARED_LIMIT)
    assert total_size(store) <= SHARED_LIMIT
    assert len(keys(store)) == len(list(root.iterdir()))


class TestArchive:
    @pytest.fixture
    def archive(self, tmp_path):
        return tmp_path / "archive.zip"

    @pytest.fixture
    def target(self, tmp_path):
        return Store(tmp_path / "target", MIB)

    def assert_refused(self, target, archive, match):
        target.put("before", RECORD)
        with pytest.raises(ValueError, match=match) as caught:
            target.import_from(archive)
        assert str(archive) in str(caught.value)
        assert keys(target) == ["before"]
        assert len(list(target.root.iterdir())) == 1

    def content(self, store, key):
        return put_file(store, key).read_bytes()

    def test_round_trip(self, store, target, archive):
        for key in "abc":
            put_file(store, key)
        put_file(store, "bad").write_bytes(b"bad")
        assert store.export_to(archive) == 3
        target.put("a", {"old": 1})
        target.put("d", {"mine": 1})
        assert target.import_from(archive) == 3
        assert all(target.get(key) == Entry(key, RECORD, BLOB) for key in "abc")
        assert target.get("d") == Entry("d", {"mine": 1}, b"")

    def test_of_an_empty_store(self, store, target, archive):
        assert store.export_to(str(archive)) == 0
        assert target.import_from(str(archive)) == 0

    def test_export_replaces_a_file_and_leaves_nothing_else(self, store, archive, tmp_path):
        archive.write_bytes(b"old")
        put_file(store)
        assert store.export_to(archive) == 1
        assert zipfile.is_zipfile(archive)
        assert {path.name for path in tmp_path.iterdir()} == {"parent", "archive.zip"}

    def test_import_makes_room_among_what_was_there(self, store, target, archive):
        for key in "ab":
            put_file(store, key)
        store.export_to(archive)
        target.limit = 3 * put_file(target, "c").stat().st_size
        put_file(target, "d")
        set_age(target, "c", 100)
        set_age(target, "d", -1000)
        assert target.import_from(archive) == 2
        assert set(keys(target)) == {"a", "b", "d"}

    @pytest.mark.parametrize(
        "folder",
        ["../", "../../../", "/", "/tmp/", "some/folder/", "./", "some/../../"],
    )
    def test_folders_in_names_lead_nowhere(self, store, target, archive, tmp_path, folder):
        name = path_of(store, "key").name
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(folder + name, self.content(store, "key"))
            file.mkdir("empty")
        assert target.import_from(archive) == 1
        assert target.get("key") == Entry("key", RECORD, BLOB)
        found = {path for path in tmp_path.rglob(name) if store.root not in path.parents}
        assert found == {path_of(target, "key")}

    def test_a_name_that_is_not_its_keys_is_refused(self, store, target, archive):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(path_of(store, "good").name, self.content(store, "good"))
            file.writestr("evil.sh", self.content(store, "evil"))
        self.assert_refused(target, archive, r"evil\.sh.*another name")

    def test_what_is_no_zip_file_is_refused(self, target, archive):
        archive.write_bytes(b"#!/bin/sh\n")
        self.assert_refused(target, archive, "no readable archive")

    def test_an_archive_of_other_things_is_refused(self, target, archive):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("README", "hello")
        self.assert_refused(target, archive, "README.*does not begin as an entry")

    def test_a_damaged_entry_is_refused(self, store, target, archive):
        content = self.content(store, "bad")
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(path_of(store, "good").name, self.content(store, "good"))
            file.writestr(path_of(store, "bad").name, content[:-40] + b"\xff" + content[-39:])
        self.assert_refused(target, archive, "digest does not match")

    def test_another_version_is_refused(self, store, target, archive):
        content = self.content(store, "key").replace(b"jqconv-store 1", b"jqconv-store 2", 1)
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(path_of(store, "key").name, content)
        self.assert_refused(target, archive, "has format 2; this jqconv reads format 1")

    def test_an_entry_that_is_there_twice_is_refused(self, store, target, archive):
        name = path_of(store, "key").name
        with zipfile.ZipFile(archive, "w") as file:
            for folder in "ab":
                file.writestr(f"{folder}/{name}", self.content(store, "key"))
        self.assert_refused(target, archive, "twice")

    def test_more_than_the_limit_is_refused_before_it_is_unpacked(self, target, archive):
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("zeros", bytes(2 * MIB))
        self.assert_refused(target, archive, f"{2 * MIB} bytes.*limit of {MIB}")

    def test_a_damaged_archive_is_read_as_it_was_or_refused(self, store, target, archive):
        """Whichever byte it is: some, like a time, do not matter."""
        put_file(store)
        store.export_to(archive)
        content = archive.read_bytes()
        refusals = []
        for index, byte in enumerate(content):
            archive.write_bytes(content[:index] + bytes([byte ^ 0xFF]) + content[index + 1 :])
            try:
                target.import_from(archive)
            except ValueError as error:
                refusals.append(str(error))
        assert len(refusals) > len(content) / 2
        assert all(str(archive) in refusal for refusal in refusals)
        assert keys(target) == ["key"]
        assert target.get("key") == Entry("key", RECORD, BLOB)

    def test_a_missing_archive_is_a_missing_file(self, target, archive):
        with pytest.raises(FileNotFoundError):
            target.import_from(archive)
