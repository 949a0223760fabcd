"""Draft, verify, accept: generation with a target and a drafter, and the benchmark of both.

    python decode.py --prompt "def zeros("             what train.py left in out/, streamed
    python decode.py --prompt "def zeros(" --show      in colours: accepted drafts, bonus tokens, rejected drafts
    python decode.py --bench                           against plain decoding, on held-out prompts

One cycle (paper, section 3): the drafter fills a block behind the anchor, the target reads the drafts in one pass and draws its own token
behind each, and drafts are kept while they equal the target's draws. The first draw that no draft guessed is the bonus token, the next
cycle's anchor. Plain decoding is the same cycle without drafts: the anchor alone is read, and its successor is the bonus token.

Target and drafter draw with the same noise (see `Sampling` in model.py), a function of seed, row and token index. So the text is the
target's, token for token, at every temperature and with every way of drafting (Daliri, Musco, Suresh, arXiv:2408.07978).
"""
import argparse
import codecs
import functools
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from drafter import DRAFTERS, last_positions, load_drafter, rows_at
from kernels import allow_recompiling, has_compiler
from model import (DTYPES, KVCache, Sampling, Tokenizer, Transformer, UserError, exponential_noise, stream_keys,
                   write_json)

PREFILL = 512         # tokens of a prompt that are read at once: the mask, PREFILL x context, should not outgrow a CPU's cache
LOOK_EVERY = 3        # cycles between two looks at the results on CUDA, where each look makes the host wait for the device
TREE_BUDGET = 32      # the command line's default
KEPT_BYTES = 2**31    # of the caches of idle Decoders, which later calls of the same shapes reuse


# ---- what the target reads: a chain of drafts, or a tree ---------------------------------------------------------------------------

class Drafts(NamedTuple):
    """The anchor and the drafts behind it: a chain, in which each has the one before it as parent, or a tree, parents before children."""
    tokens: torch.Tensor                     # (B, N) int64, the anchor first
    probability: torch.Tensor                # (B, N) float32, the drafter's, of all drafts from the anchor to this one
    parent: torch.Tensor | None = None       # trees: (B, N) int64, the node before; the anchor's is itself
    depth: torch.Tensor | None = None        # trees: (B, N) int64, how far behind the anchor
    ancestors: torch.Tensor | None = None    # trees: (B, N, N) bool, [b, i, j]: is node j an ancestor of node i, or i itself?

    def first(self, n):
        """Of a tree, the best n nodes."""
        return Drafts(*(x if x is None else x[:, :n, :n] if x.dim() == 3 else x[:, :n] for x in self))


def draft_chain(anchor, guesses):
    """The likeliest token of each slot. anchor (B, 1); guesses (B, S, V), `Sampling.guesses` of the drafter's slots. N = S + 1."""
    probability, tokens = guesses.max(-1)                                        # (B, S)
    return Drafts(torch.cat((anchor, tokens), 1), F.pad(probability.cumprod(1), (1, 0), value=1.0))


def draft_tree(anchor, guesses, budget):
    """The `budget` likeliest prefixes of the block (the anchor's, which is certain, among them), best first: N = budget.

    One pass of the drafter gives a distribution for each slot, so a prefix's probability is a product over its slots. Level after level
    the likeliest prefixes grow by one token each; of a level no more than the budget can be among the best (liranringel/ddtree,
    arXiv:2604.12989). Arguments as in `draft_chain`.
    """
    B, S, V = guesses.shape
    K = min(budget - 1, V)                                                       # tokens to choose from in a slot
    W = min(budget - 1, K * K)                                                   # prefixes kept of a level; of the first one K
    top, tokens = guesses.topk(K)                                                # (B, S, K)
    log_p = top.log()
    level, scores, choices = log_p.new_zeros(B, 1), [], []
    for slot in range(S):
        longer = (level[:, :, None] + log_p[:, slot, None]).flatten(1)           # (B, prefixes * K)
        level, choice = longer.topk(W if slot else K)
        scores.append(level)
        choices.append(choice if slot < 2 else choice + (K + (slot - 2) * W) * K)    # so that choice // K is the parent's place in scores
    score, choice = torch.cat(scores, 1), torch.cat(choices, 1)                  # (B, candidates), shorter prefixes first
    # A child is no likelier than its parent, and a stable sort leaves equal ones in order: parents come first, and none is missing.
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


# The rule of acceptance, at every temperature: a draft is kept if it equals the token that the target itself draws at its place, and all
# drafts before it were kept.

def accept_chain(drafts, draws):
    """draws (B, N): the target's token behind each of drafts.tokens -> how many of these are kept, the anchor included (B,)"""
    return 1 + (drafts.tokens[:, 1:] == draws[:, :-1]).cumprod(1).sum(1)


def accept_tree(drafts, draws):
    """-> how many are kept (B,); path (B, N): the kept ones in their order, the anchor first, then the others."""
    right = (drafts.tokens == draws.gather(1, drafts.parent)) | (drafts.depth == 0)
    kept = (right[:, None] | ~drafts.ancestors).all(-1)                          # (B, N); siblings differ, so they are one path
    return kept.sum(1), kept.int().argsort(dim=1, descending=True, stable=True)


# ---- the loop ------------------------------------------------------------------------------------------------------------------

class Decoder:
    """Caches and state for a batch of B rows of up to `capacity` tokens, of fixed shapes and changed in place by `draft` and `verify`,
    which ask nothing of the host. On the CPU these are called, on CUDA captured as graphs at their second call and replayed from then on,
    also by later calls of the same shapes.

    Each row advances at its own pace: its text is text[b, :length[b] + 1], and the last token of that, at position length[b], is the
    anchor: drawn by the target, not yet read by it. A rollback is a length that grows by less than was read: what lies in the caches
    from there on is never seen, and the next cycle writes over it.
    """

    def __init__(self, target, drafter, batch, capacity, block_size, tree_budget, auto, sampling, stop_ids, compile):
        device = target.device
        self.target, self.drafter, self.block_size, self.tree_budget = target, drafter, block_size, tree_budget
        self.sampling, self.compile, self.device, self.capacity = sampling, compile, device, capacity
        self.taps = drafter.config.target_layer_ids if drafter else ()
        self.cache = KVCache(target.config, batch, capacity, device, target.dtype)
        self.drafter_cache = KVCache(drafter.config.layers, batch, capacity, device, target.dtype) if drafter else None
        self.features = torch.zeros(batch, capacity, len(self.taps) * target.config.hidden_size, device=device, dtype=target.dtype)
        self.text = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.keys = torch.zeros(batch, 2, dtype=torch.int32, device=device)      # of the rows' noise
        self.prompt_length, self.length, self.last = torch.zeros(3, batch, dtype=torch.int64, device=device)    # last: final anchor's position
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.num_kept = torch.zeros(capacity + LOOK_EVERY, batch, dtype=torch.int64, device=device)    # the log: a row a cycle
        self.cycle_number = torch.zeros(1, dtype=torch.int64, device=device)
        self.auto = Auto(min(tree_budget or block_size, 64)) if auto else None
        self.look_every = LOOK_EVERY if device.type == "cuda" else 1
        self.graphs, self.calls = {}, Counter()
        self.warm_up = 2 if device.type == "cuda" else 1                         # calls of a step that are slower than the others

    # -- one cycle, on the device

    def draft(self, window):
        """The drafter's block behind each row's anchor, as a chain or a tree. window: so many positions before the anchor may not have been
        read by the drafter yet."""
        logits = self.drafter.draft(self.target, self.text, self.features, self.length, window, self.block_size, self.drafter_cache, self.guess)
        guesses = self.sampling.guesses(logits, self.noise(0, self.block_size - 1))    # (B, S, V)
        if self.tree_budget:
            return draft_tree(self.anchor(), guesses, self.tree_budget)
        return draft_chain(self.anchor(), guesses)

    def verify(self, n):
        """The target reads the anchor and the first n - 1 drafts, and draws its own token behind each."""
        drafts = self.drafts.first(n) if n > 1 else Drafts(self.anchor(), None)
        branching = drafts.depth is not None
        depth = drafts.depth if branching else torch.arange(n, device=self.device)
        tree = (self.length, drafts.ancestors) if branching else None
        hidden, features = self.target(drafts.tokens, self.length[:, None] + depth, self.cache, self.taps, tree)
        noise = self.noise(0, min(n, self.block_size))                           # (B, depths, V)
        if branching and noise is not None:
            noise = rows_at(noise, depth)
        draws = self.sampling.draw(self.target.logits(hidden), noise)            # (B, n)
        if branching:
            num_kept, path = accept_tree(drafts, draws)
            self.cache.move(self.length[:, None] + path, self.length[:, None] + torch.arange(n, device=self.device))
            draws, features = draws.gather(1, path), rows_at(features, path)
        else:
            num_kept = accept_chain(drafts, draws)
        self.commit(draws, num_kept, features)

    def commit(self, tokens, num_kept, features):
        """Appends each row's first num_kept (B,) of tokens (B, n): the kept drafts, and behind them the bonus token. length moves past what
        the target has read of them, and that is the rollback: the rest is never seen again."""
        n = tokens.shape[1]
        order = torch.arange(n, device=self.device)
        slots = self.length[:, None] + order                                     # (B, n)
        if features is not None:
            self.features.scatter_(1, slots[..., None].expand_as(features), features)
        self.text.scatter_(1, slots + 1, tokens)
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (order < num_kept[:, None])
        first_stop = order.where(stops, n).amin(1)                               # (B,), n: none
        num_kept = torch.minimum(num_kept, first_stop + 1).masked_fill(self.finished, 0)    # nothing behind a stop token counts
        self.num_kept.index_copy_(0, self.cycle_number, num_kept[None])
        self.cycle_number += 1
        self.length.copy_(torch.minimum(self.length + num_kept, self.last))
        self.finished |= (first_stop < n) | (self.length == self.last)

    def anchor(self):
        return self.text.gather(1, self.length[:, None])                         # (B, 1)

    def noise(self, first, n):
        """(B, n, V), of the n tokens from the first one behind the anchor on; None at temperature 0."""
        if self.sampling.temperature > 0:
            index = (self.length - self.prompt_length + 1 + first)[:, None] + torch.arange(n, device=self.device)
            return exponential_noise(self.keys, index, self.target.config.vocab_size)

    def guess(self, logits, slot):
        """For drafters that draft one token after the other: the token of a slot (counted from 0), with the noise that the target will use."""
        return self.sampling.draw(logits, self.noise(slot, 1))

    def read(self):
        """Where plain cycles follow each other and shapes are fixed, the drafter's context is brought up to date a block at a time."""
        self.drafter.read(self.target, self.text, self.features, last_positions(self.length, self.block_size), self.drafter_cache)

    # -- the host's part

    def prefill(self, prompts, max_new_tokens, keys):
        """Starts anew: the target and the drafter read the prompts, the target draws each row's first token. Rows of different lengths are
        padded on the right; causality keeps the padding unseen, and the first cycles write over it."""
        width = max(map(len, prompts))
        ids = torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        self.text[:, :width] = ids
        self.prompt_length.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        self.length.copy_(self.prompt_length - 1)
        self.last.copy_(self.prompt_length + max_new_tokens - 1)
        self.keys.copy_(keys)
        self.finished.zero_(), self.cycle_number.zero_()
        hidden_at_last = 0
        for begin in range(0, width, PREFILL):
            positions = torch.arange(begin, min(begin + PREFILL, width), device=self.device).expand(len(prompts), -1)
            self.look_as_far_as(min(begin + PREFILL, width))
            hidden, features = self.target(ids[:, begin:begin + PREFILL], positions, self.cache, self.taps)
            if features is not None:
                self.features[:, begin:begin + len(positions[0])] = features
            if self.drafter:
                self.drafter.read(self.target, self.text, self.features, positions, self.drafter_cache)
            here = (positions == self.length[:, None])[..., None]                # (B, n, 1): the prompt's last token
            hidden_at_last = hidden_at_last + torch.where(here, hidden, 0).sum(1, keepdim=True)
        first = self.sampling.draw(self.target.logits(hidden_at_last), self.noise(0, 1))    # (B, 1)
        self.length += 1
        self.text.scatter_(1, self.length[:, None], first)
        self.finished |= (first == self.stop_ids).any(1) | (self.length == self.last)
        self.watch, self.history, self.sizes = Stopwatch(self.device), [], []
        self.longest, self.unread = width, 1                                     # a drafter that reads tokens ahead has not seen the anchor

    def cycle(self):
        """Draft, verify, accept, commit."""
        auto, looking = self.auto, len(self.sizes) % self.look_every == 0
        drafting = self.drafter is not None and not (auto and auto.plain_cycles > 0)
        self.look_as_far_as(self.longest + max(self.block_size, self.tree_budget or 0))
        self.watch.mark()
        self.warm = True
        if drafting:
            self.drafts, self.unread = self.step(self.draft, self.block_size if self.compile else max(1, self.unread)), 0
            if auto and looking:
                auto.choose(self.drafts.probability[~self.finished].mean(0).tolist())
        elif self.drafter and self.compile and self.unread >= self.block_size:
            self.step(self.read)
            self.unread = 0
        n = 1 if not drafting else auto.size if auto else self.drafts.tokens.shape[1]
        self.watch.mark()
        self.step(self.verify, n)
        self.watch.mark()
        self.sizes.append((n, self.warm))
        self.unread += min(n, self.block_size)
        self.longest += min(n, self.block_size)

    def step(self, function, *args):
        """Calls a step of the cycle: as it is, compiled (the CPU), or as a graph (CUDA, where the first call compiles and reserves)."""
        key = function.__name__, *args
        self.calls[key] += 1
        self.warm &= self.calls[key] > self.warm_up
        if not self.compile:
            return function(*args)
        if self.device.type == "cpu":
            return compiled_step(function.__func__)(self, *args)
        if self.calls[key] == 1:
            return function(*args)
        if key not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = function(*args)
            self.graphs[key] = graph, result
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def look_as_far_as(self, n):
        """How many slots of the caches the next passes look at: n, or all of them where shapes must not change."""
        for cache in filter(None, (self.cache, self.drafter_cache)):
            cache.kv_len = self.capacity if self.compile else n

    def look(self):
        """The host waits for the device, and learns what the cycles since the last look have kept. Returns whether all rows have ended."""
        for i, kept in enumerate(self.num_kept[len(self.history):len(self.sizes)].tolist(), len(self.history)):
            n, warm = self.sizes[i]
            if self.auto:
                self.auto.update(n, sum(self.watch.cycle(i)) if warm else None, sum(kept) / max(1, sum(k > 0 for k in kept)))
            self.history.append(kept)
        if self.sizes:
            self.unread -= min(self.sizes[-1][0], self.block_size) - max(self.history[-1])    # of the last cycle: what it could, what it did
        self.longest = int(self.length.max())
        return bool(self.finished.all())

    @property
    def nbytes(self):
        return sum(x.nbytes for x in (self.cache.data, self.features, *([self.drafter_cache.data] if self.drafter else [])))


@functools.cache
def compiled_step(function):
    allow_recompiling()
    return torch.compile(function, dynamic=False, options={"cpp_wrapper": True})


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

    def cycle(self, i):
        """Cycle i's milliseconds for drafting and for verifying: it has marked its beginning, the end of the draft, and its end."""
        began, drafted, ended = self.marks[3 * i:3 * i + 3]
        if self.cuda:
            ended.synchronize()
            return began.elapsed_time(drafted), drafted.elapsed_time(ended)
        return 1e3 * (drafted - began), 1e3 * (ended - drafted)


class Auto:
    """block_size="auto": how many tokens the target reads next, of which one, without a draft, is plain decoding.

    A size is worth the tokens expected of it, by the drafter's own probabilities raised to a power that makes them right on average, over
    its cost in plain cycles. Costs are ratios of the times of neighbouring cycles: a machine's speed changes, but seldom between these.
    Where drafts lose, plain cycles follow, the more the more was lost and the more looks in a row have lost.
    """

    def __init__(self, most):
        self.sizes = [n for n in (2, 4, 8, 16, 32) if n < most] + [most]
        self.ratios = {n: deque(maxlen=9) for n in self.sizes}                   # measured costs, draft included
        self.power = 1.0                                                         # of a probability, to be right on average
        self.lost, self.looks = 0.0, 0                                           # plain cycles that a cycle with drafts loses: moving average
        self.plain_cycles, self.patience = 2, 8                                  # before the next draft; after it, for each one lost
        self.drafts, self.run = 4, 4                                             # before the next plain cycle, to measure costs by
        self.size = self.before = None                                           # chosen; the cycle before (tokens read, milliseconds)

    def cost(self, n):
        """In plain cycles: the measured one, but no more than a larger size's; unmeasured, between those beside it; at first two."""
        known = {m: statistics.median(ratios) for m, ratios in self.ratios.items() if ratios}
        if n in known:
            return min(cost for m, cost in known.items() if m >= n)
        below, above = [known[m] for m in self.sizes if m < n and m in known], [known[m] for m in self.sizes if m > n and m in known]
        return statistics.mean([*below[-1:], *above[:1]] or [2.0])

    def choose(self, probability):
        """probability: of each draft, that it and all before it are right, by the drafter. Sizes are tried from the smallest up."""
        expected = list(itertools.accumulate(p ** self.power for p in probability))    # [n - 1]: tokens kept of n
        largest = max((n for n in self.sizes if self.ratios[n]), default=1)
        worth = {n: expected[n - 1] / self.cost(n) for n in self.sizes if n <= min(4 * largest, len(expected))}
        self.size = max(worth, key=worth.get)
        self.expected = expected[self.size - 1]

    def update(self, n, ms, kept):
        """What a cycle took (None: it was a first call, or compiled) and how many tokens it kept."""
        if ms:
            if self.before and self.before[0] != n:
                m, ms_before = self.before
                if n == 1:
                    self.ratios[m].append(ms_before / ms)
                else:
                    self.ratios[n].append(ms / ms_before * (1.0 if m == 1 else self.cost(m)))
            self.before = n, ms
        if n == 1:
            self.plain_cycles -= 1
            return
        self.looks += 1
        self.power = min(max(self.power * math.exp((self.expected - kept) / min(self.looks, 20)), 0.1), 100.0)
        lost = self.cost(n) - (self.expected + kept) / 2                         # what it gave tells as much as what was expected
        self.lost += max(0.2, 1 / self.looks) * (lost - self.lost)
        if self.lost > 0:
            self.plain_cycles, self.patience = max(1, round(self.patience * self.lost)), min(2 * self.patience, 64)
            return
        self.drafts, self.patience = self.drafts - 1, 8
        if self.drafts == 0:
            self.plain_cycles, self.run = 1, min(2 * self.run, 64)
            self.drafts = self.run


# ---- generation ----------------------------------------------------------------------------------------------------------------

@dataclass
class Generation:
    tokens: list                # rows of new token ids; a stop token is included and ends its row; at most max_new_tokens
    acceptance_lengths: list    # rows of draft tokens accepted + 1, one a cycle, up to a stop token (not cut at max_new_tokens)
    draft_ms: list = field(default_factory=list)     # a cycle with drafts
    verify_ms: list = field(default_factory=list)    # a cycle, acceptance included

    @property
    def tau(self):
        lengths = [length for row in self.acceptance_lengths for length in row]
        return sum(lengths) / len(lengths) if lengths else float("nan")


def speculative(target, drafter, prompts, max_new_tokens, *, block_size=None, tree_budget=None, temperature=0.0, top_k=None, top_p=None,
                stop_ids=(), seed=None, compile=None):
    """Decodes prompts (one list of token ids a row, of any lengths) with drafter and target. The output is that of `autoregressive` with
    the same seed, token for token (in float32; in lower precision a tie may break either way).

    block_size: tokens of a block, anchor included; None: the drafter's; "auto": how many of the drafts are read is chosen anew each cycle.
    tree_budget: None: the target reads the block's likeliest tokens as a chain; N: the N likeliest prefixes, anchor included, as a tree.
    seed: an int (row i draws from the stream of (seed, i)), one int a row, or None.
    compile: None: on CUDA only. There steps are graphs, which later calls of the same shapes reuse; on the CPU compiled code.
    Returns a Generation; UserError for bad input.
    """
    for decoder in generate(target, drafter, prompts, max_new_tokens, Sampling(temperature, top_k, top_p), block_size=block_size,
                          tree_budget=tree_budget, stop_ids=stop_ids, seed=seed, compile=compile):
        pass
    ends = zip(decoder.text.tolist(), decoder.prompt_length.tolist(), decoder.length.tolist())
    times = [decoder.watch.cycle(i) for i in range(len(decoder.sizes))]
    return Generation(tokens=[text[begin:anchor + 1] for text, begin, anchor in ends],
                      acceptance_lengths=[[kept[b] for kept in decoder.history if kept[b]] for b in range(len(prompts))],
                      draft_ms=[draft for (draft, _), (n, _) in zip(times, decoder.sizes) if n > 1],
                      verify_ms=[verify for _, verify in times])


def autoregressive(target, prompts, max_new_tokens, **how):
    """Plain decoding of the same prompts, a token a cycle; keywords (temperature, top_k, top_p, stop_ids, seed, compile) and result as for
    `speculative`."""
    return speculative(target, None, prompts, max_new_tokens, **how)


idle = {}    # Decoders of earlier calls, by what they are for; the latest last


@torch.inference_mode()
def generate(target, drafter, prompts, max_new_tokens, sampling, *, block_size=None, tree_budget=None, stop_ids=(), seed=None, compile=None,
           look_every=None):
    """The loop: yields the Decoder after the prefill, then whenever the host has looked, until all rows have ended. Arguments as in
    `speculative`; look_every: cycles between two looks (None: as is fast)."""
    check(target, drafter, prompts, max_new_tokens, sampling, block_size, tree_budget)
    block = 1 if drafter is None else drafter.config.block_size if block_size in (None, "auto") else block_size
    drafter, tree_budget, auto = (None, None, False) if block == 1 else (drafter, tree_budget, block_size == "auto")
    compile = target.device.type == "cuda" if compile is None else compile
    if compile and target.device.type == "cpu" and not has_compiler():
        raise UserError("no C++ compiler found, which compile needs on the CPU: install one, or leave it out")
    capacity = max(map(len, prompts)) + max_new_tokens + max(block, tree_budget or 0)
    capacity += -capacity % 256                                                  # few different shapes
    what = target, drafter, len(prompts), capacity, block, tree_budget, auto, sampling, tuple(sorted(stop_ids)), compile
    key = *what, target.device, target.dtype
    decoder = idle.pop(key, None) or Decoder(*what)
    try:
        decoder.prefill(prompts, max_new_tokens, stream_keys(seed, len(prompts)))
        while True:
            done = decoder.look()
            yield decoder
            if done:
                break
            for _ in range(look_every or decoder.look_every):
                decoder.cycle()
    finally:
        idle[key] = decoder
        while sum(each.nbytes for each in idle.values()) > KEPT_BYTES:
            del idle[next(iter(idle))]


def check(target, drafter, prompts, max_new_tokens, sampling, block_size, tree_budget):
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
    for name, value, good in (
            ("max_new_tokens", max_new_tokens, max_new_tokens >= 1),
            ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf),
            ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 1),
            ("top_p", sampling.top_p, sampling.top_p is None or 0 < sampling.top_p <= 1),
            ("block_size", block_size, block_size in (None, "auto") or type(block_size) is int and 1 <= block_size <= limit),
            ("tree_budget", tree_budget, tree_budget is None or type(tree_budget) is int and 2 <= tree_budget <= limit)):
        if not good:
            raise UserError(f"{name} = {value} is out of range")
    if tree_budget is not None and drafter is not None and drafter.in_turn:
        raise UserError(f"{drafter.title} drafts one token after the other and has no tree: leave tree_budget out")


# ---- benchmark -----------------------------------------------------------------------------------------------------------------

def benchmark(target, methods, prompts, max_new_tokens, temperatures=(0.0, 1.0), stop_ids=(), seed=0, progress=None, **how):
    """Plain decoding and every other method on the same prompts, one at a time, in turn, in one run.

    methods: {name: keywords of `speculative`, drafter among them}; prompts: {domain: rows of ids}; how: top_k, top_p, compile. Times are
    whole calls, prefill included: ms_per_token is the median over calls, speedup the median over calls of (plain ms a token / this ms a
    token). Returns report rows and the histograms of acceptance lengths {(method, temperature): Counter}.
    """
    results, histograms = [], {}
    methods = {"autoregressive": {"drafter": None}, **methods}
    for temperature in temperatures:
        runs = {(domain, method): [] for domain in prompts for method in methods}    # (ms a token, Generation) for each call

        def call(method, prompt, seed):
            began = time.perf_counter()
            out = speculative(target, prompts=[prompt], max_new_tokens=max_new_tokens, temperature=temperature, stop_ids=stop_ids, seed=[seed],
                              **methods[method], **how)
            return 1e3 * (time.perf_counter() - began) / len(out.tokens[0]), out
        for method in methods:                                                   # warm-up: compilation, allocation, what auto learns of costs
            call(method, next(iter(prompts.values()))[0], seed)
            call(method, next(iter(prompts.values()))[0], seed)
        for domain, rows in prompts.items():
            for i, prompt in enumerate(rows):
                for method in methods:
                    runs[domain, method].append(call(method, prompt, seed + i))
                if progress:
                    progress(f"{domain}, temperature {temperature:g}")
        for domain in [*prompts, "all"] if len(prompts) > 1 else prompts:
            pooled = {method: [run for d in prompts if domain in (d, "all") for run in runs[d, method]] for method in methods}
            for method, run in pooled.items():
                results.append({"domain": domain, "method": method, "temperature": temperature, **summary(run, pooled["autoregressive"])})
                histograms[method, temperature] = Counter(n for _, out in run for n in out.acceptance_lengths[0])    # the last domain is all
    return results, histograms


def summary(run, plain):
    """What a report row says of calls (ms a token, Generation), beside plain decoding's of the same prompts."""
    tokens, lengths = [out.tokens[0] for _, out in run], [n for _, out in run for n in out.acceptance_lengths[0]]
    return {"prompts": len(run), "tokens": sum(map(len, tokens)), "tau": sum(lengths) / max(1, len(lengths)),
            "ms_per_token": median([ms for ms, _ in run]), "speedup": median([before / ms for (before, _), (ms, _) in zip(plain, run)]),
            "draft_ms": median([ms for _, out in run for ms in out.draft_ms]), "verify_ms": median([ms for _, out in run for ms in out.verify_ms]),
            "distinct4": distinct4(tokens), "identical": statistics.mean(row == out.tokens[0] for row, (_, out) in zip(tokens, plain))}


def distinct4(rows):
    """Share of distinct 4-grams within each row, over all rows: 1 where nothing repeats, near 0 where text runs in a loop."""
    grams = [[tuple(row[i:i + 4]) for i in range(len(row) - 3)] for row in rows]
    total = sum(map(len, grams))
    return sum(len(set(row)) for row in grams) / total if total else 1.0


def median(values):
    return statistics.median(values) if values else None


def cycle_ms(target, drafter, prompt, block_size=None, tree_budget=None, **how):
    """Milliseconds of a cycle's draft and of its verification behind this prompt: medians of up to 8 cycles."""
    room = min(9 * (block_size or drafter.config.block_size), target.config.max_position_embeddings - len(prompt))
    steps = generate(target, drafter, [prompt], room, Sampling(), block_size=block_size, tree_budget=tree_budget, look_every=1, **how)
    decoder = list(itertools.islice(steps, 10))[0]                               # it yields the same one again and again
    steps.close()
    draft, verify = zip(*(decoder.watch.cycle(i) for i in range(len(decoder.sizes))))
    return {"draft_ms": median(draft[1:] or draft) if decoder.drafter else None, "verify_ms": median(verify[1:] or verify)}


def sweep(target, drafter, prompts, progress, **how):
    """What decoding costs as it grows, in milliseconds of one cycle (medians): over the block size, over the tree's, over the context, and
    tokens a second over the batch. prompts: rows of ids; their text, repeated, makes the longer contexts. Returns {name: rows}."""
    text = [token for row in prompts for token in row]
    block, limit = drafter.config.block_size, target.config.max_position_embeddings
    found = {"block_size": [], "tree_budget": [], "context": [], "batch": []}

    def behind(context, **sizes):
        progress(", ".join(f"{name} {n}" for name, n in {"context": context, **sizes}.items()))
        return {**sizes, "context": context, **cycle_ms(target, drafter, (text * (context // len(text) + 1))[:context], **sizes, **how)}

    found["block_size"] = [behind(64, block_size=n) for n in (1, 2, 4, 8, 16, 32)]
    if not drafter.in_turn:
        found["tree_budget"] = [behind(64, tree_budget=n) for n in (2, 4, 8, 16, 32, 64)]
    for context in (64, 128, 256, 512, 1024, 2048, 4096):
        row = behind(min(context, limit - 9 * block), block_size=block)          # the longest leaves room for its new tokens
        caches = [KVCache(config, 1, row["context"], "meta", target.dtype) for config in (target.config, drafter.config.layers)]
        found["context"].append({**row, "target_cache_bytes": caches[0].data.nbytes, "drafter_cache_bytes": caches[1].data.nbytes})
    methods = {"autoregressive": {"drafter": None}, "speculative": {"drafter": drafter}, "auto": {"drafter": drafter, "block_size": "auto"}}
    for batch in (1, 4, 16, 64):
        rows, seconds = [prompts[i % len(prompts)] for i in range(batch)], {method: [] for method in methods}
        for _, (method, keywords) in itertools.product(range(4), methods.items()):
            progress(f"batch of {batch}")
            began = time.perf_counter()
            speculative(target, prompts=rows, max_new_tokens=64, **keywords, **how)
            seconds[method].append(time.perf_counter() - began)
        found["batch"].append({"batch": batch, **{method: 64 * batch / median(times[1:]) for method, times in seconds.items()}})
    return found


def show_sweep(found):
    """The sweep as tables with bars."""
    lines, passes = [], ("draft_ms", "verify_ms")
    for key, title, columns in (("block_size", "block size: milliseconds of one pass (context 64)", passes),
                                ("tree_budget", "tree: milliseconds of one pass (context 64)", passes),
                                ("context", "context: milliseconds of one pass, and the KV caches", passes),
                                ("batch", "batch: tokens a second, all rows together", ("autoregressive", "speculative", "auto"))):
        most = max((row[c] or 0 for row in found[key] for c in columns), default=0)
        lines += ["", title] if found[key] else []
        for row, (i, c) in itertools.product(found[key], enumerate(columns)):
            value, name = row[c] or 0.0, "" if i else row[key]                   # a block of one is not drafted
            bytes_ = [row.get(f"{whose}_cache_bytes") for whose in ("target", "drafter")]
            memory = "" if i or key != "context" else "   target {:.2f} MiB, drafter {:.2f} MiB".format(*(n / 2**20 for n in bytes_))
            lines.append(f"  {name:>5}  {c.removesuffix('_ms'):14} {value:9.2f} {'█▒░'[i] * round(40 * value / most)}{memory}")
    return "\n".join(lines)


def show_report(results, histograms):
    """The benchmark as text: the table, and how long the accepted runs were."""
    head = ("domain", "method", "T", "tau", "ms/token", "speedup", "draft ms", "verify ms", "distinct4", "identical")
    number = lambda value, form: "-" if value is None else format(value, form)
    table = [head] + [(r["domain"], r["method"], f"{r['temperature']:g}", f"{r['tau']:.2f}", f"{r['ms_per_token']:.2f}", f"{r['speedup']:.2f}x",
                       number(r["draft_ms"], ".2f"), number(r["verify_ms"], ".2f"), f"{r['distinct4']:.2f}", number(r["identical"], ".0%")) for r in results]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in table]
    for (method, temperature), counts in histograms.items():
        if method != "autoregressive":
            lines += ["", f"{method}, temperature {temperature:g}: tokens kept a cycle (accepted drafts + bonus token)"]
            for n in range(1, max(counts, default=0) + 1):
                share = counts[n] / max(1, counts.total())
                lines.append(f"  {n:3d} {'█' * round(60 * share)} {share:.1%}")
    return "\n".join(lines)


def read_lines(file):
    """The objects of a .jsonl file: each with "messages" (a chat), "prompt" (a whole prompt) or "text" (whose beginning is a prompt)."""
    entries, number = [], 1
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    entry = json.loads(line)
                    fields = {key: entry[key] for key in ("messages", "prompt", "text", "domain") if key in entry}
                    if not fields.keys() - {"domain"} or not all(isinstance(value, list if key == "messages" else str) for key, value in fields.items()):
                        raise ValueError
                    entries.append(entry)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{file}: line {number} is no JSON object with messages, prompt or text") from None
    return entries


def encode_prompt(entry, tokenizer, prompt_tokens):
    """An entry of `read_lines` -> token ids; of a text the first prompt_tokens. Where the model wants a token before all text (Llama 3),
    it gets it; a chat template writes it itself."""
    if "messages" in entry:
        return tokenizer.encode(tokenizer.render_chat(entry["messages"]), special=True)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return bos + (tokenizer.encode(entry["prompt"]) if "prompt" in entry else tokenizer.encode(entry["text"])[:prompt_tokens])


def read_prompts(file, tokenizer, prompt_tokens, per_domain):
    """{domain: rows of ids}: from a .jsonl file, or from a text, cut into prompts of prompt_tokens."""
    prompts = {}
    if str(file).endswith(".jsonl"):
        for entry in read_lines(file):
            ids = encode_prompt(entry, tokenizer, prompt_tokens)
            rows = prompts.setdefault(entry.get("domain", Path(file).stem), [])
            if ids and len(rows) < per_domain and ("text" not in entry or len(ids) >= prompt_tokens):
                rows.append(ids)
    else:
        try:
            ids = tokenizer.encode(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"{file}: not UTF-8 text") from None
        step = max(prompt_tokens, len(ids) // per_domain)
        prompts[Path(file).stem] = [ids[i:i + prompt_tokens] for i in range(0, len(ids) - prompt_tokens + 1, step)][:per_domain]
    prompts = {domain: rows for domain, rows in prompts.items() if rows}
    if not prompts:
        raise UserError(f"{file}: no text of at least {prompt_tokens} tokens; ask for a shorter --prompt-tokens")
    return prompts


# ---- command line ----------------------------------------------------------------------------------------------------------------

GREEN, BLUE, GREY, PLAIN = "\033[32m", "\033[1;34m", "\033[9;90m", "\033[0m"


def stream(steps, tokenizer, text, stop_ids, show):
    """Prints text, and what `generate` yields of one row. show: accepted drafts in green, the bonus token in blue, the likeliest of the
    rejected drafts struck out in grey."""
    began, printed = time.perf_counter(), None
    to_text = codecs.getincrementaldecoder("utf-8")("replace")                   # a character may be spread over two tokens
    for decoder in steps:
        if printed is None:
            print(text, end="")
            printed = int(decoder.prompt_length)
        new = decoder.text[0, printed:int(decoder.length) + 1].tolist()
        printed += len(new)
        accepted = decoder.history[-1][0] - 1 if decoder.history else 0
        for colour, tokens in ((GREEN, new[:accepted]), (BLUE, new[accepted:])):
            piece = to_text.decode(tokenizer.decode_bytes([t for t in tokens if t not in stop_ids]))
            print(f"{colour}{piece}{PLAIN}" if show and piece else piece, end="", flush=True)
        if show and decoder.history and decoder.sizes[-1][0] > 1:
            rest = rejected(decoder.drafts.first(decoder.sizes[-1][0]), new[:accepted])
            print(f"{GREY}{tokenizer.decode(rest).encode('unicode_escape').decode()}{PLAIN}" if rest else "", end="", flush=True)
    print(to_text.decode(b"", final=True))
    seconds, made = time.perf_counter() - began, printed - int(decoder.prompt_length)
    lengths = [kept for (kept,) in decoder.history if kept]
    tau = f", tau {statistics.mean(lengths):.2f}]" if decoder.drafter and lengths else "]"
    print(f"[{made} tokens in {seconds:.2f} s, {made / seconds:.0f} tokens a second{tau}", file=sys.stderr)


def rejected(drafts, accepted):
    """The likeliest drafts behind the accepted ones: each time the first child."""
    tokens = drafts.tokens[0].tolist()
    parents = range(-1, len(tokens) - 1) if drafts.parent is None else [-1, *drafts.parent[0, 1:].tolist()]
    at, rest = 0, []
    for token in accepted:
        at = next(i for i, node in enumerate(zip(tokens, parents)) if node == (token, at))
    while at in parents:
        at = parents.index(at)
        rest.append(tokens[at])
    return rest


def parser():
    p = argparse.ArgumentParser(description="Decode with a target and its DFlash drafter, or benchmark them against plain decoding.")
    p.add_argument("--out", default="out", help="what train.py left: target/, drafter/, heldout.jsonl (default: out)")
    p.add_argument("--target", help="folder of the target, instead of OUT/target")
    p.add_argument("--drafter", nargs="+", metavar="DIR", help="folders of drafters, instead of OUT/drafter, OUT/eagle3 and OUT/ar; without --bench the first is used")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--bench", action="store_true", help="measure plain decoding and the drafter on held-out prompts; writes OUT/report.json")
    p.add_argument("--sweep", action="store_true", help="--bench: also measure passes over block sizes and contexts, and batches")
    p.add_argument("--chat", action="store_true", help="--prompt is a user's message: render it with the target's chat template")
    p.add_argument("--data", metavar="FILE", help="--bench: prompts from a text or .jsonl file (default: OUT/heldout.jsonl)")
    p.add_argument("--show", action="store_true", help="colour the text: accepted drafts, bonus tokens, rejected drafts")
    p.add_argument("--plain", action="store_true", help="decode without the drafter")
    p.add_argument("--max-new-tokens", type=int, default=192, metavar="N")
    p.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0; --bench: 0 and 1)")
    p.add_argument("--top-k", type=int, metavar="K")
    p.add_argument("--top-p", type=float, metavar="P")
    p.add_argument("--block-size", type=size_or_auto, metavar="B",
                   help="tokens of a block; auto: how many drafts are read is chosen anew each cycle, down to plain decoding (the default; "
                        "--show: the drafter's own block)")
    p.add_argument("--tree-budget", type=int, metavar="N",
                   help=f"tokens that the target reads a cycle, as a tree of the likeliest drafts; 0: a chain (default: {TREE_BUDGET})")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prompts", type=int, default=8, metavar="N", help="--bench: prompts a domain")
    p.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="--bench: tokens a prompt")
    p.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction,
                   help="a cycle's steps as CUDA graphs (the default on CUDA), or on the CPU as compiled code (a minute's wait the first time)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the files' own")
    return p


def size_or_auto(text):
    return text if text == "auto" else int(text)


def run_benchmark(out, target, drafters, tokenizer, prompts_file, *, prompts, prompt_tokens, max_new_tokens, temperatures=(0.0, 1.0),
                  block_size="auto", tree_budget=TREE_BUDGET, seed=0, sweeping=False, **how):
    """Benchmarks, prints the table, writes out/report.json. drafters: {method: drafter}, each measured with its chain, its tree, and "auto"."""
    Path(out).mkdir(parents=True, exist_ok=True)
    rows, methods = read_prompts(prompts_file, tokenizer, prompt_tokens, prompts), {}
    for name, drafter in drafters.items():
        size, budget = None if block_size == "auto" else block_size, None if drafter.in_turn else tree_budget
        methods[name] = {"drafter": drafter, "block_size": size}
        if budget:
            methods[f"{name} tree"] = {"drafter": drafter, "block_size": size, "tree_budget": budget}
        if block_size == "auto":
            methods[f"{name} auto"] = {"drafter": drafter, "block_size": "auto", "tree_budget": budget}
    with tqdm(total=len(temperatures) * sum(map(len, rows.values())), desc="benchmark", unit="prompt") as bar:
        def progress(what):
            bar.set_postfix_str(what, refresh=False)
            bar.update()
        results, histograms = benchmark(target, methods, rows, max_new_tokens, temperatures, stop_ids=stop_tokens(target, tokenizer), seed=seed,
                                        progress=progress, **how)
    report = {
        "device": device_name(target.device), "dtype": str(target.dtype).removeprefix("torch."), "torch": torch.__version__,
        "max_new_tokens": max_new_tokens, "block_size": block_size, "tree_budget": tree_budget, "results": results,
        "acceptance_lengths": {f"{method} T={temperature:g}": {str(n): counts[n] for n in sorted(counts)}
                               for (method, temperature), counts in histograms.items()}}
    print(show_report(results, histograms))
    if sweeping:
        with tqdm(desc="sweep", unit="point") as bar:
            def progress(what):
                bar.set_postfix_str(what)
                bar.update()
            texts = [row for domain in rows.values() for row in domain]
            report["sweep"] = {name: sweep(target, drafter, texts, progress, **how) for name, drafter in drafters.items()}
        for name, found in report["sweep"].items():
            print(f"\n{name}{show_sweep(found)}")
    write_json(Path(out) / "report.json", report)


def stop_tokens(target, tokenizer):
    eos = target.config.eos_token_id
    return {*(eos if isinstance(eos, list) else [eos]), *tokenizer.eos_ids} - {None}


def find_device(name=None):
    """The torch.device of that name; None: CUDA where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        usable = device.type == "cpu" or device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    except RuntimeError:
        usable = False
    if not usable:
        raise UserError(f"--device {name}: not found here; cpu, or cuda where PyTorch sees one")
    return device


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")][0]
    except (OSError, IndexError):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def main(argv=None):
    args = parser().parse_args(argv)
    device = find_device(args.device)
    for name in ("prompts", "prompt_tokens", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is too small: at least 1")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative")
    folder = args.target or Path(args.out) / "target"
    target = Transformer.from_pretrained(folder, device=device, dtype=DTYPES.get(args.dtype))
    tokenizer = Tokenizer.from_pretrained(folder)
    folders = args.drafter or [path for kind in DRAFTERS.values() if (path := Path(args.out) / kind.folder).exists()] or [Path(args.out) / "drafter"]
    opened = [] if args.plain else [load_drafter(path, target) for path in folders[:None if args.bench else 1]]
    drafters = {}
    for drafter, path in zip(opened, folders):
        drafters[f"{drafter.method} {path}" if drafter.method in drafters else drafter.method] = drafter
    block_size = args.block_size or (None if args.show else "auto")
    budget = TREE_BUDGET if args.tree_budget is None else args.tree_budget or None
    if args.bench:
        run_benchmark(args.out, target, drafters, tokenizer, args.data or Path(args.out) / "heldout.jsonl", prompts=args.prompts,
                      prompt_tokens=args.prompt_tokens, max_new_tokens=args.max_new_tokens, sweeping=args.sweep, seed=args.seed,
                      block_size=block_size, tree_budget=budget, top_k=args.top_k, top_p=args.top_p, compile=args.compile,
                      temperatures=(0.0, 1.0) if args.temperature is None else (args.temperature,))
        return
    text = args.prompt.encode("utf-8", "replace").decode()
    entry = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    drafter, stop_ids = opened[0] if opened else None, stop_tokens(target, tokenizer)
    if args.tree_budget is None and drafter is not None and drafter.in_turn:
        budget = None
    steps = generate(target, drafter, [encode_prompt(entry, tokenizer, None)], args.max_new_tokens,
                   Sampling(args.temperature or 0.0, args.top_k, args.top_p), block_size=block_size, tree_budget=budget, stop_ids=stop_ids,
                   seed=args.seed, compile=args.compile, look_every=1 if args.show else None)
    stream(steps, tokenizer, "" if args.chat else text, stop_ids, args.show)


def run_command(main):
    """Runs a command line: what the user can put right is one line and exit status 2."""
    try:
        sys.stdout.reconfigure(errors="replace")                                 # a terminal that lacks a character shows a question mark
        main()
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_command(main)
