"""The headers of a model's files: what it is and what tensors it has."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvboost.errors import ModelError, ModelNotFoundError
from kvboost.model.fit.features import Features, features_in, why_unsupported
from kvboost.model.fit.states import layers_with_rows, state_numbers
from kvboost.model.loading import weights
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.loading.gguf import GgufIndex, check_gguf
from kvboost.model.loading.unsupported import WHY_NOT
from kvboost.model.quantized.mxfp4 import BLOCK, GROUP
from kvboost.model.quantized.safetensors import MXFP4
from kvboost.model.quantized.source import method_in

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
_HEADS = ("lm_head.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight", "wte.weight")
_CODES = {"I32": 4, "U8": 1, "I8": 1}
"""Types of tensors that hold codes of weights, with their bytes."""
_CODED = ("weight", "_blocks")
"""The endings of their names; the latter in MXFP4."""
_PLAIN = {"F32", "F16", "BF16", "F64"}
_MOST_HEADER = 100 << 20
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names that configs use."""


@dataclass(frozen=True)
class StoredTensor:
    name: str
    kind: str
    """Its type, as the file names it."""
    numbers: int
    num_bytes: int
    packed_bytes: int | None = None
    """What it takes in memory if the model's weights stay packed; None if that depends on the
    kernels."""


@dataclass(frozen=True)
class ModelHeader:
    """A model's sizes."""

    name: str
    architecture: str
    tensors: tuple[StoredTensor, ...]
    layers: int
    kv_numbers: int | None
    """Numbers of KV that a token has in all layers; None if the header does not say."""
    context: int | None
    is_quantized: bool
    """Whether its weights can stay packed."""
    packs_on_cpu: bool = True
    """Whether CPUs have kernels for packed ones."""
    to_download: int = 0
    """Bytes that are not on this machine yet."""
    model_type: str | None = None
    """As in transformers; None if the header does not say."""
    states: tuple[int, int] | None = None
    """The numbers that convolutions and recurrent layers hold for one text; None if there are no
    such layers, or the header does not say."""
    features: Features | None = None
    """What KVBoost does with it; None if it is not supported, or the header does not say."""

    @property
    def state_bytes(self) -> int | None:
        """The size of the states that are kept at one token, if the model runs in 16 bits:
        recurrent layers hold numbers of 32."""
        return None if self.states is None else 2 * self.states[0] + 4 * self.states[1]

    @property
    def unsupported(self) -> str | None:
        """Why its family is not supported; None if it is, or the header does not say what it is."""
        return None if self.model_type is None else why_unsupported(self.model_type)

    @property
    def parameters(self) -> int:
        return sum(tensor.numbers for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bits(self) -> float:
        """Of a weight, on average."""
        return 8 * self.stored_bytes / max(1, self.parameters)

    @property
    def kind(self) -> str:
        """The type of most weights."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.kind] += tensor.numbers
        return counts.most_common(1)[0][0] if counts else "unknown"

    @property
    def in_layers(self) -> tuple[StoredTensor, ...]:
        """The tensors of decoder layers."""
        return tuple(tensor for tensor in self.tensors if _LAYER.search(tensor.name))

    @property
    def embedding(self) -> StoredTensor | None:
        """The embedding, if it is not the output head as well."""
        has_head = any(tensor.name.endswith(_HEADS) for tensor in self.tensors)
        found = [tensor for tensor in self.tensors if tensor.name.endswith(_EMBEDDINGS)]
        return found[0] if has_head and found else None


def read_header(name: str | os.PathLike[str]) -> ModelHeader:
    """The header of a ``.gguf`` file, a folder, a bundled name or a hub id. Reads or downloads no
    weights. Raises ModelNotFoundError if there is no such model."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no GGUF file {path}; check the path")
        return from_gguf(check_gguf(path))
    name = os.fspath(name)
    if path.is_dir():
        return from_folder(path)
    if weights.is_installed(name):
        return from_folder(weights.models_dir() / name, name)
    if name in weights.BUNDLED:
        return _not_installed(weights.BUNDLED[name])
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(f"there is no model folder {path}")
    return _from_hub(name)


def from_gguf(index: GgufIndex) -> ModelHeader:
    tensors = [
        StoredTensor(each.name, each.kind.name, math.prod(each.shape), each.num_bytes)
        for each in index.tensors.values()
    ]
    numbers = {key.rpartition(".")[2]: value for key, value in index.numbers.items()}
    heads = numbers.get("head_count_kv") or numbers.get("head_count")
    width = numbers.get("key_length")
    if width is None and "embedding_length" in numbers and "head_count" in numbers:
        width = numbers["embedding_length"] // max(1, numbers["head_count"])
    layers = numbers.get("block_count", 0)
    kinds = {tensor.kind for tensor in tensors}
    model_type = _type_of_gguf(index.architecture)
    features = _features({"model_type": model_type})
    return ModelHeader(
        name=index.path.name,
        architecture=index.architecture,
        tensors=tuple(tensors),
        layers=layers,
        kv_numbers=2 * layers * heads * width if heads and width else None,
        context=numbers.get("context_length"),
        is_quantized=not kinds <= _PLAIN and _stays_packed("GGUF", features),
        model_type=model_type,
        features=features,
    )


def _type_of_gguf(architecture: str) -> str:
    """GGUF files write ``qwen3moe`` and ``gemma3`` where transformers has ``qwen3_moe`` and
    ``gemma3_text``."""
    known = {name.replace("_", ""): name for name in (*ARCHITECTURES, *WHY_NOT)}
    written = architecture.replace("-", "").replace("_", "")
    return known.get(f"{written}text") or known.get(written, architecture)


def from_folder(folder: Path, name: str | None = None) -> ModelHeader:
    """The header of a transformers folder with safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} has no .safetensors files, whose headers say how large a model is"
        )
    found: dict[str, Any] = {}
    for file in files:
        found |= _safetensors_header(file)
    return _from_config(name or folder.name, _json(folder / "config.json"), found.items())


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds no object")
    return found


def _safetensors_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > _MOST_HEADER:
                raise ValueError(f"its header claims {size:,} bytes")
            header: dict[str, Any] = json.loads(opened.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is no safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return header


def _from_hub(name: str) -> ModelHeader:
    """Asks the hub for the config and the headers of its files only."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from kvboost.model.loading.hub import why_unreachable

    problem = why_unreachable()
    if problem is not None:
        raise ModelNotFoundError(
            f"{name!r} is neither a file nor a folder nor a bundled name "
            f"({', '.join(weights.known_names())}), and the hub does not answer ({problem})"
        )
    try:
        metadata = HfApi().get_safetensors_metadata(name)
        config = _json(Path(hf_hub_download(name, "config.json")))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFoundError(
            f"the hub has no safetensors files of {name!r}: {reason}"
        ) from None
    described = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    made = _from_config(name, config, described.items())
    return replace(made, to_download=made.stored_bytes)


def _from_config(
    name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Mapping[str, Any]]]
) -> ModelHeader:
    """``config`` is the content of a config.json."""
    method, has_mxfp4 = config.get("quantization_config"), method_in(config) == MXFP4
    bits = int((method or {}).get("bits", 4))
    stored = []
    for tensor, said in tensors:
        start, end = said["data_offsets"]
        numbers = math.prod(said["shape"])
        if method is not None and said["dtype"] in _CODES and tensor.endswith(_CODED):
            numbers = numbers * _CODES[said["dtype"]] * 8 // bits
        packed = _filled_up(tensor, said["shape"], end - start) if has_mxfp4 else None
        stored.append(StoredTensor(tensor, said["dtype"], numbers, end - start, packed))
    text = {**config, **(config.get("text_config") or {})}
    layers = _first(text, _NUM_LAYERS)
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    keeps_latents = architecture is not None and architecture.latent
    features = _features(config)
    return ModelHeader(
        name=name,
        architecture=str(text.get("model_type", "unknown")),
        tensors=tuple(stored),
        layers=layers or 0,
        kv_numbers=_kv_numbers(
            text, layers_with_rows(config) or layers, keeps_latents=keeps_latents
        ),
        states=state_numbers(config),
        context=_first(text, _CONTEXT),
        is_quantized=_stays_packed(method_in(config), features),
        packs_on_cpu=not has_mxfp4,
        model_type=config.get("model_type"),
        features=features,
    )


def _filled_up(tensor: str, shape: Sequence[int], num_bytes: int) -> int:
    """The bytes of a tensor of a model with MXFP4: kernels read blocks in groups."""
    if not tensor.endswith(("_blocks", "_scales")):
        return num_bytes
    blocks, of_group = shape[2], GROUP // BLOCK
    return num_bytes // blocks * (-(-blocks // of_group) * of_group)


def _stays_packed(source: str | None, features: Features | None) -> bool:
    """Whether weights from a GGUF file, or quantised by a method, can stay packed."""
    return source is not None and features is not None and source in features.packed


def _features(config: Mapping[str, Any]) -> Features | None:
    model_type = config.get("model_type")
    if model_type is None or why_unsupported(model_type) is not None:
        return None
    return features_in(config)


def _kv_numbers(text: Mapping[str, Any], layers: int | None, *, keeps_latents: bool) -> int | None:
    """Numbers of KV that a token has in all layers: of a model with latents, these. Layers of Gemma
    3n and 4 that read the KV of others have none of their own, and full layers of Gemma 4 have
    other heads: written in either of two ways."""
    if keeps_latents:
        row = int(text.get("kv_lora_rank") or 0) + int(text.get("qk_rope_head_dim") or 0)
        return layers * row if layers and row else None
    heads, width = (_first(text, names) for names in (_NUM_HEADS, _WIDTH))
    head_dim = text.get("head_dim") or (width // heads if width and heads else None)
    kv_heads = text.get("num_key_value_heads") or heads
    if not layers or not kv_heads or not head_dim:
        return None
    full_heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    wide = {"num_key_value_heads": full_heads, "head_dim": text.get("global_head_dim")}
    kinds = text.get("layer_types") or []
    others = {str(at): wide for at, kind in enumerate(kinds) if kind == "full_attention"}
    others |= text.get("per_layer_config") or {}
    numbers = 0
    for layer in range(layers - (text.get("num_kv_shared_layers") or 0)):
        its = others.get(str(layer), {})
        numbers += (its.get("num_key_value_heads") or kv_heads) * (its.get("head_dim") or head_dim)
    return 2 * numbers


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(config[name]) for name in names if config.get(name)), None)


def _not_installed(package: weights.WeightPackage) -> ModelHeader:
    """A bundled model says how large its file is."""
    numbers = package.nbytes * 8 // 5 if not package.is_archive else package.nbytes // 4
    return ModelHeader(
        name=package.name,
        architecture=f"{package.description} (not installed)",
        tensors=(StoredTensor("all", "as in its file", numbers, package.nbytes),),
        layers=0,
        kv_numbers=None,
        context=None,
        is_quantized=not package.is_archive,
        to_download=package.nbytes,
    )
