"""Draft, verify, accept: generation with a target and a drafter, and the benchmark of both.

    python decode.py --prompt "def zeros("             what train.py left in out/, streamed
    python decode.py --prompt "def zeros(" --show      in colours: accepted, bonus, rejected tokens
    python decode.py --bench                           against plain decoding, on held-out prompts

One cycle (paper, section 3): the drafter fills a block behind the anchor, the target reads the drafts in one
pass and draws its own token behind each, and drafts are kept while they equal the target's draws. The first
draw that no draft guessed is the bonus token, the next cycle's anchor. Plain decoding is the same cycle
without drafts: the anchor alone is read, and its successor is the bonus token.

Target and drafter draw with the same noise (see `Sampling` in model.py), a function of seed, row and token
index. So the text is the target's, token for token, at every temperature and with every way of drafting
(Daliri, Musco, Suresh, arXiv:2408.07978). Passes over one token and over many round differently: two tokens
that are equally likely to the last bits, rare in float32 but not in bfloat16, may come out either way.
"""
import argparse
import codecs
import functools
import itertools
import math
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from drafter import (draft_chain, draft_tree, drafter_folders, load_drafters, remembered_options,
                     rows_at)
from kernels import Stopwatch, as_one
from model import (COUNT, DTYPES, KVCache, Parser, Sampling, Tokenizer, Transformer, bars, check_prompts,
                   choose_sampling, device_name, distinct4, encode_prompt, exponential_noise, find_device,
                   median, number, parse_options, read_optional, read_prompts, run_command, stream_keys,
                   table, whether_to_compile, write_json)

# Tokens of a prompt that are read at once: the mask, PREFILL x context, should not outgrow a CPU's cache
PREFILL = 512
# Cycles between two looks at the results on CUDA, where each look makes the host wait for the device
LOOK_EVERY = 3
TREE_BUDGET = 32      # the command line's default
KEPT_BYTES = 2**31    # of the caches of idle Decoders, which later calls of the same shapes reuse


# ---- the rule of acceptance, at every temperature ----------------------------------------------------------

def accept(drafts, draws):
    """A draft is kept if it equals the token that the target itself draws behind its parent, and all its
    ancestors are kept. draws: (B, N), the target's token behind each of drafts.tokens.

    Returns the acceptance length (B,): the drafts kept, and one for the bonus token, which is the draw behind
    the last of them; path (B, N): the anchor and the drafts kept, in order, then the other nodes.
    """
    right = (drafts.tokens == draws.gather(1, drafts.parent)) | (drafts.depth == 0)
    # (B, N); the kept are one path, since siblings differ, in order, since parents come before children
    kept = (right[:, None] | ~drafts.ancestors).all(-1)
    return kept.sum(1), kept.int().argsort(dim=1, descending=True, stable=True)


# ---- the loop ----------------------------------------------------------------------------------------------

class Decoder:
    """Caches and state for a batch of B rows of up to `capacity` tokens, of fixed shapes and changed in place
    by `draft` and `verify`, which ask nothing of the host. With compile (the default on CUDA) these become
    one piece each, a CUDA graph or compiled code, which later calls of the same shapes use again; otherwise
    they are called as they are.

    Each row advances at its own pace: its text is text[b, :anchor_at[b] + 1], and the last token of that is
    the anchor: drawn by the target, not yet read by it. A rollback is an anchor_at that moves on by less than
    was read: what lies in the caches from there on is never seen, and the next cycle writes over it.
    """

    def __init__(self, target, drafter, batch, capacity, block_size, tree_budget, auto, denoise_steps,
                 sampling, stop_ids, compile):
        device = target.device
        self.target, self.drafter, self.sampling, self.device = target, drafter, sampling, device
        self.block_size, self.tree_budget, self.denoise_steps = block_size, tree_budget, denoise_steps
        self.compile = compile
        self.taps = drafter.config.target_layer_ids if drafter else ()
        configs = [target.config, drafter.config.layers] if drafter else [target.config]
        self.caches = [KVCache(config, batch, capacity, device, target.dtype) for config in configs]
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self.features = zeros(batch, capacity, len(self.taps) * target.config.hidden_size, dtype=target.dtype)
        self.nbytes = self.features.nbytes + sum(cache.data.nbytes for cache in self.caches)
        self.text = zeros(batch, capacity)
        # A row has finished where anchor_at == last_at; the drafter has read all positions before read_to.
        self.prompt_length, self.anchor_at, self.last_at, self.read_to = zeros(4, batch)
        self.noise_keys = zeros(batch, 2, dtype=torch.int32)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.lengths = zeros(capacity + LOOK_EVERY, batch)           # acceptance lengths, a line a cycle
        self.num_cycles = zeros(1)
        self.auto = Auto(tree_budget or block_size) if auto else None
        # Cycles between two looks; calls of a step that are not timed: on CUDA the first runs as it is and
        # the second captures, on the CPU the first compiles.
        self.look_every, self.warm_up = (LOOK_EVERY, 2) if device.type == "cuda" else (1, int(compile))
        self.graphs, self.calls = {}, Counter()

    # -- one cycle, on the device

    def draft(self):
        """The drafter's block behind each row's anchor, as `Drafts`: a chain or a tree."""
        logits = self.drafter.draft(self.target, self.text, self.features, self.anchor_at, self.block_size,
                                    self.caches[1], self.draw_drafts, self.denoise_steps)
        self.read_to.copy_(self.anchor_at)
        guesses = self.sampling.guess_probabilities(logits, self.noise(1, self.block_size - 1))    # (B, S, V)
        if self.tree_budget:
            return draft_tree(self.anchor(), guesses, self.tree_budget)
        return draft_chain(self.anchor(), guesses)

    def verify(self, n):
        """The target reads the anchor and the first n - 1 drafts in one pass, draws its own token behind
        each, and keeps what agrees."""
        anchor_at, order = self.anchor_at[:, None], torch.arange(n, device=self.device)
        no_guesses = torch.empty(len(self.text), 0, 1, device=self.device)       # for the anchor alone
        drafts = self.drafts.first(n) if n > 1 else draft_chain(self.anchor(), no_guesses)
        tree = self.anchor_at, drafts.ancestors
        hidden, features = self.target(
            drafts.tokens, anchor_at + drafts.depth, self.caches[0], self.taps, tree)
        noise = self.noise(1, min(n, self.block_size))
        if noise is not None:
            noise = rows_at(noise, drafts.depth)      # a node draws with the noise of the token behind it
        draws = self.sampling.draw(self.target.logits(hidden), noise)            # (B, n)
        length, path = accept(drafts, draws)        # a draw on the path is the next draft kept, or the bonus
        self.caches[0].move(anchor_at + path, anchor_at + order)
        self.commit(draws.gather(1, path), length, rows_at(features, path))

    def commit(self, tokens, length, features):
        """Appends each row's first length (B,) of tokens (B, n): the drafts kept, and behind them the bonus
        token, to which the anchor moves. That is the rollback: what was read behind it is never seen."""
        n = tokens.shape[1]
        order = torch.arange(n, device=self.device)
        positions = self.anchor_at[:, None] + order                              # (B, n)
        self.features[torch.arange(len(tokens), device=self.device)[:, None], positions] = features
        self.text.scatter_(1, positions + 1, tokens)
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (order < length[:, None])
        first_stop = torch.where(stops, order, n).amin(1)                               # (B,), n: none
        # Nothing counts behind a stop token, nor in a row that has finished.
        length = torch.minimum(length, first_stop + 1).masked_fill(self.anchor_at == self.last_at, 0)
        self.lengths.index_copy_(0, self.num_cycles, length[None])
        self.num_cycles += 1
        self.anchor_at.copy_(torch.minimum(self.anchor_at + length, self.last_at))
        self.last_at.copy_(torch.where(first_stop < n, self.anchor_at, self.last_at))    # the row ends here

    def anchor(self):
        return self.text.gather(1, self.anchor_at[:, None])                         # (B, 1)

    def noise(self, first, n):
        """(B, n, V), of the tokens anchor + first, anchor + first + 1, ...; None at temperature 0."""
        if self.sampling.temperature > 0:
            order = torch.arange(first, first + n, device=self.device)
            index = (self.anchor_at - self.prompt_length)[:, None] + order       # (B, n)
            return exponential_noise(self.noise_keys, index, self.target.config.vocab_size)

    def draw_drafts(self, logits, slot):
        """The tokens (B, n) that logits (B, n, V) draft in n slots from this one on, drawn with the target's
        noise: for drafters whose next pass reads them (their argument `sample`)."""
        return self.sampling.draw(logits, self.noise(slot, logits.shape[1]))

    def read(self):
        """The drafter reads the next block of context that plain cycles have left behind: `draft` itself
        reads no more than the last block."""
        order, last = torch.arange(self.block_size, device=self.device), (self.anchor_at - 1).clamp(min=0)
        positions = torch.minimum(self.read_to[:, None] + order, last[:, None])
        self.drafter.read(self.target, self.text, self.features, positions, self.caches[1])
        self.read_to.copy_(torch.minimum(self.read_to + self.block_size, self.anchor_at))

    # -- the host's part

    def prefill(self, prompts, max_new_tokens, keys):
        """Starts anew: target and drafter read the prompts, and `verify` draws each row's first token. Rows
        of different lengths are padded on the right; causality keeps the padding unseen, and later cycles
        write over it."""
        padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        width = padded.shape[1]
        self.text[:, :width] = padded
        self.prompt_length.copy_(torch.tensor([len(prompt) for prompt in prompts]))
        self.anchor_at.copy_(self.prompt_length - 1)
        self.read_to.copy_(self.anchor_at)
        self.last_at.copy_(self.anchor_at + max_new_tokens)
        self.noise_keys.copy_(keys)
        for begin in range(0, width - 1, PREFILL):
            end = min(begin + PREFILL, width - 1)
            self.set_kv_len(end)
            positions = torch.arange(begin, end, device=self.device).expand(len(prompts), -1)
            _, features = self.target(self.text[:, begin:end], positions, self.caches[0], self.taps)
            self.features[:, begin:end] = features
            if self.drafter:
                self.drafter.read(self.target, self.text, self.features, positions, self.caches[1])
        self.set_kv_len(width)
        self.verify(1)                                  # the last token of each prompt is its first anchor
        self.num_cycles.zero_()                                         # the first token belongs to no cycle
        # Of each cycle: times, tokens read, acceptance lengths; and which cycles compiled or captured a step.
        self.watch, self.sizes, self.history, self.untimed = Stopwatch(self.device), [], [], set()
        if self.auto:
            self.auto.before = None                                     # another call's cycle is no neighbour

    def cycle(self, looking):
        """Draft, then verify, which accepts and commits. looking: may the host wait for the drafts, to choose
        how many are read?"""
        auto, n = self.auto, 1
        drafting = self.drafter and not (auto and auto.plain_cycles > 0)
        self.set_kv_len(self.longest + max(self.block_size, self.tree_budget or 0))
        while drafting and self.unread > self.block_size:
            self.step(self.read)
            self.unread -= self.block_size
        self.watch.mark()
        if drafting:
            self.drafts, self.unread = self.step(self.draft), 0
            if auto and looking:
                auto.choose(self.drafts.probability[self.slowest].tolist())
            n = auto.size if auto else self.drafts.tokens.shape[1]
        self.watch.mark()
        self.step(self.verify, n)
        self.watch.mark()
        self.sizes.append(n)
        self.unread += min(n, self.block_size)
        self.longest += min(n, self.block_size)

    def step(self, function, *args):
        """Calls a step of the cycle: as it is, or as one piece (on CUDA from the second call on: the first
        compiles and reserves)."""
        key = function.__name__, *args
        self.calls[key] += 1
        if self.calls[key] <= self.warm_up:
            self.untimed.add(len(self.sizes))
        if not self.compile or self.calls[key] < self.warm_up:
            return function(*args)
        if key not in self.graphs:
            self.graphs[key] = as_one(function, *args)
        return self.graphs[key]()

    def set_kv_len(self, n):
        """How many slots of the caches the next passes look at: n, or all of them where shapes must not
        change."""
        for cache in self.caches:
            cache.kv_len = self.text.shape[1] if self.compile else min(n, self.text.shape[1])

    def look(self):
        """The host waits for the device, and learns what the cycles since the last look have kept. Returns
        whether all rows have ended."""
        new = self.lengths[len(self.history):len(self.sizes)].tolist()
        remaining = (self.last_at - self.anchor_at).tolist()
        left = max(remaining)
        for i, lengths in enumerate(new, len(self.history)):
            self.history.append(lengths)
            if self.auto and any(lengths):                                    # not behind the end of all rows
                ms = None if i in self.untimed else sum(self.watch.times(i))
                # Of the row that ends last; at its end, where max_new_tokens cuts, what any has kept.
                progress = (self.remaining - left) / len(new) if left else math.inf
                self.auto.update(self.sizes[i], ms, min(progress, max(lengths)))
        if self.auto and new and self.sizes[-1] > 1:
            self.auto.decide()
        self.remaining, self.slowest = left, remaining.index(left)          # the row that all others wait for
        # Until the next look these grow by what a cycle can keep.
        self.longest, self.unread = int(self.anchor_at.max()), int((self.anchor_at - self.read_to).max())
        return self.remaining == 0


class Auto:
    """block_size="auto": how many tokens the target reads next; one, the anchor alone, is plain decoding.

    A size is worth the tokens expected of it, by the drafter's own probabilities raised to a power that makes
    them right on average, over its cost in plain cycles. Costs are ratios of the times of neighbouring
    cycles: a machine's speed changes, but seldom between these. Where drafts lose, plain cycles follow, the
    more the more was lost and the more looks in a row have lost.
    """

    def __init__(self, most):
        self.sizes = [2**k for k in range(1, 16) if 2**k < most] + [most]
        self.ratios = {n: deque(maxlen=9) for n in self.sizes}                # measured costs, draft included
        self.power = 1.0                        # of a probability, to be right on average
        self.lost, self.num_drafts = 0.0, 0     # plain cycles that one with drafts loses; number of these
        self.plain_cycles = 2                   # still to run before the next draft; at first, to time them
        self.patience = 8                       # plain cycles for each one lost; grows while drafts lose
        self.size, self.expected = None, None   # chosen, and the tokens expected of it
        self.before = None                      # the cycle before: tokens read, milliseconds

    def cost(self, n):
        """In plain cycles: the measured one, but no more than a larger size's; unmeasured, between those
        beside it; at first two."""
        known = {m: statistics.median(ratios) for m, ratios in self.ratios.items() if ratios}
        if n in known:
            return min(cost for m, cost in known.items() if m >= n)
        below, above = [m for m in known if m < n], [m for m in known if m > n]
        return statistics.mean([known[m] for m in below[-1:] + above[:1]] or [2.0])

    def choose(self, probability):
        """probability: of each draft, that it and all before it are right, by the drafter. Sizes are tried
        from the smallest up, the next one where all drafts at the cost of the one before would win."""
        # expected[n - 1]: tokens kept when n are read
        expected = list(itertools.accumulate(p ** self.power for p in probability))
        largest = max((n for n in self.sizes if self.ratios[n]), default=self.sizes[0])
        most = 2 * largest if expected[-1] > self.cost(largest) else largest
        worth = {n: expected[n - 1] / self.cost(n) for n in self.sizes if n <= min(most, len(expected))}
        self.size = max(worth, key=worth.get)
        self.expected = expected[self.size - 1]

    def update(self, n, ms, length):
        """What a cycle took (None: it compiled or captured) and how many tokens it kept."""
        self.plain_cycles -= n == 1
        if ms and self.before and self.before[0] != n:
            n_before, ms_before = self.before
            if n == 1:
                self.ratios[n_before].append(ms_before / ms)
            else:
                self.ratios[n].append(ms / ms_before * (1.0 if n_before == 1 else self.cost(n_before)))
        self.before = (n, ms) if ms else None
        if n > 1 and ms:
            self.num_drafts += 1
            power = self.power * math.exp((self.expected - length) / min(self.num_drafts, 20))
            self.power = min(max(power, 0.1), 100.0)
            lost = self.cost(n) - (self.expected + length) / 2     # the mean of tokens expected and kept
            self.lost += max(0.2, 1 / self.num_drafts) * (lost - self.lost)

    def decide(self):
        """After a look at cycles with drafts: how many plain ones follow?"""
        if self.lost > 0:
            self.plain_cycles = max(1, round(self.patience * self.lost))
            self.patience = min(2 * self.patience, 64)
        else:                                   # a plain cycle now and then measures what one costs
            self.plain_cycles, self.patience = int(self.num_drafts % 32 == 0), 8


# ---- generation --------------------------------------------------------------------------------------------

@dataclass
class Generation:
    tokens: list    # rows of new token ids; a stop token is included and ends its row; at most max_new_tokens
    # Rows of draft tokens accepted + 1, one a cycle, up to a stop token (not cut at max_new_tokens)
    acceptance_lengths: list
    seconds: float = 0.0                             # of the whole call, prefill included
    draft_ms: list = field(default_factory=list)     # a cycle with drafts
    verify_ms: list = field(default_factory=list)    # a cycle, acceptance included

    @property
    def ms_per_token(self):
        return 1e3 * self.seconds / sum(map(len, self.tokens))


def speculative(target, drafter, prompts, max_new_tokens, **how):
    """Decodes prompts (one list of token ids a row, of any lengths) with drafter and target. The output is
    that of `autoregressive` with the same seed, token for token (but for ties, see above). Keywords as for
    `generate`.
    Returns a Generation; UserError for bad input."""
    began = time.perf_counter()
    for decoder in generate(target, drafter, prompts, max_new_tokens, **how):
        pass
    ends = zip(decoder.text.tolist(), decoder.prompt_length.tolist(), decoder.anchor_at.tolist())
    lengths_by_row = zip(*decoder.history) if decoder.history else [()] * len(prompts)
    times = [decoder.watch.times(i) for i in range(len(decoder.sizes))]
    return Generation(tokens=[text[begin:anchor + 1] for text, begin, anchor in ends],
                      acceptance_lengths=[[n for n in lengths if n] for lengths in lengths_by_row],
                      seconds=time.perf_counter() - began,
                      draft_ms=[draft for (draft, _), n in zip(times, decoder.sizes) if n > 1],
                      verify_ms=[verify for _, verify in times])


def autoregressive(target, prompts, max_new_tokens, **how):
    """Plain decoding of the same prompts, a token a cycle: keywords and result as for `speculative`."""
    return speculative(target, None, prompts, max_new_tokens, **how)


idle = {}    # Decoders of earlier calls, by what they are for; the latest last


@torch.inference_mode()
def generate(target, drafter, prompts, max_new_tokens, *, block_size=None, tree_budget=None, denoise_steps=1,
             temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None, compile=None,
             every_cycle=False):
    """The loop: yields the Decoder after the prefill, then whenever the host has looked, until all rows have
    ended. (The next call of the same shapes uses it again.)

    block_size: tokens of a block, anchor included; None: the drafter's; "auto": how many of the drafts are
    read is chosen anew each cycle.
    tree_budget: None: the target reads the block's likeliest tokens as a chain; N: the N likeliest prefixes,
    anchor included, as a tree.
    denoise_steps: passes of the drafter over a block; the paper's takes one (see train.py's --reveal for
    two).
    temperature: 0 is greedy; top_k, top_p: see `Sampling`. stop_ids: tokens that end a row.
    seed: an int (row i draws from the stream of (seed, i)), one int a row, or None.
    compile: None: on CUDA only. There steps are graphs, which later calls of the same shapes reuse; on the
    CPU compiled code.
    every_cycle: look after each cycle, where the device would rather run a few in between.
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_prompts(target.config, prompts, max_new_tokens)
    if drafter is not None:
        drafter.check_sizes(block_size, tree_budget, denoise_steps)
    own = drafter.config.block_size if drafter else 1
    block = own if block_size in (None, "auto") else block_size
    if drafter is None or block == 1:
        drafter, block, block_size, tree_budget = None, 1, 1, None
    compile = whether_to_compile(compile, target.device)
    capacity = max(map(len, prompts)) + max_new_tokens + max(block, tree_budget or 0)
    capacity += -capacity % 256                                                  # few different shapes
    what = (target, drafter, len(prompts), capacity, block, tree_budget, block_size == "auto", denoise_steps,
            sampling, tuple(sorted(stop_ids)), compile)
    key = *what, target.device, target.dtype
    decoder = idle.pop(key, None) or Decoder(*what)
    try:
        decoder.prefill(prompts, max_new_tokens, stream_keys(seed, len(prompts)))
        while True:
            finished = decoder.look()
            yield decoder
            if finished:
                break
            for i in range(1 if every_cycle else decoder.look_every):
                decoder.cycle(looking=i == 0)
    finally:
        idle[key] = decoder
        while sum(each.nbytes for each in idle.values()) > KEPT_BYTES:
            del idle[next(iter(idle))]


# ---- benchmark ---------------------------------------------------------------------------------------------

def benchmark(target, methods, prompts, temperatures=(0.0, 1.0), seed=0, seconds=None, **how):
    """Plain decoding and every other method on the same prompts, one at a time, in turn, in one run.

    methods: {name: keywords of `speculative`, drafter among them}; prompts: {domain: rows of ids}, of which
    as many are decoded as fit into `seconds` (None: all), two a domain at least; how: keywords of all.
    Times are whole calls, prefill included: ms_per_token is the median over calls, speedup the median over
    calls of (plain ms a token / this ms a token). Returns the report's rows.
    """
    methods, began = {"autoregressive": {"drafter": None}, **methods}, time.monotonic()
    first = next(iter(prompts.values()))[0]
    # Warm-up: compilation, allocation, what auto learns.
    for temperature, way in itertools.product(temperatures, [*methods.values()] * 2):
        speculative(target, prompts=[first], temperature=temperature, seed=[seed], **how | way)
    runs, warm = defaultdict(list), time.monotonic()                             # Generations
    with tqdm(total=sum(map(len, prompts.values())), desc="benchmark", unit="prompt") as bar:
        for i in range(max(map(len, prompts.values()))):
            now = time.monotonic()
            if seconds and i >= 2 and now - began + (now - warm) / i > seconds:
                break
            for domain in (domain for domain, rows in prompts.items() if i < len(rows)):
                for temperature, (name, way) in itertools.product(temperatures, methods.items()):
                    runs[temperature, domain, name].append(speculative(
                        target, prompts=[prompts[domain][i]], temperature=temperature, seed=[seed + i],
                        **how | way))
                bar.update()
    domains = {domain: [domain] for domain in prompts} | ({"all": [*prompts]} if len(prompts) > 1 else {})
    rows = []
    for temperature, (domain, parts) in itertools.product(temperatures, domains.items()):
        of_all = {name: sum((runs[temperature, part, name] for part in parts), []) for name in methods}
        rows += [{"domain": domain, "method": name, "temperature": temperature,
                  **summarize(outs, of_all["autoregressive"])} for name, outs in of_all.items()]
    return rows


def summarize(outs, plain):
    """What a report row says of Generations, beside plain decoding's of the same prompts."""
    rows = [out.tokens[0] for out in outs]
    lengths = [n for out in outs for n in out.acceptance_lengths[0]]
    return {"prompts": len(rows), "tokens": sum(map(len, rows)), "tau": statistics.mean(lengths or [1]),
            "ms_per_token": median([out.ms_per_token for out in outs]),
            "speedup": median([base.ms_per_token / out.ms_per_token for base, out in zip(plain, outs)]),
            "draft_ms": median([ms for out in outs for ms in out.draft_ms]),
            "verify_ms": median([ms for out in outs for ms in out.verify_ms]),
            "distinct4": distinct4(rows),
            "identical": statistics.mean(row == base.tokens[0] for row, base in zip(rows, plain)),
            "acceptance_lengths": {n: lengths.count(n) for n in sorted(set(lengths))}}


def cycle_ms(target, drafter, prompt, **sizes):
    """Milliseconds of a cycle's draft and of its verification behind this prompt: medians over the cycles of
    64 tokens."""
    out = speculative(target, drafter, [prompt], 64, **sizes)
    return {"draft_ms": median(out.draft_ms), "verify_ms": median(out.verify_ms)}


def sweep(target, drafter, prompts, **how):
    """What decoding costs as it grows, in milliseconds of one cycle (medians): over the block size, the
    tree's, and the context; and tokens a second over the batch. prompts: rows of ids; their text, repeated,
    makes the longer contexts. Returns {name: rows}."""
    text, longest = sum(prompts, []), target.config.max_position_embeddings - 64
    points = {"block_size": (1, 2, 4, 8, 16, 32),
              "context": sorted({min(2**i, longest) for i in range(6, 13)}),
              "tree_budget": () if drafter.in_turn else (2, 4, 8, 16, 32, 64)}
    found = defaultdict(list)
    for key, n in tqdm([(key, n) for key in points for n in points[key]], "sweep", unit="point"):
        sizes = {"block_size": drafter.config.block_size, "context": 64} | {key: n}
        context = sizes.pop("context")
        prompt = (text * (context // len(text) + 1))[:context]
        row = {**sizes, "context": context, **cycle_ms(target, drafter, prompt, **sizes, **how)}
        for name, config in (("target", target.config), ("drafter", drafter.config.layers)):
            row[f"{name}_cache_bytes"] = KVCache(config, 1, context, "meta", target.dtype).data.nbytes
        found[key].append(row)
    methods = {"autoregressive": {"drafter": None}, "speculative": {"drafter": drafter},
               "auto": {"drafter": drafter, "block_size": "auto"}}
    for batch in tqdm((1, 4, 16, 64), "sweep", unit="batch"):
        rows, each = [prompts[i % len(prompts)] for i in range(batch)], {}
        for name, way in methods.items():
            outs = [speculative(target, prompts=rows, max_new_tokens=64, **way, **how) for _ in range(4)]
            each[name] = 1e3 / median([out.ms_per_token for out in outs[1:]])
        found["batch"].append({"batch": batch, **each})
    return found


def run_benchmark(out, target, drafters, prompts, *, temperatures=(0.0, 1.0), block_size="auto",
                  tree_budget=TREE_BUDGET, sweeping=False, **how):
    """Benchmarks, prints the table, writes out/report.json. drafters: {method: drafter}, each with its chain,
    its tree, and "auto"; the other arguments as for `benchmark` and `generate`."""
    methods = {}
    for name, drafter in drafters.items():
        size, budget = None if block_size == "auto" else block_size, None if drafter.in_turn else tree_budget
        own = {"drafter": drafter, "denoise_steps": 1 if drafter.in_turn else how.get("denoise_steps", 1)}
        methods[name] = {**own, "block_size": size}
        if budget:
            methods[f"{name} tree"] = {**own, "block_size": size, "tree_budget": budget}
        if block_size == "auto":
            methods[f"{name} auto"] = {**own, "block_size": "auto", "tree_budget": budget}
    file = Path(out) / "report.json"
    claims = read_optional(file).get("claims")                                   # measured before, they stay
    results = benchmark(target, methods, prompts, temperatures, **how)
    report = {"device": device_name(target.device), "dtype": str(target.dtype).removeprefix("torch."),
              "torch": torch.__version__, "max_new_tokens": how["max_new_tokens"], "block_size": block_size,
              "tree_budget": tree_budget, "results": results, **({"claims": claims} if claims else {})}
    write_json(file, report)
    print(table(results))
    # Of all domains together.
    for row in (row for row in results if row["domain"] == results[-1]["domain"] and row["draft_ms"]):
        print(f"\n{row['method']}, temperature {row['temperature']:g}: tokens kept a cycle, bonus token too")
        print(bars(row["acceptance_lengths"]))
    if sweeping:
        texts, compile = sum(prompts.values(), []), how.get("compile")
        report["sweep"] = {name: sweep(target, d, texts, compile=compile) for name, d in drafters.items()}
        for name, found in report["sweep"].items():
            print(*(f"\n{name}: {key}\n{table(rows)}" for key, rows in found.items()), sep="\n")
        write_json(file, report)


# ---- command line ------------------------------------------------------------------------------------------

GREEN, BLUE, GREY, PLAIN = "\033[32m", "\033[1;34m", "\033[9;90m", "\033[0m"


def stream(steps, tokenizer, text, stop_ids, show):
    """Prints text, and what `generate` yields of one row. show: accepted drafts in green, the bonus token in
    blue, and of a chain the rejected drafts struck out in grey."""
    began, printed = time.perf_counter(), 0
    to_text = codecs.getincrementaldecoder("utf-8")("replace")     # a character may be spread over two tokens
    for decoder in steps:
        new = decoder.text[0, decoder.prompt_length + printed:decoder.anchor_at + 1].tolist()
        accepted = decoder.history[-1][0] - 1 if decoder.history else 0
        parts = [(GREEN, new[:accepted]), (BLUE, new[accepted:])]
        if show and decoder.history and decoder.sizes[-1] > 1 and not decoder.tree_budget:
            parts.append((GREY, decoder.drafts.tokens[0, accepted + 1:decoder.sizes[-1]].tolist()))
        print("" if printed else text, end="")
        for colour, tokens in parts:
            data = tokenizer.decode_bytes([t for t in tokens if t not in stop_ids])
            piece = repr(data.decode("utf-8", "replace"))[1:-1] if colour == GREY else to_text.decode(data)
            print(f"{colour}{piece}{PLAIN}" if show and piece else piece, end="", flush=True)
        printed += len(new)
    print(to_text.decode(b"", final=True))
    seconds, lengths = time.perf_counter() - began, [n for (n,) in decoder.history if n]
    tau = f", tau {statistics.mean(lengths):.2f}" if decoder.drafter and lengths else ""
    print(f"[{printed} tokens in {seconds:.2f} s, {printed / seconds:.0f} a second{tau}]", file=sys.stderr)


def parser():
    p = Parser(description="Decode with a target and its DFlash drafter, or benchmark them.")
    add = p.add_argument
    add("--out", default="out", help="what train.py left: target/, drafter/, heldout.jsonl (default: out)")
    add("--target", help="folder of the target, instead of OUT/target")
    add("--drafter", nargs="+", metavar="DIR", help="folders (default: OUT's); of several --bench takes all")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--bench", action="store_true", help="on held-out prompts; writes OUT/report.json")
    add("--sweep", action="store_true", help="--bench: also over sizes of block, tree, context and batch")
    add("--chat", action="store_true", help="--prompt is a user's message, for the chat template")
    add("--chat-options", nargs="+", metavar="KEY=VALUE", help="keywords of the chat template, as "
        "enable_thinking=false (default: what the drafter was trained with)")
    add("--rendered", action="store_true", help="prompts are rendered: special tokens count as such")
    add("--data", metavar="FILE", help="--bench: a text, .jsonl or .json file (default: OUT/heldout.jsonl)")
    add("--skip-bad", action="store_true", help="--bench: go on without prompts that can't be used")
    add("--show", action="store_true", help="in colours: accepted drafts, bonus tokens, rejected drafts")
    add("--plain", action="store_true", help="decode without the drafter")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 0; --bench: 0 and 1)")
    add("--top-k", type=int, metavar="K", help="0: all (default: what the target recommends)")
    add("--top-p", type=float, metavar="P", help="1: all (default: what the target recommends)")
    add("--block-size", type=size_or_auto, metavar="B", help="tokens of a block; auto: how many drafts are "
        "read is chosen each cycle (the default; --show: the drafter's own block, as a chain)")
    add("--tree-budget", type=int, metavar="N", help="tokens that the target reads a cycle, as a tree of "
        f"the likeliest drafts; 0: a chain (default: {TREE_BUDGET})")
    add("--denoise-steps", type=COUNT, default=1, metavar="N", help="passes over a block (default: 1)")
    add("--max-new-tokens", type=COUNT, default=192, metavar="N", help="of each prompt (default: 192)")
    add("--prompts", type=COUNT, default=8, metavar="N", help="--bench: prompts a domain (default: 8)")
    add("--prompt-tokens", type=COUNT, default=64, metavar="N", help="--bench: tokens a prompt (default: 64)")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of the sampling (default: 0)")
    add("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: the files' own")
    add("--compile", action=argparse.BooleanOptionalAction, help="a cycle's steps as CUDA graphs (there the "
        "default), on the CPU as compiled code (a minute's wait the first time)")
    return p


def size_or_auto(text):
    return text if text == "auto" else int(text)


def main(argv=None):
    args = parser().parse_args(argv)
    out, folder = Path(args.out), args.target or Path(args.out) / "target"
    target = Transformer.from_pretrained(
        folder, device=find_device(args.device), dtype=DTYPES.get(args.dtype))
    tokenizer = Tokenizer.from_pretrained(folder)
    folders = (args.drafter or drafter_folders(out))[:None if args.bench else 1]
    drafters = {} if args.plain else load_drafters(folders, target)
    drafter = next(iter(drafters.values()), None)
    default = (0.0, 1.0) if args.bench else (0.0,)
    temperatures = default if args.temperature is None else (args.temperature,)
    tokenizer.chat_options = (remembered_options(folders[0]) if args.chat_options is None else
                              parse_options(args.chat_options))
    chain = args.show or drafter and drafter.in_turn and not args.bench          # unless flags say otherwise
    budget = (0 if chain else TREE_BUDGET) if args.tree_budget is None else args.tree_budget
    block_size = (None if args.show else "auto") if args.block_size is None else args.block_size
    how = {"block_size": block_size, "tree_budget": budget or None,
           "max_new_tokens": args.max_new_tokens, "stop_ids": tokenizer.eos_ids,
           "denoise_steps": args.denoise_steps, "seed": args.seed, "compile": args.compile,
           **choose_sampling(folder, temperatures, args.top_k, args.top_p)}
    if args.bench:
        prompts = read_prompts(args.data or out / "heldout.jsonl", tokenizer, args.prompt_tokens,
                               args.prompts, rendered=args.rendered, skip_bad=args.skip_bad)
        run_benchmark(out, target, drafters, prompts, temperatures=temperatures, sweeping=args.sweep, **how)
        return
    entry = {"messages": [{"role": "user", "content": args.prompt}]} if args.chat else {"prompt": args.prompt}
    prompt = encode_prompt(entry, tokenizer, None, args.rendered)
    steps = generate(target, drafter, [prompt], temperature=temperatures[0], every_cycle=args.show, **how)
    stream(steps, tokenizer, "" if args.chat else args.prompt, how["stop_ids"], args.show)


if __name__ == "__main__":
    run_command(main)
