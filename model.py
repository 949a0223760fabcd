"""The target: a Qwen3/Llama-style Transformer, its KV cache, its weights on disk, and (below) the tokenizer.

Parameters are named as in Hugging Face checkpoints, so a checkpoint is read by name alone:
    model.embed_tokens, model.layers.N.{input_layernorm, self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm, ...}, model.norm, lm_head
What DFlash needs beyond an ordinary decoder are the taps: `forward` also returns the residual stream after chosen layers.

Shapes: B rows, Q new tokens a row, C = hidden_size, H heads and K key-value heads of D = head_dim, V = vocab_size.
"""
import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kernels import attention, causal, make_mask

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
    write_whole(path, lambda name: Path(name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def read_json(path):
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this the folder of a checkpoint?") from None
    except ValueError:
        raise UserError(f"{path}: not valid JSON; the file is damaged, copy or train it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; the file is damaged, copy or train it again")
    return value


def load_weights(module, path):
    """Fills the module's parameters in place, a tensor at a time, from path/*.safetensors (one file, or shards with an index)."""
    index = Path(path) / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
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


def save_weights(module, path):
    state = {name: parameter.detach().contiguous() for name, parameter in module.named_parameters()}  # tied ones once
    write_whole(Path(path) / "model.safetensors", lambda name: save_file(state, name, metadata={"format": "pt"}))


def stored_dtype(path):
    """The dtype of the first tensor on disk, for dtype=None."""
    file = next(iter(sorted(Path(path).glob("*.safetensors"))), None)
    if file is None:
        raise UserError(f"{path}: no *.safetensors here; a checkpoint is a folder with config.json and *.safetensors")
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(next(iter(tensors.keys()))).dtype
    except (SafetensorError, OSError, StopIteration) as error:
        raise UserError(f"{file}: damaged or truncated ({error}); copy or train it again") from None


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
        raw["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **{k: v for k, v in rope.items() if k != "type"}}
        for field, allowed in {"hidden_act": ("silu",), "mlp_bias": (False,), "use_sliding_window": (False,), "partial_rotary_factor": (1.0,),
                               "num_experts": (0,), "quantization_config": (), "pretraining_tp": (1,)}.items():
            if raw.get(field) is not None and raw[field] not in allowed:
                raise UserError(f"{where}: {field} = {raw[field]!r} is not supported")
        if any(layer != "full_attention" for layer in raw.get("layer_types") or ()):
            raise UserError(f"{where}: layer_types {sorted(set(raw['layer_types']))} are not supported (full_attention is)")
        raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
        if not raw.get("head_dim") and raw.get("num_attention_heads"):
            raw["head_dim"] = raw.get("hidden_size", 0) // raw["num_attention_heads"]
        raw.setdefault("tie_word_embeddings", False)                                   # Hugging Face's own default for these three
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if not isinstance(raw.get(field), int) or raw[field] < 1:
                raise UserError(f"{where}: {field} = {raw.get(field)!r} is not a positive number")
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
        self.frequency, self.factor = rope_frequencies(config)

    def __call__(self, positions, dtype):
        """positions (B, N) -> cos, sin (B, N, 1, D); sin carries rotate_half's sign, see `rotate`."""
        if self.frequency.device != positions.device:
            self.frequency = self.frequency.to(positions.device)
        angle = positions[..., None].float() * self.frequency
        cos, sin = angle.cos() * self.factor, angle.sin() * self.factor
        return (torch.cat((cos, cos), -1)[:, :, None].to(dtype), torch.cat((-sin, sin), -1)[:, :, None].to(dtype))


def rotate(x, cos, sin):
    """x: (B, N, heads, D). Hugging Face's x * cos + rotate_half(x) * sin: rolling by D/2 and a signed sin are that in fewer passes."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# ---- the Transformer ---------------------------------------------------------------------------------------------------------

class KVCache:
    """Preallocated keys and values: (layers, B, length, K, D) each. A rollback moves a length that the caller holds, it copies nothing:
    what lies at or past a row's length is never seen (see the masks in kernels.py) and is written over by the next pass."""

    def __init__(self, config, batch, length, device, dtype):
        shape = (config.num_hidden_layers, batch * length, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.batch, self.length = batch, length
        self.first_slot = torch.arange(batch, device=device)[:, None] * length

    def at(self, positions, end):
        """Says where the next pass writes, positions (B, N), and how far it looks, end: at least every row's length after it."""
        self.slots, self.end = (self.first_slot + positions).view(-1), end

    def update(self, layer, k, v):
        """Writes k, v (B, N, K, D) of a layer at the slots; returns that layer's keys and values, (B, end, K, D) each."""
        seen = []
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            cache.index_copy_(0, self.slots, new.flatten(0, 1))
            seen.append(cache.view(self.batch, self.length, *cache.shape[1:])[:, :self.end])
        return seen


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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

    def forward(self, x, rope, mask, cache=None, context=None):
        B, Q, _ = x.shape
        cos, sin = rope                                                          # at the positions of [context, x]
        source = x if context is None else torch.cat((context, x), 1)            # (B, N, C), N = Q or context + Q
        q = self.q_norm(self.q_proj(x).view(B, Q, -1, self.head_dim))            # (B, Q, H, D)
        k = self.k_norm(self.k_proj(source).view(B, cos.shape[1], -1, self.head_dim))   # (B, N, K, D)
        v = self.v_proj(source).view(B, cos.shape[1], -1, self.head_dim)
        q, k = rotate(q, cos[:, -Q:], sin[:, -Q:]), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)                                # (B, end, K, D)
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).reshape(B, Q, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
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
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
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

    def forward(self, ids, start=None, cache=None, taps=(), end=None):
        """One causal pass over new tokens.

        ids:    (B, Q) token ids at positions start[b] .. start[b] + Q - 1
        start:  (B,) int64, how many cached tokens of each row are valid; None: 0
        cache:  KVCache to read and to extend; None: the tokens see only each other
        taps:   layer indices i (0-based): the residual stream AFTER layer i, Hugging Face's hidden_states[i + 1]
        end:    with a cache, the number of its slots to look at (default: all): at least max(start) + Q
        Returns (hidden, features): (B, Q, C) after the final norm, for `logits`; (B, Q, len(taps) * C), or None without taps.
        """
        B, Q = ids.shape
        if start is None:
            start = torch.zeros(B, dtype=torch.int64, device=ids.device)
        positions = start[:, None] + torch.arange(Q, device=ids.device)          # (B, Q)
        x = self.model.embed_tokens(ids)                                         # (B, Q, C)
        rope = self.rope(positions, x.dtype)
        if cache is not None:
            end = cache.length if end is None else end
            cache.at(positions, end)
        if B == 1 and Q == 1 and end != getattr(cache, "length", None):          # one token, and a cache cut to its length: it sees all
            mask = None
        else:
            mask = make_mask(causal(start), B, Q, end or Q, ids.device, x.dtype)
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
        Path(path).mkdir(parents=True, exist_ok=True)
        save_weights(self, path)
        name = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        write_json(Path(path) / "config.json", {**self.config.to_dict(), "dtype": name, "torch_dtype": name})  # new key, old key


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
