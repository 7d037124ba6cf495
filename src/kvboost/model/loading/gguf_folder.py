"""The config and the tokenizer of a GGUF file as a transformers folder, made once for each file.

transformers needs seconds to read them from the file. The folder is kept in

    $KVBOOST_HOME/gguf/DIGEST/{config.json, generation_config.json, tokenizer.json, ...}

where the digest is that of everything in the file but the data of its tensors.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from kvboost.config import home
from kvboost.model.loading.gguf import GgufIndex
from kvboost.model.loading.gguf_reader import quick_reader
from kvboost.model.loading.weights import quiet_transformers, scratch_for

CONFIG = "config.json"


def described_folder(index: GgufIndex) -> Path:
    """The folder for a file; made if it is missing."""
    folder = home() / "gguf" / _digest(index)
    if (folder / CONFIG).is_file():
        return folder
    with scratch_for(folder.name, folder.parent) as scratch:
        if not (folder / CONFIG).is_file():
            made = scratch / "folder"
            _describe(index, made)
            made.rename(folder)
    return folder


def _describe(index: GgufIndex, folder: Path) -> None:
    place = {"gguf_file": index.path.name, "trust_remote_code": False}
    with quiet_transformers(), quick_reader():
        config = AutoConfig.from_pretrained(index.path.parent, **place)
        tokenizer = AutoTokenizer.from_pretrained(index.path.parent, **place)
        tokenizer.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        config.save_pretrained(folder)


def _digest(index: GgufIndex) -> str:
    with index.path.open("rb") as file:
        head = file.read(index.data_start)
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(transformers.__version__.encode())
    return digest.hexdigest()
