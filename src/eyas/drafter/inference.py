"""The drafter at decode time, from the tensors of an exported folder.

Independent of the training code (it shares the layers only, and how latent attention makes its
heads), so that each checks the other. Row t
holds the embedding of token x[t+1] and the target's state of x[t], at position t; a drafted row
holds the embedding of the draft and the drafter's own un-normed output.

Legend: T rows, D hidden size, L aux layers, H heads, G key/value heads, R = H/G, K head dim,
N draft vocabulary, V target vocabulary, B lines of a tree that are drafted on.
Source: SGLang python/sglang/srt/models/llama_eagle3.py; docs/contracts.md.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.families import family_of
from eyas.drafter.layers import rms_norm
from eyas.drafter.trees import ROOT, Tree, chain

_LAYER = "midlayer."


class DraftRunner:
    """Proposes chains of tokens for one sequence at a time, with a cache of keys and values."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: DrafterConfig, embed_VD: Tensor
    ) -> None:
        self._w = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self._config, self._embed_VD, self._family = config, embed_VD, family_of(config)
        names = self._family.shapes(config)
        self._attention = {n: self._w[f"{_LAYER}self_attn.{n}.weight"] for n in names}
        self._scale = 1.0 / self._family.divisor(config)
        self._token_N = self._w["d2t"] + torch.arange(config.draft_vocab_size)
        self._keys_GTK = torch.empty(config.num_key_value_heads, 0, config.head_dim)
        self._values_GTK = torch.empty(config.num_key_value_heads, 0, config.value_dim)

    def fresh(self) -> "DraftRunner":
        """Return a runner of the same weights that has seen no token."""
        own = copy.copy(self)
        own._keys_GTK, own._values_GTK = self._keys_GTK[:, :0], self._values_GTK[:, :0]
        return own

    def propose(
        self,
        next_ids: Sequence[int],
        aux_TLD: Tensor,
        num_drafts: int,
        choose: Callable[[Tensor], int] | None = None,
    ) -> list[int]:
        """Add the rows of newly committed tokens and return a chain of drafts after the last.

        Row t has `next_ids` x[t+1] and the target's states of x[t]. `choose` gives the draft after
        a row's output [1, D], by default the best.
        """
        choose = choose or (lambda hidden_1D: int(self._best_each(hidden_1D)))
        hidden_1D = self._commit(next_ids, aux_TLD)
        committed = self._keys_GTK.shape[1]
        drafts = [choose(hidden_1D)]
        while len(drafts) < num_drafts:
            hidden_1D = self._extend(torch.tensor(drafts[-1:]), hidden_1D)
            drafts.append(choose(hidden_1D))
        self._keys_GTK = self._keys_GTK[:, :committed]
        self._values_GTK = self._values_GTK[:, :committed]
        return drafts

    def draw(
        self,
        next_ids: Sequence[int],
        aux_TLD: Tensor,
        num_drafts: int,
        temperature: float,
        generator: torch.Generator,
    ) -> Tree:
        """Do the same with drafts drawn at a temperature; return them with what they are from."""
        drawn: list[Tensor] = []

        def choose(hidden_1D: Tensor) -> int:
            chances_N = (self.logits(hidden_1D)[0].double() / temperature).softmax(-1)
            chances_V = chances_N.new_zeros(self._config.vocab_size)
            drawn.append(chances_V.index_copy_(0, self._token_N, chances_N))
            return int(self._token_N[torch.multinomial(chances_N, 1, generator=generator)])

        return chain(self.propose(next_ids, aux_TLD, num_drafts, choose), drawn)

    def propose_tree(
        self,
        next_ids: Sequence[int],
        aux_TLD: Tensor,
        num_drafts: int,
        top_k: int,
        num_nodes: int,
    ) -> Tree:
        """Add rows as `propose` does and return a tree of depth `num_drafts`.

        Each of the `top_k` best drafts of a depth is followed by its own `top_k` best; of all of
        them the `num_nodes` likeliest stay, by the product of chances from the root. A parent is
        never less likely than its children and stands before them, so it stays where they do.
        """
        hidden_BD, beam = self._commit(next_ids, aux_TLD), [ROOT]
        ids, parents, scores = list[int](), list[int](), list[float]()
        own: list[tuple[Tensor, Tensor]] = []  # by depth: k and v, [B, G, K] of the beam's lines
        for depth in range(num_drafts):
            if depth:
                tokens_B = torch.tensor([ids[node] for node in beam])
                hidden_BD = self._branch(tokens_B, hidden_BD, own)
            best = self.logits(hidden_BD).log_softmax(-1).topk(top_k)
            begin = len(ids)
            for line, node in enumerate(beam):
                before = 0.0 if node == ROOT else scores[node]
                ids += self._token_N[best.indices[line]].tolist()
                scores += [before + score for score in best.values[line].tolist()]
                parents += [node] * top_k
            beam = sorted(range(begin, len(ids)), key=lambda node: (-scores[node], node))[:top_k]
            lines_B = torch.tensor([(node - begin) // top_k for node in beam])
            hidden_BD = hidden_BD[lines_B]
            own = [(key[lines_B], value[lines_B]) for key, value in own]
        stay = sorted(sorted(range(len(ids)), key=lambda node: (-scores[node], node))[:num_nodes])
        place = {node: index for index, node in enumerate(stay)} | {ROOT: ROOT}
        return Tree(
            ids=tuple(ids[node] for node in stay),
            parents=tuple(place[parents[node]] for node in stay),
        )

    def _commit(self, next_ids: Sequence[int], aux_TLD: Tensor) -> Tensor:
        """Add the rows of committed tokens; return the output of the last, [1, D]."""
        hidden_TD = self._enter(aux_TLD)
        return self._extend(torch.tensor(next_ids), hidden_TD)[-1:]

    def _branch(self, ids_B: Tensor, hidden_BD: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run a draft of each line behind the committed rows and the line's earlier drafts."""
        position_B = torch.full_like(ids_B, self._keys_GTK.shape[1] + len(own))
        q, k, v = (part.transpose(0, 1) for part in self._project(ids_B, hidden_BD, position_B))
        own.append((k, v))
        keys, values = (
            torch.cat(
                [past.expand(len(ids_B), *past.shape), torch.stack([o[kind] for o in own], dim=2)],
                dim=2,
            )
            for kind, past in enumerate((self._keys_GTK, self._values_GTK))
        )
        mixed = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, scale=self._scale, enable_gqa=True
        )
        return self._finish(hidden_BD, mixed.flatten(1))

    def _enter(self, aux_TLD: Tensor) -> Tensor:
        """Return fc's states [T, D] of the target's."""
        aux_TLD = aux_TLD.float()
        if self._config.fc_norm:
            norms = [self._w[f"fc_norm.{place}.weight"] for place in range(aux_TLD.shape[1])]
            aux_TLD = rms_norm(aux_TLD, torch.stack(norms), self._config.rms_norm_eps)
        return F.linear(aux_TLD.flatten(1), self._w["fc.weight"])

    def draft_everywhere(self, path: Sequence[int], aux_TLD: Tensor, num_drafts: int) -> Tensor:
        """Return the chain drafted after each prefix of a known path, [T, num_drafts] of ids.

        Row t is what `propose` would return once x[0..t+1] is committed: drafts depend on the
        committed tokens alone, so a replay of the path gives the chains of real decoding.
        """
        drafts: list[Tensor] = []
        for _, _, out_TD in self._unroll(path, aux_TLD, num_drafts, lambda _: drafts[-1]):
            drafts.append(self._best_each(out_TD))
        return torch.stack(drafts, dim=1)

    def attend(self, path: Sequence[int], aux_TLD: Tensor) -> tuple[Tensor, Tensor]:
        """Return fc's states [T-1, D] of a known path's rows, and what o_proj reads [T-1, H*K]."""
        ids, rows = torch.tensor(path[1:]), len(path) - 1
        hidden = self._enter(aux_TLD[:rows])
        q, k, v = self._project(ids, hidden, torch.arange(rows))
        return hidden, self._attend(q, k, v, torch.ones(rows, rows, dtype=torch.bool).tril())

    def foresee(
        self, path: Sequence[int], aux_TLD: Tensor, num_steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Give, for each step k of drafting the path's own tokens, the layer before its MLP.

        Row t reads x[t+1+k] and foresees the state of that token, so step k has T-1-k rows: the
        states after attention, [rows, D], and what down_proj reads, [rows, I].
        """
        ids_T = torch.tensor(path)
        steps = self._unroll(path, aux_TLD, num_steps, lambda step: ids_T[1 + step :])
        return ((hidden, inner) for hidden, inner, _ in steps)

    def _unroll(
        self,
        path: Sequence[int],
        aux_TLD: Tensor,
        num_steps: int,
        tokens: Callable[[int], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Give each step's states after attention, MLP features and output, a row a prefix.

        `tokens(k)` are what the first rows read at step k >= 1; other rows are left out.
        """
        ids = torch.tensor(path[1:])
        rows = len(ids)
        hidden = self._enter(aux_TLD[:rows])
        causal_TT = torch.ones(rows, rows, dtype=torch.bool).tril()
        q, k, v = self._project(ids, hidden, torch.arange(rows))
        attended = self._attend(q, k, v, causal_TT)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            if step:
                ids = tokens(step)
                count = len(ids)
                hidden = hidden[:count]
                q, *last = self._project(ids, hidden, torch.arange(count) + step)
                own = [(key[:, :count], value[:, :count]) for key, value in [*own, last]]
                attended = self._attend_own(q, (k, v), own, causal_TT[:count])
            after, inner = self._parts(hidden, attended)
            hidden = after + F.linear(inner, self._w[f"{_LAYER}mlp.down_proj.weight"])
            yield after, inner, hidden

    def _best_each(self, hidden_TD: Tensor) -> Tensor:
        return self._token_N[self.logits(hidden_TD).argmax(-1)]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [T, N]."""
        normed_TD = rms_norm(hidden_TD, self._w["norm.weight"], self._config.rms_norm_eps)
        return F.linear(normed_TD, self._w["lm_head.weight"])

    def _extend(self, ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """Run rows behind those in the cache; return their un-normed output [T, D]."""
        have = self._keys_GTK.shape[1]
        positions_T = torch.arange(have, have + len(ids_T))
        q, k, v = self._project(ids_T, hidden_TD, positions_T)
        self._keys_GTK = torch.cat([self._keys_GTK, k], dim=1)
        self._values_GTK = torch.cat([self._values_GTK, v], dim=1)
        seen = torch.arange(have + len(ids_T)) <= positions_T[:, None]
        return self._finish(hidden_TD, self._attend(q, self._keys_GTK, self._values_GTK, seen))

    def _project(
        self, ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [G, R*T, K] (R outer), rotated k and plain v [G, T, K]."""
        eps = self._config.rms_norm_eps
        embedded = rms_norm(
            F.embedding(ids_T, self._embed_VD), self._w[f"{_LAYER}input_layernorm.weight"], eps
        )
        normed = rms_norm(hidden_TD, self._w[f"{_LAYER}hidden_norm.weight"], eps)
        both = torch.cat([embedded, normed], dim=-1)
        return self._family.decode(self._config, self._attention, both, positions_T)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=self._scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def _attend_own(
        self,
        q: Tensor,
        committed: tuple[Tensor, Tensor],
        own: list[tuple[Tensor, Tensor]],
        causal_TT: Tensor,
    ) -> Tensor:
        """Attend to the committed rows 0..t and to row t's own drafts, in one softmax."""
        groups = self._config.num_key_value_heads
        q_GRTK = q.unflatten(0, (groups, -1)) * self._scale
        k_GTK, v_GTK = committed
        scores = q_GRTK @ k_GTK[:, None].transpose(-1, -2)
        scores = scores.masked_fill(~causal_TT, float("-inf"))
        diagonal = [(q_GRTK * key[:, None]).sum(-1, keepdim=True) for key, _ in own]
        weights = torch.cat([scores, *diagonal], dim=-1).softmax(-1)
        rows = k_GTK.shape[1]
        mixed = weights[..., :rows] @ v_GTK[:, None]
        for index, (_, value) in enumerate(own):
            mixed = mixed + weights[..., rows + index, None] * value[:, None]
        return mixed.flatten(0, 1).transpose(0, 1).flatten(1)

    def _finish(self, hidden_TD: Tensor, attended: Tensor) -> Tensor:
        after_TD, inner = self._parts(hidden_TD, attended)
        return after_TD + F.linear(inner, self._w[f"{_LAYER}mlp.down_proj.weight"])

    def _parts(self, hidden_TD: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state after attention, [T, D], and what the MLP's down_proj reads, [T, I]."""
        w, eps = self._w, self._config.rms_norm_eps
        hidden_TD = hidden_TD + F.linear(attended, w[f"{_LAYER}self_attn.o_proj.weight"])
        normed = rms_norm(hidden_TD, w[f"{_LAYER}post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(normed, w[f"{_LAYER}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return hidden_TD, F.silu(gate) * up
