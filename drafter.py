"""The DFlash drafter (Chen, Liang, Liu, arXiv:2602.06036): a whole block of tokens in one forward pass.

    target layers          taps        drafter
    h_1 .. h_L  ──────► concatenate ──► fc ──► hidden_norm ──► context feature, one vector a verified position
                                                                    │  injected as keys and values
                                                                    ▼  into EVERY layer (Attention's `context`)
    [anchor, MASK, MASK, ..., MASK] ──► target's embedding ──► layers, bidirectional in the block ──► norm ──► target's LM head
                                                                    slot k predicts the token AT position anchor + k

The anchor is the last verified token: the target has chosen it but not yet read it, so its own feature does not exist.
"""
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from kernels import context_and_block, dflash_training, make_mask
from model import Layer, ModelConfig, RMSNorm, Rope, UserError, empty, init_weights, load_weights, read_json, save_model


def default_taps(num_target_layers, taps=5):
    """Layer ids spread evenly from the 2nd to the 3rd-last layer, 0-based (section 4.1)."""
    if taps == 1:
        return [num_target_layers // 2]
    return [min(max(round(1 + i * (num_target_layers - 4) / (taps - 1)), 0), num_target_layers - 1) for i in range(taps)]


@dataclass
class DrafterConfig:
    layers: ModelConfig                 # of the draft layers: the target's with fewer layers
    block_size: int
    mask_token_id: int
    target_layer_ids: list
    num_target_layers: int


class DFlashDrafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, layers = config, config.layers
        self.fc = nn.Linear(len(config.target_layer_ids) * layers.hidden_size, layers.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(layers, i) for i in range(layers.num_hidden_layers))
        self.norm = RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.rope = Rope(layers)

    @classmethod
    def for_target(cls, target, *, num_layers=5, block_size=16, mask_token_id, target_layer_ids=None):
        """A new drafter of the target's width and head layout; initialize it with `init_weights`."""
        L = target.config.num_hidden_layers
        layers = replace(target.config, model_type="qwen3", num_hidden_layers=num_layers, attention_bias=False)
        return cls(DrafterConfig(layers, block_size, mask_token_id, target_layer_ids or default_taps(L), L))

    @torch.no_grad()
    def init_weights(self, target, generator):
        """Starts as a copy of the target's last layers that reads its last tap: a drafter of the target's shape has most of what it needs to
        know already (from random weights it takes several times as many steps). What the target lacks, say QK-norm, starts at one."""
        init_weights(self, generator)
        own = self.state_dict()
        for i in range(len(self.layers)):
            layer = target.model.layers[max(0, len(target.model.layers) - len(self.layers) + i)].state_dict()
            own |= {f"layers.{i}.{name}": value for name, value in layer.items() if f"layers.{i}.{name}" in own}
        own["norm.weight"] = target.model.norm.weight
        C = own["fc.weight"].shape[0]
        own["fc.weight"] *= 0.1
        own["fc.weight"][:, -C:] += torch.eye(C)
        self.load_state_dict(own)

    def forward(self, features, block, positions, mask, cache=None):
        """Section 4.1: the hidden states of the blocks, given the target's features of the context.

        features:  (B, S, taps * C) of context positions (the ones not yet in the cache, if there is one)
        block:     (B, N, C) embeddings of one block [anchor, MASK, ...], or in training of several, one after the other
        positions: (B, S + N) the true positions of both
        Returns (B, N, C), for the target's LM head.
        """
        context = self.hidden_norm(self.fc(features))                            # (B, S, C), the target context feature
        rope = self.rope(positions, block.dtype)
        x = block
        for layer in self.layers:
            x = layer(x, rope, mask, cache, context)
        return self.norm(x)

    # ---- decoding ------------------------------------------------------------------------------------------------------------

    def draft(self, target, anchor, start, unread, cache, block_size, end, pick):
        """Drafts one block a row, in one pass. Returns the tokens of slots 1 .. block_size - 1 and what they were drawn from, as `pick` gives them.

        anchor, start: (B,) int64, the last verified tokens and their positions
        unread:   of the context that is not in the cache yet: token ids (B, W), their positions (B, W) int64, -1 for what belongs to no
                  accepted token, and the target's features (B, W, taps * C)
        cache:    the drafter's KVCache. Context K/V stay in it and grow with the accepted tokens. Block K/V are written behind them
                  and thrown away: the next call writes over them. Its last slot takes what has no place.
        end:      as in `Transformer.forward`: at least max(start) + block_size
        pick:     (logits (B, n, V), first slot) -> tokens (B, n), their distributions (B, n, V)
        """
        (_, places, features), B, device = unread, len(anchor), anchor.device
        places = torch.where(places < 0, cache.length - 1, places)
        positions = torch.cat((places, start[:, None] + torch.arange(block_size, device=device)), 1)
        ids = torch.full((B, block_size), self.config.mask_token_id, device=device)
        ids[:, 0] = anchor
        cache.at(positions, end)
        mask = None                                                              # one row, and the cache cut to its length: all of it is seen
        if B > 1 or end is None:
            mask = make_mask(context_and_block(start + block_size), B, block_size, cache.end, device, self.dtype)
        hidden = self(features, target.model.embed_tokens(ids), positions, mask, cache)
        return pick(target.logits(hidden[:, 1:]), 0)

    # ---- files ---------------------------------------------------------------------------------------------------------------

    @property
    def dtype(self):
        return self.norm.weight.dtype

    @classmethod
    def from_pretrained(cls, path, target):
        """Opens a published DFlash checkpoint for this target, in the target's dtype and on its device. UserError says what doesn't fit."""
        where, raw = Path(path) / "config.json", read_json(Path(path) / "config.json")
        dflash = raw.get("dflash_config") or {}
        if not isinstance(dflash, dict):
            raise UserError(f"{where}: dflash_config = {dflash!r} is no object")
        L, layers = target.config.num_hidden_layers, ModelConfig.from_dict(raw, where)
        block_size, mask = raw.get("block_size", dflash.get("block_size")), dflash.get("mask_token_id", raw.get("mask_token_id"))
        taps = dflash.get("target_layer_ids") or raw.get("target_layer_ids") or default_taps(L, layers.num_hidden_layers)
        if raw.get("architectures") not in (None, ["DFlashDraftModel"]) or layers.model_type != "qwen3" or type(block_size) is not int or block_size < 1:
            raise UserError(f"{where}: not a DFlash drafter (architectures {raw.get('architectures')}, model_type {layers.model_type!r}, "
                            f"block_size {block_size}); give the folder that train.py wrote as drafter/, or a published one")
        for name, own, theirs in (("num_target_layers", raw.get("num_target_layers", L), L),
                                  *((field, getattr(layers, field), getattr(target.config, field))
                                    for field in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"))):
            if own != theirs:
                raise UserError(f"{where}: this drafter belongs to another target: {name} is {own} here and {theirs} in the target")
        if not isinstance(taps, list) or not all(type(tap) is int and 0 <= tap < L for tap in taps):
            raise UserError(f"{where}: target_layer_ids {taps} do not all lie in the target's {L} layers (0 to {L - 1})")
        if type(mask) is not int or not 0 <= mask < layers.vocab_size:
            raise UserError(f"{where}: mask_token_id {mask} is no token of a vocabulary of {layers.vocab_size}")
        drafter = empty(lambda: cls(DrafterConfig(layers, block_size, mask, taps, L)), target.device, target.dtype)
        load_weights(drafter, path)
        return drafter.eval()

    def save_pretrained(self, path):
        """Writes the layout that the published code, vLLM (method dflash) and SGLang (algorithm DFLASH) read."""
        config = self.config
        save_model(self, path, {
            **config.layers.to_dict(), "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
            "block_size": config.block_size, "num_target_layers": config.num_target_layers,
            "layer_types": ["full_attention"] * config.layers.num_hidden_layers,
            "dflash_config": {"block_size": config.block_size, "mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}})


# ---- training (section 4.2) ----------------------------------------------------------------------------------------------------

def sample_anchors(trainable, num_anchors, generator):
    """Random anchors: num_anchors different positions a row among the trainable ones (B, S) bool that have a trainable successor.

    Returns anchors (B, N) int64 and valid (B, N) bool: a row with fewer such positions fills up with invalid ones.
    """
    can_start = trainable & F.pad(trainable[:, 1:], (0, 1))
    key = torch.rand(trainable.shape, generator=generator).to(trainable.device).masked_fill(~can_start, -1.0)
    key, anchors = key.topk(min(num_anchors, key.shape[1]), dim=1)
    return anchors, key >= 0


def default_gamma(block_size):
    """7 / 5 / 4 for block 16 / 10 / 8, as in the paper; between and beyond, a line through them."""
    return max(1.0, {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, 1.0 + 0.375 * block_size))


def drafter_loss(drafter, target, ids, features, trainable, anchors, valid, gamma, target_hidden=None, chunk=2**28):
    """Weighted cross-entropy of all blocks of all rows, in one forward pass under the sparse mask.

    ids, trainable: (B, S), the text and which of its tokens count as labels; features: (B, S, taps * C); anchors, valid: (B, N).
    gamma: slot k weighs exp(-(k - 1) / gamma), slot 0 (the anchor, which is given) nothing; inf: all alike.
    target_hidden: (B, S, C), the target's final hidden states of the text: the labels are then its whole distributions instead of the one
        token that was drawn from each. At temperature 1 the expected gradient is the same, with much less noise.
    chunk: logits held at once, in numbers; more are computed, dropped and recomputed in the backward pass.
    Returns (sum of the weighted losses, sum of the weights): processes add up theirs before they divide.
    """
    (B, S), N, block_size, device = ids.shape, anchors.shape[1], drafter.config.block_size, ids.device
    slot = torch.arange(block_size, device=device)
    block_positions = (anchors[:, :, None] + slot).view(B, -1)                   # (B, N * block_size)
    positions = torch.cat((torch.arange(S, device=device).expand(B, S), block_positions), 1)
    block_ids = torch.full((B, N, block_size), drafter.config.mask_token_id, device=device)
    block_ids[:, :, 0] = ids.gather(1, anchors)
    mask = make_mask(dflash_training(anchors, S, block_size), B, N * block_size, S + N * block_size, device, features.dtype)
    hidden = drafter(features, target.model.embed_tokens(block_ids.view(B, -1)), positions, mask)

    predicting = lambda x: x.view(B, N, block_size, -1)[:, :, 1:].flatten(0, 2)  # slots 1 .. block_size - 1 of (B, N * block_size, ...)
    inside = block_positions.clamp(max=S - 1)
    counts = trainable.gather(1, inside) & (block_positions < S) & valid.repeat_interleave(block_size, 1)
    weight = predicting(counts * torch.exp(-(slot - 1) / gamma).repeat(N))[:, 0]
    if target_hidden is None:
        labels = predicting(ids.gather(1, inside))[:, 0]                         # tokens
    else:
        before = (inside - 1).clamp(min=0)[..., None].expand(-1, -1, target_hidden.shape[-1])
        labels = predicting(target_hidden.gather(1, before))                     # what the target predicts them from

    def losses(hidden, labels):
        if labels.is_floating_point():
            labels = target.logits(labels).float().softmax(-1).detach()
        return F.cross_entropy(target.logits(hidden).float(), labels, reduction="none")

    @torch.compiler.disable                                                      # a compiled graph would hold the loop unrolled
    def in_chunks(hidden, labels):
        return torch.cat([torch.utils.checkpoint.checkpoint(losses, *part, use_reentrant=False)
                          for part in zip(hidden.split(rows), labels.split(rows))])
    hidden, rows = predicting(hidden), max(1, chunk // target.config.vocab_size)
    loss = losses(hidden, labels) if len(hidden) <= rows else in_chunks(hidden, labels)
    return (loss * weight).sum(), weight.sum()
