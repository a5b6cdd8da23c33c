"""The block arithmetic of vLLM's hybrid memory pool (v1 engine, 0.33).

Attention layers and recurrent layers draw blocks from one pool. A block's size in tokens is chosen so that one page of
attention KV is at least as large as one recurrent state with its convolution rows; layers of equal kind form groups of
equal size, and a request holds blocks in every group. All sizes are per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from lab.methods.base import LayerHeads, StateMethod
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import ceil_div

#: Smallest kernel block in tokens; multi-head latent attention needs 128.
KERNEL_BLOCK_TOKENS = 16
MLA_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Geometry of the pool for one model, tensor-parallel size, data types, method and tree.

    `state_blocks_per_group` are the blocks that a running request holds in each recurrent group: one per dense state,
    one more in mode align (prefix caching), where a finished block's state outlives the block boundary.
    """

    block_size_tokens: int
    token_bytes_layer: int
    state_bytes_layer: int
    conv_bytes_layer: int
    group_size: int
    attention_groups: int
    attention_layers: int
    drafter_layers: int
    linear_groups: int
    linear_layers: int
    states_per_group: int
    state_blocks_per_group: int
    scratch_bytes_per_request: int

    @property
    def page_bytes_layer(self) -> int:
        """One layer's page: attention KV of a block, to which a state with its convolution rows is padded."""
        return self.block_size_tokens * self.token_bytes_layer

    @property
    def padding_fraction(self) -> float:
        """Share of the page that padding adds to a state with its convolution rows."""
        held = self.state_bytes_layer + self.conv_bytes_layer
        return self.page_bytes_layer / held - 1 if held else 0.0

    @property
    def bytes_per_block(self) -> int:
        return self.group_size * self.page_bytes_layer

    @property
    def state_blocks_per_request(self) -> int:
        return self.linear_groups * self.state_blocks_per_group

    def attention_blocks(self, tokens: int) -> int:
        """Attention blocks of a request of `tokens` tokens, over all attention groups."""
        return self.attention_groups * ceil_div(tokens, self.block_size_tokens)

    def blocks_per_request(self, tokens: int) -> int:
        """All blocks of one running request of `tokens` tokens."""
        return self.attention_blocks(tokens) + self.state_blocks_per_request


def pool_layout(
    shape: ModelShape,
    tp: int,
    kv_dtype: str,
    state_dtype: str,
    method: StateMethod,
    tree: DraftTree,
    *,
    prefix_caching: bool = False,
) -> PoolLayout:
    """Pool geometry; raises `UsageError` when TP does not divide the heads or the method cannot take the tree.

    The drafting layers join the attention layers when drafts are made. The convolution rows of a page count every
    draft, whatever the method.
    """
    shape.check_tensor_parallel(tp)
    method.check_tree(tree)
    drafts = tree.num_drafts
    token_bytes = shape.kv_bytes_per_token_layer(kv_dtype, tp)
    state_bytes = shape.state_bytes_layer(state_dtype, tp)
    conv_bytes = shape.conv_bytes_layer(tp, extra_rows=drafts)
    align = MLA_BLOCK_TOKENS if shape.kv_lora_rank else KERNEL_BLOCK_TOKENS
    block = align * max(ceil_div(state_bytes + conv_bytes, align * token_bytes), 1)
    drafter_layers = shape.drafting_layers if drafts else 0
    attention_layers = shape.num_full_layers + drafter_layers
    small, large = sorted((attention_layers, shape.num_linear_layers))
    group_size = large if large < 1.5 * small or small == 0 else small
    states = method.pool_states(tree)
    scratch = method.pool_scratch_bytes(LayerHeads.of(shape, state_dtype, tp), tree)
    return PoolLayout(
        block_size_tokens=block,
        token_bytes_layer=token_bytes,
        state_bytes_layer=state_bytes,
        conv_bytes_layer=conv_bytes,
        group_size=group_size,
        attention_groups=ceil_div(attention_layers, group_size),
        attention_layers=attention_layers,
        drafter_layers=drafter_layers,
        linear_groups=ceil_div(shape.num_linear_layers, group_size),
        linear_layers=shape.num_linear_layers,
        states_per_group=states,
        state_blocks_per_group=states + (1 if prefix_caching else 0),
        scratch_bytes_per_request=scratch * shape.num_linear_layers,
    )


def max_concurrency(num_blocks: int, blocks_per_request: int) -> Fraction:
    """How many requests of `max_model_len` the pool holds, as the engine's log counts it."""
    return Fraction(num_blocks, blocks_per_request)


def kv_cache_tokens(num_blocks: int, blocks_per_request: int, max_model_len: int) -> int:
    """ "GPU KV cache size" of the log: maximum concurrency times `max_model_len`, in the log's own float arithmetic."""
    return int(num_blocks / blocks_per_request * max_model_len)


def kv_cache_tokens_before_0_20(num_blocks: int, groups: int, block_size_tokens: int) -> int:
    """The log's older count: blocks per group times the block size, blind to recurrent state (vLLM pull 40694)."""
    return num_blocks // groups * block_size_tokens


def max_concurrency_running_scratch(
    num_blocks: int, blocks_per_request: int, max_num_seqs: int, linear_groups: int, drafts: int
) -> Fraction:
    """Concurrency when speculative blocks are reserved once per running request (proposed, vLLM pull 57261)."""
    scratch = linear_groups * drafts
    return Fraction(num_blocks - max_num_seqs * scratch, blocks_per_request - scratch)


def requested_bytes(total_bytes: int, gpu_memory_utilization: float) -> int:
    """Bytes of device memory the engine may use."""
    return math.ceil(total_bytes * gpu_memory_utilization)
