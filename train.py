"""From nothing to a target, its DFlash drafter and a measured benchmark:

    python train.py                          the stubs of torch and numpy as text, a preset for this machine
    python train.py --minutes 3              the same in three minutes
    python train.py --data notes/ book.txt   your own text
    torchrun --nproc_per_node=4 train.py     on four devices

Stages, each skipped when its result is already in --out: tokenizer, target, responses (the target's own
continuations of training prefixes), drafter, benchmark. A killed run goes on with --resume and ends with the
same weights, bit for bit on the CPU: everything random is a function of the seed and the step.
"""
import argparse
import copy
import datetime
import hashlib
import heapq
import itertools
import json
import math
import os
import statistics
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import regex
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from decode import autoregressive, benchmark, cycle_ms, idle, run_benchmark
from drafter import DRAFTERS, TrainingBatch, default_taps, pick_mask_token, sample_anchors
from kernels import allow_recompiling
from model import (CODE_PATTERN, COUNT, MLP, DecoderLayer, Entry, ModelConfig, Parser, RMSNorm, Tokenizer,
                   Transformer, UserError, atomic_write, check, choose_sampling, encode_entries, find_device,
                   number, parse_options, read_entries, read_json, read_optional, read_prompts,
                   read_text, reading, run_command, whether_to_compile, write_json, write_text)

FEATURE_CACHE = 2**32    # bytes of what the target makes of the responses; more is computed anew at each step


# ---- the target --------------------------------------------------------------------------------------------

def train_target(run, args, tokenizer, ids, heldout):
    """ids, heldout: (N,) token ids of the training and of the held-out text -> the trained Transformer."""
    if not run.is_done(args, "target"):
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
            intermediate_size=args.intermediate_size, num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads, head_dim=args.hidden_size // args.heads,
            eos_token_id=tokenizer.eos_id)
        target = Transformer(config)
        target.init_weights(generator(args.seed, 0))
        target.to(run.device)
        S = args.sequence_length

        def loss_of(step):
            rows = random_rows(ids, S + 1, args.batch, generator(args.seed, 1, step))    # (batch, S + 1)
            return next_token_loss(run, target, run.share(rows))
        steps = fit(run, target, args.target_lr, args.target_steps, args.batch * S, loss_of)
        run.log(stage="heldout", step=steps, loss=heldout_loss(run, target, heldout, S, args.batch))
        run.finish(target)
    return Transformer.from_pretrained(run.out / "target", device=run.device)


def random_rows(ids, length, number, g):
    """Rows of consecutive tokens from random places of ids (N,), N >= length, drawn with Generator g. Returns
    (number, length)."""
    begin = torch.randint(len(ids) - length + 1, (number,), generator=g)
    return ids.unfold(0, length, 1)[begin]


def next_token_loss(run, target, rows):
    """rows (B, S + 1) -> the sum of the losses of tokens 1 .. S, and their number"""
    labels = rows[:, 1:].flatten()
    with run.autocast():
        logits = target.logits(target(rows[:, :-1])[0])                          # (B, S, V)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
    return loss, torch.tensor(len(labels), device=run.device)


@torch.no_grad()
def heldout_loss(run, target, heldout, length, batch):
    """Nats a token on at most 64 rows of held-out text; None where that is shorter than a row."""
    if len(heldout) <= length:
        return None
    rows = heldout.unfold(0, length + 1, length)[:64].to(run.device)
    # On the CPU not worth compiling without gradients; on CUDA eager FlexAttention would keep all its scores.
    with torch.compiler.set_stance("default" if run.device.type == "cuda" else "force_eager"):
        losses = [next_token_loss(run, target, part)[0].item() for part in rows.split(batch)]
    return sum(losses) / (len(rows) * length)


# ---- what the drafter learns from --------------------------------------------------------------------------

def make_responses(run, args, target, tokenizer, prompts):
    """The target's own continuations of training prompts (section 4.2): ids (R, S) padded on the right, and
    trainable (R, S): the response, up to and including the end of text. prompts: rows of ids.

    Decoded a batch at a time, at one temperature each, into files that a killed run need not make again."""
    folder, B = run.out / "responses", args.response_batch
    if not run.is_done(args, "responses"):
        run.begin()
        if target.dtype != run.dtype:
            target = copy.deepcopy(target).to(run.dtype)                         # half the bytes to stream
        prompts = prompts[:args.responses]
        parts = [prompts[i:i + B] for i in range(0, len(prompts), B)]
        if run.minutes and not run.record["number"]:                      # an eighth of a part is timed
            autoregressive(target, parts[0], 4)                                  # warm-up
            tokens = math.ceil(args.response_tokens / 8)
            seconds = autoregressive(target, parts[0], tokens).seconds * args.response_tokens / tokens
            run.decide(max(1, run.world * run.seconds_left() / seconds))
        parts = parts[:run.record["number"]]
        with run.bar(len(parts) * B * args.response_tokens, "responses", "token") as bar:
            for n, part in enumerate(parts):
                if n % run.world == run.rank:
                    decode_part(args, target, part, n, folder, tokenizer.eos_ids)
                bar.update(B * args.response_tokens)
        idle.clear()                                                             # caches for many rows
        run.finish()
    return read_responses(folder)


def decode_part(args, target, prompts, n, folder, stop_ids):
    """Writes the responses to the n-th batch of prompts, where they are not there yet."""
    file = folder / f"{n:05d}.safetensors"
    if not file.exists():
        seed = [(args.seed * 1_000_003 + n) * args.response_batch + i for i in range(len(prompts))]
        out = autoregressive(target, prompts, args.response_tokens, stop_ids=stop_ids, seed=seed,
                             top_k=args.top_k, top_p=args.top_p,
                             temperature=args.temperatures[n % len(args.temperatures)])
        rows = [torch.tensor(p + t, dtype=torch.int32) for p, t in zip(prompts, out.tokens)]
        tensors = {"tokens": torch.cat(rows), "length": torch.tensor([len(row) for row in rows]),
                   "prompt": torch.tensor([len(p) for p in prompts])}
        atomic_write(file, lambda name: save_file(tensors, name))


def read_responses(folder):
    """-> ids, trainable (R, S)"""
    rows, prompt_lengths = [], []
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file):
            tensors = load_file(file)
            rows += tensors["tokens"].long().split(tensors["length"].tolist())
            prompt_lengths += tensors["prompt"].tolist()
    check(rows, f"{folder}: files", 0, "no responses; delete responses.settings.json to make them again")
    trainable = [torch.arange(len(row)) >= n for row, n in zip(rows, prompt_lengths)]
    return [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, trainable)]


def corpus_rows(args, ids):
    """The switch --responses-from corpus: as `make_responses`, of the text as people wrote it."""
    length = min(args.prompt_tokens + args.response_tokens, len(ids))
    rows = random_rows(ids, length, args.responses, generator(args.seed, 2))
    return rows, (torch.arange(length) >= args.prompt_tokens).expand(rows.shape)


# ---- the drafter (section 4.2) -----------------------------------------------------------------------------

def train_drafter(run, args, target, tokenizer, ids, trainable):
    """ids, trainable: (R, S), see `make_responses` -> the trained drafter, of the kind that --drafter
    names."""
    kind, (R, S) = DRAFTERS[args.drafter], ids.shape
    if not run.is_done(args, "drafter", kind.folder):
        L, target = target.config.num_hidden_layers, target.requires_grad_(False)
        if L < args.taps and args.drafter == "dflash" and run.main:         # baselines have taps of their own
            print(f"drafter: the target has {L} layers, so there are {L} taps, not {args.taps}")
        drafter = kind.for_target(
            target, num_layers=args.draft_layers, block_size=args.block_size,
            target_layer_ids=default_taps(L, args.taps), injection=args.injection,
            mask_token_id=None if kind.in_turn else
            pick_mask_token(tokenizer, target.config.vocab_size, args.mask_token),
            chat_options=tokenizer.chat_options)
        drafter.init_weights(target, generator(args.seed, 3))
        drafter.to(run.device)
        taps = drafter.config.target_layer_ids
        cached = target_outputs_of_all(run, args, target, taps, ids)
        steps = args.drafter_steps or args.epochs and math.ceil(args.epochs * R / args.draft_batch)

        def loss_of(step):
            g = generator(args.seed, 4, step)
            rows = torch.randint(R, (args.draft_batch,), generator=g)
            blocks = sample_anchors(
                trainable[rows], args.anchors, args.block_size, g, args.anchor_choice, args.reveal)
            mine, labelled, *blocks = map(run.share, (ids[rows], trainable[rows], *blocks))
            hidden, features = ([run.share(x[rows]) for x in cached] if cached else
                                target_outputs(run, target, taps, mine))
            batch = TrainingBatch(mine, labelled, features, hidden, *blocks, soft=args.labels == "soft")
            with run.autocast():
                return drafter.loss(target, batch, args.gamma)
        fit(run, drafter, args.drafter_lr, steps, args.draft_batch * S, loss_of)
        run.finish(drafter.to(target.dtype))
    return kind.from_pretrained(run.out / kind.folder, target)


@torch.no_grad()
def target_outputs(run, target, taps, ids):
    """What the frozen target makes of ids (B, S): hidden states (B, S, C) and features (B, S, taps * C)."""
    with run.autocast():
        outputs = target(ids.to(run.device), taps=taps)
    return [x.to(run.dtype) for x in outputs]


def target_outputs_of_all(run, args, target, taps, ids):
    """`target_outputs` of all responses, which are read many times; None where there is no room for them."""
    key = args.responses_from, *taps
    nbytes = ids.numel() * (1 + len(taps)) * target.config.hidden_size * run.dtype.itemsize
    if key not in run.feature_cache and nbytes <= FEATURE_CACHE:
        parts = tqdm(ids.split(args.draft_batch), "features", disable=not run.main)
        outputs = [target_outputs(run, target, taps, part) for part in parts]
        run.feature_cache.clear()                                                # of other taps or texts
        run.feature_cache[key] = [torch.cat(each) for each in zip(*outputs)]
    return run.feature_cache.get(key)


# ---- one training loop for both ----------------------------------------------------------------------------

def fit(run, module, lr, steps, tokens_a_step, loss_of):
    """Trains the module of the stage under way, from the checkpoint that is there, and logs. Returns the
    number of steps.

    lr: (Muon's, AdamW's). steps: None: as many as fit into the stage's part of --minutes. tokens_a_step: for
    the log. loss_of: step -> this process's sum of weighted losses, and that of the weights."""
    run.begin()
    optimizers, losses = build_optimizers(module, lr, run.dtype), []
    if run.compile:
        allow_recompiling()
        for part in module.modules():          # a function for all layers; EAGLE-3 calls its layer's parts
            if isinstance(part, (DecoderLayer, MLP, RMSNorm)):
                part.compile()
    steps = steps or run.record["number"] or steps_that_fit(run, module, optimizers, loss_of)
    done = load_checkpoint(run.checkpoint, module, optimizers)
    run.forget(done)
    saved = began = time.monotonic()
    with run.bar(steps, run.name, initial=done) as bar:
        for step in range(done, steps):
            factor = learning_rate_factor(step, steps, muon=len(optimizers) > 1)
            losses.append(update(run, module, optimizers, factor, *loss_of(step)))
            bar.update()
            taken = step + 1
            if taken % 10 and taken < steps:
                continue
            # Looked at before a checkpoint is written: none holds a NaN.
            loss = torch.stack(losses).mean().item()
            losses.clear()
            if not math.isfinite(loss):
                raise UserError(f"the {run.name}'s loss is {loss} at step {taken}; no checkpoint holds it: "
                                f"lower --{run.stage}-lr and use another --out")
            rate = (taken - done) * tokens_a_step / (time.monotonic() - began)
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
            run.log(stage=run.name, step=taken, loss=loss, tokens_per_second=rate)
            if run.main and taken < steps and time.monotonic() - saved >= run.checkpoint_seconds:
                save_checkpoint(run.checkpoint, module, optimizers, taken)
                saved = time.monotonic()
    return steps


def steps_that_fit(run, module, optimizers, loss_of):
    """Times eight steps that change no weight; what they leave in the optimizers is dropped."""
    if run.main:
        print(f"{run.name}: timing a step ...", flush=True)
    marks = []
    for step in range(8):
        update(run, module, optimizers, 0.0, *loss_of(step)).item()              # waits for the device
        marks.append(time.monotonic())
    for optimizer in optimizers:
        optimizer.state.clear()
    seconds = statistics.median(b - a for a, b in zip(marks[1:], marks[2:]))
    return run.decide(max(20, run.seconds_left() / seconds))


def update(run, module, optimizers, factor, loss, weight):
    """One step along the gradient of sum(loss) / sum(weight) over all processes. factor: on the learning
    rates. Returns that loss."""
    total = run.sum(weight.detach().float().clone()).clamp(min=1e-6)
    (loss / total).backward()
    for p in module.parameters():
        run.sum(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
    loss = run.sum(loss.detach().clone()) / total
    return torch.where(norm.isfinite(), loss, math.nan)                 # such gradients spoil the weights


def build_optimizers(module, lr, dtype):
    """Muon for the layers' matrices, AdamW for embeddings, head, norms and biases; AdamW for all where Muon's
    rate is None. dtype: of Muon's products."""
    muon_lr, adamw_lr = lr
    matrices, others = [], []
    for name, p in module.named_parameters():
        is_matrix = p.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if is_matrix and muon_lr is not None else others).append(p)
    adamw = torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, muon_lr, dtype)]


class Muon(torch.optim.Optimizer):
    """Steps of orthogonalized momentum (Jordan 2024), as torch.optim.Muon; that multiplies in bfloat16 only,
    for which a processor that has none takes fifty times as long."""

    def __init__(self, matrices, lr, dtype):
        super().__init__(matrices, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 0.05)
            update = orthogonalize(p.grad.lerp(momentum, 0.95).to(self.dtype))
            p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalize(x):
    """x = U S V^T -> about U V^T: five Newton-Schulz steps, each of which brings the singular values nearer
    to 1."""
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T).T                                              # the smaller products
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x


def learning_rate_factor(step, steps, muon):
    """Linear warm-up over 4%, then with Muon constant and a linear decay over the last 60%, with AdamW alone
    the paper's cosine."""
    warm = (step + 1) / max(1.0, 0.04 * steps)
    decay = (steps - step) / (0.6 * steps) if muon else 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(warm, 1.0, decay)


def generator(seed, *index):
    """A stream of random numbers for this seed and place: no state to save, none to restore. index: 0: the
    target's start; (1, step): its batches; 2: prompts; 3: the drafter's start; (4, step): its batches."""
    state = np.random.SeedSequence((seed, *index)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def save_checkpoint(file, module, optimizers, step):
    """Model, optimizers and step in one safetensors file. The random state is the step: see `generator`."""
    tensors = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, p in enumerate(optimizer.param_groups[0]["params"]):
            tensors |= {f"optimizer.{i}.{j}.{key}": value for key, value in optimizer.state[p].items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    atomic_write(file, lambda name: save_file(tensors, name, metadata={"step": str(step)}))


@torch.no_grad()
def load_checkpoint(file, module, optimizers):
    """Returns the number of steps done, 0 where there is no checkpoint."""
    if not file.exists():
        return 0
    with reading(file), safe_open(file, framework="pt") as tensors:
        for name, p in module.named_parameters():
            p.copy_(tensors.get_tensor(f"model.{name}"))
        for key in tensors.keys():
            if key.startswith("optimizer."):
                _, i, j, name = key.split(".")
                p = optimizers[int(i)].param_groups[0]["params"][int(j)]
                optimizers[int(i)].state[p][name] = tensors.get_tensor(key).to(p.device, copy=True)
        return int(tensors.metadata()["step"])


# ---- stages and processes ----------------------------------------------------------------------------------

# A stage's part of --minutes. What is left is for reading the text, and for a machine that becomes slower.
SHARES = {"tokenizer": 0.0, "target": 0.31, "responses": 0.12, "drafter": 0.36, "benchmark": 0.18}
BEHIND = dict(zip(SHARES, 1 - np.cumsum([*SHARES.values()])))                    # left when a stage has ended

WORLD = int(os.environ.get("WORLD_SIZE", 1))    # processes, as torchrun says


class Run:
    """Where and how this process runs, what has been decided for all of them, and which stages are done.

    stage, name, record: of the stage under way, see `is_done`."""
    settings_file = property(lambda self: self.out / f"{self.name}.settings.json")
    checkpoint = property(lambda self: self.out / f"{self.name}.checkpoint.safetensors")

    def __init__(self, args):
        self.out, self.resume, self.checkpoint_seconds = Path(args.out), args.resume, args.checkpoint_seconds
        self.minutes, self.feature_cache = args.minutes or 0, {}
        self.rank, self.world = int(os.environ.get("RANK", 0)), WORLD
        self.main, self.device, cuda = self.rank == 0, args.device, args.device.type == "cuda"
        if cuda and self.world > 1:                                              # a GPU for each process
            self.device = find_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        if self.world > 1:                                                # one may work for long, others wait
            dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(days=1))
        self.out.mkdir(parents=True, exist_ok=True)
        self.start_clock(behind="tokenizer")
        # Products in bfloat16 where the hardware has them (emulated they are slower), master weights in
        # float32.
        bfloat16 = not args.float32 and (cuda or has_bfloat16())
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.compile = whether_to_compile(args.compile, self.device)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def share(self, rows):
        """This process's part of a batch, on its device."""
        return rows[self.rank::self.world].to(self.device)

    def sum(self, tensor):
        """The sum over processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self):
        if self.world > 1:
            dist.barrier()

    def bar(self, total, name, unit="step", initial=0):
        return tqdm(total=total, desc=name, unit=unit, initial=initial, disable=not self.main)

    def start_clock(self, behind):
        """As if this stage and those before it had taken their parts of --minutes."""
        self.end = time.monotonic() + 60 * self.minutes * BEHIND[behind]

    def seconds_left(self):
        """Of what is left of --minutes, the stage's part beside what the stages behind it need."""
        own = SHARES[self.stage]
        return max(1.0, self.end - time.monotonic()) * own / (own + BEHIND[self.stage])

    def decide(self, number):
        """The stage's number of steps, where that depends on this machine's speed: decided once, by the first
        process, and written down, so that a resumed run takes as many."""
        number = torch.tensor(number if self.main else 0.0, dtype=torch.float64, device=self.device)
        self.record["number"] = int(self.sum(number).item())                     # the others add nothing
        if self.main:
            write_json(self.settings_file, self.record)
        return self.record["number"]

    def is_done(self, args, stage, name=None):
        """Is the stage's result in --out? Refuses one made with other settings, and without --resume an
        interrupted one. name: of the result, where a stage has several."""
        self.stage, self.name = stage, name or stage
        file, settings = self.settings_file, {field: getattr(args, field, None) for field in STAGES[stage]}
        begun, new = file.exists(), {"done": False, "number": None, "settings": settings}
        self.record = {**new, **read_optional(file)}
        self.wait()                                                        # all have looked before one writes
        done, number, made_with = (self.record[key] for key in new)
        good = isinstance(done, bool) and isinstance(made_with, dict) and type(number) in (int, type(None))
        check(good, f"{file}: content", self.record, "damaged; use another --out, or delete the folder")
        for field in {**settings, **made_with}:
            if made_with.get(field) != settings.get(field):
                raise UserError(f"{self.out} holds a {self.name} made with {field} = {made_with.get(field)}, "
                                f"not {settings.get(field)}; use the same settings, another --out, or delete "
                                "the folder")
        check(done or self.resume or not begun, f"{self.out}: stage", self.name,
              "interrupted; go on with --resume, use another --out, or delete the folder")
        if done:
            self.start_clock(behind=stage)
            if self.main:
                print(f"{self.name}: already in {self.out}, skipped")
        return done

    def begin(self):
        """Marks the stage as begun. Where it had no mark (its settings file may have been deleted, to start
        it anew), what an earlier run has left of it goes."""
        if self.main:
            left = [self.checkpoint, self.out / f"{self.name}.result.json",
                    *(self.out / self.name).glob("[0-9]*.safetensors")]
            for old in [] if self.settings_file.exists() else left:
                old.unlink(missing_ok=True)
            write_json(self.settings_file, self.record)
        self.wait()

    def finish(self, module=None):
        """Saves the module that the stage has trained, marks the stage as done, drops its checkpoint."""
        if self.main:
            if module is not None:
                module.save_pretrained(self.out / self.name)
            write_json(self.settings_file, {**self.record, "done": True})
            self.checkpoint.unlink(missing_ok=True)
        self.wait()

    def log(self, **entry):
        if self.main:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def forget(self, step):
        """Drops the log's lines after the checkpoint that a resumed run starts from: it writes them again."""
        file = self.out / "log.jsonl"
        if self.main and file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            mine = regex.compile(rf'{{"stage": "{self.name}", "step": (\d+),')
            later = lambda line: (found := mine.match(line)) and int(found[1]) > step
            write_text(file, "".join(line for line in lines if line.endswith("\n") and not later(line)))


def has_bfloat16():
    """Does this CPU multiply bfloat16 natively?"""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def fingerprint(texts):
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]


# ---- text --------------------------------------------------------------------------------------------------

DOCUMENT = 3000    # characters: paragraphs of a file that follow each other make documents of about this size


def default_corpus(preset):
    """(folders, suffixes) of text that is on every machine: the type stubs of torch and numpy, about 4 MB;
    for a GPU the sources of both and of the standard library as well, about 90 MB."""
    folders = [Path(module.__file__).parent for module in (torch, np, os)]
    return (folders[:2], (".pyi",)) if preset == "cpu" else (folders, (".py", ".pyi"))


def find_entries(paths, suffixes):
    """The entries of all files, in an order that is the same on every machine: the rows of .jsonl files, and
    of a .json file that was named itself; any other file's text, if that is UTF-8 and not empty. Their domain
    is the name of the file or folder that was asked for. UserError where there are none."""
    for path in map(Path, paths):
        check(path.exists(), "--data", str(path), "no such file or folder; it takes text files and folders")
        names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
        names = [n for n in names if not regex.search(r"(^|/)(\.|site-packages/)", n)]
        found, inside = [], [path / n for n in names if n.endswith(tuple(suffixes or [""]))]
        for file in inside or [path]:
            if file.suffix == ".jsonl" or file == path and file.suffix == ".json":
                found += read_entries(file)
                continue
            with suppress(UserError):
                text = read_text(file)
                if text.strip() and "\0" not in text:
                    found.append(Entry(text=text))
        kind = " or ".join(suffixes or ["UTF-8"])
        check(found, "--data", str(path), f"holds no {kind} text; give files or folders with some")
        for entry in found:
            entry.setdefault("domain", path.resolve().stem)
        yield from found


def cut_texts(entries):
    """Documents {"domain", "text"} of texts, in their order. They are cut at blank lines, and of paragraphs
    that differ in white space alone the first stays: repetitions would stand on both sides of the split."""
    documents, seen = [], {""}
    for entry in entries:
        gathered = ""
        for paragraph in regex.split(r"\n(?=[ \t]*\n)", entry["text"].replace("\r\n", "\n")):
            for piece in (paragraph[i:i + DOCUMENT] for i in range(0, len(paragraph), DOCUMENT)):
                key = "".join(piece.split())
                if key in seen:
                    continue
                seen.add(key)
                if not gathered or len(gathered) + len(piece) > DOCUMENT:
                    gathered = ""
                    documents.append(Entry(domain=entry["domain"]))
                gathered += piece + "\n"
                documents[-1]["text"] = gathered.strip("\n") + "\n"
    return documents


def hold_out(items, seed, fraction=0.04):
    """(training, held-out) items: held out are those with the smallest hashes, at least one."""
    rank = lambda item: fingerprint([str(seed), json.dumps(item, sort_keys=True)])
    items = sorted(items, key=rank)
    n = math.ceil(fraction * len(items))
    return items[n:], items[:n]


def without_known(documents, training):
    """The held-out documents of whose lines (but short ones) at most half stand in the training text too: the
    others would flatter the results."""
    lines = lambda d: [line for line in map(str.strip, d["text"].splitlines()) if len(line) > 30]
    known = {line for d in training for line in lines(d)}
    return [d for d in documents if 2 * sum(line in known for line in lines(d)) <= len(lines(d))]


def make_text(run, args):
    """The corpus and its tokenizer, written as target/tokenizer.json and heldout.jsonl.
    -> Tokenizer, training ids (N,), held-out ids, the benchmark's prompts"""
    paths, suffixes = (args.data, args.suffixes) if args.data else default_corpus(args.preset)
    entries = [*find_entries(paths, suffixes)]
    for entry in entries:
        check(entry.is_text(), entry.where, entry, "a chat or prompt, not text; --target learns from these")
    training, heldout = hold_out(cut_texts(entries), args.seed)
    heldout, texts = without_known(heldout, training), [d["text"] for d in training]
    args.corpus = fingerprint(texts)
    is_done = run.is_done(args, "tokenizer")
    tokenizer = (Tokenizer.from_pretrained(run.out / "target") if is_done else
                 Tokenizer.from_merges(train_bpe(texts, args.vocab_size - 2, CODE_PATTERN)))
    encode = lambda document: [tokenizer.eos_id, *tokenizer.encode(document["text"])]
    ids, heldout_ids = (torch.tensor([*itertools.chain(*map(encode, part))]) for part in (training, heldout))
    check(len(ids) >= max(2 * args.sequence_length, args.prompt_tokens + 2), "tokens of text", len(ids),
          f"beside what is held out, too few for sequences of {args.sequence_length}; give more --data or a "
          "smaller --sequence-length")
    test_prompts = write_heldout(run, args, tokenizer, heldout)
    if not is_done:
        if run.main:
            tokenizer.save_pretrained(run.out / "target")
            print(f"tokenizer: {tokenizer.vocab_size} tokens; {len(texts)} texts, {len(heldout)} held out")
        run.finish()
    return tokenizer, ids, heldout_ids, test_prompts


def write_heldout(run, args, tokenizer, entries):
    """Writes heldout.jsonl -> its prompts for the benchmark, {domain: rows of ids}. UserError now, not after
    hours, where there are none."""
    file = run.out / "heldout.jsonl"
    if run.main:
        write_lines(file, entries)
    run.wait()
    return read_prompts(file, tokenizer, args.prompt_tokens, args.prompts)


def write_lines(path, entries):
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def train_bpe(texts, vocab_size, pattern):
    """Learns byte-level merges: [(left bytes, right bytes), ...] in order, at most vocab_size - 256. pattern:
    a regex whose matches are the words that no merge crosses. Each step merges the most frequent pair, of
    equals the one whose parts were made first."""
    words = Counter(match[0] for text in texts for match in regex.finditer(pattern, text))
    weight = [*words.values()]
    # A word as a string of one character a token, so that `replace` merges
    words = [word.encode("utf-8", "replace").decode("latin-1") for word in words]
    # Of each pair: how often, in which words. changed: the pairs whose count the heap does not know yet.
    count, where, changed, heap = Counter(), defaultdict(set), set(), []

    def add_pairs(i, sign):
        for pair in zip(words[i], words[i][1:]):
            count[pair] += sign * weight[i]
            where[pair].add(i)
            changed.add(pair)
    for i in range(len(words)):
        add_pairs(i, 1)
    tokens, merges = [bytes([i]) for i in range(256)], []
    while len(tokens) < vocab_size and (changed or heap):
        while changed:
            pair = changed.pop()
            heapq.heappush(heap, (-count[pair], pair))
        n, pair = heapq.heappop(heap)
        if -n != count[pair] or not n:                       # out of date; the right one is further down
            continue
        for i in where.pop(pair):
            add_pairs(i, -1)
            words[i] = words[i].replace("".join(pair), chr(len(tokens)))
            add_pairs(i, 1)
        merges.append(tuple(tokens[ord(part)] for part in pair))
        tokens.append(b"".join(merges[-1]))
    return merges


def pretrained_target(run, args):
    """--target: a checkpoint's folder, frozen, in bfloat16 on CUDA. Prompts come from --data: the first
    --prompt-tokens tokens of each document of a text, prompts or chats of a .jsonl file. Some are held out.
    -> Transformer, Tokenizer, training prompts (rows of ids), the benchmark's prompts"""
    check(args.data, "--data", args.data, "--target needs it: text files, folders, .jsonl files of prompts")
    cuda = run.device.type == "cuda"
    dtype = run.dtype if cuda else torch.float32                             # without autocast no mix will do
    target = Transformer.from_pretrained(args.target, device=run.device, dtype=dtype)
    tokenizer = Tokenizer.from_pretrained(args.target)
    tokenizer.chat_options = args.chat_options
    entries = [*find_entries(args.data, args.suffixes)]
    chats = {json.dumps({**entry, "domain": None}, sort_keys=True): entry
             for entry in entries if not entry.is_text()}                        # repetitions once
    entries = [*chats.values(), *cut_texts(filter(Entry.is_text, entries))]
    room = min(args.sequence_length, target.config.max_position_embeddings) - args.response_tokens
    training, heldout = ([(entry, ids) for entry, ids in encode_entries(
        part, tokenizer, args.prompt_tokens, rendered=args.rendered, skip_bad=args.skip_bad)
        if len(ids) <= room] for part in hold_out(entries, args.seed))
    check(training and heldout, "--data", args.data, f"too few prompts of at most {room} tokens "
          "(--sequence-length, or what the target reads, less --response-tokens): one to learn from and one "
          "to hold out, at least")
    prompts = [ids for _, ids in training]
    files = sorted(Path(args.target).glob("*.safetensors"))
    ends = [str(np.memmap(file, mode="r")[-2**16:].tobytes()) for file in files]       # a fine-tune's differ
    args.weights = fingerprint([*ends, (Path(args.target) / "config.json").read_text()])
    args.prompts_from = fingerprint([str(prompts)])
    rendered = {"rendered": True} if args.rendered else {}
    run.is_done(args, "responses")                         # refuses here, before it changes what is held out
    test_prompts = write_heldout(run, args, tokenizer, [{**rendered, **entry} for entry, _ in heldout])
    return target, tokenizer, prompts, test_prompts


# ---- the paper's claims ------------------------------------------------------------------------------------

# What all variants have in common, whatever the command line says.
BASE = {"drafter": "dflash", "reveal": 0.0, "responses_from": "target", "injection": "kv", "gamma": None,
        "anchor_choice": "random", "taps": 5, "draft_layers": 3}
EAGLE3 = {"drafter": "eagle3", "block_size": 8}
BLOCKS = {"block 4": {"block_size": 4}, "block 8": {"block_size": 8}, "block 16": {"block_size": 16}}
# Two steps are measured with the drafter that has learned them: no variant of their own.
STEPS = {"dflash": {}, "revealed": {"reveal": 0.3}, "two steps": None}
CLAIMS = (    # with what is measured at temperature 0, and {variant: its flags} from worst to best
    ("acceptance length grows with depth", "tau",
     {"1 layer": {"draft_layers": 1}, "dflash": {}, "5 layers": {"draft_layers": 5}}),
    ("KV injection beats input injection", "tau", {"input injection": {"injection": "input"}, "dflash": {}}),
    ("5 taps beat 1", "tau", {"1 tap": {"taps": 1}, "dflash": {}}),
    ("random anchors beat fixed blocks", "tau", {"fixed anchors": {"anchor_choice": "fixed"}, "dflash": {}}),
    ("a decayed loss beats uniform weights", "tau", {"no decay": {"gamma": math.inf}, "dflash": {}}),
    ("regenerated responses beat the raw corpus", "tau",
     {"raw corpus": {"responses_from": "corpus"}, "dflash": {}}),
    ("larger blocks are accepted for longer", "tau", BLOCKS),
    ("larger blocks are faster", "speedup", BLOCKS),
    ("two denoising steps are kept for longer", "tau", STEPS),
    ("two denoising steps are faster", "speedup", STEPS),
    ("drafting grows less with the block than EAGLE-3's", "draft ms at 2 / at 16",
     {"eagle3": EAGLE3, "dflash": {}}),
    ("DFlash is faster than EAGLE-3", "auto", {"eagle3": EAGLE3, "dflash": {}}),
    ("DFlash is faster than a draft model", "auto",
     {"ar": {"drafter": "ar", "draft_layers": 1, "block_size": 8}, "dflash": {}}))


def measure_claims(run, args, target, tokenizer, prompts, responses, corpus):
    """Trains and benchmarks every variant with three seeds, each in a folder of OUT/claims that is skipped
    when it is there. Prints what the claims came to, and writes it into OUT/report.json. It goes on where it
    stopped."""
    corpus = [x[:len(responses[0])] for x in corpus]                             # as many rows of each
    trained = {name: flags for *_, variants in CLAIMS for name, flags in variants.items()
               if flags is not None}
    found, steps = defaultdict(list), {}
    report = read_optional(run.out / "report.json")                              # damaged, it is refused now
    for seed, (name, flags) in itertools.product(range(3), trained.items()):
        mine = argparse.Namespace(**(vars(args) | BASE | flags | {"seed": seed}))
        mine.drafter_steps = args.drafter_steps or steps.get(name)              # every seed takes as many
        here = copy.copy(run)
        here.out, here.resume = run.out / "claims" / f"{name} {seed}", True
        here.start_clock(behind="responses")
        if run.main:
            print(f"claims: {name}, seed {seed}", flush=True)
        data = corpus if mine.responses_from == "corpus" else responses
        drafter = train_drafter(here, mine, target, tokenizer, *data)
        steps.setdefault(name, here.record["number"])
        file = here.out / f"{here.name}.result.json"
        if run.main and not file.exists():
            write_json(file, measure(mine, target, tokenizer, drafter, prompts))
        run.wait()
        for key, result in read_json(file).items():
            found[name if key == "one step" else key].append(result)
    if run.main:
        write_json(run.out / "report.json", {**report, "claims": found})
        print(show_claims(found))


def measure(args, target, tokenizer, drafter, prompts):
    """{"one step": tau, speedups and the cost of drafting}; of a drafter that has learned more, "two steps"
    too."""
    methods = {"one step": {"drafter": drafter}, "auto": {"drafter": drafter, "block_size": "auto"}}
    if args.reveal:
        methods["two steps"] = {"drafter": drafter, "denoise_steps": 2}
    rows = benchmark(target, methods, prompts, (0.0,), max_new_tokens=min(192, args.response_tokens),
                     stop_ids=tokenizer.eos_ids)
    found = {row["method"]: {key: row[key] for key in ("tau", "speedup", "identical")}
             for row in rows[-len(methods):]}                                    # over all domains
    prompt = next(iter(prompts.values()))[0]
    small, large = (cycle_ms(target, drafter, prompt, block_size=n)["draft_ms"] for n in (2, 16))
    found["one step"] |= {"auto": found.pop("auto")["speedup"], "draft ms at 2 / at 16": small / large}
    return found


def show_claims(found):
    """The claims as a Markdown table. found: {variant: a result for each seed}"""
    lines = ["| claim | measured | mean (least to most) of the seeds | verdict |", "|" + " --- |" * 4]
    for claim, key, names in CLAIMS:
        rows = [[result[key] for result in found[name]] for name in names]
        results = "; ".join(f"{name} {statistics.mean(row):.2f} ({min(row):.2f} to {max(row):.2f})"
                            for name, row in zip(names, rows))
        lines.append(f"| {claim} | {key} | {results} | {verdict([*names], rows)} |")
    return "\n".join(lines)


def verdict(names, rows):
    """rows: results by seed, of the variants from worst to best as the claim has it"""
    means = [statistics.mean(row) for row in rows]
    best = means.index(max(means))
    if all(a < b for worse, better in zip(rows, rows[1:]) for a, b in zip(worse, better)):
        return "holds, in every seed"
    if best == 0 or means[:best + 1] != sorted(means[:best + 1]):
        return "does not hold"
    return "holds on average" if best == len(rows) - 1 else f"holds up to {names[best]}"


# ---- command line ------------------------------------------------------------------------------------------

def learning_rate(text):
    return None if text == "none" else number(float, 0, 1e9)(text)


ROWS, SOME, RATE = number(int, WORLD), number(float, 1e-9, 1e9), learning_rate
PRESETS = ("cpu", "gpu", "target")
# By the stage whose result depends on them: name, type or choices, what each preset sets (or all), help.
# cpu: 15 minutes on 2 cores. gpu: 100 M parameters on one 24 GB card. target: the paper's (section 5.1)
FLAGS = {
    "tokenizer": (
        ("seed", number(int, 0), 0, "of everything random"),
        ("vocab_size", number(int, 258), 448, 16384, None, "tokens, 256 bytes and 2 special ones included")),
    "target": (
        ("minutes", SOME, 15.0, 45.0, None, "of the whole run, benchmark included"),
        ("layers", COUNT, 8, 12, None, "of the target"),
        ("hidden_size", COUNT, 256, 768, None, "of target and drafter"),
        ("intermediate_size", COUNT, 768, 2304, None, "of their MLPs"),
        ("heads", COUNT, 4, 12, None, "query heads"),
        ("kv_heads", COUNT, 2, 3, None, "key-value heads"),
        ("sequence_length", COUNT, 256, 1024, 3072, "tokens of a training sequence"),
        ("batch", ROWS, 8, 16, None, "sequences a step, over all processes"),
        ("target_steps", COUNT, None, "instead of --minutes"),
        ("target_lr", RATE, [0.02, 0.012], [0.02, 3e-3], None, "Muon's, AdamW's; none: AdamW for all")),
    "responses": (
        ("responses_from", ("target", "corpus"), "target", "corpus: the text as it is"),
        ("responses", COUNT, 3072, 32768, None, "at most so many continuations by the target"),
        ("response_batch", COUNT, 128, 256, 32, "rows decoded together"),
        ("response_tokens", COUNT, 192, 447, 2048, "new tokens each"),
        ("prompt_tokens", COUNT, 64, 64, 256, "tokens of each prefix"),
        ("temperatures", number(float, 0, 1e9), [0.0, 0.7, 0.0, 1.0], [0.0, 0.7, 1.0], [0.0, 0.7, 1.0],
         "of the responses, in turn"),
        ("top_k", number(int, 0), None, "of the responses; 0: all (default: --target's advice)"),
        ("top_p", number(float, 1e-9, 1), None, "of the responses; 1: all (default: as top-k)")),
    "drafter": (
        ("draft_layers", COUNT, 3, 5, 5, "of the drafter"),
        ("block_size", number(int, 2), 10, 16, 16, "tokens of a block, anchor included"),
        ("taps", COUNT, 5, "target layers that the drafter is fed with"),
        ("injection", ("kv", "input"), "kv", "their features enter all layers, or the first"),
        ("labels", ("soft", "hard"), "soft", "soft", "hard", "the target's distributions, or its tokens"),
        ("anchors", COUNT, 16, 64, 512, "blocks a sequence"),
        ("anchor_choice", ("random", "fixed"), "random", "fixed: at block_size, ..."),
        ("reveal", number(float, 0, 1), 0.0, "share of blocks partly given, for --denoise-steps"),
        ("gamma", number(float, 1e-9), None, "decay over slots (default: the paper's); inf: none"),
        ("draft_batch", ROWS, 8, 16, 8, "sequences a step, over all processes"),
        ("drafter_steps", COUNT, None, "instead of --minutes"),
        ("epochs", SOME, None, None, 6, "instead of --minutes"),
        ("drafter_lr", RATE, [0.03, 4e-3], [0.02, 3e-3], [None, 6e-4], "as --target-lr")),
    "benchmark": (
        ("prompts", COUNT, 8, "at most so many a domain"),)}
# What else a stage's result depends on, beside that of the stages before it.
BESIDES = {"tokenizer": ["corpus"], "target": ["float32"], "drafter": ["mask_token", "chat_options"],
           "responses": ["target", "weights", "prompts_from"]}
OWN = ([name for name, *_ in flags] + BESIDES.get(stage, []) for stage, flags in FLAGS.items())
STAGES = dict(zip(FLAGS, itertools.accumulate(OWN)))         # lists add up: a stage's, behind those before it


def parser():
    p = Parser(description="Train a target, then a DFlash drafter for it, then benchmark both.",
               epilog="In brackets: what the presets set, and --target.")
    add = p.add_argument
    add("--preset", choices=PRESETS[:2], help="default: gpu where there is a CUDA device, else cpu")
    add("--out", default="out", help="where everything goes, and is found again (default: out)")
    add("--data", nargs="+", metavar="PATH", help="text files, folders (default: stubs; gpu: and sources)")
    add("--target", metavar="DIR", help="train a drafter for this Hugging Face folder, on --data")
    add("--drafter", choices=DRAFTERS, default="dflash", help="or a baseline, into OUT/eagle3 or OUT/ar")
    add("--mask-token", metavar="TOKEN", help="special token or id for the masks (default: a spare one)")
    add("--suffixes", nargs="+", metavar=".EXT", help="of --data's folders, read only such files")
    add("--chat-options", nargs="+", default=[], metavar="KEY=VALUE", help="--target: keywords of the chat "
        "template, as enable_thinking=false; the drafter remembers them")
    add("--rendered", action="store_true", help="--target: in prompts special tokens count as such")
    add("--skip-bad", action="store_true", help="--target: go on without prompts that can't be used")
    add("--checkpoint-seconds", type=number(float, 0), default=60, metavar="N", help="between two (60)")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--device", help="cpu, cuda (default: cuda where there is one)")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile the training steps (default: "
        "on CUDA; on the CPU it takes a minute a stage, and saves little)")
    add("--float32", action="store_true", help="train in float32 where bfloat16 would be faster")
    add("--claims", action="store_true", help="measure the paper's claims over OUT/target: train and "
        "benchmark each variant with 3 seeds, each for the drafter's part of --minutes (hours)")
    for name, kind, *values, text in itertools.chain(*FLAGS.values()):
        known = [f"{preset} {value}" for preset, value in zip(PRESETS, values) if value is not None]
        if known:
            text += f" ({'; '.join(known) if len(values) > 1 else values[0]})"
        nargs = {"temperatures": "+", "target_lr": 2, "drafter_lr": 2}.get(name)
        takes = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": "N"}
        add(f"--{name.replace('_', '-')}", nargs=nargs, help=text, **takes)
    return p


def parse(argv=None):
    """The command line, with the preset's values where it says nothing. UserError where it asks for too
    much."""
    args = parser().parse_args(argv)
    args.device, args.chat_options = find_device(args.device), parse_options(args.chat_options)
    args.preset = args.preset or ("gpu" if args.device.type == "cuda" else "cpu")
    args.target = args.target and str(Path(args.target).resolve())
    preset = PRESETS.index("target" if args.target else args.preset)
    for name, _, *values, _ in itertools.chain(*FLAGS.values()):
        if getattr(args, name) is None and not (name == "epochs" and args.minutes):
            setattr(args, name, values[preset % len(values)])
    for name in ("target_lr", "drafter_lr"):
        rates = getattr(args, name)
        check(rates is None or rates[1] is not None, f"--{name.replace('_', '-')}", rates, "AdamW needs one")
    folder = args.target or Path(args.out) / "target"
    vars(args).update(choose_sampling(folder, args.temperatures, args.top_k, args.top_p))
    if args.target:
        check(args.responses_from == "target" and not args.claims, "--target", args.target, "--claims and "
              "--responses-from corpus need a target that train.py has trained on --data: leave it out")
    else:
        tokens, most = args.prompt_tokens + args.response_tokens, ModelConfig.max_position_embeddings
        check(tokens <= most, "--prompt-tokens + --response-tokens", tokens, f"the target reads {most}")
        sizes = args.hidden_size, args.heads, args.kv_heads
        bad = args.heads % args.kv_heads or args.hidden_size % (2 * args.heads)
        check(not bad, "--hidden-size, --heads, --kv-heads", sizes, "heads must be a multiple of kv-heads, "
              "hidden-size an even one of heads")
    return args


def main(argv=None):
    args = parse(argv)
    run = Run(args)
    if args.target:
        target, tokenizer, prompts, test_prompts = pretrained_target(run, args)
        if args.drafter == "dflash":
            args.mask_token = str(
                pick_mask_token(tokenizer, target.config.vocab_size, args.mask_token, prompts))
    else:
        tokenizer, ids, heldout, test_prompts = make_text(run, args)
        pick_mask_token(tokenizer, tokenizer.vocab_size, args.mask_token)       # refused now, not after hours
        target = train_target(run, args, tokenizer, ids, heldout)
        prompts = random_rows(ids, args.prompt_tokens, args.responses, generator(args.seed, 2)).tolist()
    if args.claims:
        responses = make_responses(run, args, target, tokenizer, prompts)
        measure_claims(run, args, target, tokenizer, test_prompts, responses, corpus_rows(args, ids))
    else:
        data = (corpus_rows(args, ids) if args.responses_from == "corpus" else
                make_responses(run, args, target, tokenizer, prompts))
        drafter = train_drafter(run, args, target, tokenizer, *data)
        if args.drafter == "dflash" and not run.is_done(args, "benchmark"):
            if run.main:
                bench(run, args, target, drafter, tokenizer, test_prompts)
            run.finish()
    if run.world > 1:
        dist.destroy_process_group()


def bench(run, args, target, drafter, tokenizer, prompts):
    if run.device.type == "cuda":                              # as users would; decode.py has --dtype float32
        target, drafter = target.to(run.dtype), drafter.to(run.dtype)
    seconds = run.seconds_left() if run.minutes else None
    tokens = 192 if seconds is None or seconds > 60 else 64
    run_benchmark(run.out, target, {"dflash": drafter}, prompts, seconds=seconds, top_k=args.top_k,
                  top_p=args.top_p, max_new_tokens=min(tokens, args.response_tokens),
                  stop_ids=tokenizer.eos_ids)


if __name__ == "__main__":
    run_command(main)
