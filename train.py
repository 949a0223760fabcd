"""From nothing to a target, its DFlash drafter and a measured benchmark:

    python train.py                          the type stubs of torch and numpy as text, a preset for the machine at hand
    python train.py --data notes/ book.txt   your own text
    torchrun --nproc_per_node=4 train.py     on four devices

Stages, each skipped when its result is already in --out: corpus, tokenizer, target, responses (the target's own continuations of
training prefixes), drafter, benchmark. A killed run goes on with --resume and ends with the same weights, bit for bit: everything
random is a function of the seed and the step.
"""
import argparse
import copy
import datetime
import hashlib
import heapq
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regex
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from decode import autoregressive, benchmark, cycle_ms, idle, run_benchmark
from drafter import DRAFTERS, default_taps, pick_mask_token, sample_anchors
from kernels import allow_recompiling, has_compiler
from model import (CODE_PATTERN, MLP, DecoderLayer, ModelConfig, RMSNorm, Tokenizer, Transformer, UserError, atomic_write, choose_sampling,
                   encode_entries, find_device, parse_options, read_entries, read_json, read_prompts, read_text, run_command, stop_tokens, write_json)

MASK_TOKEN = "<|mask|>"
END_TOKEN = "<|endoftext|>"
KEEP = 2**32    # bytes of the target's features that the drafter's training holds in memory; more are computed anew at each step


# ---- corpus: definitions of source files, paragraphs of other text ----------------------------------------------------------------

class Document(NamedTuple):
    domain: str
    text: str


PIECE = 4000      # characters: larger classes are cut at their methods, larger texts at blank lines
DOCUMENT = 3000   # characters: pieces of one file that follow each other are gathered into documents of about this size
SHINGLE = 50      # characters: the unit in which the overlap of two texts is counted


def cut_text(text, size):
    """Pieces of at most about `size` characters, cut at blank lines; a longer paragraph is cut at lines, a longer line by length."""
    parts = [""]
    for paragraph in re.split(r"(?<=\n)(?=[ \t]*\n)", text):
        for piece in re.findall(rf"[^\n]{{1,{size}}}\n?|\n", paragraph) if len(paragraph) > size else [paragraph]:
            if parts[-1] and len(parts[-1]) + len(piece) > size:
                parts.append("")
            parts[-1] += piece
    return parts


def statements(text, indent):
    """Cuts Python text into (name, statement) at this indentation. Overloads of one name are one statement; what is neither def nor class
    has the name "" and is gathered. Decorators and comments go with what follows. It scans lines, for stubs need not parse."""
    found, pending, quote = [["", ""]], "", None
    for line in text.splitlines(True):
        body = line.strip()
        starts = (body and not quote and len(line) - len(line.lstrip()) <= indent and not re.match(r"[)\]}]|(else|elif|except|finally)\b", body))
        for mark in re.findall(r'"""|\'\'\'', "" if body[:1] == "#" and not quote else line):
            quote = mark if quote is None else None if quote == mark else quote
        if starts and body[0] not in "@#":
            name = (re.findall(r"^(?:async )?(?:def|class) +(\w+)", body) or [""])[0]
            if name != found[-1][0] or not name and len(found[-1][1]) > DOCUMENT / 2:
                found.append([name, ""])
            found[-1][1] += pending + line
            pending = ""
        elif starts or pending and (not body or re.search(r"^\s*@", pending, re.M)):
            pending += line
        else:                                                                    # the inside of the current statement
            found[-1][1] += pending + line
            pending = ""
    found[-1][1] += pending
    return found


def cut_python(text, indent=0):
    """One piece for each function with its overloads, and each class or, where it is large, each of its methods; the rest in groups."""
    for name, part in statements(text, indent):
        head = re.search(r"^class [^:]*?:[^\n]*\n", part, re.M) if indent == 0 and len(part) > PIECE else None
        inner = head and re.search(r"^( +)\S", part[head.end():], re.M)
        if inner:
            yield part[:head.end()]
            yield from cut_python(part[head.end():], len(inner[1]))
        else:
            yield from cut_text(part, 4 * PIECE if name else PIECE)


def default_corpus(preset):
    """(folders, suffixes) of text that is on every machine: the type stubs of torch and numpy, about 4 MB; for a GPU the sources of both
    and of the standard library as well, about 90 MB."""
    folders = [Path(importlib.util.find_spec(name).origin).parent for name in ("torch", "numpy")]    # find_spec does not import them
    return (folders, (".pyi",)) if preset == "cpu" else ([*folders, sysconfig.get_paths()["stdlib"]], (".py", ".pyi"))


def find_texts(paths, suffixes, entries=None):
    """(path, text) of every file to read, in an order that is the same on every machine. entries: a list that takes the rows of .jsonl
    files, and of .json files given by name; None: of .jsonl files only rows of text can be read."""
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; --data takes text files and folders")
        names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
        names = [n for n in names if not re.search(r"(^|/)(\.|site-packages/)", n) and n.endswith(tuple(suffixes or [""]))]
        files = [path] if path.is_file() else [path / n for n in names]
        tables = [p for p in files if p.suffix == ".jsonl" or entries is not None and p == path and p.suffix == ".json"]
        rows = [row for p in tables for row in read_entries(p)]
        texts = [(p, text) for p in files if p not in tables for text in texts_of(p)]
        if entries is not None:
            entries += rows
        elif not all("text" in row for row in rows):
            raise UserError(f"{path}: holds chats or prompts in {tables[0].name}, not text; to train a drafter on them give its --target")
        else:
            texts += [(path, row["text"]) for row in rows]
        if not texts and not rows:
            raise UserError(f"{path}: holds no {' or '.join(suffixes or ('UTF-8',))} text; give files or folders with some")
        yield from texts


def texts_of(path):
    """A file's text, if it is UTF-8 and not empty, else nothing."""
    try:
        text = read_text(path)
    except UserError:
        return []
    return [text] if text.strip() and "\0" not in text else []


def read_corpus(paths, suffixes=None, entries=None):
    """Documents in a fixed order, without repetitions: of pieces that differ in white space alone, the first stays."""
    documents, seen = [], {""}
    for path, text in find_texts(paths, suffixes, entries):
        python, tests = path.suffix in (".py", ".pyi"), "numpy/typing/tests" in path.as_posix()
        last = None
        for piece in cut_python(text) if python else cut_text(text, DOCUMENT):
            key = "".join(piece.split())
            if key in seen:
                continue
            seen.add(key)
            domain = ("text" if not python else "type tests" if tests else "documentation" if '"""' in piece else
                      "signatures" if path.suffix == ".pyi" else "code")
            piece = piece.strip("\n") + "\n"
            if last == domain and len(documents[-1].text) + len(piece) < DOCUMENT:
                documents[-1] = Document(domain, documents[-1].text + piece)
            else:
                documents.append(Document(domain, piece))
            last = domain
    if not documents and not entries:
        raise UserError("the corpus is empty; --data takes UTF-8 text files and folders")
    return documents


def hold_out(items, text_of, seed, fraction=0.04):
    """(training, held-out) items: held out are the ones whose text has the smallest hashes, at least one."""
    ranked = sorted(items, key=lambda item: fingerprint([str(seed), text_of(item)]))
    heldout = set(map(text_of, ranked[:math.ceil(fraction * len(items))]))
    return [item for item in items if text_of(item) not in heldout], [item for item in items if text_of(item) in heldout]


def fingerprint(texts):
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]


def split(documents, seed, most=0.5):
    """(training, held-out) documents. A held-out document of which more than `most` stands in the training text as well, counted in
    shingles, is dropped from both: it would flatter the results."""
    training, heldout = hold_out(documents, lambda d: d.text, seed)

    def shingles(text):
        text = " ".join(text.split())
        return (text[i:i + SHINGLE] for i in range(len(text) - SHINGLE + 1))
    own = [set(shingles(d.text)) for d in heldout]
    wanted = set().union(*own)                                                   # small, unlike the set of all training shingles
    known = {s for d in training for s in shingles(d.text) if s in wanted}
    return training, [d for d, s in zip(heldout, own) if s and len(s & known) <= most * len(s)]


# ---- BPE -------------------------------------------------------------------------------------------------------------------------

SHIFT = 32  # a pair of symbols (a, b) is kept as the one integer a << SHIFT | b


def train_bpe(text_chunks, vocab_size, pattern):
    """Learn byte-level merges: [(left bytes, right bytes), ...] in order, at most vocab_size - 256.

    text_chunks: list of str; pattern: a regex without capturing groups whose matches are the words
    that no merge crosses. Each step merges the most frequent pair; on a tie, the pair whose left
    part (then right part) was made earlier, bytes counting as made in byte order. Stops early when
    no word has two symbols left. UserError if vocab_size < 256.
    """
    if vocab_size < 256:
        raise UserError(f"vocab_size = {vocab_size + 2} is too small: 256 bytes and 2 special tokens need a place")
    words, find = Counter(), regex.compile(pattern).finditer
    for chunk in text_chunks:
        words.update(m[0] for m in find(chunk))  # finditer: a list of all words would be huge

    # All unique words end to end, as a linked list of symbols; -1 marks word ends and dead places.
    raw = [w.encode("utf-8", "replace") for w in words]
    size = np.array([len(w) + 1 for w in raw], dtype=np.int64)
    sym = np.full(1 + int(size.sum()), -1, dtype=np.int64)
    weight = np.zeros(len(sym), dtype=np.int64)
    weight[1:] = np.repeat(np.fromiter(words.values(), np.int64, len(words)), size)
    inside = np.ones(len(sym), dtype=bool)
    inside[0] = inside[np.cumsum(size)] = False
    sym[inside] = np.frombuffer(b"".join(raw), dtype=np.uint8)
    prv, nxt = np.arange(-1, len(sym) - 1), np.arange(1, len(sym) + 1)

    def pairs(at):
        """Group the places `at` (sorted) by the pair that starts there: yields (pair, count, places)."""
        at = at[sym[at] >= 0]
        at = at[sym[nxt[at]] >= 0]
        key = sym[at] << SHIFT | sym[nxt[at]]
        order = np.argsort(key, kind="stable")  # stable keeps each group's places sorted
        key, at = key[order], at[order]
        start = np.flatnonzero(np.diff(key, prepend=-1))
        total = np.add.reduceat(weight[at], start) if len(at) else start
        return zip(key[start].tolist(), total.tolist(), np.split(at, start[1:]))

    count, places = {}, {}
    for k, n, at in pairs(np.arange(len(sym))):
        count[k], places[k] = n, at
    # A pair's count only falls after its birth (a new pair holds a new symbol), so a heap entry is
    # never too low: an entry that is out of date goes back with the true count.
    heap = [(-n, k) for k, n in count.items()]
    heapq.heapify(heap)
    vocab, merges = [bytes([i]) for i in range(256)], []
    for new in range(256, vocab_size):
        while heap and -heap[0][0] != count[heap[0][1]]:
            k = heapq.heappop(heap)[1]
            if count[k]:
                heapq.heappush(heap, (-count[k], k))
        if not heap:
            break
        k = heapq.heappop(heap)[1]
        a, b = k >> SHIFT, k & (1 << SHIFT) - 1
        at = places.pop(k)
        at = at[(sym[at] == a) & (sym[nxt[at]] == b)]  # some places went to other merges since
        if a == b:  # in a run a a a the pairs overlap: take every second one, from the left
            i = np.arange(len(at))
            first = np.r_[True, nxt[at[:-1]] != at[1:]]
            at = at[(i - np.maximum.accumulate(np.where(first, i, 0))) % 2 == 0]
        for k, n, _ in pairs(np.unique(np.concatenate([prv[at], at, nxt[at]]))):
            count[k] -= n
        dead = nxt[at]
        sym[at], sym[dead] = new, -1
        nxt[at] = nxt[dead]
        prv[nxt[at]] = at
        for k, n, where in pairs(np.unique(np.concatenate([prv[at], at]))):
            count[k], places[k] = n, where
            heapq.heappush(heap, (-n, k))
        merges.append((vocab[a], vocab[b]))
        vocab.append(vocab[a] + vocab[b])
    return merges

# ---- processes, settings, checkpoints --------------------------------------------------------------------------------------------

class Run:
    """Where and how this process runs: device, rank, output folder, and what has been decided and written so far."""

    def __init__(self, args):
        self.out, self.resume, self.checkpoint_seconds = Path(args.out), args.resume, args.checkpoint_seconds
        self.kept = {}                                                           # what the target makes of the responses, for each set of taps: see `train_drafter`
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = args.device
        cuda = self.device.type == "cuda"
        if cuda and self.world > 1:
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise UserError(f"process {local} of torchrun has no GPU of its own: ask for at most {torch.cuda.device_count()} processes")
            self.device = torch.device("cuda", local)
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=1))    # one may work for long while others wait
        self.out.mkdir(parents=True, exist_ok=True)
        # Matrix products in bfloat16 where the hardware has them, master weights in float32.
        self.bfloat16 = not args.float32 and (cuda or has_bfloat16())
        # A training step in plain eager PyTorch takes twice as long on either; compiling needs a C++ compiler on the CPU.
        self.compile = args.compile and (cuda or has_compiler())
        if args.compile and not self.compile:
            print("no C++ compiler found: training runs uncompiled and takes about twice as long", file=sys.stderr)

    @property
    def main(self):
        return self.rank == 0

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def sum(self, tensor):
        """The sum over processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self):
        if self.world > 1:
            dist.barrier()

    def log(self, **entry):
        if self.main:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def forget(self, stage, step):
        """Drops the log's lines after the checkpoint that a resumed run starts from: it writes them again."""
        file = self.out / "log.jsonl"
        if self.main and file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            after = re.compile(rf'{{"stage": "{stage}", "step": (\d+),')
            kept = [line for line in lines if line.endswith("\n") and not ((m := after.match(line)) and int(m[1]) > step)]
            atomic_write(file, lambda name: Path(name).write_text("".join(kept), encoding="utf-8"))

    def bar(self, total, name, unit="step", initial=0):
        return tqdm(total=total, desc=name, unit=unit, initial=initial, disable=not self.main, dynamic_ncols=True)

    def decide(self, name, value):
        """A number that depends on this machine's speed, decided once a run and written down, so that a resumed run uses the same."""
        file = self.out / "plan.json"
        plan = read_json(file) if file.exists() else {}
        if name not in plan:
            decided = self.sum(torch.tensor(float(value()) if self.main else 0.0, dtype=torch.float64, device=self.device))
            plan[name] = int(decided.item())
            if self.main:
                write_json(file, plan)
            self.wait()
        return plan[name]


def has_bfloat16():
    """Does this CPU multiply bfloat16 natively? Elsewhere emulation makes it slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def finished(run, stage, settings):
    """Is the stage's result in --out, made with these settings? Refuses a result, or an interrupted one, made with others."""
    file = run.out / f"{stage}.settings.json"
    made = read_json(file) if file.exists() else None
    if made is not None and not (isinstance(made.get("settings"), dict) and isinstance(made.get("done"), bool)):
        raise UserError(f"{file}: damaged; delete it to start this stage again")
    run.wait()                                                                   # all have looked before anyone writes
    if made is None:
        return False
    for name in sorted(settings.keys() | made["settings"].keys()):
        old, new = made["settings"].get(name), settings.get(name)
        if old != new:
            raise UserError(f"{run.out} holds a {stage} made with {name} = {old}, not {new}; "
                            "use the same settings, another --out, or delete the folder")
    if not made["done"] and not run.resume:
        raise UserError(f"{run.out} holds an interrupted run (stage {stage}); go on with --resume, use another --out, or delete the folder")
    if made["done"] and run.main:
        print(f"{stage}: already in {run.out}, skipped")
    return made["done"]


def mark(run, stage, settings, done):
    if run.main:
        write_json(run.out / f"{stage}.settings.json", {"done": done, "settings": settings})


def save_checkpoint(file, module, optimizers, step):
    """Model, optimizers and step in one safetensors file. The random state is the step: see `generator`."""
    tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
    for i, (optimizer, _) in enumerate(optimizers):
        for j, p in enumerate(optimizer.param_groups[0]["params"]):
            tensors |= {f"optimizer.{i}.{j}.{key}": value for key, value in optimizer.state[p].items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    atomic_write(file, lambda name: save_file(tensors, name, metadata={"step": str(step)}))


def load_checkpoint(file, module, optimizers):
    """Returns the number of steps done."""
    try:
        with safe_open(file, framework="pt") as tensors:
            with torch.no_grad():
                for name, p in module.named_parameters():
                    p.copy_(tensors.get_tensor(f"model.{name}"))
            for key in tensors.keys():
                if key.startswith("optimizer."):
                    _, i, j, name = key.split(".")
                    optimizer, _ = optimizers[int(i)]
                    p = optimizer.param_groups[0]["params"][int(j)]
                    value = tensors.get_tensor(key)
                    optimizer.state[p][name] = value.to(p.device, copy=True)
            return int(tensors.metadata()["step"])
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{file}: damaged checkpoint ({error}); delete it to start this stage again") from None


def generator(seed, *index):
    """A stream of random numbers for this seed and place (stage, step, ...): no state to save, none to restore."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *index)).generate_state(1, np.uint64)[0] >> 1))


# ---- training: one loop for the target and the drafter -----------------------------------------------------------------------------

def build_optimizers(module, lr):
    """[(optimizer, its learning rate)]: Muon (orthogonalized momentum, Jordan 2024) for the layers' matrices, AdamW for embeddings, head,
    norms and biases; AdamW for all where Muon's rate is None."""
    muon_lr, adamw_lr = lr
    named = list(module.named_parameters())
    matrices = [p for name, p in named if muon_lr is not None and p.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name]
    others = [p for _, p in named if not any(p is m for m in matrices)]
    optimizers = [(torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True), adamw_lr)]
    if matrices:
        optimizers.append((torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0, adjust_lr_fn="original"), muon_lr))
    return optimizers


def learning_rate_factor(step, steps, muon):
    """Linear warm-up over 4%, then with Muon constant and a linear decay over the last 60%, with AdamW alone the paper's cosine."""
    warm = (step + 1) / max(1.0, 0.04 * steps)
    return min(warm, 1.0, (steps - step) / (0.6 * steps) if muon else 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(run, stage, module, batch_loss, settings, *, steps, minutes, lr, tokens_a_step, evaluate=None):
    """Trains `module` in place.

    batch_loss(step) -> (loss sum, weight sum) of this process's share of the step's batch; steps: fixed, or None: as many as fit into
    `minutes`, measured here first. Writes a checkpoint every --checkpoint-seconds; starts from the one that is there.
    """
    checkpoint = run.out / f"{stage}.checkpoint.safetensors"
    optimizers = build_optimizers(module, lr)
    parameters = list(module.parameters())
    module.train()
    if run.compile:                                                              # the layers share one compiled function, where the whole model takes a minute
        allow_recompiling()
        parts = (RMSNorm, MLP) if stage == "eagle3" else DecoderLayer                   # EAGLE-3 calls its layer's parts, many times a step
        for part in filter(lambda m: isinstance(m, parts), module.modules()):
            part.compile()

    def one_step(step, factor):
        loss, weight = batch_loss(step)
        total = run.sum(weight.detach().clone()).clamp(min=1e-6)
        (loss / total).backward()
        if run.world > 1:
            flat = torch.cat([p.grad.flatten() for p in parameters])
            for p, grad in zip(parameters, run.sum(flat).split([p.numel() for p in parameters])):
                p.grad.copy_(grad.view_as(p))
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, base in optimizers:
            optimizer.param_groups[0]["lr"] = base * factor
            optimizer.step()
            optimizer.zero_grad()
        return torch.where(norm.isfinite(), run.sum(loss.detach().clone()) / total, math.nan)    # a step with such gradients has spoiled the weights

    def measured_steps():
        """A few real steps at learning rate zero, for their time; what they leave in the optimizers is dropped."""
        if run.main:
            print(f"{stage}: compiling and timing a step, about half a minute ...", flush=True)
        times = []
        for step in range(8):
            began = time.perf_counter()
            one_step(step, 0.0).item()
            times.append(time.perf_counter() - began)
        return max(20, 60 * minutes / statistics.median(times[2:]))

    mark(run, stage, settings, done=False)
    if steps is None:
        plan = run.out / "plan.json"
        if not (plan.exists() and stage in read_json(plan)):
            wanted = measured_steps()
            for optimizer, _ in optimizers:
                optimizer.state.clear()
        steps = run.decide(stage, lambda: wanted)
    start = load_checkpoint(checkpoint, module, optimizers) if checkpoint.exists() else 0
    run.forget(stage, start)
    saved, began, losses = time.monotonic(), time.monotonic(), []
    with run.bar(steps, stage, initial=start) as bar:
        for step in range(start, steps):
            losses.append(one_step(step, learning_rate_factor(step, steps, muon=len(optimizers) > 1)))
            bar.update()
            last = step + 1 == steps
            # One process's clock decides when all look; the loss is looked at before every checkpoint, so none holds a NaN.
            if last or (step + 1) % 10 == 0:
                loss = torch.stack(losses).mean().item()
                losses = []
                rate = (step + 1 - start) * tokens_a_step / (time.monotonic() - began)
                if not math.isfinite(loss):
                    raise UserError(f"the {stage}'s loss is {loss} at step {step + 1}; no checkpoint holds it: lower --{'target' if stage == 'target' else 'drafter'}-lr and use another --out")
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
                entry = {"stage": stage, "step": step + 1, "loss": loss, "tokens_per_second": rate}
                if evaluate and (last or (step + 1) % max(10, steps // 5 // 10 * 10) == 0):
                    module.eval()
                    entry |= evaluate()
                    module.train()
                run.log(**entry)
                if run.main and time.monotonic() - saved >= run.checkpoint_seconds and not last:
                    save_checkpoint(checkpoint, module, optimizers, step + 1)
                    saved = time.monotonic()


def finish(run, stage, settings):
    """Marks the stage as done, then drops its checkpoint."""
    mark(run, stage, settings, done=True)
    if run.main:
        (run.out / f"{stage}.checkpoint.safetensors").unlink(missing_ok=True)
    run.wait()


# ---- the stages ----------------------------------------------------------------------------------------------------------------

def make_text(run, args):
    """Corpus and tokenizer -> (Tokenizer, training ids (N,), held-out ids, settings), written as target/tokenizer.json and heldout.jsonl."""
    training, heldout = split(read_corpus(*((args.data, args.suffixes) if args.data else default_corpus(args.preset))), args.seed)
    settings = {"seed": args.seed, "corpus": fingerprint([d.text for d in training]), "vocab_size": args.vocab_size}
    folder = run.out / "target"
    done = finished(run, "tokenizer", settings)
    if done:
        tokenizer = Tokenizer.from_pretrained(folder)
    else:
        tokenizer = Tokenizer.from_merges(train_bpe([d.text for d in training], args.vocab_size - 2, CODE_PATTERN), [END_TOKEN, MASK_TOKEN])
    rows = [[[tokenizer.eos_id, *tokenizer.encode(d.text)] for d in part] for part in (training, heldout)]
    ids = [torch.tensor([i for row in part for i in row]) for part in rows]
    if len(ids[0]) < max(2 * args.sequence_length, args.prompt_tokens + 2):
        raise UserError(f"the text has {len(ids[0])} tokens beside what is held out, too few for sequences of {args.sequence_length}; give more --data or a smaller --sequence-length")
    if not any(len(row) > args.prompt_tokens for row in rows[1]):
        raise UserError(f"no held-out document has {args.prompt_tokens} tokens for a prompt; give more --data or a smaller --prompt-tokens")
    if not done:
        if run.main:
            tokenizer.save_pretrained(folder)
            write_lines(run.out / "heldout.jsonl", [d._asdict() for d in heldout])
            print(f"tokenizer: {tokenizer.vocab_size} tokens from {len(training)} documents; {len(heldout)} documents held out")
        finish(run, "tokenizer", settings)
    return tokenizer, *ids, settings


def write_lines(path, entries):
    atomic_write(path, lambda name: Path(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8"))


def epoch_places(step, batch, rows):
    """(epoch, place in it) of each row of a step's batch, with `rows` rows an epoch; and the epochs among them."""
    places = [divmod(i, rows) for i in range(step * batch, (step + 1) * batch)]
    return places, {epoch for epoch, _ in places}


def window_batch(ids, length, batch, seed, stage_id, step):
    """Rows of `length` + 1 consecutive tokens: epoch by epoch, each time cut at another offset and in another order. (batch, length + 1)"""
    windows = max(1, (len(ids) - 1) // length - 1)
    places, epochs = epoch_places(step, batch, windows)
    cuts = {}
    for epoch in epochs:
        g = generator(seed, stage_id, epoch)
        cuts[epoch] = int(torch.randint(max(1, len(ids) - windows * length), (), generator=g)), torch.randperm(windows, generator=g)
    begins = [offset + int(order[place]) * length for (offset, order), place in ((cuts[epoch], place) for epoch, place in places)]
    return torch.stack([ids[begin:begin + length + 1] for begin in begins])


def share(run, rows):
    """This process's part of a global batch."""
    return rows[run.rank::run.world]


def train_target(run, args, tokenizer, ids, heldout, upstream):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=args.hidden_size, intermediate_size=args.intermediate_size, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.hidden_size // args.heads, eos_token_id=tokenizer.eos_id)
    S = args.sequence_length
    settings = {**upstream, "hidden_size": args.hidden_size, "layers": args.layers, "intermediate_size": args.intermediate_size,
                "heads": args.heads, "kv_heads": args.kv_heads, "sequence_length": S, "batch": args.batch, "target_steps": args.target_steps,
                "target_minutes": args.target_minutes, "target_lr": list(args.target_lr)}
    if finished(run, "target", settings):
        return Transformer.from_pretrained(run.out / "target", device=run.device), settings
    target = Transformer(config)
    target.init_weights(generator(args.seed, 0))
    target.to(run.device)

    def loss_of(rows):
        with run.autocast():
            hidden, _ = target(rows[:, :-1])
            logits = target.logits(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")

    def batch_loss(step):
        rows = share(run, window_batch(ids, S, args.batch, args.seed, 1, step))
        return loss_of(rows.to(run.device)), torch.tensor(float(rows[:, 1:].numel()), device=run.device)

    @torch.no_grad()
    # On the CPU not worth compiling once more without gradients; on CUDA FlexAttention would keep all its scores.
    @torch.compiler.set_stance("default" if run.device.type == "cuda" else "force_eager")
    def evaluate():
        """Nats a token on held-out text."""
        n = min(len(heldout) - 1, 64 * S) // S
        if n < 1:
            return {}
        rows = torch.stack([heldout[i * S:i * S + S + 1] for i in range(n)])
        return {"heldout_loss": sum(loss_of(part.to(run.device)).item() for part in rows.split(args.batch)) / (n * S)}

    train(run, "target", target, batch_loss, settings, steps=args.target_steps, minutes=args.target_minutes, lr=args.target_lr,
          tokens_a_step=args.batch * S, evaluate=evaluate)
    if run.main:
        target.save_pretrained(run.out / "target")
    finish(run, "target", settings)
    return Transformer.from_pretrained(run.out / "target", device=run.device), settings


def pretrained_target(run, args):
    """--target: a checkpoint's folder, frozen, in bfloat16 on CUDA. -> (Transformer, Tokenizer, training prompts, settings, held-out entries)

    Prompts come from --data: the first --prompt-tokens tokens of each document of a text, whole prompts or chats of a .jsonl. Some are held out.
    """
    dtype = torch.bfloat16 if run.device.type == "cuda" and run.bfloat16 else torch.float32    # never a mix: without autocast products need one
    target = Transformer.from_pretrained(args.target, device=run.device, dtype=dtype)
    tokenizer = Tokenizer.from_pretrained(args.target)
    if not args.data:
        raise UserError("--target needs --data: text files or folders, or .jsonl files with a prompt or messages a line")
    entries = []
    documents = read_corpus(args.data, args.suffixes, entries)
    entries += [d._asdict() for d in documents]
    entries = list({json.dumps(entry, sort_keys=True): entry for entry in entries}.values())      # repetitions would reach both sides
    training, heldout = hold_out(entries, lambda entry: json.dumps(entry, sort_keys=True), args.seed)
    room = args.sequence_length - args.response_tokens
    tokenizer.chat_options = parse_options(args.chat_options)
    how = {"rendered": args.rendered, "skip_bad": args.skip_bad}
    prompts = encode_entries(training, tokenizer, args.prompt_tokens, **how)
    encode_entries(heldout, tokenizer, args.prompt_tokens, **how)                # a bad one is named now, not at the final benchmark
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    if not prompts:
        raise UserError(f"--data holds no prompt of at most {room} tokens (--sequence-length less --response-tokens)")
    weights = sorted((file.name, file.stat().st_size) for file in Path(args.target).glob("*.safetensors"))
    args.cuts = choose_sampling(args.target, args.temperatures, args.top_k, args.top_p)
    return target, tokenizer, prompts, {**args.cuts, "chat_options": tokenizer.chat_options, "target": str(Path(args.target).resolve()), "weights": fingerprint([str(weights), (Path(args.target) / "config.json").read_text()]),
                                        "prompts": fingerprint([str(prompts)]), "seed": args.seed}, heldout


def make_responses(run, args, target, tokenizer, prompts, upstream):
    """The text that the drafter learns from (section 4.2): the target's own continuations of training prompts.

    Decoded a batch at a time, at one temperature each, into part files of responses/; a killed run makes only the missing ones. Returns
    ids (R, S) padded on the right, and trainable (R, S): the response, up to and including the end of text.
    """
    folder, rows, stops = run.out / "responses", args.response_batch, stop_tokens(target, tokenizer)
    settings = {**upstream, "responses": args.responses, "response_minutes": args.response_minutes, "response_tokens": args.response_tokens,
                "prompt_tokens": args.prompt_tokens, "temperatures": list(args.temperatures)}
    prompts = prompts[:args.responses]

    def file_of(n):
        return folder / f"{n:05d}.safetensors"

    def write_part(n):
        batch = prompts[n * rows:(n + 1) * rows]
        out = autoregressive(writer, batch, args.response_tokens, temperature=args.temperatures[n % len(args.temperatures)], stop_ids=stops, **args.cuts,
                             seed=[(args.seed * 1_000_003 + n) * rows + i for i in range(len(batch))])
        ids = [torch.tensor(p + t, dtype=torch.int32) for p, t in zip(batch, out.tokens)]
        tensors = {"tokens": torch.cat(ids), "length": torch.tensor([len(row) for row in ids]), "prompt": torch.tensor([len(p) for p in batch])}
        atomic_write(file_of(n), lambda name: save_file(tensors, name))

    if not finished(run, "responses", settings):
        folder.mkdir(exist_ok=True)
        mark(run, "responses", settings, done=False)
        parts = math.ceil(len(prompts) / rows)
        writer = copy.deepcopy(target).to(torch.bfloat16) if run.bfloat16 and target.dtype != torch.bfloat16 else target   # half the bytes to stream

        def affordable():
            autoregressive(writer, prompts[:rows], 4)                            # warm-up
            began = time.perf_counter()
            write_part(0)
            return min(parts, math.ceil(60 * args.response_minutes * run.world / (time.perf_counter() - began)))
        if args.response_minutes is not None:
            parts = run.decide("response_parts", affordable)
        with run.bar(parts * rows * args.response_tokens, "responses", "token") as bar:
            for n in range(parts):
                if n % run.world == run.rank and not file_of(n).exists():
                    write_part(n)
                bar.update(rows * args.response_tokens)
        idle.clear()                                                             # caches for many rows, which nothing below needs
        run.wait()
        finish(run, "responses", settings)
    rows, prompt_lengths = [], []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file}: damaged ({error}); delete it and responses.settings.json, then --resume") from None
        rows += tensors["tokens"].long().split(tensors["length"].tolist())
        prompt_lengths += tensors["prompt"].tolist()
    if not rows:
        raise UserError(f"{folder}: holds no responses; delete responses.settings.json to make them again")
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    place = torch.arange(ids.shape[1])
    return ids, (place >= torch.tensor(prompt_lengths)[:, None]) & (place < torch.tensor([len(row) for row in rows])[:, None]), settings


def corpus_rows(args, ids):
    """The switch --responses-from corpus: ids and trainable as `make_responses` returns them, of the text as people wrote it."""
    length = args.prompt_tokens + args.response_tokens
    begin = torch.randint(max(1, len(ids) - length), (args.responses,), generator=generator(args.seed, 2))
    rows = torch.stack([ids[i:i + length] for i in begin])
    return rows, (torch.arange(rows.shape[1]) >= args.prompt_tokens).expand(rows.shape)


def mask_token(args, vocab_size, tokenizer, prompts=()):
    """See `pick_mask_token`."""
    return pick_mask_token(tokenizer, vocab_size, args.mask_token, prompts)


def train_drafter(run, args, target, tokenizer, ids, trainable, upstream):
    settings = {**upstream, "draft_layers": args.draft_layers, "block_size": args.block_size, "anchors": args.anchors, "draft_batch": args.draft_batch,
                "gamma": args.gamma, "drafter_steps": args.drafter_steps, "drafter_minutes": args.drafter_minutes, "epochs": args.epochs, "labels": args.labels,
                "drafter_lr": list(args.drafter_lr), "mask_token": args.mask_token, "taps": args.taps, "injection": args.injection, "anchor_choice": args.anchor_choice}
    kind, is_dflash = DRAFTERS[args.drafter], args.drafter == "dflash"
    stage = kind.folder
    if finished(run, stage, settings):
        return kind.from_pretrained(run.out / stage, target), settings
    taps = default_taps(target.config.num_hidden_layers, args.taps)
    if is_dflash and len(taps) < args.taps and run.main:
        print(f"drafter: the target has {len(taps)} layers, so there are {len(taps)} taps, not {args.taps}")
    drafter = kind.for_target(target, num_layers=args.draft_layers, block_size=args.block_size, mask_token_id=mask_token(args, target.config.vocab_size, tokenizer),
                              target_layer_ids=taps, injection=args.injection, chat_options=tokenizer.chat_options)    # the baselines take what they need
    drafter.init_weights(target, generator(args.seed, 3))
    drafter.to(run.device)
    target.requires_grad_(False)
    R, how = len(ids), {"gamma": args.gamma} if is_dflash else {}

    @torch.no_grad()
    def read(rows):
        """What the frozen target makes of rows (B, S): its final hidden states, and, where the drafter has taps, its features."""
        with run.autocast():
            made = target(rows.to(run.device), taps=drafter.config.target_layer_ids)
        return [x.to(torch.bfloat16 if run.bfloat16 else x.dtype) for x in made if x is not None]

    taps = args.responses_from, *drafter.config.target_layer_ids
    if taps not in run.kept and (2 if run.bfloat16 else 4) * ids.numel() * len(taps) * target.config.hidden_size <= KEEP:
        run.kept[taps] = [torch.cat(parts) for parts in zip(*map(read, tqdm(ids.split(args.draft_batch), "features", disable=not run.main)))]
    kept = run.kept.get(taps)                                                    # of all responses, where that fits: they are read many times

    def batch_loss(step):
        places, epochs = epoch_places(step, args.draft_batch, R)
        order = {epoch: torch.randperm(R, generator=generator(args.seed, 4, epoch)) for epoch in epochs}
        rows = torch.stack([order[epoch][place] for epoch, place in places])
        anchors = sample_anchors(trainable[rows], args.anchors, generator(args.seed, 5, step),
                                 args.block_size if args.anchor_choice == "fixed" else 1) if is_dflash else ()    # and which are valid
        rows, *anchors = (share(run, x) for x in (rows, *anchors))
        hidden, *features = (x[rows] for x in kept) if kept else read(ids[rows])
        with run.autocast():
            return drafter.loss(target, *(x.to(run.device) for x in (ids[rows], *features, trainable[rows], *anchors)),
                                target_hidden=hidden if args.labels == "soft" else None, **how)

    steps = math.ceil(args.epochs * R / args.draft_batch) if args.epochs and not args.drafter_steps else args.drafter_steps
    train(run, stage, drafter, batch_loss, settings, steps=steps, minutes=args.drafter_minutes, lr=args.drafter_lr,
          tokens_a_step=args.draft_batch * (args.anchors * (args.block_size - 1) if is_dflash else ids.shape[1]))
    if run.main:
        drafter.to(target.dtype).save_pretrained(run.out / stage)
    finish(run, stage, settings)
    return kind.from_pretrained(run.out / stage, target), settings


# ---- the paper's claims --------------------------------------------------------------------------------------------------------

VARIANTS = {    # settings beside the run's own
    "dflash": {}, "1 layer": {"draft_layers": 1}, "3 layers": {"draft_layers": 3}, "5 layers": {"draft_layers": 5}, "input injection": {"injection": "input"},
    "1 tap": {"taps": 1}, "fixed anchors": {"anchor_choice": "fixed"}, "no decay": {"gamma": math.inf}, "raw corpus": {"responses_from": "corpus"},
    "block 4": {"block_size": 4}, "block 8": {"block_size": 8}, "block 16": {"block_size": 16},
    "eagle3": {"drafter": "eagle3", "block_size": 8}, "ar": {"drafter": "ar", "draft_layers": 1, "block_size": 8}}
CLAIMS = (      # the claim, the flag that switches it, what is measured at temperature 0, the variants from worst to best as the paper has it
    ("acceptance length grows with DFlash's depth", "--draft-layers", "tau", ("1 layer", "3 layers", "5 layers")),
    ("KV injection beats input injection", "--injection", "tau", ("input injection", "dflash")),
    ("5 taps beat 1", "--taps", "tau", ("1 tap", "dflash")),
    ("random anchors beat fixed blocks", "--anchor-choice", "tau", ("fixed anchors", "dflash")),
    ("a decayed loss beats uniform weights", "--gamma", "tau", ("no decay", "dflash")),
    ("regenerated responses beat the raw corpus", "--responses-from", "tau", ("raw corpus", "dflash")),
    ("larger blocks are accepted for longer", "--block-size", "tau", ("block 4", "block 8", "block 16")),
    ("larger blocks are faster", "--block-size", "speedup", ("block 4", "block 8", "block 16")),
    ("DFlash is faster than EAGLE-3", "--drafter", "speedup, auto", ("eagle3", "dflash")),
    ("DFlash is faster than a draft model", "--drafter", "speedup, auto", ("ar", "dflash")))


def measure_claims(run, args, target, tokenizer, responses, corpus):
    """Trains and benchmarks every variant with three seeds, one after the other, each in a folder of OUT/claims that is skipped when it is there. Prints what each
    claim came to and writes it into OUT/report.json. Stopped and started again it goes on."""
    ids, trainable, settings = responses
    prompts = read_prompts(run.out / "heldout.jsonl", tokenizer, args.prompt_tokens, args.prompts)
    found = {}
    for seed, (name, flags) in itertools.product(range(3), VARIANTS.items()):
        mine, here = copy.copy(args), copy.copy(run)
        vars(mine).update(flags, seed=seed)
        folder = "dflash" if all(getattr(args, flag) == value for flag, value in flags.items()) else name    # one of the depths is the preset's own
        here.out, here.resume = run.out / "claims" / f"{folder} {seed}", True
        here.out.mkdir(parents=True, exist_ok=True)
        if run.main:
            print(f"claims: {name}, seed {seed}", flush=True)
            first = run.out / "claims" / f"{folder} 0" / "plan.json"
            if seed and first.exists():                                          # as many steps with every seed, however fast the machine is just then
                write_json(here.out / "plan.json", read_json(first))
        run.wait()
        drafter, _ = train_drafter(here, mine, target, tokenizer, *(corpus if mine.responses_from == "corpus" else (ids, trainable)), {**settings, "seed": seed})
        if run.main and not (here.out / "result.json").exists():
            with run.bar(sum(map(len, prompts.values())), "benchmark", "prompt") as bar:
                methods = {"whole": {"drafter": drafter}, "auto": {"drafter": drafter, "block_size": "auto"}}
                rows = benchmark(target, methods, prompts, min(192, args.response_tokens), (0.0,), stop_tokens(target, tokenizer), progress=bar)
            whole, auto = rows[-2:]                                              # over all domains
            first = next(iter(prompts.values()))[0]
            write_json(here.out / "result.json", {"tau": whole["tau"], "speedup": whole["speedup"], "speedup, auto": auto["speedup"], "identical": whole["identical"],
                                                  "draft_ms": {n: cycle_ms(target, drafter, first, block_size=n)["draft_ms"] for n in (2, 4, 8, 16)}})
        run.wait()
        if run.main:
            found.setdefault(name, []).append(read_json(here.out / "result.json"))
            report = read_json(run.out / "report.json") if (run.out / "report.json").exists() else {}
            write_json(run.out / "report.json", {**report, "claims": found})
    if run.main:
        print(show_claims(found))


def show_claims(found):
    """The claims as a Markdown table, and all variants as bars. found: {variant: a result for each seed}"""
    of = lambda name, key: [result[key] for result in found[name]]
    spread = lambda values: f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    lines = ["| claim | flag | measured | result: mean (least to most) of 3 seeds | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim, flag, key, names in CLAIMS:
        rows = [of(name, key) for name in names]
        pairs = [(a, b) for worse, better in zip(rows, rows[1:]) for a, b in zip(worse, better)]
        best = max(range(len(rows)), key=lambda i: statistics.mean(rows[i]))
        verdict = ("holds, in every seed" if all(a < b for a, b in pairs) else "holds on average, not in every seed" if best == len(rows) - 1 else
                   f"holds up to {names[best]}" if best else "does not hold")
        lines.append(f"| {claim} | `{flag}` | {key} | {'; '.join(f'{name} {spread(row)}' for name, row in zip(names, rows))} | {verdict} |")
    cost = {name: {n: statistics.median(result["draft_ms"][n] for result in found[name]) for n in ("2", "4", "8", "16")} for name in ("5 layers", "eagle3")}
    growth = {name: ms["16"] / ms["2"] for name, ms in cost.items()}
    flat = growth["5 layers"] < 2 < growth["eagle3"] and cost["5 layers"]["16"] < cost["eagle3"]["8"]
    lines.append("| drafting is flat in the block size for DFlash, linear for EAGLE-3; 5 layers draft 16 tokens faster than 1 layer 8 | `--drafter` | draft ms at block 2, 4, 8, 16 | " +
                 "; ".join(f"{name} {', '.join(f'{ms:.2f}' for ms in row.values())}" for name, row in cost.items()) + f" | {'holds' if flat else 'does not hold'} |")
    for key in ("tau", "speedup", "speedup, auto"):
        lines += ["", f"{key} at temperature 0, mean of the seeds"]
        most = max(statistics.mean(of(name, key)) for name in found)
        lines += [f"  {name:16} {statistics.mean(of(name, key)):5.2f} {'█' * round(40 * statistics.mean(of(name, key)) / most)}" for name in found]
    return "\n".join(lines)


# ---- command line ------------------------------------------------------------------------------------------------------------------

# Learning rates are Muon's, for matrices, and AdamW's, for the rest, or where Muon's is None for all.
# cpu: about 15 minutes on 2 cores. gpu: about 100 M parameters on one 24 GB card (the README has the arithmetic).
PRESETS = {
    "cpu": dict(vocab_size=448, layers=8, hidden_size=256, intermediate_size=768, heads=4, kv_heads=2, sequence_length=256, batch=16,
                target_minutes=3.8, responses=3072, response_minutes=1.7, response_batch=512, response_tokens=192, prompt_tokens=64,
                draft_layers=3, block_size=10, anchors=16, draft_batch=16, drafter_minutes=5.3,
                temperatures=[0.0, 0.7, 0.0, 1.0], target_lr=[0.02, 1.2e-2], drafter_lr=[0.03, 4e-3], labels="soft"),
    "gpu": dict(vocab_size=16384, layers=12, hidden_size=768, intermediate_size=2304, heads=12, kv_heads=3, sequence_length=1024, batch=16,
                target_minutes=15.0, responses=32768, response_minutes=5.0, response_batch=256, response_tokens=448, prompt_tokens=64,
                draft_layers=5, block_size=16, anchors=64, draft_batch=16, drafter_minutes=20.0,
                temperatures=[0.0, 0.7, 1.0], target_lr=[0.02, 3e-3], drafter_lr=[0.02, 3e-3], labels="soft"),
    # --target: the paper's values (section 5.1).
    "pretrained": dict(sequence_length=3072, response_tokens=2048, prompt_tokens=256, response_batch=64, draft_layers=5, block_size=16, anchors=512,
                       draft_batch=8, epochs=6, temperatures=[0.0, 0.7, 1.0], drafter_lr=[None, 6e-4], labels="hard"),
}


def parse(argv=None):
    p = argparse.ArgumentParser(description="Train a target, then a DFlash drafter for it, then benchmark both.",
                                epilog="Flags left out come from the preset.")
    p.add_argument("--preset", choices=("cpu", "gpu"), help="default: gpu where there is a CUDA device, else cpu")
    p.add_argument("--out", default="out", help="where everything goes, and is found again (default: out)")
    p.add_argument("--data", nargs="+", metavar="PATH", help="text files or folders (default: the stubs of torch and numpy; gpu: and their sources)")
    p.add_argument("--target", metavar="DIR", help="train a drafter for this checkpoint (a Hugging Face folder) instead, on --data, which may be .jsonl too")
    p.add_argument("--drafter", choices=DRAFTERS, default="dflash", help="or one of two baselines, into OUT/eagle3 or OUT/ar; decode.py --bench measures all")
    p.add_argument("--mask-token", metavar="TOKEN", help="special token or id for the drafter's masks (default: one that is not in use)")
    p.add_argument("--suffixes", nargs="+", metavar=".EXT", help="of --data's folders, read only such files")
    p.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    p.add_argument("--checkpoint-seconds", type=float, default=60, metavar="N")
    p.add_argument("--device", help="cpu, cuda (default: cuda where there is one)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the training steps")
    p.add_argument("--float32", action="store_true", help="train in float32 where bfloat16 would be faster")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--chat-options", nargs="+", default=[], metavar="KEY=VALUE", help="--target: keywords of the chat template, as enable_thinking=false; the drafter remembers them")
    p.add_argument("--rendered", action="store_true", help="--target: prompts are rendered already: special tokens count as such")
    p.add_argument("--skip-bad", action="store_true", help="--target: go on without prompts that can't be used")
    p.add_argument("--top-k", type=int, metavar="K", help="of the responses; 0: all (default: what --target recommends)")
    p.add_argument("--top-p", type=float, metavar="P", help="of the responses; 1: all (default: what --target recommends)")
    for name, kind, text in (
            ("vocab-size", int, "tokens of the tokenizer"), ("layers", int, "of the target"), ("hidden-size", int, "of target and drafter"),
            ("intermediate-size", int, "of their MLPs"), ("heads", int, "query heads"), ("kv-heads", int, "key-value heads"),
            ("sequence-length", int, "tokens of a training sequence"), ("batch", int, "sequences a step, over all processes"),
            ("target-minutes", float, "time for the target's training"), ("target-steps", int, "instead of --target-minutes"),
            ("responses", int, "at most so many continuations by the target"), ("response-minutes", float, "time for them"),
            ("response-batch", int, "rows decoded together"), ("response-tokens", int, "new tokens each"), ("prompt-tokens", int, "tokens of each prefix"),
            ("draft-layers", int, "of the drafter"), ("block-size", int, "tokens of a block, anchor included"), ("anchors", int, "blocks a sequence"),
            ("draft-batch", int, "sequences a step, over all processes"), ("gamma", float, "decay of the loss over slots (default: the paper's)"),
            ("drafter-minutes", float, "time for the drafter's training"), ("drafter-steps", int, "instead of --drafter-minutes"),
            ("taps", int, "target layers that the drafter is fed with (default: 5)")):
        p.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    p.add_argument("--injection", choices=("kv", "input"), default="kv", help="features as keys and values of every layer (DFlash), or once, as the first layer's input")
    p.add_argument("--anchor-choice", choices=("random", "fixed"), default="random", help="fixed: at multiples of the block size")
    p.add_argument("--responses-from", choices=("target", "corpus"), default="target", help="corpus: learn from the text as it is")
    p.add_argument("--claims", action="store_true", help="measure the paper's claims: train and benchmark each variant, 3 seeds of --drafter-minutes each (hours), over OUT/target")
    p.add_argument("--labels", choices=("soft", "hard"), help="learn the target's distributions, or as in the paper only the tokens of the responses")
    p.add_argument("--epochs", type=float, metavar="N", help="of the drafter's training, instead of --drafter-minutes")
    p.add_argument("--temperatures", type=float, nargs="+", metavar="T", help="of the responses, in turn")
    for name in ("--target-lr", "--drafter-lr"):
        p.add_argument(name, type=learning_rate, nargs=2, metavar=("MUON", "ADAMW"), help="MUON may be none: AdamW for all")
    p.add_argument("--prompts", type=int, default=8, metavar="N", help="benchmark: prompts a domain")
    args = p.parse_args(argv)
    args.cuts = {"top_k": args.top_k or None, "top_p": args.top_p}
    args.device = find_device(args.device)
    args.preset = "pretrained" if args.target else args.preset or ("gpu" if args.device.type == "cuda" else "cpu")
    timed, args.taps = args.drafter_minutes or args.drafter_steps, args.taps or 5
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None and not (name == "epochs" and timed):
            setattr(args, name, value)
    world = int(os.environ.get("WORLD_SIZE", 1))
    for names, least in ((("layers", "draft_layers"), 1), (("block_size",), 2), (("sequence_length", "prompt_tokens", "response_tokens", "responses",
                         "response_batch", "anchors", "prompts", "target_steps", "drafter_steps", "taps", "heads", "kv_heads", "hidden_size", "intermediate_size"), 1), (("batch", "draft_batch"), world), (("seed",), 0)):
        for name in names:
            if getattr(args, name) is not None and getattr(args, name) < least:
                raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is too small: at least {least}")
    for name in ("target_minutes", "response_minutes", "drafter_minutes", "epochs", "gamma"):
        if getattr(args, name) is not None and not (0 < getattr(args, name) < math.inf or name == "gamma" and args.gamma == math.inf):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is out of range: more than 0")
    if args.target and (args.responses_from == "corpus" or args.claims):
        raise UserError("--responses-from corpus and --claims need a target that train.py has trained on --data: leave --target out")
    if not all(0 <= temperature < math.inf for temperature in args.temperatures):
        raise UserError(f"--temperatures {args.temperatures} are out of range: at least 0")
    if not args.target and args.prompt_tokens + args.response_tokens > ModelConfig.max_position_embeddings:
        raise UserError(f"--prompt-tokens and --response-tokens together exceed the target's {ModelConfig.max_position_embeddings} positions")
    if not args.target and (args.heads % args.kv_heads or args.hidden_size % args.heads or args.hidden_size // args.heads % 2):
        raise UserError(f"--hidden-size {args.hidden_size}, --heads {args.heads} and --kv-heads {args.kv_heads} do not fit: heads must be a multiple "
                        "of kv-heads, and hidden-size an even multiple of heads")
    return args


def learning_rate(text):
    if text != "none" and not 0 <= float(text) < math.inf:
        raise ValueError
    return None if text == "none" else float(text)


def stages(run, args):
    """Everything that the arguments ask for, each stage where its result is not there yet."""
    if args.target:
        target, tokenizer, prompts, settings, heldout = pretrained_target(run, args)
        args.mask_token = str(mask_token(args, target.config.vocab_size, tokenizer, prompts))    # refused now, not after hours
    else:
        tokenizer, ids, heldout, settings = make_text(run, args)
        mask_token(args, tokenizer.vocab_size, tokenizer)
        target, settings = train_target(run, args, tokenizer, ids, heldout, settings)
        begin = torch.randint(len(ids) - args.prompt_tokens, (args.responses,), generator=generator(args.seed, 2))
        prompts = [ids[i:i + args.prompt_tokens].tolist() for i in begin]
    if args.claims:
        measure_claims(run, args, target, tokenizer, make_responses(run, args, target, tokenizer, prompts, settings), corpus_rows(args, ids))
        return
    if args.responses_from == "corpus":
        (ids, trainable), settings = corpus_rows(args, ids), {**settings, "responses_from": "corpus", "responses": args.responses}
    else:
        ids, trainable, settings = make_responses(run, args, target, tokenizer, prompts, settings)
    if args.target and run.main:
        write_lines(run.out / "heldout.jsonl", heldout)
    drafter, settings = train_drafter(run, args, target, tokenizer, ids, trainable, settings)
    settings = {**settings, "prompts": args.prompts}
    if args.drafter == "dflash" and not finished(run, "benchmark", settings):
        if run.main:
            if run.device.type == "cuda" and run.bfloat16:                       # as users would; float32 is decode.py's --dtype away
                target, drafter = target.to(torch.bfloat16), drafter.to(torch.bfloat16)
            run_benchmark(run.out, target, {"dflash": drafter}, tokenizer, run.out / "heldout.jsonl", prompts=args.prompts,
                          prompt_tokens=args.prompt_tokens, max_new_tokens=min(192, args.response_tokens),
                          rendered=args.rendered, skip_bad=args.skip_bad, **args.cuts)
        finish(run, "benchmark", settings)


def main(argv=None):
    args = parse(argv)
    run = Run(args)
    stages(run, args)
    if run.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
