"""speculators 0.9.0's EAGLE-3 step: its shifting, packing into one row, model and eager loss.

The drafter is the one that SGLang runs: no EAGLE-3.1 norms, lm_head trained. Its mathematics (a
mean over its own rows, no decay) is its own: it serves for time and memory, not for gradients.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peers.batch import Batch, Config, Document
from peers.specforge_step import llama_config

_LAYER = ("midlayer.", "layers.0.")
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")


class Step:
    """See `peers.batch.Step`."""

    def __init__(self, config: Config, batch: Batch, dtype: str) -> None:
        if dtype != "float32":
            raise ValueError(f"speculators: expected dtype float32, got {dtype}")
        self._steps = config["ttt_length"]
        self._clip = config["max_grad_norm"]
        self._model = _build_model(config, batch)
        losses = importlib.import_module("speculators.losses")
        self._loss_config = losses.resolve_loss_config("kl_div", "eager")
        self._batch = _pack(batch)
        self._optimizer = torch.optim.AdamW(
            self.parameters().values(), lr=config["lr"], weight_decay=0.0
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Return what is trained."""
        named = self._model.named_parameters()
        return {n.replace(*reversed(_LAYER)): p for n, p in named if p.requires_grad}

    def gradients(self) -> float:
        """Refuse: its loss is another function."""
        raise ValueError("speculators: gradients are compared with SpecForge's alone")

    def advance(self) -> None:
        """Do one optimiser step."""
        # its metrics write into the mask
        batch = self._batch | {"loss_mask": self._batch["loss_mask"].clone()}
        _, loss, _ = self._model(
            **batch,
            ttt_steps=self._steps,
            ttt_step_loss_decay=1.0,
            loss_config=self._loss_config,
        )
        loss.backward()
        nn.utils.clip_grad_norm_(list(self.parameters().values()), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _build_model(config: Config, batch: Batch) -> Any:
    package = importlib.import_module("speculators.models.eagle3")
    settings = importlib.import_module("speculators.config")
    greedy = importlib.import_module("speculators.proposals.greedy")
    layer = llama_config(config)
    layer._attn_implementation = "sdpa"
    speculation = settings.SpeculatorsConfig(
        algorithm="eagle3",
        default_proposal_method="greedy",
        proposal_methods=[
            greedy.GreedyTokenProposalConfig(speculative_tokens=config["ttt_length"])
        ],
        verifier=settings.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model = package.Eagle3DraftModel(
        package.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=speculation,
            **dict.fromkeys(_NORM_FLAGS, False),
        )
    )
    model.load_vocab_mappings(batch.t2d_V, batch.d2t_N)
    state = {name.replace(*_LAYER): tensor for name, tensor in batch.start.items()}
    state["embed_tokens.weight"] = batch.embed_VD
    state["verifier_lm_head.weight"] = batch.head_VD[batch.t2d_V]
    _, unexpected = model.load_state_dict(state, strict=False)
    if unexpected:
        raise ValueError(f"speculators: expected the names of {_LAYER[1]}*, got {unexpected}")
    model.verifier_norm = nn.Identity()  # final states come after the target's last norm
    model.lm_head.weight.requires_grad_(True)
    model.train()
    return model


def _pack(batch: Batch) -> dict[str, Tensor]:
    parts = [_shift(document) for document in batch.documents]
    lengths = torch.cat([part.pop("lengths") for part in parts])
    packed = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    numbers = torch.repeat_interleave(torch.arange(len(parts)), lengths)
    return packed | {"document_ids": numbers[None]}


def _shift(document: Document) -> dict[str, Tensor]:
    data = importlib.import_module("speculators.models.eagle3.data")
    length = len(document.input_ids_T)
    return data.shift_batch(
        {
            "input_ids": document.input_ids_T,
            "hidden_states": document.aux_TE,
            "verifier_last_hidden_states": document.final_TD,
            "loss_mask": document.mask_T,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
