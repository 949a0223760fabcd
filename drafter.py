"""The DFlash drafter (Chen, Liang, Liu, arXiv:2602.06036): a whole block of tokens in one forward pass.

    target layers      taps        drafter
    h_1 .. h_L  ──► concatenate ──► fc ──► hidden_norm ──► context feature, one vector a verified position
                                                               │  injected as keys and values
                                                               ▼  into EVERY layer (Attention's `context`)
    [anchor, MASK, MASK, ...] ──► target's embedding ──► layers, bidirectional ──► norm ──► target's LM head
                                                         slot k predicts the token AT position anchor + k

The anchor is the last verified token: the target has chosen it but not yet read it, so its own feature does
not exist.

Below it two baselines that draft one token after the other, through the same decoding loop: EAGLE-3 and a
small Transformer.
"""
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from kernels import causal, chains, context_and_block, dflash_training, make_mask
from model import (DecoderLayer, ModelConfig, RMSNorm, Rope, Transformer, UserError, check, check_fields,
                   init_weights, is_count, load_model, read_json, read_optional, save_model)


def default_taps(num_target_layers, taps=5):
    """Ids (0-based) of layers spread evenly from the 2nd to the 3rd-last (section 4.1), or from the first to
    the last where the former are too few to be distinct. A target with fewer layers than taps gives all it
    has."""
    L, n = num_target_layers, min(taps, num_target_layers)
    first, last = (1, L - 3) if L - 3 >= n else (0, L - 1)
    return [round(first + i * (last - first) / (n - 1)) for i in range(n)] if n > 1 else [L // 2]


class Drafter(nn.Module):
    """What all drafters share: a DrafterConfig, and files."""
    dtype = property(lambda self: next(self.parameters()).dtype)

    def check_sizes(self, block_size, tree_budget, denoise_steps):
        """Refuses sizes that `decode.generate` cannot use."""
        sizes = range(1, self.config.layers.max_position_embeddings + 1)
        check(block_size in (None, "auto") or block_size in sizes, "block_size", block_size, "out of range")
        check(tree_budget is None or tree_budget in sizes[1:], "tree_budget", tree_budget, "out of range")
        check(denoise_steps >= 1, "denoise_steps", denoise_steps, "out of range")
        if self.in_turn and (tree_budget or denoise_steps > 1):
            raise UserError(f"{self.title} drafts token after token: no tree_budget, no denoise_steps")

    @classmethod
    def from_pretrained(cls, path, target):
        """Opens a checkpoint (of DFlash also a published one) for this target, in the target's dtype and on
        its device. UserError says what doesn't fit."""
        config = read_json(Path(path) / "config.json",
                           lambda raw: DrafterConfig.from_dict(raw, cls, target.config))
        return load_model(lambda: cls(config), path, target.device, target.dtype)

    def save_pretrained(self, path):
        """Writes the layout that the published code, vLLM (method dflash) and SGLang (algorithm DFLASH) read;
        the baselines' is like it."""
        save_model(self, path, self.config.to_dict(type(self)))


class DFlashDrafter(Drafter):
    """The drafter of the picture above; `draft` (decoding) and `loss` (training) go through `forward`."""
    method, folder, architecture, title = "dflash", "drafter", "DFlashDraftModel", "a DFlash drafter"
    in_turn = False                                   # all tokens of a block are drafted at once

    def __init__(self, config):
        super().__init__()
        self.config, layers = config, config.layers
        self.fc = nn.Linear(len(config.target_layer_ids) * layers.hidden_size, layers.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layers, i) for i in range(layers.num_hidden_layers))
        self.norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.rope = Rope(layers)

    def forward(self, features, block, positions, mask, cache=None):
        """Section 4.1: the hidden states of the blocks, given the target's features of the context.

        features:  (B, S, taps * C) of context positions (the ones not yet in the cache, if there is one)
        block:     (B, N, C) embeddings of one block [anchor, MASK, ...], in training of several in a row
        positions: (B, S + N) the true positions of both
        Returns (B, N, C), for the target's LM head.
        """
        context = self.hidden_norm(self.fc(features))                  # (B, S, C), the target context feature
        rope = self.rope(positions, block.dtype)
        x = block
        if self.config.injection == "input":         # the context as hidden states that go through all layers
            x, context = torch.cat((context, block), 1), None
        for layer in self.layers:
            x = layer(x, rope, mask, cache, context)
        return self.norm(x[:, x.shape[1] - block.shape[1]:])

    def inject(self, target, features, context_at, ids, positions, cache):
        """A pass with a cache: the features at positions context_at (B, W) enter it for good, as keys and
        values of every layer. Those of the block, tokens ids (B, N) at positions (B, N), lie behind them
        until the next pass writes over them. features: (B, capacity, taps * C). Returns as `forward`."""
        all_at = torch.cat((context_at, positions), 1)                           # (B, W + N)
        # A block sees the whole context, and all of itself
        limit = all_at.amax(1, keepdim=True).expand_as(positions) + 1
        if self.config.injection == "input":
            limit = torch.cat((context_at + 1, limit), 1)
        cache.write_at(all_at)
        mask = make_mask(context_and_block(limit), *limit.shape, cache.kv_len, ids.device, self.dtype)
        return self(rows_at(features, context_at), target.model.embed_tokens(ids), all_at, mask, cache)

    def draft(self, target, text, features, anchor_at, block_size, cache, sample, steps=1):
        """Drafts one block a row, in one pass: logits (B, block_size - 1, V) of slots 1, 2, ...

        text:     (B, capacity) token ids by position, the anchor's included
        features: (B, capacity, taps * C) by position, the target's of all positions before the anchor's
        anchor_at: (B,) int64, the anchors' positions
        cache:    the drafter's KVCache. The block_size positions before the anchor are read here, those before
                  them must have been (`read`); to read one again writes the same keys and values
        sample:   (logits (B, n, V), slot) -> (B, n), the tokens drafted in n slots from this one on
        steps:    passes that denoise the block; the paper's drafter takes one
        """
        context_at = last_positions(anchor_at, block_size)
        positions = anchor_at[:, None] + torch.arange(block_size, device=anchor_at.device)
        ids = torch.full_like(positions, self.config.mask_token_id)
        ids[:, :1] = text.gather(1, anchor_at[:, None])                          # [anchor, MASK, MASK, ...]
        filled, logits = torch.zeros_like(ids[:, 1:], dtype=torch.bool), None    # (B, block_size - 1)
        steps = min(steps, block_size - 1)                      # a pass that fills no slot changes nothing
        for step in range(1, steps + 1):
            hidden = self.inject(target, features, context_at, ids, positions, cache)
            drafted = target.logits(hidden[:, 1:])                     # (B, S, V), S = block_size - 1
            logits = drafted if logits is None else torch.where(filled[..., None], logits, drafted)
            if step < steps:                            # the surest slots stay, the rest is drafted again
                tokens = sample(logits, 1)
                sure = logits.float().softmax(-1).gather(2, tokens[..., None])[..., 0]
                order = sure.masked_fill(filled, 2.0).argsort(1, descending=True)
                filled = order.argsort(1) < step * (block_size - 1) // steps
                ids[:, 1:] = torch.where(filled, tokens, self.config.mask_token_id)
        return logits

    def read(self, target, text, features, positions, cache):
        """Puts the context at positions (B, W) into the cache: a pass with an empty block. Arguments as in
        `draft`."""
        self.inject(target, features, positions, text[:, :0], positions[:, :0], cache)

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Weighted cross-entropy of all blocks of all rows of a TrainingBatch, in one forward pass under the
        sparse mask (section 4.2). gamma: the decay over a block's slots; inf: none. chunk: see
        `token_losses`.
        Returns the sum of the weighted losses and that of the weights: processes add up theirs, then
        divide."""
        (B, S), block_size = batch.ids.shape, self.config.block_size
        ids, positions, weight = training_blocks(batch, block_size, self.config.mask_token_id,
                                                 gamma or default_gamma(block_size))
        context, Q = torch.arange(S, device=ids.device).expand(B, S), ids[0].numel()
        context_queries = S if self.config.injection == "input" else 0
        mask_mod = dflash_training(batch.anchors, S, block_size, context_queries)
        mask = make_mask(mask_mod, B, context_queries + Q, S + Q, ids.device, batch.features.dtype)
        hidden = self(batch.features, target.model.embed_tokens(ids.flatten(1)),
                      torch.cat((context, positions.flatten(1)), 1), mask)   # (B, Q, C)
        hidden = hidden.unflatten(1, ids.shape[1:])[:, :, 1:]                   # slot 0, the anchor, is given
        labels, weight = batch.labels(positions[:, :, 1:].flatten(1)), weight[:, :, 1:].flatten()
        losses = token_losses(target.logits, target, hidden.flatten(0, 2), labels.flatten(0, 1), chunk)
        return (losses * weight).sum(), weight.sum()

    @classmethod
    def for_target(cls, target, *, num_layers=5, block_size=16, mask_token_id, target_layer_ids=None,
                   injection="kv", chat_options=None):
        """A new drafter of the target's width and head layout; initialize it with `init_weights`."""
        own = {"num_hidden_layers": num_layers, "model_type": "qwen3", "attention_bias": False}
        layers, L = replace(target.config, **own), target.config.num_hidden_layers
        taps = target_layer_ids or default_taps(L)
        return cls(DrafterConfig(layers, block_size, mask_token_id, taps, L, injection, chat_options or {}))

    @torch.no_grad()
    def init_weights(self, target, generator):
        """Starts as a copy of the target's last layers that reads its last tap: a drafter of the target's
        shape has most of what it needs to know already (from random weights it takes several times as many
        steps). What the target lacks, say QK-norm, starts at one."""
        init_weights(self, generator)
        for layer, theirs in zip(reversed(self.layers), reversed(target.model.layers)):
            theirs = theirs.state_dict()
            for name, parameter in layer.named_parameters():
                value = theirs.get(name, parameter).to(parameter)
                # EAGLE-3 has columns that the target lacks, for embeddings: they come first and start small.
                small = 0.1 * parameter[..., value.shape[-1]:]
                parameter.copy_(torch.cat((small, value), -1))
        self.norm.weight.copy_(target.model.norm.weight)
        self.fc.weight.mul_(0.1)
        self.fc.weight.diagonal(self.fc.in_features - self.fc.out_features).add_(1.0)    # of the last tap


def last_positions(end, n):
    """(B, n): the n positions before end (B,). Where the text is shorter, its first position stands in for
    those that don't exist."""
    return (end[:, None] + torch.arange(-n, 0, device=end.device)).clamp(min=0)


def rows_at(x, positions):
    """x (B, capacity, F) at positions (B, n) -> (B, n, F)"""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


# ---- what the target gets to read: a chain of drafts, or a tree --------------------------------------------

class Drafts(NamedTuple):
    """The anchor and the drafts behind it, a tree: parents before children. In a chain each has one child; of
    the anchor alone it is plain decoding."""
    tokens: torch.Tensor           # (B, N) int64, the anchor first
    probability: torch.Tensor      # (B, N) float32, product of the guess probabilities up to this one
    parent: torch.Tensor           # (B, N) int64, the node before; the anchor's is itself
    depth: torch.Tensor            # (B, N) int64, how far behind the anchor
    ancestors: torch.Tensor        # (B, N, N) bool, [b, i, j]: is node j an ancestor of node i, or i itself?

    def first(self, n):
        """The anchor and the first n - 1 drafts, of a tree the best."""
        return Drafts(*(x[:, :n, :n] if x.dim() == 3 else x[:, :n] for x in self))


def draft_chain(anchor, guesses):
    """anchor (B, 1); guesses (B, S, V), `Sampling.guess_probabilities` of the drafter's slots -> the
    likeliest token of each slot. N = S + 1."""
    probability, tokens = guesses.max(-1)                                        # (B, S)
    tokens = torch.cat((anchor, tokens), 1)                                      # (B, N)
    order = torch.arange(tokens.shape[1], device=tokens.device)
    return Drafts(tokens, F.pad(probability.cumprod(1), (1, 0), value=1.0),
                  (order - 1).clamp(min=0).expand_as(tokens), order.expand_as(tokens),
                  (order <= order[:, None]).expand(len(tokens), -1, -1))


def draft_tree(anchor, guesses, budget):
    """Arguments as above -> the `budget` likeliest prefixes of the block (the anchor's, which is certain,
    among them), best first: N = budget.

    One pass of the drafter gives a distribution for each slot, so a prefix's probability is a product over
    its slots. Level after level the likeliest prefixes grow by one token each; of a level no more than the
    budget can be among the best (liranringel/ddtree, arXiv:2604.12989).
    """
    K = min(budget - 1, guesses.shape[2])                                   # tokens to choose from in a slot
    top, tokens = guesses.topk(K)                                                # (B, S, K)
    log_p = top.log()
    # All prefixes, shorter ones first: their scores, the parent's place among them, and the rank of the last
    # token in its slot.
    parents, ranks = [torch.zeros_like(anchor)], [torch.zeros_like(anchor)]
    scores = [log_p.new_zeros(len(anchor), 1)]
    for next_log_p in log_p.unbind(1):                                           # (B, K), slot after slot
        first_parent = sum(level.shape[1] for level in scores[:-1])
        longer = (scores[-1][:, :, None] + next_log_p[:, None]).flatten(1)       # (B, parents * K)
        score, choice = longer.topk(min(budget - 1, longer.shape[1]))
        scores.append(score)
        parents.append(choice // K + first_parent)
        ranks.append(choice % K)
    # A child is no likelier than its parent, and a stable sort leaves equal ones in order: parents come
    # first, and none is missing.
    score, order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    parent, rank = (torch.cat(each, 1).gather(1, order[:, :budget]) for each in (parents, ranks))
    parent = order.argsort(1).gather(1, parent)
    ancestors = ancestors_of(parent, log_p.shape[1])
    depth = ancestors.sum(2) - 1
    tokens = torch.cat((anchor.expand(-1, K), tokens.flatten(1)), 1).gather(1, depth * K + rank)
    return Drafts(tokens, score[:, :budget].exp(), parent, depth, ancestors)


def ancestors_of(parent, depth):
    """parent (B, N) of a tree at most so deep -> ancestors (B, N, N), see `Drafts`."""
    B, N = parent.shape
    reach = torch.eye(N, device=parent.device).repeat(B, 1, 1).scatter_(2, parent[..., None], 1.0)
    for _ in range((depth - 1).bit_length()):                                    # one step up, two, four, ...
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


# ---- training (section 4.2) --------------------------------------------------------------------------------

@dataclass
class TrainingBatch:
    """Text that the target has read, and where in it blocks start."""
    ids: torch.Tensor          # (B, S) int64
    trainable: torch.Tensor    # (B, S) bool, which tokens count as labels
    features: torch.Tensor     # (B, S, taps * C), the target's
    hidden: torch.Tensor       # (B, S, C), its final hidden states
    anchors: torch.Tensor      # (B, N) int64
    valid: torch.Tensor        # (B, N) bool
    revealed: torch.Tensor     # (B, N, block_size) bool, slots that hold their token instead of a mask
    soft: bool                 # labels: the target's whole distributions, or the tokens

    def labels(self, positions):
        """Of the tokens at positions (B, n): these (B, n), or the hidden states (B, n, C) that the target
        predicts them from. (At temperature 1 the expected gradient is the same, with much less noise.) Behind
        the end of the text they have no meaning, and no weight."""
        at = positions.clamp(max=self.ids.shape[1] - 1)
        return rows_at(self.hidden, (at - 1).clamp(min=0)) if self.soft else self.ids.gather(1, at)


def sample_anchors(trainable, num_anchors, block_size, generator, choice="random", reveal=0.0):
    """Random anchors: num_anchors different positions a row among the trainable ones (B, S) bool that have a
    trainable successor. choice "fixed": only multiples of the block size. reveal: of so many blocks about
    half of the slots are revealed (the paper: none).

    Returns anchors (B, N) int64; valid (B, N) bool: a row with fewer such positions fills up with invalid
    ones; revealed (B, N, block_size) bool."""
    can_start = trainable & F.pad(trainable[:, 1:], (0, 1))
    if choice == "fixed":
        can_start = can_start & (torch.arange(trainable.shape[1]) % block_size == 0)
    key = torch.rand(trainable.shape, generator=generator).masked_fill(~can_start, -1.0)
    key, anchors = key.topk(min(num_anchors, key.shape[1]), dim=1)
    chance = torch.rand((*anchors.shape, block_size), generator=generator)
    partly = torch.rand(anchors.shape, generator=generator) < reveal
    return anchors, key >= 0, partly[:, :, None] & (chance < 0.5)


def default_gamma(block_size):
    """7 / 5 / 4 for block 16 / 10 / 8, as in the paper; between and beyond, the line through 7 and 4."""
    return 5.0 if block_size == 10 else 1.0 + 0.375 * block_size


def training_blocks(batch, block_size, mask_token_id, gamma):
    """All blocks of all rows: their token ids, positions and weights in the loss, each (B, N, block_size).
    Slot k weighs exp(-(k - 1) / gamma), and nothing where its token is given or no label."""
    slot = torch.arange(block_size, device=batch.ids.device)
    positions = batch.anchors[:, :, None] + slot
    inside = positions.flatten(1).clamp(max=batch.ids.shape[1] - 1)
    counts = batch.trainable.gather(1, inside).view_as(positions) & (positions < batch.ids.shape[1])
    given = batch.revealed & counts | (slot == 0)                                # slot 0 is the anchor
    ids = torch.where(given, batch.ids.gather(1, inside).view_as(positions), mask_token_id)
    weight = torch.exp(-(slot - 1) / gamma) * (counts & batch.valid[:, :, None] & ~given)
    return ids, positions, weight


def token_losses(head, target, hidden, labels, chunk=2**28):
    """Cross-entropy (N,) of head(hidden (N, C)) against labels, see `TrainingBatch.labels`. chunk: logits
    held at once, in numbers; more are computed, dropped and recomputed in the backward pass."""
    def losses(hidden, labels):
        if labels.is_floating_point():
            labels = target.logits(labels).float().softmax(-1).detach()
        return F.cross_entropy(head(hidden).float(), labels, reduction="none")

    rows = max(1, chunk // target.config.vocab_size)
    if len(hidden) <= rows:
        return losses(hidden, labels)
    return torch.cat([torch.utils.checkpoint.checkpoint(losses, *part, use_reentrant=False)
                      for part in zip(hidden.split(rows), labels.split(rows))])


# ---- baselines: drafting one token after the other ---------------------------------------------------------

class BaselineDrafter(Drafter):
    """Drafts in passes of one token, each of which reads the token drafted before. A pass at position t reads
    the token at t + ahead and a hidden state: `fc` of the target's features or, behind the verified text, the
    state that the pass before has left. Each kind has its own two halves of a pass: `step` takes hidden
    states (B, n, C), ids and positions (B, n), and gives the new hidden states (B, n, C); `logits` gives what
    these predict, (B, n, V)."""
    in_turn, ahead = True, 0

    def read(self, target, text, features, positions, cache):
        """As DFlashDrafter.read."""
        hidden, ids = self.fc(rows_at(features, positions)), text.gather(1, positions + self.ahead)
        self.step(target, hidden, ids, positions, cache)

    def draft(self, target, text, features, anchor_at, block_size, cache, sample, steps=1):
        """As DFlashDrafter.draft, in block_size - 1 passes, of which each reads what the one before has
        drafted."""
        # EAGLE-3's first pass ends before the anchor, which it reads as the token ahead; a draft model's ends
        # with the anchor.
        positions = last_positions(anchor_at + 1 - self.ahead, block_size + 1 - self.ahead)
        hidden, ids = self.fc(rows_at(features, positions)), text.gather(1, positions + self.ahead)
        logits = []
        for slot in range(1, block_size):
            hidden = self.step(target, hidden, ids, positions, cache)[:, -1:]
            logits.append(self.logits(target, hidden))
            ids, positions = sample(logits[-1], slot), positions[:, -1:] + 1
        return torch.cat(logits, 1)


class Eagle3Drafter(BaselineDrafter, DFlashDrafter):       # modules and files of DFlash, loops of a baseline
    """EAGLE-3 (Li et al., arXiv:2503.01840): DFlash's modules with one layer, whose position t reads the
    target's feature of t and the embedding of the token at t + 1, and predicts the token at t + 2. Behind the
    verified text its own output takes the feature's place."""
    method, folder, architecture, title = "eagle3", "eagle3", "Eagle3DraftModel", "an EAGLE-3 drafter"
    ahead = 1

    def __init__(self, config):
        super().__init__(config)
        attn, C = self.layers[0].self_attn, config.layers.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):                            # they read [embedding, hidden]
            setattr(attn, name, nn.Linear(2 * C, getattr(attn, name).out_features, bias=False))

    @classmethod
    def for_target(cls, target, **given):
        """It always has one layer, taps of its own (a low, a middle and a high layer), and no mask."""
        taps = default_taps(target.config.num_hidden_layers, 3)
        given |= {"num_layers": 1, "mask_token_id": None, "target_layer_ids": taps, "injection": "kv"}
        return super().for_target(target, **given)

    def forward(self, target, hidden, ids, positions, mask, cache):
        """hidden (B, n, C) at positions (B, n) and the tokens behind them, ids (B, n) -> the new hidden"""
        layer, embedding = self.layers[0], target.model.embed_tokens(ids)
        x = torch.cat((layer.input_layernorm(embedding), self.hidden_norm(hidden)), -1)          # (B, n, 2C)
        hidden = hidden + layer.self_attn(x, self.rope(positions, x.dtype), mask, cache)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def step(self, target, hidden, ids, positions, cache):
        """A causal pass with a cache."""
        cache.write_at(positions)
        mask = make_mask(causal(positions), *positions.shape, cache.kv_len, ids.device, self.dtype)
        return self(target, hidden, ids, positions, mask, cache)

    def logits(self, target, hidden):
        return target.logits(self.norm(hidden))

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Training-time test: block_size - 1 steps of drafting, each fed with the hidden states of the one
        before. In step j a chain stands at position t + j, reads the token behind it and predicts the one at
        t + 2 + j; the step weighs 0.8**j. The first step is taken from every position, the others, of which
        each sees the first one's keys and those of its own chain, from the anchors' predecessors only. Result
        as `DFlashDrafter.loss`."""
        S, block_size, device = batch.ids.shape[1], self.config.block_size, batch.ids.device
        # Chains run past the end of the text, where nothing is trainable.
        text, trainable = (F.pad(x, (0, block_size)) for x in (batch.ids, batch.trainable))
        start, counts = torch.arange(S, device=device).expand_as(batch.ids), torch.ones_like(batch.trainable)
        hidden, mask_mod, cache = self.fc(batch.features).to(self.dtype), causal(start), StepCache()
        total, weight, all_labelled = 0.0, 0.0, batch.trainable[:, 2:].sum()
        for j in range(block_size - 1):
            if j == 1:
                start, counts = (batch.anchors - 1).clamp(min=0), batch.valid                   # (B, N)
                hidden, mask_mod = rows_at(hidden, start), chains(start, S)
            at = start + j
            mask = make_mask(mask_mod, *at.shape, S + j * at.shape[1], device, batch.features.dtype)
            hidden = self(target, hidden, text.gather(1, at + 1), at, mask, cache)
            outputs, labels = self.norm(hidden).flatten(0, 1), batch.labels(at + 2).flatten(0, 1)
            losses = token_losses(target.logits, target, outputs, labels, chunk)
            has_label = counts & trainable.gather(1, at + 2)
            labelled = has_label.sum()
            share = 0.8**j * all_labelled / labelled.clamp(min=1)          # fewer chains weigh as much as all
            total += share * (losses * has_label.flatten()).sum()
            weight += share * labelled
        return total, weight


class StepCache(list):
    """A layer's keys and values in training, (B, K, N, D) of each step, through which gradients flow."""

    def update(self, layer, k, v):
        """k, v (B, N, K, D) of a further step -> those of all steps, (B, K, ..., D)"""
        self.append((k.transpose(1, 2), v.transpose(1, 2)))
        return [torch.cat(each, 2) for each in zip(*self)]


class ARDrafter(BaselineDrafter):
    """The classic draft model: a smaller Transformer of the target's width and vocabulary, with an embedding
    and a head of its own. It has no taps: features and hidden states stay empty, and its passes read tokens
    only."""
    method, folder, architecture, title = "ar", "ar", "ARDraftModel", "an autoregressive drafter"

    def __init__(self, config):
        super().__init__()
        self.config, self.transformer, self.fc = config, Transformer(config.layers), nn.Identity()

    @classmethod
    def for_target(cls, target, *, num_layers=5, block_size=16, chat_options=None, **_):
        layers, L = replace(target.config, num_hidden_layers=num_layers), target.config.num_hidden_layers
        return cls(DrafterConfig(layers, block_size, None, [], L, chat_options=chat_options or {}))

    def init_weights(self, target, generator):
        """Starts as the target without its last layers."""
        self.transformer.init_weights(generator)
        self.transformer.load_state_dict(target.state_dict(), strict=False)

    def step(self, target, hidden, ids, positions, cache):
        return self.transformer(ids, positions, cache)[0]

    def logits(self, target, hidden):
        return self.transformer.logits(hidden)

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Cross-entropy of the next token where that is trainable; result as `DFlashDrafter.loss`."""
        counts = batch.trainable[:, 1:]
        positions = torch.arange(1, batch.ids.shape[1], device=counts.device)
        labels, hidden = batch.labels(positions.expand_as(counts)), self.transformer(batch.ids)[0][:, :-1]
        losses = token_losses(self.transformer.logits, target, hidden[counts], labels[counts], chunk)
        return losses.sum(), counts.sum()


# ---- configuration and files -------------------------------------------------------------------------------

DRAFTERS = {kind.method: kind for kind in (DFlashDrafter, Eagle3Drafter, ARDrafter)}
# Fields of published drafters that change what these compute, and the values with which they don't. They
# stand in config.json or in its dflash_config, where any other field than these and OWN_FIELDS is refused.
CHANGES = {"output_multiplier": (None, 1),
           **dict.fromkeys(("is_causal", "causal", "sample_from_anchor", "final_logit_softcapping",
                            "conv_kernel_size", "selector_rank"), (None, False))}
OWN_FIELDS = {"injection": (None, "kv", "input"), "chat_options": lambda value: isinstance(value or {}, dict),
              **dict.fromkeys(("block_size", "mask_token_id", "target_layer_ids"), lambda value: True)}


@dataclass
class DrafterConfig:
    layers: ModelConfig                 # of the draft layers: the target's with fewer layers
    block_size: int
    mask_token_id: int | None           # DFlash's
    target_layer_ids: list              # the taps; none: the drafter reads tokens only
    num_target_layers: int
    # DFlash's; "input": the context enters once, in front of the first layer (a switch, to measure what KV
    # injection gives)
    injection: str = "kv"
    chat_options: dict = field(default_factory=dict)  # keywords of the chat template that it was trained with

    @classmethod
    def from_dict(cls, raw, kind, target):
        """From a config.json's content. kind: the drafter's class; target: the target's ModelConfig.
        UserError says what doesn't fit, or changes what a drafter computes in a way that we don't have."""
        section, L, V = f"{kind.method}_config", target.num_hidden_layers, target.vocab_size
        own, layers, named = raw.get(section) or {}, ModelConfig.from_dict(raw), raw.get("architectures")
        check(isinstance(own, dict), section, own, "no object")
        given = {name: value for name, value in (*own.items(), *raw.items()) if value is not None}
        block_size, mask = given.get("block_size"), given.get("mask_token_id")
        if named not in (None, [kind.architecture]) or not is_count(block_size):
            raise UserError(f"not {kind.title} (architectures {named}, block_size {block_size}); give the "
                            f"folder that train.py wrote as {kind.folder}/, or for DFlash a published one")
        check_fields(raw, CHANGES)
        check_fields(own, dict.fromkeys(own, (None,)) | CHANGES | OWN_FIELDS, f"{section}.")
        taps = given.get("target_layer_ids", default_taps(L, layers.num_hidden_layers))
        shared = "hidden_size" if taps else "vocab_size"        # without taps it has a head of its own
        for name, theirs in {"num_target_layers": L, shared: getattr(target, shared)}.items():
            ours = given.get(name, theirs)
            check(ours == theirs, name, ours, f"this drafter belongs to another target, which has {theirs}")
        inside = isinstance(taps, list) and {*taps} <= {*range(L)}
        check(inside, "target_layer_ids", taps, f"not all in the target's {L} layers (0 to {L - 1})")
        inside = kind.in_turn or mask in range(V)
        check(inside, "mask_token_id", mask, f"not inside the target's embedding of {V}")
        return cls(layers, block_size, mask, taps, L, given.get("injection", "kv"),
                   given.get("chat_options", {}))

    def to_dict(self, kind):
        """For a config.json. Fields of ours that published code does not know stay out at their defaults."""
        own = {name: getattr(self, name) for name in OWN_FIELDS if getattr(self, name) not in ("kv", {})}
        return {**self.layers.to_dict(), "architectures": [kind.architecture], "block_size": self.block_size,
                "num_target_layers": self.num_target_layers, f"{kind.method}_config": own,
                "layer_types": ["full_attention"] * self.layers.num_hidden_layers}


def pick_mask_token(tokenizer, vocab_size, given=None, prompts=()):
    """The id that stands for "to be drafted": the given special token or id, else an id of the padded
    embedding that no token uses, else a special token made to be spare. Text may still contain it: it is only
    ever the drafter's input, nothing is stripped.

    vocab_size: rows of the target's embedding; prompts: rows of ids. UserError names the tokens to choose
    from.
    """
    special = tokenizer.special_ids
    if given is not None:
        token = special.get(given, int(given) if given.isdecimal() else -1)
        check(0 <= token < vocab_size, "--mask-token", given,
              f"neither a special token nor an id inside the target's embedding of {vocab_size}")
        return token
    if tokenizer.vocab_size < vocab_size:
        return tokenizer.vocab_size
    used = set().union(*prompts, tokenizer.eos_ids, [tokenizer.bos_id])
    free = {name: token for name, token in special.items()
            if token < vocab_size and token not in used and name not in (tokenizer.chat_template or "")}
    for name, token in free.items():
        if re.search(r"mask|reserved|unused|extra", name, re.I):
            return token
    raise UserError("the tokenizer has no spare token for the drafter's mask; choose one with --mask-token. "
                    f"Used by no template and no prompt: {', '.join(free) or 'none'}")


def load_drafter(path, target):
    """Opens a drafter of any kind: config.json says which (where it doesn't, DFlash)."""
    named = read_json(Path(path) / "config.json").get("architectures")
    kinds = (kind for kind in DRAFTERS.values() if named == [kind.architecture])
    return next(kinds, DFlashDrafter).from_pretrained(path, target)


def drafter_folders(out):
    """The drafters that train.py has left in a folder; DFlash's where there is none."""
    folders = [Path(out) / kind.folder for kind in DRAFTERS.values()]
    return [folder for folder in folders if folder.exists()] or folders[:1]


def remembered_options(folder):
    """The keywords of the chat template that a drafter was trained with; none where there is no drafter."""
    raw = read_optional(Path(folder) / "config.json")
    own = next(filter(None, (raw.get(f"{method}_config") for method in DRAFTERS)), None)
    options = own.get("chat_options") if isinstance(own, dict) else None
    return options if isinstance(options, dict) else {}


def load_drafters(folders, target):
    """{name: drafter}: the method's name, and where that comes twice the folder's with it."""
    found = {}
    for folder in folders:
        drafter = load_drafter(folder, target)
        found[f"{drafter.method} {folder}" if drafter.method in found else drafter.method] = drafter
    return found
