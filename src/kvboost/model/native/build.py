"""Compiles the kernels for the machine they run on, once, and loads them.

There is one form of the kernels per dtype: bfloat16 for CPUs with AMX, float32 for any CPU. A C
compiler takes a few seconds for each. The result is kept in the home folder under a name that
changes with the source, the compiler and the processor. If a form cannot be built or does not fit
the processor, torch's own kernels serve: slower, with the same results.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from kvboost.config import home, native_kernels_allowed, progress_allowed

log = logging.getLogger("kvboost")

FOLDER = Path(__file__).parent
QUANTIZED = "quantized"
"""The folder of what all forms share about quantised weights."""
FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC")
TUNING = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
"""The flag that makes a compiler use everything this processor has."""


SIGNATURES: dict[str, Sequence[type]] = {
    "kvboost_attend": (c_void_p, c_int32),
    "kvboost_attention_mass": (c_void_p, c_void_p, c_void_p, c_int32),
    "kvboost_move": (
        *(c_void_p, c_int64, c_int64) * 2,
        *(c_int32,) * 5,
        *(c_void_p, c_void_p, c_int32),
    ),
    "kvboost_write": (c_void_p, c_int32, *(c_void_p, c_int64, c_int64) * 2, c_int32),
    "kvboost_pack": (c_void_p, c_int32, c_int32, c_void_p),
    "kvboost_use_large_pages": (c_void_p, c_int64),
    "kvboost_read_blocks": (
        *(c_int32,) * 4,
        *(c_void_p, c_void_p, c_int32, c_int32),
        *(c_void_p,) * 3,
    ),
    "kvboost_pack_quantized": (*(c_void_p,) * 4, c_int32, c_int32, c_void_p, c_int32),
    "kvboost_linear": (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    "kvboost_layer": (*(c_void_p,) * 11, c_int32),
    "kvboost_layer_begin": (*(c_void_p,) * 8, c_int32),
    "kvboost_layer_end": (*(c_void_p,) * 9, c_int32),
    "kvboost_errors": (
        *(c_void_p, c_int64, c_int64) * 2,
        *(c_void_p, c_void_p, c_int64, *(c_int32,) * 5),
        *(c_void_p,) * 5,
        *(c_float, c_void_p, c_void_p, c_int32),
    ),
    "kvboost_shift": (
        *(c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_int32),
        *(c_void_p,) * 5,
        c_int32,
    ),
    "kvboost_norm": (c_void_p, c_int32, c_int32, c_void_p, c_float, c_void_p, c_int32),
}


@dataclass(frozen=True)
class Form:
    """The kernels for one dtype."""

    name: str
    folder: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    """The features that the processor must have."""
    own_signatures: Mapping[str, Sequence[type]] = field(default_factory=dict)
    """Functions that only this form has."""


FORMS = {
    torch.bfloat16: Form(
        "bfloat16", "amx", needs=frozenset({"amx_bf16", "amx_tile", "avx512_bf16", "avx512bw"})
    ),
    torch.float32: Form(
        "float32 portable",
        "float32",
        flags=("-DKVBOOST_FLOAT32", "-ffp-contract=fast"),
        own_signatures={
            "kvboost_pack_halved": (c_void_p, c_int32, c_int32, c_void_p),
            "kvboost_plain_linear": (
                *(c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32),
            ),
        },
    ),
}


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for ``dtype``; ask :func:`is_available` first."""
    loaded = _load(dtype)
    if isinstance(loaded, str):
        raise RuntimeError(f"there are no kernels for {dtype} on this machine: {loaded}")
    return loaded


def any_library() -> ctypes.CDLL | None:
    """The kernels for some dtype, for what is the same in all forms; None if there are none."""
    return next((library(dtype) for dtype in FORMS if is_available(dtype)), None)


def is_available(dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether our kernels serve ``dtype`` on this machine, for tensors on ``device``. Compiles them
    on the first call."""
    is_here = device is None or device.type == "cpu"
    return is_here and not isinstance(_load(dtype), str)


def why_not(dtype: torch.dtype) -> str | None:
    """Why our kernels do not serve ``dtype``; None if they do."""
    loaded = _load(dtype)
    return loaded if isinstance(loaded, str) else None


def describe(dtype: torch.dtype) -> str:
    """The kernels that serve ``dtype``, as ``"float32 portable (AVX-512)"``, or why there are
    none."""
    reason = why_not(dtype)
    if reason is not None:
        return f"no: {reason}"
    return f"{FORMS[dtype].name} ({library(dtype).kvboost_instructions().decode()})"


@cache
def _load(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    form = FORMS.get(dtype)
    if form is None:
        return f"only for {' and '.join(str(known).removeprefix('torch.') for known in FORMS)}"
    if not native_kernels_allowed():
        return "turned off by KVBOOST_NATIVE=0"
    if platform.system() != "Linux":
        return "they are built on Linux only"
    if not processor() >= form.needs:
        return "this CPU has no matrix tiles (AMX)"
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler; install gcc or clang"
    try:
        loaded = ctypes.CDLL(str(_built(compiler, form)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("the native kernels could not be built: %s", said.strip()[-500:])
        return "they could not be built"
    if not loaded.kvboost_is_permitted():
        return "the system does not let this process use matrix tiles"
    for name, arguments in {**SIGNATURES, **form.own_signatures}.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.kvboost_workspace_bytes.restype = loaded.kvboost_mass_bytes.restype = c_int64
    loaded.kvboost_quantized_bytes.argtypes = (c_void_p, c_int32, c_int32)
    loaded.kvboost_quantized_bytes.restype = c_int64
    loaded.kvboost_instructions.restype = c_char_p
    loaded.kvboost_quantized_instructions.restype = c_char_p
    return loaded


def _built(compiler: str, form: Form) -> Path:
    """The shared library; compiles it unless that was done before."""
    says = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    flags = (*FLAGS, *form.flags)
    if tuning := TUNING.get(platform.machine()):
        flags += (tuning,)
    folders = (FOLDER, FOLDER / QUANTIZED, FOLDER / form.folder)
    sources = [path for folder in folders for path in sorted(folder.glob("*.c"))]
    headers = [path for folder in folders for path in sorted(folder.glob("*.h"))]
    texts = [path.read_text() for path in (*sources, *headers)]
    made_of = (*texts, says.stdout, *flags, *sorted(processor()))
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    path = home() / "native" / f"{form.folder}-{digest}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            command = [compiler, *flags, *map(str, sources), "-o", str(fresh), "-lm"]
            start = time.monotonic()
            _say(f"compiling kernels for this CPU ({form.name}), once: seconds, or minutes if busy")
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            os.replace(fresh, path)  # several processes may build it: each leaves a whole file
            _say(f"compiled in {time.monotonic() - start:.0f} s")
    return path


def _say(line: str) -> None:
    if progress_allowed():
        print(line, file=sys.stderr, flush=True)


@cache
def processor() -> frozenset[str]:
    """The features that the first processor reports."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    features = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(features, "").split())
