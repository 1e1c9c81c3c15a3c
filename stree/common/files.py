"""Write files so that a kill or a full disk leaves the old one or the new one, never a part.

Everything is written into the destination's folder (hence the same filesystem) under a name that
starts with `.tmp-`, synced, and renamed. A published directory has a MANIFEST.json with size and
sha256 of every file, which shows flipped bits.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stree.common.errors import CannotWrite, CheckpointRefused
from stree.common.locks import holding
from stree.common.plain_data import MAX_BYTES, read_json

MANIFEST_NAME = "MANIFEST.json"
MANIFEST_VERSION = 1
# Read whole, by us or by the libraries that we hand a checkpoint to; weights are mapped instead.
_READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_READ_SUBFOLDER = "additional_chat_templates"  # the only one that `transformers` looks into

_TEMPORARY, _REPLACED = ".tmp-", ".tmp-old-"  # begin the names of what is not in its place
_UNLOCKED_AGE_S = 24 * 3600.0  # of leftovers where there are no locks
_REFUSED_WRITE = {
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.EFBIG, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG,
}
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}  # only writers meet them


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace the file `path` by `data` (text as UTF-8), creating parent folders.

    Other processes, also after a SIGKILL, find the old content or the new, whole.
    Raises CannotWrite on a full disk or an unwritable folder; the old content is then intact.
    """
    path = Path(path)
    content = data.encode() if isinstance(data, str) else data
    with reporting_refusals(path, needed_bytes=len(content), codes=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path.parent) as temporary:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, temporary)
            os.replace(temporary, path)
            _fsync(path.parent)


def point_to(link: str | os.PathLike[str], name: str) -> None:
    """Point the symlink `link` to its sibling `name`, atomically, also where `link` exists.

    Raises CannotWrite when the disk refuses; `link` is then what it was.
    """
    link = Path(link)
    with (
        reporting_refusals(link, needed_bytes=len(name), codes=None),
        _temporary(link.parent) as temporary,
    ):
        temporary.symlink_to(name)
        os.replace(temporary, link)
        _fsync(link.parent)


def remove_directory(path: str | os.PathLike[str]) -> None:
    """Rename a folder, then delete it; `sweep_leftovers` removes the remains after a kill.

    So no other process sees a part of it. Raises `CannotWrite` when it cannot be renamed."""
    path = Path(path)
    with reporting_refusals(path, codes=None), _temporary(path.parent) as doomed:
        path.rename(doomed)


def make_directory(path: str | os.PathLike[str]) -> None:
    """Create a folder and those above it. Raises `CannotWrite` when that is refused."""
    path = Path(path)
    with reporting_refusals(path, codes=None):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def publish_directory(
    path: str | os.PathLike[str], manifest_extra: Mapping[str, object] | None = None,
    overwrite: bool = False, needed_bytes: int = 0,
) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well it becomes `path`, whole and at once.

    The folder gets MANIFEST.json: `{"version", "files": {name: {"sha256", "size_bytes"}}}` and
    the keys of `manifest_extra`. An exception in the block leaves no trace. An existing `path` is
    replaced only with `overwrite`, by two renames; a kill between them leaves the old one for
    `sweep_leftovers` to put back.
    `needed_bytes`, when known, is checked against the free space before anything is written.
    Raises CannotWrite when `path` exists, or on a full disk or an unwritable folder.
    """
    path = Path(path)
    if os.path.lexists(path) and not overwrite:
        raise CannotWrite(f"{path} exists already: choose another name or allow overwriting")
    make_directory(path.parent)
    with reporting_refusals(path, needed_bytes), _temporary(path.parent) as temporary:
        usage = shutil.disk_usage(path.parent)
        # Some network filesystems report no size at all; the write itself decides there.
        if usage.total and needed_bytes > usage.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.parent))
        temporary.mkdir()
        yield temporary
        _write_manifest(temporary, manifest_extra or {})
        _put_in_place(temporary, path, overwrite)


def add_files(directory: str | os.PathLike[str], contents: Mapping[str, str]) -> None:
    """Put text files into a published folder, or replace them: all of them or none.

    A folder with them, hard links to all else and a manifest that is true of both takes the old
    one's place, as `publish_directory` does with `overwrite`. Nothing is written when they are
    there already. Raises CheckpointRefused when the folder is not what its manifest says, and
    CannotWrite on a full disk or an unwritable folder.
    """
    directory = Path(directory).resolve()
    manifest = verify_manifest(directory)
    present = {name for name in contents if name in manifest["files"]}
    if all(
        name in present and (directory / name).read_text(encoding="utf-8") == text
        for name, text in contents.items()
    ):
        return
    extra = {key: value for key, value in manifest.items() if key not in ("version", "files")}
    replaced = {MANIFEST_NAME, *contents}

    def kept_out(folder: str, names: list[str]) -> set[str]:
        return replaced & set(names) if Path(folder) == directory else set()

    with publish_directory(directory, extra, overwrite=True) as new:
        shutil.copytree(
            directory, new, dirs_exist_ok=True, ignore=kept_out, copy_function=_link_or_copy
        )
        for name, text in contents.items():
            (new / name).write_text(text, encoding="utf-8")


def verify_manifest(directory: str | os.PathLike[str]) -> dict:
    """Return the parsed MANIFEST.json after checking every file of `directory` against it.

    Raises CheckpointRefused naming the file that is missing, unlisted, of the wrong size or of
    the wrong sha256, or that `require_own_files` refuses. Hidden files (.gitattributes, .cache/)
    are nobody's and are not looked at.
    """
    directory = Path(directory)
    require_own_files(directory)
    manifest = read_manifest(directory)
    again = "copy or export the checkpoint again"
    present = set(_relative_files(directory))
    require_own_files(directory, present & manifest["files"].keys())
    for name, expected in manifest["files"].items():
        file = directory / name
        # Compare with the files found, not with a name's path: `../x` is no file of this folder.
        if name not in present:
            raise CheckpointRefused(f"{file} is missing, {MANIFEST_NAME} lists it: {again}")
        size = file.stat().st_size
        if size != expected["size_bytes"]:
            raise CheckpointRefused(
                f"{file} has {size} bytes, {MANIFEST_NAME} says {expected['size_bytes']}: {again}"
            )
    unlisted = sorted(present - set(manifest["files"]))
    if unlisted:
        raise CheckpointRefused(
            f"{directory / unlisted[0]} is not listed in {MANIFEST_NAME}: move it elsewhere, "
            f"or delete {MANIFEST_NAME} if you changed the checkpoint on purpose"
        )
    for name, expected in manifest["files"].items():
        digest = sha256_of_file(directory / name)
        if digest != expected["sha256"]:
            raise CheckpointRefused(
                f"{directory / name} has sha256 {digest[:12]}…, {MANIFEST_NAME} says "
                f"{expected['sha256'][:12]}…: its bytes changed since it was written; {again}, "
                f"or delete {MANIFEST_NAME} if you changed it on purpose"
            )
    return manifest


def require_own_files(
    directory: str | os.PathLike[str], names: Iterable[str] | None = None
) -> None:
    """Refuse a checkpoint folder for what must not even be opened in it.

    Each file has to be a regular one that lies in the folder, links of the Hub's cache into its own
    blobs excepted, and of at most `MAX_BYTES` when it is read whole. A device would be read without
    end, a pipe waited for. `names` are the files to look at, relative to the folder; None are those
    that libraries may open: all that are not hidden, at its top and among its chat templates.
    Raises CheckpointRefused, naming the file.
    """
    directory = Path(directory)
    for name in _opened_files(directory) if names is None else sorted(names):
        file = directory / name
        if not _is_inside(file, directory):
            raise CheckpointRefused(
                f"{file} is a link to {os.path.realpath(file)}, out of the checkpoint: put the "
                "file itself there"
            )
        try:
            found = file.stat()
        except OSError as error:
            raise CheckpointRefused(f"{file} cannot be read ({error}): copy it again") from error
        if stat.S_ISDIR(found.st_mode):
            continue
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointRefused(f"{file} is no regular file: put the file itself there")
        if file.suffix in _READ_WHOLE and found.st_size > MAX_BYTES:
            raise CheckpointRefused(
                f"{file} has {found.st_size:,} bytes, at most {MAX_BYTES:,} are read: copy it "
                "again, or move it elsewhere if it is no part of the checkpoint"
            )


def sweep_leftovers(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove the `.tmp-*` entries that killed writers left in `parent`; return what was removed.

    While anybody writes in `parent`, nothing is removed; on a filesystem without locks, only what
    is untouched for a day. A folder that an interrupted overwrite had moved aside, and whose place
    is still empty, is put back first.
    """
    parent = Path(parent)
    swept = []
    try:
        with holding(parent) as is_locked:
            for entry in sorted(parent.glob(f"{_TEMPORARY}*")):
                if not is_locked and time.time() - entry.lstat().st_mtime < _UNLOCKED_AGE_S:
                    continue
                if entry.name.startswith(_REPLACED):
                    for replaced in entry.iterdir():
                        if not os.path.lexists(parent / replaced.name):
                            replaced.rename(parent / replaced.name)
                _remove(entry)
                swept.append(entry)
    except BlockingIOError:
        pass
    return swept


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Return the hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reporting_refusals(
    path: str | os.PathLike[str], needed_bytes: int = 0, codes: set[int] | None = _REFUSED_WRITE
) -> Iterator[None]:
    """Turn the disk's refusals inside the block into `CannotWrite`, with needed and free bytes.
    codes are the error numbers of refusals; None is all, for blocks that only write."""
    try:
        yield
    except CannotWrite:
        raise
    except Exception as error:
        code = _errno_of(error)
        if code is None or (codes is not None and code not in codes):
            raise
        raise CannotWrite(_explain(Path(path), code, needed_bytes)) from error


def _write_manifest(directory: Path, extra: Mapping[str, object]) -> None:
    files = {}
    for name in _relative_files(directory):
        file = directory / name
        files[name] = {"sha256": sha256_of_file(file), "size_bytes": file.stat().st_size}
    manifest = {"version": MANIFEST_VERSION, "files": files, **extra}
    manifest_path = directory / MANIFEST_NAME
    manifest_path.write_text(json.dumps(manifest, indent=2) + "\n")
    # safetensors creates files that only their owner reads; a checkpoint is as public as the rest.
    readable = manifest_path.stat().st_mode
    for file in [manifest_path, *(directory / name for name in files)]:
        file.chmod(readable | file.stat().st_mode)
        _fsync(file)
    for folder, _, _ in os.walk(directory, topdown=False):
        _fsync(Path(folder))


def read_manifest(directory: Path) -> dict:
    """Return the parsed MANIFEST.json of a folder, without checking its files. Raises
    `CheckpointRefused` when it is missing or malformed."""
    path = directory / MANIFEST_NAME
    try:
        manifest = read_json(path)
        files = manifest["files"]
        well_formed = manifest["version"] == MANIFEST_VERSION and all(
            isinstance(entry["sha256"], str) and isinstance(entry["size_bytes"], int)
            for entry in files.values()
        )
    except FileNotFoundError:
        raise CheckpointRefused(f"{path} is missing: {directory} was not published whole") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRefused(
            f"{path} cannot be read ({error}): export the checkpoint again"
        ) from error
    if not well_formed:
        raise CheckpointRefused(
            f"{path} has version {manifest['version']} or malformed entries, wanted version "
            f"{MANIFEST_VERSION}: export the checkpoint again"
        )
    return manifest


def _is_inside(file: Path, directory: Path) -> bool:
    """Return whether a file's bytes lie in the folder, or in the blobs of the Hub's cache, where
    snapshots/REVISION/NAME links to ../../blobs/SHA."""
    folder = directory.resolve()
    cache = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    # realpath, because Path.resolve raises for links in a circle.
    return any(Path(os.path.realpath(file)).is_relative_to(place) for place in (folder, *cache))


def _opened_files(directory: Path) -> Iterator[str]:
    for folder in (directory, directory / _READ_SUBFOLDER):
        if folder.is_dir():
            for name in sorted(os.listdir(folder)):
                if not name.startswith("."):
                    yield str((folder / name).relative_to(directory))


def _relative_files(directory: Path) -> list[str]:
    """Return the sorted names of all files below `directory`, without manifest and hidden files."""
    names = []
    for folder, subfolders, files in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        relative = Path(folder).relative_to(directory)
        names += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(set(names) - {MANIFEST_NAME})


def _put_in_place(temporary: Path, path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        os.rename(temporary, path)
    elif not overwrite:
        raise CannotWrite(f"{path} was created by another process meanwhile: choose another name")
    else:
        with _temporary(path.parent, _REPLACED) as aside:
            aside.mkdir()
            os.rename(path, aside / path.name)
            try:
                os.rename(temporary, path)
            except BaseException:
                os.rename(aside / path.name, path)
                raise
    _fsync(path.parent)


@contextmanager
def _temporary(parent: Path, prefix: str = _TEMPORARY) -> Iterator[Path]:
    """Yield a temporary path in `parent`; at the end remove a file or folder that is left there.

    Holds a shared lock of `parent`, by which a sweep knows that somebody writes there.
    """
    with holding(parent, wait=True, shared=True):
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _errno_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors and tokenizers are written in Rust and tell the number in their text only.
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _explain(path: Path, code: int | None, needed_bytes: int) -> str:
    existing = next(folder for folder in path.absolute().parents if folder.is_dir())
    disk = os.statvfs(existing)
    free = f"{disk.f_bavail * disk.f_frsize} bytes"
    if code == errno.EFBIG:
        remedy = "raise the limit on a file's size (ulimit -f)"
    elif code in (errno.ENOSPC, errno.EDQUOT):
        free += f" and {disk.f_favail} inodes" if disk.f_files else ""
        remedy = "free some space or choose another disk"
    else:
        remedy = "choose a folder that you may write to"
    needed = f"{needed_bytes} bytes needed, " if needed_bytes else ""
    return f"cannot write {path}: {os.strerror(code or 0)} ({needed}{free} free): {remedy}"


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(os.path.realpath(source), destination)
    except OSError:  # no hard links on this filesystem, or the file is on another one
        shutil.copy2(source, destination)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
