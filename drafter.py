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
from model import DTYPES, KVCache, Layer, ModelConfig, RMSNorm, Rope, UserError, empty, init_weights, load_weights, read_json, save_weights, stored_dtype, write_json


def default_taps(num_target_layers, taps=5):
    """Layer ids spread evenly from the 2nd to the 3rd-last layer, 0-based (section 4.1)."""
    if taps == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps)]


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

    def init_weights(self, generator):
        init_weights(self, generator)

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

    def draft(self, target, anchor, features, first, count, cache, block_size, end=None):
        """Drafts one block a row, in one pass. Returns the logits of slots 1 .. block_size - 1: (B, block_size - 1, V).

        anchor:   (B,) last verified token, at position first + count
        features: (B, W, taps * C) of the positions from first on; only the leading count[b] of row b belong to accepted tokens
        first, count: (B,) int64
        cache:    the drafter's KVCache. Context K/V stay in it and grow with the accepted tokens. Block K/V are written behind them
                  and thrown away: the next call writes over them. Its last slot takes what belongs to no position.
        end:      the number of cache slots to look at: at least max(first + count) + block_size. Default: all
        """
        (B, W), device = features.shape[:2], features.device
        end = cache.length if end is None else end
        start = first + count                                                    # (B,) the anchors' positions
        offset = torch.arange(W, device=device)
        context_positions = torch.where(offset < count[:, None], first[:, None] + offset, cache.length - 1)
        positions = torch.cat((context_positions, start[:, None] + torch.arange(block_size, device=device)), 1)
        ids = torch.full((B, block_size), self.config.mask_token_id, device=device)
        ids[:, 0] = anchor
        cache.at(positions, end)
        if B == 1 and end < cache.length:                                        # a cache cut to its only row's length: all of it is seen
            mask = None
        else:
            mask = make_mask(context_and_block(start + block_size), B, block_size, end, device, self.dtype)
        hidden = self(features, target.model.embed_tokens(ids), positions, mask, cache)
        return target.logits(hidden[:, 1:])

    # ---- files ---------------------------------------------------------------------------------------------------------------

    @property
    def dtype(self):
        return self.norm.weight.dtype

    @classmethod
    def from_pretrained(cls, path, target):
        """Opens a published DFlash checkpoint for this target, in the target's dtype and on its device. UserError says what doesn't fit."""
        where, raw = Path(path) / "config.json", read_json(Path(path) / "config.json")
        dflash = raw.get("dflash_config") or {}
        L, layers = target.config.num_hidden_layers, ModelConfig.from_dict(raw, where)
        block_size, mask = raw.get("block_size", dflash.get("block_size")), dflash.get("mask_token_id", raw.get("mask_token_id"))
        taps = dflash.get("target_layer_ids") or raw.get("target_layer_ids") or default_taps(L, layers.num_hidden_layers)
        if raw.get("architectures") not in (None, ["DFlashDraftModel"]) or layers.model_type != "qwen3" or not block_size:
            raise UserError(f"{where}: not a DFlash drafter (architectures {raw.get('architectures')}, model_type {layers.model_type!r}, "
                            f"block_size {block_size}); give the folder that train.py wrote as drafter/, or a published one")
        for name, own, theirs in (("num_target_layers", raw.get("num_target_layers", L), L),
                                  *((field, getattr(layers, field), getattr(target.config, field))
                                    for field in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"))):
            if own != theirs:
                raise UserError(f"{where}: this drafter belongs to another target: {name} is {own} here and {theirs} in the target")
        if not all(0 <= tap < L for tap in taps):
            raise UserError(f"{where}: target_layer_ids {taps} do not all lie in the target's {L} layers (0 to {L - 1})")
        if not isinstance(mask, int) or not 0 <= mask < layers.vocab_size:
            raise UserError(f"{where}: mask_token_id {mask} is no token of a vocabulary of {layers.vocab_size}")
        drafter = empty(lambda: cls(DrafterConfig(layers, block_size, mask, taps, L)), target.device, target.dtype)
        load_weights(drafter, path)
        return drafter.eval()

    def save_pretrained(self, path):
        """Writes the layout that the published code, vLLM (method dflash) and SGLang (algorithm DFLASH) read."""
        Path(path).mkdir(parents=True, exist_ok=True)
        save_weights(self, path)
        config, dtype = self.config, next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        write_json(Path(path) / "config.json", {
            **config.layers.to_dict(), "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": dtype, "torch_dtype": dtype,
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


def drafter_loss(drafter, target, ids, features, trainable, anchors, valid, gamma, chunk=2**26):
    """Weighted cross-entropy of all blocks of all rows, in one forward pass under the sparse mask.

    ids, trainable: (B, S), the text and which of its tokens count as labels; features: (B, S, taps * C); anchors, valid: (B, N).
    gamma: slot k weighs exp(-(k - 1) / gamma), slot 0 (the anchor, which is given) nothing; inf: all alike.
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

    hidden = hidden.view(B, N, block_size, -1)[:, :, 1:].reshape(B * N * (block_size - 1), -1)
    inside = block_positions < S
    labels = ids.gather(1, block_positions.clamp(max=S - 1)).view(B, N, block_size)
    weight = (inside & trainable.gather(1, block_positions.clamp(max=S - 1))).view(B, N, block_size) & valid[:, :, None]
    weight = (weight * torch.exp(-(slot - 1) / gamma))[:, :, 1:].flatten()
    labels = labels[:, :, 1:].flatten()

    def losses(hidden, labels):
        return F.cross_entropy(target.logits(hidden).float(), labels, reduction="none")
    rows = max(1, chunk // target.config.vocab_size)
    if len(hidden) <= rows:
        loss = losses(hidden, labels)
    else:
        loss = torch.cat([torch.utils.checkpoint.checkpoint(losses, h, l, use_reentrant=False)
                          for h, l in zip(hidden.split(rows), labels.split(rows))])
    return (loss * weight).sum(), weight.sum()
