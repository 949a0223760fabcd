"""The target: a Qwen3/Llama-style Transformer, its KV cache, its weights on disk, and (below) the tokenizer.

Parameters are named as in Hugging Face checkpoints, so a checkpoint is read by name alone:
    model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm, ...}, model.norm, lm_head
What DFlash needs beyond an ordinary decoder are the taps: `forward` also returns the residual stream after chosen layers.

Shapes: B rows, Q new tokens a row, C = hidden_size, H heads and K key-value heads of D = head_dim, V = vocab_size.
"""
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from unicodedata import normalize

import numpy as np
import regex
import tiktoken
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kernels import attention, causal, make_mask, tree as tree_mask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UserError(Exception):
    """Something the user can put right: the command lines print it as one line and exit with status 2."""


# ---- files: whole or not at all, never a pickle -----------------------------------------------------------------------------

def write_whole(path, write):
    """Calls write(temporary path beside `path`), then renames: a reader, or a crash, never sees half a file."""
    temporary = f"{path}.tmp"
    write(temporary)
    os.replace(temporary, path)


def write_json(path, value):
    write_whole(path, lambda name: Path(name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"))


def read_json(path):
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this the folder of a checkpoint?") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; the file is damaged, copy or train it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; the file is damaged, copy or train it again")
    return value


def load_weights(module, path):
    """Fills the module's parameters in place, a tensor at a time, from path/*.safetensors (one file, or shards with an index)."""
    index = Path(path) / "model.safetensors.index.json"
    names = sorted(set(read_json(index).get("weight_map", {}).values())) if index.exists() else ["model.safetensors"]
    missing = dict(module.named_parameters())
    for name in names:
        file = Path(path) / name
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    if key not in missing:
                        if key == "lm_head.weight" or "rotary_emb" in key:  # tied heads, and tables that we compute, are at times stored too
                            continue
                        raise UserError(f"{file}: parameter {key} has no place in this model; is config.json the one of these weights?")
                    shape, parameter = tuple(tensors.get_slice(key).get_shape()), missing.pop(key)
                    if shape != tuple(parameter.shape):
                        raise UserError(f"{file}: {key} has shape {shape} where config.json asks for {tuple(parameter.shape)}")
                    with torch.no_grad():
                        parameter.copy_(tensors.get_tensor(key))
        except FileNotFoundError:
            raise UserError(f"{file}: no such file; a checkpoint is a folder with config.json and *.safetensors") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged or truncated ({error}); copy or train it again") from None
    if missing:
        raise UserError(f"{path}: parameter {min(missing)} is missing; copy the checkpoint again")


def save_model(module, path, config):
    """Writes path/model.safetensors and path/config.json: config, and the dtype under its new and its old key."""
    Path(path).mkdir(parents=True, exist_ok=True)
    state = {name: parameter.detach().contiguous() for name, parameter in module.named_parameters()}  # tied ones once
    write_whole(Path(path) / "model.safetensors", lambda name: save_file(state, name, metadata={"format": "pt"}))
    dtype = next(name for name, dtype in DTYPES.items() if dtype == module.dtype)
    write_json(Path(path) / "config.json", {**config, "dtype": dtype, "torch_dtype": dtype})


def stored_dtype(path):
    """The dtype of the first tensor on disk, for dtype=None."""
    file = next(iter(sorted(Path(path).glob("*.safetensors"))), None)
    if file is None:
        raise UserError(f"{path}: no *.safetensors here; a checkpoint is a folder with config.json and *.safetensors")
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = tensors.get_slice(next(iter(tensors.keys()))).get_dtype()
    except (SafetensorError, OSError, StopIteration) as error:
        raise UserError(f"{file}: damaged or truncated ({error}); copy or train it again") from None
    if stored not in ("F32", "BF16", "F16"):
        raise UserError(f"{file}: dtype {stored} is not supported (float32, bfloat16 and float16 are)")
    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[stored]


# ---- config ----------------------------------------------------------------------------------------------------------------

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
    def from_dict(cls, raw, where="config.json"):
        """From a config.json's content. What it asks for and we don't have raises UserError with the field and its value."""
        raw = dict(raw)
        for field, kind in {"rope_parameters": dict, "rope_scaling": dict, "layer_types": list, "rope_theta": (int, float), "rms_norm_eps": (int, float),
                            "head_dim": int, "max_position_embeddings": int, "num_key_value_heads": int}.items():
            value = raw.get(field)
            if value is not None and (not isinstance(value, kind) or isinstance(value, (int, float)) and (isinstance(value, bool) or not value > 0)):
                raise UserError(f"{where}: {field} = {value!r} is no valid value")
        if raw.get("model_type") not in ("qwen3", "llama", "qwen2"):
            raise UserError(f"{where}: model_type {raw.get('model_type')!r} is not supported (qwen3, llama and qwen2 are)")
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})       # transformers 5, and before
        raw.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"      # new key, old key
        if kind not in ("default", "llama3", "yarn"):
            raise UserError(f"{where}: rope_scaling of type {kind!r} is not supported (llama3 and yarn are)")
        unknown = rope.keys() & {"mscale", "mscale_all_dim", "partial_rotary_factor", "long_factor", "short_factor"}
        if unknown:
            raise UserError(f"{where}: rope_scaling field {min(unknown)} = {rope[min(unknown)]!r} is not supported")
        needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}.get(kind, ())
        if not all(isinstance(rope.get(field), (int, float)) and rope[field] > 0 for field in needed):
            raise UserError(f"{where}: rope_scaling of type {kind} lacks one of {', '.join(needed)}")
        raw["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **{k: v for k, v in rope.items() if k not in ("type", "rope_theta")}}
        for field, allowed in {"hidden_act": ("silu",), "mlp_bias": (False,), "use_sliding_window": (False,), "partial_rotary_factor": (1.0,),
                               "num_experts": (0,), "quantization_config": (), "pretraining_tp": (1,)}.items():
            if raw.get(field) is not None and raw[field] not in allowed:
                raise UserError(f"{where}: {field} = {raw[field]!r} is not supported")
        if any(layer != "full_attention" for layer in raw.get("layer_types") or ()):
            raise UserError(f"{where}: layer_types {raw['layer_types']} are not supported (full_attention is)")
        if raw.get("num_key_value_heads") is None:
            raw["num_key_value_heads"] = raw.get("num_attention_heads")
        raw.setdefault("tie_word_embeddings", False)                                   # Hugging Face's own default for these three
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if not isinstance(raw.get(field), int) or isinstance(raw[field], bool) or not 1 <= raw[field] < 2**24:
                raise UserError(f"{where}: {field} = {raw.get(field)!r} is not a positive number")
        if not raw.get("head_dim"):                                                    # absent: Hugging Face's defaults
            raw["head_dim"] = 128 if raw["model_type"] == "qwen3" else raw["hidden_size"] // raw["num_attention_heads"]
        if raw["num_attention_heads"] % raw["num_key_value_heads"]:
            raise UserError(f"{where}: num_attention_heads = {raw['num_attention_heads']} is no multiple of num_key_value_heads = {raw['num_key_value_heads']}")
        raw = {field: value for field, value in raw.items() if value is not None}
        return cls(**{field.name: raw[field.name] for field in fields(cls) if field.name in raw})

    def to_dict(self):
        """For a config.json that old and new transformers, vLLM and SGLang read."""
        raw = {field.name: getattr(self, field.name) for field in fields(self)}
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or {"rope_type": "default"})}
        return {**raw, "architectures": [f"{self.model_type.capitalize()}ForCausalLM"], "hidden_act": "silu", "rope_parameters": rope,
                "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None}


# ---- RoPE ------------------------------------------------------------------------------------------------------------------

def rope_frequencies(config):
    """Inverse frequencies (D/2,) in radians a position, and the factor on cos and sin, for plain, llama3 and yarn RoPE."""
    D, scaling = config.head_dim, config.rope_scaling or {}
    frequency = config.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D)
    if scaling.get("rope_type") == "llama3":          # long wavelengths are slowed, short ones stay, between them it blends
        factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return frequency * (keep + (1 - keep) / factor), 1.0
    if scaling.get("rope_type") == "yarn":            # Peng et al. 2023, arXiv:2309.00071, section 3.2
        length = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        factor = scaling.get("factor") or config.max_position_embeddings / length

        def dimension(rotations):                     # the dimension that turns this often over the original length
            return D * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        stretch = ((torch.arange(D // 2, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
        attention_factor = scaling.get("attention_factor")
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return frequency * (1 - stretch) + frequency / factor * stretch, attention_factor
    return frequency, 1.0


class Rope:
    """cos and sin of the rotary angles, at any positions."""

    def __init__(self, config):
        frequency, self.factor = rope_frequencies(config)
        self.frequency = torch.cat((-frequency, frequency))      # gives sin rotate_half's sign, see `apply_rotary_emb`; cos is even

    def __call__(self, positions, dtype):
        """positions (B, N) -> cos, sin (B, N, 1, D)"""
        if self.frequency.device != positions.device:
            self.frequency = self.frequency.to(positions.device)
        angle = positions[:, :, None, None] * self.frequency
        return [(x if self.factor == 1 else x * self.factor).to(dtype) for x in (angle.cos(), angle.sin())]


def apply_rotary_emb(x, cos, sin):
    """x: (B, N, heads, D). x * cos + rotate_half(x) * sin; rolling by D/2 is rotate_half but for the sign, which sin has."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# ---- the Transformer ---------------------------------------------------------------------------------------------------------

class KVCache:
    """Preallocated keys and values of all layers. A rollback moves a length that the caller holds, it copies nothing: slots at or past
    a row's length are never seen (see the masks in kernels.py), and the next pass writes over them.

    kv_len: how many slots a pass looks at, from the first one on; at least one past every slot that it writes.
    """

    def __init__(self, config, batch, length, device, dtype):
        L, K, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.data = torch.zeros(2 * L, batch * K * length, D, device=device, dtype=dtype)    # keys and values of layer 0, of layer 1, ...
        self.layers = [(self.data[i], self.data[i].view(batch, K, length, D)) for i in range(2 * L)]    # the same memory, to write and to read
        self.first = torch.arange(batch * K, device=device).view(batch, K, 1) * length
        self.kv_len = length

    def places(self, slots):
        """slots (B, N) -> their places in `data`, of all heads (B * K * N,)"""
        return (self.first + slots[:, None]).flatten()

    def write_at(self, slots):
        """The next pass writes its N tokens at slots (B, N)."""
        self.writing = self.places(slots)

    def update(self, layer, k, v):
        """Writes k, v (B, N, K, D) of a layer; returns that layer's keys and values, (B, K, kv_len, D) each."""
        seen = []
        for (flat, rows), new in zip(self.layers[2 * layer:2 * layer + 2], (k, v)):
            flat.index_copy_(0, self.writing, new.transpose(1, 2).reshape(-1, new.shape[-1]))
            seen.append(rows[:, :, :self.kv_len])
        return seen

    def move(self, source, destination):
        """Copies slots source (B, N) to destination (B, N), in all layers."""
        self.data.index_copy_(1, self.places(destination), self.data.index_select(1, self.places(source)))


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps
        self.epsilon = torch.tensor(eps, device="cpu")

    def forward(self, x):
        if x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled():     # 5% of a token against F.rms_norm
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x * torch.addcmul(self.epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention. The target uses it as plain self-attention; the drafter hands it a `context` of fused target features
    that joins the keys and values only: DFlash's KV injection."""

    def __init__(self, config, layer):
        super().__init__()
        C, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
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
        """x (B, Q, C), source (B, N, C) -> q (B, Q, H, D), k and v (B, N, K, D), q and k normed and turned to their positions."""
        cos, sin = rope                                                          # at the positions of source, whose last ones are x's
        first = source.shape[1] - x.shape[1]
        q, k, v = (proj(h).unflatten(-1, (-1, self.head_dim))
                   for proj, h in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source)))
        q = apply_rotary_emb(self.q_norm(q), cos[:, first:], sin[:, first:])
        k = apply_rotary_emb(self.k_norm(k), cos, sin)
        return q.to(v.dtype), k.to(v.dtype), v                                   # under autocast norms and angles are float32

    def forward(self, x, rope, mask, cache=None, context=None):
        source = x if context is None else torch.cat((context, x), 1)            # (B, N, C), N = Q or context + Q
        q, k, v = self.project(x, source, rope)
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None else cache.update(self.layer, k, v)
        out = attention(q.transpose(1, 2), k, v, mask)                           # (B, H, Q, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate) * up)


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

    @property
    def device(self):
        return self.model.norm.weight.device

    @property
    def dtype(self):
        return self.model.norm.weight.dtype

    def logits(self, hidden):
        """The LM head, the target's and the drafter's: (..., C) -> (..., V)."""
        return F.linear(hidden, self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight)

    def init_weights(self, generator):
        """Normal with deviation 1/sqrt(fan-in); the projections that write to the residual stream start at zero, so that every layer
        begins as the identity (as in muP and modded-nanogpt); embeddings 0.02, since the head is often tied to them."""
        init_weights(self, generator)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02, generator=generator)

    def forward(self, ids, positions=None, cache=None, taps=(), tree=None):
        """One causal pass over new tokens.

        ids:       (B, Q) token ids
        positions: (B, Q) int64, their places in the text; None: 0 .. Q - 1
        cache:     KVCache to extend, in which a token's slot is its position, and to read; None: the tokens see only each other
        taps:      layer indices i (0-based): the residual stream AFTER layer i, Hugging Face's hidden_states[i + 1]
        tree:      (start (B,), ancestors (B, Q, Q) bool): the tokens are a tree of drafts, in slots start, start + 1, ... of the cache,
                   and see as `kernels.tree` says
        Returns (hidden, features): (B, Q, C) after the final norm, for `logits`; (B, Q, len(taps) * C), or None without taps.
        """
        B, Q = ids.shape
        order = torch.arange(Q, device=ids.device)
        positions = order.expand(B, Q) if positions is None else positions
        x = self.model.embed_tokens(ids)                                         # (B, Q, C)
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
        features = torch.cat([tapped[i] for i in taps], -1) if len(taps) else None
        return self.model.norm(x), features

    @classmethod
    def from_pretrained(cls, path, *, device="cpu", dtype=None):
        """Opens a Hugging Face directory: config.json and *.safetensors. dtype None keeps the files' own. UserError says what is wrong."""
        config = ModelConfig.from_dict(read_json(Path(path) / "config.json"), Path(path) / "config.json")
        model = empty(lambda: cls(config), device, dtype or stored_dtype(path))
        load_weights(model, path)
        return model.eval()

    def save_pretrained(self, path):
        """Writes a directory that transformers' AutoModelForCausalLM opens as is."""
        save_model(self, path, self.config.to_dict())


def init_weights(module, generator):
    """Linear layers: normal, deviation 1/sqrt(fan-in), zero where they write to the residual stream; norms: one."""
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.ones_(parameter)


def empty(build, device, dtype):
    """Builds a module with uninitialized weights: no time and no memory goes into weights that are to be loaded over."""
    with torch.device("meta"):
        module = build()
    return module.to(dtype).to_empty(device=device)


# ---- from logits to a token ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from softmax(logits / temperature) after top-k, then top-p; temperature 0 takes the likeliest."""
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        for name, good in (("temperature", 0 <= self.temperature < math.inf), ("top_k", self.top_k is None or self.top_k >= 1),
                           ("top_p", self.top_p is None or 0 < self.top_p <= 1)):
            if not good:
                raise UserError(f"{name} = {getattr(self, name)} is out of range")

    def draw(self, logits, noise):
        """logits (..., V), noise (..., V) from `exponential_noise`, None at temperature 0 -> token ids (...). Of independent clocks that
        ring at rates p the first to ring is token x with probability p(x), and noise / p are such times. (In logarithms: the largest of
        logits / temperature + Gumbel noise.)"""
        return (logits if self.temperature == 0 else self.probabilities(logits) / noise).argmax(-1)

    def guesses(self, logits, noise):
        """A drafter's logits -> probabilities (..., V) of what the target will draw with this noise. (At temperature 0 squared ones: greedy
        text is easier to guess than the sampled text that the drafter's probabilities are of.)"""
        if self.temperature == 0:
            return (2 * logits.float()).softmax(-1)
        early = self.probabilities(logits) / noise
        return early / early.sum(-1, keepdim=True)

    def probabilities(self, logits):
        """logits (..., V) -> probabilities (..., V) in float32 after temperature (> 0), then top-k, then top-p (the smallest set of
        likeliest tokens that reaches top_p)."""
        logits = logits.float() / max(self.temperature, 1e-6)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k, dim=-1).values[..., -1:], float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = probs.sort(-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= max(self.top_p, 1e-9), 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def scramble(x):
    """A bijection of the 32-bit integers whose output looks random (lowbias32, Chris Wellons 2018). Works in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x ^= (x >> shift).bitwise_and_((1 << 32 - shift) - 1)                    # a shift of a signed number copies its sign
        x *= factor
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def stream_keys(seed, rows):
    """(rows, 2) int32, each row's own stream of noise: of (seed, row) for an int seed, of the row's own seed for a list of them."""
    if seed is None:
        seed = int(np.random.SeedSequence().entropy % 2**63)
    if isinstance(seed, (int, np.integer)):
        seeds = [(seed, row) for row in range(rows)]
    elif len(seeds := list(seed)) != rows:
        raise UserError(f"{len(seeds)} seeds for {rows} prompts; give one seed, or one a prompt")
    return torch.from_numpy(np.stack([np.random.SeedSequence(s).generate_state(2, np.uint32) for s in seeds]).view(np.int32))


def exponential_noise(keys, index, vocab_size):
    """The noise of each (stream, token index, token id): exponentially distributed, with mean 1, and a function of these three alone.

    keys: (B, 2) int32 from `stream_keys`; index: (B, n), of the tokens that are drawn. Returns (B, n, vocab_size) float32.
    """
    stream, more = keys[:, :1], keys[:, 1:]
    key = scramble(stream + index.int()) ^ more                                  # (B, n)
    token = scramble(torch.arange(vocab_size, dtype=torch.int32, device=keys.device))
    bits = scramble(key[:, :, None] ^ token)                                     # (B, n, V)
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(-2.0**-31)              # in (-1, 0), finest near 0: the winner's is there
    return uniform.clamp_(min=2.0**-24 - 1).log1p_().neg_()


# ---- the tokenizer: byte-level BPE, in tokenizer.json's format, run by tiktoken -------------------------------------------------------

# What the tokenizers library calls ByteLevel(use_regex=True): the GPT-2 splitting pattern.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Ours, for Python source: an identifier with its underscores is one word (with a space or sign
# before it), numbers go in threes, signs take the line end and the next line's indentation along.
CODE_PATTERN = (r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+(?:[\r\n]+[ \t]*)?"
                r"|[\r\n]+[ \t]*|\s+(?!\S)|\s+")
# tokenizer.json writes each byte of a token as one printable character: itself, or one from 256 up.
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHAR_BYTE = {chr(b): b for b in PLAIN}
CHAR_BYTE |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in PLAIN)}
BYTE_CHAR = {b: c for c, b in CHAR_BYTE.items()}


def check(ok, field, value, why="not supported"):
    if not ok:
        raise UserError(f"{field} = {json.dumps(value, ensure_ascii=False)[:200]}: {why}")


def split_patterns(pre):
    """tokenizer.json's pre_tokenizer -> patterns that cut a text into words, one after another."""
    steps = pre["pretokenizers"] if pre and "pretokenizers" in pre else [pre or {}]
    check(steps and steps[-1].get("type") == "ByteLevel", "pre_tokenizer", pre, "must end in ByteLevel")
    check(not steps[-1].get("add_prefix_space"), "pre_tokenizer add_prefix_space", True)
    patterns = []
    for p in steps[:-1]:
        check(p["type"] in ("Split", "Digits"), "pre_tokenizer type", p["type"])
        if p["type"] == "Digits":
            pattern, how = r"\p{N}" if p["individual_digits"] else r"\p{N}+", ["Isolated", False]
        else:
            pattern = p["pattern"].get("Regex") or regex.escape(p["pattern"]["String"])
            how = [p["behavior"], p["invert"]]
        check(how in (["Isolated", False], ["Removed", True]), "pre_tokenizer behavior, invert", how)
        # Empty matches would lose text; {n,m}+ is a nested repeat there but possessive here.
        bad = regex.match(pattern, "") or regex.search(r"(^|\|)\(\?[=!<]|\{\d*,?\d*\}\+", pattern)
        check(not bad, "pre_tokenizer pattern", pattern)
        # "Isolated" makes words of what lies between the matches too.
        patterns.append(rf"{pattern}|(?:(?!{pattern})(?s:.))+" if how[0] == "Isolated" else pattern)
    return patterns + ([GPT2_PATTERN] if steps[-1].get("use_regex", True) else []) or [r"(?s:.+)"]


class Tokenizer:
    """text <-> ids, the same ids as the `tokenizers` library gives for the same tokenizer.json.

    eos_id: int or None; eos_ids: all that end a text (chat models have several). bos_id: the id that the file's post_processor would put first, or None
    (encode never adds it). vocab_size: highest id + 1. special_ids: dict text -> id.
    """

    def __init__(self, data, config=None):
        """data: tokenizer.json as a dict; config: tokenizer_config.json. UserError if unsupported."""
        self.data, self.config, self.chat_template = data, dict(config or {}), None
        model, vocab, added = data["model"], data["model"]["vocab"], data.get("added_tokens") or []
        check(model.get("type", "BPE") == "BPE", "model.type", model.get("type"))
        for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            check(not model.get(field), f"model.{field}", model.get(field))
        norm, decoder = data.get("normalizer"), data.get("decoder")
        kinds = [n["type"] for n in norm.get("normalizers", [norm])] if norm else []
        check(set(kinds) <= {"NFC"}, "normalizer type", kinds)
        check(not decoder or decoder["type"] == "ByteLevel", "decoder", decoder)
        self.nfc = bool(kinds)

        # Added tokens with normalized=false are looked for in the raw text, the others after that
        # (and after NFC): two layers, each a pattern with the longest first and its dict text -> id.
        layers = {}, {}
        for t in added:
            for flag in ("lstrip", "rstrip", "single_word"):
                check(not t.get(flag), f"added_tokens {t['content']} {flag}", True)
            same = vocab.get(t["content"], t["id"]) == t["id"]
            check(same, f"added_tokens {t['content']} id", t["id"], "model.vocab has another id")
            late = bool(t.get("normalized"))
            layers[late][normalize("NFC", t["content"]) if late and self.nfc else t["content"]] = t["id"]
        longest_first = [sorted(filter(None, ids), key=len, reverse=True) for ids in layers]
        self.layers = [(regex.compile("|".join(map(regex.escape, names)) or "(?!)"), ids)  # (?!): never
                       for names, ids in zip(longest_first, layers)]
        self.special_ids = {t["content"]: t["id"] for t in added if t.get("special")}
        self._special = set(self.special_ids.values())

        self._build(model, {t["content"] for t in added})
        ids = vocab | {t["content"]: t["id"] for t in added}
        self._bytes = {i: bytes(map(CHAR_BYTE.get, t)) if CHAR_BYTE.keys() >= set(t) else t.encode()
                       for t, i in vocab.items()} | {t["id"]: t["content"].encode() for t in added}
        self.vocab_size = max(self._bytes) + 1
        eos = self.config.get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
        check(eos is None or eos in ids, "tokenizer_config.json eos_token", eos, "not in the vocabulary")
        self.eos_id, self.bos_id = ids.get(eos), None
        self.eos_ids = {self.eos_id} - {None}
        post = data.get("post_processor") or {}
        for p in post.get("processors", [post]):
            if p.get("type") == "TemplateProcessing" and "SpecialToken" in p["single"][0]:
                self.bos_id = p["special_tokens"][p["single"][0]["SpecialToken"]["id"]]["ids"][0]

    def _build(self, model, added):
        """Make the tiktoken encoding out of model.vocab, model.merges and the pre_tokenizer."""
        vocab, made = model["vocab"], {}
        missing = [c for c in CHAR_BYTE if c not in vocab]
        check(not missing, "model.vocab", missing, "no tokens for these bytes")
        for m in model["merges"]:
            pair = m.split(" ") if isinstance(m, str) else m
            ok = len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys()
            check(ok, "model.merges", m, "not two tokens of model.vocab that make a third")
            made["".join(pair)] = None
        order = [*CHAR_BYTE, *made]
        if model.get("ignore_merges"):  # a whole word that is a token counts, made by merges or not
            for t in vocab.keys() - made.keys() - CHAR_BYTE.keys() - added:
                merges = any(t[:i] in vocab and t[i:] in vocab for i in range(1, len(t)))
                check(not merges, "model.vocab", t, "model.merges does not make it, but tiktoken would")
                order += [t] if CHAR_BYTE.keys() >= set(t) else []
        # To tiktoken the id is the merge order too. Where they differ, it gets places in `order`.
        ids = [vocab[t] for t in order]
        self._ids = None if ids[256:] == sorted(ids[256:]) else ids
        ranks = {bytes(map(CHAR_BYTE.get, t)): i if self._ids else vocab[t] for i, t in enumerate(order)}
        patterns = split_patterns(self.data.get("pre_tokenizer"))
        self._patterns = [regex.compile(p) for p in patterns]
        self.encoding = tiktoken.Encoding("bpe", pat_str=patterns[-1], mergeable_ranks=ranks, special_tokens={})

    @classmethod
    def from_pretrained(cls, path):
        """Read path/tokenizer.json, and the end-of-text token from the *config.json files beside it.

        UserError if there is no tokenizer.json, or it is broken or unsupported.
        """
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
        found = {name: read_json(Path(path) / name) for name in names if name == names[0] or (Path(path) / name).exists()}
        try:
            self = cls(found[names[0]], found.get(names[1]))
        except (KeyError, TypeError, AttributeError, IndexError, regex.error) as error:
            raise UserError(f"{path}/tokenizer.json: broken, or not of a byte-level BPE ({error!r})") from None
        except UserError as error:
            raise UserError(f"{path}/tokenizer.json: {error}") from None
        template, file = self.config.get("chat_template"), Path(path) / "chat_template.jinja"
        if isinstance(template, list):                                           # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        self.chat_template = file.read_text(encoding="utf-8") if file.exists() else template
        for name in ("generation_config.json", "config.json"):
            eos = found.get(name, {}).get("eos_token_id")
            eos = eos if isinstance(eos, list) else [] if eos is None else [eos]   # chat models list several
            check(all(isinstance(i, int) for i in eos), f"{Path(path) / name}: eos_token_id", eos)
            self.eos_ids |= set(eos)
            self.eos_id = eos[0] if self.eos_id is None and eos else self.eos_id
        return self

    @classmethod
    def from_merges(cls, merges, specials=("<|endoftext|>", "<|mask|>"), pattern=CODE_PATTERN):
        """A new tokenizer: ids 0..255 are the bytes, then the merges in order, then the specials.

        merges: [(left bytes, right bytes), ...] as train_bpe gives; the first special is the eos.
        """
        pairs = [["".join(BYTE_CHAR[b] for b in part) for part in pair] for pair in merges]
        vocab = {t: i for i, t in enumerate([BYTE_CHAR[b] for b in range(256)] + [a + b for a, b in pairs])}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        data = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None,
                "added_tokens": [{"id": len(vocab) + i, "content": s, **flags} for i, s in enumerate(specials)],
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
                "post_processor": None, "decoder": byte_level,
                "model": {"type": "BPE", "byte_fallback": False, "vocab": vocab, "merges": pairs}}
        return cls(data, {"eos_token": specials[0]} if specials else {})

    def save_pretrained(self, path):
        """Write tokenizer.json and tokenizer_config.json; transformers.AutoTokenizer opens them."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self.config
        if config.get("eos_token") is None and self.eos_id in self._bytes:
            config["eos_token"] = self.decode([self.eos_id])
        Path(path).mkdir(parents=True, exist_ok=True)
        write_json(Path(path) / "tokenizer.json", self.data)
        write_json(Path(path) / "tokenizer_config.json", config)

    def render_chat(self, messages):
        """[{"role", "content"}, ...] -> the prompt's text up to where the assistant speaks, by the model's own template, in a sandbox."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message):
            raise jinja2.TemplateError(message)
        if self.chat_template is None:
            raise UserError("the target has no chat template (tokenizer_config.json or chat_template.jinja); give prompts as text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: time.strftime(form)}
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        named = {key: value["content"] if isinstance(value, dict) else value for key, value in self.config.items() if key in ("bos_token", "eos_token")}
        try:
            return environment.from_string(self.chat_template).render(messages=messages, add_generation_prompt=True, **named)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"the target's chat template refuses these messages: {' '.join(str(error).split())}") from None

    def encode(self, text, special=False):
        """str -> list of ids. Special tokens written in the text count as such only if special=True."""
        # Lone surrogates have no UTF-8: they become U+FFFD.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        out = []
        for raw, raw_id in self._find(0, text, special):
            for part, part_id in self._find(1, normalize("NFC", raw) if self.nfc else raw, special):
                out += self._ordinary(part) + part_id
            out += raw_id
        return out

    def _find(self, layer, text, special):
        """Cut text at its added tokens: yields (the text before one, [its id]), then (the rest, [])."""
        (finder, ids), start = self.layers[layer], 0
        for m in finder.finditer(text):
            if special or ids[m[0]] not in self._special:
                yield text[start:m.start()], [ids[m[0]]]
                start = m.end()
        yield text[start:], []

    def _ordinary(self, text):
        """Ids of a text without added tokens."""
        cut = lambda pattern, texts: [m[0] for t in texts for m in pattern.finditer(t)]
        parts, out = [text], []
        for pattern in self._patterns[:-1]:
            parts = cut(pattern, parts)
        for part in parts:
            try:  # not encode_ordinary: that panics (a BaseException) where encode raises ValueError
                out += self.encoding.encode(part, disallowed_special=())
            except ValueError:  # tiktoken's regex gives up on very long runs (a million spaces)
                for word in cut(self._patterns[-1], [part]):
                    out += self.encoding._encode_single_piece(word)
        return [self._ids[i] for i in out] if self._ids else out

    def decode_bytes(self, ids):
        """Ids -> bytes. An id without a token (a model's vocabulary may be padded) is nothing."""
        return b"".join([self._bytes.get(i, b"") for i in ids])

    def decode(self, ids):
        """Ids -> str; bytes that are not UTF-8 become U+FFFD, special tokens appear as their text."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


# ---- prompts from files, and what the command lines share ---------------------------------------------------------------------------

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


def check_prompts(config, prompts, max_new_tokens):
    """Refuses, before any work, prompts (rows of ids) that a model cannot go on with for so long."""
    if not len(prompts):
        raise UserError("no prompts; give at least one")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {max_new_tokens} is out of range")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} is empty; give at least one token")
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise UserError(f"prompt {i} holds a token id outside the target's vocabulary of {config.vocab_size}; "
                            "was it encoded by another tokenizer?")
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise UserError(f"prompt {i} has {len(prompt)} tokens, with {max_new_tokens} new ones more than the target's "
                            f"max_position_embeddings of {config.max_position_embeddings}; shorten it or ask for fewer")


def stop_tokens(target, tokenizer):
    eos = target.config.eos_token_id
    return {*(eos if isinstance(eos, list) else [eos]), *tokenizer.eos_ids} - {None}


def table(rows):
    """Report rows (dictionaries of the same keys) as text; the histograms are left out."""
    form = lambda value: "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    rows = [{key: form(value) for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def bars(counts):
    """{n: count} as bars."""
    shares = {n: count / sum(counts.values()) for n, count in counts.items()}
    return "\n".join(f"  {n:3d} {'█' * round(60 * share)} {share:.1%}" for n, share in shares.items())


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
