"""Why transformers' other language models are not supported.

To support one: remove its name here, add a row to ``compat.ARCHITECTURES`` and a tiny model to
``tests/support/families.py``.
"""

from __future__ import annotations

STATE = "keeps a state of linear layers in a way that the cache does not store"
OWN_CACHE = "keeps its states in a cache of its own, and reads text after them token by token"
INDEX = "chooses the keys that it attends to by an index of its own, which the cache does not store"
COMPRESSED = "keeps entries that hold several tokens each"
NARROW = "keeps values that are narrower than its keys"
UNTRIED = "has not been tried yet"
WIDTHS = "rotates other channels of a key in some layers than in others"
ATTENTION = "computes attention in a way of its own, which KVBoost's attention cannot replace"
LEARNED = "uses position embeddings that are added to the text, so its keys cannot be rotated"
MEDIA = "reads or writes images or sound beside text, or bytes in patches"
ASSISTANT = "drafts tokens for another model, whose keys and values it reads"
ENCODER = "is an encoder, or the decoder of one, and not a model that continues text"

WHY_NOT: dict[str, str] = {
    "bailing_hybrid": STATE,
    "falcon_mamba": STATE,
    "inkling_text": STATE,
    "kimi_linear": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "minimax": OWN_CACHE,
    "qwen4_exp": STATE,
    "qwen4_exp_text": STATE,
    "recurrent_gemma": STATE,
    "rwkv": STATE,
    "xlstm": STATE,
    "axk2": INDEX,
    "deepseek_v32": INDEX,
    "glm_moe_dsa": INDEX,
    "hy_v4": INDEX,
    "minimax_m3_vl_text": INDEX,
    "deepseek_v4": COMPRESSED,
    "gemma3n": MEDIA,
    "gemma4_unified": MEDIA,
    "gemma4_unified_text": UNTRIED,
    "mimo_v2_flash": NARROW,
    "laguna": WIDTHS,
    "codegen": ATTENTION,
    "cpmant": ATTENTION,
    "ctrl": ATTENTION,
    "dbrx": ATTENTION,
    "diffllama": ATTENTION,
    "doge": ATTENTION,
    "falcon": ATTENTION,
    "gpt_neo": ATTENTION,
    "gpt_neox_japanese": ATTENTION,
    "gptj": ATTENTION,
    "hrm_text": ATTENTION,
    "jetmoe": ATTENTION,
    "openai-gpt": ATTENTION,
    "reformer": ATTENTION,
    "xglm": ATTENTION,
    "xlm": ATTENTION,
    "xlnet": ATTENTION,
    "biogpt": LEARNED,
    "gpt-sw3": LEARNED,
    "gpt_bigcode": LEARNED,
    "blt": MEDIA,
    "cohere_compass_text": MEDIA,
    "emu3": MEDIA,
    "fuyu": MEDIA,
    "git": MEDIA,
    "got_ocr2": MEDIA,
    "mllama": MEDIA,
    "moshi": MEDIA,
    "moss_transcribe_diarize": MEDIA,
    "phi4_multimodal": MEDIA,
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
    "bart": ENCODER,
    "bert": ENCODER,
    "bert-generation": ENCODER,
    "big_bird": ENCODER,
    "bigbird_pegasus": ENCODER,
    "blenderbot": ENCODER,
    "blenderbot-small": ENCODER,
    "camembert": ENCODER,
    "data2vec-text": ENCODER,
    "electra": ENCODER,
    "ernie": ENCODER,
    "marian": ENCODER,
    "mbart": ENCODER,
    "megatron-bert": ENCODER,
    "musicgen": ENCODER,
    "musicgen_melody": ENCODER,
    "mvp": ENCODER,
    "pegasus": ENCODER,
    "plbart": ENCODER,
    "prophetnet": ENCODER,
    "rembert": ENCODER,
    "roberta": ENCODER,
    "roberta-prelayernorm": ENCODER,
    "roc_bert": ENCODER,
    "roformer": ENCODER,
    "trocr": ENCODER,
    "whisper": ENCODER,
    "xlm-roberta": ENCODER,
    "xlm-roberta-xl": ENCODER,
    "xmod": ENCODER,
}
