"""A short text from the model as it stands, in whatever layout it trains."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.data.tokenizer import Tokenizer
from pipeline.engine.engine import TrainEngine
from pipeline.job.job import Job

TEMPERATURE = 0.7


def sample_text(engine: TrainEngine, job: Job, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """`prompt` continued by `count` sampled tokens (fewer where a document ends). Collective.

    Each token costs a forward pass over a whole sequence: fine for a look at a model, slow for more.
    """
    generator = torch.Generator().manual_seed(job.seed)
    length = job.batch.sequence_length
    text = tokenizer.encode(prompt).tolist()
    for _ in range(count):
        window = torch.tensor(text[-length:])
        tokens = torch.zeros(job.batch.micro_batch_size, length, dtype=torch.int64)
        tokens[0, : len(window)] = window
        logits = engine.next_token_logits(tokens.to(engine.deepspeed.device), len(window) - 1)
        chosen = torch.multinomial(torch.softmax(logits.cpu() / TEMPERATURE, -1), 1, generator=generator)
        if engine.parallel.control_group is not None:
            dist.broadcast(chosen, src=0, group=engine.parallel.control_group)
        if int(chosen) == tokenizer.end_of_document:
            break
        text.append(int(chosen))
    return tokenizer.decode(text)
