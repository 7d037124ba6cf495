"""Why transformers' other language models are not supported.

To support one: remove its name here, add it in ``compat.py``, and a tiny model to
``tests/support/families.py``.
"""

from __future__ import annotations

_MODEL_TYPES = {
    "keeps a state of linear layers in a way that the cache does not store": (
        "bailing_hybrid falcon_mamba inkling_text kimi_linear mamba mamba2 qwen4_exp "
        "qwen4_exp_text recurrent_gemma rwkv xlstm"
    ),
    "keeps its states in a cache of its own, and reads text after them token by token": "minimax",
    "chooses the keys that it attends to by an index of its own, which the cache does not store": (
        "axk2 deepseek_v32 glm_moe_dsa hy_v4 minimax_m3_vl_text"
    ),
    "keeps entries that hold several tokens each": "deepseek_v4",
    "reads or writes images or sound beside text, or bytes in patches": (
        "gemma4_unified blt cohere_compass_text emu3 fuyu git got_ocr2 mllama moshi "
        "moss_transcribe_diarize phi4_multimodal"
    ),
    "has not been tried yet": "gemma4_unified_text",
    "keeps values that are narrower than its keys": "mimo_v2_flash",
    "rotates other channels of a key in some layers than in others": "laguna",
    "computes attention in a way of its own, which KVBoost's attention cannot replace": (
        "codegen cpmant ctrl dbrx diffllama doge falcon gpt_neo gpt_neox_japanese gptj hrm_text "
        "jetmoe openai-gpt reformer xglm xlm xlnet"
    ),
    "uses position embeddings that are added to the text, so its keys cannot be rotated": (
        "biogpt gpt-sw3 gpt_bigcode"
    ),
    "drafts tokens for another model, whose keys and values it reads": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "is an encoder, or the decoder of one, and not a model that continues text": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert "
        "data2vec-text electra ernie marian mbart megatron-bert musicgen musicgen_melody mvp "
        "pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr "
        "whisper xlm-roberta xlm-roberta-xl xmod"
    ),
}

WHY_NOT = {name: reason for reason, names in _MODEL_TYPES.items() for name in names.split()}
"""The reason for each model type."""
