"""Turn the weights of a GGUF file into a plain Hugging Face folder.

Reads: a .gguf file of architecture `llama`. Writes: config.json, generation_config.json,
model.safetensors. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ; the row order
of q and k is that of llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute), undone here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.states.folder import save_configs, save_weights

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, folder: Path, *, dtype: torch.dtype) -> int:
    """Write the model of a GGUF file into `folder`; return its number of parameters.

    Raises: EyasError if the file is no GGUF, of another architecture, or has unknown tensors.
    """
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise EyasError(f"{path}: not a readable GGUF file ({error})") from None
    config = _llama_config(path, reader, dtype)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        rows = dequantize(tensor.data, tensor.tensor_type)
        if count := next((n for part, n in heads.items() if part in name), None):
            rows = undo_permutation(rows, count)
        tensors[name] = torch.tensor(rows).to(dtype)
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(tensors, folder)
    save_configs(config, folder)
    return sum(tensor.numel() for tensor in tensors.values())


def hf_name(name: str) -> str:
    """Return a tensor's Hugging Face name: blk.3.attn_q -> model.layers.3.self_attn.q_proj."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _IN_LAYER or parts[3] != "weight":
        raise EyasError(f"GGUF tensor '{name}': no Llama tensor has that name")
    return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"


def undo_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a q or k projection back from interleaved pairs to two halves a head.

    For one head of 6 rows, GGUF holds halves (a0 a1 a2 | b0 b1 b2) as pairs:
    stored  a0 b0 a1 b1 a2 b2
    wanted  a0 a1 a2 b0 b1 b2
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _llama_config(path: Path, reader: Any, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise EyasError(f"{path}: GGUF key '{key}' is missing")
        return field.contents()

    if (architecture := value("general.architecture")) != "llama":
        raise EyasError(f"{path}: expected architecture 'llama', got '{architecture}'")
    heads = value("llama.attention.head_count")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(reader.get_field("tokenizer.ggml.tokens").data),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("llama.attention.head_count_kv"),
        head_dim=value("llama.embedding_length") // heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=_shortest(value("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(value("llama.rope.freq_base")),
        },
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        dtype=dtype,
    )


def _shortest(value: float) -> float:
    """Return the decimal number a float32 was written from: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
