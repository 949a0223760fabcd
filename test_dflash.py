"""python -m pytest -q test_dflash.py

Under three minutes on two CPU cores; CUDA and transformers tests skip where there is none."""
import copy
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import product
from pathlib import Path

import pytest
import regex
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close

import decode
import drafter as drafter_module
import kernels
import model
import train
from decode import autoregressive, speculative
from drafter import (DRAFTERS, ARDrafter, DFlashDrafter, TrainingBatch, default_gamma, default_taps,
                     load_drafter, pick_mask_token, sample_anchors)
from model import (CODE_PATTERN, Entry, KVCache, ModelConfig, Tokenizer, Transformer, UserError,
                   encode_entries, parse_options, read_entries, read_json, write_json)

HERE = Path(__file__).parent
# one core for train.py's command lines, which run beside the other tests, one for those
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
torch.set_num_threads(1)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_weights(module, seed):
    """Norms and biases, too: with zeros and ones a wrong one would not show."""
    g = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        mean, std = (0.0, p.shape[-1] ** -0.5) if p.dim() > 1 else (1.0, 0.1)
        torch.nn.init.normal_(p, mean, std, generator=g)
    return module.eval()


SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             max_position_embeddings=512)


def make_pair(kind="dflash", vocab=61, layers=6, block_size=8, **config):
    """A random target and a random drafter for it. kind: a method, or "input": DFlash with that injection.
    Of few tokens a random draft is often kept."""
    config = ModelConfig(**SIZES | dict(vocab_size=vocab, num_hidden_layers=layers) | config)
    target = random_weights(Transformer(config), 0)
    drafter = DRAFTERS.get(kind, DFlashDrafter).for_target(
        target, num_layers=2, block_size=block_size, mask_token_id=vocab - 1,
        injection="input" if kind == "input" else "kv")
    return target, random_weights(drafter, 12)


BASELINES = ("eagle3", "ar")


def tau(out):
    return statistics.mean(sum(out.acceptance_lengths, []))


def fails(call, *words):
    """The call raises a UserError of one line that holds the words."""
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def refused(open, file, *changes):
    """open() fails, with these words (none: the fields' names), where fields of its JSON file are others.
    changes: ({field: value}, *words)"""
    whole = read_json(file)
    for fields, *words in changes:
        write_json(file, {**whole, **fields})
        fails(open, file.name, *words or fields)
    write_json(file, whole)


def training_batch(ids, features, anchors, trainable=None, valid=None, hidden=None, block_size=8):
    """Without hidden: hard labels. Otherwise all tokens are labels, all anchors valid, none revealed."""
    trainable = torch.ones_like(ids, dtype=torch.bool) if trainable is None else trainable
    valid = torch.ones_like(anchors, dtype=torch.bool) if valid is None else valid
    revealed = torch.zeros(*anchors.shape, block_size, dtype=torch.bool)
    return TrainingBatch(ids, trainable, features, hidden, anchors, valid, revealed, soft=hidden is not None)


@pytest.fixture(scope="module")
def trained():
    """A target that has learned to count in several steps (x, x + d, x + 2d, ... mod 50) and a drafter that
    has learned from it: it accepts long runs, but not always."""
    target, drafter = make_pair(layers=4)
    g = torch.Generator().manual_seed(0)

    def target_loss(rows):
        return F.cross_entropy(target.logits(target(rows[:, :-1])[0]).transpose(1, 2), rows[:, 1:])

    def drafter_loss(rows):
        features = target(rows, taps=drafter.config.target_layer_ids)[1]
        anchors = sample_anchors(torch.ones_like(rows, dtype=torch.bool), 8, 8, g)[0]
        total, weight = drafter.loss(target, training_batch(rows, features, anchors))
        return total / weight
    for module, loss, steps in ((target, target_loss, 80), (drafter, drafter_loss, 100)):
        if module is drafter:
            drafter.init_weights(target, g)
        optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3, fused=True)
        for _ in range(steps):
            start, step = torch.randint(50, (16, 1), generator=g), torch.randint(1, 3, (16, 1), generator=g)
            loss((start + step * torch.arange(32)) % 50).backward()
            optimizer.step()
            optimizer.zero_grad()
        module.requires_grad_(False)
    return target, drafter


@pytest.fixture
def no_code_generation(monkeypatch):
    """torch.compile captures as ever and makes functional, but PyTorch's own operators run what comes out:
    the C++ compiler's half minute is left out."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic=None, options=None: compile(
        function, dynamic=dynamic, backend="aot_eager"))
    for name in ("compiled", "compiled_step"):  # without what others have compiled
        monkeypatch.setattr(kernels, name, cache(getattr(kernels, name).__wrapped__))
    yield
    torch._dynamo.reset()


def graphs_compiled(step):
    """How many graphs the call adds."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    step()
    return stats["unique_graphs"] - before


# ---- kernels.py --------------------------------------------------------------------------------------------

def masks(device="cpu"):
    """{name: (mask_mod, queries, keys, definition in plain Python)}, of two rows each."""
    anchors, start = [[5, 3, 6, 5, 0], [19, 7, 8, 1, 18]], [0, 7]  # overlapping, equal, first and last
    family = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    at, ancestors = torch.tensor(start, device=device), torch.tensor(family, device=device)
    return {
        "training": (kernels.dflash_training(torch.tensor(anchors, device=device), 20, 4), 20, 40,
                     lambda b, q, kv: kv < anchors[b][q // 4] if kv < 20 else (kv - 20) // 4 == q // 4),
        "causal": (kernels.causal(at[:, None] + torch.arange(20, device=device)), 20, 40,
                   lambda b, q, kv: kv <= start[b] + q),
        "tree": (kernels.tree(at, ancestors.bool().expand(2, 4, 4)), 4, 12,
                 lambda b, q, kv: kv < start[b] or kv - start[b] < 4 and family[q][kv - start[b]] == 1),
        "drafting": (kernels.context_and_block((at + 4)[:, None].expand(-1, 4)), 4, 12,
                     lambda b, q, kv: kv < start[b] + 4)}


def attention_inputs(Q, KV, device="cpu"):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, 16, generator=g).to(device) for heads, n in ((4, Q), (2, KV), (2, KV))]


@pytest.mark.parametrize("name", masks())
def test_a_mask_equals_its_definition_and_its_executors_a_plain_softmax(name, no_code_generation):
    mask_mod, Q, KV, allowed = masks()[name]
    dense = kernels.dense(mask_mod, 2, Q, KV, "cpu")
    q, k, v = attention_inputs(Q, KV)
    expected = torch.zeros_like(q)
    for b, i in product(range(2), range(Q)):
        keys = [j for j in range(KV) if allowed(b, i, j)]
        assert (dense[b, 0, i] == 0).nonzero().flatten().tolist() == keys, (b, i)
        for h in range(4):
            expected[b, h, i] = torch.softmax(k[b, h // 2, keys] @ q[b, h, i] / 4, 0) @ v[b, h // 2, keys]
    assert_close(kernels.attention(q, k, v, dense), expected)  # with gradients: plain products
    with torch.no_grad():
        assert_close(kernels.attention(q, k, v, dense), expected)  # scaled_dot_product_attention
        if name == "training":
            block_mask = create_block_mask(mask_mod, 2, None, Q, KV, device="cpu")
            assert_close(kernels.attention(q, k, v, block_mask), expected)  # FlexAttention


@cuda
@pytest.mark.parametrize("name", ("training", "causal"))
def test_flex_attention_equals_dense_forward_and_backward_on_cuda(name):
    mask_mod, Q, KV, _ = masks("cuda")[name]
    block_mask = kernels.compiled(create_block_mask)(mask_mod, 2, None, Q, KV, device="cuda")
    results = []
    for mask in (block_mask, kernels.dense(mask_mod, 2, Q, KV, "cuda")):
        inputs = [x.requires_grad_() for x in attention_inputs(Q, KV, "cuda")]
        out = kernels.attention(*inputs, mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert_close(*results, atol=2e-3, rtol=2e-3)


# ---- model.py ----------------------------------------------------------------------------------------------

def test_cached_passes_equal_one_pass_for_ragged_rows():
    (target, _), after = make_pair(), []
    ids = torch.randint(61, (3, 30), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 9, 1])
    with torch.no_grad():
        expected = torch.cat(target(ids, taps=(1, 3)), -1)
        cache = KVCache(target.config, 3, 40, "cpu", torch.float32)
        target(ids[:, :9], torch.arange(9).expand(3, -1), cache)  # right-padded prefill
        for step in range(4):  # then blocks of 3, each row at its own place
            at = lengths[:, None] + torch.arange(3)
            found = torch.cat(target(ids.gather(1, at), at, cache, (1, 3)), -1)
            assert_close(found, expected[torch.arange(3)[:, None], at], atol=1e-5, rtol=1e-5)
            lengths = lengths + torch.tensor([3, 1, 2])  # a rollback is a smaller step
    for layer in (1, 3):  # taps are the residual stream after a layer
        target.model.layers[layer].register_forward_hook(lambda module, args, out: after.append(out))
    assert_close(target(ids, taps=(1, 3))[1], torch.cat(after, -1))


def test_taps_are_distinct():
    for layers, n, taps in ((36, 5, [1, 9, 17, 25, 33]), (8, 5, [1, 2, 3, 4, 5]), (8, 1, [4]), (2, 5, [0, 1]),
                            (7, 5, [0, 2, 3, 4, 6]), (4, 5, [0, 1, 2, 3]), (1, 5, [0]), (36, 3, [1, 17, 33]),
                            (8, 3, [1, 3, 5]), (6, 3, [1, 2, 3]), (4, 3, [0, 2, 3]), (1, 3, [0])):
        assert default_taps(layers, n) == taps


PLACES = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **PLACES}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **PLACES}
HF_CONFIGS = {
    "qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "qwen3-yarn": dict(head_dim=16, tie_word_embeddings=False, rope_theta=1e6, rope_scaling=YARN),
    "llama": dict(tie_word_embeddings=False, attention_bias=True),
    "llama-llama3": dict(tie_word_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3),
    "qwen2": dict(tie_word_embeddings=False)}
HF_SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                num_attention_heads=4)


def write_hugging_face(folder, std, model_type, **config):
    """A small random model in several files, written by transformers itself."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **HF_SIZES | dict(
        num_key_value_heads=2, bos_token_id=None, eos_token_id=5, pad_token_id=None,
        max_position_embeddings=256) | config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in model.parameters():  # biases and norms start at 0 and 1: a wrong one would not show
        torch.nn.init.normal_(p, std=std) if p.dim() > 1 else p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("kind", HF_CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(kind, tmp_path):
    model = write_hugging_face(tmp_path, 0.2, kind.split("-")[0], **HF_CONFIGS[kind])
    target, close = Transformer.from_pretrained(tmp_path), partial(assert_close, atol=1e-4, rtol=1e-4)
    ids = torch.randint(97, (2, 150), generator=torch.Generator().manual_seed(0))
    theirs = model(ids, output_hidden_states=True)
    hidden, features = target(ids, taps=(0, 1))
    close(target.logits(hidden), theirs.logits)
    close(features, torch.cat(theirs.hidden_states[1:3], -1))  # layer i is hidden_states[i + 1]
    target.save_pretrained(tmp_path / "again")  # and back
    auto = sys.modules["transformers"].AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    close(again(ids).logits, theirs.logits)


def test_old_and_new_configs_say_the_same():
    read = lambda **more: ModelConfig.from_dict({"model_type": "llama", **HF_SIZES, **more})
    scaling = {"type": "yarn", "factor": 4.0, **PLACES}
    new, plain = {"rope_theta": 1e6, **YARN}, {"rope_type": "default", "rope_theta": 1e6}
    old = read(rope_theta=1e6, rope_scaling=scaling)
    assert (old.rope_theta, old.num_key_value_heads, old.head_dim) == (1e6, 4, 16)
    assert old.rope_scaling["rope_type"] == "yarn"
    for raw in (old.to_dict(), dict(rope_theta=1e6, rope_scaling=YARN), dict(rope_parameters=new),
                # rope_parameters count, as in transformers
                dict(rope_theta=None, rope_parameters=new), dict(rope_theta=5.0, rope_parameters=new),
                dict(rope_scaling=scaling, rope_parameters=plain),
                dict(rope_scaling=new, rope_parameters=new)):
        assert read(**raw) == old
    assert read(model_type="qwen3").head_dim == 128  # as transformers has it where the file says nothing
    assert read(rope_scaling=None, head_dim=None).rope_scaling is None
    assert read(rope_theta=None, rope_parameters=plain).rope_theta == 1e6
    other = {**scaling, "factor": 8.0}
    fails(lambda: read(rope_scaling=other, rope_parameters=new), "rope_scaling", "another")


def test_distinct4_tells_loops_from_text():
    assert model.distinct4([[1, 2, 3, 4, 5], [1, 2]]) == model.distinct4([[1, 2]]) == 1.0
    assert model.distinct4([[7] * 13]) == 0.1


def test_damaged_files_are_named_before_any_work(tmp_path):
    opened = partial(Tokenizer.from_pretrained, tmp_path)
    reported = partial(decode.run_benchmark, tmp_path, None, {}, {}, max_new_tokens=1)
    fails(opened, "tokenizer.json: cannot be read")
    for name, call, *texts in (
            ("config.json", partial(Transformer.from_pretrained, tmp_path), "{", "[]", "[[1, 2]]", "5"),
            ("tokenizer.json", opened, "{", "[]", ""), ("report.json", reported, "x", "[]")):
        for text in texts:
            (tmp_path / name).write_text(text)
            no_object = text in ("[]", "[[1, 2]]", "5")
            fails(call, f"{name}: ", "no JSON object" if no_object else "JSONDecodeError")
    for own, options in ((3, {}), ({"chat_options": None}, {}), ({"chat_options": {"a": 1}}, {"a": 1})):
        write_json(tmp_path / "config.json", {"dflash_config": own})
        assert drafter_module.remembered_options(tmp_path) == options


def assert_same(a, b):
    """Of two models: type, configuration and dtype, and the same weights under the same names."""
    assert (type(a), a.config, a.dtype) == (type(b), b.config, b.dtype)
    assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_what_was_saved_opens_and_decodes(kind, dtype, tmp_path):
    target, drafter = make_pair(kind, tie_word_embeddings=dtype != torch.bfloat16)
    target.to(dtype).save_pretrained(tmp_path / "target")
    drafter.to(dtype).save_pretrained(tmp_path / "drafter")
    target_again = Transformer.from_pretrained(tmp_path / "target")
    drafter_again = load_drafter(tmp_path / "drafter", target_again)
    assert_same(target_again, target)
    assert_same(drafter_again, drafter)
    assert Transformer.from_pretrained(tmp_path / "target", dtype=torch.float32).dtype == torch.float32
    out = speculative(target_again, drafter_again, PROMPTS, 12, temperature=1.0, seed=0)
    assert [len(row) for row in out.tokens] == [12] * len(PROMPTS)
    assert not list(tmp_path.rglob("*.tmp"))


# ---- the tokenizer -----------------------------------------------------------------------------------------

TEXT = ("def f(self, x: int = 12345) -> None: ...\n    return self.x_y\r\n\t# don't, I'LL, we've\n\n" * 8
        + "héllo wörld — 你好世界 こんにちは Привет мир नमस्ते مرحبا שלום 안녕 🎉👩‍👩‍👧‍👦🇫🇷 ½ Ⅷ ٣٤ 3.1  \n" * 8)
ATOMS = ["  ", " ", "\n", "\r\n", "\t", "   \n  ", "\xa0", "\u3000", "\x85", "\x1c", "don't", "I'LL", "'ſ",
         "'S", "123", "4567890", "٣٤", "½", "你好", "カタカナ", "Привет", "नमस्ते", "مرحبا", "안녕", "각", "e\u0301",
         "\u0301", "A\u030a", "🎉", "👩‍👩‍👧‍👦", "def f(x):\n    return x", "__init__", "->", "{}", "!!",
         "<|eot|>", "<|im_start|>", "<|im", "<think>", "e\u0301!", "é!", "im_", "|>", "\ufeff", "\x00",
         "\U00010400", " world", "a" * 50, " " * 40, "0" * 30]
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PATTERNS = {"gpt2": [], "some_bytes": [], "smollm2": [], "gaps": [r"\p{L}+|\d"], "qwen": [QWEN],
            "shuffled": [QWEN], "llama3": [LLAMA], "two_splits": [r"\p{N}{1,3}", "[一-龥]+", QWEN]}


def build(kind, folder):
    """Train a small tokenizer of the kind with the tokenizers library and save it."""
    hf = pytest.importorskip("tokenizers")
    pre = hf.pre_tokenizers
    tok = hf.Tokenizer(hf.models.BPE(ignore_merges=kind == "llama3"))
    if kind == "qwen":
        tok.normalizer = hf.normalizers.NFC()
    splits = [pre.Split(hf.Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    if kind == "smollm2":
        splits = [pre.Digits(individual_digits=True)]
    bytelevel = pre.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[kind])
    tok.pre_tokenizer = pre.Sequence([*splits, bytelevel]) if splits else bytelevel
    tok.decoder = hf.decoders.ByteLevel()
    tok.train_from_iterator([TEXT], hf.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=[] if kind == "some_bytes" else pre.ByteLevel.alphabet(),
        special_tokens=["<|eot|>"] if kind == "gpt2" else [], show_progress=False))
    tok.add_special_tokens([hf.AddedToken(s, special=True) for s in ("<|eot|>", "<|im_start|>", "<|im")])
    tok.add_tokens([hf.AddedToken("<think>", normalized=False), hf.AddedToken("é!"), hf.AddedToken("im_")])
    if kind == "llama3":
        bos = ("<|im_start|>", tok.token_to_id("<|im_start|>"))
        tok.post_processor = hf.processors.TemplateProcessing("<|im_start|> $A", special_tokens=[bos])
    file = folder / "tokenizer.json"
    tok.save(str(file))
    if kind == "shuffled":  # ids out of the merges' order, and merges as strings
        data = read_json(file)
        words = data["model"]["vocab"]
        data["model"]["vocab"] = dict(zip(words, random.Random(0).sample([*words.values()], len(words))))
        data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
        write_json(file, data)
    return hf.Tokenizer.from_file(str(file))


def same_elsewhere(ours, folder):
    """The tokenizers library and transformers make the same ids with the folder's files."""
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    rnd = random.Random(1)
    for text in [TEXT, "", *("".join(rnd.choices(atoms, k=rnd.randint(1, 12)))
                             for atoms in (ATOMS, " \n\r\ta1'!é") for _ in range(400))]:
        for special in (True, False):
            theirs.encode_special_tokens = not special
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, special=special) == ids, (special, text)
        if "é!" not in ours.decode(ids):  # the library decodes an added é as the single byte E9
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    auto, text = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder), TEXT + "<|eot|>"
    assert auto.eos_token_id == ours.eos_id
    ids, bos = ours.encode(text, special=True), [ours.bos_id] if ours.bos_id else []
    assert auto(text).input_ids == bos + ids and auto.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("kind", PATTERNS)
def test_ids_equal_the_library(kind, tmp_path):
    theirs = build(kind, tmp_path)
    eos, bos = map(theirs.token_to_id, ("<|eot|>", "<|im_start|>"))
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [eos, 1]})
    ours = Tokenizer.from_pretrained(tmp_path)
    assert (ours.eos_id, ours.bos_id) == (eos, bos if kind == "llama3" else None)
    assert ours.vocab_size == max(theirs.get_vocab(True).values()) + 1
    assert not set(ours.encode("<|eot|><|im_start|><|im")) & set(ours.special_ids.values())
    for text in (" " * 10**6, " " * 10**6 + "x", "a" * 10**6) if kind in ("qwen", "smollm2") else ():
        assert ours.decode(ours.encode(text)) == text  # tiktoken alone gives up on the spaces
    ours.save_pretrained(tmp_path / "again")
    again = Tokenizer.from_pretrained(tmp_path / "again")
    assert again.data == ours.data == read_json(tmp_path / "tokenizer.json") and again.eos_id == eos
    same_elsewhere(ours, tmp_path / "again")


MERGES = train.train_bpe([TEXT * 2], 420, CODE_PATTERN)


def naive_bpe(text, vocab_size):
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(CODE_PATTERN, text)]
    made, merges = {bytes([i]): i for i in range(256)}, []
    while len(made) < vocab_size and (count := Counter(pair for word in words
                                                       for pair in zip(word, word[1:]))):
        a, b = min(count, key=lambda p: (-count[p], made[p[0]], made[p[1]]))
        made[a + b] = len(made)
        merges.append((a, b))
        for word, i in ((word, i) for word in words for i in range(len(word))):
            if word[i:i + 2] == [a, b]:
                word[i:i + 2] = [a + b]
    return merges


@pytest.mark.parametrize("text, size", (
    (TEXT, 450), (TEXT, 5000), ("a" * 37 + " aaaa aaa abab" * 3, 300), ("", 300)))
def test_trainer_equals_a_naive_one(text, size):
    assert train.train_bpe([text], size, CODE_PATTERN) == naive_bpe(text, size)


def test_our_own_tokenizer_round_trips_and_opens_elsewhere(tmp_path):
    ours = Tokenizer.from_merges(train.train_bpe([TEXT], 400, CODE_PATTERN))
    rnd = random.Random(0)
    for _ in range(300):
        text = "".join(chr(rnd.randrange(0x110000)) for _ in range(20)).encode("utf-8", "replace").decode()
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("a\ud800b")) == "a\ufffdb"
    assert (ours.eos_id, ours.vocab_size) == (400, 402) and ours.encode("<|mask|>", special=True) == [401]
    assert ours.decode_bytes([0, 255, 401]) == b"\0\xff<|mask|>" and ours.decode([255]) == "\ufffd"
    assert ours.decode([402, 65]) == "A"  # a model's vocabulary may be padded
    ours.save_pretrained(tmp_path)
    same_elsewhere(ours, tmp_path)


@pytest.mark.parametrize("place, value, says", (  # ...: taken out
    ("model type", "Unigram", 'model.type = "Unigram"'), ("model end_of_word_suffix", "</w>", "end_of_word"),
    ("model byte_fallback", True, "model.byte_fallback = true"), ("model vocab", ..., "vocab"),
    ("model vocab Ġ", ..., "model."), ("model vocab À", ..., "unk_token"), ("model", None, "broken"),
    ("model merges -1", ["zz", "q"], "model.merges"), ("normalizer", {"type": "Lowercase"}, '"Lowercase"'),
    ("pre_tokenizer", {"type": "Metaspace"}, "Metaspace"), ("added_tokens 0 lstrip", True, "lstrip"),
    ("pre_tokenizer", None, "pre_tokenizer = null"),
    ("pre_tokenizer pretokenizers 1 add_prefix_space", True, "add_prefix_space"),
    ("pre_tokenizer pretokenizers 0 behavior", "MergedWithNext", "MergedWithNext"),
    ("pre_tokenizer pretokenizers 0 pattern Regex", "(", "broken"),
    ("pre_tokenizer pretokenizers 0 pattern Regex", r"(?=\d)", "pattern")))
def test_a_tokenizer_that_is_refused(place, value, says, tmp_path):
    build("qwen", tmp_path)
    data = read_json(tmp_path / "tokenizer.json")
    data["model"]["unk_token"] = "!" if says == "unk_token" else None
    *path, last = [int(key) if key.lstrip("-").isdecimal() else key for key in place.split()]
    at = reduce(lambda part, key: part[key], path, data)
    at[last] = value
    if value is ...:
        del at[last]
    write_json(tmp_path / "tokenizer.json", data)
    fails(lambda: Tokenizer.from_pretrained(tmp_path), says, "tokenizer.json: ")


# ---- drafter.py --------------------------------------------------------------------------------------------

def normed(target, drafter, *batch, **how):
    """What the drafter's final norm gives in its loss of training_batch(*batch, **how): a list, an entry a
    call."""
    caught = []
    hook = drafter.norm.register_forward_hook(lambda module, args, out: caught.append(out))
    drafter.loss(target, training_batch(*batch, **how, block_size=drafter.config.block_size))
    hook.remove()
    return caught


def block_outputs(target, drafter, ids, features, anchors):
    """DFlash's hidden states of all blocks (B, N, block_size, C), as in training."""
    hidden, = normed(target, drafter, ids, features, anchors)
    return hidden.view(*anchors.shape, drafter.config.block_size, -1).detach()


@pytest.mark.parametrize("kind", ("dflash", "input", "eagle3"))
@torch.no_grad()
def test_training_and_decoding_draft_the_same(kind):
    """The same anchor and context give the same logits, decoded over several cycles with a cache and features
    in ragged, gappy portions; EAGLE-3's where the drafts equal the text."""
    target, drafter = make_pair(kind, block_size=5)
    ids = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(3))
    anchors = torch.tensor([[6, 9, 10, 15], [3, 4, 9, 11]])
    _, features = target(ids, taps=drafter.config.target_layer_ids)
    if kind == "eagle3":  # the steps of chains from everywhere
        steps = normed(target, drafter, ids, features, torch.arange(1, 40).expand(2, -1))
        outputs = torch.stack([hidden[torch.arange(2)[:, None], anchors - 1] for hidden in steps], 2)
    else:
        outputs = block_outputs(target, drafter, ids, features, anchors)[:, :, 1:]
    cache = KVCache(drafter.config.layers, 2, 60, "cpu", torch.float32)
    drafter.read(target, ids, features, torch.arange(3).expand(2, -1), cache)  # as the prefill does
    for n in range(4):
        start = anchors[:, n:n + 1]
        known = features.masked_fill((torch.arange(40) >= start)[..., None], 9.0)  # what is not known yet
        text = lambda logits, slot: ids.gather(1, start + slot)
        logits = drafter.draft(target, ids, known, start[:, 0], 5, cache, text)
        assert_close(logits, target.logits(outputs[:, n]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ("dflash", "input"))
def test_nothing_at_or_after_an_anchor_leaks_into_its_block(kind):
    """By gradients: a block depends on each feature before its anchor and on its own tokens, on no others.
    (The test below says what these tokens are.)"""
    target, drafter = make_pair(kind, block_size=6)
    anchors = torch.tensor([[4, 7, 8, 15, 20]])  # blocks overlap
    features = torch.randn(1, 30, 160, generator=torch.Generator().manual_seed(0)).requires_grad_()
    embedded = []
    target.model.embed_tokens.register_forward_hook(lambda module, args, out: embedded.append(out))
    hidden, = normed(target, drafter, torch.arange(30)[None], features, anchors)
    for n, (block, anchor) in enumerate(zip(hidden[0].split(6), anchors[0].tolist())):
        seen = torch.autograd.grad(block.sum(), [features, *embedded], retain_graph=True)
        of_features, of_tokens = (gradient[0].any(-1).nonzero().flatten().tolist() for gradient in seen)
        assert of_features == [*range(anchor)]
        assert of_tokens == [*range(6 * n, 6 * n + 6)]


def test_anchors_slot_holds_the_token_and_the_rest_masks():
    target, drafter = make_pair(block_size=4)
    seen, ids = [], torch.arange(12)[None]
    target.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(args[0].tolist()))
    cache = KVCache(drafter.config.layers, 1, 20, "cpu", torch.float32)
    with torch.no_grad():
        drafter.draft(target, ids + 14, torch.zeros(1, 12, 160), torch.tensor([3]), 4, cache, None)
    batch = training_batch(ids, torch.zeros(1, 12, 160), torch.tensor([[5, 2]]), block_size=4)
    drafter.loss(target, batch)
    batch.revealed[0, 1, 2] = True  # the switch: a slot that holds its token
    drafter.loss(target, batch)
    assert seen == [[[17, 60, 60, 60]], [[5, 60, 60, 60, 2, 60, 60, 60]], [[5, 60, 60, 60, 2, 60, 4, 60]]]
    weight = drafter_module.training_blocks(batch, 4, 60, 4.0)[2][0]
    # given slots are no labels
    assert (weight == 0).tolist() == [[True, False, False, False], [True, False, True, False]]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_loss_equals_its_definition_whole_and_in_chunks(kind):
    target, drafter = make_pair(kind, block_size=4)
    ids = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(0))
    everywhere = torch.arange(16).expand(2, -1)
    trainable = everywhere >= torch.tensor([[3], [6]])
    anchors, valid = torch.tensor([[4, 13, 9], [6, 15, 8]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    valid_anchors = anchors.masked_fill(~valid, 99)
    with torch.no_grad():
        target_hidden, features = target(ids, taps=drafter.config.target_layer_ids)
        # Each step of the loss: its weight, the position of the token that each hidden state predicts, these
        if kind == "dflash":  # slot k predicts the token AT its position
            outputs = block_outputs(target, drafter, ids, features, anchors)
            steps = [(math.exp(-(k - 1) / 4), valid_anchors + k, outputs[:, :, k]) for k in (1, 2, 3)]
        elif kind == "eagle3":
            steps = [(0.8**j, everywhere + 2 if j == 0 else valid_anchors + 1 + j, hidden)
                     for j, hidden in enumerate(normed(target, drafter, ids, features, anchors))]
        else:
            steps = [(1.0, everywhere + 1, drafter.transformer(ids)[0])]
        terms, everything = [], 0  # a term: its weight, the row and position of the label, log-probabilities
        for w, label_at, hidden in steps:
            labelled = [(b, n, at) for b in range(2) for n, at in enumerate(label_at[b].tolist())
                        if at < 16 and trainable[b, at]]
            everything = everything or len(labelled)
            w *= everything / len(labelled) if kind == "eagle3" else 1  # fewer chains weigh as much as all
            head = drafter.transformer if kind == "ar" else target
            terms += [(w, b, at, head.logits(hidden[b, n]).log_softmax(-1)) for b, n, at in labelled]
        soft = target.logits(target_hidden).softmax(-1).roll(1, 1)  # a token is predicted from the one before
    for labels, hidden in ((F.one_hot(ids, 61).float(), None), (soft, target_hidden)):
        expected = -sum(w * (labels[b, at] @ log_probs).item() for w, b, at, log_probs in terms)
        batch, gradients = training_batch(ids, features, anchors, trainable, valid, hidden, 4), []
        for chunk in (2**26, 61 * 5):
            loss, weight = drafter.loss(target, batch, 4.0, chunk)
            weights = sum(w for w, *_ in terms)
            assert (loss.item(), weight.item()) == pytest.approx((expected, weights), rel=1e-5)
            gradients.append(torch.autograd.grad(loss, [*drafter.parameters()]))
        assert_close(*gradients)
    assert [default_gamma(n) for n in (16, 10, 8)] == [7, 5, 4]


def test_a_new_drafter_starts_as_the_targets_last_layers():
    for kind, model_type in (("dflash", "qwen3"), ("dflash", "llama"), ("eagle3", "qwen3")):
        target, drafter = make_pair(kind, model_type=model_type)
        drafter.init_weights(target, torch.Generator().manual_seed(0))
        theirs = target.model.layers[5].state_dict()
        for name, ours in drafter.layers[-1].state_dict().items():
            # EAGLE-3's columns that read embeddings come first, and start small
            more = 32 if kind == "eagle3" and re.search("[qkv]_proj", name) else 0
            assert torch.equal(ours[..., more:], theirs.get(name, torch.ones(16))), name
            assert not more or 0 < ours[:, :more].std() < 0.05
        x = torch.randn(drafter.fc.in_features)
        assert F.cosine_similarity(drafter.fc(x), x[-32:], dim=0) > 0.8  # reads the last tap


def test_anchors_are_random_different_and_trainable():
    trainable, seen = torch.arange(30) >= torch.tensor([[10], [26]]), set()
    for seed in range(200):
        anchors, valid, _ = sample_anchors(trainable, 8, 4, torch.Generator().manual_seed(seed))
        assert valid[0].all() and valid[1].sum() == 3  # 26, 27, 28 have a trainable successor
        assert len(set(anchors[0].tolist())) == 8 and set(anchors[1][valid[1]].tolist()) == {26, 27, 28}
        seen |= set(anchors[0].tolist())
    assert seen == set(range(10, 29))
    # the switches: blocks cut at multiples of their size; slots that show their tokens
    anchors, valid, revealed = sample_anchors(trainable, 8, 4, torch.Generator(), choice="fixed")
    assert [set(row[ok].tolist()) for row, ok in zip(anchors, valid)] == [{12, 16, 20, 24, 28}, {28}]
    assert not revealed.any()
    _, _, revealed = sample_anchors(torch.ones(200, 30).bool(), 20, 8, torch.Generator(), reveal=0.3)
    assert revealed.any(-1).float().mean() == pytest.approx(0.3, abs=0.03)
    assert revealed.float().mean() == pytest.approx(0.15, abs=0.02)


def test_drafters_have_the_published_layout(tmp_path):
    target, drafter = make_pair()
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = read_json(file)
    own = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["block_size"], config["num_target_layers"]) == (8, 6)
    assert (own["mask_token_id"], own["target_layer_ids"]) == (60, drafter.config.target_layer_ids)
    # a draft layer has a target layer's names, and there is no embedding, no head
    names = {name[6:] for name in target.state_dict() if re.match(r"model\.layers\.[01]\.", name)}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() == names
    del config["block_size"], own["block_size"]
    for raw in ({**config, "dflash_config": {**own, "block_size": 8}}, {**config, "block_size": 8}):
        write_json(file, raw)  # newer files hold it inside dflash_config
        assert_same(DFlashDrafter.from_pretrained(tmp_path, target), drafter)


# ---- decode.py: lossless -----------------------------------------------------------------------------------

PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 12, 14, 16], [40, 35, 30]]
TEMPERATURES = (0.0, 0.9)
WAYS = {**{f"block {n}": dict(block_size=n) for n in (1, 2, 5, 11)},
        "auto": dict(block_size="auto"), "auto tree": dict(block_size="auto", tree_budget=16),
        "wandering": dict(block_size="auto"), "wandering tree": dict(block_size="auto", tree_budget=16),
        "tree": dict(tree_budget=12), "small tree": dict(tree_budget=4, block_size=5),
        "wide tree": dict(tree_budget=40, block_size=3), "two steps": dict(denoise_steps=2),
        "three steps tree": dict(denoise_steps=3, tree_budget=12)}


class Wandering(decode.Auto):
    """Chooses anything, whatever it has seen: every way through the loop."""
    dice = random.Random(0)

    def choose(self, probability):
        super().choose(probability)
        self.size = self.dice.choice([n for n in self.sizes if n <= len(probability)])
        self.expected = 1.0

    def decide(self):
        self.plain_cycles = self.dice.choice([0, 0, 0, 1, 2, 12])


@pytest.fixture(autouse=True)
def fresh_decoders():
    decode.idle.clear()


def always(value):
    """An attribute that nobody changes."""
    return property(lambda self: value, lambda self, other: None)


@pytest.fixture(params=("cut", "fixed"))
def shapes(request, monkeypatch):
    """Both shapes of the loop, the CPU's and CUDA's (those of graphs, and several cycles between two looks),
    run here; only the graphs need CUDA."""
    if request.param == "fixed":
        monkeypatch.setattr(decode.Decoder, "compile", always(True), raising=False)
        monkeypatch.setattr(decode.Decoder, "look_every", always(3), raising=False)
        monkeypatch.setattr(kernels, "compiled_step", lambda function: function)


def decode_both_ways(target, drafter, prompts, n, way, monkeypatch, temperature, **how):
    """Plain decoding and a way of drafting, the same tokens, in the batch and alone; also with a stop token.
    -> what was drafted"""
    if "wandering" in way:
        monkeypatch.setattr(decode, "Auto", Wandering)
        monkeypatch.setattr(Wandering, "dice", random.Random(0))
    draft = partial(speculative, target, drafter, **WAYS[way], temperature=temperature, **how)
    seeds = [7, 8, 9, 10]
    plain = partial(autoregressive, target, prompts, n, temperature=temperature, seed=seeds, **how)
    rows = plain().tokens
    assert draft(prompts[::-1], n, seed=seeds[::-1]).tokens == rows[::-1]
    out = draft(prompts, n, seed=seeds)  # nothing is carried over from other rows' call
    assert out.tokens == rows
    # the prefill's token belongs to no cycle
    assert all(sum(lengths) >= n - 1 for lengths in out.acceptance_lengths)
    alone = draft(prompts[:1], n, seed=seeds[:1])
    assert alone.tokens == rows[:1]
    assert "auto" in WAYS[way].values() or alone.acceptance_lengths == out.acceptance_lengths[:1]
    stop = rows[1][n // 4]  # rows end at different times, others go on for long
    expected = [row[:row.index(stop) + 1] if stop in row else row for row in rows]
    assert plain(stop_ids=[stop]).tokens == expected
    ended = draft(prompts, n, stop_ids=[stop], seed=seeds)
    assert ended.tokens == expected
    for row, lengths in zip(expected, ended.acceptance_lengths):
        assert stop not in row or sum(lengths) == len(row) - 1  # none behind a stop token counts
    return out


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind, way", [
    *product(["trained"], WAYS), *product(["dflash"], ("block 5", "tree", "wandering tree", "two steps")),
    *product(["input"], ("block 5", "wandering tree")),
    *product(BASELINES, ("block 5", "block 11", "auto", "wandering"))])
def test_the_text_is_the_targets(kind, way, temperature, shapes, trained, monkeypatch):
    few = dict(vocab=5, block_size=5) if kind in BASELINES else {}
    target, drafter = trained if kind == "trained" else make_pair(kind, layers=4, **few)
    prompts = [[token % target.config.vocab_size for token in prompt] for prompt in PROMPTS]
    out = decode_both_ways(target, drafter, prompts, 24, way, monkeypatch, temperature)
    if kind == "trained" and way in ("block 5", "tree"):
        assert 1.3 < tau(out) < 5  # the test sees long and short cycles
    assert kind not in BASELINES or tau(out) > 1.1 or way in ("auto", "wandering")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_behind_plain_cycles_have_the_whole_context(kind, shapes, monkeypatch):
    target, drafter = make_pair(kind, layers=4, vocab=5, block_size=5)
    monkeypatch.setattr(decode, "Auto", Wandering)
    draft, drafts = drafter.draft, []

    def compared(target, text, features, anchor_at, block_size, cache, sample, steps):
        logits = draft(target, text, features, anchor_at, block_size, cache, sample, steps)
        for row, at, found in zip(text, anchor_at, logits):  # and anew, each row alone, with an empty cache
            context = target(row[None, :at], taps=drafter.config.target_layer_ids)[1]
            empty = KVCache(drafter.config.layers, 1, 99, "cpu", torch.float32)
            drafter.read(target, row[None], context, torch.arange(at)[None], empty)
            context = F.pad(context, (0, 0, 0, 1))
            # the drafts that the next passes of a baseline read
            given = lambda logits, slot: torch.tensor([[found[slot - 1].argmax()]])
            expected = draft(target, row[None], context, at[None], block_size, empty, given, steps)
            assert_close(found, expected[0], atol=1e-4, rtol=1e-4)
            drafts.append(int(at))
        return logits
    monkeypatch.setattr(drafter, "draft", compared)
    prompts = [[token % 5 for token in prompt] for prompt in PROMPTS]
    speculative(target, drafter, prompts, 60, block_size="auto")
    assert len(drafts) > 20


def test_sampling_keeps_to_its_noise(trained, monkeypatch):
    """top-k and top-p, and a sampled text that repeats with its seed whatever is drafted; other seeds and
    rows give others."""
    for how in (dict(top_k=5), dict(top_k=9, top_p=0.7)):
        decode_both_ways(*trained, PROMPTS, 20, "wandering tree", monkeypatch, 1.5, **how)
    texts = [autoregressive(trained[0], [PROMPTS[1]] * 2, 20, temperature=1.5, seed=seed).tokens
             for seed in (3, 3, 4, None, None)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1] and len({str(text) for text in texts}) == 4


class AsksTheHost(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes each operator whose result, or whose result's shape, depends on the values of a tensor and has to
    be known by the host, and each tensor made out of Python numbers: what a CUDA graph can't capture."""
    FORBIDDEN = ("_local_scalar_dense", "aten.item", "nonzero", "masked_select", "unique", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        by_mask = name.startswith(("aten.index.", "aten.index_put")) and torch.bool in {
            index.dtype for index in args[1] if index is not None}
        if by_mask or any(word in name for word in self.FORBIDDEN):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind, budget", (("dflash", None), ("dflash", 12), ("eagle3", None), ("ar", None)))
def test_a_cycle_asks_nothing_of_the_host(kind, temperature, budget, monkeypatch):
    target, drafter = make_pair(kind, layers=4)
    decoder = next(decode.generate(
        target, drafter, PROMPTS, 20, temperature=temperature, top_p=0.9 if temperature else None,
        tree_budget=budget, stop_ids=(3, 5)))

    commit = decoder.commit

    def found(fault):
        monkeypatch.setattr(decoder, "commit", lambda *args: (fault(), commit(*args)))
        with torch.inference_mode(), AsksTheHost() as mode:
            decoder.drafts = decoder.draft()
            decoder.verify(decoder.drafts.tokens.shape[1])
            decoder.read()
            decoder.verify(1)
        return mode.found
    finished = lambda: decoder.anchor_at == decoder.last_at
    assert found(finished) == []
    for fault in (lambda: bool(finished().all()), lambda: torch.tensor([1, 2]), lambda: finished().nonzero(),
                  lambda: int(finished().sum()), lambda: decoder.anchor_at[finished()]):
        assert found(fault)


def test_compiled_steps_decode_what_eager_ones_do(no_code_generation, monkeypatch):
    """compile=True on the CPU; a call with another length takes the code of the first. (A chain: see the gpu
    preset's run.)"""
    target, drafter = make_pair(vocab=5, layers=2)

    def decode_both(most):
        out, eager = (speculative(target, drafter, [[1, 2, 3], [0] * 9], most, compile=compile, seed=3,
                                  block_size=5, tree_budget=6, temperature=0.8) for compile in (True, False))
        assert out.tokens == eager.tokens and out.acceptance_lengths == eager.acceptance_lengths
        assert tau(out) > 1
    assert graphs_compiled(lambda: decode_both(40)) == 2, "a draft and a verification, compiled once"
    assert graphs_compiled(lambda: decode_both(30)) == 0
    monkeypatch.setattr("model.has_compiler", lambda: False)
    fails(lambda: speculative(target, drafter, [[1]], 4, compile=True), "compiler")


@torch.no_grad()
def test_plain_decoding_is_the_argmax_of_one_pass_also_of_prompts_in_pieces(trained, monkeypatch):
    target, _ = trained
    prompts = [*PROMPTS, [i % 50 for i in range(33)], [2 * i % 50 for i in range(20)], [5] * 10]
    plain = autoregressive(target, prompts, 20).tokens
    for prompt, row in zip(prompts, plain):
        best = target.logits(target(torch.tensor([prompt + row]))[0]).argmax(-1)[0]
        assert best[len(prompt) - 1:-1].tolist() == row
    whole = speculative(*trained, prompts, 20)
    monkeypatch.setattr(decode, "PREFILL", 10)
    pieces = speculative(*trained, prompts, 20)
    assert pieces.tokens == whole.tokens == plain and pieces.acceptance_lengths == whole.acceptance_lengths


def test_the_capacity_is_the_last_slot_looked_at(trained, monkeypatch):
    """Shapes cut to the text, but looks as seldom as on CUDA: what rows may have come to in between is more
    than there is room for."""
    monkeypatch.setattr(decode.Decoder, "look_every", always(3), raising=False)
    prompts = [[i % 50 for i in range(48)], [3]]
    plain = autoregressive(trained[0], prompts, 192).tokens  # 48 + 192 + 16 are the capacity
    for way in (dict(block_size=16), dict(block_size="auto", tree_budget=16)):
        assert speculative(*trained, prompts, 192, **way).tokens == plain


def test_the_end_may_fall_inside_a_block(trained):
    plain = autoregressive(trained[0], PROMPTS, 20).tokens
    for budget, most in product((None, 12), (1, 2, 3, 7, 11)):
        out = speculative(*trained, PROMPTS, most, tree_budget=budget)
        assert out.tokens == [row[:most] for row in plain]
    for stops in zip(plain[1][:12:2], plain[2][:12:2]):
        expected = [row[:min([row.index(s) + 1 for s in stops if s in row], default=20)] for row in plain]
        for budget in (None, 5, 12):
            assert speculative(*trained, PROMPTS, 20, tree_budget=budget, stop_ids=stops).tokens == expected


def test_a_real_token_equal_to_the_mask_id_is_kept(trained):
    target, drafter = trained
    token = autoregressive(target, [PROMPTS[1]], 40).tokens[0][3]
    other = copy.copy(drafter)
    other.config = replace(drafter.config, mask_token_id=token)
    prompts = [PROMPTS[1], PROMPTS[1] + [token]]  # in the answer, and in the prompt as well
    out = speculative(target, other, prompts, 40)
    assert out.tokens == autoregressive(target, prompts, 40).tokens and token in out.tokens[0]


def test_idle_decoders_are_reused_and_bounded(trained, monkeypatch):
    target, drafter = trained
    speculative(target, drafter, [[1]], 9)
    first, = decode.idle.values()
    speculative(target, drafter, [[1, 2, 3]], 20)  # the same shapes
    assert [*decode.idle.values()] == [first]
    # two at a time do not share one
    steps = [decode.generate(target, drafter, [prompt], 20) for prompt in ([1], [2])]
    assert {id(decoder) for pair in zip(*steps) for decoder in pair} > {id(first)}
    assert first.nbytes == first.features.nbytes + sum(cache.data.nbytes for cache in first.caches)
    monkeypatch.setattr(decode, "KEPT_BYTES", 2 * first.nbytes)
    for batch in (1, 2, 1, 1):
        speculative(target, drafter, [[1]] * batch, 9, tree_budget=4)
    assert sum(decoder.nbytes for decoder in decode.idle.values()) <= 2 * first.nbytes


# -- acceptance

def test_acceptance_equals_plain_python():
    g = torch.Generator().manual_seed(0)
    for case, budget in product(range(60), (None, 14)):
        anchor = torch.randint(5, (3, 1), generator=g)
        guesses = torch.randn(3, 4, 5, generator=g).mul(3).softmax(-1)  # sure enough for deep trees
        drafts = (drafter_module.draft_tree(anchor, guesses, budget) if budget else
                  drafter_module.draft_chain(anchor, guesses))
        N = drafts.tokens.shape[1]
        parents = drafts.parent.tolist()
        draws = torch.randint(5, (3, N), generator=g)
        for b, i in product(range(2 if case % 2 else 0), range(1, N)):  # often right, for long paths
            draws[b, parents[b][i]] = drafts.tokens[b, i]
        kept, path = decode.accept(drafts, draws)
        assert budget or parents == [[0, *range(N - 1)]] * 3
        for b in range(3):
            at = [0]
            while right := [i for i in range(1, N)
                            if parents[b][i] == at[-1] and drafts.tokens[b, i] == draws[b, at[-1]]]:
                at += right
            assert kept[b] == len(at) and path[b, :len(at)].tolist() == at
            assert sorted(path[b].tolist()) == list(range(N))


@pytest.mark.parametrize("V, S, N", ((7, 4, 20), (30, 3, 32), (6, 3, 8), (5, 2, 26)))
def test_a_tree_holds_the_likeliest_prefixes(V, S, N):
    guesses = torch.randn(2, S, V, generator=torch.Generator().manual_seed(V)).mul(2).softmax(-1)
    guesses[1, :2] = F.one_hot(torch.tensor([2, 1]), V)  # certain: its children are as likely as it is
    tree = drafter_module.draft_tree(torch.tensor([[3], [4]]), guesses, N)
    for b in range(2):
        p, likelihoods = [1.0], []
        for depth in range(S):  # of all prefixes
            p = [before * now for before in p for now in guesses[b, depth].tolist()]
            likelihoods += p
        likeliest = torch.tensor(sorted(likelihoods, reverse=True)[:N - 1])
        assert_close(tree.probability[b, 1:], likeliest, atol=1e-6, rtol=1e-4)
        paths = [()]
        nodes = zip(*(x[b].tolist() for x in (tree.tokens, tree.parent, tree.depth)))
        for i, (token, parent, depth) in enumerate(nodes):
            if i:
                assert parent < i
                paths.append((*paths[parent], token))
            assert depth == len(paths[i])
            ancestors = [paths[i][:len(path)] == path for path in paths]
            assert tree.ancestors[b, i].tolist() == ancestors + [False] * (N - i - 1)
        assert len(set(paths)) == len(paths) == N
    few = drafter_module.draft_tree(torch.tensor([[3]]), guesses[:1], 4)
    assert all(torch.equal(x, y[:1]) for x, y in zip(few, tree.first(4)))  # the best of many are the best few


# -- the draws

def test_the_noise_is_exponential_and_each_rows_and_indexs_own():
    keys, noise_of = model.stream_keys(3, 40), model.exponential_noise
    noise = noise_of(keys, torch.arange(50).expand(40, -1), 500)  # 1e6 numbers
    assert noise.min() > 0 and noise.var() == pytest.approx(1, abs=1e-2)
    for x in (1e-4, 1e-2, 0.5, 2.0, 8.0):  # five deviations
        below = 1 - math.exp(-x)
        assert (noise < x).double().mean() == pytest.approx(below, abs=5e-3 * math.sqrt(below))
    flat = noise.flatten(0, 1)  # (2000, 500)
    correlation = torch.corrcoef(flat) - torch.eye(2000)
    assert correlation.abs().max() < 6.5 * 500 ** -0.5  # no two rows or indices share theirs
    assert len(set(flat.argmin(-1).tolist())) > 450  # and any token may win
    # a function of stream, index and token alone
    assert torch.equal(noise_of(keys[[7, 3]], torch.tensor([[4], [30]]), 500)[:, 0], noise[[7, 3], [4, 30]])
    assert torch.equal(noise_of(keys[:1], torch.tensor([[4]]), 77)[0, 0], noise[0, 4, :77])
    assert torch.equal(model.stream_keys([(3, 1), (3, 5)], 2), keys[[1, 5]]) and len(keys.unique(dim=0)) == 40
    # the tail, where the winner sits
    rare = noise_of(model.stream_keys(0, 1), torch.arange(200)[None], 100_000)
    assert rare.min() < 1e-6 and (rare < 1e-5).sum().item() == pytest.approx(200, abs=75)


def test_top_k_and_top_p():
    logits, noise = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.9, 0.2, 1e-9, 3.0]])
    p = (logits / 0.7).softmax(-1)[0]
    two, best = p * torch.tensor([1, 1, 0, 0]) / p[:2].sum(), float(p[0])
    for how, expected, drawn in (({}, p, 2), ({"top_k": 2}, two, 1), ({"top_p": best + 1e-4}, two, 1),
                                 ({"top_p": best - 1e-4}, torch.tensor([1.0, 0, 0, 0]), 0)):
        sampling = decode.Sampling(0.7, **how)
        assert_close(sampling.probabilities(logits)[0], expected)
        assert sampling.draw(logits, noise) == drawn
    assert decode.Sampling().draw(logits, None) == 0
    guesses = decode.Sampling(0.7).guess_probabilities(logits, noise)
    assert_close(guesses, F.normalize(p / noise, p=1))


# of the tests below: draws, and the chance that a right implementation fails one (the seed is fixed)
ROWS, LEVEL, PROMPT = 4000, 1e-3, [1, 4, 2]
SAMPLING = {"plain": dict(temperature=1.0), "cold": dict(temperature=0.6),
            "top-k": dict(temperature=1.2, top_k=3), "top-p": dict(temperature=1.0, top_p=0.8)}


def exact_joint(target, how):
    """The target's distribution over the next four tokens, by enumeration: (V, V, V, V)."""
    V = target.config.vocab_size
    texts = torch.cartesian_prod(*[torch.arange(V)] * 4)  # (V^4, 4)
    ids = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), 1)
    logits = target.logits(target(ids)[0][:, len(PROMPT) - 1:-1]).detach()
    p = decode.Sampling(**how).probabilities(logits).gather(2, texts[..., None])
    return p.double().prod(1).view([V] * 4)


def p_value(rows, joint):
    """Chi-square of observed rows of tokens (N, n) against their exact distribution; cells expected below 5
    are pooled."""
    observed, expected = torch.zeros_like(joint), joint * len(rows)
    observed.index_put_(rows.unbind(1), torch.ones((), dtype=joint.dtype), accumulate=True)
    if observed[joint == 0].any():
        return 0.0
    large = expected >= 5
    observed, expected = (torch.cat((x[large], x[~large].sum()[None])) for x in (observed, expected))
    cells = expected > 0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    return torch.special.gammaincc((cells.sum() - 1).double() / 2, statistic / 2).item()


@pytest.fixture(scope="module")
def small_vocabulary():
    target, drafter = make_pair(vocab=6, layers=4, block_size=4, hidden_size=16, intermediate_size=24,
                                num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    drafter.norm.weight.data.mul_(0.5)  # often, not always, right
    return target, drafter


def sampled(pair, name):
    """tau, and the p values of tokens drawn this way: the first two, and two and three that cycles drew."""
    out = speculative(*pair, [PROMPT] * ROWS, 4, tree_budget=6 if name == "plain" else None, seed=1,
                      **SAMPLING[name])
    joint, drawn = exact_joint(pair[0], SAMPLING[name]), torch.tensor(out.tokens)
    return tau(out), [p_value(drawn[:, :2], joint.sum((2, 3))), p_value(drawn[:, 1:3], joint.sum((0, 3))),
                      p_value(drawn[:, 1:], joint.sum(0))]


@pytest.mark.parametrize("wrong", ("indices share their noise", "rows share theirs", "likely drafts stay"))
def test_a_wrong_rule_fails_the_distribution_test(wrong, small_vocabulary, monkeypatch):
    noise, accept = decode.exponential_noise, decode.accept

    def keep_likely(drafts, draws):
        draws[:, :-1].masked_fill_(drafts.tokens[:, 1:] == 2, 2)
        return accept(drafts, draws)
    rules = {"indices share their noise": lambda keys, index, V: noise(keys, index * 0, V),
             "rows share theirs": lambda keys, index, V: noise(keys[:1].expand_as(keys), index, V),
             "likely drafts stay": keep_likely}
    patched = "accept" if rules[wrong] is keep_likely else "exponential_noise"
    monkeypatch.setattr(decode, patched, rules[wrong])
    assert min(sampled(small_vocabulary, "cold")[1]) < LEVEL


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_text_has_the_targets_distribution(name, small_vocabulary):
    acceptance, p_values = sampled(small_vocabulary, name)
    assert 1.05 < acceptance < 4  # some are accepted, some are not
    assert min(p_values) > LEVEL


# -- auto

def simulate(chances, cost, speed=lambda ms: 1.0):
    """Runs `Auto` over a text of (drafter's probability, true chance) a token; cost: {tokens read:
    milliseconds}. -> milliseconds in all, without the changes of the machine's speed, and for each token
    whether its cycle had drafts."""
    auto, rnd, ms, drafted = decode.Auto(8), random.Random(0), 0.0, []
    while len(drafted) < len(chances):
        confidence, chance = chances[len(drafted)]
        drafting, n, kept = auto.plain_cycles <= 0, 1, 1
        if drafting:
            auto.choose([confidence ** k for k in range(auto.sizes[-1])])
            n = auto.size
        while kept < n and rnd.random() < chance:
            kept += 1
        auto.update(n, cost(n) * speed(ms), kept)
        if drafting:
            auto.decide()
        drafted += [drafting] * kept
        ms += cost(n)
    return ms, drafted


def test_auto_is_seldom_slower_and_follows_the_text():
    cost = lambda n: 3.25 if n == 1 else 4.0 + 0.25 * n
    noisy = lambda ms: (1.0, 2.5)[int(ms / 40) % 2]  # another process comes and goes
    best = lambda c: max((1 + sum(c ** k for k in range(1, n))) / cost(n) for n in (2, 4, 8))
    for speed in (lambda ms: 1.0, noisy):
        for confidence in (0.1, 0.95):  # drafts never pay; also where the drafter is sure of them
            assert simulate([(confidence, 0.1)] * 192, cost, speed)[0] < 1.05 * 192 * 3.25
            ms, drafted = simulate([(confidence, 0.1)] * 4000, cost, speed)
            assert ms < 1.03 * 4000 * 3.25 and 0 < sum(drafted) < 400
        # they do; also where confidence says less or more
        for confidence, chance in ((0.9, 0.9), (0.6, 0.6), (0.3, 0.9), (0.9, 0.7)):
            ms, _ = simulate([(confidence, chance)] * 4000, cost, speed)
            assert ms < 1.06 * 4000 / best(chance) < 4000 * 3.25
    _, drafted = simulate([(0.1, 0.1)] * 200 + [(0.9, 0.9)] * 300, cost)  # the text changes
    assert sum(drafted[:200]) < 40 and sum(drafted[300:]) > 150


@cuda
@pytest.mark.parametrize("temperature, tree_budget", [*product((0.0, 0.8), (None, 12))])
def test_speculative_equals_autoregressive_on_cuda(temperature, tree_budget, trained):
    target, drafter = (copy.deepcopy(module).cuda() for module in trained)
    how = dict(prompts=PROMPTS, max_new_tokens=40, temperature=temperature, seed=0)
    plain = autoregressive(target, **how)
    for call in range(3):  # as it is, captured, replayed
        assert speculative(target, drafter, tree_budget=tree_budget, **how).tokens == plain.tokens
    if temperature == 0:
        assert plain.tokens == autoregressive(trained[0], PROMPTS, 40).tokens


def test_a_drafter_that_is_the_target_is_always_right(shapes):
    target, _ = make_pair(layers=4)
    drafter = ARDrafter.for_target(target, num_layers=4, block_size=6).eval()
    drafter.init_weights(target, torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):  # sampled too: it draws with the target's noise
        out = speculative(target, drafter, PROMPTS, 43, temperature=temperature, seed=0)
        assert all(row == [6] * 7 for row in out.acceptance_lengths)


# ---- train.py ----------------------------------------------------------------------------------------------

SHORT = "--prompts 1 --checkpoint-seconds 0 --device cpu --no-compile".split()
LEARN = ("--response-batch 8 --responses 24 --response-tokens 24 --prompt-tokens 8 --draft-layers 1 "
         "--block-size 4 --anchors 4 --draft-batch 4").split() + SHORT
TINY = ("--layers 4 --hidden-size 32 --intermediate-size 48 --heads 2 --kv-heads 1 --vocab-size 300 "
        "--batch 4 --sequence-length 32 --target-steps 60 --drafter-steps 60").split() + LEARN


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rnd = tmp_path_factory.mktemp("data"), random.Random(0)
    words = "the target reads what drafter wrote and keeps every token it would have written itself".split()
    for name in ("a.txt", "b.md"):
        lines = [f"{' '.join(rnd.choices(words, k=60))} {rnd.random()}" for _ in range(150)]
        (folder / name).write_text("\n\n".join(lines))
    return folder


PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def start(script, *flags, launcher=(), env=ONE_THREAD):
    command = [sys.executable, *launcher, str(HERE / script), *map(str, flags)]
    return subprocess.Popen(command, text=True, cwd=HERE, env=env, **PIPES)


def run_script(*what, status=0, **how):
    """-> what it prints, on both streams"""
    process = start(*what, **how)
    printed = process.communicate()
    assert process.returncode == status and (status == 0 or "Traceback" not in printed[1]), printed[1]
    return printed


BESIDE = {}


def beside(function):
    """A fixture: the folder that train.py's command lines in `function` leave. They take most of a minute:
    `second_core` has begun long before a test asks."""
    BESIDE[function.__name__] = function
    finished = lambda second_core: second_core[function.__name__].result()
    return pytest.fixture(finished, scope="module", name=function.__name__)


@pytest.fixture(scope="module", autouse=True)
def second_core(request, data, tmp_path_factory):
    asked = {name for item in request.session.items for name in item.fixturenames}
    with ThreadPoolExecutor(1) as executor:
        yield {name: executor.submit(function, data, tmp_path_factory.mktemp(name) / "out")
               for name, function in BESIDE.items() if name in asked}
        executor.shutdown(cancel_futures=True)


@beside
def finished_run(data, out):
    run_script("train.py", "--data", data, "--out", out, *TINY)
    return out


@beside
def killed_run(data, out):
    """Killed twice, inside the target's and the drafter's training, then finished."""
    flags = ["train.py", "--data", data, "--out", out, *TINY]
    for stage in ("target", "drafter"):
        process = start(*flags, "--resume")
        while not (out / f"{stage}.checkpoint.safetensors").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert not (out / stage / "model.safetensors").exists()
    assert "--resume" in run_script(*flags, status=2)[1]  # it says how to go on
    run_script(*flags, "--resume")
    return out


@beside
def two_processes(data, out):
    flags = ["train.py", "--data", data, *TINY, *"--target-steps 6 --drafter-steps 6 --float32".split()]
    run_script(*flags, "--out", out / "one")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    run_script(*flags, "--out", out / "two", launcher=torchrun)
    return out


@beside
def gpu_preset(data, out):
    """The gpu preset, shrunk by its own flags: its code, the compiled training step and the wall-clock plan
    included, on whatever device there is."""
    shrink = ("--layers 2 --hidden-size 48 --intermediate-size 48 --heads 3 --kv-heads 1 --vocab-size 300 "
              "--batch 4 --sequence-length 64 --responses 16 --minutes 0.1 --compile").split()
    device = ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    run_script("train.py", "--preset", "gpu", "--data", data, "--out", out, *LEARN, *shrink, *device)
    how = "--block-size 3 --tree-budget 0 --temperature 0.8 --max-new-tokens 60".split()
    # empty: nothing compiled before serves it
    env = {**ONE_THREAD, "TORCHINDUCTOR_CACHE_DIR": str(out / "compiled")}
    for flag in ("--compile", "--no-compile"):
        text = run_script("decode.py", "--out", out, "--prompt", "the target", *how, flag, env=env)[0]
        (out / flag).write_text(text)
    return out


@pytest.fixture
def finished_copy(finished_run, data, tmp_path):
    """A copy of it, and the flags that go on with that."""
    shutil.copytree(finished_run, tmp_path / "out")
    return tmp_path / "out", ["--data", str(data), "--out", str(tmp_path / "out"), *TINY]


def weights_of(out):
    return {f"{stage} {name}": weight for stage in ("target", "drafter")
            for name, weight in load_file(out / stage / "model.safetensors").items()}


def test_a_killed_run_resumes_to_the_same_weights(finished_run, killed_run):
    assert_close(weights_of(killed_run), weights_of(finished_run), rtol=0, atol=0)
    steps = [(e["stage"], e["step"]) for e in json_lines(killed_run / "log.jsonl")]
    assert len(steps) == len(set(steps))


def test_two_processes_train_the_same_weights(two_processes):
    one, two = weights_of(two_processes / "one"), weights_of(two_processes / "two")
    assert one.keys() == two.keys()
    for name in one:  # AdamW magnifies a gradient near zero: so by norm
        assert (one[name] - two[name]).norm() < 1e-3 * one[name].norm(), name


def json_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses_of(out, stage):
    return [entry["loss"] for entry in json_lines(out / "log.jsonl") if entry["stage"] == stage]


def results_of(out):
    return read_json(out / "report.json")["results"]


def test_the_whole_path(finished_copy, capsys):
    out, flags = finished_copy
    files = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert {"target", "drafter", "log.jsonl", "report.json", "heldout.jsonl"} <= files
    assert not [file for file in files if ".tmp" in file or ".checkpoint" in file]
    results = results_of(out)
    keys = {"tokens", "tau", "ms_per_token", "speedup", "draft_ms", "verify_ms", "distinct4"}
    for row in results:
        assert keys <= row.keys()
        assert row["identical"] == 1 and row["prompts"] == results[0]["prompts"]
    assert {(row["domain"], row["method"], row["temperature"]) for row in results} == set(
        product(["data0"], ("autoregressive", "dflash", "dflash tree", "dflash auto"), (0.0, 1.0)))
    for stage, less in (("target", 0.5), ("drafter", 0.05)):
        assert losses_of(out, stage)[-1] < losses_of(out, stage)[0] - less
    before = weights_of(out)
    train.main(flags)  # a second call finds everything done
    assert capsys.readouterr().out.count("skipped") == 5
    assert_close(weights_of(out), before, rtol=0, atol=0)
    fails(lambda: train.main([*flags, "--layers", "5"]), "layers = 4, not 5")


def test_decode_command_line(finished_copy, monkeypatch, capsys):
    """With the baselines, which train.py trains into the same folder."""
    (out, flags), original = finished_copy, decode.speculative
    for kind in BASELINES:
        train.main([*flags, "--drafter", kind])
        assert losses_of(out, kind)[-1] < losses_of(out, kind)[0]
    capsys.readouterr()

    def printed(flags):
        decode.main(["--out", str(out), *flags.split()])
        return capsys.readouterr().out
    text, *others = [printed("--prompt target --max-new-tokens 20 " + flags) for flags in (
        "--show", "--show --tree-budget 8", "", "--plain", "--block-size 2", "--tree-budget 0",
        f"--drafter {out}/eagle3", f"--drafter {out}/ar {out}/drafter")]
    assert others[1:] == others[1:2] * 6 and len(others[1]) > 20
    for coloured, in_grey in ((text, True), (others[0], False)):
        assert decode.GREEN in coloured and decode.BLUE in coloured and (decode.GREY in coloured) == in_grey
        shown = re.sub(r"\033\[9;90m.*?\033\[0m", "", coloured)  # without the rejected drafts
        assert re.sub(r"\033\[[0-9;]*m", "", shown) == others[1]
    printed("--bench --prompts 1 --prompt-tokens 8 --max-new-tokens 16 --temperature 0")
    assert all(row["identical"] == 1 for row in results_of(out))
    assert {row["method"] for row in results_of(out)} == {
        "autoregressive", "dflash", "dflash tree", "dflash auto", "eagle3", "eagle3 auto", "ar", "ar auto"}

    def few_tokens(*args, **how):  # of the sweep's large batches, too
        return original(*args, **how | ({"max_new_tokens": 4} if "prompts" in how else {}))
    monkeypatch.setattr(decode, "speculative", few_tokens)
    bench = f"--bench --prompts 1 --prompt-tokens 8 --max-new-tokens 4 --drafter {out}/drafter "
    assert "dflash" in printed(bench + "--temperature 0.5 --top-k 5")
    assert "autoregressive" in printed(bench + "--plain")
    assert "dflash: batch" in printed(bench + "--temperature 0 --block-size 3 --sweep")
    found = read_json(out / "report.json")["sweep"]["dflash"]
    assert [row["block_size"] for row in found["block_size"]] == [1, 2, 4, 8, 16, 32]
    assert [row["batch"] for row in found["batch"]] == [1, 4, 16, 64]
    assert all(row["verify_ms"] > 0 for row in found["block_size"] + found["context"])
    assert all(row["draft_ms"] > 0 for row in found["block_size"][1:] + found["context"])
    longest = found["context"][-1]
    # K and V, layers, heads, width, float32
    assert longest["target_cache_bytes"] == 2 * 4 * 1 * 16 * 4 * longest["context"] > 512 * 4000


def test_claims_are_measured_and_go_on_where_they_stopped(finished_copy, monkeypatch, capsys):
    out, flags = finished_copy
    fixed = {"injection": "input", "taps": 1, "anchor_choice": "fixed"}
    monkeypatch.setattr(train, "CLAIMS", (
        ("one", "tau", {"raw corpus": {"responses_from": "corpus"}, "dflash": {"gamma": math.inf}}),
        ("two", "speedup", {"revealed": {"reveal": 0.5}, "two steps": None}),
        ("three", "auto", {"eagle3": {"drafter": "eagle3"}, "input injection": fixed}),
        ("four", "draft ms at 2 / at 16", {"dflash": {"gamma": math.inf}})))
    monkeypatch.setattr(train, "cycle_ms", lambda *args, block_size: {"draft_ms": block_size})
    calls, original = [], train.benchmark

    def benchmark(*args, **how):
        calls.append(args)
        if len(calls) == 3:
            raise InterruptedError
        return original(*args, **how | {"max_new_tokens": 8})
    monkeypatch.setattr(train, "benchmark", benchmark)
    flags += ["--drafter-steps", "3", "--claims"]
    with pytest.raises(InterruptedError):
        train.main(flags)
    train.main(flags)
    assert len(calls) == 3 * 5 + 1
    printed = capsys.readouterr().out
    assert all(f"| {claim} | {key} |" in printed for claim, key, _ in train.CLAIMS)
    found = read_json(out / "report.json")["claims"]
    assert found.keys() == {"raw corpus", "dflash", "revealed", "two steps", "eagle3", "input injection"}
    for results in found.values():
        assert len(results) == 3 and results[0]["tau"] >= 1 and results[0]["identical"] == 1


def test_the_gpu_preset_shrunk_and_compiled(gpu_preset):
    """CUDA graphs, or on the CPU the C++ compiler's code, print what eager passes do."""
    number = lambda stage: read_json(gpu_preset / f"{stage}.settings.json")["number"]
    assert number("target") >= 20 and number("drafter") >= 20 and number("responses") >= 1
    text = (gpu_preset / "--compile").read_text()
    assert text == (gpu_preset / "--no-compile").read_text()
    assert text.startswith("the target") and len(text) > 12
    # a draft and a verification
    assert torch.cuda.is_available() or len([*gpu_preset.glob("compiled/**/*.main.so")]) >= 2


TEMPLATE = (
    "{{ bos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{% set x = 1 %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A small random llama with untied head, padded embedding and a chat template, by transformers."""
    folder = tmp_path_factory.mktemp("pretrained")
    tok = build("llama3", folder)
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<|eot|>",
        "bos_token": "<|im_start|>"})
    write_hugging_face(folder, 0.3, "llama", vocab_size=tok.get_vocab_size() + 9, hidden_size=32,
                       intermediate_size=48, num_hidden_layers=5, eos_token_id=tok.token_to_id("<|eot|>"))
    return folder


@pytest.fixture
def tokenizer(pretrained):
    return Tokenizer.from_pretrained(pretrained)


def rows_of(*args, **how):
    return [ids for _, ids in encode_entries(*args, **how)]


ASKED = [{"role": "system", "content": " Short. "}, {"role": "user", "content": "héllo <|im_end|> 你好"}]
TOOLS = [{"type": "function", "function": {"name": "späť", "parameters": {}}}]


def test_chat_template_equals_transformers(tokenizer, pretrained):
    theirs = sys.modules["transformers"].AutoTokenizer.from_pretrained(pretrained)
    longer = [*ASKED, {"role": "assistant", "content": "a"}, *ASKED[1:]]
    for messages, tools, options in ((ASKED, None, {}), (ASKED, TOOLS, {}), (longer, None, {}),
                                     (ASKED, None, {"enable_thinking": False})):
        tokenizer.chat_options = options
        rendered = partial(theirs.apply_chat_template, messages, add_generation_prompt=True, tools=tools)
        assert tokenizer.render_chat(messages, tools) == rendered(tokenize=False, **options)
        ids = rendered(**options)["input_ids"]
        assert rows_of([Entry(messages=messages, tools=tools)], tokenizer, 0) == [ids]


def test_chats_and_prompts_that_are_refused(tokenizer, capsys):
    answer, good = {"role": "assistant", "content": "yes"}, Entry(prompt="a")
    model.say_once.cache_clear()
    for _ in range(2):
        assert tokenizer.render_chat([*ASKED, answer]) == tokenizer.render_chat(ASKED)
    assert capsys.readouterr().err.count("\n") == 1  # said once
    bad = []
    for fields, template, word in (
            ({"messages": [answer]}, TEMPLATE, "nothing to answer"), ({"prompt": ""}, TEMPLATE, "empty"),
            ({"messages": ASKED}, "{{ raise_exception('no\nway') }}", "no way"),
            ({"messages": ASKED}, "{% nonsense %}", "nonsense"),
            ({"messages": ASKED}, "{{ messages.__class__.__mro__ }}", "unsafe")):  # the sandbox holds
        bad.append(Entry(fields))
        bad[-1].where, tokenizer.chat_template = f"x.jsonl:{word}", template
        fails(lambda: encode_entries([good, bad[-1]], tokenizer, 8), f"x.jsonl:{word}: ", word)
    rows = rows_of([good, *bad, good], tokenizer, 8, skip_bad=True)
    assert rows == [[tokenizer.bos_id, *tokenizer.encode("a")]] * 2 and "5 of 7" in capsys.readouterr().err


def test_files_of_every_kind_are_read(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a\u2028b"}], "prompt": None},
            {"prompt": "c", "domain": "x"}, {"text": "d"}]
    lines, file = [json.dumps(row, ensure_ascii=False) for row in rows], tmp_path / "entries.jsonl"
    for name, text, at in (("a.jsonl", "\n".join(lines), 3), ("b.jsonl", "\ufeff" + "\r\n\n".join(lines), 5),
                           ("c.json", json.dumps(rows, indent=1), 3), ("d.json", "\n".join(lines), 3)):
        (tmp_path / name).write_bytes(text.encode())
        entries = read_entries(tmp_path / name)
        assert entries == [{key: value for key, value in row.items() if value} for row in rows]
        assert entries[2].where == f"{tmp_path / name}:{at}"
    for line in ("{", "5", "{}", '{"messages": null}', '{"messages": "hi"}', '{"messages": ""}',
                 '{"messages": {}}', '{"messages": [5]}', '{"prompt": 5}', '{"prompt": "x", "domain": 1}'):
        file.write_text(f"{lines[0]}\n{line}\n")
        fails(lambda: read_entries(file), "entries.jsonl:2: ")
    file.write_bytes(b"\xff")
    fails(lambda: read_entries(file), "entries.jsonl", "utf-8")
    (tmp_path / "texts").mkdir()
    for name, data in (("a.txt", "a\ufffdb".encode()), ("b.txt", b"\xff\xfe"), ("c.txt", b"\0x"),
                       ("d.txt", b"\xef\xbb\xbfd\r\n"), ("e.jsonl", b'{"text": "e"}\n{"text": "f"}')):
        (tmp_path / "texts" / name).write_bytes(data)
    found = train.find_entries([tmp_path / "texts", tmp_path / "c.json"], None)
    assert [*found] == [*({"text": text, "domain": "texts"} for text in ("a\ufffdb", "d\n", "e", "f")),
                        *({"domain": "c"} | entry for entry in read_entries(tmp_path / "c.json"))]


def test_rendered_prompts(tokenizer):
    text, bos = "<|im_start|>user\nhi", tokenizer.bos_id
    marked = tokenizer.encode(text, special=True)
    assert marked[0] == bos
    for entry, rendered, row in (({"prompt": text}, True, marked),
                                 ({"prompt": "hi"}, True, [bos, *tokenizer.encode("hi")]),
                                 ({"prompt": text}, False, [bos, *tokenizer.encode(text)]),
                                 ({"prompt": text, "rendered": True}, False, marked)):
        assert rows_of([Entry(entry)], tokenizer, 8, rendered=rendered) == [row]


def test_options_of_the_template():
    assert parse_options(["think=false", "date=1 May", 'a={"b": [1]}', "c=x=y"]) == {
        "think": False, "date": "1 May", "a": {"b": [1]}, "c": "x=y"}
    for wrong in ("enable_thinking", "=1", "a b=1"):
        fails(lambda: parse_options([wrong]), "--chat-options", wrong)


def test_sampling_as_the_target_recommends(tmp_path, capsys):
    none, choose = {"top_k": None, "top_p": None}, partial(model.choose_sampling, tmp_path)
    assert choose((1.0,)) == none
    for raw, cuts in (({"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"top_k": 20, "top_p": 0.8}),
                      ({"top_k": 0, "top_p": 1.0}, {}), ({"top_k": None, "top_p": 0.95}, {"top_p": 0.95}),
                      ({"top_k": -1}, {}), ({"do_sample": True, "top_k": 1}, {"top_k": 1}),
                      ({"do_sample": False, "top_k": 20}, {}), ({}, {})):
        write_json(tmp_path / "generation_config.json", raw)
        model.say_once.cache_clear()
        assert choose((0.0,)) == none and not capsys.readouterr().err
        assert choose((0.0, 0.7)) == none | cuts
        assert ("generation_config.json" in capsys.readouterr().err) == bool(cuts)
        assert choose((1.0,), 5, 0.5) == {"top_k": 5, "top_p": 0.5}
        assert choose((1.0,), 0, 1.0) == none | {"top_p": 1.0} and not capsys.readouterr().err
    write_json(tmp_path / "generation_config.json", {"top_k": [{}]})
    fails(lambda: choose((1.0,)), "generation_config.json")


def test_a_drafter_for_a_pretrained_target(pretrained, data, tmp_path, monkeypatch, capsys):
    chats, folder, out = (tmp_path / name for name in ("chats.jsonl", "folder", "out"))
    lines = [*({"messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(60)),
             *({"prompt": f"One, two, {i}"} for i in range(60))]
    train.write_lines(chats, lines + lines[:30])
    shutil.copytree(data, folder)
    train.write_lines(folder / "more.jsonl", [{"messages": [], "prompt": None}, *lines[60:69]])
    vocab, eos = (read_json(pretrained / "config.json")[key] for key in ("vocab_size", "eos_token_id"))
    write_json(pretrained / "generation_config.json", {"top_k": 30, "top_p": 0.9, "eos_token_id": eos})
    options, target = ["--chat-options", "enable_thinking=false"], ["--target", str(pretrained)]
    flags = [*target, "--out", str(out), *LEARN, "--data", str(chats), str(folder), *(
        "--sequence-length 64 --prompt-tokens 16 --responses 999 --response-batch 32 --draft-batch 16 "
        "--epochs 2 --prompts 2").split()]
    fails(lambda: train.main(flags), "more.jsonl:1", "messages")  # at the start
    fails(lambda: train.main([*flags, "--skip-bad", "--mask-token", "<|nope|>"]), "<|nope|>")
    model.say_once.cache_clear()
    train.main([*flags, *options, "--skip-bad", "--taps", "7"])
    printed = capsys.readouterr()
    assert "'top_k': 30, 'top_p': 0.9" in printed.err and "1 of " in printed.err
    assert "5 taps, not 7" in printed.out
    assert read_json(out / "drafter" / "config.json")["dflash_config"] == {
        "block_size": 4, "mask_token_id": vocab - 9, "chat_options": {"enable_thinking": False},
        "target_layer_ids": [0, 1, 2, 3, 4]}
    assert 0 < len(read_entries(out / "heldout.jsonl")) < 0.15 * len(lines) and not (out / "target").exists()
    assert max(load_file(file)["tokens"].max() for file in (out / "responses").glob("*.safetensors")) < vocab
    how = [*target, "--drafter", str(out / "drafter"), "--out", str(tmp_path), "--max-new-tokens", "12"]
    asked, encode = [], decode.encode_prompt
    monkeypatch.setattr(decode, "encode_prompt", lambda *args: asked.append(encode(*args)) or asked[-1])
    for given in ([], ["--plain"], options, ["--chat-options", "enable_thinking=true"]):
        decode.main([*how, "--prompt", "Say 3.", "--chat", *given])
    assert asked[0] == asked[1] == asked[2] != asked[3]  # the drafter remembers what it was trained with
    for source in ([str(chats)], [str(data / "a.txt"), "--prompt-tokens", "10"]):
        decode.main([*how, "--bench", "--prompts", "2", "--data", *source])
        assert all(row["identical"] == 1 for row in results_of(tmp_path))


def test_what_is_held_out_can_be_decoded(pretrained, tmp_path):
    chats, tokenizer = tmp_path / "chats.jsonl", Tokenizer.from_pretrained(pretrained)
    texts = [f"<|im_start|>user\n{'long ' * (20 * (i % 2))}{i}" for i in range(100)]
    train.write_lines(chats, [{"prompt": text} for text in [*texts, ""]])
    flags = ["--target", str(pretrained), "--out", str(tmp_path / "out"), "--data", str(chats),
             *"--sequence-length 60 --skip-bad --device cpu --rendered".split()]

    def prompts_beside(response_tokens, *more, begin=False):
        args = train.parse([*flags, "--response-tokens", str(response_tokens), *more])
        prompts = train.pretrained_target(run := train.Run(args), args)[2]
        if begin:
            run.begin()
        return prompts
    prompts = prompts_beside(24)
    # without a flag, they are rendered
    held = model.read_prompts(tmp_path / "out" / "heldout.jsonl", tokenizer, 8, 99)["chats"]
    assert 1 <= len(held) < 8 and len(prompts) + len(held) == 50
    assert all(row[0] == tokenizer.bos_id and len(row) <= 36 for row in prompts + held)
    fails(lambda: prompts_beside(56), "too few prompts of at most 4 tokens")
    most = read_json(pretrained / "config.json")["max_position_embeddings"]
    fails(lambda: prompts_beside(most - 3, "--sequence-length", "99999"), "prompts of at most 3 tokens")
    # Refused for its other prompts, a run leaves what is held out as it is.
    prompts_beside(24, begin=True)
    before = (tmp_path / "out" / "heldout.jsonl").read_text()
    train.write_lines(chats, [{"prompt": f"another {i}"} for i in range(100)])
    fails(lambda: prompts_beside(24, "--resume"), "prompts_from")
    assert (tmp_path / "out" / "heldout.jsonl").read_text() == before


def test_baselines_need_no_mask_token(data, tmp_path):
    tokenizer = Tokenizer.from_merges(MERGES[:20], ["<|end|>"])
    tokenizer.save_pretrained(tmp_path / "target")
    make_pair(vocab=tokenizer.vocab_size, layers=4)[0].save_pretrained(tmp_path / "target")
    flags = ["--target", str(tmp_path / "target"), "--data", str(data), "--out", str(tmp_path / "out"),
             *LEARN, *"--responses 4 --response-tokens 6 --drafter-steps 1 --drafter".split()]
    for kind in ("eagle3", "ar"):
        train.main([*flags, kind])
        assert math.isfinite(losses_of(tmp_path / "out", kind)[-1])
    fails(lambda: train.main([*flags, "dflash"]), "--mask-token")


def test_the_mask_token_is_one_that_no_text_uses():
    tokenizer_of = lambda n, *special: Tokenizer.from_merges(MERGES[:n - 256 - len(special)], special)
    # the first padded row, or a spare token; 402: two lie outside the embedding
    for token, size, specials, given in (
            (380, 380, ["<|end|>"], None), (399, 400, ["<|end|>", "<|im_start|>", "<|reserved_7|>"], None),
            (399, 400, ["<|end|>", "<|tool|>"], "<|tool|>"), (17, 400, ["<|end|>"], "17"),
            (399, 402, ["<|end|>", "<|mask_1|>", "<|mask_2|>", "<|mask_3|>"], None)):
        assert pick_mask_token(tokenizer_of(size, *specials), 400, given) == token
    tokenizer = tokenizer_of(400, "<|end|>", "<|a|>", "<|b|>", "<|c|>", "<|mask|>")
    tokenizer.chat_template = "<|a|>"
    with pytest.raises(UserError, match=r"--mask-token.*: <\|c\|>$"):  # it says what there is
        pick_mask_token(tokenizer, 400, prompts=[[397], [1, 399]])
    # the special token made for it lies outside
    fails(lambda: pick_mask_token(tokenizer, 399), "--mask-token", ": <|b|>, <|c|>")
    for given, size in (("<|nope|>", 400), ("400", 400), ("x1", 400), ("-1", 400), ("<|mask|>", 399)):
        fails(lambda: pick_mask_token(tokenizer, size, given), "--mask-token", given, str(size))


def test_repeated_paragraphs_are_dropped_before_the_split(tmp_path):
    (tmp_path / "a.pyi").write_text("def f(x: int) -> int: ...\n\ndef g() -> None: ...\n")
    (tmp_path / "b.pyi").write_text("def  f(x: int) -> int: ...\n\n\ndef h() -> None: ...\n")
    text = "".join(d["text"] for d in train.cut_texts(train.find_entries([str(tmp_path)], None)))
    assert text.count("f(x: int)") == 1 and "def h" in text
    documents = train.cut_texts(train.find_entries(*train.default_corpus("cpu")))
    training, heldout = train.hold_out(documents, 0)
    assert training + heldout != documents and len(training) + len(heldout) == len(documents)
    kept = train.without_known(heldout, training)
    assert {d["domain"] for d in kept} == {"torch", "numpy"}
    assert 20 < len(kept) <= len(heldout) < 0.05 * len(documents)
    lines = {line.strip() for d in training for line in d["text"].splitlines()}
    for d in heldout:  # a document that mostly stands in the training text is dropped
        own = [line.strip() for line in d["text"].splitlines() if len(line.strip()) > 30]
        assert (d in kept) == (sum(line in lines for line in own) <= len(own) / 2)


# ---- training as on CUDA, without a GPU --------------------------------------------------------------------

@pytest.mark.parametrize("stage", ("target", "drafter"))
def test_training_in_cudas_form_has_the_dense_paths_gradients(stage, no_code_generation, monkeypatch):
    """Masks and attention as on CUDA, compiled up to where kernels would be written, and run by PyTorch's own
    operators, whose gradients FlexAttention's front alone refuses on the CPU."""
    target, drafter = make_pair(layers=2)
    module, layers = (target, target.model.layers) if stage == "target" else (drafter, drafter.layers)

    def gradients(step):
        g = torch.Generator().manual_seed(step)  # new text and new anchors each step
        ids = torch.randint(60, (2, 150), generator=g)  # more than a tile of 128 queries
        hidden, features = target(ids, taps=drafter.config.target_layer_ids)
        if module is target:
            loss = F.cross_entropy(target.logits(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            anchors = sample_anchors(torch.ones_like(ids, dtype=torch.bool), 20, 8, g)[0]
            batch = training_batch(ids, features.detach(), anchors, hidden=hidden.detach())
            loss, _ = drafter.loss(target, batch)
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(module.parameters()))])

    def make_mask(mask_mod, B, Q, KV, device, dtype):
        return kernels.compiled(create_block_mask)(mask_mod, B, None, Q, KV, device=device)
    dense, found = [gradients(step) for step in range(3)], []
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *args: None)
    for place in (model, drafter_module):
        monkeypatch.setattr(place, "make_mask", make_mask)
    for layer in layers:
        layer.compile()
    compiled = [graphs_compiled(lambda: found.append(gradients(step))) for step in range(3)]
    assert compiled[0] >= 2 and compiled[1:] == [0, 0], "a mask and a layer in the first step, then none"
    assert all((a - b).norm() < 1e-4 * a.norm() for a, b in zip(dense, found))


def test_memory_of_a_drafters_step_is_in_proportion_to_rows_and_anchors(monkeypatch):
    """What the README advises for a small card. On CUDA attention keeps no scores for the backward pass:
    something of its shape stands in for it."""
    monkeypatch.setattr(model, "attention", lambda q, k, v, mask: q + k.mean() + v.mean())
    target, drafter = make_pair()
    target.requires_grad_(False)
    weights = {p.untyped_storage()._cdata for module in (target, drafter) for p in module.parameters()}

    def saved(rows, anchors, **how):
        kept = {}
        note = lambda tensor: kept.update({tensor.untyped_storage()._cdata: tensor}) or tensor
        batch = training_batch(torch.zeros(rows, 16, dtype=torch.int64), torch.zeros(rows, 16, 5 * 32),
                               torch.zeros(rows, anchors, dtype=torch.int64))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            drafter.loss(target, batch, **how)
        return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - weights)
    assert saved(8, 48) == pytest.approx(4 * saved(2, 48), rel=0.01) and saved(8, 48) > 2.5 * saved(8, 16)
    assert saved(8, 48) - saved(8, 32) == pytest.approx(saved(8, 32) - saved(8, 16), rel=0.01)
    # More logits than a chunk are dropped, and hidden states (32 numbers, not 61) kept in their place.
    dropped = saved(8, 48) - saved(8, 48, chunk=61 * 300)
    assert dropped == pytest.approx(4 * 8 * 48 * 7 * (61 - 32), rel=0.01)


@pytest.mark.parametrize("shape", ((8, 24), (24, 8), (16, 16)))
def test_muon_is_pytorchs_but_for_the_dtype_of_its_products(shape):
    start, *grads = torch.randn((5, *shape), generator=torch.Generator().manual_seed(0))
    ours, same, theirs = (torch.nn.Parameter(start.clone()) for _ in range(3))
    optimizers = {ours: train.Muon([ours], 0.02, torch.float32),
                  same: train.Muon([same], 0.02, torch.bfloat16),
                  theirs: torch.optim.Muon([theirs], 0.02, weight_decay=0.0, adjust_lr_fn="original")}
    for grad, (p, optimizer) in product(grads, optimizers.items()):
        p.grad = grad.clone()
        optimizer.step()
    assert torch.equal(same, theirs)
    assert 0 < (ours - theirs).norm() < 0.02 * (theirs - start).norm()
    assert ((0.5 < (values := torch.linalg.svdvals(train.orthogonalize(start)))) & (values < 1.3)).all()


@pytest.mark.parametrize("labels", ("soft", "hard"))
@pytest.mark.parametrize("stored", (torch.float32, torch.bfloat16))
def test_every_mix_of_dtypes_trains(stored, labels, data, tmp_path, monkeypatch):
    """--target with files of either dtype, on a CPU with and without products in bfloat16 and, as far as
    dtypes go, on CUDA; --float32 or not."""
    make_pair(vocab=300, layers=4)[0].to(stored).save_pretrained(tmp_path / "target")
    Tokenizer.from_merges(MERGES[:20], ["<|end|>"]).save_pretrained(tmp_path / "target")
    flags = ["--target", str(tmp_path / "target"), "--data", str(data), *LEARN,
             *f"--labels {labels} --responses 4 --response-tokens 6 --drafter-steps 1".split()]
    opened, pretrained = Transformer.from_pretrained, train.pretrained_target
    monkeypatch.setattr(train, "run_benchmark", lambda *args, **how: None)
    monkeypatch.setattr(Transformer, "from_pretrained", lambda path, device, dtype: opened(path, dtype=dtype))

    def as_on_cuda(run, args):
        run = copy.copy(run)
        run.device = torch.device("cuda")
        target, *others = pretrained(run, args)
        assert target.dtype == run.dtype
        return target, *others
    for machine, more, kind in product(("cuda", "bfloat16", "plain"), ([], ["--float32"]), DRAFTERS):
        monkeypatch.setattr(train, "has_bfloat16", lambda: machine != "plain")
        monkeypatch.setattr(train, "pretrained_target", as_on_cuda if machine == "cuda" else pretrained)
        out = tmp_path / f"{machine} {more}"
        train.main([*flags, *more, "--drafter", kind, "--out", str(out)])
        assert math.isfinite(losses_of(out, DRAFTERS[kind].folder)[-1])


# ---- bad input: one line, exit status 2, nothing lost ------------------------------------------------------

def test_bad_checkpoints(tmp_path):
    opened, file = partial(Transformer.from_pretrained, tmp_path), tmp_path / "model.safetensors"
    fails(opened, "config.json")
    make_pair()[0].save_pretrained(tmp_path)
    whole = file.read_bytes()
    for length in (-100, 4):
        file.write_bytes(whole[:length])
        fails(opened, "truncated")
    file.unlink()
    fails(opened, "safetensors")
    file.write_bytes(whole)
    refused(opened, tmp_path / "config.json", ({"model_type": "mamba"}, "mamba"), ({"num_experts": 8}, "8"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"), ({"hidden_size": 64}, "shape"),
            ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, ""), ({"rope_parameters": [1]},),
            ({"num_hidden_layers": 7}, "missing"), ({"num_hidden_layers": 3}, "no place"),
            ({"hidden_act": "gelu"},), ({"use_sliding_window": True},), ({"hidden_size": True},),
            ({"vocab_size": None},), ({"head_dim": "64"},), ({"rope_theta": 0},))


def test_a_drafter_of_another_target(tmp_path):
    for kind in DRAFTERS:
        target, drafter = make_pair(kind)
        drafter.save_pretrained(tmp_path / kind)
    target.save_pretrained(tmp_path / "target")
    changed = lambda **fields: random_weights(Transformer(replace(target.config, **fields)), 0)
    other = changed(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    for kind in ("dflash", "eagle3"):  # no embedding and no head: neither vocabulary nor head layout matters
        foreign = load_drafter(tmp_path / kind, other)
        assert speculative(other, foreign, PROMPTS, 12).tokens == autoregressive(other, PROMPTS, 12).tokens
    for name, fields, *words in (
            ("dflash", {"hidden_size": 64}, "another target", "hidden_size", "64"),
            ("eagle3", {"hidden_size": 64}, "another target", "hidden_size", "64"),
            ("ar", {"vocab_size": 64}, "another target", "vocab_size"),
            ("dflash", {"vocab_size": 60}, "mask_token_id", "60"),
            ("target", {}, "not a DFlash drafter", "Qwen3ForCausalLM"),
            *((kind, {"num_hidden_layers": 8}, "num_target_layers", "8") for kind in DRAFTERS)):
        fails(lambda: load_drafter(tmp_path / name, changed(**fields)), *words)
    for name in ("target", *BASELINES):
        fails(lambda: DFlashDrafter.from_pretrained(tmp_path / name, target), "not a DFlash drafter")
    for kind in DRAFTERS:
        refused(partial(load_drafter, tmp_path / kind, target), tmp_path / kind / "config.json",
                ({"block_size": 0}, "block_size 0", f"/{kind}/"))


def test_drafter_fields_that_are_refused(tmp_path):
    target, drafter = make_pair()
    drafter.save_pretrained(tmp_path)
    file, opened = tmp_path / "config.json", partial(DFlashDrafter.from_pretrained, tmp_path, target)
    config = read_json(file)
    own = config["dflash_config"]
    inside = (("mask_token_id", 61), ("target_layer_ids", [1, 6]), ("target_layer_ids", 5), ("causal", True),
              ("selector_rank", 8), ("something_new", 1), ("injection", "x"), ("chat_options", [1]))
    beside = (("is_causal", True), ("sample_from_anchor", True), ("final_logit_softcapping", 30.0),
              ("output_multiplier", 0.5), ("conv_kernel_size", 4), ("architectures", ["DFlash2DraftModel"]),
              ("layer_types", ["sliding_attention"]), ("dflash_config", 5))
    for field, value in inside + beside:
        change = {"dflash_config": {**own, field: value}} if (field, value) in inside else {field: value}
        refused(opened, file, (change, field, json.dumps(value).strip('[]"')))
    harmless = {**own, "causal": False, "selector_rank": None, "something_new": None}
    text = json.dumps({**config, "is_causal": False, "dflash_config": harmless})
    file.write_text("\ufeff" + text, encoding="utf-8")
    assert opened().config == drafter.config


def test_bad_decoding_input():
    for prompts, options, *words in (
            ([[]], {}, "empty"), ([], {}, "no prompts"), ([[1] * 500], {}, "500", "512"),
            ([[61]], {}, "vocabulary"), ([[1]], dict(temperature=-1), "temperature"),
            ([[1]], dict(temperature=math.nan), "temperature"), ([[1]], dict(top_p=0.0), "top_p"),
            ([[1]], dict(top_k=0), "top_k"), ([[1]], dict(block_size=0), "block_size"),
            ([[1]], dict(block_size=10**8), "block_size"),
            ([[1], [2]], dict(seed=[1], temperature=1.0), "seeds")):
        fails(lambda: speculative(*make_pair(), prompts, 20, **options), *words)
    for kind, how in product(BASELINES, (dict(tree_budget=8), dict(denoise_steps=2))):
        fails(lambda: speculative(*make_pair(kind), [[1]], 20, **how), "tree", "token")


def test_bad_training_input(data, tmp_path):
    for name, content in (("short.txt", "too short"), ("x.bin", "\0"), ("chats/a.jsonl", '{"prompt": "x"}'),
                          ("empty/.hidden", "x")):
        model.write_text(tmp_path / name, content)
    flags = ["--out", str(tmp_path / "out"), *TINY]
    for name, word in (("nowhere", "no such file"), ("empty", "text"), ("x.bin", "text"),
                       ("short.txt", "sequence"), ("chats", "--target")):
        fails(lambda: train.main(["--data", str(tmp_path / name), *flags]), word)
    for flag, value, *word in (
            ("kv-heads", 3), ("block-size", 1), ("batch", 0), ("device", "nonsense"), ("seed", -1),
            ("heads", 0), ("vocab-size", 100), ("gamma", 0), ("minutes", "nan"),
            ("temperatures", -1), ("mask-token", "zz"), ("response-tokens", 5000)):
        fails(lambda: train.main(["--data", str(data), *flags, f"--{flag}", str(value)]), *word or [flag])


def test_a_nan_loss_stops_and_keeps_the_checkpoint(tmp_path):
    args, module = train.parse(["--out", str(tmp_path), *TINY]), torch.nn.Linear(4, 4)
    run, before = train.Run(args), module.weight.detach().clone()
    run.is_done(args, "target")

    def loss_of(step):
        loss = module(torch.ones(1, 4)).square().sum()
        # a gradient that is not finite, at step 25
        return loss * (math.inf if step == 25 else 1.0), torch.ones(())
    fails(lambda: train.fit(run, module, (0.02, 1e-3), 60, 1, loss_of), "loss is", "step 30", "--target-lr")
    kept = load_file(tmp_path / "target.checkpoint.safetensors")
    assert all(value.isfinite().all() for value in kept.values())
    assert not torch.equal(kept["model.weight"], before)


def test_a_stage_without_its_settings_file_starts_anew(tmp_path):
    args = train.parse(["--out", str(tmp_path), *TINY, "--minutes", "1", "--resume"])

    def begin(stage):
        run = train.Run(args)
        assert not run.is_done(args, stage)
        run.begin()
        return run
    for stage in ("target", "responses"):
        begin(stage).decide(7)
    (tmp_path / "responses").mkdir(exist_ok=True)
    left = [tmp_path / name for name in ("responses/00000.safetensors", "responses.checkpoint.safetensors",
                                         "target.checkpoint.safetensors")]
    for file in left:
        file.write_bytes(b"old")
    (tmp_path / "responses.settings.json").unlink()
    assert begin("target").record["number"] == 7 and begin("responses").record["number"] is None
    assert [file.exists() for file in left] == [False, False, True]


def test_training_compiles_on_the_cpu_only_when_asked(tmp_path, monkeypatch):
    start = ["--out", str(tmp_path), "--device", "cpu"]
    compiles = lambda *flags: train.Run(train.parse([*start, *flags])).compile
    monkeypatch.setattr("model.has_compiler", lambda: True)
    assert not compiles() and compiles("--compile")
    monkeypatch.setattr("model.has_compiler", lambda: False)
    assert not compiles()
    fails(lambda: compiles("--compile"), "C++ compiler")


def test_command_line_errors_are_one_line(tmp_path):
    error = run_script("decode.py", "--out", tmp_path, "--prompt", "x", status=2)[1]
    assert error.count("\n") == 1 and "config.json" in error
    # pipes that close early, in the run and at its end
    code = "import model; model.run_command(lambda: print('x' * {}))"
    piped = [subprocess.Popen([sys.executable, "-c", code.format(length)], cwd=HERE, **PIPES)
             for length in (1, 10**6)]
    for process in piped:
        process.stdout.close()
    assert [process.stderr.read() for process in piped] == [b"", b""]


def test_the_readme_points_at_the_right_lines():
    links = re.findall(r'\((\w+\.py)#L(\d+) "(.*?)"\)', (HERE / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 10
    for file, line, text in links:
        lines = (HERE / file).read_text(encoding="utf-8").splitlines()
        assert text in lines[int(line) - 1], f"{file}:{line} is no longer {text}"
