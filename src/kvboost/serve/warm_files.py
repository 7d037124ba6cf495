"""The files that a server reads when it starts (``--warm``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvboost.errors import ConfigError


def read_texts(
    paths: Sequence[Path], max_bytes: int
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """The names and texts of files, and of all files in folders, in the order of their names; and
    the names of files in folders that are left out because they are empty or not UTF-8. Hidden
    files are not looked at. Raises ConfigError if there is nothing to read, or more than
    ``max_bytes``."""
    texts: list[tuple[str, str]] = []
    left_out: list[str] = []
    size = 0
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--warm {path}: there is no such file or folder")
        for file in _files(path) if path.is_dir() else [path]:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                text = ""
            except OSError as error:
                raise ConfigError(f"--warm {file} cannot be read: {error.strerror}") from None
            if text:
                size += len(text.encode())
                texts.append((str(file), text))
            elif path.is_dir():
                left_out.append(str(file))
            else:
                raise ConfigError(f"--warm {file} is empty or not UTF-8 text")
    if paths and not texts:
        raise ConfigError(f"--warm {paths[0]} holds no text file")
    if size > max_bytes:
        raise ConfigError(
            f"the files of --warm have {size:,} bytes; a server takes {max_bytes:,}: warm fewer"
        )
    return tuple(texts), left_out


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
