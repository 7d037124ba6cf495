"""Loads what a model needs beside its weights to read images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvboost.config import install_extra
from kvboost.model.vision.families import FAMILIES
from kvboost.model.vision.opening import has_pillow
from kvboost.model.vision.reader import make_reader
from kvboost.model.vision.tower import VisionTower

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from kvboost.model.execution.forward import Forward

_TEMPLATE_FILE = "chat_template.json"
"""Where older models that see have their chat template. Tokenizers do not look there."""


def find_processor(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Callable[[], tuple[str, Mapping[str, Any]]],
) -> Any:
    """The image processor in a model's folder, for a family that KVBoost reads images for; None if
    there is none, or no Pillow. ``source`` gives the folder or hub id, and the options of
    transformers' ``from_pretrained``. Also gives the tokenizer the chat template that belongs to
    the processor, if it has none itself."""
    if config.model_type not in FAMILIES or not has_pillow():
        return None
    from transformers import AutoImageProcessor
    from transformers.utils import cached_file

    place, options = source()
    options = {name: one for name, one in options.items() if name != "gguf_file"}
    missing = {"_raise_exceptions_for_missing_entries": False}
    missing |= {"_raise_exceptions_for_connection_errors": False}
    files = {name: one for name, one in options.items() if name != "trust_remote_code"}
    if tokenizer.chat_template is None:
        found = cached_file(place, _TEMPLATE_FILE, **files, **missing)
        if found is not None:
            with open(found, encoding="utf-8") as file:
                tokenizer.chat_template = json.load(file)["chat_template"]
    names = ("preprocessor_config.json", "processor_config.json")
    if all(cached_file(place, name, **files, **missing) is None for name in names):
        return None
    # The same pixels, whether torchvision is installed or not.
    return AutoImageProcessor.from_pretrained(place, backend="pil", **options)


def make_tower(
    forward: Forward, tokenizer: PreTrainedTokenizerBase, processor: Any
) -> VisionTower | str:
    """The vision tower, or the reason why there is none."""
    config = forward.model.config
    if config.model_type not in FAMILIES:
        sees = getattr(config, "vision_config", None) is not None
        what = "its images are not supported" if sees else "it reads text only"
        return (
            f"this model cannot be given images: it is a {config.model_type} model, and {what}; "
            f"choose one of {', '.join(FAMILIES)}"
        )
    if not has_pillow():
        return f"images need Pillow; {install_extra('images')}"
    if processor is None:
        return (
            "this model cannot be given images: it came without an image processor; give "
            "from_model image_processor=, or from_pretrained a folder with preprocessor_config.json"
        )
    return VisionTower(forward, make_reader(config, tokenizer, processor))
