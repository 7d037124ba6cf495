"""A model from a bundled name, a folder, a ``.gguf`` file or a hub id."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvboost.config import closest
from kvboost.errors import ConfigError, KVBoostError, ModelError, ModelNotFoundError
from kvboost.model.execution.fast_layers import can_pack, pack_layers
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.sampling import eos_ids, warn_about_defaults
from kvboost.model.loading import key_scales, weights
from kvboost.model.loading.compat import Support, check, context_length
from kvboost.model.loading.device import (
    chip_name,
    pick_device,
    pick_dtype,
    pick_streaming_device,
    slow_dtype,
)
from kvboost.model.loading.experts import idle_weights
from kvboost.model.loading.fingerprint import fingerprint
from kvboost.model.loading.gguf import GgufIndex, check_gguf
from kvboost.model.loading.gguf_folder import described_folder
from kvboost.model.loading.gguf_reader import quick_reader
from kvboost.model.loading.hub import downloaded, why_unreachable
from kvboost.model.loading.rope import KeyRotation, key_rotation, probed_positions
from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.model.quantized.experts import has_kernels
from kvboost.model.quantized.layers import num_weights, packed_identity
from kvboost.model.quantized.safetensors import IN_MXFP4, MXFP4
from kvboost.model.quantized.source import SHARED_OPTIONS, FilledModel, find_filled, method_in
from kvboost.model.streaming.parking import Parking, host_bytes
from kvboost.model.streaming.place import Placement, place
from kvboost.model.streaming.plan import DeviceBudget
from kvboost.model.vision.loading import find_processor, make_tower
from kvboost.model.vision.tower import VisionTower


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to serve."""

    name: str
    forward: Forward
    tokenizer: ModelTokenizer
    support: Support
    fingerprint: str
    """Identifies everything about the model that its KV depends on."""
    context_length: int | None
    eos_ids: frozenset[int]
    rotation: KeyRotation | None
    """The rotation of keys with their position; None if they do not rotate."""
    placement: Placement | None = None
    """Which layers are streamed; None if the device's memory has no budget."""
    vision: VisionTower | str = "this model cannot be given images"
    """The vision tower; or the reason why the model sees no images."""

    @cached_property
    def vocab_size(self) -> int:
        return int(self.forward.model.get_input_embeddings().num_embeddings)

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.forward.model.config.get_text_config().num_attention_heads)

    @cached_property
    def attention_share(self) -> float:
        """The cost of attending to one key, as a share of a row's cost in the weights."""
        shape = self.forward.shape
        per_key = 2 * self.num_heads * shape.key_channels
        model = self.forward.model
        per_row = num_weights(model, embeddings=False) - idle_weights(model)
        return float(per_key / per_row)

    @property
    def active_adapters(self) -> list[str]:
        """The names of the active adapters; the fingerprint covers their weights."""
        model = self.forward.model
        return list(model.active_adapters()) if model._hf_peft_config_loaded else []

    @property
    def generation_config(self) -> Any:
        return self.forward.model.generation_config

    @property
    def device(self) -> torch.device:
        return self.forward.shape.device

    @property
    def slow_dtype(self) -> str | None:
        """Why its dtype is slow on its device, and what to do; None if it is not."""
        reason = slow_dtype(self.forward.shape.dtype, self.device)
        if reason is None:
            return None
        return f'{reason}; use dtype="float32", or model.float() before from_model'


def load(
    name: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weight_form: str = "plain",
    budget: DeviceBudget | None = None,
    **hf_kwargs: Any,
) -> LoadedModel:
    """Loads a model and its tokenizer, ready to serve. ``weight_form`` is ``"auto"``, ``"plain"``
    or ``"packed"``; layers that do not fit into ``budget`` are streamed; ``hf_kwargs`` go to
    transformers' ``from_pretrained``."""
    parking: Parking | None = None
    move: Callable[[PreTrainedModel], Placement] | None = None
    if budget is not None:
        target = pick_streaming_device(device)
        parked = Parking(host_bytes(budget.host_bytes))
        parking = parked
        move = lambda model: place(model, target, budget, spilled_bytes=parked.spilled_bytes)  # noqa: E731
    model, tokenizer = read(
        name,
        strict=strict,
        device=device,
        dtype=dtype,
        weight_form=weight_form,
        parked=parking,
        **hf_kwargs,
    )

    def files() -> tuple[str, Mapping[str, Any]]:
        source = _locate(name, hf_kwargs)
        return source.place, source.options

    return wrap(
        model,
        tokenizer,
        name=os.fspath(name),
        strict=strict,
        own=True,
        image_processor=find_processor(model.config, tokenizer, files),
        move=move,
    )


def read(
    name: str | os.PathLike[str],
    *,
    strict: bool,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    weight_form: str = "plain",
    parked: Parking | None = None,
    **hf_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer as transformers loads them, or with packed weights, on their
    device. KVBoost reads packed weights itself, and plain ones of GGUF files whose architecture it
    knows; transformers reads the others. ``torch_dtype`` is transformers' older name for ``dtype``.
    Code that comes with a model runs only if ``trust_remote_code=True`` is given. If it is
    ``parked``, the model stays on the host, in the form that it has on its device."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype if torch_dtype is None else torch_dtype, chosen_device)
    if dtype is not None and pick_dtype(dtype, chosen_device) != chosen_dtype:
        raise ConfigError(
            f"dtype={dtype!r} and torch_dtype={torch_dtype!r} differ; give dtype only"
        )
    source = _locate(name, hf_kwargs)
    files = dict(source.options)
    with _explained(name, source, hf_kwargs):
        filled = _find_filled(name, source, weight_form, hf_kwargs, chosen_device, chosen_dtype)
        if filled is not None:
            check(filled.config, strict=strict)
            kind = _auto_class(filled.config)
            return filled.model(kind, parked=parked), filled.tokenizer()
        with quick_reader():
            config = AutoConfig.from_pretrained(source.place, **files)
            check(config, strict=strict)  # before it spends minutes on weights
            if source.gguf and not hf_kwargs:  # otherwise transformers parses it again, in seconds
                files["config"] = config
            options = {**_adapter_files(files), **hf_kwargs, **files, **_text_part(config)}
            with weights.quiet_transformers():
                kind = _auto_class(options.get("config", config))
                model = kind.from_pretrained(source.place, dtype=chosen_dtype, **options)
            if method_in(vars(config)) == MXFP4 and not getattr(model, "is_quantized", False):
                _finish_expanding(model, chosen_dtype)
            tokenizer = AutoTokenizer.from_pretrained(source.place, **files)
    return model if parked is not None else model.to(chosen_device), tokenizer


def _text_part(config: PretrainedConfig) -> dict[str, Any]:
    """The options with which transformers loads the text part of a Gemma 3n: the whole model needs
    the package timm. Empty for other models, of which transformers chooses a class."""
    if config.model_type != "gemma3n":
        return {}
    names = {r"^model\.language_model\.": "model."}
    return {"config": config.get_text_config(), "key_mapping": names}


def _finish_expanding(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts experts to ``dtype``: transformers expands MXFP4 weights to bfloat16, unless it
    finds a package with GPU kernels for them, and rows that are rounded more than others depend on
    how many are computed together."""
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    for weight in experts:
        weight.data = weight.data.to(dtype)
    gib = sum(weight.nbytes for weight in experts) / 2**30
    warnings.warn(
        f"the model's MXFP4 weights are expanded to {str(dtype).removeprefix('torch.')} and take "
        f"{gib:.1f} GiB: with weights='auto' they stay packed on an NVIDIA GPU with Triton, in "
        "bfloat16 or float32",
        stacklevel=4,
    )


def _find_filled(
    name: str | os.PathLike[str],
    source: _Source,
    form: str,
    hf_kwargs: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> FilledModel | None:
    """The checkpoint that KVBoost reads itself; None if transformers reads the model. The embedded
    models have folders in ordinary numbers, which ``"auto"`` takes."""
    options = {**source.options, **hf_kwargs}
    index, folder = source.index, None if source.index else Path(source.place)
    if form == "packed" or (form == "auto" and has_kernels(device, dtype)):
        folder = _packed_experts(source) or folder
    if index is None and os.fspath(name) in weights.known_names():
        if form != "packed":
            return None
        index = check_gguf(weights.pull_gguf(os.fspath(name)))
    return find_filled(form, folder, index, options, device, dtype)


def _packed_experts(source: _Source) -> Path | None:
    """The folder of a model from the hub whose experts are in MXFP4; None for other models."""
    if source.is_local or source.gguf:
        return None
    config = AutoConfig.from_pretrained(source.place, **source.options)
    is_known = method_in(vars(config)) == MXFP4 and config.model_type in IN_MXFP4
    return downloaded(source.place, source.options) if is_known else None


def _adapter_files(files: Mapping[str, Any]) -> dict[str, Any]:
    """If PEFT is installed, transformers also looks for an adapter of that name, and asks a hub
    that does not answer for half a minute unless it is told not to."""
    wanted = {key: files[key] for key in ("local_files_only", "cache_dir") if key in files}
    return {"adapter_kwargs": wanted} if wanted.get("local_files_only") else {}


def read_config(
    name: str | os.PathLike[str], *, strict: bool, **hf_kwargs: Any
) -> PretrainedConfig:
    """The config of a model that :func:`load` would take, without its weights."""
    source = _locate(name, hf_kwargs)
    with _explained(name, source, hf_kwargs):
        config = AutoConfig.from_pretrained(source.place, **source.options)
        check(config, strict=strict)
    return config


def load_tokenizer(name: str | os.PathLike[str], *, local_only: bool = False) -> ModelTokenizer:
    """The tokenizer of a model, without its weights. ``local_only`` downloads nothing."""
    if local_only and name in weights.BUNDLED and not weights.is_installed(os.fspath(name)):
        raise ModelNotFoundError(
            f"{name} is not installed; `kvboost models pull {name}` installs it"
        )
    source = _locate(name, {"local_files_only": True} if local_only else {})
    with _explained(name, source, {}):
        if source.index is not None:
            return ModelTokenizer(AutoTokenizer.from_pretrained(described_folder(source.index)))
        return ModelTokenizer(AutoTokenizer.from_pretrained(source.place, **source.options))


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "custom",
    strict: bool = True,
    own: bool = False,
    make_forward: Callable[..., Forward] = Forward,
    move: Callable[[PreTrainedModel], Placement] | None = None,
    image_processor: Any = None,
) -> LoadedModel:
    """A model that is already in memory, ready to serve. From now on KVBoost computes its
    attention. If the caller gives the model away (``own``), KVBoost may also rearrange its
    weights, and ``move`` it to another device. ``image_processor``: transformers' own, for a model
    that sees."""
    support = check(model.config, strict=strict)
    model = model.eval()
    if model.generation_config is None:
        raise ModelError(f"{type(model).__name__} cannot generate text")
    warn_about_defaults(model.generation_config)
    key_scales.unfold(model)  # another engine may have it
    more = {**packed_identity(model), **key_scales.identity(model)}
    identity = fingerprint(model, model.config, **more)
    placement = None
    if move is not None and support.architecture.states:
        raise ConfigError(
            f"device_memory: layers of model type {support.model_type!r} keep states and cannot be "
            "streamed; leave device_memory out"
        )
    if move is not None:
        key_scales.fold(model)  # streamed weights cannot be changed
        placement = move(model)
    packs = own and not support.architecture.states and can_pack(model.device, model.dtype)
    forward = make_forward(
        model,
        packed=support.packed,
        alone_beyond=support.reuse_limit,
        fast_layers=pack_layers(model) if packs else None,
        streams=placement is not None and placement.streamed is not None,
        probed_positions=probed_positions(model, support),
        latent=support.architecture.latent,
    )
    loaded = LoadedModel(
        name=name,
        forward=forward,
        tokenizer=ModelTokenizer(tokenizer),
        support=support,
        fingerprint=identity,
        context_length=context_length(model.config),
        eos_ids=eos_ids(model.generation_config),
        rotation=key_rotation(model, support, forward.observed, strict=strict),
        placement=placement,
        vision=make_tower(forward, tokenizer, image_processor),
    )
    if loaded.slow_dtype is not None:
        warnings.warn(loaded.slow_dtype, stacklevel=2)
    return loaded


@dataclass(frozen=True)
class _Source:
    """Where transformers finds a model."""

    place: str
    """A folder or a hub id."""
    options: Mapping[str, Any]
    """The arguments with which config, weights and tokenizer are all asked for."""
    hub_problem: str | None = None
    """Why the hub does not answer, if the model would have to come from there."""
    index: GgufIndex | None = None
    """The contents of that file, if it is here."""

    @property
    def gguf(self) -> str | None:
        """The GGUF file in ``place`` that holds the model."""
        return self.options.get("gguf_file")

    @property
    def is_local(self) -> bool:
        return Path(self.place).is_dir()


def _locate(name: str | os.PathLike[str], hf_kwargs: Mapping[str, Any]) -> _Source:
    """Finds the model called ``name``; installs a bundled one if need be. A hub that does not
    answer is not asked again: only files from its local cache are used."""
    place, gguf = _place(name)
    options: dict[str, Any] = {"trust_remote_code": False}
    options |= {option: hf_kwargs[option] for option in SHARED_OPTIONS if option in hf_kwargs}
    if gguf:
        options["gguf_file"] = gguf
    if Path(place).is_dir():
        if options.get("gguf_file"):
            path = Path(place, options.get("subfolder") or "", options["gguf_file"])
            return _Source(place, options, index=check_gguf(path))
        return _Source(place, options)
    problem = None if options.get("local_files_only") else why_unreachable()
    if problem:
        options["local_files_only"] = True
    return _Source(place, options, problem)


def _place(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The arguments for transformers for ``name``: a folder or hub id, and a GGUF file in it."""
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise ConfigError(f"model_name={name!r} must be a bundled name, a folder or a hub id")
    name = os.fspath(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no GGUF file {path}; check the path")
        return str(path.parent), path.name
    if path.is_dir():
        return str(path), None
    if name in weights.BUNDLED or weights.is_installed(name):
        return str(weights.pull_model(name)), None
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(
            f"there is no model folder {path}; give a folder with config.json and weights, a "
            f".gguf file, a hub id, or one of these names: {', '.join(weights.known_names())}"
        )
    return name, None


@contextmanager
def _explained(
    name: str | os.PathLike[str], source: _Source, hf_kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Turns what transformers raises while it loads ``source`` into one sentence of ours."""
    try:
        yield
    except KVBoostError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if "trust_remote_code=True" in str(error) and not source.options["trust_remote_code"]:
            raise ModelError(
                f"{os.fspath(name)!r} comes with Python code of its own, and KVBoost runs none by "
                "itself; read that code, and if you trust it, pass trust_remote_code=True to "
                "KVBoost.from_pretrained"
            ) from error
        if isinstance(error, TypeError) and hf_kwargs:
            raise ConfigError(
                f"transformers refuses one of the options {', '.join(sorted(hf_kwargs))}: {reason}"
            ) from error
        if source.is_local and source.gguf:
            file = Path(source.place, source.gguf)
            raise ModelError(
                f"the GGUF file {file} cannot be loaded by transformers: {reason}"
            ) from error
        if not isinstance(error, (OSError, ValueError, ImportError, SafetensorError)):
            raise
        raise ModelNotFoundError(_explain(name, source, reason)) from error


def _explain(name: str | os.PathLike[str], source: _Source, reason: str) -> str:
    if source.is_local:
        return f"the folder {source.place} holds no model that transformers can load: {reason}"
    guess = closest(os.fspath(name).rpartition("/")[2], weights.known_names())
    hint = f" Did you mean {guess!r}?" if guess else ""
    why = f"the hub does not answer ({source.hub_problem})" if source.hub_problem else reason
    return (
        f"{os.fspath(name)!r} is not a bundled or installed model "
        f"({', '.join(weights.known_names())}), not a folder here, and could not be loaded from "
        f"the hub: {why}.{hint}"
    )


def _auto_class(config: PretrainedConfig) -> Any:
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def machine_key(model: LoadedModel, num_ranks: int = 1) -> str:
    """Identifies a model and what it runs on: the cost of a forward depends on both."""
    identity = f"{model.fingerprint} {chip_name(model.device)} {torch.get_num_threads()}"
    identity += f" {num_ranks} ranks" if num_ranks > 1 else ""
    identity += f" {model.placement.key}" if model.placement is not None else ""
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
