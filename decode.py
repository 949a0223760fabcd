"""Draft, verify, accept: generation with a target and a drafter, and the benchmark of both.

    python decode.py --prompt "def zeros("             what train.py left in out/, streamed
    python decode.py --prompt "def zeros(" --show      in colours: accepted drafts, bonus tokens, rejected drafts
    python decode.py --bench                           against plain decoding, on held-out prompts

One cycle (paper, section 3): the drafter fills a block behind the anchor, the target reads the block in one pass, and the longest prefix
that the target agrees with is kept, plus one token of the target's own, the bonus token, which is the next cycle's anchor.
Plain decoding is the same loop with a block of one: the anchor alone is read, and its successor is the bonus token.
"""
import argparse
import codecs
import json
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from drafter import DFlashDrafter
from model import DTYPES, KVCache, Tokenizer, Transformer, UserError, write_json

CHECK_EVERY = 8    # cycles between two looks at the results on CUDA: each look makes the host wait for the device


# ---- sampling ----------------------------------------------------------------------------------------------------------------

def distribution(logits, temperature, top_k=None, top_p=None):
    """logits (..., V) -> probabilities (..., V) in float32 after temperature (> 0), then top-k, then top-p (the smallest set of likeliest
    tokens that reaches top_p)."""
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(weights, u):
    """Inverse-CDF draw: weights (..., V) >= 0 with a positive sum, u (...) uniform in [0, 1) -> indices (...). float64, or the sum over a
    large vocabulary would be too coarse for its tail. Never an index of weight zero."""
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf, (u.double() * cdf[..., -1])[..., None], right=True)[..., 0]


def accept_greedy(drafts, logits):
    """Temperature 0. drafts (B, K), the target's logits (B, K + 1, V) -> how many drafts are kept (B,), and the bonus token (B,)."""
    best = logits.argmax(-1)                                                     # (B, K + 1)
    accepted = (drafts == best[:, :-1]).cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def accept_sampled(drafts, q, p, u_accept, u_bonus):
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): kept tokens and bonus together are distributed exactly as p.

    drafts (B, K) drawn from q (B, K, V); the target's p (B, K + 1, V); u_accept (B, K) and u_bonus (B, K + 1) uniform.
    Draft x is kept with probability min(1, p(x) / q(x)). At the first one that is not, the bonus token comes from
    norm(max(p - q, 0)); where all are kept, from p itself.
    """
    at_draft = drafts[..., None]
    keep = u_accept * q.gather(2, at_draft)[..., 0] < p[:, :-1].gather(2, at_draft)[..., 0]
    accepted = keep.cumprod(1).sum(1)                                            # (B,)
    row = torch.arange(len(drafts), device=drafts.device)
    p_next = p[row, accepted]                                                    # (B, V)
    q_next = torch.nn.functional.pad(q, (0, 0, 0, 1))[row, accepted]             # 0 behind the last draft: nothing to subtract
    residual = (p_next - q_next).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)  # p == q to the last bit: only rounding led here
    return accepted, draw(residual, u_bonus.gather(1, accepted[:, None])[:, 0])


def uniforms(seed, rows, length):
    """(rows, length, 3) uniform numbers: for each row, and each new token's index, one for the target's draw, one for the drafter's, one
    for the acceptance test. Each row has its own stream, so what it gives does not depend on the batch.

    The numbers belong to the token's index, not to the cycle, and an index is drafted again after a rejection before it. That is
    exact: a cycle's outcome at one index decides the text only if all indices before it were decided, and those used other numbers.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().entropy % 2**63)
    if isinstance(seed, int):
        seeds = [(seed, row) for row in range(rows)]
    elif len(seeds := list(seed)) != rows:
        raise UserError(f"{len(seeds)} seeds for {rows} prompts; give one seed, or one a prompt")
    return torch.from_numpy(np.stack([np.random.default_rng(s).random((length, 3), dtype=np.float32) for s in seeds]))


# ---- the loop ------------------------------------------------------------------------------------------------------------------

class Stopwatch:
    """Milliseconds between marks; on CUDA from events on the stream, so that measuring makes nobody wait."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self):
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def spans(self):
        if self.cuda and self.marks:
            self.marks[-1].synchronize()
        pairs = zip(self.marks, self.marks[1:])
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in pairs]


@dataclass
class Generation:
    tokens: list                # rows of new token ids; a stop token is included and ends its row; at most max_new_tokens
    acceptance_lengths: list    # rows of draft tokens accepted + 1, one a cycle, as verified (the last one before the end is cut)
    draft_ms: list = field(default_factory=list)     # a cycle
    verify_ms: list = field(default_factory=list)    # a cycle, acceptance included

    @property
    def tau(self):
        lengths = [length for row in self.acceptance_lengths for length in row]
        return sum(lengths) / len(lengths) if lengths else float("nan")


class Cycle(NamedTuple):
    """What one cycle did, on the device."""
    drafts: torch.Tensor        # (B, K) the drafter's tokens
    accepted: torch.Tensor      # (B,) how many of them were kept
    bonus: torch.Tensor         # (B,) the target's token behind them
    done: torch.Tensor          # (B,) rows that had ended before: theirs does not count


@torch.inference_mode()
def cycles(target, drafter, prompts, max_new_tokens, *, block_size=None, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None, watch=None):
    """The decoding loop. Yields a Cycle for the prefill (no drafts, the first token as bonus), then one for each cycle.

    Each row advances at its own pace: row b has length[b] tokens in the cache, its anchor is the next. A rejection needs no clean-up: the
    caches are overwritten from length[b] on, and no mask lets anyone look past it.
    """
    check(target, prompts, max_new_tokens, temperature, top_k, top_p, block_size)
    device, B = target.device, len(prompts)
    block = 1 if drafter is None else block_size or drafter.config.block_size
    taps = drafter.config.target_layer_ids if block > 1 else ()
    count = torch.tensor([len(prompt) for prompt in prompts], device=device)     # (B,) tokens read by the last pass that are kept
    width = int(max(len(prompt) for prompt in prompts))
    capacity = width + max_new_tokens + 2 * block                                # a row that has ended may overhang by two blocks
    cache = KVCache(target.config, B, capacity, device, target.dtype)
    drafter_cache = KVCache(drafter.config.layers, B, capacity + 1, device, target.dtype) if block > 1 else None
    stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.int64)
    row, slot = torch.arange(B, device=device), torch.arange(block, device=device)
    u = uniforms(seed, B, max_new_tokens + 2 * block).to(device) if temperature > 0 else None

    # Prefill: rows of different lengths padded on the right; causality keeps the padding unseen, the first decoded tokens overwrite it.
    ids = torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    start = torch.zeros(B, dtype=torch.int64, device=device)                     # (B,) position of the last pass's first token
    hidden, features = target(ids, start, cache, taps, end=width)
    logits = target.logits(hidden[row, count - 1])                               # (B, V)
    anchor = logits.argmax(-1) if u is None else draw(distribution(logits, temperature, top_k, top_p), u[:, 0, 0])
    drafts = ids[:, :0]
    made = torch.ones(B, dtype=torch.int64, device=device)                       # (B,) new tokens so far
    done = torch.zeros(B, dtype=torch.bool, device=device)
    yield Cycle(drafts, made - 1, anchor, done)
    done = torch.isin(anchor, stops) | (made >= max_new_tokens)

    for cycle in range(max_new_tokens - 1):                                      # each cycle makes at least one token
        if (device.type != "cuda" or cycle % CHECK_EVERY == 0) and bool(done.all()):
            break
        length = start + count                                                   # (B,) the anchor's position
        # On the CPU the passes look at as much of the cache as is filled; on CUDA at all of it, so that shapes stay fixed.
        end = cache.length if device.type == "cuda" else int(length.max()) + block
        if watch:
            watch.mark()
        if block > 1:
            # Draft. Only accepted tokens' features enter the drafter's context.
            if device.type != "cuda" or cycle == 0:
                features = features[:, :int(count.max())]
            q = drafter.draft(target, anchor, features, start, count, drafter_cache, block, end)   # (B, block - 1, V)
            if u is not None:
                q = distribution(q, temperature, top_k, top_p)
                index = made[:, None] + slot                                     # (B, block) which new token each slot would be
                u_now = u.gather(1, index[..., None].expand(-1, -1, 3))          # (B, block, 3)
                drafts = draw(q, u_now[:, :-1, 1])
            else:
                drafts = q.argmax(-1)
        if watch:
            watch.mark()
        # Verify: the target reads anchor and drafts at once; its logits at slot k judge the draft in slot k + 1.
        hidden, features = target(torch.cat((anchor[:, None], drafts), 1), length, cache, taps, end)
        logits = target.logits(hidden)                                           # (B, block, V)
        # Accept.
        if u is None:
            accepted, anchor = accept_greedy(drafts, logits)
        elif block > 1:
            accepted, anchor = accept_sampled(drafts, q, distribution(logits, temperature, top_k, top_p), u_now[:, :-1, 2], u_now[..., 0])
        else:
            accepted, anchor = torch.zeros_like(made), draw(distribution(logits[:, 0], temperature, top_k, top_p), u[row, made, 0])
        yield Cycle(drafts, accepted, anchor, done)
        start, count = length, torch.where(done, 0, accepted + 1)
        made = made + count
        stopped = torch.isin(anchor, stops) | (torch.isin(drafts, stops) & (slot[:-1] < accepted[:, None])).any(1)
        done = done | stopped | (made >= max_new_tokens)
    if watch:
        watch.mark()


def check(target, prompts, max_new_tokens, temperature, top_k, top_p, block_size):
    """Refuses, before any work, what cannot be decoded."""
    limit, vocab = target.config.max_position_embeddings, target.config.vocab_size
    if not len(prompts):
        raise UserError("no prompts; give at least one")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty; give at least one token")
        if not all(0 <= token < vocab for token in prompt):
            raise UserError(f"prompt {i} holds a token id outside the target's vocabulary of {vocab}; was it encoded by another tokenizer?")
        if len(prompt) + max_new_tokens > limit:
            raise UserError(f"prompt {i} has {len(prompt)} tokens, with {max_new_tokens} new ones more than the target's "
                            f"max_position_embeddings of {limit}; shorten it or ask for fewer")
    for name, value, good in (("max_new_tokens", max_new_tokens, max_new_tokens >= 1), ("temperature", temperature, 0 <= temperature < math.inf),
                              ("top_k", top_k, top_k is None or top_k >= 1), ("top_p", top_p, top_p is None or 0 < top_p <= 1),
                              ("block_size", block_size, block_size is None or block_size >= 1)):
        if not good:
            raise UserError(f"{name} = {value} is out of range")


def speculative(target, drafter, prompts, max_new_tokens, *, block_size=None, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None):
    """Decodes prompts (one list of token ids a row, of any lengths) with drafter and target. The output is the target's own: token for
    token at temperature 0 (in float32; lower precision may break a tie otherwise), in distribution above. block_size None: the drafter's.

    seed: an int (row i draws from the stream of (seed, i)), one int a row, or None. Returns a Generation; UserError for bad input.
    """
    watch = Stopwatch(target.device)
    log = list(cycles(target, drafter, prompts, max_new_tokens, block_size=block_size, temperature=temperature, top_k=top_k, top_p=top_p,
                      stop_ids=stop_ids, seed=seed, watch=watch))
    rows = [[] for _ in prompts]
    lengths = [[] for _ in prompts]
    for i, (drafts, accepted, bonus, done) in enumerate(Cycle(*(x.tolist() for x in cycle)) for cycle in log):
        for b in range(len(prompts)):
            if not done[b]:
                rows[b] += drafts[b][:accepted[b]] + [bonus[b]]
                if i:
                    lengths[b].append(accepted[b] + 1)
    stop_ids = set(stop_ids)
    rows = [cut(row[:max_new_tokens], stop_ids) for row in rows]
    spans = watch.spans()
    return Generation(rows, lengths, spans[0::2] if drafter is not None else [], spans[1::2])


def autoregressive(target, prompts, max_new_tokens, *, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None):
    """Plain decoding of the same prompts, a token a cycle; arguments and result as for `speculative`."""
    return speculative(target, None, prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=stop_ids, seed=seed)


def cut(row, stop_ids):
    """The row up to and including its first stop token."""
    return row[:next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))]
