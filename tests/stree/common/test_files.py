"""Atomic files and directories: under SIGKILL, on a full disk, across filesystems."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from damage import flip_last_byte

from stree.common import files
from stree.common.errors import CannotWrite, CheckpointRefused
from stree.common.files import (
    MANIFEST_NAME,
    add_files,
    make_directory,
    publish_directory,
    require_own_files,
    sweep_leftovers,
    verify_manifest,
    write_atomically,
)
from stree.common.plain_data import MAX_BYTES


def publish(path, content, **options):
    with publish_directory(path, **options) as folder:
        (folder / "sub").mkdir()
        (folder / "weights").write_bytes(content)
        (folder / "sub" / "note").write_bytes(content[:5])


def hidden(folder):
    return sorted(path.name for path in Path(folder).glob(".tmp-*"))


# Plain writing


@pytest.mark.parametrize("data", ["text ü\n", b"\x00\xff", ""])
def test_write_creates_and_replaces(tmp_path, data):
    path = tmp_path / "new" / "folder" / "file"
    write_atomically(path, "older and longer content")
    write_atomically(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert os.listdir(path.parent) == ["file"]


def test_write_keeps_the_mode_of_the_file_it_replaces(tmp_path):
    path = tmp_path / "script"
    write_atomically(path, "a")
    path.chmod(0o750)
    write_atomically(path, "b")
    assert path.stat().st_mode & 0o777 == 0o750


def test_full_disk_leaves_the_old_file_and_says_how_much_was_needed(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(CannotWrite, match=r"No space left.*3 bytes needed, \d+ bytes.* free"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert hidden(tmp_path) == []


def test_a_folder_that_is_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="choose a folder"):
        write_atomically(tmp_path / "file" / "inner", "data")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs procfs")
def test_a_place_where_nothing_can_be_made_is_told():
    """The system answers ENOENT there, which elsewhere means a file that is missing."""
    with pytest.raises(CannotWrite, match="cannot write /proc/x"):
        write_atomically("/proc/x/file", "data")
    with pytest.raises(CannotWrite, match="cannot write /proc/x"):
        make_directory("/proc/x")
    with pytest.raises(CannotWrite, match="cannot write /proc/x"), publish_directory("/proc/x/y"):
        pass


def test_a_missing_file_read_while_publishing_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), publish_directory(tmp_path / "step"):
        (tmp_path / "absent").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CannotWrite, match="Permission denied"):
        write_atomically(tmp_path / "file", "data")


# Publishing


def test_published_directory_verifies_and_carries_the_extra_keys(tmp_path):
    publish(tmp_path / "step", b"content", manifest_extra={"step": 7})
    manifest = verify_manifest(tmp_path / "step")
    assert list(manifest) == ["version", "files", "step"]
    assert manifest["step"] == 7 and manifest["version"] == 1
    assert manifest["files"]["weights"]["size_bytes"] == 7
    assert sorted(manifest["files"]) == ["sub/note", "weights"]
    assert os.listdir(tmp_path) == ["step"]


def test_published_files_are_as_readable_as_new_ones(tmp_path):
    previous = os.umask(0o022)
    try:
        with publish_directory(tmp_path / "step") as folder:
            descriptor = os.open(folder / "private", os.O_CREAT | os.O_WRONLY, 0o600)
            os.close(descriptor)
    finally:
        os.umask(previous)
    assert (tmp_path / "step" / "private").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "step").stat().st_mode & 0o777 == 0o755


def test_existing_directory_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "step"
    publish(path, b"old")
    with pytest.raises(CannotWrite, match="exists already"):
        publish(path, b"new")
    assert (path / "weights").read_bytes() == b"old"
    publish(path, b"new", overwrite=True)
    assert (path / "weights").read_bytes() == b"new"
    verify_manifest(path)
    assert hidden(tmp_path) == []


def test_directory_made_by_another_process_meanwhile_survives(tmp_path):
    path = tmp_path / "step"
    with pytest.raises(CannotWrite, match="another process"), publish_directory(path):
        path.mkdir()
        (path / "theirs").write_text("")
    assert os.listdir(path) == ["theirs"]
    assert hidden(tmp_path) == []


def test_a_rename_that_fails_leaves_the_old_directory(tmp_path, monkeypatch):
    publish(tmp_path / "step", b"old")
    rename = os.rename

    def refuse(source, target):
        if Path(target).name == "step" and "old" not in str(source):
            refuse_space()
        rename(source, target)

    monkeypatch.setattr(files.os, "rename", refuse)
    with pytest.raises(CannotWrite, match="No space"):
        publish(tmp_path / "step", b"new", overwrite=True)
    assert (tmp_path / "step" / "weights").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["step"]


def test_an_error_in_the_block_leaves_the_old_directory_and_no_trace(tmp_path):
    publish(tmp_path / "step", b"old")
    with (
        pytest.raises(RuntimeError, match="boom"),
        publish_directory(tmp_path / "step", overwrite=True) as folder,
    ):
        (folder / "weights").write_bytes(b"new")
        raise RuntimeError("boom")
    assert (tmp_path / "step" / "weights").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["step"]


def test_too_little_space_is_noticed_before_writing(tmp_path):
    with (
        pytest.raises(CannotWrite, match=f"{10**18} bytes needed"),
        publish_directory(tmp_path / "step", needed_bytes=10**18),
    ):
        raise AssertionError("must not be entered")
    assert os.listdir(tmp_path) == []


def test_errno_of_rust_libraries_is_understood(tmp_path):
    with pytest.raises(CannotWrite, match="No space left"), publish_directory(tmp_path / "step"):
        raise RuntimeError("Error while serializing: I/O error: No space left (os error 28)")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second filesystem")
def test_destination_on_another_filesystem():
    name = f"/dev/shm/stree-test-{os.getpid()}"
    try:
        publish(Path(name) / "step", b"content")
        publish(Path(name) / "step", b"newer", overwrite=True)
        write_atomically(Path(name) / "file", "data")
        assert verify_manifest(Path(name) / "step")
        assert sorted(os.listdir(name)) == ["file", "step"]
    finally:
        shutil.rmtree(name, ignore_errors=True)


def test_files_are_added_to_a_published_folder_in_one_step(tmp_path):
    """A reader of the folder finds it before or after, whole; all else in it stays as it is."""
    publish(tmp_path / "step", b"content", manifest_extra={"step": 3})
    (tmp_path / "latest").symlink_to("step")
    (tmp_path / "step/.gitattributes").write_text("hidden")
    (tmp_path / "step/.cache").mkdir()
    (tmp_path / "step/.cache/x").write_text("")
    before = (tmp_path / "step/weights").stat().st_ino
    add_files(tmp_path / "latest", {"README.md": "ünï", "profile.json": "{}"})
    manifest = verify_manifest(tmp_path / "step")
    assert manifest["step"] == 3 and {"README.md", "profile.json"} < manifest["files"].keys()
    assert (tmp_path / "step/weights").stat().st_ino == before, "a link, not a copy"
    assert (tmp_path / "step/.gitattributes").read_text() == "hidden"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step"]
    folder = (tmp_path / "step").stat().st_ino
    add_files(tmp_path / "step", {"README.md": "ünï"})
    assert (tmp_path / "step").stat().st_ino == folder, "nothing to do"
    with open(tmp_path / "step/README.md") as reader:
        add_files(tmp_path / "step", {"README.md": "newer"})
        assert reader.read() == "ünï", "a reader of the old folder keeps it"
    assert (tmp_path / "step/README.md").read_text() == "newer"
    assert verify_manifest(tmp_path / "step")["files"].keys() == manifest["files"].keys()


def test_adding_files_without_hard_links_copies(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "no links here")

    publish(tmp_path / "step", b"content")
    monkeypatch.setattr(os, "link", refuse)
    add_files(tmp_path / "step", {"note": "added"})
    assert verify_manifest(tmp_path / "step") and (tmp_path / "step/note").read_text() == "added"


def test_adding_to_a_damaged_folder_is_refused_and_a_failure_leaves_the_old_one(
    tmp_path, monkeypatch
):
    publish(tmp_path / "step", b"content")
    with monkeypatch.context() as patch:
        patch.setattr(files, "_put_in_place", lambda *_: refuse_space())
        with pytest.raises(CannotWrite, match="No space"):
            add_files(tmp_path / "step", {"note": "added"})
    assert "note" not in verify_manifest(tmp_path / "step")["files"]
    assert os.listdir(tmp_path) == ["step"]
    flip_last_byte(tmp_path / "step/weights")
    with pytest.raises(CheckpointRefused, match="sha256"):
        add_files(tmp_path / "step", {"note": "added"})


def refuse_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Verification


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "weights").unlink(), "weights is missing"),
        (lambda d: (d / "weights").write_bytes(b"cont"), "weights has 4 bytes"),
        (lambda d: flip_last_byte(d / "weights"), "weights has sha256"),
        (lambda d: flip_last_byte(d / "sub" / "note"), "note has sha256"),
        (lambda d: (d / "more").write_bytes(b""), "more is not listed"),
        (lambda d: (d / MANIFEST_NAME).unlink(), "MANIFEST.json is missing"),
        (lambda d: (d / MANIFEST_NAME).write_text('{"version": 1, "fil'), "cannot be read"),
        (lambda d: (d / MANIFEST_NAME).write_text('{"version": 1}'), "cannot be read"),
        (lambda d: (d / MANIFEST_NAME).write_text('{"version": 9, "files": {}}'), "version 9"),
    ],
)
def test_damage_is_refused_by_name(tmp_path, damage, reason):
    publish(tmp_path / "step", b"content")
    damage(tmp_path / "step")
    with pytest.raises(CheckpointRefused, match=reason):
        verify_manifest(tmp_path / "step")


# Leftovers


def hub_cache(tmp_path):
    """Make a snapshot as huggingface_hub keeps it, of links to blobs that all revisions share."""
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate(("config.json", "additional_chat_templates/rag.jinja")):
        (repository / "blobs" / str(number)).write_text("{}")
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{number}")
    return snapshot


def test_links_of_the_hubs_cache_into_its_own_blobs_are_followed(tmp_path):
    snapshot = hub_cache(tmp_path)
    require_own_files(snapshot)
    (tmp_path / "latest").symlink_to(snapshot)
    require_own_files(tmp_path / "latest")


@pytest.mark.parametrize("name", ["config.json", "additional_chat_templates/rag.jinja"])
@pytest.mark.parametrize("to", ["/dev/zero", "outside", "models--other--model/blobs/0"])
def test_links_elsewhere_are_not(tmp_path, name, to):
    snapshot = hub_cache(tmp_path)
    (tmp_path / "outside").write_text("{}")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tmp_path / to)
    with pytest.raises(CheckpointRefused, match=f"{name} is a link to .*{to}, out of the check"):
        require_own_files(snapshot)


def test_what_is_read_whole_has_a_sane_size_and_weights_any(tmp_path):
    for name in ("model.safetensors", "tokenizer.model", ".cache.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, MAX_BYTES + 1)
    with pytest.raises(CheckpointRefused, match=r"tokenizer\.model has 67,108,865 bytes, at most"):
        require_own_files(tmp_path)
    os.truncate(tmp_path / "tokenizer.model", MAX_BYTES)
    require_own_files(tmp_path)


def test_sweep_removes_what_killed_writers_left(tmp_path):
    (tmp_path / ".tmp-0123abcd/sub").mkdir(parents=True)
    (tmp_path / ".tmp-4567abcd").write_text("half")
    (tmp_path / "step").mkdir()
    swept = sweep_leftovers(tmp_path)
    assert [path.name for path in swept] == [".tmp-0123abcd", ".tmp-4567abcd"]
    assert os.listdir(tmp_path) == ["step"]


def test_sweep_waits_until_nobody_writes(tmp_path):
    """Neither this process nor another one loses what it is writing, nor waits for the other."""
    with publish_directory(tmp_path / "step") as folder:
        (folder / "weights").write_text("")
        os.utime(folder, (0, 0))
        write_atomically(tmp_path / "file", "data")
        assert sweep_leftovers(tmp_path) == []
        other = (
            "import sys; from stree.common.files import sweep_leftovers, write_atomically; "
            "write_atomically(sys.argv[1] + '/other', ''); print(sweep_leftovers(sys.argv[1]))"
        )
        said = subprocess.run(
            [sys.executable, "-c", other, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert said.stdout == "[]\n"
    verify_manifest(tmp_path / "step")
    assert hidden(tmp_path) == []


def test_sweep_without_locks_takes_what_is_untouched_for_a_day(tmp_path, monkeypatch):
    @contextmanager
    def without_locks(path, **options):
        yield False

    monkeypatch.setattr(files, "holding", without_locks)
    (tmp_path / ".tmp-fresh").mkdir()
    (tmp_path / ".tmp-stale").mkdir()
    os.utime(tmp_path / ".tmp-stale", (time.time() - 2 * 24 * 3600,) * 2)
    assert sweep_leftovers(tmp_path) == [tmp_path / ".tmp-stale"]
    publish(tmp_path / "step", b"content")
    assert sorted(os.listdir(tmp_path)) == [".tmp-fresh", "step"]


def test_sweep_puts_back_a_directory_moved_aside(tmp_path):
    publish(tmp_path / "step", b"content")
    aside = tmp_path / ".tmp-old-0123abcd"
    aside.mkdir()
    (tmp_path / "step").rename(aside / "step")
    sweep_leftovers(tmp_path)
    verify_manifest(tmp_path / "step")
    assert os.listdir(tmp_path) == ["step"]


def test_sweep_of_a_folder_that_does_not_exist(tmp_path):
    assert sweep_leftovers(tmp_path / "nowhere") == []


WRITER = """
import sys
from stree.common.files import publish_directory, write_atomically
parent, content = sys.argv[1], b""
print("ready", flush=True)
for turn in range(1_000_000):
    content = bytes([turn % 251]) * 200_000
    with publish_directory(parent + "/step", {"turn": turn}, overwrite=True) as folder:
        (folder / "a").write_bytes(content)
        (folder / "b").write_bytes(content)
    write_atomically(parent + "/file", content)
"""


@pytest.mark.long
def test_kill_at_any_moment_leaves_old_or_new(tmp_path):
    publish(tmp_path / "step", b"first")
    write_atomically(tmp_path / "file", b"\0" * 200_000)
    moments = random.Random(0)
    turns = set()
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.08))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        sweep_leftovers(tmp_path)
        turns.add(verify_manifest(tmp_path / "step").get("turn"))
        content = (tmp_path / "file").read_bytes()
        assert len(content) == 200_000 and len(set(content)) == 1
        assert sorted(os.listdir(tmp_path)) == ["file", "step"]
    assert len(turns) > 1, "the writer never got to write: the test proves nothing"
