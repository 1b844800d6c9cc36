"""Bytes that a rank holds while it trains, in closed formulas. No torch.

P is the parameters of a rank's stage and tensor slice, n its replicas (data x sequence ranks, over which ZeRO
shards), w the bytes of a weight, a those of a gradient sum, k the optimizer's moments (2 for Adam). The paper
of ZeRO (Rajbhandari et al. 2020, section 3.1) counts 2 + 2 + 12 bytes a parameter for Adam in 16 bit.
DeepSpeed 0.19.8 keeps more copies and shards other things; which of its optimizers runs decides:

    optimizer                    weights  gradients       fp32 masters  moments
    none (fp32, ZeRO 0)          4 P      4 P             -             4 k P
    unfused 16-bit (ZeRO 0)      2 P      2 P             4 P           4 k P
    BF16_Optimizer               2 P      2 P + a P       4 P / n       4 k P / n
    ZeRO 1 (stage_1_and_2.py)    w P      a P             4 P / n       4 k P / n
    ZeRO 2 (stage_1_and_2.py)    w P      a P / n         4 P / n       4 k P / n
    ZeRO 3 (stage3.py)           w P / n  a P / n         4 P / n       4 k P / n

- BF16_Optimizer serves ZeRO 1 with bf16 weights and fp32 sums, and ZeRO 0 in bf16 on a pipeline. It keeps the
  gradients in both formats until the update.
- ZeRO's masters are a copy in fp32, too: the partition is cloned, whatever the weights' format.
- Gradients are what lies between two micro-batches of a step. At ZeRO 1 all are there before one is reduced.
- Offloaded optimizer state takes masters, moments, fp32 gradients (4 P / n) and, at ZeRO 1 and 2, one more
  copy of the weights (w P / n) in host memory. The gradients of ZeRO 3 go there as well, those of ZeRO 2 if
  they have the weights' format. State on NVMe drives is counted nowhere.
- Buffers: for reduction, in the format of the sum (with overlap_comm two, at ZeRO 1 and 2); for offload at
  these stages the largest parameter, on both sides; at ZeRO 3 the weights that are gathered for use.

Activations are what autograd keeps of this model's operations, per token of a micro-batch, with h the width,
q, k, v and f the widths of queries, keys, values and feed-forward layer, and t the tensor size:

    norms and their outputs       4 h                     a tensor rank holds them whole
    attention                     (2 q + k + v) / t       and (q + k) / t where positions are rotated
    feed-forward                  2 f / t                 SwiGLU: 4 f / t

(compare Korthikanti et al. 2022, section 4: a fused attention keeps no scores). Recomputed attention keeps no
rotated copy; recomputed blocks keep their input, h, and one block at a time the rest. Of the p chunks of a
pipeline, chunk i has p - i micro-batches in flight, at most all (1F1B: Narayanan et al. 2021, section 2.2;
DualPipeV runs it over two chunks a rank). The last chunk has the logits of one micro-batch, in the weights'
format and, with their gradient, twice in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pipeline.model.config import ModelConfig
from pipeline.model.counts import LayerSize, layer_parameters, stage_parameters, widths
from pipeline.parallel.mesh import Mesh

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32 = 4
Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class Training:
    """Everything beside the model that decides what a rank holds.

    Attributes:
        mesh: Parallel sizes.
        boundaries: Of the chunks in the layer list, one more than there are chunks.
        zero_stage: 0 to 3.
        compute, accumulation: Formats of weights and of gradient sums.
        moments: fp32 numbers that the optimizer keeps for each parameter.
        offload_optimizer, offload_parameters: Where these go.
        second_shard: Ranks of ZeRO++'s second shard of weights; 1: none.
        bucket: Elements of a reduction bucket; 0: none.
        buckets: How many of them.
        live: Elements of gathered weights at ZeRO 3, at most.
        micro_batch, micro_batches: Sequences of one, and how many a step has.
        sequence_length: Tokens of a sequence, not divided.
        recompute: ``none``, ``selective`` or ``full``.
    """

    mesh: Mesh
    boundaries: tuple[int, ...]
    zero_stage: int
    compute: str
    accumulation: str
    moments: int
    offload_optimizer: Offload
    offload_parameters: Offload
    second_shard: int
    bucket: int
    buckets: int
    live: int
    micro_batch: int
    micro_batches: int
    sequence_length: int
    recompute: str

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer wraps the optimizer."""
        if self.compute != "bf16" or self.offload_optimizer != "none":
            return False
        if self.zero_stage == 0:
            return self.mesh.pipeline > 1
        return self.zero_stage == 1 and self.accumulation == "fp32"

    @property
    def copies_parameters(self) -> bool:
        """Whether gradients pass through buffers of one parameter on their way to the host."""
        return self.offload_optimizer != "none" and self.zero_stage < 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        stage: The rank's pipeline stage.
        weights, gradients, masters, moments: What a step begins with, on the device.
        buffers, activations, logits: What it needs besides, at most.
        host: In host memory, for what is offloaded.
    """

    stage: int
    weights: int
    gradients: int
    masters: int
    moments: int
    buffers: int
    activations: int
    logits: int
    host: int

    @property
    def state(self) -> int:
        """What cannot be less."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        """With all that a step needs besides."""
        return self.state + self.buffers + self.activations + self.logits


def rank_memory(model: ModelConfig, training: Training) -> RankMemory:
    """The rank that holds most: one of the stage where the sum is largest."""
    return max((_stage_memory(model, training, stage) for stage in range(training.mesh.pipeline)),
               key=lambda memory: memory.total)  # fmt: skip


def _stage_memory(model: ModelConfig, training: Training, stage: int) -> RankMemory:
    layers = layer_parameters(model)
    chunks = [layers[start:end] for start, end in pairwise(training.boundaries)]
    own = [stage] if len(chunks) == training.mesh.pipeline else [stage, len(chunks) - 1 - stage]
    held = [layer for chunk in own for layer in chunks[chunk]]
    parameters = -(-stage_parameters(held) // training.mesh.tensor)
    state = _state(parameters, training)
    if training.copies_parameters:
        state["host"] += _largest(model, training)
    activations = sum(
        _chunk_activations(model, training, chunks[chunk], min(len(chunks) - chunk, training.micro_batches))
        for chunk in own
    )
    logits = _logits(model, training) if held[-1].name == "output" else 0
    return RankMemory(
        stage, buffers=_buffers(parameters, model, training), activations=activations, logits=logits, **state
    )


def _state(parameters: int, training: Training) -> dict[str, int]:
    """Weights, gradients, masters, moments and host bytes, as in the table."""
    stage, weight, gradient = training.zero_stage, BYTES[training.compute], BYTES[training.accumulation]
    shard = -(-parameters // training.mesh.replicas)
    if stage == 0 and not training.uses_bf16_optimizer:
        masters = 0 if training.compute == "fp32" else _FP32 * parameters
        return {"weights": weight * parameters, "gradients": weight * parameters, "masters": masters,
                "moments": _FP32 * training.moments * parameters, "host": 0}  # fmt: skip
    weights = weight * (shard if stage == 3 else parameters)
    gradients = gradient * (shard if stage >= 2 else parameters)
    if training.uses_bf16_optimizer:
        gradients += weight * parameters
    masters, moments, host = _FP32 * shard, _FP32 * training.moments * shard, 0
    if training.offload_optimizer != "none":
        moved = gradients if stage == 3 or (stage == 2 and gradient == weight) else 0
        copy = weight * shard if stage < 3 else 0
        host = moved + copy + _FP32 * shard
        host += masters + moments if training.offload_optimizer == "cpu" else 0
        gradients, masters, moments = gradients - moved, 0, 0
    if training.offload_parameters != "none":
        host += weights if training.offload_parameters == "cpu" else 0
        weights = 0
    if training.second_shard > 1:
        weights += weight * -(-parameters // training.second_shard)
    return {
        "weights": weights, "gradients": gradients, "masters": masters, "moments": moments, "host": host
    }  # fmt: skip


def _buffers(parameters: int, model: ModelConfig, training: Training) -> int:
    reduction = BYTES[training.accumulation] * training.bucket * training.buckets
    gathered = BYTES[training.compute] * min(training.live, parameters)
    return reduction + gathered + (_largest(model, training) if training.copies_parameters else 0)


def _largest(model: ModelConfig, training: Training) -> int:
    """Bytes of the largest parameter of a tensor rank."""
    rows = max(model.padded_vocab_size, *widths(model))
    return BYTES[training.compute] * rows * model.hidden_size // training.mesh.tensor


def _chunk_activations(
    model: ModelConfig, training: Training, layers: Sequence[LayerSize], in_flight: int
) -> int:
    """Of the blocks of a chunk, in all micro-batches in flight; embedding and final norm are too small."""
    tokens = training.micro_batch * -(-training.sequence_length // training.mesh.sequence)
    blocks = sum(layer.name.startswith("block") for layer in layers)
    whole = _block_elements(model, training)
    kept = model.hidden_size if training.recompute == "full" else whole
    running = whole if training.recompute == "full" and blocks else 0
    return BYTES[training.compute] * tokens * (blocks * kept * in_flight + running)


def _block_elements(model: ModelConfig, training: Training) -> int:
    """Elements that autograd keeps of one block, for each token of a rank."""
    query, qkv, up = widths(model)
    attention = qkv + query
    if model.position == "rotary" and training.recompute != "selective":
        attention += (qkv + query) // 2  # q and k, turned
    if model.attention_dropout > 0 and training.recompute != "selective":
        # Probabilities in fp32 and, with the mask and their product, three times in the weights' format.
        attention += 5 * model.num_heads * training.sequence_length
    inner = up + (2 if model.activation == "swiglu" else 1) * model.ffn_hidden_size
    return 4 * model.hidden_size + (attention + inner) // training.mesh.tensor


def _logits(model: ModelConfig, training: Training) -> int:
    tokens = training.micro_batch * -(-training.sequence_length // training.mesh.sequence)
    columns = model.padded_vocab_size // training.mesh.tensor
    return tokens * columns * (BYTES[training.compute] + 2 * _FP32)
