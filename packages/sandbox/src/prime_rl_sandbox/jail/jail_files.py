"""Files that cross the wall: written into the working directory of an execution, and read back from it.

The code of an execution may have put links in the place of its files and folders. None is followed, so that nothing
outside of the working directory is read or written. Standard library only, on any CPython from 3.9.
"""

import base64
import errno
import os
import stat

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def write_file(home: str, name: str, content: bytes) -> None:
    """Write a file below `home`, with its folders.

    Raises:
        OSError: a folder or a link is in the place of the file, a file or a link in that of a folder, or it is full.
        ValueError: the name leads out of `home`.
    """
    folder, file_name = _open_folder(home, name, create=True)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(file_name, flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def read_files(home: str, names: list[str], max_bytes: int) -> dict[str, str]:
    """Return the regular files that exist, in base64. Larger ones, links and devices are left out."""
    found = {}
    for name in names:
        try:
            content = _read_file(home, name, max_bytes)
        except OSError:
            continue
        if content is not None:
            found[name] = base64.b64encode(content).decode()
    return found


def remove_folder(home: str) -> None:
    """Delete a folder of any depth, without recursion and long paths: folders in folders are moved up first.

    What cannot be deleted stays. No process may use the folder any more.
    """
    try:
        while entries := _list(home):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in _list(entry.path):
                    if inner.is_dir(follow_symlinks=False):
                        os.rename(inner.path, os.path.join(home, os.urandom(16).hex()))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(home)
    except OSError:
        return


def _list(folder: str) -> "list[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return list(entries)


def _read_file(home: str, name: str, max_bytes: int) -> "bytes | None":
    folder, file_name = _open_folder(home, name, create=False)
    try:
        fd = os.open(file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        facts = os.fstat(fd)
        return os.read(fd, max_bytes) if stat.S_ISREG(facts.st_mode) and facts.st_size <= max_bytes else None
    finally:
        os.close(fd)


def _open_folder(home: str, name: str, create: bool) -> "tuple[int, str]":
    """Open the folder of a file, part by part, and return its descriptor and the name of the file in it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError(f"file name {name!r} leads out of the working directory")
    folder = os.open(home, _FOLDER_FLAGS)
    for part in parts[:-1]:
        try:
            if create:
                _make_folder(part, folder)
            inside = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
        except BaseException:
            os.close(folder)
            raise
        os.close(folder)
        folder = inside
    return folder, parts[-1]


def _make_folder(name: str, folder: int) -> None:
    try:
        os.mkdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
