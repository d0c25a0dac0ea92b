"""Our step as `train` runs it, and under SpecForge's rows and divisor for comparison."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.losses import pack_loss, trained_rows
from eyas.drafter.model import Drafter
from eyas.drafter.packing import Document, Pack, Packer
from eyas.drafter.training import Corpus, Run
from eyas.settings import Train
from peers.batch import Batch, Config, specforge_counts

_DECAY = 0.8


class _Documents:
    """The batch as training reads it."""

    def __init__(self, batch: Batch) -> None:
        self._documents = batch.documents
        self.lengths = [len(document.input_ids_T) for document in batch.documents]

    def read(self, index: int) -> Document:
        document = self._documents[index]
        opens_T = document.mask_T & ~document.mask_T.roll(1)
        opens_T[0] = document.mask_T[0]
        return Document(
            input_ids_T=document.input_ids_T,
            reply_T=opens_T.cumsum(0).int() * document.mask_T,
            aux_TLD=document.aux_TE.unflatten(1, (3, -1)),
            final_TD=document.final_TD,
        )


class Step:
    """See `peers.batch.Step`."""

    def __init__(self, config: Config, batch: Batch, dtype: str) -> None:
        self._batch, self._steps = batch, config["ttt_length"]
        self._head_VD = batch.head_VD.to(getattr(torch, dtype))
        self.drafter = Drafter(_drafter_config(config), batch.t2d_V)
        self.drafter.load_state_dict(batch.start, strict=False)
        scale_LD = torch.ones(3, config["hidden_size"])
        packer = self._packer()
        self._corpus = Corpus(
            train=packer,
            val=packer,
            embed_VD=batch.embed_VD,
            head_ND=batch.head_VD[batch.t2d_V],
            aux_scale_LD=scale_LD,
        )
        self._run = Run(self.drafter, self._corpus, _settings(config, batch.tokens, dtype))

    def _packer(self) -> Packer:
        return Packer(_Documents(self._batch), self._favourites, self._batch.t2d_V)

    def _favourites(self, final_PD: Tensor) -> Tensor:
        chunks = final_PD.to(self._head_VD.dtype).split(256)
        return torch.cat([(rows @ self._head_VD.T).float().argmax(-1) for rows in chunks])

    def parameters(self) -> Mapping[str, Tensor]:
        """Return what is trained."""
        return dict(self.drafter.named_parameters())

    def gradients(self) -> float:
        """Do forward and backward of `specforge_pack`."""
        pack = specforge_pack(self._batch)
        weights = specforge_weights(pack, self._steps)
        embed_TD = self._batch.embed_VD[pack.input_ids_T]
        loss, _ = pack_loss(self.drafter, pack, embed_TD, self._corpus.head_ND, weights)
        loss.backward()
        return float(loss.detach())

    def advance(self) -> None:
        """Do one optimiser step of a first epoch: what the target favours is asked anew."""
        self._run.corpus = dataclasses.replace(self._run.corpus, train=self._packer())
        self._run.advance(0)


def specforge_pack(batch: Batch) -> Pack:
    """Return the batch as a pack whose predictions p = t + 1 are SpecForge's rows t."""
    lengths = [len(document.input_ids_T) for document in batch.documents]
    counts_T = torch.cat([specforge_counts(document, batch) for document in batch.documents])
    predictions_P = counts_T.nonzero().flatten() + 1
    return Pack(
        input_ids_T=torch.cat([d.input_ids_T for d in batch.documents]).long(),
        aux_TLD=torch.cat([d.aux_TE for d in batch.documents]).unflatten(1, (3, -1)),
        final_TD=torch.cat([d.final_TD for d in batch.documents]),
        predictions_P=predictions_P,
        in_vocab_P=torch.ones_like(predictions_P, dtype=torch.bool),
        lengths=tuple(lengths),
    )


def specforge_weights(pack: Pack, steps: int) -> tuple[float, ...]:
    """Return the weights that turn our mean over rows into SpecForge's mean over all tokens."""
    tokens = len(pack.input_ids_T)
    rows = trained_rows(pack, steps)
    return tuple(_DECAY**step * count / tokens for step, count in enumerate(rows))


def _drafter_config(config: Config) -> DrafterConfig:
    fields = {field.name for field in dataclasses.fields(DrafterConfig)}
    return DrafterConfig(
        **{name: value for name, value in config.items() if name in fields},
        target_hidden_size=config["hidden_size"],
        aux_layers=(1, 2, 3),
        target_name=config["name"],
        target_revision="made up",
        bos_token_id=None,
        eos_token_id=None,
    )


def _settings(config: Config, tokens: int, dtype: str) -> Train:
    return Train(
        start="random",
        ridge_strength=0.0,
        norm_scale=1.0,
        lr=config["lr"],
        tokens_per_step=tokens,
        epochs=1,
        ttt_steps=config["ttt_length"],
        ttt_decay=_DECAY,
        warmup_ratio=0.0,
        clip_norm=config["max_grad_norm"],
        weight_decay=0.0,
        dtype=dtype,
        micro_tokens=None,
        recompute=False,
        seed=config["seed"],
    )
