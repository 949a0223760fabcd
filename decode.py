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
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from drafter import DFlashDrafter
from model import DTYPES, KVCache, Tokenizer, Transformer, UserError, write_json

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
        end = None if device.type == "cuda" else int(length.max()) + block
        if watch:
            watch.mark()
        if block > 1:
            # Draft. Only accepted tokens' features enter the drafter's context.
            if device.type != "cuda":
                features = features[:, :int(count.max())]
            offset = torch.arange(features.shape[1], device=device)
            places = torch.where(offset < count[:, None], start[:, None] + offset, -1)
            q = drafter.draft(target, anchor, length, features, places, drafter_cache, block, end)  # (B, block - 1, V)
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
                              ("block_size", block_size, block_size is None or 1 <= block_size <= limit)):
        if not good:
            raise UserError(f"{name} = {value} is out of range")


def speculative(target, drafter, prompts, max_new_tokens, *, block_size=None, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None):
    """Decodes prompts (one list of token ids a row, of any lengths) with drafter and target. The output is the target's own: token for
    token at temperature 0 (in float32; lower precision may break a tie otherwise), in distribution above. block_size None: the drafter's.

    seed: an int (row i draws from the stream of (seed, i)), one int a row, or None. Returns a Generation; UserError for bad input.
    """
    watch, stop_ids = Stopwatch(target.device), set(stop_ids)
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
    rows = [cut(row[:max_new_tokens], stop_ids) for row in rows]
    spans = watch.spans()
    return Generation(rows, lengths, spans[0::2] if drafter is not None else [], spans[1::2])


def autoregressive(target, prompts, max_new_tokens, *, temperature=0.0, top_k=None, top_p=None, stop_ids=(), seed=None):
    """Plain decoding of the same prompts, a token a cycle; arguments and result as for `speculative`."""
    return speculative(target, None, prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=stop_ids, seed=seed)


def cut(row, stop_ids):
    """The row up to and including its first stop token."""
    return row[:next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))]


# ---- benchmark -----------------------------------------------------------------------------------------------------------------

def distinct4(rows):
    """Share of distinct 4-grams within each row, over all rows: 1 where nothing repeats, near 0 where text runs in a loop."""
    grams = [[tuple(row[i:i + 4]) for i in range(len(row) - 3)] for row in rows]
    total = sum(map(len, grams))
    return sum(len(set(row)) for row in grams) / total if total else 1.0


def benchmark(target, drafters, prompts, max_new_tokens, temperatures=(0.0, 1.0), stop_ids=(), seed=0, progress=None, **how):
    """Plain decoding and every drafter on the same prompts, one at a time, in turn, in one run.

    drafters: {method name: drafter}; prompts: {domain: rows of ids}; how: block_size, top_k, top_p. Times are whole calls, prefill included: ms_per_token is the
    median over prompts, speedup the median over prompts of (plain ms a token / this ms a token). Returns report rows and the histograms
    of acceptance lengths {(method, temperature): Counter}.
    """
    results, histograms = [], {}
    methods = {"autoregressive": None, **drafters}
    for drafter in methods.values():                                             # warm-up: compilation, allocation, threads
        speculative(target, drafter, [next(iter(prompts.values()))[0]], min(24, max_new_tokens), **how)
    median = lambda values: statistics.median(values) if values else None
    for temperature in temperatures:
        runs = {(domain, method): [] for domain in prompts for method in methods}   # (ms a token, Generation) for each prompt
        for domain, rows in prompts.items():
            for i, prompt in enumerate(rows):
                for method, drafter in methods.items():
                    began = time.perf_counter()
                    out = speculative(target, drafter, [prompt], max_new_tokens, temperature=temperature, stop_ids=stop_ids, seed=[seed + i], **how)
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
                    "domain": domain, "method": method, "temperature": temperature, "prompts": len(run), "tokens": sum(map(len, tokens)),
                    "tau": sum(n * times for n, times in lengths.items()) / max(1, lengths.total()),
                    "ms_per_token": median([ms for ms, _ in run]),
                    "speedup": median([plain / ms for (plain, _), (ms, _) in zip(pooled["autoregressive"], run)]),
                    "draft_ms": median([ms for _, out in run for ms in out.draft_ms]),
                    "verify_ms": median([ms for _, out in run for ms in out.verify_ms]),
                    "distinct4": distinct4(tokens),
                    "identical": statistics.mean(row == out.tokens[0] for row, (_, out) in zip(tokens, pooled["autoregressive"])) if temperature == 0 else None,
                })
    return results, histograms


def show_report(results, histograms, block_size):
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
            for n in range(1, block_size + 1):
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


def stream(target, drafter, tokenizer, text, prompt, max_new_tokens, stop_ids, show, **how):
    """Prints text, and what follows the prompt's ids as it is decoded. show: accepted drafts in green, the bonus token in blue, the rejected rest struck out in grey."""
    began, made, taken = time.perf_counter(), 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")                    # a character may be spread over two tokens
    for drafts, accepted, bonus, done in cycles(target, drafter, [prompt], max_new_tokens, stop_ids=stop_ids, **how):
        if bool(done):
            break
        if taken == 0:
            print(text, end="")
        drafts, accepted, bonus = drafts[0].tolist(), int(accepted), int(bonus)
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
    p.add_argument("--drafter", help="folder of the drafter, instead of OUT/drafter")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--bench", action="store_true", help="measure plain decoding and the drafter on held-out prompts; writes OUT/report.json")
    p.add_argument("--chat", action="store_true", help="--prompt is a user's message: render it with the target's chat template")
    p.add_argument("--data", metavar="FILE", help="--bench: prompts from a text or .jsonl file (default: OUT/heldout.jsonl)")
    p.add_argument("--show", action="store_true", help="colour the text: accepted drafts, bonus tokens, rejected drafts")
    p.add_argument("--plain", action="store_true", help="decode without the drafter")
    p.add_argument("--max-new-tokens", type=int, default=192, metavar="N")
    p.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0; --bench: 0 and 1)")
    p.add_argument("--top-k", type=int, metavar="K")
    p.add_argument("--top-p", type=float, metavar="P")
    p.add_argument("--block-size", type=int, metavar="B", help="tokens verified at once (default: the drafter's)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prompts", type=int, default=10, metavar="N", help="--bench: prompts a domain")
    p.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="--bench: tokens a prompt")
    p.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the files' own")
    return p


def run_benchmark(out, target, drafters, tokenizer, prompts_file, *, prompts, prompt_tokens, max_new_tokens, temperatures=(0.0, 1.0),
                  block_size=None, seed=0, **how):
    """Benchmarks, prints the table, writes out/report.json."""
    Path(out).mkdir(parents=True, exist_ok=True)
    rows = read_prompts(prompts_file, tokenizer, prompt_tokens, prompts)
    with tqdm(total=len(temperatures) * sum(map(len, rows.values())), desc="benchmark", unit="prompt") as bar:
        def progress(what):
            bar.set_postfix_str(what, refresh=False)
            bar.update()
        results, histograms = benchmark(target, drafters, rows, max_new_tokens, temperatures, stop_ids=stop_tokens(target, tokenizer), seed=seed,
                                        progress=progress, block_size=block_size, **how)
    size = block_size or max((drafter.config.block_size for drafter in drafters.values()), default=1)
    print(show_report(results, histograms, size))
    write_json(Path(out) / "report.json", {
        "device": device_name(target.device), "dtype": str(target.dtype).removeprefix("torch."), "torch": torch.__version__,
        "max_new_tokens": max_new_tokens, "block_size": size, "results": results,
        "acceptance_lengths": {f"{method} T={temperature:g}": {str(n): counts[n] for n in sorted(counts)} for (method, temperature), counts in histograms.items()}})


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
    drafter = None if args.plain else DFlashDrafter.from_pretrained(args.drafter or Path(args.out) / "drafter", target)
    how = dict(block_size=args.block_size, seed=args.seed, top_k=args.top_k, top_p=args.top_p)
    if args.bench:
        run_benchmark(args.out, target, {} if drafter is None else {"dflash": drafter}, tokenizer, args.data or Path(args.out) / "heldout.jsonl", prompts=args.prompts,
                      prompt_tokens=args.prompt_tokens, max_new_tokens=args.max_new_tokens,
                      temperatures=(0.0, 1.0) if args.temperature is None else (args.temperature,), **how)
    else:
        text = args.prompt.encode("utf-8", "replace").decode()
        entry = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
        stream(target, drafter, tokenizer, "" if args.chat else text, encode_prompt(entry, tokenizer, None), args.max_new_tokens, stop_tokens(target, tokenizer), args.show,
               temperature=args.temperature or 0.0, **how)


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
