"""Tiny models as GGUF files, in the formats that the package gguf can write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    dequantize,
    get_tensor_name_map,
    quantize,
)
from tokenizers import pre_tokenizers
from transformers import PretrainedConfig, PreTrainedModel

from support.tiny import EOS, byte_tokenizer

ARCHITECTURE_OF = {"gemma3_text": "gemma3"}
Q4_1, Q5_0, Q8_0 = (
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q8_0,
)


def kind_of(name: str) -> GGMLQuantizationType:
    """A format for each kind of tensor, so that the products of a layer mix them."""
    if name.startswith("token_embd"):
        return Q8_0
    return Q5_0 if "attn_v" in name or "ffn_down" in name else Q4_1


def write_gguf(
    model: PreTrainedModel, path: Path, *, described: bool = False
) -> dict[str, GGMLQuantizationType]:
    """Writes the weights of ``model``; returns the formats of the quantised ones. Afterwards the
    model has the weights that are in the file. With ``described``, the file also has what
    transformers needs for a config and a tokenizer."""
    config = model.config.get_text_config()
    name = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    writer = GGUFWriter(path, name)
    if described:
        _describe(writer, config)
    kinds = {}
    for key, weight in model.named_parameters():
        module, _, suffix = key.rpartition(".")
        found = f"{names.get_name(module)}.{suffix}"
        numbers = weight.detach().float().numpy()
        order = _order(found, name, config, len(numbers))
        placed = numbers[order]
        if name.startswith("gemma") and found.endswith("norm.weight"):
            placed = placed + 1
        if numbers.ndim == 1:
            writer.add_tensor(found, placed)
            continue
        kinds[found] = kind = kind_of(found)
        blocks = quantize(placed, kind)
        writer.add_tensor(found, blocks, raw_dtype=kind)
        kept = np.empty_like(numbers)
        kept[order] = dequantize(blocks, kind)
        weight.data.copy_(weight.new_tensor(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kinds


def _describe(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None)
    writer.add_key_length(head_dim or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = ["<eos>", "in", "th", "the"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, *more])
    writer.add_token_types([TokenType.NORMAL] * EOS + [TokenType.CONTROL] + [TokenType.NORMAL] * 3)
    writer.add_token_scores([0.0] * (EOS + len(more)))
    writer.add_token_merges(["i n", "t h", "th e"])
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(EOS)
    writer.add_unk_token_id(EOS)
    writer.add_pad_token_id(EOS)


def _order(name: str, architecture: str, config: object, rows: int) -> np.ndarray:
    """llama.cpp sorts the rows of queries and keys so that the channels that rotate together are
    neighbours."""
    heads = {
        "attn_q": config.num_attention_heads,  # type: ignore[attr-defined]
        "attn_k": config.num_key_value_heads,  # type: ignore[attr-defined]
    }.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return np.arange(rows)
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def install_tiny(model: PreTrainedModel, home: Path, name: str = "tiny") -> Path:
    """A model in ``home`` as KVBoost installs one: its folder and its GGUF file, with the same
    weights."""
    folder = home / "models" / name
    folder.mkdir(parents=True)
    write_gguf(model, folder / "model.gguf")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    record = {"name": name, "description": "", "requirements": ["none"], "member": "", "nbytes": 0}
    (folder / "kvboost.json").write_text(json.dumps({**record, "sha256": "", "license": ""}))
    return folder
