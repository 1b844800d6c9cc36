"""What the fork server of CPU ranks imports once, for all of them; nothing else may import it.

DeepSpeed warns while it is imported, and later imports cannot undo what is silenced before.
"""

from pipeline.training.quiet import quiet_deepspeed

quiet_deepspeed(1)

import benchmarks.contenders  # noqa: E402, F401
