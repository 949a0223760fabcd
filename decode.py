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

import numpy as np
import torch
from tqdm import tqdm

from drafter import DRAFTERS, load_drafter
from kernels import allow_recompiling, has_compiler
from model import DTYPES, KVCache, Tokenizer, Transformer, UserError, write_json

PREFILL = 512      # tokens of a prompt that are read at once: on the CPU the mask, PREFILL x context, would otherwise outgrow the cache
CHECK_EVERY = 8    # cycles between two looks at the results on CUDA: each look makes the host wait for the device


# ---- sampling ----------------------------------------------------------------------------------------------------------------

def distribution(logits, temperature, top_k=None, top_p=None):
    """logits (..., V) -> probabilities (..., V) in float32 after temperature (> 0), then top-k, then top-p (the smallest set of likeliest
    tokens that reaches top_p)."""
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-6)   # shifted first: no overflow where it is very cold
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= max(top_p, 1e-9), 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(weights, u):
    """Inverse-CDF draw: weights (..., V) >= 0 with a positive sum, u (...) uniform in [0, 1) -> indices (...). In float64, as are the
    uniforms, or the sum over a large vocabulary would be too coarse for its tail. Never an index of weight zero."""
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True)[..., 0]


def accept_greedy(drafts, logits):
    """Temperature 0. drafts (B, K), the target's logits (B, K + 1, V) -> how many drafts are kept (B,), and the bonus token (B,)."""
    best = logits.argmax(-1)                                                     # (B, K + 1)
    if drafts.shape[1] == 0:
        return drafts.new_zeros(len(drafts)), best[:, 0]                         # plain decoding
    accepted = (drafts == best[:, :-1]).cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def accept_sampled(drafts, q, p, u_accept, u_bonus):
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): kept tokens and bonus together are distributed exactly as p.

    drafts (B, K) drawn from q (B, K, V); the target's p (B, K + 1, V); u_accept (B, K) and u_bonus (B, K + 1) uniform.
    Draft x is kept with probability min(1, p(x) / q(x)). At the first one that is not, the bonus token comes from
    norm(max(p - q, 0)); where all are kept, from p itself.
    """
    if drafts.shape[1] == 0:
        return drafts.new_zeros(len(drafts)), draw(p[:, 0], u_bonus[:, 0])                # plain decoding
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
    if isinstance(seed, (int, np.integer)):
        seeds = [(seed, row) for row in range(rows)]
    elif len(seeds := list(seed)) != rows:
        raise UserError(f"{len(seeds)} seeds for {rows} prompts; give one seed, or one a prompt")
    return torch.from_numpy(np.stack([np.random.default_rng(s).random((length, 3)) for s in seeds]))


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

    def cycle(self, i):
        """Cycle i's milliseconds for drafting and for verifying: it has marked its beginning, the end of the draft, and its end."""
        began, drafted, ended = self.marks[3 * i:3 * i + 3]
        if self.cuda:
            ended.synchronize()
            return began.elapsed_time(drafted), drafted.elapsed_time(ended)
        return 1e3 * (drafted - began), 1e3 * (ended - drafted)


class Captured:
    """A function of tensors. For each combination of shapes the first two calls run as they are (on CUDA kernels compile, memory is reserved). From
    the third on it is one thing to the host instead of hundreds of operators: on CUDA a captured graph, elsewhere compiled code."""

    seen = Counter()                                                             # compiled code, unlike a graph, serves later calls of `cycles` too
    prepared = 0                                                                 # captures and compilations so far: such a cycle's time tells nothing

    def __init__(self, function, device):
        self.function, self.graphs, self.cuda = function, {}, device.type == "cuda"
        self.calls = Counter() if self.cuda else Captured.seen
        if not self.cuda:
            allow_recompiling()
            self.compiled = torch.compile(function, dynamic=False, options={"cpp_wrapper": True})

    def __call__(self, *args):
        shapes = (self.function.__name__, *(arg.shape for arg in args))
        self.calls[shapes] += 1
        if self.calls[shapes] <= 2:
            return self.function(*args)
        if not self.cuda:
            stats = torch._dynamo.utils.counters["stats"]                        # PyTorch decides: another temperature needs other code, too
            before = stats["unique_graphs"]
            outputs = self.compiled(*args)
            Captured.prepared += stats["unique_graphs"] > before
            return outputs
        if shapes not in self.graphs:
            Captured.prepared += 1
            inputs, graph = [arg.clone() for arg in args], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = self.function(*inputs)
            self.graphs[shapes] = graph, inputs, outputs
        graph, inputs, outputs = self.graphs[shapes]
        for mine, new in zip(inputs, args):
            mine.copy_(new)
        graph.replay()
        return [output.clone() for output in outputs]                            # the next replay writes over its own


class Pace:
    """block_size="auto": how many tokens the target reads next, of which one, without a draft, is plain decoding.

    Every choice has an expected number of tokens and a cost. The costs are the milliseconds seen in this call. Reading n tokens gives 1 + the sum
    over k < n of the probability that drafts 1..k are all kept; the drafter's confidence in each slot stands for its part of that, raised to a power
    that is adjusted until it predicts the gains so far. A batch has ended when its slowest row has, so the confidence and the gain are that row's.
    The first cycle is a plain one. Where drafts don't pay, plain cycles follow, the more the more a draft loses and the more in a row have lost, and
    then one draft looks again.

    The output stays exact. All that a choice depends on is decided text, times, and q, the drafter's distributions, which are functions of decided
    text; never the tokens that were drawn from q and are about to be judged. (A rule that read less of the block where a draft looks unlikely would
    favour likely ones. And where a drafter reads its own drafts, the later slots' q tell which they were: above temperature 0 only its first slot's
    counts.)
    """

    def __init__(self, sizes, rows):
        self.sizes, self.rows = sizes, rows                                      # ascending, 1 first, the whole block last; prompts in the batch
        self.draft_ms, self.verify_ms = deque(maxlen=8), {}                      # recent ones; by tokens read
        self.draft_cost, self.cost = 0.0, {}                                     # their medians
        self.tokens, self.ms = 0.0, 0.0                                          # what reading drafts gave and took, moving averages
        self.power = 0.45                                                        # measured at both temperatures
        self.least = min(5.0 * rows, 65.0)                                       # a row's bad draft may be an accident; the slowest of many has few good ones
        self.wait, self.patience = 1.0, self.least                               # for so many plain cycles; how many for each token lost
        self.drafted, self.chosen = 0, 3                                         # how often; how many tokens were read behind the last draft

    @property
    def drafting(self):
        return self.wait <= 0

    def reach(self):
        """How many tokens to draft, anchor included: a little more than were read last."""
        return min(self.chosen + 2, self.sizes[-1])

    def choose(self, confidence):
        """The drafter's confidence in each slot, [drafts seen][slots] -> how many tokens to read. (Plain numbers: a tensor operation on so few
        costs ten times as much.)"""
        expected = [1.0] + [0.0] * len(confidence[0])
        for row in confidence:
            kept = 1 / len(confidence)
            for k, c in enumerate(row, 1):
                kept *= c ** self.power                                          # that drafts 1..k are all kept
                expected[k] += kept
        self.expected = list(itertools.accumulate(expected))                     # [tokens read - 1]
        rate = max(1 / self.cost[1], self.tokens / (self.ms + self.draft_cost) if self.drafted else 0)
        worth = {n: self.expected[n - 1] - rate * self.cost_of(n) for n in self.sizes if n <= len(expected)}    # less what the time would give elsewhere
        self.chosen = max(worth, key=worth.get)
        return self.chosen

    def cost_of(self, n):
        """Milliseconds of reading n tokens: between two measured sizes lies a line."""
        if n in self.cost:
            return self.cost[n]
        below = max(m for m in self.cost if m < n)                               # 1 at least: the first cycle's
        above = min((m for m in self.cost if m > n), default=below)
        return self.cost[below] + (self.cost[above] - self.cost[below]) * (n - below) / max(1, above - below)

    def update(self, n, draft_ms, verify_ms, gain):
        """What a cycle took, and by how many tokens the slowest row is further; gain None: a plain cycle."""
        self.verify_ms.setdefault(n, deque(maxlen=8)).append(verify_ms)
        self.cost[n] = median(self.verify_ms[n])
        if gain is None:
            self.wait -= 1
            return
        self.drafted += 1
        if self.drafted > 1:
            self.draft_ms.append(draft_ms)
        elif self.rows > 1:                                                      # the first draft also reads the prompt: one row's does not count
            self.draft_ms.append(min(draft_ms, verify_ms))
        self.draft_cost = median(self.draft_ms) or 0.0
        expected, weight = self.expected[n - 1], max(0.2, 1 / self.drafted)      # a mean at first
        self.power = min(max(self.power * math.exp(0.25 * weight * (expected - min(gain, n))), 0.1), 100.0)
        gave = (expected + self.rows * gain) / (1 + self.rows)                   # one row's gain varies more than the slowest one's of many
        self.tokens += weight * (gave - self.tokens)
        self.ms += weight * (self.cost[n] - self.ms)
        # Tokens that plain cycles make in that time, less its own. A tie goes on, for to change costs, too, and so does a narrow win, once there are
        # plain cycles enough to tell.
        lost = 0.96 * (self.ms + self.draft_cost) / self.cost[1] - self.tokens
        close = -lost < 0.25 * self.tokens and len(self.verify_ms[1]) < 4
        self.patience = self.least if lost <= 0 else min(1.4 * self.patience, 65.0)
        # What loses much won't pay soon; but the first times may be accidents.
        self.wait = min(max(self.patience * lost * max(lost, 1), close), self.rows * 4 ** self.drafted)


@dataclass
class Generation:
    tokens: list                # rows of new token ids; a stop token is included and ends its row; at most max_new_tokens
    acceptance_lengths: list    # rows of draft tokens accepted + 1, one a cycle, as verified (the last one before the end is cut)
    draft_ms: list = field(default_factory=list)     # a cycle with drafts
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


def looks_seldom(device):
    """On CUDA every cycle has the same shapes and asks nothing of the host, which looks at the results every CHECK_EVERY cycles. Elsewhere host and
    device are one, and each pass is cut to what it needs (but for compiled code: see `Captured`)."""
    return device.type == "cuda"


@torch.inference_mode()
def cycles(target, drafter, prompts, max_new_tokens, *, block_size=None, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None,
           graphs=None, watch=None):
    """The decoding loop. Yields a Cycle for the prefill (no drafts, the first token as bonus), then one for each cycle.

    Each row advances at its own pace: row b has length[b] tokens in the cache, its anchor is the next. A rejection needs no clean-up: the
    caches are overwritten from length[b] on, and no mask lets anyone look past it.
    """
    check(target, prompts, max_new_tokens, temperature, top_k, top_p, block_size)
    device, B = target.device, len(prompts)
    if graphs and device.type == "cpu" and not has_compiler():
        raise UserError("no C++ compiler found, which graphs need on the CPU: install one, or leave them out")
    seldom, watch = looks_seldom(device), watch or Stopwatch(device)
    graphs = device.type == "cuda" if graphs is None else graphs
    fixed = seldom or graphs
    block = 1 if drafter is None else drafter.config.block_size if block_size in (None, "auto") else block_size
    sizes = sorted({1, block // 2, block}) if fixed else list(range(1, block + 1))    # few: each has its own graph
    pace = Pace(sizes, B) if block_size == "auto" and block > 1 else None
    taps = drafter.config.target_layer_ids if block > 1 else ()
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    capacity = width + max_new_tokens + 2 * block                                # a row that has ended may overhang by two blocks
    capacity += -capacity % 256 if fixed else 0                                  # few shapes
    cache = KVCache(target.config, B, capacity, device, target.dtype)
    drafter_cache = None                                                         # made for the first draft: "auto" may never want one
    stops = torch.tensor(sorted(stop_ids), device=device, dtype=torch.int64)
    most = torch.full((B,), max_new_tokens, device=device)                       # a tensor: compiled code would hold a number for good
    row, slot = torch.arange(B, device=device), torch.arange(max(block, PREFILL), device=device)
    u = uniforms(seed, B, capacity).to(device) if temperature > 0 else None    # more than it takes: few shapes

    def uniforms_of(made, n):
        """(B, n, 3): those of each row's next n tokens."""
        return u[row[:, None], made[:, None] + slot[:n]]

    def context(ids, start, count, features):
        """What the drafter gets to read of a pass of the target: the tokens (B, n), their positions (B, n), -1 for those that are not kept, and
        the features."""
        if block == 1:
            return ()
        places = torch.where(slot[:ids.shape[1]] < count[:, None], start[:, None] + slot[:ids.shape[1]], -1)
        return (ids, places) if features is None else (ids, places, features)

    def draft(anchor, length, made, *unread, size=block, end=None):
        """-> drafts (B, size - 1); what they were drawn from, q (B, size - 1, V); and how likely each was to be kept, before it was drawn
        (B, size - 1)."""
        def pick(logits, first):
            if u is None:
                return logits.argmax(-1), logits
            q = distribution(logits, temperature, top_k, top_p)
            return draw(q, uniforms_of(made + first, logits.shape[1])[..., 1]), q
        drafts, q = drafter.draft(target, anchor, length, unread, drafter_cache, size, end, pick)
        confidence = length if pace is None else q.softmax(-1).amax(-1) if u is None else q.square().sum(-1)
        if pace and u is not None and drafter.in_turn:                           # a later slot's q tells which tokens were drawn before it: see `Pace`
            confidence = confidence[:, :1].expand_as(confidence)
        return drafts, q, confidence

    def verify(drafts, q, anchor, length, made, done, end=None):
        """The target reads anchor and drafts at once; its logits at slot k judge the draft in slot k + 1.
        -> accepted, bonus; the rows' new state: length, made, done; and what the drafter has to read: see `context`."""
        n, ids = drafts.shape[1] + 1, torch.cat((anchor[:, None], drafts), 1)
        hidden, features = target(ids, length, cache, taps, end)
        logits = target.logits(hidden)                                           # (B, n, V)
        if u is None:
            accepted, bonus = accept_greedy(drafts, logits)
        else:
            now = uniforms_of(made, n)
            accepted, bonus = accept_sampled(drafts, q, distribution(logits, temperature, top_k, top_p), now[:, :-1, 2], now[..., 0])
        count = torch.where(done, 0, accepted + 1)
        made = made + count
        stopped = torch.isin(bonus, stops)
        if n > 1:
            stopped |= (torch.isin(drafts, stops) & (slot[:n - 1] < accepted[:, None])).any(1)
        return accepted, bonus, length + count, made, done | stopped | (made >= most), *context(ids, length, count, features)

    draft_as_it_is = draft
    if graphs:
        draft, verify = Captured(draft, device), Captured(verify, device)

    # Prefill. Rows of different lengths are padded on the right; causality keeps the padding unseen, the first decoded tokens overwrite it.
    ids = torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    length = torch.tensor(lengths, device=device)                                # (B,): the anchor's position
    last, unread = 0, []                                                         # unread: what the drafter has not read yet, see `context`
    for begin, part in zip(range(0, width, PREFILL), ids.split(PREFILL, 1)):
        start, n = torch.full_like(length, begin), part.shape[1]
        hidden, features = target(part, start, cache, taps, end=begin + n)
        unread.append(context(part, start, length - begin, features))
        last = torch.where((length > begin)[:, None], hidden[row, (length - begin).clamp(1, n) - 1], last)
    logits = target.logits(last)                                                 # (B, V), behind each row's last token
    anchor = logits.argmax(-1) if u is None else draw(distribution(logits, temperature, top_k, top_p), u[:, 0, 0])
    made, done = torch.ones_like(length), torch.zeros_like(length, dtype=torch.bool)    # (B,) new tokens so far; rows that have ended
    no_drafts, no_q = ids[:, :0], logits[:, None][:, :0]
    yield Cycle(no_drafts, made - 1, anchor, done)
    done = torch.isin(anchor, stops) | (made >= most)

    n, recent = block, []                                                        # what `pace` has not learned from: cycle, tokens read, confidence, gain
    for cycle in range(max_new_tokens - 1):                                      # each cycle makes at least one token
        if not seldom or cycle % CHECK_EVERY == 0:
            if bool(done.all()):
                break
            if pace:
                if seldom and (known := [seen for _, _, seen, _ in recent if seen is not None]):
                    n = pace.choose(torch.cat(known).tolist())
                for i, read, _, gain in recent:
                    pace.update(read, *watch.cycle(i), None if gain is None else gain.item())
            recent = []
        longest = 0 if fixed else int(length.max())
        drafting = block > 1 and (not pace or pace.drafting)
        drafts, q, confidence, prepared = no_drafts, no_q, None, Captured.prepared
        watch.mark()
        if drafting:
            drafter_cache = drafter_cache or KVCache(drafter.config.layers, B, capacity + 1, device, target.dtype)
            # Only what was kept enters the drafter's context.
            parts = unread[0] if len(unread) == 1 else [torch.cat(part, 1) for part in zip(*unread)]
            size = pace.reach() if pace and not fixed else block
            if fixed and (more := -parts[0].shape[1] % block):                   # behind some plain cycles: few shapes
                parts = [torch.cat((x, x[:, :1].expand(-1, more, *x.shape[2:])), 1) for x in parts]
                parts[1][:, -more:] = -1
            run = draft if parts[0].shape[1] == block else draft_as_it_is        # behind the prompt or many plain cycles: shapes that hardly come back
            drafts, q, confidence = run(anchor, length, made, *parts, **({} if fixed else {"size": size, "end": longest + size}))
            unread = []
            if pace:
                if B > 1:                                                        # the row that is furthest behind counts
                    behind = made.masked_fill(done, max_new_tokens)              # (B,)
                    confidence = confidence[behind.argmin(0, keepdim=True)]
                n = n if seldom else pace.choose(confidence.tolist())
            drafts, q = drafts[:, :n - 1], q[:, :n - 1]
        watch.mark()
        accepted, bonus, *state = verify(drafts, q, anchor, length, made, done, **({} if fixed else {"end": longest + drafts.shape[1] + 1}))
        watch.mark()
        yield Cycle(drafts, accepted, bonus, done)
        anchor, (length, made, done, *read) = bonus, state
        if pace and prepared == Captured.prepared:
            gain = None
            if drafting:
                gain = accepted + 1 if B == 1 else made.masked_fill(done, max_new_tokens).min() - behind.min()
            recent.append((cycle, drafts.shape[1] + 1, confidence, gain))
        kept = drafts.shape[1] + 1 if fixed else int(accepted.max()) + 1
        unread.append([x[:, :kept] for x in read])


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
                              ("block_size", block_size, block_size in (None, "auto") or type(block_size) is int and 1 <= block_size <= limit)):
        if not good:
            raise UserError(f"{name} = {value} is out of range")


def speculative(target, drafter, prompts, max_new_tokens, *, block_size=None, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None,
                graphs=None):
    """Decodes prompts (one list of token ids a row, of any lengths) with drafter and target. The output is the target's own: token for
    token at temperature 0 (in float32; lower precision may break a tie otherwise), in distribution above.

    block_size: tokens that the target reads a cycle; None: the drafter's; "auto": chosen anew each cycle, see `Pace`. (What it chooses depends on
        measured times, so above temperature 0 the same seed may then give another text, of the same distribution.)
    seed: an int (row i draws from the stream of (seed, i)), one int a row, or None.
    graphs: passes of fixed shapes as one piece: on CUDA (the default there; False for debugging) CUDA graphs, on the CPU compiled code, which pays
        in long work only.
    Returns a Generation; UserError for bad input.
    """
    watch, stop_ids = Stopwatch(target.device), set(stop_ids)
    log = list(cycles(target, drafter, prompts, max_new_tokens, block_size=block_size, temperature=temperature, top_k=top_k, top_p=top_p,
                      stop_ids=stop_ids, seed=seed, graphs=graphs, watch=watch))
    rows = [[] for _ in prompts]
    lengths = [[] for _ in prompts]
    for i, (drafts, accepted, bonus, done) in enumerate(on_host(log, target.device)):
        for b in range(len(prompts)):
            if not done[b]:
                rows[b] += drafts[b][:accepted[b]] + [bonus[b]]
                if i:
                    lengths[b].append(accepted[b] + 1)
    rows = [cut(row[:max_new_tokens], stop_ids) for row in rows]
    times = [watch.cycle(i) for i in range(len(log) - 1)]
    return Generation(rows, lengths, [ms for (ms, _), cycle in zip(times, log[1:]) if cycle.drafts.shape[1]], [ms for _, ms in times])


def autoregressive(target, prompts, max_new_tokens, **how):
    """Plain decoding of the same prompts, a token a cycle; keywords (temperature, top_k, top_p, stop_ids, seed) and result as for `speculative`."""
    return speculative(target, None, prompts, max_new_tokens, **how)


def cut(row, stop_ids):
    """The row up to and including its first stop token."""
    return row[:next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))]


# ---- benchmark -----------------------------------------------------------------------------------------------------------------

def distinct4(rows):
    """Share of distinct 4-grams within each row, over all rows: 1 where nothing repeats, near 0 where text runs in a loop."""
    grams = [[tuple(row[i:i + 4]) for i in range(len(row) - 3)] for row in rows]
    total = sum(map(len, grams))
    return sum(len(set(row)) for row in grams) / total if total else 1.0


def samples(temperature):
    """How often the benchmark decodes a prompt. Sampled texts decide what a draft gains, and one of each of 8 prompts is all noise."""
    return 3 if temperature > 0 else 1


def benchmark(target, methods, prompts, max_new_tokens, temperatures=(0.0, 1.0), stop_ids=(), seed=0, progress=None, **how):
    """Plain decoding and every other method on the same prompts, one at a time, in turn, in one run, each as often as `samples` says.

    methods: {name: (drafter, block_size)}; prompts: {domain: rows of ids}; how: top_k, top_p, graphs. Times are whole calls, prefill included:
    ms_per_token is the median over calls, speedup the median over calls of (plain ms a token / this ms a token). Returns report rows and the
    histograms of acceptance lengths {(method, temperature): Counter}.
    """
    results, histograms = [], {}
    methods = {"autoregressive": (None, None), **methods}
    for temperature in temperatures:
        for drafter, size in methods.values():                                   # warm-up: compilation, allocation, threads
            for _ in range(3):                                                   # or until nothing is left to compile
                prepared = Captured.prepared
                speculative(target, drafter, next(iter(prompts.values()))[:1], max_new_tokens, block_size=size, temperature=temperature, seed=[seed], **how)
                if prepared == Captured.prepared:
                    break
        runs = {(domain, method): [] for domain in prompts for method in methods}   # (ms a token, Generation) for each call
        for domain, rows in prompts.items():
            for i, prompt in enumerate(rows * samples(temperature)):
                for method, (drafter, size) in methods.items():
                    began = time.perf_counter()
                    out = speculative(target, drafter, [prompt], max_new_tokens, block_size=size, temperature=temperature, stop_ids=stop_ids, seed=[seed + i], **how)
                    runs[domain, method].append((1e3 * (time.perf_counter() - began) / len(out.tokens[0]), out))
                if progress:
                    progress(f"{domain}, temperature {temperature:g}")
        for domain in [*prompts, "all"] if len(prompts) > 1 else prompts:
            pooled = {method: [run for d in prompts if domain in (d, "all") for run in runs[d, method]] for method in methods}
            for method, run in pooled.items():
                lengths = Counter(n for _, out in run for n in out.acceptance_lengths[0])
                histograms[method, temperature] = lengths                        # the last domain is all of them
                tokens = [out.tokens[0] for _, out in run]
                results.append({
                    "domain": domain, "method": method, "temperature": temperature, "prompts": len(run) // samples(temperature), "tokens": sum(map(len, tokens)),
                    "tau": sum(n * times for n, times in lengths.items()) / max(1, lengths.total()),
                    "ms_per_token": median([ms for ms, _ in run]),
                    "speedup": median([plain / ms for (plain, _), (ms, _) in zip(pooled["autoregressive"], run)]),
                    "draft_ms": median([ms for _, out in run for ms in out.draft_ms]),
                    "verify_ms": median([ms for _, out in run for ms in out.verify_ms]),
                    "distinct4": distinct4(tokens),
                    "identical": statistics.mean(row == out.tokens[0] for row, (_, out) in zip(tokens, pooled["autoregressive"])) if temperature == 0 else None,
                })
    return results, histograms


def median(values):
    return statistics.median(values) if values else None


def cycle_ms(target, drafter, prompt, block_size, **how):
    """Milliseconds of a cycle's draft and of its verification behind this prompt: medians over 8 cycles, fewer at the very end of the positions."""
    watch, room = Stopwatch(target.device), min(9 * block_size, target.config.max_position_embeddings - len(prompt))
    for _ in itertools.islice(cycles(target, drafter, [prompt], room, block_size=block_size, watch=watch, **how), 1 + 9):    # the prefill is the first
        pass
    draft, verify = zip(*(watch.cycle(i) for i in range(1, len(watch.marks) // 3)))    # the first cycle's draft reads the prompt as well
    return {"draft_ms": median(draft) if block_size > 1 else None, "verify_ms": median(verify)}


def sweep(target, drafter, prompts, progress, **how):
    """What decoding costs as it grows, in milliseconds of one cycle (medians): over the block size, over the context, and tokens a second over the
    batch. prompts: rows of ids; their text, repeated, makes the longer contexts. Returns {"block_size": rows, "context": rows, "batch": rows}."""
    text = [token for row in prompts for token in row]
    block, limit = drafter.config.block_size, target.config.max_position_embeddings
    found = {"block_size": [], "context": [], "batch": []}

    def behind(context, n):
        return cycle_ms(target, drafter, (text * (context // len(text) + 1))[:context], n, **how)

    for n in (1, 2, 4, 8, 16, 32):
        progress(f"block size {n}")
        found["block_size"].append({"block_size": n, "context": 64, **behind(64, n)})
    for context in (64, 128, 256, 512, 1024, 2048, 4096):
        context = min(context, limit - 9 * block)                                # the longest leaves room for its new tokens
        progress(f"context {context}")
        caches = [KVCache(config, 1, context, "meta", target.dtype) for config in (target.config, drafter.config.layers)]
        found["context"].append({"context": context, "block_size": block, **behind(context, block),
                                 "target_cache_bytes": caches[0].nbytes, "drafter_cache_bytes": caches[1].nbytes})
    for batch in (1, 4, 16, 64):
        rows, seconds = [prompts[i % len(prompts)] for i in range(batch)], {"autoregressive": [], "speculative": [], "auto": []}
        for _ in range(3):
            progress(f"batch of {batch}")
            for method, d, size in (("autoregressive", None, None), ("speculative", drafter, None), ("auto", drafter, "auto")):
                began = time.perf_counter()
                speculative(target, d, rows, 64, block_size=size, **how)
                seconds[method].append(time.perf_counter() - began)
        found["batch"].append({"batch": batch, **{method: 64 * batch / median(times) for method, times in seconds.items()}})
    return found


def show_sweep(found):
    """The sweep as tables with bars."""
    lines = []
    for key, columns in (("block_size", ("draft_ms", "verify_ms")), ("context", ("draft_ms", "verify_ms")),
                         ("batch", ("autoregressive", "speculative", "auto"))):
        most = max(row[c] or 0 for row in found[key] for c in columns)
        lines += ["", {"block_size": "block size: milliseconds of one pass (context 64)",
                       "context": f"context: milliseconds of one pass (block {found['context'][0]['block_size']}), and the KV caches",
                       "batch": "batch: tokens a second, all rows together"}[key]]
        for row in found[key]:
            memory = f"   target {row['target_cache_bytes'] / 2**20:.2f} MiB, drafter {row['drafter_cache_bytes'] / 2**20:.2f} MiB" if key == "context" else ""
            for i, c in enumerate(columns):
                value = row[c] or 0.0                                            # a block of one is not drafted
                lines.append(f"  {row[key] if i == 0 else '':>5}  {c.removesuffix('_ms'):14} {value:9.2f} {'█▒░'[i] * round(40 * value / most)}{memory if i == 0 else ''}")
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


def on_host(log, device):
    """The same cycles as lists; on CUDA a few at a time, for the host to wait less often."""
    group = []
    for cycle in log:
        group.append(cycle)
        if len(group) == (CHECK_EVERY if looks_seldom(device) else 1):
            yield from [Cycle(*(x.tolist() for x in cycle)) for cycle in group]
            group = []
    yield from [Cycle(*(x.tolist() for x in cycle)) for cycle in group]


def stream(target, drafter, tokenizer, text, prompt, max_new_tokens, stop_ids, show, **how):
    """Prints text, and what follows the prompt's ids as it is decoded. show: accepted drafts in green, the bonus token in blue, the rejected rest
    struck out in grey."""
    began, made, taken = time.perf_counter(), 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")                    # a character may be spread over two tokens
    for cycle in on_host(cycles(target, drafter, [prompt], max_new_tokens, stop_ids=stop_ids, **how), target.device):
        (drafts,), (accepted,), (bonus,), (done,) = cycle
        if done:
            break
        if taken == 0:
            print(text, end="")
        kept = cut((drafts[:accepted] + [bonus])[:max_new_tokens - made], stop_ids)
        made, taken = made + len(kept), taken + 1
        parts = [(GREEN, kept[:accepted]), (BLUE, kept[accepted:])] if show else [("", kept)]
        for colour, tokens in parts:
            piece = decoder.decode(tokenizer.decode_bytes([t for t in tokens if t not in stop_ids]))
            print(f"{colour}{piece}{PLAIN}" if show and piece else piece, end="", flush=True)
        if show and drafts[accepted:]:
            print(f"{GREY}{tokenizer.decode(drafts[accepted:]).encode('unicode_escape').decode()}{PLAIN}", end="", flush=True)
    print(decoder.decode(b"", final=True))
    seconds = time.perf_counter() - began
    print(f"[{made} tokens in {seconds:.2f} s, {made / seconds:.0f} tokens a second" +
          (f", tau {(made - 1) / (taken - 1):.2f}]" if drafter is not None and taken > 1 else "]"), file=sys.stderr)


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
    p.add_argument("--block-size", type=size_or_auto, default="auto", metavar="B",
                   help="tokens that the target reads a cycle; auto: chosen anew each cycle, down to plain decoding (default)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prompts", type=int, default=8, metavar="N", help="--bench: prompts a domain")
    p.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="--bench: tokens a prompt")
    p.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    p.add_argument("--graphs", action=argparse.BooleanOptionalAction,
                   help="passes of fixed shapes as one piece: CUDA graphs (the default on CUDA), or on the CPU compiled code (a minute's wait the first time)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the files' own")
    return p


def size_or_auto(text):
    return text if text == "auto" else int(text)


def run_benchmark(out, target, drafters, tokenizer, prompts_file, *, prompts, prompt_tokens, max_new_tokens, temperatures=(0.0, 1.0),
                  block_size="auto", seed=0, sweeping=False, **how):
    """Benchmarks, prints the table, writes out/report.json. drafters: {method: drafter}, each measured at its own block size and, for "auto", with
    that as well."""
    Path(out).mkdir(parents=True, exist_ok=True)
    rows = read_prompts(prompts_file, tokenizer, prompt_tokens, prompts)
    methods = {name: (drafter, None if block_size == "auto" else block_size) for name, drafter in drafters.items()}
    if block_size == "auto":
        methods |= {f"{name} auto": (drafter, "auto") for name, drafter in drafters.items()}
    with tqdm(total=sum(map(samples, temperatures)) * sum(map(len, rows.values())), desc="benchmark", unit="prompt") as bar:
        def progress(what):
            bar.set_postfix_str(what, refresh=False)
            bar.update()
        results, histograms = benchmark(target, methods, rows, max_new_tokens, temperatures, stop_ids=stop_tokens(target, tokenizer), seed=seed,
                                        progress=progress, **how)
    report = {
        "device": device_name(target.device), "dtype": str(target.dtype).removeprefix("torch."), "torch": torch.__version__,
        "max_new_tokens": max_new_tokens, "block_size": block_size, "results": results,
        "acceptance_lengths": {f"{method} T={temperature:g}": {str(n): counts[n] for n in sorted(counts)} for (method, temperature), counts in histograms.items()}}
    print(show_report(results, histograms))
    if sweeping:
        with tqdm(desc="sweep", unit="point") as bar:
            def progress(what):
                bar.set_postfix_str(what)
                bar.update()
            report["sweep"] = {name: sweep(target, drafter, [row for d in rows.values() for row in d], progress, **how) for name, drafter in drafters.items()}
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
    how = dict(block_size=args.block_size, seed=args.seed, top_k=args.top_k, top_p=args.top_p, graphs=args.graphs)
    if args.bench:
        run_benchmark(args.out, target, drafters, tokenizer, args.data or Path(args.out) / "heldout.jsonl", prompts=args.prompts,
                      prompt_tokens=args.prompt_tokens, max_new_tokens=args.max_new_tokens, sweeping=args.sweep,
                      temperatures=(0.0, 1.0) if args.temperature is None else (args.temperature,), **how)
    else:
        text = args.prompt.encode("utf-8", "replace").decode()
        entry = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
        stream(target, opened[0] if opened else None, tokenizer, "" if args.chat else text, encode_prompt(entry, tokenizer, None), args.max_new_tokens,
               stop_tokens(target, tokenizer), args.show, temperature=args.temperature or 0.0, **how)


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
