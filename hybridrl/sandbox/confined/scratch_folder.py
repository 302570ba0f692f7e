"""The scratch folder on disk, for a program without a root folder of its own."""

# Importing pathlib would take as long as all the rest.
# ruff: noqa: PTH102, PTH106, PTH118, PTH208
from __future__ import annotations

import os
from stat import S_ISDIR


def make(parent: str) -> str:
    """Makes a new folder there that only this user may enter, and gives its path."""
    folder = os.path.join(parent, f"hybridrl-program-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    return folder


def remove(folder: str) -> None:
    """Removes a folder that the program has filled, as deep as may be: no recursion, no long paths.

    Folders inside are first moved up, one level at a time, so that all are removed from the top.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    new_name, moved = os.urandom(8).hex(), 0
    while names := os.listdir(top):
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)  # some are made to keep everybody out
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for entry in os.listdir(inner):
                if _is_folder(entry, inner):
                    moved += 1
                    os.chmod(entry, 0o700, dir_fd=inner)
                    os.rename(entry, f"{new_name}-{moved}", src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(entry, dir_fd=inner)
            os.close(inner)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(folder)


def _is_folder(name: str, where: int) -> bool:
    return S_ISDIR(os.stat(name, dir_fd=where, follow_symlinks=False).st_mode)
