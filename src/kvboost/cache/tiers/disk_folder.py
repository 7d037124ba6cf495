"""Which folders the disk tier may use: new or empty ones, and those that are tagged as ours."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from kvboost.errors import CacheFolderError

TAG_NAME = "CACHEDIR.TAG"

_OURS = re.compile(r"[0-9a-f]{2}|quarantine|tmp-\d+-[0-9a-f]{32}|\.lock|CACHEDIR\.TAG")
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of kvboost: see kvboost cache --help\n"
)


def make_folder(folder: Path) -> None:
    """Makes ``folder`` unless it exists. Raises ``CacheFolderError`` if it cannot be used, or holds
    files that are not ours."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign = [name for name in os.listdir(folder) if not _OURS.fullmatch(name)]
        if foreign or not _is_our_tag(folder / TAG_NAME, missing=True):
            whose = " (perhaps of another version of KVBoost)" if is_cache_folder(folder) else ""
            raise CacheFolderError(
                f"disk_cache_dir={str(folder)!r} holds other files, such as "
                f"{min(foreign, default=TAG_NAME)!r}{whose}; choose a new folder or an empty one"
            )
        with suppress(OSError):
            folder.chmod(0o700)
    except CacheFolderError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise CacheFolderError(
            f"disk_cache_dir={str(folder)!r} cannot be used as a folder: "
            f"{getattr(error, 'strerror', None) or error}; choose another one"
        ) from error


def add_tag(folder: Path) -> None:
    """Tags a folder as ours, if that is possible."""
    with suppress(OSError), (folder / TAG_NAME).open("x") as file:  # "x" follows no link
        file.write(_TAG)


def is_cache_folder(folder: Path) -> bool:
    """Whether ``folder`` is tagged as a cache of ours."""
    try:
        return _is_our_tag(folder / TAG_NAME, missing=False)
    except (OSError, UnicodeDecodeError):
        return False


def _is_our_tag(tag: Path, *, missing: bool) -> bool:
    """Whether a folder's tag is ours; ``missing`` if there is none."""
    try:
        return stat.S_ISREG(os.lstat(tag).st_mode) and "kvboost" in tag.read_text()
    except FileNotFoundError:
        return missing
