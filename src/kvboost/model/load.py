"""A model from a bundled name, a folder, a ``.gguf`` file or a hub id."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvboost.config import DTYPES, one_of
from kvboost.errors import ConfigError, KVBoostError, ModelError, ModelNotFoundError, PromptError
from kvboost.model import weights
from kvboost.model.compat import Support, check, context_length
from kvboost.model.fast_layers import can_pack, pack_layers
from kvboost.model.forward import Forward
from kvboost.model.rope import frequencies
from kvboost.model.sampling import eos_ids, warn_about_defaults


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be served."""

    name: str
    forward: Forward
    tokenizer: ModelTokenizer
    support: Support
    fingerprint: str
    """Names everything about the model that its KV depends on."""
    context_length: int | None
    eos_ids: frozenset[int]
    frequencies: torch.Tensor | None
    """``[layers, pairs]``: by how much keys turn per position; None where they do not."""

    @property
    def vocab_size(self) -> int:
        return int(self.forward.model.get_input_embeddings().num_embeddings)

    @property
    def attention_share(self) -> float:
        """The arithmetic of attending to one key, as a share of one row's through the weights."""
        config = self.forward.model.config.get_text_config()
        shape = self.forward.shape
        per_key = 2 * config.num_attention_heads * shape.head_dim * shape.num_layers
        return float(per_key / self.forward.model.num_parameters(exclude_embeddings=True))

    @property
    def active_adapters(self) -> list[str]:
        """Names of the adapters that are switched on; the fingerprint covers their weights."""
        model = self.forward.model
        return list(model.active_adapters()) if model._hf_peft_config_loaded else []

    @property
    def generation_config(self) -> Any:
        return self.forward.model.generation_config

    @property
    def device(self) -> torch.device:
        return self.forward.shape.device


_CONTENT = "kvboost-stands-in-for-what-the-user-says"


class ModelTokenizer:
    """A transformers tokenizer behind our own small face."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.hf(text, verbose=False)["input_ids"])

    def encode_fragment(self, text: str) -> list[int]:
        return list(self.hf(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chat_frame(self) -> tuple[str, str] | None:
        if self.hf.chat_template is None:
            return None
        message = {"role": "user", "content": _CONTENT}
        try:
            text = self.hf.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
        except TemplateError:
            return None
        before, found, after = str(text).partition(_CONTENT)
        return (before, after) if found else None

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        if self.hf.chat_template is None:
            raise PromptError(
                "this model has no chat template; build the prompt yourself and call generate()"
            )
        try:
            ids = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise PromptError(f"the model's chat template refuses this: {error}") from error
        return list(ids)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the best there is."""
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is unknown; use 'cpu', 'cuda' or 'mps'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no CUDA device; use device='cpu'")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={device!r}: torch finds no MPS device; use device='cpu'")
    return chosen


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, or what the device computes well."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype is not None:
        one_of(dtype, DTYPES, "dtype")
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively (AMX or AVX-512 BF16)."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def load(
    name: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **hf_kwargs: Any,
) -> LoadedModel:
    """Loads a model and its tokenizer, ready to be served. ``hf_kwargs`` go to transformers'
    ``from_pretrained``."""
    model, tokenizer = read(name, strict=strict, device=device, dtype=dtype, **hf_kwargs)
    return wrap(model, tokenizer, name=os.fspath(name), strict=strict, own=True)


def read(
    name: str | os.PathLike[str],
    *,
    strict: bool,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **hf_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer as transformers gives them, on their device."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    source, gguf = _locate(name)
    files: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    files |= _hub_options(hf_kwargs)
    try:
        config = AutoConfig.from_pretrained(source, **files)
        check(config, strict=strict)  # before minutes are spent on weights
        with weights.quiet_transformers():
            if gguf and not hf_kwargs:  # which else would be parsed once more, in seconds
                files["config"] = config
            model = _auto_class(config).from_pretrained(
                source, dtype=chosen_dtype, **{**files, **hf_kwargs}
            )
        tokenizer = AutoTokenizer.from_pretrained(source, **files)
    except KVBoostError:
        raise
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(_explain(name, source, error)) from error
    return model.to(chosen_device), tokenizer


def load_tokenizer(name: str | os.PathLike[str], *, local_only: bool = False) -> ModelTokenizer:
    """The tokenizer of a model, without its weights. ``local_only`` fetches nothing."""
    if local_only and name in weights.BUNDLED and not weights.is_installed(os.fspath(name)):
        raise ModelNotFoundError(f"{name} is not here; `kvboost models pull {name}` fetches it")
    source, gguf = _locate(name)
    files = {"gguf_file": gguf} if gguf else {}
    try:
        return ModelTokenizer(
            AutoTokenizer.from_pretrained(source, local_files_only=local_only, **files)
        )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(_explain(name, source, error)) from error


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "custom",
    strict: bool = True,
    own: bool = False,
) -> LoadedModel:
    """A model that is already in memory, ready to be served. From now on its attention is ours;
    where nobody else holds it (``own``) its weights may be laid out anew as well."""
    support = check(model.config, strict=strict)
    model = model.eval()
    if model.generation_config is None:
        raise ModelError(f"{type(model).__name__} cannot generate text")
    warn_about_defaults(model.generation_config)
    identity = fingerprint(model)
    packs = own and can_pack(model.device, model.dtype)
    forward = Forward(
        model,
        packed=support.packed,
        alone_beyond=support.reuse_limit,
        fast_layers=pack_layers(model) if packs else None,
    )
    return LoadedModel(
        name=name,
        forward=forward,
        tokenizer=ModelTokenizer(tokenizer),
        support=support,
        fingerprint=identity,
        context_length=context_length(model.config),
        eos_ids=eos_ids(model.generation_config),
        frequencies=frequencies(model, support, forward.shape.num_layers),
    )


def _locate(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """What to hand to transformers for ``name``: a folder or hub id, and a GGUF file in it."""
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise ConfigError(f"model_name={name!r} must be a bundled name, a folder or a hub id")
    name = os.fspath(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no GGUF file {path}")
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    if name in weights.BUNDLED or weights.is_installed(name):
        return str(weights.pull_model(name)), None
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(
            f"there is no model folder {path}; give a folder with config.json and weights, a "
            f".gguf file, a hub id, or a bundled name ({', '.join(weights.BUNDLED)})"
        )
    return name, None


def _explain(name: str | os.PathLike[str], source: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if Path(source).is_dir():
        return f"the folder {source} holds no model that transformers can load: {reason}"
    return (
        f"{name!r} is not a bundled name ({', '.join(weights.BUNDLED)}), not a folder here, and "
        f"could not be had from the hub: {reason}"
    )


def _hub_options(hf_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the user's options that also say where config and tokenizer come from."""
    names = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder")
    return {name: hf_kwargs[name] for name in names if name in hf_kwargs}


def _auto_class(config: PretrainedConfig) -> Any:
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def fingerprint(model: PreTrainedModel) -> str:
    """Names config, weights, dtype, RoPE parameters and adapters of ``model``.

    Each tensor enters with its name, shape, dtype, the sum of its bits and a sample of its
    values, so an adapter, another revision or a single edited row gives another name.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = model.config.to_dict()
    for volatile in (
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "_commit_hash",
    ):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for tensor_name, tensor in model.state_dict().items():
        digest.update(f"{tensor_name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
            total = int(bits.sum(dtype=torch.int64))
            sample = bits[:: max(1, len(bits) // 64)].tolist()
            digest.update(f"{total}{sample}".encode())
    return digest.hexdigest()


def machine_key(model: LoadedModel) -> str:
    """Names a model and what it runs on: what its forwards cost is a matter of both."""
    device = model.device
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    identity = f"{model.fingerprint} {device.type} {chip} {torch.get_num_threads()}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
