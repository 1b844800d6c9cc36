"""The matrix can fail: break one thing, and the comparison that passed without it must tell."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.covering import first_fast, slow
from tests.harness import run_ranks
from tests.parity import mutations
from tests.parity.cases import Case
from tests.parity.compare import differences, replica_differences
from tests.parity.layouts import CLIP, FAST, FP16, SLOW
from tests.parity.ranks import Mutation, train_rank

TENSOR = Case(tensor=2)
SEQUENCE = Case(sequence=2)
ACCUMULATED = Case(accumulation=4, **CLIP)
PIPELINE = Case(pipeline=2, accumulation=4)

# Each with the layout that must notice it; every one of these layouts is in the matrix.
FAST_MUTATIONS = (
    (mutations.no_sum_after_row_parallel, TENSOR),
    (mutations.mean_of_rank_means, Case(data=2)),
    (mutations.all_to_all_stays_at_home, SEQUENCE),
    (mutations.tied_gradient_stays_on_its_stage, PIPELINE),
    (mutations.no_sum_after_embedding, TENSOR),
    (mutations.no_gradient_sum_before_column_parallel, TENSOR),
    (mutations.positions_start_at_zero, SEQUENCE),
    (mutations.labels_are_cut_before_the_shift, SEQUENCE),
    (mutations.gradient_times_accumulation, ACCUMULATED),
    (mutations.gradients_are_not_averaged, Case(data=2)),
    (mutations.loss_is_not_scaled, Case(tensor=2, **FP16)),
)

_FP16_PIPELINE = Case(pipeline=2, accumulation=2, **FP16, **CLIP)
_QK_NORM = Case(tensor=2, zero=3, model="qk norm", **CLIP)
SLOW_MUTATIONS = (
    (mutations.no_gradient_sum_before_output_layer, TENSOR),
    (mutations.no_gradient_sum_of_query_key_norms, _QK_NORM),
    (mutations.backward_of_copy_to_does_not_sum, TENSOR),
    (mutations.no_maximum_of_logits, TENSOR),
    (mutations.no_sum_of_label_logits, TENSOR),
    (mutations.no_sum_of_exponentials, TENSOR),
    (mutations.all_to_all_stays_at_home, Case(sequence=2, zero=1, model="llama")),
    (mutations.positions_start_at_zero, Case(sequence=2, model="dropout", recompute="full")),
    (mutations.loss_times_accumulation, ACCUMULATED),
    (mutations.loss_times_accumulation, PIPELINE),
    (mutations.gradient_times_accumulation, PIPELINE),
    (mutations.gradient_times_accumulation, Case(data=2, zero=1, accumulation=4, **CLIP)),
    (mutations.mean_of_rank_means, ACCUMULATED),
    (mutations.mean_of_rank_means, PIPELINE),
    (mutations.mean_of_rank_means, SEQUENCE),
    (mutations.tied_gradient_stays_on_its_stage, Case(pipeline=2, tensor=2, zero=1, accumulation=2, **CLIP)),
    (
        mutations.tied_gradients_are_added_before_they_are_averaged,
        Case(pipeline=2, data=3, batch=12, zero=1, accumulation=2, model="five layers"),
    ),
    (mutations.every_copy_counts_in_the_norm, Case(tensor=2, model="five layers", zero=0, **CLIP)),
    (mutations.every_copy_counts_in_the_norm, Case(tensor=2, zero=1, model="qk norm", **CLIP)),
    (mutations.every_copy_counts_in_the_norm, Case(tensor=2, zero=2, model="qk norm", **CLIP)),
    (mutations.every_copy_counts_in_the_norm, _QK_NORM),
    (mutations.every_copy_counts_in_the_norm, PIPELINE),
    (mutations.every_copy_counts_in_the_norm, Case(pipeline=2, tensor=2, zero=1, accumulation=2, **CLIP)),
    (mutations.gradients_are_not_averaged, SEQUENCE),
    (mutations.clipped_twice, Case(accumulation=4, clip=0.002, learning_rate=250.0)),
    (mutations.loss_is_not_scaled, _FP16_PIPELINE),
    (
        mutations.loss_is_not_scaled,
        Case(pipeline=2, accumulation=4, scaling="kept", schedule="dualpipev", **FP16),
    ),
    (mutations.deepspeeds_own_16_bit_optimizer, Case(tensor=2, precision="bf16", accumulate="bf16", **CLIP)),
    (mutations.deepspeeds_own_16_bit_optimizer, Case(scaling="kept", **FP16)),
    (mutations.deepspeeds_own_16_bit_optimizer, _FP16_PIPELINE),
    *(
        (mutations.scale_changes_before_gradients_are_divided_by_it, Case(data=2, zero=stage, **FP16))
        for stage in (1, 2, 3)
    ),
    (mutations.scale_never_changes, Case(tensor=2, **FP16)),
    (mutations.norm_is_not_summed_over_stages_and_slices, Case(tensor=2, **FP16)),
    (mutations.norm_is_not_summed_over_stages_and_slices, _FP16_PIPELINE),
    (mutations.gradients_that_do_not_count_may_overflow, Case(tensor=2, **FP16)),
    (mutations.dropout_ignores_the_micro_batch, Case(model="dropout", accumulation=4)),
)


def name(value: Mutation | Case) -> str:
    return value.id if isinstance(value, Case) else value.__name__


def check(mutation: Mutation, case: Case, folder: Path) -> None:
    runs = run_ranks(train_rank, case.world_size, case, case.job(folder), mutation)
    assert sum(run.calls for run in runs) > 0, "the patched code never ran"
    found = [*differences(case, runs), *replica_differences(runs)]
    # Written so that NaN counts. Five times the tolerance: no case passes by luck.
    assert any(not difference.size <= 5 * difference.allowed for difference in found), found


@pytest.mark.parametrize(("mutation", "case"), first_fast(FAST_MUTATIONS, 4), ids=name)
def test_mutation_is_noticed(mutation: Mutation, case: Case, tmp_path: Path):
    check(mutation, case, tmp_path)


def noticed_where(row: tuple[Mutation, Case]) -> set[Hashable]:
    """Each mutation, in pipelines and out of them; elsewhere it is a repeat."""
    mutation, case = row
    return {(mutation.__name__, case.pipeline > 1)}


@pytest.mark.parametrize(
    "row", slow(FAST_MUTATIONS, SLOW_MUTATIONS, noticed_where), ids=lambda row: "-".join(map(name, row))
)
def test_further_mutation_is_noticed(row: tuple[Mutation, Case], tmp_path: Path):
    check(*row, tmp_path)


def test_every_mutated_layout_is_in_the_matrix_and_every_mutation_is_used():
    pairs = (*FAST_MUTATIONS, *SLOW_MUTATIONS)
    assert {case for _, case in pairs} <= {*FAST, *SLOW}
    used = {mutation.__name__ for mutation, _ in pairs}
    public = {key for key, value in vars(mutations).items() if _is_mutation(key, value)}
    assert used == public


def _is_mutation(key: str, value: object) -> bool:
    return not key.startswith("_") and getattr(value, "__module__", "") == mutations.__name__
