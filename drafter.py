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

from kernels import (attention, causal, chains, context_and_block, dflash_training, input_injection_training,
                     make_mask)
from model import (DecoderLayer, ModelConfig, RMSNorm, Rope, Transformer, UserError, check, check_fields,
                   init_weights, load_model, read_json, read_optional, save_model)


def default_taps(num_target_layers, taps=5):
    """Ids (0-based) of layers spread evenly from the 2nd to the 3rd-last (section 4.1), or from the first to
    the last where the former are too few to be distinct. A target with fewer layers than taps gives all it
    has."""
    L, n = num_target_layers, min(taps, num_target_layers)
    if n == 1:
        return [L // 2]
    first, last = (1, L - 3) if L - 3 >= n else (0, L - 1)
    return [round(first + i * (last - first) / (n - 1)) for i in range(n)]


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


# Fields of published drafters that change what these compute, and the values with which they don't. They
# stand in config.json or in its dflash_config, where any field that is neither here nor in UNDERSTOOD is refused.
CHANGES = {"is_causal": (None, False), "causal": (None, False), "sample_from_anchor": (None, False),
           "final_logit_softcapping": (None,), "output_multiplier": (None, 1), "conv_kernel_size": (None, 0),
           "selector_rank": (None, 0)}
UNDERSTOOD = {"block_size", "mask_token_id", "target_layer_ids", "injection", "chat_options"}


class Drafter(nn.Module):
    """What the drafters share: the modules (of the two that read features), how they start, and their
    files."""
    # in_turn: each token is drafted from the drafts before it
    in_turn, default_taps = False, staticmethod(default_taps)
    shared_with_target = ("hidden_size",)          # of the configuration: embedding and head are the target's
    dtype = property(lambda self: next(self.parameters()).dtype)

    def __init__(self, config):
        super().__init__()
        self.config, layers = config, config.layers
        self.fc = nn.Linear(len(config.target_layer_ids) * layers.hidden_size, layers.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layers, i) for i in range(layers.num_hidden_layers))
        self.norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.rope = Rope(layers)

    @classmethod
    def for_target(cls, target, *, num_layers=5, block_size=16, mask_token_id, target_layer_ids=None,
                   injection="kv", chat_options=None):
        """A new drafter of the target's width and head layout; initialize it with `init_weights`."""
        L = target.config.num_hidden_layers
        layers = replace(target.config, model_type="qwen3", num_hidden_layers=num_layers)
        layers.attention_bias = False
        taps = target_layer_ids or cls.default_taps(L)
        return cls(DrafterConfig(layers, block_size, mask_token_id, taps, L, injection, chat_options or {}))

    def check_sizes(self, block_size, tree_budget, denoise_steps):
        """Refuses what `decode.speculative` can't be asked for."""
        sizes = range(1, self.config.layers.max_position_embeddings + 1)
        if not (block_size in (None, "auto") or block_size in sizes):
            raise UserError(f"block_size = {block_size} is out of range")
        if not (tree_budget is None or tree_budget in sizes[1:]):
            raise UserError(f"tree_budget = {tree_budget} is out of range")
        if not denoise_steps >= 1:
            raise UserError(f"denoise_steps = {denoise_steps} is out of range")
        if self.in_turn and (tree_budget or denoise_steps > 1):
            raise UserError(f"{self.title} drafts token after token: no tree_budget, no denoise_steps")

    @torch.no_grad()
    def init_weights(self, target, generator):
        """Starts as a copy of the target's last layers that reads its last tap: a drafter of the target's
        shape has most of what it needs to know already (from random weights it takes several times as many
        steps). What the target lacks, say QK-norm, starts at one."""
        init_weights(self, generator)
        own = self.state_dict()
        for i in range(len(self.layers)):
            layer = target.model.layers[max(0, len(target.model.layers) - len(self.layers) + i)].state_dict()
            layer = {f"layers.{i}.{name}": value for name, value in layer.items()}
            own |= {name: value for name, value in layer.items() if name in own}
        for name, parameter in self.named_parameters():
            # EAGLE-3's q, k, v: the half that reads the embedding starts small
            if own[name].shape != parameter.shape:
                own[name] = torch.cat((0.1 * parameter[:, own[name].shape[1]:], own[name].to(parameter)), 1)
        own["norm.weight"] = target.model.norm.weight
        C = own["fc.weight"].shape[0]
        own["fc.weight"] *= 0.1
        own["fc.weight"][:, -C:] += torch.eye(C)
        self.load_state_dict(own)

    @classmethod
    def from_pretrained(cls, path, target):
        """Opens a checkpoint (of DFlash also a published one) for this target, in the target's dtype and on
        its device. UserError says what doesn't fit."""
        config = read_json(Path(path) / "config.json", lambda raw: cls.read_config(raw, target.config))
        return load_model(lambda: cls(config), path, target.device, target.dtype)

    @classmethod
    def read_config(cls, raw, target):
        """A config.json's content -> DrafterConfig. target: the target's ModelConfig. UserError says what
        doesn't fit, or changes what a drafter computes in a way that we don't have."""
        section = f"{cls.method}_config"
        own, layers, L = raw.get(section) or {}, ModelConfig.from_dict(raw), target.num_hidden_layers
        check(isinstance(own, dict), section, own, "no object")
        block_size = raw.get("block_size", own.get("block_size"))
        known = layers.model_type == "qwen3" or cls.method == "ar"
        if (raw.get("architectures") not in (None, [cls.architecture]) or not known
                or type(block_size) is not int or block_size < 1):
            raise UserError(
                f"not {cls.title} (architectures {raw.get('architectures')}, model_type "
                f"{layers.model_type!r}, block_size {block_size}); give the folder that train.py wrote as "
                f"{cls.folder}/{', or a published one' * (cls.method == 'dflash')}")
        check_fields(raw, CHANGES)
        for name in own.keys() - UNDERSTOOD:
            check(own[name] in CHANGES.get(name, (None,)), f"{section}.{name}", own[name])
        own_shape = {"num_target_layers": raw.get("num_target_layers", L)}
        own_shape |= {name: getattr(layers, name) for name in cls.shared_with_target}
        for name, value in own_shape.items():
            theirs = L if name == "num_target_layers" else getattr(target, name)
            check(value == theirs, name, value, f"this drafter belongs to another target, which has {theirs}")
        taps = own.get("target_layer_ids") or raw.get("target_layer_ids")
        taps = taps or cls.default_taps(L, layers.num_hidden_layers)
        inside = isinstance(taps, list) and all(type(tap) is int and 0 <= tap < L for tap in taps)
        check(inside, "target_layer_ids", taps, f"not all in the target's {L} layers (0 to {L - 1})")
        mask = own.get("mask_token_id", raw.get("mask_token_id"))
        if cls.method == "dflash":
            inside = type(mask) is int and 0 <= mask < target.vocab_size
            check(inside, "mask_token_id", mask, f"not inside the target's embedding of {target.vocab_size}")
        injection, chat_options = own.get("injection") or "kv", own.get("chat_options") or {}
        check(injection in ("kv", "input"), "injection", injection, "not supported (kv and input are)")
        check(isinstance(chat_options, dict), "chat_options", chat_options, "no object")
        return DrafterConfig(layers, block_size, mask, taps, L, injection, chat_options)

    def save_pretrained(self, path):
        """DFlash: writes the layout that the published code, vLLM (method dflash) and SGLang (algorithm
        DFLASH) read. The others' is like it."""
        config = self.config
        own = {"block_size": config.block_size, "mask_token_id": config.mask_token_id,
               "target_layer_ids": config.target_layer_ids}
        own |= {"injection": config.injection} if config.injection != "kv" else {}
        own |= {"chat_options": config.chat_options} if config.chat_options else {}
        save_model(self, path, {
            **config.layers.to_dict(), "architectures": [self.architecture], "block_size": config.block_size,
            "num_target_layers": config.num_target_layers, f"{self.method}_config": own,
            "layer_types": ["full_attention"] * config.layers.num_hidden_layers})


class DFlashDrafter(Drafter):
    method, folder, architecture, title = "dflash", "drafter", "DFlashDraftModel", "a DFlash drafter"

    def forward(self, features, block, positions, mask, cache=None):
        """Section 4.1: the hidden states of the blocks, given the target's features of the context.

        features:  (B, S, taps * C) of context positions (the ones not yet in the cache, if there is one)
        block:     (B, N, C) embeddings of one block [anchor, MASK, ...], in training of several in a row
        positions: (B, S + N) the true positions of both
        Returns (B, N, C), for the target's LM head.
        """
        context = self.hidden_norm(self.fc(features))                  # (B, S, C), the target context feature
        rope = self.rope(positions, block.dtype)
        if self.config.injection == "input":         # the context as hidden states that go through all layers
            x, context = torch.cat((context, block), 1), None
        else:
            x = block
        for layer in self.layers:
            x = layer(x, rope, mask, cache, context)
        return self.norm(x[:, -block.shape[1]:])

    def inject(self, features, context, block, positions, cache):
        """A pass with a cache: the features (B, W, taps * C) at positions context (B, W) enter it for good,
        as keys and values of every layer. Those of the block, embeddings (B, N, C) at positions (B, N), lie
        behind them until the next pass writes over them."""
        places = torch.cat((context, positions), 1)                              # (B, W + N)
        # A block sees the whole context, and all of itself
        limit = places.amax(1, keepdim=True).expand_as(positions) + 1
        if self.config.injection == "input":
            limit = torch.cat((context + 1, limit), 1)
        cache.write_at(places)
        mask = make_mask(context_and_block(limit), *limit.shape, cache.kv_len, block.device, self.dtype)
        return self(features, block, places, mask, cache)

    def draft(self, target, text, features, start, window, block_size, cache, sample, steps=1):
        """Drafts one block a row, in one pass: logits (B, block_size - 1, V) of slots 1, 2, ...

        text:     (B, capacity) token ids by position, the anchor's included
        features: (B, capacity, taps * C) by position, the target's of all positions before the anchor's
        start:    (B,) int64, the anchors' positions
        window:   how many positions before the anchor are read here; those before them are in the cache.
                  (Where a row has read some of them before, that changes nothing: no records are needed.)
        cache:    the drafter's KVCache
        sample:   (logits (B, n, V), slot) -> (B, n), the tokens drafted in these slots, counted from 0
        steps:    passes that denoise the block; the paper's drafter takes one
        """
        context = last_positions(start, window)
        positions = start[:, None] + torch.arange(block_size, device=start.device)
        ids = torch.full_like(positions, self.config.mask_token_id)
        ids[:, 0] = text.gather(1, start[:, None])[:, 0]                         # [anchor, MASK, MASK, ...]
        features = rows_at(features, context)
        hidden = self.inject(features, context, target.model.embed_tokens(ids), positions, cache)
        logits = target.logits(hidden[:, 1:])                                  # (B, S, V), S = block_size - 1
        filled = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
        for step in range(1, steps):                        # the surest slots stay, the rest is drafted again
            tokens = sample(logits, 0)
            sure = logits.float().softmax(-1).gather(2, tokens[..., None])[..., 0].masked_fill(filled, 2.0)
            filled = sure.argsort(1, descending=True).argsort(1) < step * sure.shape[1] // steps
            ids[:, 1:] = torch.where(filled, tokens, self.config.mask_token_id)
            hidden = self.inject(features, context, target.model.embed_tokens(ids), positions, cache)
            logits = torch.where(filled[..., None], logits, target.logits(hidden[:, 1:]))
        return logits

    def read(self, target, text, features, positions, cache):
        """Puts the context at positions (B, W) into the cache: a pass with an empty block. Arguments as in
        `draft`."""
        no_block = target.model.embed_tokens(text[:, :0])
        self.inject(rows_at(features, positions), positions, no_block, positions[:, :0], cache)

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Weighted cross-entropy of all blocks of all rows of a TrainingBatch, in one forward pass under the
        sparse mask (section 4.2). gamma: the decay over a block's slots; inf: none. chunk: see
        `token_losses`.
        Returns the sum of the weighted losses and that of the weights: processes add up theirs, then
        divide."""
        (B, S), block_size = batch.ids.shape, self.config.block_size
        gamma = gamma or default_gamma(block_size)
        ids, positions, weight = training_blocks(batch, block_size, self.config.mask_token_id, gamma)
        context = torch.arange(S, device=ids.device).expand(B, S)
        visible, queries = dflash_training(batch.anchors, S, block_size), ids[0].numel()
        if self.config.injection == "input":
            visible, queries = input_injection_training(batch.anchors, S, block_size), S + queries
        mask = make_mask(visible, B, queries, S + ids[0].numel(), ids.device, batch.features.dtype)
        hidden = self(batch.features, target.model.embed_tokens(ids.flatten(1)),
                      torch.cat((context, positions.flatten(1)), 1), mask)       # (B, N * block_size, C)
        labels = batch.labels(positions.flatten(1).clamp(max=S - 1))
        hidden, labels = (x.unflatten(1, ids.shape[1:])[:, :, 1:].flatten(0, 2) for x in (hidden, labels))
        weight = weight[:, :, 1:].flatten()                                     # slot 0, the anchor, is given
        losses = token_losses(target.logits, target, hidden, labels, chunk)
        return (losses * weight).sum(), weight.sum()


def last_positions(start, n):
    """(B, n): the n positions before start (B,). Where the text is shorter, its first position stands in for
    those that don't exist."""
    return (start[:, None] + torch.arange(-n, 0, device=start.device)).clamp(min=0)


def rows_at(x, positions):
    """x (B, capacity, F) at positions (B, n) -> (B, n, F)"""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


# ---- what the target gets to read: a chain of drafts, or a tree --------------------------------------------

class Drafts(NamedTuple):
    """The anchor and the drafts behind it: a chain, in which each has the one before it as parent, or a tree,
    parents before children."""
    tokens: torch.Tensor                     # (B, N) int64, the anchor first
    probability: torch.Tensor       # (B, N) float32, the drafter's, of all drafts from the anchor to this one
    parent: torch.Tensor | None = None       # trees: (B, N) int64, the node before; the anchor's is itself
    depth: torch.Tensor | None = None        # trees: (B, N) int64, how far behind the anchor
    # Trees: (B, N, N) bool, [b, i, j]: is node j an ancestor of node i, or i itself?
    ancestors: torch.Tensor | None = None

    def first(self, n):
        """Of a tree, the best n nodes."""
        return Drafts(*(x if x is None else x[:, :n, :n] if x.dim() == 3 else x[:, :n] for x in self))


def propose(anchor, guesses, tree_budget):
    """anchor (B, 1); guesses (B, S, V), `Sampling.guess_probabilities` of the drafter's slots -> Drafts."""
    return draft_tree(anchor, guesses, tree_budget) if tree_budget else draft_chain(anchor, guesses)


def draft_chain(anchor, guesses):
    """The likeliest token of each slot. N = S + 1."""
    probability, tokens = guesses.max(-1)                                        # (B, S)
    return Drafts(torch.cat((anchor, tokens), 1), F.pad(probability.cumprod(1), (1, 0), value=1.0))


def draft_tree(anchor, guesses, budget):
    """The `budget` likeliest prefixes of the block (the anchor's, which is certain, among them), best first:
    N = budget.

    One pass of the drafter gives a distribution for each slot, so a prefix's probability is a product over
    its slots. Level after level the likeliest prefixes grow by one token each; of a level no more than the
    budget can be among the best (liranringel/ddtree, arXiv:2604.12989).
    """
    B, S, V = guesses.shape
    K = min(budget - 1, V)                                                   # tokens to choose from in a slot
    W = min(budget - 1, K * K)                                  # prefixes kept of a level; of the first one K
    top, tokens = guesses.topk(K)                                                # (B, S, K)
    log_p = top.log()
    level, scores, choices = log_p.new_zeros(B, 1), [], []
    for slot in range(S):
        longer = (level[:, :, None] + log_p[:, slot, None]).flatten(1)           # (B, prefixes * K)
        level, choice = longer.topk(W if slot else K)
        scores.append(level)
        first = K + (slot - 2) * W if slot > 1 else 0             # of the parents' level, its place in scores
        choices.append(choice + first * K)                         # so that choice // K is the parent's place
    score, choice = torch.cat(scores, 1), torch.cat(choices, 1)      # (B, candidates), shorter prefixes first
    # A child is no likelier than its parent, and a stable sort leaves equal ones in order: parents come
    # first, and none is missing.
    best = score.sort(dim=1, descending=True, stable=True).indices[:, :budget - 1]
    depth = (best - K + W) // W + 1
    choice = choice.gather(1, best)
    node = torch.arange(1, best.shape[1] + 1, device=anchor.device).expand(best.shape)
    node_at = torch.zeros_like(score, dtype=torch.int64).scatter_(1, best, node)
    parent = node_at.gather(1, choice // K).masked_fill(depth == 1, 0)
    parent, depth = F.pad(parent, (1, 0)), F.pad(depth, (1, 0))                  # the anchor in front
    tokens = tokens.flatten(1).gather(1, (depth[:, 1:] - 1) * K + choice % K)
    probability = F.pad(score.gather(1, best).exp(), (1, 0), value=1.0)
    return Drafts(torch.cat((anchor, tokens), 1), probability, parent, depth, ancestors_of(parent, S))


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
        predicts them from. (At temperature 1 the expected gradient is the same, with much less noise.)"""
        before = (positions - 1).clamp(min=0)
        return rows_at(self.hidden, before) if self.soft else self.ids.gather(1, positions)


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
    """7 / 5 / 4 for block 16 / 10 / 8, as in the paper; between and beyond, a line through them."""
    return max(1.0, {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, 1.0 + 0.375 * block_size))


def training_blocks(batch, block_size, mask_token_id, gamma):
    """All blocks of all rows: their token ids, positions and weights in the loss, each (B, N, block_size).
    Slot k weighs exp(-(k - 1) / gamma), and nothing where its token is given or no label."""
    slot = torch.arange(block_size, device=batch.ids.device)
    positions = batch.anchors[:, :, None] + slot
    inside = positions.flatten(1).clamp(max=batch.ids.shape[1] - 1)
    counts = batch.trainable.gather(1, inside).view_as(positions) & (positions < batch.ids.shape[1])
    given = batch.revealed & counts | (slot == 0)                                # slot 0 is the anchor
    tokens = batch.ids.gather(1, inside).view_as(positions)
    ids = torch.where(given, tokens, mask_token_id)
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

class Eagle3Drafter(Drafter):
    """EAGLE-3 (Li et al., arXiv:2503.01840): one layer whose position t reads the target's feature of t and
    the embedding of the token at t + 1, and predicts the token at t + 2. Behind the verified text its own
    output takes the feature's place."""
    method, folder, architecture, title = "eagle3", "eagle3", "Eagle3DraftModel", "an EAGLE-3 drafter"
    in_turn = True

    def __init__(self, config):
        super().__init__(config)
        attn, C = self.layers[0].self_attn, config.layers.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):                            # they read [embedding, hidden]
            setattr(attn, name, nn.Linear(2 * C, getattr(attn, name).out_features, bias=False))

    @staticmethod
    def default_taps(L, _=None):
        """A low, a middle and a high layer; distinct ones also where there are few."""
        taps = [1, L // 2 - 1, L - 4]
        return taps if taps[0] < taps[1] < taps[2] else default_taps(L, 3)

    @classmethod
    def for_target(cls, target, *, block_size=16, chat_options=None, **_):
        """It always has one layer, and no mask."""
        return super().for_target(target, num_layers=1, block_size=block_size, mask_token_id=None,
                                  chat_options=chat_options)

    def project(self, hidden, embedding, positions):
        """hidden, embedding: (B, n, C) at positions (B, n) -> q (B, n, H, D), k and v (B, n, K, D)"""
        x = torch.cat((self.layers[0].input_layernorm(embedding), self.hidden_norm(hidden)), -1)  # (B, n, 2C)
        return self.layers[0].self_attn.project(x, x, self.rope(positions, x.dtype))

    def finish(self, hidden, attended):
        """hidden (B, n, C), attended (B, n, H, D) -> the new hidden"""
        hidden = hidden + self.layers[0].self_attn.o_proj(attended.flatten(2))
        return hidden + self.layers[0].mlp(self.layers[0].post_attention_layernorm(hidden))

    def step(self, target, hidden, ids, positions, cache):
        """One causal pass with a cache: at positions (B, n), hidden (B, n, C) and the tokens behind them, ids
        (B, n) -> new hidden."""
        q, k, v = self.project(hidden, target.model.embed_tokens(ids), positions)
        cache.write_at(positions)
        mask = make_mask(causal(positions), *positions.shape, cache.kv_len, ids.device, q.dtype)
        attended = attention(q.transpose(1, 2), *cache.update(0, k, v), mask)
        return self.finish(hidden, attended.transpose(1, 2))

    def read(self, target, text, features, positions, cache):
        """As DFlashDrafter.read."""
        hidden = self.fc(rows_at(features, positions))
        self.step(target, hidden, text.gather(1, positions + 1), positions, cache)

    def draft(self, target, text, features, start, window, block_size, cache, sample, steps=1):
        """As DFlashDrafter.draft, in block_size - 1 passes. sample: (logits (B, 1, V), slot) -> (B, 1), the
        token drafted in that slot (counted from 0), which the next pass reads."""
        positions = last_positions(start, window)
        hidden, ids = self.fc(rows_at(features, positions)), text.gather(1, positions + 1)
        logits = []
        for slot in range(block_size - 1):
            hidden = self.step(target, hidden, ids, positions, cache)[:, -1:]
            logits.append(target.logits(self.norm(hidden)))
            ids, positions = sample(logits[-1], slot), positions[:, -1:] + 1
        return torch.cat(logits, 1)

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Training-time test: block_size - 1 steps of drafting, each fed with the hidden states of the one
        before. In step j a chain stands at position t + j, reads the token behind it and predicts the one at
        t + 2 + j; the step weighs 0.8**j. The first step is taken from every position, the others, of which
        each sees the first one's keys and those of its own chain, from the anchors' predecessors only. Result
        as `DFlashDrafter.loss`."""
        (B, S), device = batch.ids.shape, batch.ids.device
        start = torch.arange(S, device=device).expand(B, S)                      # of the chains (B, N)
        hidden, counts = self.fc(batch.features).to(self.dtype), torch.ones_like(batch.trainable)
        keys, values, mask_mod, total, weight = [], [], causal(start), 0.0, 0.0
        for j in range(self.config.block_size - 1):
            ids = batch.ids.gather(1, (start + j + 1).clamp(max=S - 1))
            q, k, v = self.project(hidden, target.model.embed_tokens(ids), start + j)
            keys.append(k.transpose(1, 2))
            values.append(v.transpose(1, 2))
            mask = make_mask(mask_mod, B, start.shape[1], sum(k.shape[2] for k in keys), device, q.dtype)
            out = attention(q.transpose(1, 2), torch.cat(keys, 2), torch.cat(values, 2), mask)
            hidden = self.finish(hidden, out.transpose(1, 2))
            label_at = (start + j + 2).clamp(max=S - 1)
            has_label = counts & batch.trainable.gather(1, label_at) & (start + j + 2 < S)
            losses = token_losses(target.logits, target, self.norm(hidden).flatten(0, 1),
                                  batch.labels(label_at).flatten(0, 1), chunk)
            labelled = has_label.sum()
            all_labelled = labelled if j == 0 else all_labelled
            share = 0.8**j * all_labelled / labelled.clamp(min=1)          # fewer chains weigh as much as all
            total += share * (losses * has_label.flatten()).sum()
            weight += share * labelled
            if j == 0:
                start, counts = (batch.anchors - 1).clamp(min=0), batch.valid
                hidden, mask_mod = rows_at(hidden, start), chains(start, S)
        return total, weight


class ARDrafter(Drafter):
    """The classic draft model: a smaller Transformer of the target's width and vocabulary, with an embedding
    and a head of its own."""
    method, folder, architecture, title = "ar", "ar", "ARDraftModel", "an autoregressive drafter"
    in_turn, default_taps = True, staticmethod(lambda L, _=None: [])
    shared_with_target = ("vocab_size",)

    def __init__(self, config):
        nn.Module.__init__(self)
        self.config, self.transformer = config, Transformer(config.layers)

    @classmethod
    def for_target(cls, target, *, num_layers=5, block_size=16, chat_options=None, **_):
        layers = replace(target.config, num_hidden_layers=num_layers)
        return cls(DrafterConfig(layers, block_size, None, [], target.config.num_hidden_layers,
                                 chat_options=chat_options or {}))

    def init_weights(self, target, generator):
        """Starts as the target without its last layers."""
        self.transformer.init_weights(generator)
        self.transformer.load_state_dict(target.state_dict(), strict=False)

    def read(self, target, text, features, positions, cache):
        """As DFlashDrafter.read."""
        self.transformer(text.gather(1, positions), positions, cache)

    def draft(self, target, text, features, start, window, block_size, cache, sample, steps=1):
        """As Eagle3Drafter.draft; the first pass reads the anchor too."""
        positions = last_positions(start + 1, window + 1)
        ids, logits = text.gather(1, positions), []
        for slot in range(block_size - 1):
            hidden, _ = self.transformer(ids, positions, cache)
            logits.append(self.transformer.logits(hidden[:, -1:]))
            ids, positions = sample(logits[-1], slot), positions[:, -1:] + 1
        return torch.cat(logits, 1)

    def loss(self, target, batch, gamma=None, chunk=2**28):
        """Cross-entropy of the next token where that is trainable; result as `DFlashDrafter.loss`."""
        counts = batch.trainable[:, 1:]
        positions = torch.arange(1, batch.ids.shape[1], device=counts.device)
        labels = batch.labels(positions.expand_as(counts))
        hidden = self.transformer(batch.ids)[0][:, :-1]
        losses = token_losses(self.transformer.logits, target, hidden[counts], labels[counts], chunk)
        return losses.sum(), counts.sum()


DRAFTERS = {cls.method: cls for cls in (DFlashDrafter, Eagle3Drafter, ARDrafter)}


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
    named = read_json(Path(path) / "config.json").get("architectures") or ["DFlashDraftModel"]
    for cls in DRAFTERS.values():
        if named == [cls.architecture]:
            return cls.from_pretrained(path, target)
    raise UserError(f"{path}: not a drafter (architectures {named}); give a folder that train.py wrote "
                    "as drafter/, eagle3/ or ar/, or a published DFlash drafter")


def drafter_folders(out):
    """The drafters that train.py has left in a folder; DFlash's where there is none."""
    folders = [Path(out) / kind.folder for kind in DRAFTERS.values()]
    return [folder for folder in folders if folder.exists()] or folders[:1]


def remembered_options(folder):
    """The keywords of the chat template that a drafter was trained with; none where there is no drafter."""
    raw = read_optional(Path(folder) / "config.json")
    own = [raw.get(f"{method}_config") or {} for method in DRAFTERS]
    return next((section["chat_options"] for section in own if "chat_options" in section), {})


def load_drafters(folders, target):
    """{name: drafter}: the method's name, and where that comes twice the folder's with it."""
    found = {}
    for folder in folders:
        drafter = load_drafter(folder, target)
        found[f"{drafter.method} {folder}" if drafter.method in found else drafter.method] = drafter
    return found
