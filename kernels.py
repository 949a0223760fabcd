"""Attention, and who may see whom.

A mask is a small function `mask_mod(b, h, q_idx, kv_idx) -> bool` (FlexAttention's own form): may query q of
row b see key kv? Each is written once, and `make_mask` turns it into what its executor wants:

  many queries on CUDA (training, long prompts): a BlockMask for `torch.compile`d FlexAttention, which skips
  empty tiles of 128 x 128;
  few queries (decoding), and the CPU: a dense (B, 1, Q, KV) tensor for scaled_dot_product_attention, or for
  two plain matrix products where gradients are wanted on the CPU.

`attention` then runs either. Nothing here knows what a model, a token or a file is.
"""
import functools
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


# ---- the masks ---------------------------------------------------------------------------------------------

def causal(positions):
    """Query i of row b stands at positions[b, i] and sees every key up to there. positions: (B, Q) int64."""
    return lambda b, h, q_idx, kv_idx: kv_idx <= positions[b, q_idx]


def tree(start, ancestors):
    """Verification: the nodes of a tree of drafts lie in the cache from start[b] on, behind the context. A
    node sees the context, its ancestors and itself. start: (B,) int64; ancestors: (B, N, N) bool, [b, i, j]:
    is node j an ancestor of node i, or i itself?"""
    last = ancestors.shape[2] - 1

    def tree_mask(b, h, q_idx, kv_idx):
        node = kv_idx - start[b]
        return (node < 0) | ((node <= last) & ancestors[b, q_idx, node.clamp(0, last)])
    return tree_mask


def context_and_block(limit):
    """Drafting: query i of row b sees every key below limit[b, i]. All queries of a block have the same
    limit: the cached context and the whole block, both ways. (With injection "input" the context's positions
    are queries too, and each sees up to itself.) limit: (B, Q) int64."""
    return lambda b, h, q_idx, kv_idx: kv_idx < limit[b, q_idx]


def dflash_training(anchors, context_length, block_size, context_queries=0):
    """Training: many blocks of one sequence in one pass (paper, section 4.2).

    Keys are [context features 0..context_length-1 | block 0 | block 1 | ...], queries are [block 0 | block 1
    | ...], and block n starts at position anchors[b, n]. A query sees the context BEFORE its anchor, and its
    own block. What decides is the anchor's position, never the block's number: blocks overlap, and an earlier
    block may reach past a later anchor. anchors: (B, N) int64, below context_length.

    context_queries: with injection "input" the positions of the context are queries too, in front of the
    blocks', and each sees up to itself.
    """
    def dflash_training_mask(b, h, q_idx, kv_idx):
        block = (q_idx - context_queries) // block_size                # below 0: a query of the context's own
        limit = torch.where(block < 0, q_idx + 1, anchors[b, block.clamp(min=0)])
        own_block = (kv_idx >= context_length) & ((kv_idx - context_length) // block_size == block)
        return (kv_idx < limit) | own_block
    return dflash_training_mask


def chains(start, context_length):
    """EAGLE-3's training: chain n drafts behind position start[b, n], one token per step. Keys are [context
    0..context_length-1 | step 1 of chains 0, 1, ... | step 2 of chains 0, 1, ... | ...]. A chain sees the
    context up to its start, and itself. start: (B, N) int64."""
    def chains_mask(b, h, q_idx, kv_idx):
        own = (kv_idx - context_length) % start.shape[1] == q_idx
        return torch.where(kv_idx < context_length, kv_idx <= start[b, q_idx], own)
    return chains_mask


# ---- the two executors -------------------------------------------------------------------------------------

# A BlockMask's tile: with fewer queries there is nothing to skip, and a dense mask needs no compilation
FLEX_QUERIES = 128


def make_mask(mask_mod, B, Q, KV, device, dtype=torch.float32):
    """What `attention` takes as its mask, built once a forward pass and shared by all its layers and
    heads."""
    if torch.device(device).type == "cuda" and Q >= FLEX_QUERIES:
        return compiled(create_block_mask)(mask_mod, B, None, Q, KV, device=device)
    return dense(mask_mod, B, Q, KV, device, dtype)


def dense(mask_mod, B, Q, KV, device, dtype=torch.float32):
    """The predicate as an additive mask: (B, 1, Q, KV), 0 where visible and -inf where not. (Predicates are
    elementwise, so plain broadcasting evaluates them; `create_mask` goes through vmap and costs as much as a
    whole small layer.)"""
    b, q, kv = (torch.arange(n, device=device) for n in (B, Q, KV))
    visible = mask_mod(b.view(-1, 1, 1, 1), None, q.view(-1, 1), kv)              # the same for all heads
    return torch.zeros((), dtype=dtype, device=device).where(visible, float("-inf")).expand(B, 1, Q, KV)


def attention(q, k, v, mask):
    """softmax(q k^T / sqrt(D)) v. q: (B, H, Q, D); k, v: (B, K, KV, D), each key-value head serving H / K
    query heads.

    mask: from `make_mask`. Returns (B, H, Q, D).
    """
    if isinstance(mask, BlockMask):
        # A compiled layer takes FlexAttention into its own graph.
        run = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        return run(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if torch.is_grad_enabled() and q.device.type == "cpu":
        return plain_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def plain_attention(q, k, v, mask):
    """The same as two matrix products. On the CPU their backward is faster than SDPA's for short
    sequences."""
    B, H, Q, D = q.shape
    K, KV = k.shape[1:3]
    # A group's heads share their keys
    scores = (q.reshape(B, K, -1, D) @ k.transpose(2, 3)).view(B, H, Q, KV) * D ** -0.5
    weights = (scores + mask).float().softmax(-1).to(v.dtype)
    return (weights.view(B, K, -1, KV) @ v).view(B, H, Q, D)


# ---- compiling ---------------------------------------------------------------------------------------------

def has_compiler():
    """Is there the C++ compiler that torch.compile needs on the CPU?"""
    from torch._inductor.cpp_builder import get_cpp_compiler
    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


def allow_recompiling():
    """What is compiled here meets many masks and shapes, each compiled once: more than the eight after which
    PyTorch gives up."""
    torch._dynamo.config.recompile_limit = 64


@functools.cache
def compiled(function):
    """torch.compile on first use: importing the compiler takes as long as importing PyTorch, and plain
    decoding on the CPU needs none."""
    allow_recompiling()
    return torch.compile(function)


@functools.cache
def compiled_step(function):
    """For the CPU: shapes never change, and between operators (cpp_wrapper) no Python runs."""
    allow_recompiling()
    return torch.compile(function, dynamic=False, options={"cpp_wrapper": True})


def as_one(method, *args):
    """Turns a method into one launch instead of hundreds of operators; its object's tensors must keep place
    and shape. On CUDA a graph, which writes its result to the same tensors each time, on the CPU compiled
    code."""
    if method.__self__.device.type == "cpu":
        return functools.partial(compiled_step(method.__func__), method.__self__, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = method(*args)

    def replay():
        graph.replay()
        return result
    return replay


class Stopwatch:
    """Milliseconds between marks; on CUDA from events on the stream, so that measuring makes nobody wait."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self):
        self.marks.append(torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter())
        if self.cuda:
            self.marks[-1].record()

    def times(self, i):
        """Cycle i's milliseconds for drafting and for verifying: it has marked its beginning, the end of the
        draft, and its end."""
        began, drafted, ended = self.marks[3 * i:3 * i + 3]
        if self.cuda:
            ended.synchronize()
            return began.elapsed_time(drafted), drafted.elapsed_time(ended)
        return 1e3 * (drafted - began), 1e3 * (ended - drafted)


# ---- python kernels.py: who sees whom ----------------------------------------------------------------------

def draw(title, mask_mod, rows, columns):
    """Prints a mask: a line a query, a column a key; rows, columns: {name: how many} of each kind."""
    seen = dense(mask_mod, 1, sum(rows.values()), sum(columns.values()), "cpu")[0, 0] == 0
    print(f"\n{title}\n\n{'':12}" + " ".join(f"{name:{2 * n - 1}}" for name, n in columns.items()))
    for name, part in zip(rows, seen.split([*rows.values()])):
        for line in part:
            cells = [" ".join(".█"[see] for see in group) for group in line.int().split([*columns.values()])]
            print(f"{name:12}" + " ".join(cells))


if __name__ == "__main__":
    blocks = {"3 4 5": 3, "4 5 6": 3, "6 7 8": 3}
    draw("training: a context of 8 positions, blocks of 3 at the anchors 3, 4 and 6",
         dflash_training(torch.tensor([[3, 4, 6]]), 8, 3), blocks, {"0 1 2 3 4 5 6 7": 8, **blocks})
    ancestors = torch.eye(5).bool()
    ancestors[1:, 0] = ancestors[3:, 1] = True
    draw("verification: a tree of drafts behind a context of 4: anchor a, behind it b or c, behind b d or e",
         tree(torch.tensor([4]), ancestors[None]), dict.fromkeys("abcde", 1), {"0 1 2 3": 4, "a b c d e": 5})
