from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.errors import EyasError
from eyas.states.gguf import convert_gguf, hf_name, undo_permutation
from eyas.states.target import load_model

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Do what llama.cpp's converter does to q and k, written as a loop over rows."""
    out = np.empty_like(rows)
    per_head = rows.shape[0] // heads
    for head in range(heads):
        for half in range(2):
            for i in range(per_head // 2):
                source = head * per_head + half * (per_head // 2) + i
                out[head * per_head + 2 * i + half] = rows[source]
    return out


def gguf_tensor(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name], value
    _, _, layer, *middle, last = name.split(".")
    part = ".".join(middle)
    heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
    rows = interleave(value, heads) if heads else value
    return f"blk.{layer}.{GGUF_NAMES[part]}.{last}", rows


def write_gguf(path: Path, model: Any, *, architecture: str = "llama", tied: bool = False) -> Path:
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, value in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            key, rows = gguf_tensor(name, value.numpy())
            writer.add_tensor(key, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_undo_permutation_by_hand() -> None:
    stored = np.array([["a0"], ["b0"], ["a1"], ["b1"], ["a2"], ["b2"]])
    assert undo_permutation(stored, 1)[:, 0].tolist() == ["a0", "a1", "a2", "b0", "b1", "b2"]


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_undo_permutation_reverses_the_converter(heads: int) -> None:
    rows = np.arange(heads * 8 * 5).reshape(heads * 8, 5)
    assert np.array_equal(undo_permutation(interleave(rows, heads), heads), rows)


def test_a_converted_model_computes_what_the_original_does(llama: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama)
    parameters = convert_gguf(path, tmp_path / "out", dtype=torch.float32)
    converted = load_model(tmp_path / "out")
    assert parameters == sum(p.numel() for p in llama.parameters())
    ids = torch.tensor([[1, 2, 3, 40, 50]])
    assert torch.equal(converted(ids).logits, llama(ids).logits)
    assert converted.config.rms_norm_eps == 1e-5
    assert converted.generation_config.eos_token_id == 2


def test_a_file_without_an_output_matrix_is_tied(llama: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, tied=True)
    convert_gguf(path, tmp_path / "out", dtype=torch.bfloat16)
    converted = load_model(tmp_path / "out")
    assert converted.config.tie_word_embeddings
    expected = llama.model.embed_tokens.weight.bfloat16().float()
    assert torch.equal(converted.lm_head.weight, expected)


def test_another_architecture_and_no_gguf_are_refused(llama: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, architecture="qwen2")
    with pytest.raises(EyasError, match="expected architecture 'llama', got 'qwen2'"):
        convert_gguf(path, tmp_path / "out", dtype=torch.float32)
    path.write_bytes(b"no model at all, but long enough to be read as a header")
    with pytest.raises(EyasError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ssm_a"])
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(EyasError, match="no Llama tensor has that name"):
        hf_name(name)
