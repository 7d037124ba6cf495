"""``adapter_config.json``, as PEFT writes it. What KVBoost would not compute as PEFT does is
refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost.model.adapters.patterns import Patterns
from kvboost.model.adapters.reading import opened, parse, read, refuse, shown

CONFIG = "adapter_config.json"
MOST_BYTES = 1 << 20
MOST_RANK = 1 << 16
MOST_INVOCATION = 1024

READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens"}
)
WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        *("inference_mode", "lora_dropout", "fan_in_fan_out", "runtime_config", "megatron_core"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("peft_type", "bias", "init_lora_weights", "ensure_weight_tying"),
    }
)
"""Fields about training or about the files, whose tensors say which modules they change; and those
that are checked by themselves."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""
REASONS = {
    "use_dora": "DoRA changes the norms of the base model's weights as well",
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it changes embeddings",
    "lora_bias": "it has biases",
    "layer_replication": "it changes the number of layers",
    "target_parameters": "it changes parameters that are not linear layers",
}


class LoraConfig:
    """The config of the adapter in ``folder``. Raises AdapterError if it is not supported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with opened(folder, CONFIG) as (file, size):
            if size > MOST_BYTES:
                raise refuse(folder, f"{CONFIG} has {size:,} bytes; {MOST_BYTES:,} are allowed")
            config = parse(folder, CONFIG, read(file, size))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            kind = config.get("peft_type") if isinstance(config, dict) else None
            raise refuse(folder, f"peft_type={_shown(kind)} in {CONFIG}; only 'LORA' is supported")
        self._check_fields(config)
        self._by_root = bool(config.get("use_rslora"))
        self._rank = self._number("r", config.get("r", 8), MOST_RANK)
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._ranks = self._patterns(config, "rank_pattern", MOST_RANK)
        self._alphas = self._patterns(config, "alpha_pattern")
        self.invocation = self._invocation(config)

    def rank_and_scale(self, module: str) -> tuple[float, float]:
        """For the module at this path."""
        rank = self._find("rank_pattern", self._ranks, module) or self._rank
        alpha = self._find("alpha_pattern", self._alphas, module) or self._alpha
        return rank, alpha / (math.sqrt(rank) if self._by_root else rank)

    def _check_fields(self, config: Mapping[str, Any]) -> None:
        if config.get("bias", "none") != "none":
            bias = _shown(config["bias"])
            raise refuse(self._folder, f"bias={bias}: it has biases; train with bias='none'")
        start = config.get("init_lora_weights")
        if not any(start is plain for plain in PLAIN_STARTS) and start not in PLAIN_STARTS:
            raise refuse(
                self._folder,
                f"init_lora_weights={_shown(start)} changes the weights of the base model; save it "
                "with path_initial_model_for_weight_conversion, which gives an ordinary adapter",
            )
        for name, value in config.items():
            if name not in READ and name not in WITHOUT_EFFECT and value:
                why = REASONS.get(name, "KVBoost does not know what this option changes")
                raise refuse(self._folder, f"{shown(name)}={_shown(value)}: {why}")

    def _number(self, field: str, value: Any, most: float = math.inf) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        try:
            if is_number and 0 < float(value) <= most and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        limit = f", {most:,} at most" if math.isfinite(most) else ""
        raise refuse(self._folder, f"{field}={_shown(value)} in {CONFIG}; above 0{limit}")

    def _patterns(self, config: Mapping[str, Any], field: str, most: float = math.inf) -> Patterns:
        found = config.get(field) or {}
        if not isinstance(found, dict):
            raise refuse(self._folder, f"{field}={_shown(found)} in {CONFIG} must be an object")
        values = {key: self._number(field, one, most) for key, one in found.items()}
        try:
            return Patterns(values)
        except ValueError as error:
            raise refuse(self._folder, f"{field} in {CONFIG}: {error}") from None

    def _find(self, field: str, patterns: Patterns, module: str) -> float | None:
        try:
            return patterns.find(module)
        except ValueError as error:
            raise refuse(self._folder, f"{field} in {CONFIG}: {error}") from None

    def _invocation(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        tokens = config.get("alora_invocation_tokens") or []
        is_ids = isinstance(tokens, list) and all(
            type(token) is int and 0 <= token < 1 << 31 for token in tokens
        )
        if not is_ids or len(tokens) > MOST_INVOCATION:
            raise refuse(
                self._folder,
                f"alora_invocation_tokens={_shown(tokens)} must be token ids, {MOST_INVOCATION} "
                "at most",
            )
        return tuple(tokens)


def _shown(value: object) -> str:
    """A value of the config, as Python writes it."""
    return shown(repr(value))
