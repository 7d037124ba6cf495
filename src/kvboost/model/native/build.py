"""Compiles the kernels for the machine they run on, once, and loads them.

A C compiler takes about a second; what it gave lies in the home folder under a name that changes
with the source, the compiler and the processor. Without one, or on another processor, torch's own
kernels serve: slower, and right.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from kvboost.config import home, native_kernels_allowed

log = logging.getLogger("kvboost")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
NEEDED = {"amx_bf16", "amx_tile", "avx512_bf16", "avx512bw"}
"""What the processor must have."""

SIGNATURES = {
    "kvboost_attend": (c_void_p, c_int32),
    "kvboost_look": (c_void_p, c_void_p, c_void_p, c_int32),
    "kvboost_move": (
        *(c_void_p, c_int64, c_int64) * 2,
        *(c_int32,) * 5,
        *(c_void_p, c_void_p, c_int32),
    ),
    "kvboost_write": (c_void_p, c_int32, *(c_void_p, c_int64, c_int64) * 2, c_int32),
    "kvboost_pack": (c_void_p, c_int32, c_int32, c_void_p),
    "kvboost_linear": (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    "kvboost_layer": (*(c_void_p,) * 10, c_int32),
    "kvboost_layer_begin": (*(c_void_p,) * 7, c_int32),
    "kvboost_layer_end": (*(c_void_p,) * 8, c_int32),
    "kvboost_errors": (
        *(c_void_p, c_int64, c_int64) * 2,
        *(c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32),
        *(c_void_p,) * 7,
        c_int32,
    ),
    "kvboost_shift": (
        *(c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_int32),
        *(c_void_p,) * 5,
        c_int32,
    ),
    "kvboost_norm": (c_void_p, c_int32, c_int32, c_void_p, c_float, c_void_p, c_int32),
}


@cache
def load_library() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    if not native_kernels_allowed():
        return "turned off by KVBOOST_NATIVE=0"
    if platform.system() != "Linux" or not _processor() >= NEEDED:
        return "this CPU has no matrix tiles (AMX)"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler; gcc or clang would do"
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("the native kernels could not be built: %s", said.strip()[-500:])
        return "they could not be built"
    if not library.kvboost_may_use_tiles():
        return "the system does not let this process use matrix tiles"
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.kvboost_room_bytes.restype = library.kvboost_look_bytes.restype = c_int64
    return library


def _built(compiler: str) -> Path:
    """The shared library, compiled unless it is there."""
    says = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    sources = sorted(FOLDER.glob("*.c"))
    texts = [path.read_text() for path in (*sources, *sorted(FOLDER.glob("*.h")))]
    made_of = (*texts, says.stdout, *FLAGS, *sorted(_processor()))
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    library = home() / "native" / f"kernels-{digest}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            command = [compiler, *FLAGS, *map(str, sources), "-o", str(fresh), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            os.replace(fresh, library)  # several processes may build: each gives a whole file
    return library


@cache
def _processor() -> frozenset[str]:
    """What the first processor says it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(flags, "").split())
