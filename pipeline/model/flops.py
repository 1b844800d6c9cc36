"""Floating-point operations of training, counted from the model's sizes. No torch.

Counted is what the mathematics needs (model FLOPs, as PaLM's appendix B defines them for MFU): matrix
products, a multiply-add being 2. The backward pass of a product is two products of the same size, so that
training costs three times the forward pass. Recomputed activations are not counted, nor are norms,
activations, softmax and the embedding look-up, which are below 1 % together. Unlike there, attention
counts causally: a token attends to half the sequence on average, and a kernel that skips the rest did less.

Worked for gpt2-124m at 1,024 tokens, forward, per token:

    per block   q, k, v       2 * 768 * 3 * 768          =   3,538,944
                scores, mix   2 * 2 * 12 * 64 * 1024 / 2 =   1,572,864
                output        2 * 768 * 768              =   1,179,648
                feed-forward  2 * 2 * 768 * 3072         =   9,437,184
    12 blocks                 12 * 15,728,640            = 188,743,680
    vocabulary                2 * 768 * 50257            =  77,194,752
    forward                                              = 265,938,432
    training                  3 * forward                = 797,815,296

The usual 6 FLOPs per parameter (Kaplan et al. 2020, section 2.1) would be 746.6 M: it has no attention, but
the position table.
"""

from __future__ import annotations

from pipeline.model.config import ModelConfig

# A backward pass computes the gradient of both factors of each product.
TRAINING_OVER_FORWARD = 3


def block_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward FLOPs of one transformer block for one token."""
    hidden = model.hidden_size
    query_width = model.num_heads * model.head_dim
    qkv_width = query_width + 2 * model.num_kv_heads * model.head_dim
    up_width = (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size
    projections = 2 * hidden * (qkv_width + query_width)
    feed_forward = 2 * hidden * (up_width + model.ffn_hidden_size)
    return projections + feed_forward + _attention_flops_per_token(query_width, sequence_length)


def _attention_flops_per_token(query_width: int, sequence_length: int) -> float:
    """Scores and weighted sum of values, each 2 * query width per visible token. Grouped key/value heads
    save memory, not products: each query head meets all of its group's keys."""
    visible = sequence_length / 2
    return 2 * 2 * query_width * visible


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward FLOPs for one token; vocabulary padding is not counted."""
    output = 2 * model.hidden_size * model.vocab_size
    return model.num_layers * block_flops_per_token(model, sequence_length) + output


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token in sequences of `sequence_length`."""
    return TRAINING_OVER_FORWARD * forward_flops_per_token(model, sequence_length)
