"""Tiny random models that see, of real structure, with tokenizers and image processors."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.model.vision.kept import Kept
from support.tiny import CONTEXT, DEVICE, byte_tokenizer, tiny_config, with_tower

SIDE = 24
"""Pixels of a tile."""
PATCH = 4
_IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
TOKENS = {
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    "qwen3_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
}
"""The first one is the row of an image."""
_IN_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": _IN_QWEN,
    "qwen3_vl": _IN_QWEN,
}
"""What the chat template writes for an image."""
VOCAB = 280
FIRST_TOKEN = 260
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def vision_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One token per byte, the tokens of images, and a template that writes parts of messages."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    fill = [f"<unused{number}>" for number in range(FIRST_TOKEN - len(tokenizer))]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fill, *TOKENS[name]]})
    assert tokenizer.convert_tokens_to_ids(TOKENS[name][0]) == FIRST_TOKEN
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}" + PLACEHOLDERS[name] + "\n"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


@functools.cache
def vision_model(name: str) -> PreTrainedModel:
    """One model for all tests of a process."""
    return make_vision_model(name)


def make_vision_model(name: str, **changes: Any) -> PreTrainedModel:
    """A random model, the same one every time. ``changes``: of its text part."""
    kinds, image = transformers, {"image_token_id": FIRST_TOKEN}
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 2 * CONTEXT, **changes}
    square = {"image_size": SIDE, "patch_size": PATCH}
    qwen = {"video_token_id": FIRST_TOKEN + 3, "vision_start_token_id": FIRST_TOKEN + 1, **image}
    small = {**dict.fromkeys(("hidden_size", "intermediate_size"), 32), "out_hidden_size": 64}
    small |= {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
    if name in ("smolvlm", "idefics3"):
        kind = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[name]
        tower = getattr(kinds, f"{kind}VisionConfig")(**_VISION, **square)
        text = tiny_config("llama", **sizes)
        model = with_tower(kind, tower, text, scale_factor=2, pad_token_id=256, **image)
    elif name == "internvl":
        sides = {key: [value, value] for key, value in square.items()}
        tower = kinds.InternVLVisionConfig(**_VISION, **sides)
        model = with_tower("InternVL", tower, tiny_config("qwen2", **sizes), **image)
    elif name == "qwen2_5_vl":
        vision = kinds.Qwen2_5_VLConfig().vision_config.__class__
        tower = vision(**small, window_size=16, fullatt_block_indexes=[1])
        model = with_tower("Qwen2_5_VL", tower, _spatial(name, sizes), **qwen)
    elif name == "qwen3_vl":
        more = {"num_position_embeddings": 144, "deepstack_visual_indexes": [0, 1]}
        tower = kinds.Qwen3VLVisionConfig(**small, **more)
        model = with_tower("Qwen3VL", tower, _spatial(name, sizes), **qwen)
    else:
        tower = kinds.SiglipVisionConfig(**_VISION, **square)
        text = tiny_config("gemma3_text", **sizes)
        model = with_tower("Gemma3", tower, text, mm_tokens_per_image=9, **image)
    model.eval()
    with torch.no_grad():  # louder weights, so that attention is far from uniform
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and "vision" not in key:
                weight.mul_(4)
            if "multi_modal_projector" in key or "connector" in key:
                weight.normal_(0, 0.5)
    model.generation_config.eos_token_id = 256
    model.generation_config.pad_token_id = 256
    return model.to(DEVICE)


def _spatial(name: str, sizes: dict[str, Any]) -> Any:
    """The text part of a model that numbers the rows of images in three dimensions."""
    options = {
        **tiny_config("qwen2").to_dict(), **sizes, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    for key in ("model_type", "layer_types", "architectures"):
        options.pop(key, None)
    kinds = {
        "qwen2_5_vl": transformers.Qwen2_5_VLTextConfig,
        "qwen3_vl": transformers.Qwen3VLTextConfig,
    }
    return kinds[name](**options)


def image_processor(name: str) -> Any:
    """The family's image processor, for tiles of ``SIDE`` pixels."""
    kinds = transformers
    if name in ("smolvlm", "idefics3"):
        kind = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[name]
        return getattr(kinds, f"{kind}ImageProcessorPil")(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
    size = {"height": SIDE, "width": SIDE}
    if name == "internvl":
        return kinds.GotOcr2ImageProcessorPil(size=size, min_patches=1, max_patches=4)
    if name.startswith("qwen"):
        area = {"shortest_edge": 64, "longest_edge": 48 * 48}
        return kinds.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=area)
    return kinds.Gemma3ImageProcessorPil(size=size)


def vision_engine(name: str, model: PreTrainedModel | None = None, **config: Any) -> KVBoost:
    """An engine without drafts over a tiny model that sees."""
    options = {"chunk_size": 16, "speculate": "off", **config}
    return KVBoost.from_model(
        model or vision_model(name),
        vision_tokenizer(name),
        image_processor=image_processor(name),
        config=EngineConfig(**options),
    )


def picture(seed: int = 0, width: int = 40, height: int = 40) -> Image.Image:
    """An image of random blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (6, 6, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(blocks.numpy()).resize((width, height), Image.Resampling.NEAREST)


def file_of(image: Image.Image, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def about(image: Any, question: str, before: str = "") -> list[dict[str, Any]]:
    """A conversation about an image."""
    parts = [
        {"type": "text", "text": before},
        {"type": "image", "image": image},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]


def stock_inputs(name: str, engine: KVBoost, messages: Any) -> dict[str, torch.Tensor]:
    """What stock transformers takes for the same prompt: pixels and placeholder tokens."""
    read = engine.read(messages)
    assert read.images is not None
    ids = torch.tensor(read.images.plain(read.token_ids))[None].long()
    images = [
        part["image"]
        if isinstance(part["image"], Image.Image)
        else Image.open(io.BytesIO(part["image"])).convert("RGB")
        for message in messages
        for part in message["content"]
        if part["type"] == "image"
    ]
    found = image_processor(name)(
        [images] if name in ("smolvlm", "idefics3") else images,
        return_tensors="pt",
        **_OPTIONS.get(name, {}),
    )
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    inputs = {key: found[key] for key in names if key in found}
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == FIRST_TOKEN).long()
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == FIRST_TOKEN).long()
    return {"input_ids": ids, **inputs}


_OPTIONS = {"internvl": {"crop_to_patches": True}}


def forget_images(tower: Any) -> None:
    """What was made of images is made again from now on."""
    for one in (tower, tower.reader):
        one.kept = Kept(one.kept.most_bytes, lambda made: 0)
