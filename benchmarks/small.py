"""A small random model: for runs that need an engine, but no sensible answers."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost.model.loading.load import LoadedModel, wrap

END = 256
"""The token that ends an answer; those below it are bytes."""


def small_model() -> LoadedModel:
    """A Llama of 3 layers in float32 with 512 positions, the same weights every time. It reads a
    prompt in milliseconds."""
    config = LlamaConfig(
        vocab_size=END + 4,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)  # louder weights, so that no two tokens are nearly as likely
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return wrap(model, fast, name="small random Llama")
