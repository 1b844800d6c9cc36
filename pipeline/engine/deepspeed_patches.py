"""Every change of DeepSpeed's own code or objects, and the version that it was tested with.

`PATCHES` lists them: what is replaced, why, and the test that fails without it. No other file sets an
attribute of DeepSpeed that is private, or replaces one of its functions. What DeepSpeed offers for the
purpose (its configuration, counters such as `global_steps`) is set where it is needed.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.engine import EngineTimers
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from torch import Tensor

from pipeline.base.problems import job_error
from pipeline.engine.optimizer import clip_global_norm

TESTED_VERSION = "0.19.8"


def require_tested_version(installed: str = deepspeed.__version__) -> str | None:
    """Check the version of DeepSpeed before anything is built with it.

    Returns:
        A warning where it is a later patch release than the tested one; None where it is that one.

    Raises:
        JobError: it is another release, whose internals may have changed.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", installed)
    here = tuple(int(number) for number in found.groups()) if found else ()
    tested = tuple(int(number) for number in TESTED_VERSION.split("."))
    if here == tested:
        return None
    if here[:2] == tested[:2] and here > tested:
        return f"DeepSpeed {installed} is later than the tested release {TESTED_VERSION}"
    rule = f"the pipeline changes internals of DeepSpeed and was tested with {TESTED_VERSION} only"
    remedy = f"Install deepspeed=={TESTED_VERSION}, as ./launch.sh --setup_only does"
    raise job_error("deepspeed", installed, rule, remedy)


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, attribute `name` of `target` is `value`."""
    own, former = name in vars(target), getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own:
            setattr(target, name, former)
        else:
            delattr(target, name)


def skip_inference_op() -> None:
    import deepspeed.comm.torch  # noqa: F401  (the name `deepspeed.comm.torch` is shadowed by `import torch`)

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def skip_recovery_script(engine: Any) -> None:
    engine._copy_recovery_script = lambda save_path: None


def time_stages_once(engine: Any) -> None:
    engine.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=False)


class GivenStages(PipelineModule):
    """A `PipelineModule` whose stage i holds layers ``boundaries[i]`` to ``boundaries[i + 1] - 1``."""

    def __init__(self, layers: Sequence[Any], boundaries: Sequence[int], **arguments: Any) -> None:
        self.parts = list(boundaries)
        super().__init__(layers=list(layers), **arguments)

    def _partition_layers(self, method: str = "given") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class GivenDualPipeVStages(DualPipeVModule, GivenStages):
    """The same for DualPipeV, whose ranks hold chunk r and chunk 2 * stages - 1 - r."""


def clip_fp32_before_update(engine: Any, clip: Callable[[], None]) -> None:
    update = engine._take_model_step

    def clip_and_update(*args: Any, **kwargs: Any) -> None:
        clip()
        update(*args, **kwargs)

    engine.clip_fp32_gradients = lambda: None
    engine._take_model_step = clip_and_update


class _Unsharded16BitOptimizer(FP16_UnfusedOptimizer):
    """16-bit weights with fp32 masters, without ZeRO, that scales and reports as ZeRO's optimizers do.

    Attributes:
        loss_scaler: DeepSpeed's, as in ZeRO's optimizers; in bf16 it scales nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, deepspeed: Any, **settings: Any) -> None:
        super().__init__(optimizer, deepspeed, **settings)
        self.loss_scaler = CreateLossScaler(
            settings["low_precision_dtype"],
            deepspeed.loss_scale(),
            deepspeed.dynamic_loss_scale(),
            deepspeed.dynamic_loss_scale_args(),
        )
        self.dynamic_loss_scale = self.loss_scaler.dynamic

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale  # type: ignore[no-any-return]

    def step(self, closure: None = None) -> None:
        """Update the masters, and the weights from them; where the norm is not finite, neither.

        Replicas have reduced their gradients and see the same; stages and tensor ranks sum their squares. The
        scale changes last: until then it is the one that the gradients were scaled by.
        """
        pairs = list(zip(chain(*self.fp16_groups), chain(*self.fp32_groups), strict=True))
        for weight, master in pairs:
            master.grad, weight.grad = weight.grad.float().div_(self.loss_scale), None
        gradients = [(weight, master.grad) for weight, master in pairs]
        group = self.mpu.get_model_parallel_group()
        self._global_grad_norm = clip_global_norm(gradients, group, self.clip_grad)
        self.overflow = not self._global_grad_norm.isfinite()
        if not self.overflow:
            self.optimizer.step()
            for weight, master in pairs:
                weight.data.copy_(master.data)
        for _, master in pairs:
            master.grad = None
        self.loss_scaler.update_scale(self.overflow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), LOSS_SCALER: self.loss_scaler}

    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        super().load_state_dict(state_dict, load_optimizer_states)
        # Earlier checkpoints, of bf16 only, have none.
        self.loss_scaler = state_dict.get(LOSS_SCALER, self.loss_scaler)


def with_own_16_bit_optimizer() -> contextlib.AbstractContextManager[None]:
    return replaced(deepspeed.runtime.engine, "FP16_UnfusedOptimizer", _Unsharded16BitOptimizer)


def scale_loss(engine: Any) -> None:
    optimizer = engine.optimizer
    engine.torch_autocast_z0_gradscaler = SimpleNamespace(
        scale=lambda loss: loss * optimizer.loss_scale,
        unscale_=lambda optimizer: None,
        step=lambda optimizer: optimizer.step(),
        update=lambda: None,
    )


def update_scale_last(optimizer: Any) -> None:
    step = optimizer.step

    def step_at_one_scale(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        optimizer.loss_scaler.update_scale(optimizer.overflow)

    optimizer._update_scale = lambda overflow: None
    optimizer.step = step_at_one_scale


def sum_norm_once(optimizer: Any) -> None:
    local_norm, reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        # What is not finite is infinite here, and so is the sum with it.
        squared = local_norm(norm_type).square()
        optimizer._model_parallel_all_reduce = reduce
        reduce(squared, dist.ReduceOp.SUM)
        return squared.sqrt()

    optimizer.scaled_global_norm = scaled_global_norm


def count_nothing_as_zero(optimizer: Any, device: torch.device) -> None:
    gradients = optimizer.get_grads_for_norm

    def gradients_or_zero(for_clipping: bool = False) -> Any:
        found = gradients(for_clipping)
        return found if for_clipping or found[0] else ([torch.zeros(1, device=device)], found[1])

    optimizer.get_grads_for_norm = gradients_or_zero


def average_tied_gradients_first(engine: Any, replicas: dist.ProcessGroup) -> None:
    def reduce_tied(engine: Any) -> None:
        for weight, _ in engine.module.get_tied_weights_and_groups():
            gradient = weight._hp_grad if engine.using_bf16_optimizer else weight.grad
            dist.all_reduce(gradient, group=replicas)
            gradient /= dist.get_world_size(replicas)
        engine._exec_reduce_tied_grads()

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceTiedGrads: reduce_tied}


def evaluating(engine: Any, micro_batches: int) -> contextlib.AbstractContextManager[None]:
    return replaced(engine, "micro_batches", micro_batches)


@contextlib.contextmanager
def saving_into(engine: Any, collector: Any, writes_weights: bool | None) -> Iterator[None]:
    """Inside, a save hands its files to `collector`, a `CheckpointEngine`.

    `writes_weights`: whether this rank's weights are among them, whatever replica it is; None: as DeepSpeed
    has it, whose first replica writes them.
    """
    partitioned = engine.zero_optimization_partition_weights()  # each rank has its own then
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(engine, "checkpoint_engine", collector))
        if writes_weights is not None and not partitioned:
            stack.enter_context(replaced(engine, "save_non_zero_checkpoint", writes_weights))
            if isinstance(engine.module, PipelineModule):
                replica = 0 if writes_weights else 1
                stack.enter_context(replaced(engine.module._grid, "data_parallel_id", replica))
                # Replicas that share the layers out would leave a part of them on every host.
                stack.enter_context(replaced(engine.module, "checkpoint_parallel_write_pipeline", False))
        yield


@contextlib.contextmanager
def loading_own_files(engine: Any) -> Iterator[None]:
    def own_names(folder: str, tag: str) -> list[str]:
        return [engine._get_ckpt_name(folder, tag)] * engine.mp_world_size

    module = engine.module
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(engine, "_get_all_ckpt_names", own_names))
        if isinstance(module, PipelineModule):
            slices = module._grid.get_slice_parallel_world_size()
            own_layer = module.ckpt_layer_path
            paths = lambda folder, layer: [own_layer(folder, layer)] * slices  # noqa: E731
            stack.enter_context(replaced(module, "ckpt_layer_path_list", paths))
        yield


def loading_with(engine: Any, load: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    return replaced(engine.checkpoint_engine, "load", load)


class Patch(NamedTuple):
    """One change of DeepSpeed.

    Attributes:
        apply: The function, context manager or class above that makes it.
        replaces: What is replaced in DeepSpeed, by dotted names, or the attribute of an engine that is set.
        reason: Why DeepSpeed's own does not do.
        test: The test that fails without it.
    """

    apply: Callable[..., Any]
    replaces: tuple[str, ...]
    reason: str
    test: str


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine."
_PIPE = "deepspeed.runtime.pipe."
_ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer."
_ZERO_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3."
_LAYOUT = "tests/parity/test_layouts.py::test_layout_trains_as_one_process"
_FURTHER = "tests/parity/test_layouts.py::test_further_layout_trains_as_one_process"

PATCHES = (
    Patch(
        skip_inference_op,
        ("deepspeed.comm.torch.build_shm_op",),
        "On CPUs it compiles an operator for inference: one or two minutes and a compiler, and a process "
        "that is killed meanwhile leaves a lock on which every later start waits for ever. The backend "
        "accepts None.",
        "tests/engine/test_deepspeed_patches.py::test_no_operator_is_compiled_on_cpus",
    ),
    Patch(
        skip_recovery_script,
        (_ENGINE + "_copy_recovery_script",),
        "The script it puts beside checkpoints merges ZeRO shards only, not pipeline stages or tensor "
        "slices.",
        "tests/engine/test_deepspeed_patches.py::test_no_script_is_put_beside_checkpoints",
    ),
    Patch(
        time_stages_once,
        ("deepspeed.runtime.engine.EngineTimers",),
        "With wall_clock_breakdown the pipeline engine starts the timers of a backward pass, and hooks of "
        "the engine that it is derived from start them again, which is an error.",
        "tests/end_to_end/test_passed_keys.py::test_all_keys_that_act_train_together[1f1b-0-fp32]",
    ),
    Patch(
        GivenStages,
        (_PIPE + "module.PipelineModule._partition_layers",),
        "DeepSpeed searches stage boundaries by building every layer; the job has decided them before.",
        _FURTHER + "[pp2 zero0 accumulation=2 clip=0.05 partition=2-5]",
    ),
    Patch(
        GivenDualPipeVStages,
        (_PIPE + "dualpipev.DualPipeVModule",),
        "As before, for the schedule DualPipeV.",
        _LAYOUT + "[pp2 zero0 accumulation=4 clip=0.05 schedule=dualpipev]",
    ),
    Patch(
        clip_fp32_before_update,
        (_ENGINE + "clip_fp32_gradients", _ENGINE + "_take_model_step"),
        "In fp32 without ZeRO, DeepSpeed reports no norm unless it clips, and counts other parameters on a "
        "pipeline. A second clip at the same maximum would shrink the gradients by another 1e-6 / maximum.",
        _LAYOUT + "[one zero0 accumulation=4 clip=0.05]",
    ),
    Patch(
        with_own_16_bit_optimizer,
        ("deepspeed.runtime.engine.FP16_UnfusedOptimizer",),
        "Without ZeRO, DeepSpeed sums the norm of 16-bit gradients group by group, so that stages with other "
        "groups wait for ever, and looks for the marks of parameters on gradients, which have none: tensor "
        "ranks but the first count nothing, tied copies count twice. The norm that it reports is scaled, it "
        "divides gradients by the scale of the next step, and it knows no hysteresis.",
        _LAYOUT + "[tp2 zero0 fp16]",
    ),
    Patch(
        scale_loss,
        (_ENGINE + "backward", "DeepSpeedEngine.torch_autocast_z0_gradscaler"),
        "DeepSpeed scales the loss for ZeRO's optimizers and torch's autocast only. Without ZeRO, gradients "
        "of fp16 weights are divided by a scale that nothing has multiplied the loss by.",
        _LAYOUT + "[pp2 zero0 accumulation=2 clip=0.05 fp16]",
    ),
    Patch(
        update_scale_last,
        (_ZERO + "_update_scale", _ZERO + "step", _ZERO_3 + "_update_scale", _ZERO_3 + "step"),
        "ZeRO's optimizers change the loss scale before they divide by it: whenever it doubles, that step's "
        "gradients, and at stage 3 the norm that is reported, are half as large as they should be.",
        _FURTHER + "[dp2 zero3 fp16]",
    ),
    Patch(
        sum_norm_once,
        (_ZERO + "scaled_global_norm", _ZERO + "_model_parallel_all_reduce"),
        "ZeRO 1 over stages reduces once for each parameter group. A stage with nothing but an embedding "
        "has no norms or biases, hence a group less than the others, which then wait for it without end.",
        _FURTHER + "[pp2 zero1 accumulation=2 model=llama clip=0.05 partition=2-5]",
    ),
    Patch(
        count_nothing_as_zero,
        ("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.get_grads_for_norm",),
        "The bf16 optimizer's sum fails on a stage that counts no gradient itself: one with the output layer "
        "alone, whose weight is tied to the embedding and counts there.",
        _FURTHER + "[pp2 zero1 accumulation=2 clip=0.05 partition=6-1 bf16]",
    ),
    Patch(
        average_tied_gradients_first,
        (_PIPE + "engine.PipelineEngine._INSTRUCTION_MAP",),
        "DeepSpeed adds a tied weight's gradients over stages first and averages them with all others in "
        "one buffer, in which the two copies lie at different places. Where an element lies decides in "
        "which order three or more replicas are added, so the copies would drift apart by rounding. "
        "Averaged first, alone, both get the same bits, and averaging equal values again does not change "
        "them.",
        "tests/parity/test_mutations.py::test_further_mutation_is_noticed"
        "[tied_gradients_are_added_before_they_are_averaged-pp2-dp3 zero1 accumulation=2 model=five layers]",
    ),
    Patch(
        evaluating,
        ("PipelineEngine.micro_batches",),
        "DualPipeV numbers its buffers by the engine's own count of micro-batches, whatever it is asked to"
        " run.",
        _LAYOUT + "[pp2 zero0 accumulation=4 clip=0.05 schedule=dualpipev]",
    ),
    Patch(
        saving_into,
        (
            "DeepSpeedEngine.checkpoint_engine",
            "DeepSpeedEngine.save_non_zero_checkpoint",
            "PipelineParallelGrid.data_parallel_id",
            "PipelineModule.checkpoint_parallel_write_pipeline",
        ),
        "Files are written in the background, with digests, and on each host where hosts share no disk.",
        "tests/checkpoints/test_separate_hosts.py::test_each_host_keeps_its_own_and_gets_what_it_needs",
    ),
    Patch(
        loading_own_files,
        (_ENGINE + "_get_all_ckpt_names", _PIPE + "module.PipelineModule.ckpt_layer_path_list"),
        "DeepSpeed counts the files of other model-parallel ranks and uses its own only; on a host with a "
        "disk of its own the others are elsewhere.",
        "tests/checkpoints/test_separate_hosts.py::test_each_host_keeps_its_own_and_gets_what_it_needs",
    ),
    Patch(
        loading_with,
        ("DeepSpeedEngine.checkpoint_engine.load",),
        "DeepSpeed unpickles its files, and a pickle may call anything.",
        "tests/checkpoints/test_unpickling.py::test_deepspeeds_own_loading_and_a_conversion_run_nothing",
    ),
)
