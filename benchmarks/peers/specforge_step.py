"""SpecForge 0.2.0's EAGLE-3 step: its sample normaliser, collator, target head, strategy and model.

All of it is the wheel's code but one thing: its loss is a Triton kernel, in whose place stands the
wheel's own torch function of the same formula. It has no packing: documents of one length run as
one batch, others one by one, each weighted by its share of the tokens.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peers.batch import Batch, Config, Document

_DECAY = 0.8
_MODEL = "specforge.algorithms.eagle3.model"


class Step:
    """See `peers.batch.Step`."""

    def __init__(self, config: Config, batch: Batch, dtype: str) -> None:
        if dtype != "float32":
            raise ValueError(f"specforge: expected dtype float32, got {dtype}")
        model = _import_model()
        draft_module = importlib.import_module("specforge.modeling.draft.llama3_eagle")
        strategies = importlib.import_module("specforge.training.strategies.base")
        self._draft = draft_module.LlamaForCausalLMEagle3(
            llama_config(config), attention_backend="sdpa"
        )
        state = {"embed_tokens.weight": batch.embed_VD, "d2t": batch.d2t_N, "t2d": batch.t2d_V}
        self._draft.load_state_dict(batch.start | state)
        self._draft.freeze_embedding()
        online = model.OnlineEagle3Model(
            self._draft, length=config["ttt_length"], attention_backend="sdpa"
        )
        online.train()
        self._strategy = strategies.Eagle3TrainStrategy(
            online, target_head=_target_head(batch), ploss_decay=_DECAY
        )
        self._micro = _micro_batches(batch)
        self._clip = config["max_grad_norm"]
        self._optimizer = torch.optim.AdamW(
            self.parameters().values(), lr=config["lr"], weight_decay=0.0
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Return what is trained."""
        return {n: p for n, p in self._draft.named_parameters() if p.requires_grad}

    def gradients(self) -> float:
        """Do forward and backward."""
        total = 0.0
        for micro, share in self._micro:
            loss = self._strategy.forward_loss(micro).loss * share
            loss.backward()
            total += float(loss.detach())
        return total

    def advance(self) -> None:
        """Do one optimiser step."""
        self.gradients()
        nn.utils.clip_grad_norm_(list(self.parameters().values()), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def llama_config(config: Config) -> Any:
    """Return the drafter's shape as transformers writes it."""
    llama = importlib.import_module("transformers").LlamaConfig
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    result = llama(
        **{name: config[name] for name in names},
        num_hidden_layers=1,
        tie_word_embeddings=False,
        rope_parameters=rope,
    )
    result.draft_vocab_size = config["draft_vocab_size"]
    return result


def _import_model() -> Any:
    """Import the model while a module that does nothing stands for Triton, where that is missing.

    Torch is asked first, so that it settles on having none.
    """
    importlib.import_module("torch._dynamo")
    missing = importlib.util.find_spec("triton") is None
    if missing:
        for name in ("triton", "triton.language"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        language = sys.modules["triton.language"]
        language.__dict__["constexpr"] = object
        sys.modules["triton"].__dict__.update(
            language=language, jit=lambda kernel: kernel, next_power_of_2=None
        )
    loss = importlib.import_module("specforge.core.loss")
    if missing:
        del sys.modules["triton"], sys.modules["triton.language"]
    model: Any = importlib.import_module(_MODEL)
    model.LogSoftmaxLoss = types.SimpleNamespace(apply=loss._compute_loss)
    return model


def _target_head(batch: Batch) -> Any:
    """Return its target head around our weights; its own constructor reads a checkpoint folder."""
    module = importlib.import_module("specforge.modeling.target.target_head")
    head = module.TargetHead.__new__(module.TargetHead)
    nn.Module.__init__(head)
    head.fc = nn.Linear(batch.head_VD.shape[1], len(batch.head_VD), bias=False)
    head.fc.weight = nn.Parameter(batch.head_VD, requires_grad=False)
    return head


def _micro_batches(batch: Batch) -> list[tuple[Any, float]]:
    documents = batch.documents
    alike = len({len(document.input_ids_T) for document in documents}) == 1
    groups = [documents] if alike else [[document] for document in documents]
    return [
        (_collate(group), sum(len(document.input_ids_T) for document in group) / batch.tokens)
        for group in groups
        if any(bool(document.mask_T.any()) for document in group)
    ]


def _collate(group: list[Document]) -> Any:
    data = importlib.import_module("specforge.algorithms.eagle3.data")
    collator = importlib.import_module("specforge.data.utils").DataCollatorWithPadding()
    contracts = importlib.import_module("specforge.runtime.contracts")
    samples = [
        data.normalize_offline_sample(
            {
                "input_ids": document.input_ids_T,
                "loss_mask": document.mask_T.long(),
                "aux_hidden_state": document.aux_TE[None],
                "hidden_state": document.final_TD[None],
            },
            max_len=len(document.input_ids_T),
        )
        for document in group
    ]
    return contracts.TrainBatch([], "eagle3", collator(samples), {"target_repr": "hidden_state"})
