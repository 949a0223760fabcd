"""The target: a Qwen3/Llama-style Transformer with its KV cache, and how a token is drawn from its logits.
Below that its files on disk, the tokenizer, and what the command lines share.

Parameters are named as in Hugging Face checkpoints, so a checkpoint is read by name alone: model.norm,
model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, ...}, lm_head.
What DFlash needs beyond an ordinary decoder are the taps: `forward` also returns the residual stream after
chosen layers.

Shapes: B rows, Q new tokens a row, C = hidden_size, H heads and K key-value heads of D = head_dim,
V = vocab_size.
"""
import argparse
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from unicodedata import normalize

import jinja2.sandbox
import numpy as np
import regex
import tiktoken
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from kernels import attention, causal, has_compiler, make_mask, tree as tree_mask


# ---- the Transformer ---------------------------------------------------------------------------------------

class KVCache:
    """Preallocated keys and values of all layers. It knows no lengths: a caller rolls back by masking slots
    (see kernels.py), and the next pass writes over them.

    kv_len: a pass looks at the first kv_len slots, among which must be all that it writes.
    """

    def __init__(self, config, batch, length, device, dtype):
        L, K, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        # Layer i's keys are data[2 * i], its values data[2 * i + 1]; of each a flat view to write, and one by
        # row and head to read.
        self.data = torch.zeros(2 * L, batch * K * length, D, device=device, dtype=dtype)
        self.views = [(flat, flat.view(batch, K, length, D)) for flat in self.data]
        self.first_slot = torch.arange(batch * K, device=device).view(batch, K, 1) * length
        self.kv_len = length

    def flat_indices(self, slots):
        """slots (B, N) -> their indices in `data`, of all heads (B * K * N,)"""
        return (self.first_slot + slots[:, None]).flatten()

    def write_at(self, slots):
        """The next pass writes its N tokens at slots (B, N)."""
        self.writing = self.flat_indices(slots)

    def update(self, layer, k, v):
        """Writes k, v (B, N, K, D) of a layer -> that layer's keys and values, (B, K, kv_len, D) each"""
        seen = []
        for (flat, rows), new in zip(self.views[2 * layer:2 * layer + 2], (k, v)):
            flat.index_copy_(0, self.writing, new.transpose(1, 2).reshape(-1, new.shape[-1]))
            seen.append(rows[:, :, :self.kv_len])
        return seen

    def move(self, source, destination):
        """Copies slots source (B, N) to destination (B, N), in all layers."""
        moved = self.data.index_select(1, self.flat_indices(source))
        self.data.index_copy_(1, self.flat_indices(destination), moved)


class RMSNorm(nn.RMSNorm):
    def forward(self, x):                    # under autocast x may be bfloat16, where the weight is float32
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Rope:
    """cos and sin of the rotary angles, at any positions."""

    def __init__(self, config):
        frequency, self.factor = rope_frequencies(config)
        # The minus gives sin the sign of rotate_half, see `apply_rotary_emb`; cos is even.
        self.frequency = torch.cat((-frequency, frequency))

    def __call__(self, positions, dtype):
        """positions (B, N) -> cos, sin (B, N, 1, D)"""
        if self.frequency.device != positions.device:
            self.frequency = self.frequency.to(positions.device)
        angle = positions[:, :, None, None] * self.frequency
        return [(x if self.factor == 1 else x * self.factor).to(dtype) for x in (angle.cos(), angle.sin())]


def apply_rotary_emb(x, cos, sin):
    """x (B, N, heads, D) -> x * cos + rotate_half(x) * sin. Rolling by D/2 is rotate_half but for the sign,
    which sin has."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query attention. The target uses it as plain self-attention; the drafter hands it a `context`
    of fused target features that joins the keys and values only: DFlash's KV injection."""

    def __init__(self, config, layer):
        super().__init__()
        C, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias or config.model_type == "qwen2"
        self.layer, self.head_dim = layer, D
        self.q_proj = nn.Linear(C, H * D, bias=bias)
        self.k_proj = nn.Linear(C, K * D, bias=bias)
        self.v_proj = nn.Linear(C, K * D, bias=bias)
        self.o_proj = nn.Linear(H * D, C, bias=config.attention_bias)
        qk_norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if qk_norm else nn.Identity()

    def project(self, x, source, rope):
        """x (B, Q, C), source (B, N, C) -> q (B, Q, H, D), k and v (B, N, K, D), q and k normed and rotated.
        rope: cos and sin at the positions of source, whose last ones are x's."""
        cos, sin = rope
        first = source.shape[1] - x.shape[1]
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        q = apply_rotary_emb(self.q_norm(q), cos[:, first:], sin[:, first:])
        k = apply_rotary_emb(self.k_norm(k), cos, sin)
        return q.to(v.dtype), k.to(v.dtype), v                   # under autocast norms and angles are float32

    def forward(self, x, rope, mask, cache=None, context=None):
        source = x if context is None else torch.cat((context, x), 1)    # (B, N, C), N = Q or context + Q
        q, k, v = self.project(x, source, rope)
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None else cache.update(self.layer, k, v)
        out = attention(q.transpose(1, 2), k, v, mask)                   # (B, H, Q, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer, of the target and of the drafter alike."""

    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, mask, cache=None, context=None):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    device = property(lambda self: self.model.norm.weight.device)
    dtype = property(lambda self: self.model.norm.weight.dtype)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()                      # for the "model." in the parameters' names
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = Rope(config)

    def logits(self, hidden):
        """The LM head, the target's and the drafter's: (..., C) -> (..., V)."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    def init_weights(self, generator):
        """As the function below; embeddings with deviation 0.02, since the head is often tied to them."""
        init_weights(self, generator)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02, generator=generator)

    def forward(self, ids, positions=None, cache=None, taps=(), tree=None):
        """One causal pass over new tokens.

        ids:       (B, Q) token ids
        positions: (B, Q) int64, their places in the text; None: 0 .. Q - 1
        cache:     KVCache to extend and to read; a token's slot is its position, unless in a tree. None: the
                   tokens see only each other
        taps:      layer ids i (0-based): the residual stream AFTER layer i, Hugging Face's
                   hidden_states[i + 1]
        tree:      (start (B,), ancestors (B, Q, Q) bool): the tokens are a tree of drafts, in slots start,
                   start + 1, ... of the cache, and see as `kernels.tree` says
        Returns (hidden, features): (B, Q, C) after the final norm, for `logits`; (B, Q, len(taps) * C).
        """
        B, Q = ids.shape
        order = torch.arange(Q, device=ids.device)
        positions = order.expand(B, Q) if positions is None else positions
        x = self.model.embed_tokens(ids)                                     # (B, Q, C)
        rope = self.rope(positions, x.dtype)
        if cache is not None:
            cache.write_at(positions if tree is None else tree[0][:, None] + order)
        mask_mod = causal(positions) if tree is None else tree_mask(*tree)
        mask = make_mask(mask_mod, B, Q, Q if cache is None else cache.kv_len, ids.device, x.dtype)
        tapped = {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rope, mask, cache)
            if i in taps:
                tapped[i] = x
        features = torch.cat([tapped[i] for i in taps], -1) if len(taps) else x[..., :0]
        return self.model.norm(x), features

    @classmethod
    def from_pretrained(cls, path, *, device="cpu", dtype=None):
        """Opens a Hugging Face directory: config.json and *.safetensors. dtype None keeps the files' own.
        UserError says what is wrong with it."""
        config = read_json(Path(path) / "config.json", ModelConfig.from_dict)
        return load_model(lambda: cls(config), path, device, dtype)

    def save_pretrained(self, path):
        """Writes a directory that transformers' AutoModelForCausalLM opens as is."""
        save_model(self, path, self.config.to_dict())


def init_weights(module, generator):
    """Linear layers: normal, deviation 1/sqrt(fan-in); norms: one. Projections that write to the residual
    stream start at zero, so that every layer begins as the identity (as in muP and modded-nanogpt)."""
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.ones_(parameter)


# ---- from logits to a token --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from softmax(logits / temperature) after top-k, then top-p; at temperature 0 it
    is the likeliest. UserError for a value out of range."""
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        check(0 <= self.temperature < math.inf, "temperature", self.temperature, "out of range")
        check(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "out of range")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "out of range")

    def draw(self, logits, noise):
        """logits (..., V), noise (..., V) from `exponential_noise`, None at temperature 0 -> token ids (...).

        The largest p / noise is token x with probability p(x): of independent clocks that ring at rates p,
        at times noise / p, it is the first. (In logarithms: logits / temperature + Gumbel noise.)
        """
        return (logits if self.temperature == 0 else self.probabilities(logits) / noise).argmax(-1)

    def guess_probabilities(self, logits, noise):
        """A drafter's logits -> weights (..., V), of sum 1, of what the target will draw with this noise:
        p / noise, whose largest is the draw from p; at temperature 0 p squared, since greedy text is easier
        to guess than the sampled text that p is of. They order drafts, and never change what is kept.
        """
        if self.temperature == 0:
            return (2 * logits.float()).softmax(-1)
        weights = self.probabilities(logits) / noise
        return weights / weights.sum(-1, keepdim=True)

    def probabilities(self, logits):
        """logits (..., V) -> probabilities (..., V) in float32 after temperature (> 0), then top-k, then
        top-p (the smallest set of likeliest tokens that reaches top_p)."""
        logits = logits.float() / max(self.temperature, 1e-6)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = probs.sort(-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= max(self.top_p, 1e-9), 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def scramble(x):
    """A bijection of the 32-bit integers that looks random (lowbias32, C. Wellons 2018). Works in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x ^= (x >> shift).bitwise_and_((1 << 32 - shift) - 1)     # a shift of a signed number copies its sign
        x *= factor
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def stream_keys(seed, rows):
    """(rows, 2) int32, the key of each row's own stream of noise. An int seed: of (seed, row); a list: of a
    row's own seed; None: of a seed that nobody knows. UserError where a list is not one seed a row."""
    if seed is None:
        seed = int(np.random.SeedSequence().entropy % 2**63)
    seeds = [(seed, row) for row in range(rows)] if isinstance(seed, (int, np.integer)) else list(seed)
    check(len(seeds) == rows, "number of seeds", len(seeds), f"give one, or one a prompt ({rows})")
    words = [np.random.SeedSequence(s).generate_state(2, np.uint32) for s in seeds]
    return torch.from_numpy(np.stack(words).view(np.int32))


def exponential_noise(keys, index, vocab_size):
    """The noise of each (stream, token index, token id): exponentially distributed, with mean 1, and a
    function of these three alone.

    keys: (B, 2) int32 from `stream_keys`; index: (B, n), of the tokens that are drawn.
    Returns (B, n, vocab_size) float32.
    """
    stream, more = keys[:, :1], keys[:, 1:]
    key = scramble(stream + index.int()) ^ more                      # (B, n)
    token = scramble(torch.arange(vocab_size, dtype=torch.int32, device=keys.device))
    bits = scramble(key[:, :, None] ^ token)                         # (B, n, V)
    # In (-1, 0), finest near 0, where the winner's is.
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(-2.0**-31)
    return uniform.clamp_(min=2.0**-24 - 1).log1p_().neg_()


# ---- configuration -----------------------------------------------------------------------------------------

class UserError(Exception):
    """Something the user can put right: the command lines print it as one line and exit with status 2."""


def check(good, field, value, why="not supported"):
    if not good:
        raise UserError(f"{field} = {json.dumps(value, ensure_ascii=False, default=str)[:200]}: {why}")


def check_fields(raw, allowed, prefix=""):
    """allowed: {field: the values it may have, None meaning absent, or a function that accepts these}."""
    for field, good in allowed.items():
        value = raw.get(field)
        if callable(good):
            check(good(value), prefix + field, value, "no valid value")
        else:
            check(value in good, prefix + field, value, f"not supported ({json.dumps(good)} are)")


def is_count(value):
    return type(value) is int and 0 < value < 2**24


def is_positive(value):
    return type(value) in (int, float) and 0 < value < math.inf


def absent_or(good):
    return lambda value: value is None or good(value)


LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_FIELDS = {
    "rope_type": ("default", "llama3", "yarn"), "partial_rotary_factor": (None, 1),
    "truncate": (None, True, False), "finetuned": (None, True, False),
    **dict.fromkeys((*LLAMA3_FIELDS, "rope_theta", "beta_fast", "beta_slow", "attention_factor"),
                    absent_or(is_positive))}
CONFIG_FIELDS = {
    "model_type": ("qwen3", "llama", "qwen2"),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads"), is_count),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"), absent_or(is_count)),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), absent_or(is_positive)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), lambda value: isinstance(value, dict | None)),
    "layer_types": lambda value: {*(value or ())} <= {"full_attention"},
    "hidden_act": (None, "silu"), "mlp_bias": (None, False), "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1), "num_experts": (None, 0), "quantization_config": (None,),
    "pretraining_tp": (None, 1)}


@dataclass
class ModelConfig:
    """Field names as in a Hugging Face config.json."""
    model_type: str = "qwen3"           # qwen3: QK-norm; llama: none; qwen2: none, biases on q, k, v
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None    # {"rope_type": "llama3" | "yarn", ...}
    attention_bias: bool = False        # llama: on q, k, v and o
    tie_word_embeddings: bool = True
    eos_token_id: int | list | None = None
    bos_token_id: int | None = None

    @classmethod
    def from_dict(cls, raw):
        """From a config.json's content. UserError names the field and value that are not supported."""
        check_fields(raw, CONFIG_FIELDS)
        heads, qwen3 = raw["num_attention_heads"], raw["model_type"] == "qwen3"
        # What a file leaves out, as Hugging Face has it for these three.
        left_out = {"num_key_value_heads": heads, "tie_word_embeddings": False,
                    "head_dim": 128 if qwen3 else raw["hidden_size"] // heads}
        found = {field: value for field, value in raw.items() if value is not None}
        found = left_out | found | read_rope(raw)
        whole = heads % found["num_key_value_heads"] == 0
        check(whole, "num_attention_heads", heads, "no multiple of num_key_value_heads")
        config = cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})
        rope_frequencies(config)                                   # refuses here what can't be computed
        return config

    def to_dict(self):
        """For a config.json that old and new transformers, vLLM and SGLang read."""
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or {"rope_type": "default"})}
        return {**asdict(self), "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
                "hidden_act": "silu", "rope_parameters": rope, "attention_dropout": 0.0,
                "use_sliding_window": False, "sliding_window": None}


def read_rope(raw):
    """{"rope_theta", "rope_scaling"} of a config.json. transformers 5 writes both into rope_parameters;
    before it they stood apart, and people still add a rope_scaling by hand, which then counts."""
    theta, scaling = raw.get("rope_theta") or ModelConfig.rope_theta, None
    for name in ("rope_parameters", "rope_scaling"):
        rope = {field: value for field, value in (raw.get(name) or {}).items() if value is not None}
        rope = {"rope_type": rope.pop("type", "default"), **rope}    # "type": the older key
        unknown = dict.fromkeys(rope.keys() - ROPE_FIELDS.keys(), (None,))
        needed = dict.fromkeys(LLAMA3_FIELDS if rope["rope_type"] == "llama3" else (), is_positive)
        check_fields(rope, ROPE_FIELDS | unknown | needed, f"{name} field ")
        theta = rope.pop("rope_theta", theta)
        if rope["rope_type"] != "default":
            check(scaling in (None, rope), name, rope, "rope_parameters ask for another one")
            scaling = rope
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_frequencies(config):
    """Inverse frequencies (D/2,) in radians a position, and the factor on cos and sin: plain, llama3, yarn"""
    D, scaling = config.head_dim, config.rope_scaling
    frequency = config.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D)
    if not scaling:
        return frequency, 1.0
    length = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    factor = scaling.get("factor", config.max_position_embeddings / length)
    if scaling["rope_type"] == "llama3":            # long wavelengths are slowed, short ones stay
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return frequency * (keep + (1 - keep) / factor), 1.0
    # yarn (Peng et al. 2023, arXiv:2309.00071, section 3.2): slowed more and more from the dimension that
    # turns beta_fast times over the original length to the one that turns beta_slow times.
    low, high = (D * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
                 for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    stretch = ((torch.arange(D // 2, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    attention_factor = scaling.get("attention_factor", 0.1 * math.log(max(factor, 1)) + 1)
    return frequency * (1 - stretch) + frequency / factor * stretch, attention_factor


# ---- files: whole or not at all, never a pickle ------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def reading(file, problem="broken or truncated"):
    """What goes wrong inside, in a missing, damaged or unsupported file, becomes one line that names it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    except Exception as error:       # of JSON, safetensors, regex, jinja2, or a value of the wrong kind
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{file}: {problem} ({text})") from None


def read_text(file, convert=str):
    """convert(a UTF-8 file's text), without the byte-order mark that some editors write. UserError where
    there is no such file, or convert refuses what it holds."""
    with reading(file):
        return convert(Path(file).read_text(encoding="utf-8-sig"))


def read_json(file, convert=dict):
    """convert(a JSON file's object), as `read_text` does. UserError also where it holds something else."""
    def convert_object(text):
        value = json.loads(text)
        check(isinstance(value, dict), "content", value, "no JSON object")
        return convert(value)
    return read_text(file, convert_object)


def read_optional(file):
    return read_json(file) if file.exists() else {}


def atomic_write(path, write):
    """Calls write(temporary path), then renames: neither a reader nor a crash ever sees half a file. Makes
    the folder, where there is none."""
    temporary = f"{path}.tmp"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(temporary)
    os.replace(temporary, path)


def write_text(path, text):
    atomic_write(path, lambda name: Path(name).write_text(text, encoding="utf-8"))


def write_json(path, value):
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load_model(build, path, device, dtype=None):
    """build(), a module, with the parameters of path/*.safetensors: one file, or shards with an index. dtype
    None: that of the first one stored. UserError where a file is missing or damaged, or holds other
    parameters than the module's."""
    with torch.device("meta"):                         # no memory, no time for weights that are not to stay
        module = build()
    path, found = Path(path), {}
    expected = {key: [*parameter.shape] for key, parameter in module.named_parameters()}
    index = read_optional(path / "model.safetensors.index.json")
    for name in sorted({*index.get("weight_map", {"": "model.safetensors"}).values()}):
        with reading(path / name), safe_open(path / name, framework="pt") as tensors:
            for key in tensors.keys():
                # Tied heads, and tables that are computed here, are at times stored too.
                if key in expected or not (key == "lm_head.weight" or "rotary_emb" in key):
                    stored = tensors.get_tensor(key)
                    dtype = dtype or stored.dtype
                    check(dtype in DTYPES.values(), f"dtype of {key}", dtype)
                    found[key] = stored.to(device=device, dtype=dtype, copy=True)
    for key in sorted(expected.keys() | found.keys()):
        shape = [*found[key].shape] if key in found else "missing"
        wanted = expected.get(key, "no place for it")
        check(shape == wanted, f"{path}: shape of {key}", shape, f"config.json has {wanted}")
    module.load_state_dict(found, assign=True)
    return module.eval()


def save_model(module, path, config):
    """Writes path/model.safetensors and path/config.json; the dtype under its new and its old key."""
    file = Path(path) / "model.safetensors"
    atomic_write(file, lambda name: save_file(module.state_dict(), name, metadata={"format": "pt"}))
    dtype = str(module.dtype).removeprefix("torch.")
    write_json(Path(path) / "config.json", {**config, "dtype": dtype, "torch_dtype": dtype})


# ---- the tokenizer: byte-level BPE, in tokenizer.json's format ---------------------------------------------

# What the tokenizers library calls ByteLevel(use_regex=True): the GPT-2 splitting pattern.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Ours, for Python source: an identifier with its underscores is one word (with a space or sign before it),
# numbers go in threes, signs take the line end and the next line's indentation along.
CODE_PATTERN = (r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+(?:[\r\n]+[ \t]*)?"
                r"|[\r\n]+[ \t]*|\s+(?!\S)|\s+")
# tokenizer.json writes each byte of a token as one printable character: itself, or one from 256 up.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
CHAR_BYTE = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(OTHERS)}
BYTE_CHAR = {b: c for c, b in CHAR_BYTE.items()}
# The fields of tokenizer.json's sections that change its ids, and the values that are supported.
NOTHING = (None, False, 0, "")
TOKENIZER_FIELDS = {
    "model": {"type": (None, "BPE"), "dropout": NOTHING, "continuing_subword_prefix": NOTHING,
              "end_of_word_suffix": NOTHING, "byte_fallback": NOTHING},
    "normalizer": {"type": ("NFC",)}, "decoder": {"type": ("ByteLevel",)},
    "pre_tokenizer": {"type": ("Split", "Digits", "ByteLevel"), "behavior": (None, "Isolated", "Removed"),
                      "add_prefix_space": NOTHING},
    "added_tokens": {"lstrip": NOTHING, "rstrip": NOTHING, "single_word": NOTHING}}


def parts(section):
    """A section of tokenizer.json as a list: that of a Sequence, of one part, or of none."""
    if isinstance(section, dict) and section.get("type") == "Sequence":      # its list is named as its kind
        return next(value for value in section.values() if isinstance(value, list))
    return [section] if isinstance(section, dict) else section or []


def split_patterns(pre):
    """tokenizer.json's pre_tokenizer -> patterns that cut a text into words, one after another."""
    *splits, last = parts(pre) or [{}]
    check(last.get("type") == "ByteLevel", "pre_tokenizer", pre, "must end in ByteLevel")
    patterns = []
    for p in splits:
        if p["type"] == "Digits":
            one_or_all = r"\p{N}" if p["individual_digits"] else r"\p{N}+"
            p = {"pattern": {"Regex": one_or_all}, "behavior": "Isolated"}
        pattern = p["pattern"].get("Regex") or regex.escape(p["pattern"]["String"])
        # Empty matches would lose text; {n,m}+ is a nested repeat there but possessive here.
        bad = regex.match(pattern, "") or regex.search(r"(^|\|)\(\?[=!<]|\{\d*,?\d*\}\+", pattern)
        check(not bad, "pre_tokenizer pattern", pattern)
        between = rf"(?:(?!{pattern})(?s:.))+"
        kept = pattern if p.get("invert") else between
        patterns.append(kept if p["behavior"] == "Removed" else f"{pattern}|{between}")
    return patterns + ([GPT2_PATTERN] if last.get("use_regex", True) else []) or [r"(?s:.+)"]


class AddedTokens:
    """Tokens that are looked for in a text before anything else, the longest first."""

    def __init__(self, ids):
        names = sorted(filter(None, ids), key=len, reverse=True)
        self.ids = ids
        self.pattern = regex.compile("|".join(map(regex.escape, names)) or "(?!)")    # (?!) matches never

    def cut(self, text, ignored):
        """Yields (the text before a token, [its id]), at last (the rest, []). ignored: ids to pass over."""
        start = 0
        for match in self.pattern.finditer(text):
            if self.ids[match[0]] not in ignored:
                yield text[start:match.start()], [self.ids[match[0]]]
                start = match.end()
        yield text[start:], []


class Tokenizer:
    """text <-> ids, the same ids as the `tokenizers` library gives for the same tokenizer.json.

    eos_id: int or None; eos_ids: all that end a text (chat models have several). bos_id: the id that the
    file's post_processor would put first, or None (encode never adds it). vocab_size: highest id + 1.
    special_ids: dict text -> id. chat_options: keywords of the chat template.
    """

    eos_id = property(lambda self: next(iter(self.eos_ids), None))

    def __init__(self, data, config=None):
        """data: tokenizer.json as a dict; config: tokenizer_config.json. UserError if unsupported."""
        self.data, self.config, self.chat_options = data, config or {}, {}
        for section, allowed in TOKENIZER_FIELDS.items():
            for part in parts(data.get(section)):
                check_fields(part, allowed, f"{section}.")
        model, vocab, added = data["model"], data["model"]["vocab"], data.get("added_tokens") or []
        self.normalize = functools.partial(normalize, "NFC") if parts(data.get("normalizer")) else str
        self.bytes_of = {i: token_bytes(token) for token, i in vocab.items()}
        self.special_ids = {token["content"]: token["id"] for token in added if token.get("special")}
        ids, raw, normalized = dict(vocab), {}, {}
        for token in added:                     # looked for in the text as it is, or in the normalized text
            text, i = token["content"], token["id"]
            check(vocab.get(text) in (None, i), f"id of {text}", i, "another in model.vocab")
            ids[text], self.bytes_of[i] = i, text.encode()
            (normalized if token.get("normalized") else raw)[text] = i
        self.raw_tokens = AddedTokens(raw)
        self.normalized_tokens = AddedTokens({self.normalize(text): i for text, i in normalized.items()})
        self.vocab_size = max(self.bytes_of) + 1

        # tiktoken merges in the order of ranks, which need not be that of ids.
        order = merge_order(model, raw.keys() | normalized.keys())
        self.id_of_rank = [vocab[token] for token in order]
        self.tokenless = bytes(b for char, b in CHAR_BYTE.items() if char not in vocab)
        self.patterns = [regex.compile(pattern) for pattern in split_patterns(data.get("pre_tokenizer"))]
        ranks = {token_bytes(token): rank for rank, token in enumerate(order)}
        self.encoding = tiktoken.Encoding("bpe", pat_str="", mergeable_ranks=ranks, special_tokens={})
        self.encode_word = functools.lru_cache(2**16)(self.encode_word)

        eos, self.bos_id = token_text(self.config.get("eos_token")), None
        check(eos is None or eos in ids, "tokenizer_config.json eos_token", eos, "not in the vocabulary")
        self.eos_ids = [ids[eos]] if eos in ids else []
        for part in parts(data.get("post_processor")):
            if part["type"] == "TemplateProcessing" and "SpecialToken" in part["single"][0]:
                self.bos_id = part["special_tokens"][part["single"][0]["SpecialToken"]["id"]]["ids"][0]
        self.chat_template = self.config.get("chat_template")
        if isinstance(self.chat_template, list):                     # several, by name
            self.chat_template = {t["name"]: t["template"] for t in self.chat_template}.get("default")

    @classmethod
    def from_pretrained(cls, path):
        """Reads path/tokenizer.json, and end-of-text tokens and chat template from the files beside it.
        UserError if there is no tokenizer.json, or it is broken or unsupported."""
        path = Path(path)
        config = read_optional(path / "tokenizer_config.json")
        if (path / "chat_template.jinja").exists():
            config["chat_template"] = read_text(path / "chat_template.jinja")
        self = read_json(path / "tokenizer.json", lambda data: cls(data, config))
        for name in ("generation_config.json", "config.json"):       # chat models list several
            eos = read_optional(path / name).get("eos_token_id")
            if eos is not None:
                self.eos_ids += eos if isinstance(eos, list) else [eos]
        good = all(type(i) is int and abs(i) < 2**31 for i in self.eos_ids)
        check(good, f"{path}: eos_token_id", self.eos_ids)
        return self

    @classmethod
    def from_merges(cls, merges, specials=("<|endoftext|>", "<|mask|>")):
        """A new tokenizer: ids 0..255 are the bytes, then the merges in order, then the specials.

        merges: [(left bytes, right bytes), ...] as train_bpe gives; the first special is the eos.
        """
        pairs = [["".join(BYTE_CHAR[b] for b in part) for part in pair] for pair in merges]
        tokens = [BYTE_CHAR[b] for b in range(256)] + ["".join(pair) for pair in pairs]
        byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
        split = {"type": "Split", "pattern": {"Regex": CODE_PATTERN}, "behavior": "Isolated", "invert": False}
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        vocab = {token: i for i, token in enumerate(tokens)}
        added = [{"id": len(vocab) + i, "content": token, **flags} for i, token in enumerate(specials)]
        data = {"version": "1.0", "added_tokens": added, "normalizer": None, "decoder": byte_level,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
                "model": {"type": "BPE", "vocab": vocab, "merges": pairs}}
        return cls(data, {"eos_token": specials[0]})

    def save_pretrained(self, path):
        """Writes tokenizer.json and tokenizer_config.json; transformers.AutoTokenizer opens them."""
        write_json(Path(path) / "tokenizer.json", self.data)
        write_json(Path(path) / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            **self.config, "eos_token": self.decode([self.eos_id]) or None})

    def encode(self, text, special=False):
        """str -> list of ids. Special tokens written in the text count as such only if special=True."""
        # Lone surrogates have no UTF-8: they become U+FFFD.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ignored = () if special else {*self.special_ids.values()}
        out = []
        for raw, raw_id in self.raw_tokens.cut(text, ignored):
            for words, added_id in self.normalized_tokens.cut(self.normalize(raw), ignored):
                out += self.encode_words(words) + added_id
            out += raw_id
        return out

    def encode_words(self, text):
        """Ids of a text without added tokens: each pattern cuts what the one before has left."""
        words = [text]
        for pattern in self.patterns:
            words = [match[0] for word in words for match in pattern.finditer(word)]
        return [i for word in words for i in self.encode_word(word)]

    def encode_word(self, word):
        data = word.encode().translate(None, self.tokenless)         # bytes that have no token are dropped
        return [self.id_of_rank[rank] for rank in self.encoding._encode_single_piece(data)] if data else []

    def decode_bytes(self, ids):
        """Ids -> bytes. An id without a token (a model's vocabulary may be padded) is nothing."""
        return b"".join([self.bytes_of.get(i, b"") for i in ids])

    def decode(self, ids):
        """Ids -> str; bytes that are not UTF-8 become U+FFFD, special tokens appear as their text."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def render_chat(self, messages, tools=None, documents=None):
        """[{"role", "content"}, ...] -> the prompt's text up to where the assistant speaks, by the model's
        own template. The assistant's answer at the end is left out: it is to be written anew. UserError where
        the template refuses."""
        check(self.chat_template, "chat_template", None, "the target has none; give prompts as text")
        question = [*messages]
        while question and question[-1].get("role") == "assistant":
            question.pop()
            say_once("chats that end in the assistant's answer: the answer is left out, and written anew")
        check(question, "messages", messages, "nothing to answer")
        named = {key: token_text(value) for key, value in self.config.items() if key.endswith("_token")}
        with reading("the target's chat template", "refuses these messages"):
            return compile_template(self.chat_template).render(
                messages=question, tools=tools, documents=documents, add_generation_prompt=True,
                **named | self.chat_options)


def token_bytes(token):
    """A token as model.vocab spells it -> its bytes."""
    return bytes(map(CHAR_BYTE.get, token)) if CHAR_BYTE.keys() >= {*token} else token.encode()


def token_text(token):
    """A token of tokenizer_config.json, which is a str or an object -> str or None."""
    return token["content"] if isinstance(token, dict) else token


def merge_order(model, added):
    """All tokens of model.vocab that merging makes, in its order: bytes, then merges. UserError where
    tiktoken, which knows tokens instead of merges, would make others."""
    vocab, made = model["vocab"], {}
    single = [char for char in CHAR_BYTE if char in vocab]
    check(len(single) == 256 or not model.get("unk_token"), "model.unk_token", model.get("unk_token"))
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        known = {left, right, left + right} <= vocab.keys()
        check(known, "model.merges", merge, "not two tokens of model.vocab that make a third")
        made[left + right] = None
    # With ignore_merges a word that is a token counts, made or not.
    rest = vocab.keys() - {*single, *made} - added if model.get("ignore_merges") else ()
    whole = [token for token in rest if CHAR_BYTE.keys() >= {*token}]
    for token in whole:
        merges = any(token[:i] in vocab and token[i:] in vocab for i in range(1, len(token)))
        check(not merges, "model.vocab", token, "model.merges does not make it, but tiktoken would")
    return [*single, *made, *whole]


@functools.cache
def compile_template(text):
    """A chat template, in a sandbox, with the functions that transformers gives it."""
    def raise_exception(message):
        raise jinja2.TemplateError(message)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    # {% generation %}, transformers' mark for what the assistant says, is a scope like any other here.
    text = regex.sub(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})", r"\1with", text)
    return environment.from_string(text)


# ---- prompts -----------------------------------------------------------------------------------------------

class Entry(dict):
    """A row of a file of prompts: "messages" (a chat, maybe with "tools" and "documents"), "prompt" (a whole
    prompt; "rendered": with the template's markers) or "text" (whose beginning is a prompt), maybe a
    "domain". where: its file and line."""
    where = "--data"

    def is_text(self):
        return not self.keys() & {"messages", "prompt"}


ENTRY_FIELDS = {"messages": lambda turns: isinstance(turns, list | None) and all(
                    isinstance(turn, dict) for turn in turns or ()),
                **dict.fromkeys(("prompt", "text", "domain"), lambda value: isinstance(value, str | None)),
                "rendered": (None, True, False)}


def read_entries(file):
    """The entries of a .jsonl or .json file: one a line, or a JSON array. Null columns are dropped.
    UserError names the line (of an array the place in it) of what is no entry."""
    rows = read_text(file, lambda text: json.loads(text) if text.lstrip()[:1] == "[" else text.split("\n"))
    entries = []
    for i, row in enumerate(rows, 1):
        if isinstance(row, str) and not row.strip():
            continue
        with reading(f"{file}:{i}"):
            row = json.loads(row) if isinstance(row, str) else row
            entry = Entry((key, value) for key, value in row.items() if value is not None)
            check({*entry} & {"messages", "prompt", "text"}, "columns", [*row], "no messages, prompt or text")
            check_fields(entry, ENTRY_FIELDS)
        entry.where = f"{file}:{i}"
        entries.append(entry)
    return entries


def encode_prompt(entry, tokenizer, prompt_tokens, rendered=False):
    """An entry -> token ids; of a text the first prompt_tokens. Where the model wants a token before all text
    (Llama 3), it gets it; a chat template writes it itself, and so may a prompt that is `rendered` already,
    in which special tokens count as such. UserError: an empty prompt, or a chat that the template refuses."""
    if "messages" in entry:
        text = tokenizer.render_chat(entry["messages"], entry.get("tools"), entry.get("documents"))
        ids = tokenizer.encode(text, special=True)
    elif "prompt" in entry:
        ids = tokenizer.encode(entry["prompt"], special=entry.get("rendered", rendered))
    else:
        ids = tokenizer.encode(entry["text"])[:prompt_tokens]
    check(ids, "prompt", "", "it is empty")
    return ids if "messages" in entry else with_bos(ids, tokenizer)


def with_bos(ids, tokenizer):
    return ids if tokenizer.bos_id in (None, ids[0]) else [tokenizer.bos_id, *ids]


def encode_entries(entries, tokenizer, prompt_tokens, *, rendered=False, skip_bad=False):
    """Entries -> [(entry, ids), ...] in order, ids as `encode_prompt` gives them. UserError names file and
    line of the first bad entry; with skip_bad they are left out, and counted on stderr."""
    rows, bad = [], []
    for entry in entries:
        try:
            with reading(entry.where):
                rows.append((entry, encode_prompt(entry, tokenizer, prompt_tokens, rendered)))
        except UserError as error:
            if not skip_bad:
                raise UserError(f"{error} (--skip-bad goes on without such prompts)") from None
            bad.append(error)
    if bad:
        print(f"{len(bad)} of {len(entries)} prompts are left out; the first: {bad[0]}", file=sys.stderr)
    return rows


def read_prompts(file, tokenizer, prompt_tokens, per_domain, **how):
    """{domain: rows of ids}: from a .jsonl or .json file, or from a text, cut into prompts. how: as
    `encode_entries` takes it."""
    prompts, domain = {}, Path(file).stem
    if str(file).endswith((".jsonl", ".json")):
        entries = [entry for entry in read_entries(file) if not entry.is_text()
                   or len(tokenizer.encode(entry["text"])) >= prompt_tokens]
        for entry, ids in encode_entries(entries, tokenizer, prompt_tokens, **how):
            prompts.setdefault(entry.get("domain", domain), []).append(ids)
    else:
        ids = tokenizer.encode(read_text(file))
        step = max(prompt_tokens, len(ids) // per_domain)
        starts = range(0, len(ids) - prompt_tokens + 1, step)
        prompts[domain] = [with_bos(ids[i:i + prompt_tokens], tokenizer) for i in starts]
    check(any(prompts.values()), "--prompt-tokens", prompt_tokens, f"no text in {file} has so many tokens")
    return {domain: rows[:per_domain] for domain, rows in prompts.items()}


def check_prompts(config, prompts, max_new_tokens):
    """Refuses, before any work, prompts (rows of ids) that a model cannot go on with for so long."""
    most, vocab_size = config.max_position_embeddings, config.vocab_size
    check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "out of range")
    check(len(prompts), "number of prompts", 0, "no prompts; give at least one")
    for i, prompt in enumerate(prompts):
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        check(not wrong, f"tokens of prompt {i}", wrong, f"outside the target's vocabulary of {vocab_size}")
        check(0 < len(prompt) <= most - max_new_tokens, f"length of prompt {i}", len(prompt),
              f"empty, or with {max_new_tokens} new tokens more than max_position_embeddings = {most}")


# ---- what the command lines share --------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """What is wrong with a command line is one line, see `run_command`."""

    def error(self, message):
        raise UserError(message)


def number(kind, least, most=math.inf):
    """An argparse type: an int or a float from least to most."""
    def convert(text):
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is out of range, which is {least:g} to {most:g}")
        return kind(text)
    convert.__name__ = kind.__name__                                             # argparse names it
    return convert


COUNT = number(int, 1)


def parse_options(pairs):
    """["enable_thinking=false", ...] -> {"enable_thinking": False, ...}: JSON where it is JSON, else text."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        check(key.isidentifier() and equals, "--chat-options", pair, "give KEY=VALUE")
        options[key] = value
        with suppress(ValueError):
            options[key] = json.loads(value)
    return options


def choose_sampling(path, temperatures, top_k=None, top_p=None):
    """{"top_k", "top_p"} for `Sampling`: the flags, None where not given (0 and 1: no cut), then what the
    target recommends in its generation_config.json where that cuts something, of which one line is printed.
    """
    flags, file = {"top_k": top_k, "top_p": top_p}, Path(path) / "generation_config.json"
    raw = read_optional(file) if max(temperatures) > 0 else {}
    with reading(file):
        cuts = {"top_k": (raw.get("top_k") or 0) > 0, "top_p": (raw.get("top_p") or 1) < 1}
    wanted = [name for name in flags if flags[name] is None and raw.get("do_sample") is not False]
    taken = {name: raw[name] for name in wanted if cuts[name]}
    if taken:
        say_once(f"sampling as generation_config.json recommends: {taken}")
    return {**flags, "top_k": top_k or None, **taken}


@functools.cache
def say_once(line):
    print(line, file=sys.stderr)


def table(rows):
    """Report rows (dictionaries of the same keys) as text; the histograms are left out."""
    form = lambda value: "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    rows = [{key: form(value) for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def median(values):
    return statistics.median(values) if values else None


def distinct4(rows):
    """Share of distinct 4-grams within each row, over all rows: 1 where nothing repeats, near 0 where text
    runs in a loop."""
    grams = [[tuple(row[i:i + 4]) for i in range(len(row) - 3)] for row in rows]
    total = sum(map(len, grams))
    return sum(len(set(row)) for row in grams) / total if total else 1.0


def bars(counts):
    """{n: count} as a bar chart in text."""
    shares = {n: count / sum(counts.values()) for n, count in counts.items()}
    return "\n".join(f"  {n:3d} {'█' * round(60 * share)} {share:.1%}" for n, share in shares.items())


def find_device(name=None):
    """The torch.device of that name; None: CUDA where there is one."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there = ["cuda", *cuda, "cpu"] if cuda else ["cpu"]
    check(name in (None, *there), "--device", name, f"not found here; there is {', '.join(there)}")
    return torch.device(name or there[0])


def whether_to_compile(compile, device):
    """The flag; where it is None: on CUDA. UserError where torch.compile lacks a C++ compiler."""
    cuda = device.type == "cuda"
    check(cuda or not compile or has_compiler(), "compile", compile,
          "no C++ compiler found, which it needs on the CPU: install one, or leave it out")
    return cuda if compile is None else compile


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = regex.search("model name.*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"


def run_command(main):
    """Runs a command line: what the user can put right is one line and exit status 2."""
    try:
        sys.stdout.reconfigure(errors="replace")     # a terminal that lacks a character shows a question mark
        main()
        sys.stdout.flush()
    except BrokenPipeError:                           # the reader, say `head`, has left: no more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
